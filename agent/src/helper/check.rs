//! Validation of requests to the root helper, against the machine's current state and its owner's bounds,
//! before any change. Pure.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use thiserror::Error;

use super::change::PREFIX_BITS;
use super::current_state::{AddressConfig, CurrentState};
use super::protocol::{MachineRequest, Network, Port, RestartPolicy};

/// Maximum number of ports of a machine.
const MAX_PORTS: usize = 32;

/// Bounds set by the machine's owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HelperPolicy {
    /// Maximum wired memory, in percent; without it the limit may not be set.
    pub wired_percent: Option<u8>,
    /// Bytes of memory of this machine.
    pub memory: u64,
}

/// A valid request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredState {
    /// Address of each port.
    pub ports: BTreeMap<String, Ipv4Addr>,
    /// Whether network services of cables come last.
    pub cables_last: bool,
    /// Limit of wired memory, in MiB.
    pub wired: Option<u64>,
}

/// Why a request is refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum HelperRefusal {
    /// Not a valid request.
    #[error("this helper does not know the request: {0}")]
    Unknown(String),
    /// Not a valid node name.
    #[error("{0:?} is not the name of a node")]
    Node(String),
    /// The machine is held for another node.
    #[error(
        "this machine's network is configured for node {holder}; revert that first with `sudo russet helper --revert`, or send the request as that node, not as {asked}"
    )]
    Other {
        /// Node for which it is held.
        holder: String,
        /// Node that asked.
        asked: String,
    },
    /// The request was reverted at the machine.
    #[error(
        "this was reverted at the machine itself, with `russet helper --revert`, and is not made again before the machine restarts; `russet fabric revert` and then `russet fabric apply` request it again"
    )]
    Reverted,
    /// Too many ports.
    #[error("{0} ports; no machine has more than {MAX_PORTS}")]
    TooMany(usize),
    /// No such interface, or not one of a Thunderbolt cable.
    #[error(
        "{0:?} is not a Thunderbolt interface of this machine now, and this helper changes no other; plug the cable in, or remove the port from the request"
    )]
    NoCable(String),
    /// Listed twice in one request.
    #[error("{0} appears twice in the request")]
    Twice(String),
    /// Not a host address in a private /30 network.
    #[error(
        "{address:?} of {interface} is not the address of a host in a private network of four (10.0.0.0/8, 172.16.0.0/12 or 192.168.0.0/16, written as 172.31.240.1/30)"
    )]
    Address {
        /// The interface.
        interface: String,
        /// Address as requested.
        address: String,
    },
    /// Overlaps another interface's network.
    #[error("{address}/{PREFIX_BITS} of {interface} lies in the network of {other} ({held}/{prefix}), whose traffic it would take; choose another range", held = .with.ip, prefix = .with.prefix)]
    Overlaps {
        /// The interface.
        interface: String,
        /// Requested address.
        address: Ipv4Addr,
        /// The other interface.
        other: String,
        /// The address there.
        with: AddressConfig,
    },
    /// A DHCP address, which could not be restored.
    #[error("{interface} has {ip} from DHCP, which the helper cannot restore; end DHCP on it first")]
    Lent {
        /// The interface.
        interface: String,
        /// The address.
        ip: Ipv4Addr,
    },
    /// Member of an interface that is not a bridge.
    #[error("{interface} is a member of {team}, which is not a bridge; remove it from there yourself")]
    Team {
        /// The interface.
        interface: String,
        /// The interface it is a member of.
        team: String,
    },
    /// The owner has not allowed it.
    #[error(
        "the limit of wired memory may not be set here; start the helper with --allow-wired-limit PERCENT to allow it"
    )]
    WiredForbidden,
    /// More than allowed.
    #[error("{asked} MiB may not be wired: {percent} % of this machine's memory are {most} MiB")]
    WiredTooMuch {
        /// MiB requested.
        asked: u64,
        /// Percent allowed.
        percent: u8,
        /// That percentage in MiB.
        most: u64,
    },
    /// The system has no such limit.
    #[error("this system has no limit of wired memory; only macOS on Apple silicon has")]
    NoWired,
    /// The system has no service order.
    #[error("this system has no order of network services; only macOS has")]
    NoOrder,
}

