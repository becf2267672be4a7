//! `networksetup -listallhardwareports`: the interface of each port of the machine. A port's number and its
//! interface's are unrelated: Thunderbolt 2 is `en6` on one Mac and `en3` on another.

use super::{ParseError, fields, text};

const TOOL: &str = "networksetup -listallhardwareports";

/// A port and its interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HardwarePort {
    /// `Thunderbolt 1`, `Wi-Fi`, `Ethernet`.
    pub name: String,
    /// `en2`.
    pub device: String,
    /// Its hardware address; missing in some outputs.
    pub address: Option<String>,
}

impl HardwarePort {
    /// Receptacle number of a Thunderbolt port; `None` for other ports and for the bridge over all of them.
    pub fn receptacle(&self) -> Option<u32> {
        self.name.strip_prefix("Thunderbolt ")?.parse().ok()
    }
}

/// Parses the ports, in the printed order.
pub fn hardware_ports(output: &[u8]) -> Result<Vec<HardwarePort>, ParseError> {
    let text = text(output);
    let mut ports: Vec<HardwarePort> = Vec::new();
    let mut open: Option<String> = None;
    for (key, value) in fields(&text) {
        match key {
            "Hardware Port" => open = Some(value.to_owned()),
            "Device" => {
                let name = open.take().ok_or_else(|| {
                    ParseError::new(TOOL, format!("the device {value} of no hardware port"))
                })?;
                ports.push(HardwarePort { name, device: value.to_owned(), address: None });
            }
            "Ethernet Address" => {
                if let Some(port) = ports.last_mut() {
                    port.address = Some(value.to_owned());
                }
            }
            _ => {}
        }
    }
    if ports.is_empty() { Err(ParseError::new(TOOL, "no hardware port")) } else { Ok(ports) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thunderbolt_ports_have_numbers_and_their_bridge_has_none() {
        let output =
            b"\nHardware Port: Thunderbolt Bridge\nDevice: bridge0\nEthernet Address: 02:00:5e:00:53:01\n\n\
            Hardware Port: Thunderbolt 2\nDevice: en6\n\nVLAN Configurations\n===================\n";
        let ports = hardware_ports(output).unwrap();
        assert_eq!(ports.iter().map(HardwarePort::receptacle).collect::<Vec<_>>(), [None, Some(2)]);
        assert_eq!(ports[0].address.as_deref(), Some("02:00:5e:00:53:01"));
        assert_eq!((ports[1].device.as_str(), &ports[1].address), ("en6", &None));
        assert!(hardware_ports(b"networksetup: command not found\n").is_err());
        let error = hardware_ports(b"Device: en6\n").unwrap_err();
        assert!(error.to_string().ends_with("printed the device en6 of no hardware port"), "{error}");
    }
}
