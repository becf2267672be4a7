//! Current state of the machine, as far as the helper needs it, parsed from tools' output. Pure.

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use crate::macos::network;
use crate::macos::ports::HardwarePort;
use crate::macos::services::NetworkService;

/// The machine's network and its limit of wired memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CurrentState {
    /// All interfaces.
    pub interfaces: Vec<Interface>,
    /// Network services in their order; Linux has none.
    pub services: Vec<NetworkService>,
    /// Limit of wired memory in MiB; `None` where the system has no such limit.
    pub wired: Option<u64>,
}

/// An interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Whether it is a port whose Thunderbolt cable leads to another machine.
    pub is_cable: bool,
    /// Whether it is up.
    pub is_up: bool,
    /// The bridge it is a member of.
    pub bridge: Option<String>,
    /// Another kind of aggregate it is a member of, which the helper does not change.
    pub team: Option<String>,
    /// Its IPv4 addresses.
    pub addresses: Vec<InterfaceAddress>,
}

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The address itself.
    pub config: AddressConfig,
    /// Whether it is a DHCP lease.
    pub is_dhcp: bool,
}

/// An address with all that is needed to configure it again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressConfig {
    /// The address.
    pub ip: Ipv4Addr,
    /// Prefix length of its network.
    pub prefix: u32,
    /// Broadcast address, if configured.
    pub broadcast: Option<Ipv4Addr>,
}

impl AddressConfig {
    /// Whether two networks overlap.
    pub fn overlaps(&self, other: &Self) -> bool {
        let bits = self.prefix.min(other.prefix).min(32);
        let differs = u32::from(self.ip) ^ u32::from(other.ip);
        differs.checked_shr(32 - bits).unwrap_or(0) == 0
    }
}

impl CurrentState {
    /// The interface of this name.
    pub fn interface(&self, name: &str) -> Option<&Interface> {
        self.interfaces.iter().find(|interface| interface.name == name)
    }

    /// Names of the services, in their order.
    pub fn service_names(&self) -> Vec<String> {
        self.services.iter().map(|service| service.name.clone()).collect()
    }

    /// The services' names, with those of cables and of bridges over cables last.
    pub fn cables_last(&self) -> Vec<String> {
        let bridges = self.interfaces.iter().filter(|one| one.is_cable).filter_map(|one| one.bridge.as_ref());
        let bridges: Vec<&String> = bridges.collect();
        let of_cable = |service: &&NetworkService| {
            let own = |device: &String| {
                bridges.contains(&device) || self.interface(device).is_some_and(|one| one.is_cable)
            };
            is_thunderbolt(&service.port) || service.device.as_ref().is_some_and(own)
        };
        let (last, first): (Vec<_>, Vec<_>) = self.services.iter().partition(of_cable);
        first.into_iter().chain(last).map(|service| service.name.clone()).collect()
    }
}

/// Whether a hardware port is a Thunderbolt port of the machine or the bridge over all of them. The names of
/// Ethernet adapters contain Thunderbolt too, and such an adapter may be the route to the internet.
fn is_thunderbolt(port: &str) -> bool {
    port.strip_prefix("Thunderbolt ").is_some_and(|rest| rest == "Bridge" || rest.parse::<u32>().is_ok())
}

/// Interfaces of a Mac.
pub fn mac_interfaces(ports: &[HardwarePort], interfaces: Vec<network::Interface>) -> Vec<Interface> {
    let bridge = |name: &String| {
        interfaces.iter().find(|one| one.members.contains(name)).map(|bridge| bridge.name.clone())
    };
    let address = |address: &network::Address| InterfaceAddress {
        // A non-contiguous mask is invalid; without a prefix the address is a network of its own.
        config: AddressConfig { ip: address.ip, prefix: address.prefix.unwrap_or(32), broadcast: None },
        is_dhcp: false,
    };
    let one = |interface: &network::Interface| Interface {
        is_cable: ports.iter().any(|port| port.receptacle().is_some() && port.device == interface.name),
        is_up: true,
        bridge: bridge(&interface.name),
        team: None,
        addresses: interface.addresses.iter().map(address).collect(),
        name: interface.name.clone(),
    };
    interfaces.iter().map(one).collect()
}

