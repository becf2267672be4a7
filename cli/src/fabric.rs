//! `russet fabric`: the machines' ports, where their cables lead, whether RDMA can run over each, and if not,
//! why not and the remedy (`show`); changes to their networks that enable it (`plan`); and these changes
//! applied and reverted ([`apply`]).

mod apply;

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use kube::ResourceExt as _;
use russet_crds::conditions::{Type, get};
use russet_crds::{FabricPort, InferenceNode, InferenceNodeStatus, LinkMeasured};
use russet_plan::fabric::{address_plan, network_spec, show_bits};
use russet_rpc::list_item::list_decodable;

use crate::client::Connection;
use crate::get::format_table;
use crate::plan::text::wrap;
use crate::stdout::out;

/// Minimum columns of a terminal.
const WIDTH: usize = 100;

/// Arguments of `russet fabric`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    verb: FabricVerb,
}

#[derive(clap::Subcommand)]
enum FabricVerb {
    /// Show the ports, where their cables lead, and what prevents RDMA on each.
    Show {
        /// Name of the node; without it, all nodes.
        node: Option<String>,
        #[command(flatten)]
        connection: Connection,
    },
    /// Show the changes to the machines' networks that enable RDMA over every cable.
    Plan {
        /// Range for the cables' networks: the first of 4096 addresses.
        #[arg(long, default_value_t = address_plan::DEFAULT_RANGE)]
        range: Ipv4Addr,
        #[command(flatten)]
        connection: Connection,
    },
    /// Let the machines' root helpers make these changes, and wait until they have.
    Apply {
        /// Range for the cables' networks: the first of 4096 addresses.
        #[arg(long, default_value_t = address_plan::DEFAULT_RANGE)]
        range: Ipv4Addr,
        /// Keep the changes after restarts of the machines.
        #[arg(long)]
        keep: bool,
        #[command(flatten)]
        asking: apply::ApplyOptions,
    },
    /// Let the machines revert all applied changes, and wait until they have.
    Revert {
        #[command(flatten)]
        asking: apply::ApplyOptions,
    },
}

/// Runs the subcommand.
pub async fn run(arguments: Arguments) -> Result<()> {
    match arguments.verb {
        FabricVerb::Show { node, connection } => out!("{}", show(&nodes(&connection, node).await?))?,
        FabricVerb::Plan { range, connection } => out!("{}", plan(&nodes(&connection, None).await?, range)?)?,
        FabricVerb::Apply { range, keep, asking } => {
            apply::apply(&nodes(&asking.connection, None).await?, range, keep, &asking).await?;
        }
        FabricVerb::Revert { asking } => {
            apply::revert(&nodes(&asking.connection, None).await?, &asking).await?
        }
    }
    Ok(())
}

/// All nodes, or the named one.
async fn nodes(connection: &Connection, node: Option<String>) -> Result<Vec<Arc<InferenceNode>>> {
    let all = list_decodable(&connection.client().await?).await.context("the nodes could not be listed")?;
    let mut nodes: Vec<Arc<InferenceNode>> = all.into_iter().map(Arc::new).collect();
    if let Some(node) = node {
        nodes.retain(|known| known.name_any() == node);
        if nodes.is_empty() {
            bail!("there is no InferenceNode {node}; `russet get inferencenodes` lists them");
        }
    }
    nodes.sort_by_key(|node| node.name_any());
    Ok(nodes)
}

