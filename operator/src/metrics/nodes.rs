//! Gauges of InferenceNodes: whether each takes work, and its memory and disk as the planner counts them.

use jiff::Timestamp;
use kube::ResourceExt as _;
use prometheus::core::Desc;
use russet_crds::conditions::{self, Type};
use russet_plan::ClusterObjects;
use russet_plan::cluster::availability;
use russet_plan::snapshot::Availability;

use super::gauge_snapshot::{GaugeFamily, GaugeSnapshot, number};
use crate::stores::Stores;

const STATES: [&str; 6] = ["open", "cordoned", "draining", "unmeasured", "unreachable", "lost"];

const INFO: GaugeFamily<4> = GaugeFamily {
    name: "russet_inferencenode_info",
    help: "1 for every InferenceNode, with what it is.",
    labels: ["node", "chip", "os", "agent_version"],
};
const AVAILABILITY: GaugeFamily<2> = GaugeFamily {
    name: "russet_inferencenode_availability",
    help: "1 for the state an InferenceNode is in, 0 for the others: open, cordoned, draining, unmeasured, unreachable or lost.",
    labels: ["node", "state"],
};
const LIMIT: GaugeFamily<1> = GaugeFamily {
    name: "russet_inferencenode_memory_limit_bytes",
    help: "Bytes all models together may take on an InferenceNode.",
    labels: ["node"],
};
const COMMITTED: GaugeFamily<1> = GaugeFamily {
    name: "russet_inferencenode_memory_committed_bytes",
    help: "Bytes of an InferenceNode that are promised to groups or still held by engines.",
    labels: ["node"],
};
const GRANTED: GaugeFamily<1> = GaugeFamily {
    name: "russet_inferencenode_memory_granted_bytes",
    help: "Bytes the agent of an InferenceNode has granted to Shards.",
    labels: ["node"],
};
const DISK: GaugeFamily<1> = GaugeFamily {
    name: "russet_inferencenode_disk_total_bytes",
    help: "Bytes of the file system under an InferenceNode's model store.",
    labels: ["node"],
};
const DISK_FREE: GaugeFamily<1> =
    GaugeFamily { name: "russet_inferencenode_disk_free_bytes", help: "Bytes free there.", labels: ["node"] };
const FABRIC: GaugeFamily<2> = GaugeFamily {
    name: "russet_inferencenode_fabric_healthy",
    help: "1 while nothing keeps the cables of an InferenceNode from what they could do, else 0, with the condition's reason; absent where no port is known.",
    labels: ["node", "reason"],
};
const LINK: GaugeFamily<4> = GaugeFamily {
    name: "russet_inferencenode_link_bits_per_second",
    help: "Bits a second of a link from an InferenceNode to another, as negotiated, and whether RDMA can run over this end.",
    labels: ["node", "peer", "interface", "rdma"],
};

/// The descriptors.
pub fn descs() -> Result<Vec<Desc>, prometheus::Error> {
    let mut descs = vec![INFO.desc()?, AVAILABILITY.desc()?, FABRIC.desc()?, LINK.desc()?];
    for family in [LIMIT, COMMITTED, GRANTED, DISK, DISK_FREE] {
        descs.push(family.desc()?);
    }
    Ok(descs)
}

/// Writes the gauges.
pub fn write(snapshot: &mut GaugeSnapshot, stores: &Stores, now: Timestamp) {
    let nodes = stores.nodes.state();
    // Models, pools and tiers reserve no memory.
    let cluster = ClusterObjects {
        nodes: nodes.clone(),
        groups: stores.groups.state(),
        shards: stores.shards.state(),
        ..ClusterObjects::default()
    };
    let view = cluster.snapshot(now);
    let committed = view.committed_bytes(|_| false);
    for node in nodes {
        let name = node.name_any();
        let status = node.status.clone().unwrap_or_default();
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        let (chip, os, version) = (text(&status.chip), text(&status.os), text(&status.agent_version));
        snapshot.set(&INFO, [&name, &chip, &os, &version], 1.0);
        let state = word(availability(&node, now));
        snapshot.set_state(&AVAILABILITY, |state| [name.clone(), state.to_owned()], &STATES, state);
        snapshot.set(&COMMITTED, [&name], number(committed.get(name.as_str()).copied().unwrap_or(0)));
        if let Some(health) = conditions::get(&status.conditions, Type::FabricHealthy) {
            let healthy = if health.status == "True" { 1.0 } else { 0.0 };
            snapshot.set(&FABRIC, [&name, &health.reason], healthy);
        }
        for link in &status.links {
            let rdma = if link.rdma_device.is_some() { "yes" } else { "no" };
            let bits = number(link.bits_per_second.unwrap_or(0));
            snapshot.set(&LINK, [&name, &link.peer, &link.interface, rdma], bits);
        }
        // A value that was never measured is absent, never 0.
        if let Some(memory) = status.memory {
            snapshot.set(&LIMIT, [&name], number(memory.serving_limit_bytes));
            snapshot.set(&GRANTED, [&name], number(memory.granted_bytes));
        }
        if let Some(disk) = status.disk {
            snapshot.set(&DISK, [&name], number(disk.total_bytes));
            snapshot.set(&DISK_FREE, [&name], number(disk.free_bytes));
        }
    }
}

fn word(availability: Availability) -> &'static str {
    match availability {
        Availability::Open => "open",
        Availability::Cordoned => "cordoned",
        Availability::Draining => "draining",
        Availability::Unmeasured => "unmeasured",
        Availability::Unreachable => "unreachable",
        Availability::Lost => "lost",
    }
}
