//! Gauges of ModelCopies. Copies of headers only are left out.

use std::sync::Arc;

use prometheus::core::Desc;
use russet_crds::conditions::{Type, get};
use russet_crds::{CopyMode, ModelCopy};

use super::gauge_snapshot::{GaugeFamily, GaugeSnapshot, number};

const READY: GaugeFamily<4> = GaugeFamily {
    name: "russet_modelcopy_ready",
    help: "1 while a node holds every verified file of a Model that is wanted there, else 0, with the condition's reason.",
    labels: ["namespace", "model", "node", "reason"],
};
const DONE: GaugeFamily<3> = GaugeFamily {
    name: "russet_modelcopy_done_bytes",
    help: "Bytes of a ModelCopy on disk.",
    labels: ["namespace", "model", "node"],
};
const WANTED: GaugeFamily<3> = GaugeFamily {
    name: "russet_modelcopy_wanted_bytes",
    help: "Bytes of a ModelCopy in all; absent while unknown.",
    labels: ["namespace", "model", "node"],
};
const RATE: GaugeFamily<3> = GaugeFamily {
    name: "russet_modelcopy_bytes_per_second",
    help: "Bytes a second a ModelCopy got over the last seconds it was copied.",
    labels: ["namespace", "model", "node"],
};

/// The descriptors.
pub fn descs() -> Result<Vec<Desc>, prometheus::Error> {
    Ok(vec![READY.desc()?, DONE.desc()?, WANTED.desc()?, RATE.desc()?])
}

/// Writes the gauges.
pub fn write(snapshot: &mut GaugeSnapshot, copies: &[Arc<ModelCopy>]) {
    for copy in copies.iter().filter(|copy| copy.spec.want == CopyMode::Files) {
        let (model, node) = (&copy.spec.model_ref, copy.spec.node_name.as_str());
        let own = [model.namespace.as_str(), model.name.as_str(), node];
        let status = copy.status.clone().unwrap_or_default();
        let ready = get(&status.conditions, Type::Ready);
        snapshot.set_condition(&READY, ready, |reason| [own[0], own[1], node, reason]);
        snapshot.set(&DONE, own, number(status.bytes_done));
        snapshot.set(&RATE, own, number(status.bytes_per_second));
        if status.bytes_total > 0 {
            snapshot.set(&WANTED, own, number(status.bytes_total));
        }
    }
}
