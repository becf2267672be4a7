//! State of one Shard on this node, and when its status is worth writing. Bookkeeping only: nothing here
//! acts.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use russet_crds::conditions::Reason;
use russet_crds::{Rendezvous, Shard, ShardStatus};
use russet_rpc::engine as pb;

use crate::address::{self, LostAddresses};
use crate::mqtt::DeploymentKey;
use crate::process::record::{EngineRecord, ProcessIdentity};
use crate::process::spawn::ReservedAddresses;
use crate::process::stop::Shutdown;
use crate::process::watch::EngineWatch;
use crate::process::{ProcessState, reform};
use crate::shard_actions::{self, ActualShard, AddressState};

/// Between two reports that differ only in bytes read.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);
/// Between two reports that differ only in memory use and throughput: statuses are not telemetry.
const GAUGE_INTERVAL: Duration = Duration::from_secs(30);

/// State of one Shard on this node.
#[derive(Debug)]
pub(super) struct ShardState {
    pub record: EngineRecord,
    pub claimed: bool,
    /// When it was claimed or adopted.
    pub since: Instant,
    pub refusal: Option<(Reason, String)>,
    pub addresses: Option<ReservedAddresses>,
    pub engine: Option<RunningEngine>,
    pub report: Option<pb::EngineState>,
    pub failure: Option<(Reason, String)>,
    pub conditions: Vec<Condition>,
    pub sent: Option<(ShardStatus, Instant)>,
}

/// An engine process of this node, started or adopted.
#[derive(Debug)]
pub(super) struct RunningEngine {
    pub process: ProcessIdentity,
    pub state: ProcessState,
    pub stopping: bool,
    /// The graceful shutdown in progress.
    pub shutdown: Option<Shutdown>,
    /// Its relation to its group.
    pub role: EngineRole,
    /// Watch of the process; stops when dropped.
    pub watch: EngineWatch,
}

/// Relation of an engine to its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EngineRole {
    /// A rank of it, or unable to reform.
    Member,
    /// Leaving it since then.
    LeavingGroup(Instant),
    /// Has left it.
    Detached,
    /// Received the next formation.
    Forming,
    /// Did not accept the next formation.
    ReformRefused,
}

impl EngineRole {
    /// The role after this report of the engine.
    pub fn next(self, report: &pb::EngineState) -> Self {
        match (report.phase(), report.reuse(), self) {
            (pb::Phase::Failed, pb::Reuse::Pending, Self::Member) => Self::LeavingGroup(Instant::now()),
            (pb::Phase::Failed, pb::Reuse::Yes, Self::Member | Self::LeavingGroup(_)) => Self::Detached,
            (pb::Phase::Failed, pb::Reuse::No, Self::LeavingGroup(_) | Self::Detached) => Self::ReformRefused,
            (.., part) => part,
        }
    }
}

impl RunningEngine {
    fn engine_state(&self) -> shard_actions::EngineState {
        match (self.role, &self.state) {
            _ if self.stopping => shard_actions::EngineState::Stopping,
            (EngineRole::Member, ProcessState::Loaded | ProcessState::Serving) => {
                shard_actions::EngineState::Loaded
            }
            (EngineRole::Member, _) => shard_actions::EngineState::Alive,
            (EngineRole::LeavingGroup(since), _) if since.elapsed() < reform::LEAVE_TIMEOUT => {
                shard_actions::EngineState::LeavingGroup
            }
            (EngineRole::LeavingGroup(_) | EngineRole::ReformRefused, _) => {
                shard_actions::EngineState::ReformRefused
            }
            (EngineRole::Detached, _) => shard_actions::EngineState::Detached,
            (EngineRole::Forming, _) => shard_actions::EngineState::Forming,
        }
    }
}

impl ShardState {
    pub fn new(record: EngineRecord) -> Self {
        Self {
            record,
            claimed: false,
            since: Instant::now(),
            refusal: None,
            addresses: None,
            engine: None,
            report: None,
            failure: None,
            conditions: Vec::new(),
            sent: None,
        }
    }

