//! A tier as the planner sees it. Not what it decides for its deployments (`tier`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use russet_crds::active_hours::{ActiveHours, InvalidSchedule, active_hours};
use russet_crds::{ApprovalAction, LocalReference, Preemption, Residency, TierMode, TierSpec};

use crate::note::Note;

/// A tier in the planner's view.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TierInfo {
    /// Whether workload groups have their own nodes.
    pub mode: TierMode,
    /// Namespaces whose deployments may use it; empty for all.
    pub namespaces: Vec<String>,
    /// NodePools it may use; empty for all nodes.
    pub pools: Vec<LocalReference>,
    /// Its workload groups, in order of precedence.
    pub groups: Vec<String>,
    /// Priority of its replicas.
    pub priority: i32,
    /// The ShardingStrategy of deployments that set none of their own.
    pub strategy: Option<LocalReference>,
    /// The nodes of its groups.
    pub owned: BTreeMap<String, BTreeSet<String>>,
    /// Whether a replica that fits nowhere may preempt others.
    pub preempts: bool,
    /// How long a running replica stays.
    pub residency: Residency,
    /// OnDemand: time without requests before a deployment is unloaded.
    pub idle_after: Duration,
    /// Actions that need an approval.
    pub approvals: BTreeSet<ApprovalAction>,
    /// Whether its deployments run at this time of day.
    pub active_hours: ActiveHours,
    /// Error in its schedules.
    pub schedule_error: Option<Note>,
}

impl TierInfo {
    /// The tier at `now`, with the nodes of its workload groups.
    pub fn read(tier: &russet_crds::Tier, now: Timestamp) -> Self {
        let TierSpec {
            mode,
            namespaces,
            pool_refs,
            workload_groups,
            priority,
            default_strategy_ref,
            preemption,
            residency,
            min_residency_seconds: _,
            idle_seconds,
            schedules,
            approvals,
        } = &tier.spec;
        let name = tier.metadata.name.as_deref().unwrap_or_default();
        let hours = active_hours(schedules, now).map_err(|InvalidSchedule { index, why }| Note::Invalid {
            field: format!("Tier {name} spec.schedules[{index}]"),
            why,
        });
        let granted = tier.status.iter().flat_map(|status| &status.workload_groups);
        Self {
            mode: *mode,
            namespaces: namespaces.clone(),
            pools: pool_refs.clone(),
            groups: workload_groups.clone(),
            priority: *priority,
            strategy: default_strategy_ref.clone(),
            owned: granted
                .filter(|group| workload_groups.contains(&group.name))
                .map(|group| (group.name.clone(), group.nodes.iter().cloned().collect()))
                .collect(),
            preempts: *preemption == Preemption::LowerPriority,
            residency: *residency,
            idle_after: Duration::from_secs(u64::from(*idle_seconds)),
            approvals: approvals.iter().copied().collect(),
            // A typing error stops no running replica.
            active_hours: hours.clone().unwrap_or_default(),
            schedule_error: hours.err(),
        }
    }
}