/// The changes, by machine, as commands to type there.
fn plan(nodes: &[Arc<InferenceNode>], range: Ipv4Addr) -> Result<String> {
    let known: BTreeMap<_, _> =
        nodes.iter().filter_map(|node| Some((node.name_any(), node.status.clone()?))).collect();
    let changes = address_plan::changes(&known, range)?;
    let orders = known.iter().filter(|(_, status)| network_spec::routes_internet_over_cable(status));
    let orders: Vec<&str> = orders.map(|(name, _)| name.as_str()).collect();
    if changes.is_empty() && orders.is_empty() {
        return Ok(
            "nothing to change: no cable lacks only an address; `russet fabric show` lists what each one lacks\n"
                .to_owned(),
        );
    }
    let mut text = String::new();
    for (node, made) in &changes {
        text.push_str(&format!("on {node}:\n"));
        made.iter().for_each(|change| text.push_str(&format!("  sudo {}\n", change.command().join(" "))));
        text.push_str("  to undo it:\n");
        made.iter()
            .rev()
            .for_each(|change| text.push_str(&format!("    sudo {}\n", change.undo().join(" "))));
    }
    for node in orders {
        text.push_str(&format!(
            "on {node}, whose internet traffic goes over a cable:\n  network services of cables behind all others (networksetup -ordernetworkservices)\n"
        ));
    }
    text.push_str("These last until a machine restarts, except the order of services. Nothing was changed; `russet fabric apply` lets\nthe agents make the changes. Have physical access to a machine that is reached over such a port\nor its bridge when you run them.\n");
    Ok(text)
}

