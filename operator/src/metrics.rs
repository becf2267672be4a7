//! What the operator counts. Not conditions: those speak of objects, these of the operator.

use prometheus::{Histogram, HistogramOpts, HistogramVec, IntCounterVec, Opts, Registry};

/// Counters and histograms, registered once.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Placements tried, by outcome.
    pub placements: IntCounterVec,
    /// Seconds from a group's new epoch to its first readiness.
    pub formation: Histogram,
    /// Reconciliations, by controller and result (`ok` or the error's variant).
    pub reconciles: IntCounterVec,
    /// Seconds a reconciliation took, by controller.
    pub durations: HistogramVec,
    /// Epoch bumps, by reason.
    pub restarts: IntCounterVec,
}

impl Metrics {
    /// Creates and registers them.
    pub fn register(registry: &Registry) -> Result<Self, prometheus::Error> {
        let formation = vec![0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];
        let metrics = Self {
            placements: IntCounterVec::new(
                Opts::new(
                    "russet_placement_attempts_total",
                    "Placements tried, by the reason of their outcome.",
                ),
                &["reason"],
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
        };
        registry.register(Box::new(metrics.placements.clone()))?;
        registry.register(Box::new(metrics.formation.clone()))?;
        registry.register(Box::new(metrics.reconciles.clone()))?;
        registry.register(Box::new(metrics.durations.clone()))?;
        registry.register(Box::new(metrics.restarts.clone()))?;
        Ok(metrics)
    }
}
