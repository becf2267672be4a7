//! A change to the machine, with what there was before, and the commands that make it and take it back. Pure. A command
//! is a program's name and its arguments and never passes a shell; its words come from what the machine itself said and
//! from what [`super::check`] let through.

use std::fmt;
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use super::present::Held;

/// Bits that all addresses of a cable's network share: two ends, and the two that every network needs.
pub const PREFIX: u32 = 30;

/// Whose commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    /// `ifconfig`, `networksetup`, `sysctl`.
    MacOs,
    /// `ip`.
    Linux,
}

/// One change. It knows all that undoing needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "deed", rename_all = "camelCase")]
pub enum Deed {
    /// An interface is no member of its bridge any more.
    Leave {
        /// The interface.
        interface: String,
        /// The bridge.
        bridge: String,
    },
    /// An address of an interface goes.
    Drop {
        /// The interface.
        interface: String,
        /// The address as it was.
        held: Held,
    },
    /// An interface that was down is up.
    Raise {
        /// The interface.
        interface: String,
    },
    /// An interface has an address.
    Give {
        /// The interface.
        interface: String,
        /// The address.
        address: Ipv4Addr,
    },
    /// Services stand in another order.
    Order {
        /// As they stood.
        before: Vec<String>,
        /// As they stand.
        after: Vec<String>,
    },
    /// So much memory may be wired.
    Wire {
        /// MiB before; 0 is what the system thinks fit.
        before: u64,
        /// MiB now.
        after: u64,
    },
}

