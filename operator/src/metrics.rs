//! Metrics of the operator: its own counters, and gauges of the objects in its caches, so that dashboards and
//! alerts need no client of the API. Not here: what an object's conditions say.

mod approvals;
mod collector;
mod copies;
mod deployments;
mod gauge_snapshot;
mod groups;
mod nodes;
mod tiers;

use prometheus::{Histogram, HistogramOpts, HistogramVec, IntCounterVec, Opts, Registry};
use russet_crds::conditions::Reason;

use crate::leader_caches::LeaderCaches;

/// Counters and histograms, registered once.
#[derive(Clone)]
pub struct OperatorMetrics {
    /// Placements tried, by outcome.
    pub placements: IntCounterVec,
    /// Seconds that the planner took for a deployment, by kind of view.
    plans: HistogramVec,
    /// Seconds from a group's new epoch to its first readiness.
    pub formation: Histogram,
    /// Reconciliations, by controller and result (`ok` or the error's variant).
    pub reconciles: IntCounterVec,
    /// Reconciliations that failed, by controller.
    pub failures: IntCounterVec,
    /// Seconds a reconciliation took, by controller.
    pub durations: HistogramVec,
    /// Epoch bumps, by reason.
    pub restarts: IntCounterVec,
    /// Access to the caches, for the gauges.
    pub caches: LeaderCaches,
}

/// Outcomes of placements that are exported as 0 before the first of them, so that the first increase counts.
const OUTCOMES: [Reason; 5] =
    [Reason::PlanFound, Reason::NothingFits, Reason::Outweighed, Reason::Preempting, Reason::NoNodes];
/// The same for rank failures.
const LOSSES: [Reason; 8] = [
    Reason::EngineExited,
    Reason::EngineNotStarted,
    Reason::EngineFailed,
    Reason::EngineSilent,
    Reason::EngineHung,
    Reason::SmokeFailed,
    Reason::AddressLost,
    Reason::PeerLost,
];

impl OperatorMetrics {
    /// Creates and registers them.
    pub fn register(registry: &Registry, leader_caches: LeaderCaches) -> Result<Self, prometheus::Error> {
        let formation = vec![0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];
        let plans = vec![0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0];
        let metrics = Self {
            placements: IntCounterVec::new(
                Opts::new(
                    "russet_placement_attempts_total",
                    "Placements tried, by the reason of their outcome.",
                ),
                &["reason"],
            )?,
            plans: HistogramVec::new(
                HistogramOpts::new(
                    "russet_plan_seconds",
                    "Seconds the planner took for a deployment, as the caches show the cluster (cached) or as the server does before anything is written (live).",
                )
                .buckets(plans),
                &["view"],
            )?,
            formation: Histogram::with_opts(
                HistogramOpts::new(
                    "russet_shardgroup_formation_seconds",
                    "Seconds from a new epoch of a ShardGroup until every rank serves.",
                )
                .buckets(formation),
            )?,
            reconciles: IntCounterVec::new(
                Opts::new("russet_operator_reconciles_total", "Reconciliations, by controller and result."),
                &["controller", "result"],
            )?,
            failures: IntCounterVec::new(
                Opts::new(
                    "russet_operator_reconcile_errors_total",
                    "Reconciliations that failed and are tried again.",
                ),
                &["controller"],
            )?,
            durations: HistogramVec::new(
                HistogramOpts::new("russet_operator_reconcile_seconds", "Seconds a reconciliation took."),
                &["controller"],
            )?,
            restarts: IntCounterVec::new(
                Opts::new(
                    "russet_shardgroup_restarts_total",
                    "Epochs begun because a rank was lost, by reason.",
                ),
                &["reason"],
            )?,
            caches: leader_caches,
        };
        for reason in OUTCOMES {
            metrics.placements.with_label_values(&[&format!("{reason:?}")]);
        }
        for reason in LOSSES {
            metrics.restarts.with_label_values(&[&format!("{reason:?}")]);
        }
        let Self {
            placements,
            plans,
            formation,
            reconciles,
            failures,
            durations,
            restarts,
            caches: leader_caches,
        } = metrics.clone();
        for counter in [placements, reconciles, failures, restarts] {
            registry.register(Box::new(counter))?;
        }
        for histogram in [plans, durations] {
            registry.register(Box::new(histogram))?;
        }
        registry.register(Box::new(formation))?;
        registry.register(Box::new(leader_caches.status().collector()?))?;
        registry.register(Box::new(collector::ClusterCollector::new(leader_caches)?))?;
        Ok(metrics)
    }

