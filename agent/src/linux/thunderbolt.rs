//! `/sys/bus/thunderbolt/devices`: other machines on Thunderbolt cables (XDomains), and the network interface
//! of each.

use std::path::Path;

use super::{folders, gigabits, name, word};

/// A machine at the other end of a cable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// The kernel's name of the connection, `0-1`.
    pub name: String,
    /// UUID of this end's controller, which the other end sees; in upper case like macOS's domains.
    pub own_domain: Option<String>,
    /// UUID of the other end's controller.
    pub domain: String,
    /// Device name of the other machine.
    pub device: Option<String>,
    /// Receive speed of all lanes, in bits per second.
    pub bits_per_second: Option<u64>,
    /// Its IP interface, `thunderbolt0`, once the driver is loaded.
    pub interface: Option<String>,
}

/// Machines on cables, by name. `sys` is the path of `/sys`. Docks and drives are devices of other types and
/// left out.
pub fn hosts(sys: &Path) -> Vec<Host> {
    let all = folders(&sys.join("bus/thunderbolt/devices"));
    all.iter().filter_map(|path| host(path)).collect()
}

fn host(path: &Path) -> Option<Host> {
    let uevent = word(&path.join("uevent"))?;
    if !uevent.lines().any(|line| line == "DEVTYPE=thunderbolt_xdomain") {
        return None;
    }
    let name = name(path);
    // The controller itself is the first device of the same domain.
    let controller = name.split_once('-').map(|(domain, _)| path.with_file_name(format!("{domain}-0")));
    let uuid = |path: &Path| Some(word(&path.join("unique_id"))?.to_ascii_uppercase());
    let speed = word(&path.join("rx_speed")).as_deref().and_then(gigabits);
    let lanes = word(&path.join("rx_lanes")).and_then(|lanes| lanes.parse::<u64>().ok());
    // IP is a service of the connection, and the interface is a device of the service.
    let interface = || {
        let services = folders(path);
        let nets = services.iter().map(|service| folders(&service.join("net")));
        nets.flatten().next().map(|net| super::name(&net))
    };
    Some(Host {
        own_domain: controller.as_deref().and_then(uuid),
        domain: uuid(path)?,
        device: word(&path.join("device_name")),
        bits_per_second: speed.zip(lanes).and_then(|(speed, lanes)| speed.checked_mul(lanes)),
        interface: interface(),
        name,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn thunderbolt_hosts_differ_from_docks_and_count_all_lanes() {
        let sys = tempfile::tempdir().unwrap();
        let devices = sys.path().join("bus/thunderbolt/devices");
        let device = |name: &str, files: &[(&str, &str)]| {
            let folder = devices.join(name);
            fs::create_dir_all(&folder).unwrap();
            files.iter().for_each(|(file, text)| fs::write(folder.join(file), format!("{text}\n")).unwrap());
        };
        device("0-0", &[("uevent", "DEVTYPE=thunderbolt_device"), ("unique_id", "aa")]);
        device(
            "0-1",
            &[
                ("uevent", "DEVTYPE=thunderbolt_xdomain"),
                ("unique_id", "c0ffee00-0000"),
                ("device_name", "studio"),
                ("rx_speed", "20.0 Gb/s"),
                ("rx_lanes", "2"),
            ],
        );
        device("1-1", &[("uevent", "DEVTYPE=thunderbolt_xdomain"), ("unique_id", "bb")]);
        fs::create_dir_all(devices.join("0-1/0-1.0/net/thunderbolt0")).unwrap();
        let found = hosts(sys.path());
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!(
            found[0],
            Host {
                name: "0-1".to_owned(),
                own_domain: Some("AA".to_owned()),
                domain: "C0FFEE00-0000".to_owned(),
                device: Some("studio".to_owned()),
                bits_per_second: Some(40_000_000_000),
                interface: Some("thunderbolt0".to_owned()),
            }
        );
        assert_eq!((found[1].bits_per_second, &found[1].interface), (None, &None));
        assert_eq!(hosts(&sys.path().join("nowhere")), []);
    }
}
