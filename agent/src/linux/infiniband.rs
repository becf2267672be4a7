//! `/sys/class/infiniband`: RDMA devices, the state of their ports, and their interfaces.

use std::path::Path;

use super::{folders, gigabits, name, word};

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// `mlx5_0`.
    pub device: String,
    /// Port number, from 1.
    pub number: u32,
    /// Whether it is active: `4: ACTIVE`.
    pub is_active: bool,
    /// State as printed by the kernel.
    pub state: String,
    /// Negotiated speed.
    pub bits_per_second: Option<u64>,
    /// The network interface of the same hardware.
    pub interface: Option<String>,
}

/// Ports of all devices, by name. `sys` is the path of `/sys`.
pub fn ports(sys: &Path) -> Vec<Port> {
    let devices = folders(&sys.join("class/infiniband"));
    devices
        .iter()
        .flat_map(|device| {
            folders(&device.join("ports")).into_iter().filter_map(|port| read_port(device, &port))
        })
        .collect()
}

fn read_port(device: &Path, port: &Path) -> Option<Port> {
    let state = word(&port.join("state"))?;
    Some(Port {
        device: name(device),
        number: name(port).parse().ok()?,
        is_active: state.starts_with("4:"),
        bits_per_second: word(&port.join("rate")).as_deref().and_then(gigabits),
        interface: folders(&device.join("device/net")).first().map(|net| name(net)),
        state,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn ports_are_active_or_say_what_they_are() {
        let sys = tempfile::tempdir().unwrap();
        let device = sys.path().join("class/infiniband/mlx5_0");
        for (port, state, rate) in
            [("1", "4: ACTIVE", "100 Gb/sec (4X EDR)"), ("2", "1: DOWN", "2.5 Gb/sec (1X SDR)")]
        {
            let folder = device.join("ports").join(port);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("state"), format!("{state}\n")).unwrap();
            fs::write(folder.join("rate"), format!("{rate}\n")).unwrap();
        }
        fs::create_dir_all(device.join("device/net/ens1")).unwrap();
        let found = ports(sys.path());
        let short: Vec<_> =
            found.iter().map(|port| (port.number, port.is_active, port.bits_per_second)).collect();
        assert_eq!(short, [(1, true, Some(100_000_000_000)), (2, false, Some(2_500_000_000))]);
        assert_eq!((found[0].interface.as_deref(), found[1].state.as_str()), (Some("ens1"), "1: DOWN"));
        assert_eq!(ports(&sys.path().join("nowhere")), []);
    }
}
