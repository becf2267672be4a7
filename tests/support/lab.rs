//! Two machines on one computer: this one, and a network namespace with its own address, linked by a virtual
//! cable. If namespaces are not allowed the second machine falls back to loopback, with a message; CI does
//! not accept that.

use std::net::{IpAddr, Ipv4Addr};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// One machine of the lab.
#[derive(Clone, Debug)]
pub struct LabMachine {
    /// Node name.
    pub name: String,
    /// Address for the other machine.
    pub address: IpAddr,
    namespace: Option<String>,
}

impl LabMachine {
    /// A command that runs on this machine.
    pub fn command(&self, program: &std::path::Path) -> tokio::process::Command {
        match &self.namespace {
            None => tokio::process::Command::new(program),
            Some(namespace) => {
                let mut command = tokio::process::Command::new("ip");
                command.args(["netns", "exec", namespace]).arg(program);
                command
            }
        }
    }
}

/// A fault in the far machine's network; dropping it restores the network.
pub struct NetworkFault {
    namespace: String,
    /// Commands of `ip` that restore it.
    repair: Vec<String>,
}

impl Drop for NetworkFault {
    fn drop(&mut self) {
        for command in &self.repair {
            let _ = ip_in(&self.namespace, command);
        }
    }
}

/// The two machines; dropping it removes the cable and the namespace.
pub struct TwoMachineLab {
    /// This computer.
    pub near: LabMachine,
    /// The other machine.
    pub far: LabMachine,
    /// Ends of the second cable between the two, where Macs would have a Thunderbolt cable.
    pub wire: Option<[IpAddr; 2]>,
    /// Why both are on loopback, if they are.
    pub fallback: Option<String>,
    namespace: Option<String>,
}

/// Names of both ends of a virtual cable: near and far.
fn ends(cable: char) -> [String; 2] {
    let id = std::process::id() % 1_000_000;
    [format!("rs{id}{cable}a"), format!("rs{id}{cable}b")]
}

/// The network between the machines.
const NETWORK: char = 'n';
/// Second byte of the addresses of the network that the far machine moves to.
const MOVED_NETWORK: u8 = 215;
/// The second cable.
const WIRE: char = 'w';

impl TwoMachineLab {
    /// Creates the second machine.
    pub fn new() -> Result<Self> {
        match Self::with_namespace() {
            Ok(lab) => Ok(lab),
            Err(error) if std::env::var_os("CI").is_some() => {
                Err(error.context("CI wants two machines with their own networks"))
            }
            Err(error) => {
                let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
                Ok(Self {
                    near: LabMachine { name: "node-a".into(), address: loopback, namespace: None },
                    far: LabMachine { name: "node-b".into(), address: loopback, namespace: None },
                    wire: None,
                    fallback: Some(format!("{error:#}")),
                    namespace: None,
                })
            }
        }
    }

    /// Pulls the cable of the network between the machines.
    pub fn cut(&self) -> Result<NetworkFault> {
        self.pull(NETWORK)
    }

    /// Pulls the second cable.
    pub fn cut_wire(&self) -> Result<NetworkFault> {
        self.pull(WIRE)
    }

    fn pull(&self, cable: char) -> Result<NetworkFault> {
        let [_, there] = ends(cable);
        let link = |state| vec![format!("link set {there} {state}")];
        self.cut_by(&link("down"), link("up"))
    }

    /// Moves the far machine into another network, as another Wi-Fi does: its address goes without a word to anybody that
    /// it is connected with. It gets the new one.
    pub fn change_address(&self) -> Result<(IpAddr, NetworkFault)> {
        let [here, there] = ends(NETWORK);
        let IpAddr::V4(near) = self.near.address else { bail!("the near machine has no IPv4 address") };
        let IpAddr::V4(far) = self.far.address else { bail!("the far machine has no IPv4 address") };
        let moved = |address: Ipv4Addr| {
            let [_, _, third, fourth] = address.octets();
            Ipv4Addr::new(10, MOVED_NETWORK, third, fourth)
        };
        // It is gone with the cable.
        ip(&["addr", "replace", &format!("{}/30", moved(near)), "dev", &here])?;
        let cut = [
            format!("addr del {far}/30 dev {there}"),
            format!("addr add {}/30 dev {there}", moved(far)),
            format!("route replace {near}/32 dev {there}"),
        ];
        let mend = vec![
            format!("route del {near}/32 dev {there}"),
            format!("addr del {}/30 dev {there}", moved(far)),
            format!("addr add {far}/30 dev {there}"),
        ];
        Ok((moved(far).into(), self.cut_by(&cut, mend)?))
    }

