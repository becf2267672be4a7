//! Gauges of NodePools and Tiers, from their statuses.

use std::sync::Arc;

use kube::ResourceExt as _;
use prometheus::core::Desc;
use russet_crds::conditions::{Type, get};
use russet_crds::{NodePool, PoolMemory, Tier};

use super::gauge_snapshot::{GaugeFamily, GaugeSnapshot, number};

const POOL_NODES: GaugeFamily<1> = GaugeFamily {
    name: "russet_nodepool_nodes",
    help: "InferenceNodes a NodePool's selector takes.",
    labels: ["pool"],
};
const POOL_READY: GaugeFamily<1> = GaugeFamily {
    name: "russet_nodepool_nodes_ready",
    help: "Those among them that take new work.",
    labels: ["pool"],
};
const POOL_MEMORY: MemoryGauges = MemoryGauges {
    limit: GaugeFamily {
        name: "russet_nodepool_memory_limit_bytes",
        help: "Bytes models may take on the nodes of a NodePool.",
        labels: ["pool"],
    },
    committed: GaugeFamily {
        name: "russet_nodepool_memory_committed_bytes",
        help: "Bytes promised to groups or still held by engines there.",
        labels: ["pool"],
    },
    free: GaugeFamily {
        name: "russet_nodepool_memory_free_bytes",
        help: "Bytes free on those of its nodes that take new work.",
        labels: ["pool"],
    },
};
const TIER_INFO: GaugeFamily<2> = GaugeFamily {
    name: "russet_tier_info",
    help: "1 for every Tier, with its mode.",
    labels: ["tier", "mode"],
};
const TIER_READY: GaugeFamily<2> = GaugeFamily {
    name: "russet_tier_ready",
    help: "1 while a Tier is Ready, else 0, with the condition's reason.",
    labels: ["tier", "reason"],
};
const TIER_PRIORITY: GaugeFamily<1> = GaugeFamily {
    name: "russet_tier_priority",
    help: "What replicas of a Tier count where room is short.",
    labels: ["tier"],
};
const TIER_DEPLOYMENTS: GaugeFamily<1> = GaugeFamily {
    name: "russet_tier_deployments",
    help: "ModelDeployments that name a Tier.",
    labels: ["tier"],
};
const TIER_NODES: GaugeFamily<2> = GaugeFamily {
    name: "russet_tier_nodes",
    help: "InferenceNodes that a workload group of a Dedicated Tier has for itself.",
    labels: ["tier", "workload_group"],
};
const TIER_MEMORY: MemoryGauges = MemoryGauges {
    limit: GaugeFamily {
        name: "russet_tier_memory_limit_bytes",
        help: "Bytes models may take on the nodes of a Tier; of a Dedicated one, on those its groups have.",
        labels: ["tier"],
    },
    committed: GaugeFamily {
        name: "russet_tier_memory_committed_bytes",
        help: "Bytes promised to groups or still held by engines there.",
        labels: ["tier"],
    },
    free: GaugeFamily {
        name: "russet_tier_memory_free_bytes",
        help: "Bytes free on those of its nodes that take new work.",
        labels: ["tier"],
    },
};

struct MemoryGauges {
    limit: GaugeFamily<1>,
    committed: GaugeFamily<1>,
    free: GaugeFamily<1>,
}

impl MemoryGauges {
    fn write(&'static self, snapshot: &mut GaugeSnapshot, name: &str, memory: Option<&PoolMemory>) {
        // Without a status there is no value.
        let Some(memory) = memory else { return };
        snapshot.set(&self.limit, [name], number(memory.serving_limit_bytes));
        snapshot.set(&self.committed, [name], number(memory.committed_bytes));
        snapshot.set(&self.free, [name], number(memory.free_bytes));
    }
}

/// The descriptors.
pub fn descs() -> Result<Vec<Desc>, prometheus::Error> {
    let mut descs = vec![TIER_INFO.desc()?, TIER_READY.desc()?, TIER_NODES.desc()?];
    for family in [POOL_NODES, POOL_READY, TIER_PRIORITY, TIER_DEPLOYMENTS] {
        descs.push(family.desc()?);
    }
    for MemoryGauges { limit, committed, free } in [POOL_MEMORY, TIER_MEMORY] {
        descs.extend([limit.desc()?, committed.desc()?, free.desc()?]);
    }
    Ok(descs)
}

/// Writes the gauges.
pub fn write(snapshot: &mut GaugeSnapshot, pools: &[Arc<NodePool>], tiers: &[Arc<Tier>]) {
    for pool in pools {
        let name = pool.name_any();
        let Some(status) = &pool.status else { continue };
        snapshot.set(&POOL_NODES, [&name], f64::from(status.nodes));
        snapshot.set(&POOL_READY, [&name], f64::from(status.ready_nodes));
        POOL_MEMORY.write(snapshot, &name, status.memory.as_ref());
    }
    for tier in tiers {
        let name = tier.name_any();
        snapshot.set(&TIER_INFO, [&name, &format!("{:?}", tier.spec.mode)], 1.0);
        snapshot.set(&TIER_PRIORITY, [&name], f64::from(tier.spec.priority));
        let Some(status) = &tier.status else { continue };
        snapshot.set(&TIER_DEPLOYMENTS, [&name], f64::from(status.deployments));
        TIER_MEMORY.write(snapshot, &name, status.memory.as_ref());
        for group in &status.workload_groups {
            snapshot.set(&TIER_NODES, [&name, &group.name], number(group.nodes.len() as u64));
        }
        if let Some(ready) = get(&status.conditions, Type::Ready) {
            snapshot.set_condition(&TIER_READY, Some(ready), |reason| [&name, reason]);
        }
    }
}
