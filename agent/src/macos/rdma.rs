//! `rdma_ctl status`, `ibv_devices` and `ibv_devinfo`: whether RDMA is enabled, the devices, and the state of
//! their ports. A device is named after its interface: `rdma_en5` belongs to `en5`.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::{ParseError, fields, text};

const SWITCH: &str = "rdma_ctl status";
const DEVICES: &str = "ibv_devices";
const INFO: &str = "ibv_devinfo";

/// Whether `rdma_ctl status` reports RDMA as enabled.
pub fn is_enabled(output: &[u8]) -> Result<bool, ParseError> {
    match text(output).trim() {
        "enabled" => Ok(true),
        "disabled" => Ok(false),
        other => Err(ParseError::new(SWITCH, format!("neither enabled nor disabled: {other:?}"))),
    }
}

/// Names of the devices that `ibv_devices` lists; may be empty.
pub fn devices(output: &[u8]) -> Result<Vec<String>, ParseError> {
    let text = text(output);
    let mut lines = text.lines().map(str::split_whitespace);
    lines
        .find(|words| words.clone().eq(["device", "node", "GUID"]))
        .ok_or_else(|| ParseError::new(DEVICES, "no line \"device node GUID\""))?;
    let names = lines.filter_map(|mut words| words.next());
    Ok(names.filter(|name| name.starts_with("rdma_")).map(str::to_owned).collect())
}

/// An RDMA device and its one port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaDevice {
    /// `rdma_en5`.
    pub name: String,
    /// Whether its port is active: a cable is connected, and the other end has RDMA enabled too.
    pub is_active: bool,
    /// State as printed by the tool, `PORT_ACTIVE (4)`.
    pub state: String,
    /// IPv4 entries of its GID table, with their indices; `None` if the table was not printed, as without `-v`.
    pub addresses: Option<Vec<(u32, Ipv4Addr)>>,
}

impl RdmaDevice {
    /// The interface it belongs to.
    pub fn interface(&self) -> &str {
        self.name.strip_prefix("rdma_").unwrap_or(&self.name)
    }
}

/// Parses devices from `ibv_devinfo`, with or without `-v`. Text before the first device, such as a shell
/// prompt in posted outputs, is skipped; a device without port information is an error.
pub fn device_infos(output: &[u8]) -> Result<Vec<RdmaDevice>, ParseError> {
    let text = text(output);
    let mut devices: Vec<RdmaDevice> = Vec::new();
    for (key, value) in fields(&text) {
        if key == "hca_id" {
            let (name, state) = (value.to_owned(), String::new());
            devices.push(RdmaDevice { name, is_active: false, state, addresses: None });
        }
        let Some(device) = devices.last_mut() else { continue };
        if key == "state" {
            (device.is_active, device.state) = (value.starts_with("PORT_ACTIVE"), value.to_owned());
        } else if let Some(place) = key.strip_prefix("GID[").and_then(|rest| rest.strip_suffix(']')) {
            let address = value.parse::<Ipv6Addr>().ok().and_then(|gid| gid.to_ipv4_mapped());
            let table = device.addresses.get_or_insert_default();
            table.extend(place.trim().parse().ok().zip(address));
        }
    }
    match devices.iter().find(|device| device.state.is_empty()) {
        _ if devices.is_empty() => Err(ParseError::new(INFO, "no device (hca_id)")),
        Some(silent) => Err(ParseError::new(INFO, format!("no state of {}'s port", silent.name))),
        None => Ok(devices),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rdma_switch_is_enabled_or_disabled_only() {
        assert_eq!(is_enabled(b"enabled\n"), Ok(true));
        assert_eq!(is_enabled(b"disabled\n"), Ok(false));
        let error = is_enabled(b"zsh: command not found: rdma_ctl\n").unwrap_err();
        assert!(error.to_string().starts_with("rdma_ctl status printed neither"), "{error}");
    }

    #[test]
    fn device_list_may_be_empty_but_needs_a_header() {
        let head = "    device          \t   node GUID\n    ------          \t----------------\n";
        assert_eq!(devices(head.as_bytes()), Ok(vec![]));
        let two = format!("{head}    rdma_en6        \t0000000000000002\n    rdma_en2    0000000000000003\n");
        assert_eq!(devices(two.as_bytes()).unwrap(), ["rdma_en6", "rdma_en2"]);
        assert!(devices(b"").is_err());
    }

    #[test]
    fn a_port_is_active_or_says_why_not_and_may_have_addresses() {
        let output = b"hca_id:\trdma_en7\n\ttransport:\t\tThunderbolt (100)\n\t\tport:\t1\n\
            \t\t\tstate:\t\tPORT_ACTIVE (4)\n\t\t\tGID[  0]:\t\tfe80::1\n\t\t\tGID[  2]:\t\t::ffff:192.0.2.10\n\
            hca_id:\trdma_en2\n\t\tport:\t1\n\t\t\tstate:\t\tPORT_DOWN (1)\n";
        let found = device_infos(output).unwrap();
        assert_eq!((found[0].interface(), found[0].is_active), ("en7", true));
        assert_eq!(found[0].addresses, Some(vec![(2, Ipv4Addr::new(192, 0, 2, 10))]));
        assert_eq!(found[1].addresses, None, "its table was not printed");
        assert_eq!((found[1].is_active, found[1].state.as_str()), (false, "PORT_DOWN (1)"));
        let error = device_infos(b"hca_id: rdma_en3\n").unwrap_err();
        assert_eq!(error.to_string(), "ibv_devinfo printed no state of rdma_en3's port");
        assert!(device_infos(b"").is_err());
    }
}