/// Output of `ip -json -details address show`, as far as it is needed.
#[derive(Deserialize)]
struct IpLink {
    ifname: String,
    #[serde(default)]
    flags: Vec<String>,
    master: Option<String>,
    #[serde(default)]
    linkinfo: LinkInfo,
    #[serde(default)]
    addr_info: Vec<IpLinkAddress>,
}

#[derive(Default, Deserialize)]
struct LinkInfo {
    info_slave_kind: Option<String>,
}

#[derive(Deserialize)]
struct IpLinkAddress {
    family: String,
    local: Option<String>,
    #[serde(default)]
    prefixlen: u32,
    broadcast: Option<String>,
    #[serde(default)]
    dynamic: bool,
}

/// Interfaces of a Linux machine; `is_cable` tells which names have the Thunderbolt driver.
pub fn linux_interfaces(
    printed: &[u8],
    is_cable: impl Fn(&str) -> bool,
) -> Result<Vec<Interface>, serde_json::Error> {
    let all: Vec<IpLink> = serde_json::from_slice(printed)?;
    let one = |printed: IpLink| {
        let address = |address: IpLinkAddress| {
            let ip = address.local.filter(|_| address.family == "inet")?.parse().ok()?;
            let broadcast = address.broadcast.and_then(|address| address.parse().ok());
            Some(InterfaceAddress {
                config: AddressConfig { ip, prefix: address.prefixlen, broadcast },
                is_dhcp: address.dynamic,
            })
        };
        let bridged = printed.linkinfo.info_slave_kind.as_deref() == Some("bridge");
        let (bridge, team) = if bridged { (printed.master, None) } else { (None, printed.master) };
        Interface {
            is_cable: is_cable(&printed.ifname),
            is_up: printed.flags.iter().any(|flag| flag == "UP"),
            bridge,
            team,
            addresses: printed.addr_info.into_iter().filter_map(address).collect(),
            name: printed.ifname,
        }
    };
    Ok(all.into_iter().map(one).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linux_parser_reads_bridge_members_and_dhcp_addresses() {
        let printed = br#"[{"ifname":"lo","flags":["LOOPBACK","UP"],"addr_info":[{"family":"inet","local":"127.0.0.1","prefixlen":8}]},
            {"ifname":"thunderbolt0","flags":["BROADCAST","UP"],"master":"br0","linkinfo":{"info_kind":"x","info_slave_kind":"bridge"},
             "addr_info":[{"family":"inet","local":"10.1.2.3","prefixlen":24,"broadcast":"10.1.2.255","dynamic":true},{"family":"inet6","local":"fe80::1","prefixlen":64}]},
            {"ifname":"thunderbolt1","flags":[],"master":"bond0","linkinfo":{"info_slave_kind":"bond"},"addr_info":[]}]"#;
        let all = linux_interfaces(printed, |name| name.starts_with("thunderbolt")).unwrap();
        let cable = &all[1];
        assert_eq!((cable.bridge.as_deref(), cable.is_up, cable.is_cable), (Some("br0"), true, true));
        assert_eq!((cable.addresses.len(), cable.addresses[0].is_dhcp), (1, true));
        assert_eq!(cable.addresses[0].config.broadcast, Some([10, 1, 2, 255].into()));
        assert_eq!((all[2].team.as_deref(), &all[2].bridge, all[2].is_up), (Some("bond0"), &None, false));
        assert!(!all[0].is_cable && linux_interfaces(b"nonsense", |_| true).is_err());
    }

    #[test]
    fn networks_overlap_where_the_wider_contains_the_other() {
        let held = |ip: [u8; 4], prefix| AddressConfig { ip: ip.into(), prefix, broadcast: None };
        for (one, other, is) in [
            (held([10, 0, 0, 1], 30), held([10, 0, 0, 2], 30), true),
            (held([10, 0, 0, 1], 30), held([10, 0, 0, 5], 30), false),
            (held([10, 0, 0, 1], 30), held([10, 0, 9, 9], 16), true),
            (held([10, 0, 0, 1], 30), held([192, 168, 0, 1], 0), true),
            (held([10, 0, 0, 1], 32), held([10, 0, 0, 2], 32), false),
        ] {
            assert_eq!((one.overlaps(&other), other.overlaps(&one)), (is, is), "{one:?} {other:?}");
        }
    }
}