/// A program and its arguments.
pub type Command = (&'static str, Vec<String>);

fn command(program: &'static str, words: &[&str]) -> Command {
    (program, words.iter().map(|word| (*word).to_owned()).collect())
}

/// Dotted mask of so many bits.
fn mask(prefix: u32) -> String {
    Ipv4Addr::from(u32::MAX.checked_shl(32 - prefix.min(32)).unwrap_or(0)).to_string()
}

impl Deed {
    /// Whether it is of the network; the limit of wired memory is not.
    pub fn is_of_network(&self) -> bool {
        !matches!(self, Self::Wire { .. })
    }

    /// Whether the system undoes it by itself when the machine starts anew.
    pub fn is_volatile(&self) -> bool {
        !matches!(self, Self::Order { .. })
    }

    /// What makes it.
    pub fn make(&self, system: System) -> Command {
        match (self, system) {
            (Self::Leave { interface, bridge }, System::MacOs) => {
                command("ifconfig", &[bridge, "deletem", interface])
            }
            (Self::Leave { interface, .. }, System::Linux) => {
                command("ip", &["link", "set", "dev", interface, "nomaster"])
            }
            (Self::Drop { interface, held }, system) => take(system, interface, held.ip, held.prefix),
            (Self::Raise { interface }, System::MacOs) => command("ifconfig", &[interface, "up"]),
            (Self::Raise { interface }, System::Linux) => {
                command("ip", &["link", "set", "dev", interface, "up"])
            }
            (Self::Give { interface, address }, system) => {
                give(system, interface, &Held { ip: *address, prefix: PREFIX, broadcast: None })
            }
            (Self::Order { after, .. }, _) => order(after),
            (Self::Wire { after, .. }, _) => wire(*after),
        }
    }

    /// What takes it back.
    pub fn undo(&self, system: System) -> Command {
        match (self, system) {
            (Self::Leave { interface, bridge }, System::MacOs) => {
                command("ifconfig", &[bridge, "addm", interface])
            }
            (Self::Leave { interface, bridge }, System::Linux) => {
                command("ip", &["link", "set", "dev", interface, "master", bridge])
            }
            (Self::Drop { interface, held }, system) => give(system, interface, held),
            (Self::Raise { interface }, System::MacOs) => command("ifconfig", &[interface, "down"]),
            (Self::Raise { interface }, System::Linux) => {
                command("ip", &["link", "set", "dev", interface, "down"])
            }
            (Self::Give { interface, address }, system) => take(system, interface, *address, PREFIX),
            (Self::Order { before, .. }, _) => order(before),
            (Self::Wire { before, .. }, _) => wire(*before),
        }
    }
}

fn give(system: System, interface: &str, held: &Held) -> Command {
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

fn take(system: System, interface: &str, ip: Ipv4Addr, prefix: u32) -> Command {
    match system {
        System::MacOs => command("ifconfig", &[interface, "inet", &ip.to_string(), "delete"]),
        System::Linux => command("ip", &["addr", "del", &format!("{ip}/{prefix}"), "dev", interface]),
    }
}

fn order(services: &[String]) -> Command {
    let mut words = vec!["-ordernetworkservices".to_owned()];
    words.extend(services.iter().cloned());
    ("networksetup", words)
}

fn wire(mebibytes: u64) -> Command {
    command("sysctl", &[&format!("iogpu.wired_limit_mb={mebibytes}")])
}

impl fmt::Display for Deed {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Leave { interface, bridge } => write!(formatter, "{interface} left {bridge}"),
            Self::Drop { interface, held } => {
                write!(formatter, "{interface} lost {}/{}", held.ip, held.prefix)
            }
            Self::Raise { interface } => write!(formatter, "{interface} is up"),
            Self::Give { interface, address } => write!(formatter, "{interface} has {address}/{PREFIX}"),
            Self::Order { .. } => formatter.write_str("services of cables come last"),
            Self::Wire { after, .. } => write!(formatter, "the GPU may wire {after} MiB"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_deed_has_a_command_of_each_system_and_one_that_takes_it_back() {
        let held = |broadcast: Option<[u8; 4]>| Held {
            ip: [192, 168, 7, 1].into(),
            prefix: 24,
            broadcast: broadcast.map(Ipv4Addr::from),
        };
        let interface = || "en4".to_owned();
        let line = |(program, words): Command| format!("{program} {}", words.join(" "));
        for (deed, system, make, undo) in [
            (
                Deed::Leave { interface: interface(), bridge: "bridge0".into() },
                System::MacOs,
                "ifconfig bridge0 deletem en4",
                "ifconfig bridge0 addm en4",
            ),
            (
                Deed::Leave { interface: interface(), bridge: "br0".into() },
                System::Linux,
                "ip link set dev en4 nomaster",
                "ip link set dev en4 master br0",
            ),
            (
                Deed::Drop { interface: interface(), held: held(None) },
                System::MacOs,
                "ifconfig en4 inet 192.168.7.1 delete",
                "ifconfig en4 inet 192.168.7.1 netmask 255.255.255.0 alias",
            ),
            (
                Deed::Drop { interface: interface(), held: held(Some([192, 168, 7, 255])) },
                System::Linux,
                "ip addr del 192.168.7.1/24 dev en4",
                "ip addr add 192.168.7.1/24 broadcast 192.168.7.255 dev en4",
            ),
            (
                Deed::Raise { interface: interface() },
                System::Linux,
                "ip link set dev en4 up",
                "ip link set dev en4 down",
            ),
            (
                Deed::Give { interface: interface(), address: [10, 0, 0, 1].into() },
                System::MacOs,
                "ifconfig en4 inet 10.0.0.1 netmask 255.255.255.252 alias",
                "ifconfig en4 inet 10.0.0.1 delete",
            ),
            (
                Deed::Give { interface: interface(), address: [10, 0, 0, 1].into() },
                System::Linux,
                "ip addr add 10.0.0.1/30 dev en4",
                "ip addr del 10.0.0.1/30 dev en4",
            ),
            (
                Deed::Order {
                    before: vec!["T B".into(), "Wi-Fi".into()],
                    after: vec!["Wi-Fi".into(), "T B".into()],
                },
                System::MacOs,
                "networksetup -ordernetworkservices Wi-Fi T B",
                "networksetup -ordernetworkservices T B Wi-Fi",
            ),
            (
                Deed::Wire { before: 0, after: 4096 },
                System::MacOs,
                "sysctl iogpu.wired_limit_mb=4096",
                "sysctl iogpu.wired_limit_mb=0",
            ),
        ] {
            assert_eq!(line(deed.make(system)), make);
            assert_eq!(line(deed.undo(system)), undo);
        }
        assert_eq!((mask(0), mask(32)), ("0.0.0.0".to_owned(), "255.255.255.255".to_owned()));
    }
}
