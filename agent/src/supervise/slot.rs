//! What this node has for one Shard, and when it is worth telling. Bookkeeping: nothing here acts.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use russet_crds::conditions::Reason;
use russet_crds::{Rendezvous, ShardStatus};
use russet_rpc::engine as pb;

use crate::address::{self, Lost};
use crate::decide::{self, Held, Place};
use crate::process::State;
use crate::process::adopt::{Process, Record};
use crate::process::spawn::Addresses;
use crate::process::stop::Ending;
use crate::process::watch::Watching;

/// Between two reports that differ only in bytes read.
const PROGRESS: Duration = Duration::from_secs(2);
/// Between two reports that differ only in bytes held and in how fast the group answers: statuses are no telemetry.
const GAUGES: Duration = Duration::from_secs(30);

/// What this node has for one Shard.
#[derive(Debug)]
pub(super) struct Slot {
    pub record: Record,
    pub claimed: bool,
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
    /// Ends the watching with the slot.
    pub _watching: Watching,
}

impl Slot {
    pub fn new(record: Record) -> Self {
        Self {
            record,
            claimed: false,
            refusal: None,
            addresses: None,
            engine: None,
            report: None,
            failure: None,
            conditions: Vec::new(),
            sent: None,
        }
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
            engine: match &self.engine {
                None => decide::Engine::None,
                Some(engine) if engine.stopping => decide::Engine::Stopping,
                Some(_) => decide::Engine::Alive,
            },
            failed: self.failure.is_some(),
        }
    }
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
