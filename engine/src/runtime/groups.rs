//! Joining MLX's groups: what a group is goes into the variables and files that [`environment`] named to
//! MLX before the process began.

use std::{ffi::OsStr, net::SocketAddr, time::Duration};

use russet_mlx::distributed::Group;
use russet_wire::partition::Part;

use super::environment;
use crate::{compute::Addresses, jaccl::Devices, layers::stage::Stage, meter::Meter};

/// The last of a ring connects to the first one first of all, and after a refusal MLX waits a whole
/// second; so the others get a little time to listen.
const HEAD_START: Duration = Duration::from_millis(50);

/// The groups of one rank.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// With the other members of its stage.
    pub(super) stage: Stage,
    /// With the same member of every stage.
    pub(super) pipeline: Option<Group>,
}

/// Joins both groups of the rank of `part`, as far as it has them: the stage first, on all ranks. `devices`
/// are there for a stage that uses RDMA. What travels within the stage is counted by `meter`.
pub(super) fn join(
    part: &Part,
    addresses: &Addresses,
    devices: Option<&Devices>,
    meter: &Meter,
) -> Result<Groups, String> {
    let mut groups = Groups::default();
    if part.tensor_size > 1 {
        let (own, size) = (part.tensor_index, part.tensor_size);
        let members = match devices {
            None => ring(own, size, &addresses.tensor)?,
            Some(devices) => jaccl(own, size, devices)?,
        };
        groups.stage = Stage::of(members, meter.clone());
    }
    if part.stages > 1 {
        groups.pipeline = Some(ring(part.stage, part.stages, &addresses.pipeline)?);
    }
    Ok(groups)
}

fn ring(own: u32, size: u32, hosts: &[SocketAddr]) -> Result<Group, String> {
    if hosts.len() != size as usize {
        return Err(format!("{} addresses were given for {size} ranks", hosts.len()));
    }
    let hostfile = environment::file(environment::HOSTFILE)?;
    environment::write(&hostfile, &hostfile_text(hosts))?;
    if own + 1 == size {
        std::thread::sleep(HEAD_START);
    }
    enter("ring", own, size, (environment::HOSTFILE, hostfile.as_os_str()))
}

fn jaccl(own: u32, size: u32, devices: &Devices) -> Result<Group, String> {
    let file = environment::file(environment::DEVICES)?;
    environment::write(&file, &devices.file())?;
    enter("jaccl", own, size, (environment::DEVICES, file.as_os_str()))
}

fn enter(backend: &str, own: u32, size: u32, file: (&str, &OsStr)) -> Result<Group, String> {
    let rank = own.to_string();
    let group = Group::join(backend, &[(environment::RANK, OsStr::new(&rank)), file])
        .map_err(|error| error.to_string())?;
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
