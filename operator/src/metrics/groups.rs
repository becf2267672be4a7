//! Gauges of ShardGroups: their number by state, and how often each was re-formed.

use std::collections::BTreeMap;
use std::sync::Arc;

use kube::ResourceExt as _;
use prometheus::core::Desc;
use russet_crds::ShardGroup;
use russet_crds::conditions::{Type, is_true};

use super::gauge_snapshot::{GaugeFamily, GaugeSnapshot, number};

const STATES: [&str; 4] = ["ready", "forming", "stalled", "leaving"];

const COUNT: GaugeFamily<1> = GaugeFamily {
    name: "russet_shardgroups",
    help: "ShardGroups by where they stand: ready, forming, stalled (formed anew too often) or leaving (being deleted).",
    labels: ["state"],
};
const EPOCH: GaugeFamily<3> = GaugeFamily {
    name: "russet_shardgroup_epoch",
    help: "Epoch of a ShardGroup; it grows by one each time the group is formed anew.",
    labels: ["namespace", "deployment", "group"],
};

/// The descriptors.
pub fn descs() -> Result<Vec<Desc>, prometheus::Error> {
    Ok(vec![COUNT.desc()?, EPOCH.desc()?])
}

/// Writes the gauges.
pub fn write(snapshot: &mut GaugeSnapshot, groups: &[Arc<ShardGroup>]) {
    let mut counts: BTreeMap<&str, u64> = STATES.iter().map(|state| (*state, 0)).collect();
    for group in groups {
        *counts.entry(state(group)).or_default() += 1;
        let (namespace, name) = (group.namespace().unwrap_or_default(), group.name_any());
        let epoch = number(u64::try_from(group.spec.epoch).unwrap_or(0));
        snapshot.set(&EPOCH, [&namespace, &group.spec.deployment_ref.name, &name], epoch);
    }
    for (state, count) in counts {
        snapshot.set(&COUNT, [state], number(count));
    }
}

fn state(group: &ShardGroup) -> &'static str {
    let conditions = group.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    if group.metadata.deletion_timestamp.is_some() {
        "leaving"
    } else if is_true(conditions, Type::Ready) {
        "ready"
    } else if is_true(conditions, Type::Stalled) {
        "stalled"
    } else {
        "forming"
    }
}
