//! Joins MLX's process groups: writes the group's settings into the variables and files that [`environment`]
//! has prepared before the process started.

use std::{ffi::OsStr, net::SocketAddr, time::Duration};

use russet_mlx::distributed::ProcessGroup;
use russet_model::partition::RankPart;

use super::environment;
use crate::{
    executor::Addresses, jaccl, jaccl::Devices, layers::tensor_parallel::TpGroup, step_profiler::StepProfiler,
};

/// The last member of a ring connects to the first one before it listens itself, and after a refusal MLX
/// waits a whole second; this delay gives the others time to listen.
const CONNECT_DELAY: Duration = Duration::from_millis(50);

/// Process groups of one rank.
#[derive(Debug, Default)]
pub(super) struct MlxGroups {
    /// Tensor parallel group of its stage.
    pub(super) tensor: TpGroup,
    /// Pipeline group: the same tensor rank of every stage.
    pub(super) pipeline: Option<ProcessGroup>,
}

/// Joins both groups of the rank of `part`, as far as it has them: the tensor group first, on all ranks.
/// `devices` are for a stage that uses RDMA. The profiler counts the traffic within the stage.
pub(super) fn join(
    part: &RankPart,
    addresses: &Addresses,
    devices: Option<&Devices>,
    meter: &StepProfiler,
) -> Result<MlxGroups, String> {
    let mut groups = MlxGroups::default();
    if part.tensor_size > 1 {
        let (own, size) = (part.tensor_index, part.tensor_size);
        let members = match devices {
            None => join_ring(own, size, &addresses.tensor)?,
            Some(devices) => join_jaccl(own, size, devices)?,
        };
        groups.tensor = TpGroup::new(members, meter.clone());
    }
    if part.stages > 1 {
        groups.pipeline = Some(join_ring(part.stage, part.stages, &addresses.pipeline)?);
    }
    Ok(groups)
}

fn join_ring(own: u32, size: u32, hosts: &[SocketAddr]) -> Result<ProcessGroup, String> {
    if hosts.len() != size as usize {
        return Err(format!("{} addresses were given for {size} ranks", hosts.len()));
    }
    let hostfile = environment::file_from_variable(environment::HOSTFILE)?;
    environment::write(&hostfile, &hostfile_text(hosts))?;
    if own + 1 == size {
        std::thread::sleep(CONNECT_DELAY);
    }
    join_backend("ring", own, size, (environment::HOSTFILE, hostfile.as_os_str()))
}

fn join_jaccl(own: u32, size: u32, devices: &Devices) -> Result<ProcessGroup, String> {
    let file = environment::file_from_variable(environment::DEVICES)?;
    environment::write(&file, &devices.devices_file())?;
    join_backend("jaccl", own, size, (environment::DEVICES, file.as_os_str()))
}

fn join_backend(backend: &str, own: u32, size: u32, file: (&str, &OsStr)) -> Result<ProcessGroup, String> {
    let rank = own.to_string();
    let group = ProcessGroup::join(backend, &[(environment::RANK, OsStr::new(&rank)), file])
        .map_err(|error| jaccl::with_remedy(error.to_string()))?;
    if group.rank() != own as usize || group.size() != size as usize {
        return Err(format!(
            "MLX made it rank {} of {} instead of {own} of {size}",
            group.rank(),
            group.size()
        ));
    }
    Ok(group)
}

/// One list of addresses per rank; more than one address would mean parallel connections.
fn hostfile_text(hosts: &[SocketAddr]) -> String {
    let lists: Vec<[&SocketAddr; 1]> = hosts.iter().map(|host| [host]).collect();
    serde_json::json!(lists).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hostfile_is_a_list_of_lists() {
        let hosts = ["10.0.0.1:4000", "10.0.0.2:4000"].map(|host| host.parse().unwrap());
        assert_eq!(hostfile_text(&hosts), r#"[["10.0.0.1:4000"],["10.0.0.2:4000"]]"#);
    }
}