    /// Reuses the process of an earlier epoch, which has its weights and no group.
    pub fn reuse_engine(&mut self, engine: RunningEngine) {
        self.record.process = Some(engine.process.clone());
        self.record.kept = true;
        // Its reports were about another formation.
        self.engine = Some(RunningEngine { state: ProcessState::default(), ..engine });
    }

    /// Whether its engine is a serving rank.
    pub fn is_serving(&self) -> bool {
        let serves = |engine: &RunningEngine| {
            !engine.stopping && engine.role == EngineRole::Member && engine.state == ProcessState::Serving
        };
        self.failure.is_none() && !self.record.kept && self.engine.as_ref().is_some_and(serves)
    }

    fn rendezvous(&self) -> Option<&Rendezvous> {
        self.claimed.then_some(&self.record.rendezvous)
    }

    /// The state for decisions.
    pub fn actual(&self, best: IpAddr, lost: &LostAddresses) -> ActualShard {
        let rpc = &self.record.rendezvous.rpc;
        let place = match address::ip_of(rpc) {
            _ if !self.claimed => AddressState::Current,
            Some(_) if lost.contains(rpc) => AddressState::Lost,
            Some(ip) if ip != best => AddressState::Stale,
            _ => AddressState::Current,
        };
        ActualShard {
            address_state: place,
            epoch: self.record.epoch,
            rendezvous: self.rendezvous().cloned(),
            engine: self
                .engine
                .as_ref()
                .map_or(shard_actions::EngineState::None, RunningEngine::engine_state),
            failed: self.failure.is_some(),
        }
    }
}

/// Deployments whose rank 0 serves on this node.
pub(super) fn serving_deployments(
    slots: &BTreeMap<String, ShardState>,
    shards: &BTreeMap<String, Arc<Shard>>,
) -> BTreeSet<DeploymentKey> {
    let answers = |uid: &String, slot: &ShardState| {
        let now = |shard: &Arc<Shard>| shard.spec.rank == 0 && shard.spec.epoch == slot.record.epoch;
        slot.is_serving() && shards.get(uid).is_some_and(now)
    };
    let named = |slot: &ShardState| Some((slot.record.namespace.clone(), slot.record.deployment.clone()?));
    slots.iter().filter(|(uid, slot)| answers(uid, slot)).filter_map(|(_, slot)| named(slot)).collect()
}

/// Whether to write a status: at once when something is new, at intervals when only byte counts or messages
/// changed.
pub(super) fn should_send(sent: Option<&(ShardStatus, Instant)>, status: &ShardStatus) -> bool {
    let Some((sent, at)) = sent else { return true };
    let mut without_memory = ShardStatus { memory_bytes: sent.memory_bytes, ..status.clone() };
    // The first rate is news; a changed one is not.
    if let (Some(before), Some(now)) = (&sent.measured, &mut without_memory.measured) {
        now.clone_from(before);
    }
    let without_bytes = ShardStatus { loaded_bytes: sent.loaded_bytes, ..without_memory.clone() };
    match (
        *sent == *status,
        *sent == without_memory,
        without_messages(sent) == without_messages(&without_bytes),
    ) {
        (true, ..) => false,
        (_, true, _) => at.elapsed() >= GAUGE_INTERVAL,
        (.., true) => at.elapsed() >= PROGRESS_INTERVAL,
        _ => true,
    }
}

/// A status without the messages of its conditions: an engine that waits for several peers names one after
/// another.
fn without_messages(status: &ShardStatus) -> ShardStatus {
    let mut quiet = status.clone();
    quiet.conditions.iter_mut().for_each(|condition| condition.message.clear());
    quiet
}

/// A message without its numbers.
pub(super) fn wording(message: &str) -> String {
    message.chars().filter(|letter| letter.is_alphabetic()).collect()
}