    /// Calls the planner, and records its duration; `view` is `cached` or `live`.
    pub fn time_plan<T>(&self, view: &str, plan: impl FnOnce() -> T) -> T {
        let timer = self.plans.with_label_values(&[view]).start_timer();
        let planned = plan();
        timer.observe_duration();
        planned
    }
}

#[cfg(test)]
pub mod tests {
    use std::fmt::Debug;
    use std::hash::Hash;

    use kube::Resource;
    use kube::runtime::reflector::{Store, store};
    use kube::runtime::watcher::Event;
    use russet_crds::Approval;
    use russet_crds::{InferenceNode, ModelCopy, ModelDeployment, NodePool, Shard, ShardGroup, Tier};

    use super::*;
    use crate::stores::Stores;

    /// Objects of a cluster.
    #[derive(Default)]
    pub struct Objects {
        pub nodes: Vec<InferenceNode>,
        pub pools: Vec<NodePool>,
        pub tiers: Vec<Tier>,
        pub approvals: Vec<Approval>,
        pub copies: Vec<ModelCopy>,
        pub deployments: Vec<ModelDeployment>,
        pub groups: Vec<ShardGroup>,
        pub shards: Vec<Shard>,
    }

    fn holding<K>(objects: Vec<K>) -> Store<K>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
        K::DynamicType: Eq + Hash,
    {
        let (reader, mut writer) = store();
        for object in objects {
            writer.apply_watcher_event(&Event::Apply(object));
        }
        reader
    }

    /// Caches filled by `fill`.
    pub fn filled(fill: impl FnOnce(&mut Objects)) -> Stores {
        let mut objects = Objects::default();
        fill(&mut objects);
        Stores {
            nodes: holding(objects.nodes),
            pools: holding(objects.pools),
            strategies: holding(Vec::new()),
            tiers: holding(objects.tiers),
            approvals: holding(objects.approvals),
            models: holding(Vec::new()),
            copies: holding(objects.copies),
            deployments: holding(objects.deployments),
            groups: holding(objects.groups),
            shards: holding(objects.shards),
            routes: holding(Vec::new()),
            providers: holding(Vec::new()),
            pipelines: holding(Vec::new()),
            pipeline_runs: holding(Vec::new()),
            leases: holding(Vec::new()),
            requests: holding(Vec::new()),
            changes: std::sync::Arc::default(),
        }
    }

    #[test]
    fn only_the_leader_exports_gauges_and_counters_start_at_zero() {
        let registry = Registry::new();
        let leader_caches = LeaderCaches::default();
        let metrics = OperatorMetrics::register(&registry, leader_caches.clone()).unwrap();
        assert_eq!(metrics.time_plan("cached", || 7), 7);
        let text = || prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        let standby = text();
        for line in [
            "russet_operator_leader 0",
            "russet_placement_attempts_total{reason=\"NothingFits\"} 0",
            "russet_shardgroup_restarts_total{reason=\"PeerLost\"} 0",
            "russet_plan_seconds_count{view=\"cached\"} 1",
        ] {
            assert!(standby.contains(line), "{line} is missing in\n{standby}");
        }
        assert!(!standby.contains("russet_shardgroups{"), "{standby}");
        let shown = leader_caches.publish(&filled(|_| ()));
        assert!(text().contains("russet_operator_leader 1") && text().contains("russet_shardgroups{"));
        drop(shown);
        assert_eq!(text().matches("russet_shardgroups{").count(), 0);
    }
}
