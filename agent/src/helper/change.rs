//! A change to the machine, with the state before it, and the commands that apply and undo it. Pure. A
//! command is a program's name and its arguments and never passes through a shell; its arguments come from
//! the machine's own output and from values that [`super::check`] validated.

use std::fmt;
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use super::current_state::AddressConfig;

/// Prefix length of a cable's network: two hosts, plus network and broadcast address.
pub const PREFIX_BITS: u32 = 30;

/// Operating system whose commands are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    /// `ifconfig`, `networksetup`, `sysctl`.
    MacOs,
    /// `ip`.
    Linux,
}

/// One change. It contains all that undoing needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "deed", rename_all = "camelCase")]
pub enum MachineChange {
    /// An interface is removed from its bridge.
    Leave {
        /// The interface.
        interface: String,
        /// The bridge.
        bridge: String,
    },
    /// An address of an interface is removed.
    Drop {
        /// The interface.
        interface: String,
        /// The removed address.
        held: AddressConfig,
    },
    /// An interface is brought up.
    Raise {
        /// The interface.
        interface: String,
    },
    /// An interface gets an address.
    Give {
        /// The interface.
        interface: String,
        /// The address.
        address: Ipv4Addr,
    },
    /// Network services are reordered.
    Order {
        /// Order before.
        before: Vec<String>,
        /// Order after.
        after: Vec<String>,
    },
    /// The limit of wired memory is set.
    Wire {
        /// MiB before; 0 is the system's default.
        before: u64,
        /// MiB after.
        after: u64,
    },
}

