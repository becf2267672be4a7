//! Joins MLX's process groups: writes the group's settings into the variables and files that [`environment`]
//! has prepared before the process started.

use std::{ffi::OsStr, net::SocketAddr, time::Duration};

use mlx_rs::Array;
use russet_mlx::{device, distributed::ProcessGroup};
use russet_model::partition::RankPart;
use russet_wire::engine_options::RouterBroadcast;
use sha2::{Digest as _, Sha256};

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
    broadcast: RouterBroadcast,
    meter: &StepProfiler,
) -> Result<MlxGroups, String> {
    let mut groups = MlxGroups::default();
    if part.tensor_size > 1 {
        let (own, size) = (part.tensor_index, part.tensor_size);
        let members = match devices {
            None => join_ring(own, size, &addresses.tensor)?,
            Some(devices) => join_jaccl(own, size, devices)?,
        };
        let broadcasts = match broadcast {
            RouterBroadcast::On => true,
            RouterBroadcast::Off => false,
            RouterBroadcast::Auto | RouterBroadcast::Unknown => has_unequal_chips(&members)?,
        };
        groups.tensor = TpGroup::new(members, meter.clone()).with_routing_broadcast(broadcasts);
    }
    if part.stages > 1 {
        groups.pipeline = Some(join_ring(part.stage, part.stages, &addresses.pipeline)?);
    }
    Ok(groups)
}

/// Whether the chips of a group's ranks have different names, of which one may round differently than another.
fn has_unequal_chips(group: &ProcessGroup) -> Result<bool, String> {
    let failed = |error: russet_mlx::Error| format!("cannot compare the chips of the ranks: {error}");
    let name = device::name().map_err(failed)?;
    let own = Array::from_slice(&[chip_number(&name)], &[1]);
    let all = group.all_gather(&own).map_err(failed)?;
    all.eval().map_err(|error| format!("cannot compare the chips of the ranks: {error}"))?;
    let numbers = all.try_as_slice::<u32>().map_err(|error| error.to_string())?;
    Ok(numbers.iter().any(|number| Some(number) != numbers.first()))
}

/// A number for the name of a chip, the same in every process.
fn chip_number(name: &str) -> u32 {
    let digest = Sha256::digest(name.as_bytes());
    digest.iter().take(4).fold(0, |number, byte| number << 8 | u32::from(*byte))
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
    fn chips_are_distinguished_by_their_names() {
        assert_eq!(chip_number("Apple M3 Ultra"), chip_number("Apple M3 Ultra"));
        assert_ne!(chip_number("Apple M3 Ultra"), chip_number("Apple M4 Max"));
    }

    #[test]
    fn the_hostfile_is_a_list_of_lists() {
        let hosts = ["10.0.0.1:4000", "10.0.0.2:4000"].map(|host| host.parse().unwrap());
        assert_eq!(hostfile_text(&hosts), r#"[["10.0.0.1:4000"],["10.0.0.2:4000"]]"#);
    }
}
