//! Gauges of ModelDeployments: desired, ready and pending replicas with the reason, and predicted speed.

use std::sync::Arc;

use kube::ResourceExt as _;
use prometheus::core::Desc;
use russet_crds::ModelDeployment;
use russet_crds::conditions::{Type, get};

use super::gauge_snapshot::{GaugeFamily, GaugeSnapshot};

const INFO: GaugeFamily<5> = GaugeFamily {
    name: "russet_modeldeployment_info",
    help: "1 for every ModelDeployment, with what it runs and where it may.",
    labels: ["namespace", "deployment", "model", "tier", "workload_group"],
};
const READY: GaugeFamily<4> = GaugeFamily {
    name: "russet_modeldeployment_ready",
    help: "1 while a ModelDeployment is Ready, else 0, with the condition's reason.",
    labels: ["namespace", "deployment", "tier", "reason"],
};
const PLACED: GaugeFamily<4> = GaugeFamily {
    name: "russet_modeldeployment_placed",
    help: "1 while every replica has its nodes, else 0, with the reason of what waits.",
    labels: ["namespace", "deployment", "tier", "reason"],
};
const WANTED: GaugeFamily<3> = GaugeFamily {
    name: "russet_modeldeployment_replicas_wanted",
    help: "Replicas a ModelDeployment asks for.",
    labels: ["namespace", "deployment", "tier"],
};
const ANSWERING: GaugeFamily<3> = GaugeFamily {
    name: "russet_modeldeployment_replicas_ready",
    help: "Replicas of a ModelDeployment that answer.",
    labels: ["namespace", "deployment", "tier"],
};
const STREAM: GaugeFamily<3> = GaugeFamily {
    name: "russet_modeldeployment_predicted_tokens_per_second",
    help: "Tokens a second the planner expects of one undisturbed stream of a replica; absent where a chip is unknown.",
    labels: ["namespace", "deployment", "tier"],
};
const TOTAL: GaugeFamily<3> = GaugeFamily {
    name: "russet_modeldeployment_predicted_total_tokens_per_second",
    help: "Tokens a second the planner expects of all streams of a replica together.",
    labels: ["namespace", "deployment", "tier"],
};
const FIRST_TOKEN: GaugeFamily<3> = GaugeFamily {
    name: "russet_modeldeployment_predicted_ttft_seconds",
    help: "Seconds the planner expects from a prompt of 1,024 tokens to its first token.",
    labels: ["namespace", "deployment", "tier"],
};

/// The descriptors.
pub fn descs() -> Result<Vec<Desc>, prometheus::Error> {
    Ok(vec![
        INFO.desc()?,
        READY.desc()?,
        PLACED.desc()?,
        WANTED.desc()?,
        ANSWERING.desc()?,
        STREAM.desc()?,
        TOTAL.desc()?,
        FIRST_TOKEN.desc()?,
    ])
}

/// Writes the gauges.
pub fn write(snapshot: &mut GaugeSnapshot, deployments: &[Arc<ModelDeployment>]) {
    for deployment in deployments {
        let (namespace, name) = (deployment.namespace().unwrap_or_default(), deployment.name_any());
        let spec = &deployment.spec;
        let tier = spec.tier_ref.as_ref().map_or("", |tier| tier.name.as_str());
        let own = [namespace.as_str(), name.as_str(), tier];
        let group = spec.workload_group.as_deref().unwrap_or_default();
        snapshot.set(&INFO, [&namespace, &name, &spec.model_ref.name, tier, group], 1.0);
        snapshot.set(&WANTED, own, f64::from(spec.replicas));
        let status = deployment.status.clone().unwrap_or_default();
        snapshot.set(&ANSWERING, own, f64::from(status.ready_replicas));
        for (family, kind) in [(&READY, Type::Ready), (&PLACED, Type::Placed)] {
            let condition = get(&status.conditions, kind);
            snapshot.set_condition(family, condition, |reason| [&namespace, &name, tier, reason]);
        }
        let Some(predicted) = status.placement.and_then(|placement| placement.predicted) else { continue };
        for (family, rate) in
            [(&STREAM, &predicted.tokens_per_second), (&TOTAL, &predicted.total_tokens_per_second)]
        {
            if let Ok(rate) = rate.parse() {
                snapshot.set(family, own, rate);
            }
        }
        snapshot.set(&FIRST_TOKEN, own, f64::from(predicted.ttft_milliseconds) / 1000.0);
    }
}