/// A program and its arguments.
pub type ToolCommand = (&'static str, Vec<String>);

fn command(program: &'static str, words: &[&str]) -> ToolCommand {
    (program, words.iter().map(|word| (*word).to_owned()).collect())
}

/// Dotted netmask of a prefix length.
fn mask(prefix: u32) -> String {
    Ipv4Addr::from(u32::MAX.checked_shl(32 - prefix.min(32)).unwrap_or(0)).to_string()
}

impl MachineChange {
    /// Whether it changes the network, rather than the limit of wired memory.
    pub fn is_network(&self) -> bool {
        !matches!(self, Self::Wire { .. })
    }

    /// Whether a restart of the machine undoes it.
    pub fn is_volatile(&self) -> bool {
        !matches!(self, Self::Order { .. })
    }

    /// The command that applies it.
    pub fn apply_command(&self, system: System) -> ToolCommand {
        match (self, system) {
            (Self::Leave { interface, bridge }, System::MacOs) => {
                command("ifconfig", &[bridge, "deletem", interface])
            }
            (Self::Leave { interface, .. }, System::Linux) => {
                command("ip", &["link", "set", "dev", interface, "nomaster"])
            }
            (Self::Drop { interface, held }, system) => {
                remove_address(system, interface, held.ip, held.prefix)
            }
            (Self::Raise { interface }, System::MacOs) => command("ifconfig", &[interface, "up"]),
            (Self::Raise { interface }, System::Linux) => {
                command("ip", &["link", "set", "dev", interface, "up"])
            }
            (Self::Give { interface, address }, system) => add_address(
                system,
                interface,
                &AddressConfig { ip: *address, prefix: PREFIX_BITS, broadcast: None },
            ),
            (Self::Order { after, .. }, _) => set_service_order(after),
            (Self::Wire { after, .. }, _) => set_wired_limit(*after),
        }
    }

    /// The command that undoes it.
    pub fn undo_command(&self, system: System) -> ToolCommand {
        match (self, system) {
            (Self::Leave { interface, bridge }, System::MacOs) => {
                command("ifconfig", &[bridge, "addm", interface])
            }
            (Self::Leave { interface, bridge }, System::Linux) => {
                command("ip", &["link", "set", "dev", interface, "master", bridge])
            }
            (Self::Drop { interface, held }, system) => add_address(system, interface, held),
            (Self::Raise { interface }, System::MacOs) => command("ifconfig", &[interface, "down"]),
            (Self::Raise { interface }, System::Linux) => {
                command("ip", &["link", "set", "dev", interface, "down"])
            }
            (Self::Give { interface, address }, system) => {
                remove_address(system, interface, *address, PREFIX_BITS)
            }
            (Self::Order { before, .. }, _) => set_service_order(before),
            (Self::Wire { before, .. }, _) => set_wired_limit(*before),
        }
    }
}

fn add_address(system: System, interface: &str, held: &AddressConfig) -> ToolCommand {
    let ip = held.ip.to_string();
    match system {
        System::MacOs => {
            command("ifconfig", &[interface, "inet", &ip, "netmask", &mask(held.prefix), "alias"])
        }
        System::Linux => {
            let mut words = vec!["addr".to_owned(), "add".to_owned(), format!("{ip}/{}", held.prefix)];
            words.extend(
                held.broadcast.iter().flat_map(|address| ["broadcast".to_owned(), address.to_string()]),
            );
            words.extend(["dev".to_owned(), interface.to_owned()]);
            ("ip", words)
        }
    }
}

fn remove_address(system: System, interface: &str, ip: Ipv4Addr, prefix: u32) -> ToolCommand {
    match system {
        System::MacOs => command("ifconfig", &[interface, "inet", &ip.to_string(), "delete"]),
        System::Linux => command("ip", &["addr", "del", &format!("{ip}/{prefix}"), "dev", interface]),
    }
}

fn set_service_order(services: &[String]) -> ToolCommand {
    let mut words = vec!["-ordernetworkservices".to_owned()];
    words.extend(services.iter().cloned());
    ("networksetup", words)
}

fn set_wired_limit(mebibytes: u64) -> ToolCommand {
    command("sysctl", &[&format!("iogpu.wired_limit_mb={mebibytes}")])
}

impl fmt::Display for MachineChange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Leave { interface, bridge } => write!(formatter, "{interface} left {bridge}"),
            Self::Drop { interface, held } => {
                write!(formatter, "{interface} lost {}/{}", held.ip, held.prefix)
            }
            Self::Raise { interface } => write!(formatter, "{interface} is up"),
            Self::Give { interface, address } => write!(formatter, "{interface} has {address}/{PREFIX_BITS}"),
            Self::Order { .. } => formatter.write_str("services of cables come last"),
            Self::Wire { after, .. } => write!(formatter, "the GPU may wire {after} MiB"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_has_apply_and_undo_commands_per_system() {
        let held = |broadcast: Option<[u8; 4]>| AddressConfig {
            ip: [192, 168, 7, 1].into(),
            prefix: 24,
            broadcast: broadcast.map(Ipv4Addr::from),
        };
        let interface = || "en4".to_owned();
        let line = |(program, words): ToolCommand| format!("{program} {}", words.join(" "));
        for (change, system, make, undo) in [
            (
                MachineChange::Leave { interface: interface(), bridge: "bridge0".into() },
                System::MacOs,
                "ifconfig bridge0 deletem en4",
                "ifconfig bridge0 addm en4",
            ),
            (
                MachineChange::Leave { interface: interface(), bridge: "br0".into() },
                System::Linux,
                "ip link set dev en4 nomaster",
                "ip link set dev en4 master br0",
            ),
            (
                MachineChange::Drop { interface: interface(), held: held(None) },
                System::MacOs,
                "ifconfig en4 inet 192.168.7.1 delete",
                "ifconfig en4 inet 192.168.7.1 netmask 255.255.255.0 alias",
            ),
            (
                MachineChange::Drop { interface: interface(), held: held(Some([192, 168, 7, 255])) },
                System::Linux,
                "ip addr del 192.168.7.1/24 dev en4",
                "ip addr add 192.168.7.1/24 broadcast 192.168.7.255 dev en4",
            ),
            (
                MachineChange::Raise { interface: interface() },
                System::Linux,
                "ip link set dev en4 up",
                "ip link set dev en4 down",
            ),
            (
                MachineChange::Give { interface: interface(), address: [10, 0, 0, 1].into() },
                System::MacOs,
                "ifconfig en4 inet 10.0.0.1 netmask 255.255.255.252 alias",
                "ifconfig en4 inet 10.0.0.1 delete",
            ),
            (
                MachineChange::Give { interface: interface(), address: [10, 0, 0, 1].into() },
                System::Linux,
                "ip addr add 10.0.0.1/30 dev en4",
                "ip addr del 10.0.0.1/30 dev en4",
            ),
            (
                MachineChange::Order {
                    before: vec!["T B".into(), "Wi-Fi".into()],
                    after: vec!["Wi-Fi".into(), "T B".into()],
                },
                System::MacOs,
                "networksetup -ordernetworkservices Wi-Fi T B",
                "networksetup -ordernetworkservices T B Wi-Fi",
            ),
            (
                MachineChange::Wire { before: 0, after: 4096 },
                System::MacOs,
                "sysctl iogpu.wired_limit_mb=4096",
                "sysctl iogpu.wired_limit_mb=0",
            ),
        ] {
            assert_eq!(line(change.apply_command(system)), make);
            assert_eq!(line(change.undo_command(system)), undo);
        }
        assert_eq!((mask(0), mask(32)), ("0.0.0.0".to_owned(), "255.255.255.255".to_owned()));
    }
}