    /// Bytes received on the near machine over the second cable.
    pub fn wire_bytes(&self) -> Result<u64> {
        let [here, _] = ends(WIRE);
        let path = format!("/sys/class/net/{here}/statistics/rx_bytes");
        Ok(std::fs::read_to_string(&path).with_context(|| path)?.trim().parse()?)
    }

    /// Drops packets of the far machine to these TCP ports, and no others.
    pub fn cut_ports(&self, ports: &[u16]) -> Result<NetworkFault> {
        self.drop_packets("dport", ports)
    }

    /// Drops packets of the far machine to or from these TCP ports.
    pub fn cut_connections(&self, ports: &[u16]) -> Result<[NetworkFault; 2]> {
        Ok([self.drop_packets("dport", ports)?, self.drop_packets("sport", ports)?])
    }

    fn drop_packets(&self, end: &str, ports: &[u16]) -> Result<NetworkFault> {
        let rules = |verb| {
            let rule = |port| format!("rule {verb} ipproto tcp {end} {port} blackhole");
            ports.iter().map(rule).collect::<Vec<_>>()
        };
        self.cut_by(&rules("add"), rules("del"))
    }

    fn cut_by(&self, cut: &[String], mend: Vec<String>) -> Result<NetworkFault> {
        let namespace = self.namespace.clone().context("both machines share one loopback")?;
        // Created first, so that a failure half way is undone too.
        let undo = NetworkFault { namespace, repair: mend };
        for command in cut {
            ip_in(&undo.namespace, command)?;
        }
        Ok(undo)
    }

    fn with_namespace() -> Result<Self> {
        let id = std::process::id();
        let namespace = format!("russet-{id}");
        // An unrouted /30, spread by process id so that two labs do not collide.
        let [third, fourth] = [(id >> 6) as u8, ((id & 0x3f) << 2) as u8];
        let address = |second, end| Ipv4Addr::new(10, second, third, fourth + end);
        let [network, wire] = [213, 214].map(|second| [address(second, 1), address(second, 2)]);
        ip(&["netns", "add", &namespace])?;
        // From here on a failure removes the namespace again.
        let lab = Self {
            near: LabMachine { name: "node-a".into(), address: network[0].into(), namespace: None },
            far: LabMachine {
                name: "node-b".into(),
                address: network[1].into(),
                namespace: Some(namespace.clone()),
            },
            wire: Some(wire.map(IpAddr::from)),
            fallback: None,
            namespace: Some(namespace.clone()),
        };
        for (cable, [near, far]) in [(NETWORK, network), (WIRE, wire)] {
            let [here, there] = ends(cable);
            ip(&["link", "add", &here, "type", "veth", "peer", "name", &there])?;
            ip(&["link", "set", &there, "netns", &namespace])?;
            ip(&["addr", "add", &format!("{near}/30"), "dev", &here])?;
            ip(&["link", "set", &here, "up"])?;
            ip(&["-n", &namespace, "addr", "add", &format!("{far}/30"), "dev", &there])?;
            ip(&["-n", &namespace, "link", "set", &there, "up"])?;
        }
        ip(&["-n", &namespace, "link", "set", "lo", "up"])?;
        Ok(lab)
    }
}

impl Drop for TwoMachineLab {
    fn drop(&mut self) {
        if let Some(namespace) = &self.namespace {
            // Removing the namespace removes its end of the cable, and so the cable.
            let _ = ip(&["netns", "del", namespace]);
        }
    }
}

fn ip_in(namespace: &str, command: &str) -> Result<()> {
    let words: Vec<&str> = ["-n", namespace].into_iter().chain(command.split_whitespace()).collect();
    ip(&words)
}

fn ip(arguments: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(arguments).output().context("cannot run `ip`; install iproute2")?;
    if !output.status.success() {
        bail!("`ip {}` failed: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