/// Validates a request against the machine. `holder` is the node for which the helper holds changes already.
pub fn check(
    request: &MachineRequest,
    current: &CurrentState,
    policy: &HelperPolicy,
    holder: Option<&str>,
) -> Result<DesiredState, HelperRefusal> {
    let MachineRequest { node, network, wired_limit_mebibytes, leave: _ } = request;
    let letters = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
    if node.is_empty() || node.len() > 253 || !node.chars().all(letters) {
        return Err(HelperRefusal::Node(node.chars().take(64).collect()));
    }
    if let Some(holder) = holder.filter(|holder| holder != node) {
        return Err(HelperRefusal::Other { holder: holder.to_owned(), asked: node.clone() });
    }
    let (ports, cables_last) = match network {
        None => (BTreeMap::new(), false),
        Some(Network { ports, cables_last, after_restart: RestartPolicy::Drop | RestartPolicy::Keep }) => {
            (addresses(ports, current)?, *cables_last)
        }
    };
    if cables_last && current.services.is_empty() {
        return Err(HelperRefusal::NoOrder);
    }
    let wired = wired_limit_mebibytes.map(|asked| check_wired_limit(asked, current, policy)).transpose()?;
    Ok(DesiredState { ports, cables_last, wired })
}

fn addresses(ports: &[Port], current: &CurrentState) -> Result<BTreeMap<String, Ipv4Addr>, HelperRefusal> {
    if ports.len() > MAX_PORTS {
        return Err(HelperRefusal::TooMany(ports.len()));
    }
    let mut addresses: BTreeMap<String, Ipv4Addr> = BTreeMap::new();
    for Port { interface, address } in ports {
        let cable = current.interface(interface).filter(|one| one.is_cable);
        let cable = cable.ok_or_else(|| HelperRefusal::NoCable(interface.chars().take(64).collect()))?;
        let shown = || address.chars().take(64).collect();
        let ip = parse_host(address)
            .ok_or_else(|| HelperRefusal::Address { interface: interface.clone(), address: shown() })?;
        if let Some(team) = &cable.team {
            return Err(HelperRefusal::Team { interface: interface.clone(), team: team.clone() });
        }
        if let Some(lent) = cable.addresses.iter().find(|own| own.is_dhcp && own.config.ip != ip) {
            return Err(HelperRefusal::Lent { interface: interface.clone(), ip: lent.config.ip });
        }
        if addresses.insert(interface.clone(), ip).is_some() {
            return Err(HelperRefusal::Twice(interface.clone()));
        }
    }
    let network = |ip: Ipv4Addr| AddressConfig { ip, prefix: PREFIX_BITS, broadcast: None };
    for (interface, &ip) in &addresses {
        // Current addresses of the requested ports will be replaced; their new ones are compared with each
        // other.
        let others = current.interfaces.iter().filter(|other| !addresses.contains_key(&other.name));
        let theirs =
            others.flat_map(|other| other.addresses.iter().map(move |own| (&other.name, own.config)));
        let requested = addresses.iter().filter(|(other, _)| *other != interface);
        let requested = requested.map(|(other, &ip)| (other, network(ip)));
        if let Some((other, with)) = theirs.chain(requested).find(|(_, held)| held.overlaps(&network(ip))) {
            let (interface, other) = (interface.clone(), other.clone());
            return Err(HelperRefusal::Overlaps { interface, address: ip, other, with });
        }
    }
    Ok(addresses)
}