#[cfg(test)]
mod tests {
    use russet_crds::MeasuredThroughput;

    use super::*;

    #[test]
    fn engine_is_reusable_only_while_it_reports_so() {
        use pb::{Phase, Reuse};
        let say = |part: EngineRole, phase: Phase, reuse: Reuse| {
            let report =
                pb::EngineState { phase: phase as i32, reuse: reuse as i32, ..pb::EngineState::default() };
            match part.next(&report) {
                EngineRole::Member => "rank",
                EngineRole::LeavingGroup(_) => "leaving",
                EngineRole::Detached => "free",
                EngineRole::Forming => "forming",
                EngineRole::ReformRefused => "refused",
            }
        };
        let leaving = EngineRole::LeavingGroup(Instant::now());
        for (part, phase, reuse, next) in [
            (EngineRole::Member, Phase::Serving, Reuse::No, "rank"),
            (EngineRole::Member, Phase::Failed, Reuse::No, "rank"),
            (EngineRole::Member, Phase::Failed, Reuse::Pending, "leaving"),
            (EngineRole::Member, Phase::Failed, Reuse::Yes, "free"),
            // It was asked to leave, and has not received the call yet.
            (leaving, Phase::Serving, Reuse::No, "leaving"),
            (leaving, Phase::Failed, Reuse::Pending, "leaving"),
            (leaving, Phase::Failed, Reuse::Yes, "free"),
            (leaving, Phase::Failed, Reuse::No, "refused"),
            (EngineRole::Detached, Phase::Failed, Reuse::Yes, "free"),
            (EngineRole::Detached, Phase::Failed, Reuse::No, "refused"),
            (EngineRole::Forming, Phase::Failed, Reuse::Yes, "forming"),
            (EngineRole::ReformRefused, Phase::Failed, Reuse::Yes, "refused"),
        ] {
            assert_eq!(say(part, phase, reuse), next, "{part:?} {phase:?} {reuse:?}");
        }
    }

    #[test]
    fn status_changes_go_out_at_once_and_gauges_rarely() {
        let base = ShardStatus { engine_pid: Some(1), ..ShardStatus::default() };
        let loaded = ShardStatus { loaded_bytes: 5, ..base.clone() };
        let memory = ShardStatus { memory_bytes: 5, ..base.clone() };
        let failed = ShardStatus { failure: Some("x".into()), ..base.clone() };
        let rate = |rate: &str| ShardStatus {
            measured: Some(MeasuredThroughput {
                tokens_per_second: rate.into(),
                ..MeasuredThroughput::default()
            }),
            ..base.clone()
        };
        let rated =
            |seconds| Some((rate("41"), Instant::now().checked_sub(Duration::from_secs(seconds)).unwrap()));
        let says = |status: &str, message: &str| {
            let verdict = serde_json::json!({
                "type": "Joined", "status": status, "reason": "Joining", "message": message,
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            });
            ShardStatus { conditions: vec![serde_json::from_value(verdict).unwrap()], ..base.clone() }
        };
        let ago =
            |seconds| Some((base.clone(), Instant::now().checked_sub(Duration::from_secs(seconds)).unwrap()));
        for (sent, status, sends) in [
            (None, &base, true),
            (ago(60), &base, false),
            (ago(0), &failed, true),
            (ago(0), &loaded, false),
            (ago(3), &loaded, true),
            (ago(3), &memory, false),
            (ago(31), &memory, true),
            (ago(0), &rate("41"), true),
            (rated(3), &rate("44"), false),
            (rated(31), &rate("44"), true),
            (rated(0), &base, true),
            (Some((says("False", "rank 1"), Instant::now())), &says("False", "rank 2"), false),
            (Some((says("False", "rank 1"), Instant::now())), &says("True", "rank 1"), true),
        ] {
            assert_eq!(should_send(sent.as_ref(), status), sends, "{status:?}");
        }
    }
}