/// The ports as a table, followed by each node's messages.
fn show(nodes: &[Arc<InferenceNode>]) -> String {
    let head = ["NODE", "PORT", "INTERFACE", "ADDRESS", "LEADS TO", "SPEED", "MEASURED", "RDMA"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    let mut said = String::new();
    for node in nodes {
        let Some(status) = &node.status else { continue };
        let name = node.name_any();
        lines.extend(status.ports.iter().map(|port| port_row(&name, port, status)));
        if let Some(health) = get(&status.conditions, Type::FabricHealthy) {
            let mark = if health.status == "True" { "✓" } else { "✗" };
            said.push_str(&format!("\n{mark} {name}: {}\n", health.reason));
            for words in health.message.lines() {
                for (index, line) in wrap(words, WIDTH - 4).into_iter().enumerate() {
                    said.push_str(if index == 0 { "  " } else { "    " });
                    said.push_str(&line);
                    said.push('\n');
                }
            }
        }
    }
    if lines.len() == 1 {
        return "no node has a port that a cable could join to another machine\n".to_owned();
    }
    format_table(&lines) + &said
}

fn port_row(node: &str, port: &FabricPort, status: &InferenceNodeStatus) -> Vec<String> {
    let link = status.links.iter().find(|link| link.interface == port.interface);
    let peer = port.peers.first();
    let nothing = || "-".to_owned();
    let leads = match (link, peer) {
        (Some(link), _) => format!("node {}", link.peer),
        (None, Some(peer)) => peer.name.clone(),
        (None, None) => nothing(),
    };
    let bits = link.and_then(|link| link.bits_per_second).or(peer.and_then(|peer| peer.bits_per_second));
    let address = match (&port.address, &port.bridge) {
        (Some(address), _) => address.clone(),
        (None, Some(bridge)) => format!("in {bridge}"),
        (None, None) => nothing(),
    };
    let rdma = port.rdma_device.clone().or_else(|| port.reason.clone()).unwrap_or_else(nothing);
    let speed = bits.map_or_else(nothing, show_bits);
    let measured = link.and_then(|link| link.measured).map_or_else(nothing, show_measured);
    let cells =
        [node.to_owned(), port.name.clone(), port.interface.clone(), address, leads, speed, measured, rdma];
    // Names come from people and machines and may contain anything.
    cells.map(|cell| cell.replace(char::is_control, "?")).to_vec()
}

/// Bandwidth measured over TLS, and the round-trip time.
fn show_measured(measured: LinkMeasured) -> String {
    let carries = measured.bits_per_second.map(show_bits);
    let trip = match measured.round_trip_microseconds {
        Some(micros) => format!("{:.2} ms", f64::from(micros) / 1e3),
        None => "no answer".to_owned(),
    };
    carries.into_iter().chain([trip]).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use russet_crds::conditions::{self, Reason};
    use russet_crds::{InferenceNodeSpec, Link, PortPeer};

    use super::*;

    #[test]
    fn ports_are_a_table_and_what_is_wrong_stands_below() {
        let port = |number: u32| FabricPort {
            name: format!("Thunderbolt {number}"),
            interface: format!("en{number}"),
            ..FabricPort::default()
        };
        let peer = |name: &str| PortPeer {
            name: name.to_owned(),
            bits_per_second: Some(40_000_000_000),
            ..PortPeer::default()
        };
        let joined = FabricPort {
            address: Some("192.0.2.1".to_owned()),
            peers: vec![peer("Mac")],
            rdma_device: Some("rdma_en1".to_owned()),
            ..port(1)
        };
        let slow = FabricPort {
            peers: vec![peer("Mac mini")],
            bridge: Some("bridge0".to_owned()),
            reason: Some("NoThunderbolt5".to_owned()),
            ..port(2)
        };
        let idle = FabricPort { reason: Some("NothingPlugged".to_owned()), ..port(3) };
        let link = Link {
            peer: "b".to_owned(),
            interface: "en1".to_owned(),
            bits_per_second: Some(80_000_000_000),
            measured: Some(LinkMeasured {
                round_trip_microseconds: Some(310),
                bits_per_second: Some(26_000_000_000),
            }),
            ..Link::default()
        };
        let mut status =
            InferenceNodeStatus { ports: vec![joined, slow, idle], links: vec![link], ..Default::default() };
        let words = "Thunderbolt 1 (en1): plug it in again\nThunderbolt 2 (en2): the cable runs at 40 Gb/s, as \
                     Thunderbolt 4 does; it carries IP";
        let (kind, reason) = (Type::FabricHealthy, Reason::RdmaPortDown);
        conditions::set(&mut status.conditions, kind, false, reason, words, None, Timestamp::UNIX_EPOCH);
        let mut node = InferenceNode::new("a", InferenceNodeSpec::default());
        node.status = Some(status);
        let shown = show(&[Arc::new(node)]);
        assert_eq!(
            shown,
            "NODE   PORT            INTERFACE   ADDRESS      LEADS TO   SPEED       MEASURED             RDMA\n\
             a      Thunderbolt 1   en1         192.0.2.1    node b     80 Gbit/s   26 Gbit/s, 0.31 ms   rdma_en1\n\
             a      Thunderbolt 2   en2         in bridge0   Mac mini   40 Gbit/s   -                    NoThunderbolt5\n\
             a      Thunderbolt 3   en3         -            -          -           -                    NothingPlugged\n\
             \n✗ a: RdmaPortDown\n\
             \x20 Thunderbolt 1 (en1): plug it in again\n\
             \x20 Thunderbolt 2 (en2): the cable runs at 40 Gb/s, as Thunderbolt 4 does; it carries IP\n"
        );
        assert_eq!(show_measured(LinkMeasured::default()), "no answer");
        let bare = Arc::new(InferenceNode::new("a", InferenceNodeSpec::default()));
        assert!(show(&[bare]).starts_with("no node has a port"));
    }

    #[test]
    fn changes_are_commands_to_type_and_to_take_back() {
        let end = |name: &str, own: &str, sees: &str| {
            let peer = PortPeer { domain: Some(sees.to_owned()), ..PortPeer::default() };
            let port = FabricPort {
                interface: "en2".to_owned(),
                domain: Some(own.to_owned()),
                peers: vec![peer],
                bridge: Some("bridge0".to_owned()),
                reason: Some("PortInBridge".to_owned()),
                ..FabricPort::default()
            };
            let mut node = InferenceNode::new(name, InferenceNodeSpec::default());
            node.status = Some(InferenceNodeStatus { ports: vec![port], ..Default::default() });
            Arc::new(node)
        };
        let pair = [end("a", "A", "B"), end("b", "B", "A")];
        let planned = plan(&pair, Ipv4Addr::new(10, 9, 8, 7)).unwrap();
        assert!(
            planned.starts_with(
                "on a:\n  sudo ifconfig bridge0 deletem en2\n  sudo ifconfig en2 inet 10.9.0.1 netmask 255.255.255.252 alias\n  to undo it:\n    sudo ifconfig en2 inet 10.9.0.1 delete\n    sudo ifconfig bridge0 addm en2\non b:\n"
            ),
            "{planned}"
        );
        assert!(plan(&pair[..1], address_plan::DEFAULT_RANGE).unwrap().starts_with("nothing to change"));
    }
}