/// Parses `172.31.240.1/30`: a host in a private network.
fn parse_host(text: &str) -> Option<Ipv4Addr> {
    let (ip, prefix) = text.split_once('/')?;
    let ip: Ipv4Addr = ip.parse().ok()?;
    let is_host = matches!(u32::from(ip) & 3, 1 | 2);
    (prefix == "30" && ip.is_private() && is_host).then_some(ip)
}

fn check_wired_limit(
    asked: u64,
    current: &CurrentState,
    policy: &HelperPolicy,
) -> Result<u64, HelperRefusal> {
    let percent = policy.wired_percent.ok_or(HelperRefusal::WiredForbidden)?;
    let most = (policy.memory / 100 * u64::from(percent.min(100))) >> 20;
    if current.wired.is_none() {
        return Err(HelperRefusal::NoWired);
    }
    // Zero is the system's default; a request for it leaves the field out.
    if asked == 0 || asked > most {
        return Err(HelperRefusal::WiredTooMuch { asked, percent, most });
    }
    Ok(asked)
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::current_state::{Interface, InterfaceAddress};
    use super::super::protocol::HelperRequest;
    use super::*;

    fn address(ip: [u8; 4], prefix: u32, is_lent: bool) -> InterfaceAddress {
        InterfaceAddress {
            config: AddressConfig { ip: ip.into(), prefix, broadcast: None },
            is_dhcp: is_lent,
        }
    }

    /// A machine with Ethernet, two cables in a bridge, one with a DHCP address and one in a bond.
    pub fn current_state() -> CurrentState {
        let interface = |name: &str, is_cable, bridge: Option<&str>, addresses| Interface {
            name: name.to_owned(),
            is_cable,
            is_up: true,
            bridge: bridge.map(str::to_owned),
            team: None,
            addresses,
        };
        CurrentState {
            interfaces: vec![
                interface("en0", false, None, vec![address([192, 168, 1, 20], 24, true)]),
                interface("en4", true, Some("bridge0"), vec![]),
                interface("en5", true, None, vec![address([10, 9, 9, 9], 24, false)]),
                interface("en6", true, None, vec![address([10, 8, 8, 8], 24, true)]),
                Interface { team: Some("bond0".into()), ..interface("en7", true, None, vec![]) },
            ],
            services: Vec::new(),
            wired: Some(0),
        }
    }

    pub fn policy() -> HelperPolicy {
        HelperPolicy { wired_percent: Some(80), memory: 10 << 30 }
    }

    /// The helper's verdict on a request line, without applying it.
    fn check_line(line: &str, policy: &HelperPolicy) -> Result<DesiredState, HelperRefusal> {
        let request: HelperRequest =
            serde_json::from_str(line).map_err(|error| HelperRefusal::Unknown(error.to_string()))?;
        match request {
            HelperRequest::Apply(request) => check(&request, &current_state(), policy, Some("a")),
            HelperRequest::Read {} | HelperRequest::Revert {} => check(
                &MachineRequest { node: "a".into(), ..Default::default() },
                &current_state(),
                policy,
                None,
            ),
        }
    }

    #[test]
    fn request_within_policy_becomes_desired_state() {
        let line = r#"{"op":"apply","node":"a","network":{"ports":[{"interface":"en4","address":"172.31.240.1/30"}],"afterRestart":"Keep"},"wiredLimitMebibytes":8000}"#;
        let desired = check_line(line, &policy()).unwrap();
        assert_eq!((desired.ports["en4"], desired.wired), ([172, 31, 240, 1].into(), Some(8000)));
        assert!(
            check_line(r#"{"op":"read"}"#, &policy()).is_ok()
                && check_line(r#"{"op":"revert"}"#, &policy()).is_ok()
        );
    }

    #[test]
    fn helper_refuses_requests_outside_its_policy() {
        let port = |interface: &str, address: &str| {
            let ports = serde_json::json!([{"interface": interface, "address": address}]);
            serde_json::json!({"op": "apply", "node": "a", "network": {"ports": ports}}).to_string()
        };
        let private = "172.31.240.1/30";
        let cable = "is not a Thunderbolt interface";
        let network = "is not the address of a host in a private network of four";
        let unknown = "does not know the request";
        let many: Vec<_> =
            (0..33).map(|_| serde_json::json!({"interface": "en4", "address": private})).collect();
        let many = serde_json::json!({"op": "apply", "node": "a", "network": {"ports": many}}).to_string();
        let cases = [
            (port("en0", private), cable),
            (port("lo0", private), cable),
            (port("", private), cable),
            (port("en4; reboot", private), cable),
            (port("$(reboot)", private), cable),
            (port("-a", private), cable),
            (port("../en4", private), cable),
            (port("en4\n", private), cable),
            (port("bridge0", private), cable),
            (port("en4", "8.8.8.9/30"), network),
            (port("en4", "172.32.0.1/30"), network),
            (port("en4", "127.0.0.1/30"), network),
            (port("en4", "169.254.0.1/30"), network),
            (port("en4", "172.31.240.1/24"), network),
            (port("en4", "172.31.240.1"), network),
            (port("en4", "172.31.240.0/30"), network),
            (port("en4", "172.31.240.3/30"), network),
            (port("en4", "172.31.240.1/30 delete"), network),
            (port("en4", "fd00::1/30"), network),
            (port("en4", "010.0.0.1/30"), network),
            (port("en4", "192.168.1.1/30"), "lies in the network of en0"),
            (port("en6", private), "from DHCP"),
            (port("en7", private), "a member of bond0"),
            (many, "33 ports"),
            (
                r#"{"op":"apply","node":"a","network":{"ports":[{"interface":"en4","address":"10.1.0.1/30"},{"interface":"en4","address":"10.1.0.5/30"}]}}"#.to_owned(),
                "appears twice",
            ),
            (
                r#"{"op":"apply","node":"a","network":{"ports":[{"interface":"en4","address":"10.1.0.1/30"},{"interface":"en5","address":"10.1.0.2/30"}]}}"#.to_owned(),
                "lies in the network of en5",
            ),
            (
                r#"{"op":"apply","node":"a","network":{"ports":[],"cablesLast":true}}"#.to_owned(),
                "no order of network services",
            ),
            (r#"{"op":"apply","node":"b"}"#.to_owned(), "configured for node a"),
            (r#"{"op":"apply","node":"a b"}"#.to_owned(), "not the name of a node"),
            (r#"{"op":"apply","node":""}"#.to_owned(), "not the name of a node"),
            (r#"{"op":"apply","node":"a","wiredLimitMebibytes":8193}"#.to_owned(), "80 % of this machine"),
            (r#"{"op":"apply","node":"a","wiredLimitMebibytes":0}"#.to_owned(), "0 MiB may not"),
            (r#"{"op":"apply","node":"a","wiredLimitMebibytes":-1}"#.to_owned(), unknown),
            (r#"{"op":"apply","node":"a","shell":"reboot"}"#.to_owned(), unknown),
            (r#"{"op":"run","command":"reboot"}"#.to_owned(), unknown),
            (r#"{"op":"read","node":"a"}"#.to_owned(), unknown),
            (r#"{"op":"apply"}"#.to_owned(), unknown),
            ("[]".to_owned(), unknown),
            ("\0\0\0".to_owned(), unknown),
            (String::new(), unknown),
        ];
        for (line, words) in cases {
            let error = check_line(&line, &policy()).expect_err(&line).to_string();
            assert!(error.contains(words), "{line}: {error}");
        }
        let strict = HelperPolicy { wired_percent: None, ..policy() };
        let error = check_line(r#"{"op":"apply","node":"a","wiredLimitMebibytes":1}"#, &strict).unwrap_err();
        assert_eq!(error, HelperRefusal::WiredForbidden);
    }
}
