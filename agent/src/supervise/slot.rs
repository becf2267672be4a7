//! What this node has for one Shard, and when it is worth telling. Bookkeeping: nothing here acts.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use russet_crds::conditions::Reason;
use russet_crds::{Rendezvous, Shard, ShardStatus};
use russet_rpc::engine as pb;

use crate::address::{self, Lost};
use crate::decide::{self, Held, Place};
use crate::presence::Deployment;
use crate::process::adopt::{Process, Record};
use crate::process::spawn::Addresses;
use crate::process::stop::Ending;
use crate::process::watch::Watching;
use crate::process::{State, again};

/// Between two reports that differ only in bytes read.
const PROGRESS: Duration = Duration::from_secs(2);
/// Between two reports that differ only in bytes held and in how fast the group answers: statuses are no telemetry.
const GAUGES: Duration = Duration::from_secs(30);

/// What this node has for one Shard.
#[derive(Debug)]
pub(super) struct Slot {
    pub record: Record,
    pub claimed: bool,
    /// When it was claimed, or found again.
    pub since: Instant,
    pub refusal: Option<(Reason, String)>,
    pub addresses: Option<Addresses>,
    pub engine: Option<Running>,
    pub report: Option<pb::EngineState>,
    pub failure: Option<(Reason, String)>,
    pub conditions: Vec<Condition>,
    pub sent: Option<(ShardStatus, Instant)>,
}

/// A process of this node, ours or adopted.
#[derive(Debug)]
pub(super) struct Running {
    pub process: Process,
    pub state: State,
    pub stopping: bool,
    /// While it is given time to answer what runs.
    pub ending: Option<Ending>,
    /// What it is to its group.
    pub part: Part,
    /// Ends the watching with the slot.
    pub watching: Watching,
}

/// What an engine is to its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// A rank of it, or of no use to the next one.
    Rank,
    /// Since then leaving it.
    Leaving(Instant),
    /// It has left it.
    Free,
    /// Told of the next one.
    Forming,
    /// Asked in vain.
    Refused,
}

impl Part {
    /// What it is once the engine has said this of itself.
    pub fn after(self, report: &pb::EngineState) -> Self {
        match (report.phase(), report.reuse(), self) {
            (pb::Phase::Failed, pb::Reuse::Asked, Self::Rank) => Self::Leaving(Instant::now()),
            (pb::Phase::Failed, pb::Reuse::Yes, Self::Rank | Self::Leaving(_)) => Self::Free,
            (pb::Phase::Failed, pb::Reuse::No, Self::Leaving(_) | Self::Free) => Self::Refused,
            (.., part) => part,
        }
    }
}

impl Running {
    fn as_decided_on(&self) -> decide::Engine {
        match (self.part, &self.state) {
            _ if self.stopping => decide::Engine::Stopping,
            (Part::Rank, State::Loaded | State::Serving) => decide::Engine::Loaded,
            (Part::Rank, _) => decide::Engine::Alive,
            (Part::Leaving(since), _) if since.elapsed() < again::LEAVING => decide::Engine::Leaving,
            (Part::Leaving(_) | Part::Refused, _) => decide::Engine::Refused,
            (Part::Free, _) => decide::Engine::Free,
            (Part::Forming, _) => decide::Engine::Forming,
        }
    }
}

impl Slot {
    pub fn new(record: Record) -> Self {
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

    /// Takes over the process of an earlier epoch, which has its weights and no group.
    pub fn keep(&mut self, engine: Running) {
        self.record.process = Some(engine.process.clone());
        self.record.kept = true;
        // What it said was about another formation.
        self.engine = Some(Running { state: State::default(), ..engine });
    }

    /// Whether its engine is a rank that serves.
    pub fn serves(&self) -> bool {
        let serves = |engine: &Running| {
            !engine.stopping && engine.part == Part::Rank && engine.state == State::Serving
        };
        self.failure.is_none() && !self.record.kept && self.engine.as_ref().is_some_and(serves)
    }

    fn rendezvous(&self) -> Option<&Rendezvous> {
        self.claimed.then_some(&self.record.rendezvous)
    }

    /// As decisions see it.
    pub fn held(&self, best: IpAddr, lost: &Lost) -> Held {
        let rpc = &self.record.rendezvous.rpc;
        let place = match address::ip_of(rpc) {
            _ if !self.claimed => Place::Right,
            Some(_) if lost.has(rpc) => Place::Lost,
            Some(ip) if ip != best => Place::Old,
            _ => Place::Right,
        };
        Held {
            place,
            epoch: self.record.epoch,
            rendezvous: self.rendezvous().cloned(),
            engine: self.engine.as_ref().map_or(decide::Engine::None, Running::as_decided_on),
            failed: self.failure.is_some(),
        }
    }
}

/// Deployments whose rank 0 answers here.
pub(super) fn answering(
    slots: &BTreeMap<String, Slot>,
    shards: &BTreeMap<String, Arc<Shard>>,
) -> BTreeSet<Deployment> {
    let answers = |uid: &String, slot: &Slot| {
        let now = |shard: &Arc<Shard>| shard.spec.rank == 0 && shard.spec.epoch == slot.record.epoch;
        slot.serves() && shards.get(uid).is_some_and(now)
    };
    let named = |slot: &Slot| Some((slot.record.namespace.clone(), slot.record.deployment.clone()?));
    slots.iter().filter(|(uid, slot)| answers(uid, slot)).filter_map(|(_, slot)| named(slot)).collect()
}

/// Whether a status is worth sending: at once when it says something new, now and then when only
/// its byte counts or its words moved.
pub(super) fn due(sent: Option<&(ShardStatus, Instant)>, status: &ShardStatus) -> bool {
    let Some((sent, at)) = sent else { return true };
    let mut without_memory = ShardStatus { memory_bytes: sent.memory_bytes, ..status.clone() };
    // That there is a rate at all is news; that it moved is none.
    if let (Some(before), Some(now)) = (&sent.measured, &mut without_memory.measured) {
        now.clone_from(before);
    }
    let without_bytes = ShardStatus { loaded_bytes: sent.loaded_bytes, ..without_memory.clone() };
    match (*sent == *status, *sent == without_memory, quiet(sent) == quiet(&without_bytes)) {
        (true, ..) => false,
        (_, true, _) => at.elapsed() >= GAUGES,
        (.., true) => at.elapsed() >= PROGRESS,
        _ => true,
    }
}

/// A status without the words of its conditions: an engine that waits for several peers names one
/// after the other.
fn quiet(status: &ShardStatus) -> ShardStatus {
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
    use russet_crds::Measured;

    use super::*;

    #[test]
    fn an_engine_is_of_use_to_the_next_group_once_it_says_so_and_until_it_takes_it_back() {
        use pb::{Phase, Reuse};
        let say = |part: Part, phase: Phase, reuse: Reuse| {
            let report =
                pb::EngineState { phase: phase as i32, reuse: reuse as i32, ..pb::EngineState::default() };
            match part.after(&report) {
                Part::Rank => "rank",
                Part::Leaving(_) => "leaving",
                Part::Free => "free",
                Part::Forming => "forming",
                Part::Refused => "refused",
            }
        };
        let leaving = Part::Leaving(Instant::now());
        for (part, phase, reuse, next) in [
            (Part::Rank, Phase::Serving, Reuse::No, "rank"),
            (Part::Rank, Phase::Failed, Reuse::No, "rank"),
            (Part::Rank, Phase::Failed, Reuse::Asked, "leaving"),
            (Part::Rank, Phase::Failed, Reuse::Yes, "free"),
            // It was asked to, and has not heard of it yet.
            (leaving, Phase::Serving, Reuse::No, "leaving"),
            (leaving, Phase::Failed, Reuse::Asked, "leaving"),
            (leaving, Phase::Failed, Reuse::Yes, "free"),
            (leaving, Phase::Failed, Reuse::No, "refused"),
            (Part::Free, Phase::Failed, Reuse::Yes, "free"),
            (Part::Free, Phase::Failed, Reuse::No, "refused"),
            (Part::Forming, Phase::Failed, Reuse::Yes, "forming"),
            (Part::Refused, Phase::Failed, Reuse::Yes, "refused"),
        ] {
            assert_eq!(say(part, phase, reuse), next, "{part:?} {phase:?} {reuse:?}");
        }
    }

    #[test]
    fn news_go_out_at_once_and_moving_numbers_now_and_then() {
        let base = ShardStatus { engine_pid: Some(1), ..ShardStatus::default() };
        let loaded = ShardStatus { loaded_bytes: 5, ..base.clone() };
        let memory = ShardStatus { memory_bytes: 5, ..base.clone() };
        let failed = ShardStatus { failure: Some("x".into()), ..base.clone() };
        let rate = |rate: &str| ShardStatus {
            measured: Some(Measured { tokens_per_second: rate.into(), ..Measured::default() }),
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
            assert_eq!(due(sent.as_ref(), status), sends, "{status:?}");
        }
    }
}
