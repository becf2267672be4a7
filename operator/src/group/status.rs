//! The status of a group: the furthest stage that all ranks have reached, and the one rank that blocks.

use std::time::Duration;

use jiff::Timestamp;
use russet_crds::conditions::{self, Reason, Type, get};
use russet_crds::{Backend, Endpoint, ShardGroupStatus};
use russet_plan::quantity::show;

use super::decide::{REFUSAL_BACKOFF, RankFailure, RankState};
use super::observe::ObservedGroup;

struct GroupProgress {
    reserved: bool,
    formed: bool,
    ready: bool,
    reason: Reason,
    message: String,
}

/// The status at `epoch`, which is new if `loss` ended the observed one.
pub fn status(
    observed: &ObservedGroup,
    states: &[RankState<'_>],
    loss: Option<&RankFailure>,
    pause: Option<Duration>,
    epoch: i64,
    now: Timestamp,
) -> ShardGroupStatus {
    let group = &observed.group;
    let mut status = group.status.clone().unwrap_or_default();
    let generation = group.metadata.generation;
    status.observed_generation = generation;
    status.restarts = u32::try_from(epoch - 1).unwrap_or(u32::MAX);
    if let Some(loss) = loss {
        status.last_loss = Some(loss.message.clone());
    }
    let stage = match (loss, pause) {
        (Some(loss), Some(_)) if loss.reason == Reason::ModelRefused => failed(
            loss.reason,
            format!(
                "{}; it would be refused again, so change the Model or the deployment; the next attempt is {} minutes after this one",
                loss.message,
                REFUSAL_BACKOFF.as_secs() / 60
            ),
        ),
        (Some(loss), Some(pause)) => failed(
            Reason::TooManyRestarts,
            format!(
                "{}; re-formed {} times in the last 10 minutes, next attempt in {} s",
                loss.message,
                status.restarts,
                pause.as_secs()
            ),
        ),
        (Some(loss), None) => failed(loss.reason, format!("{}; re-forming at epoch {epoch}", loss.message)),
        (None, _) => progress(observed, states),
    };
    status.endpoint = None;
    if stage.ready {
        status.served_epoch = Some(epoch);
        let first = states.first();
        let rendezvous = first.and_then(|state| state.status).and_then(|status| status.rendezvous.as_ref());
        let node = first.and_then(|state| state.shard).map(|shard| shard.spec.node_name.clone());
        if let (Some(rendezvous), Some(node_name)) = (rendezvous, node) {
            status.endpoint = Some(Endpoint { address: rendezvous.rpc.clone(), node_name });
        }
    }
    // The plan never changes, so the measurement of an earlier epoch counts until there is a new one.
    let measured = states.first().and_then(|state| state.status).and_then(|status| status.measured.clone());
    status.measured = measured.or(status.measured);
    status.energy = observed.energy;
    let stalled = pause.is_some();
    for (kind, value) in [
        (Type::Reserved, stage.reserved),
        (Type::Formed, stage.formed),
        (Type::Ready, stage.ready),
        (Type::Reconciling, !stage.ready && !stalled),
        (Type::Stalled, stalled),
    ] {
        conditions::set(&mut status.conditions, kind, value, stage.reason, &stage.message, generation, now);
    }
    status
}

fn failed(reason: Reason, message: String) -> GroupProgress {
    GroupProgress { reserved: false, formed: false, ready: false, reason, message }
}

fn progress(observed: &ObservedGroup, states: &[RankState<'_>]) -> GroupProgress {
    let reserved = states.iter().all(|state| state.is(Type::Claimed));
    let formed = states.iter().all(|state| state.is(Type::Joined));
    let at = |reason, message| GroupProgress { reserved, formed, ready: false, reason, message };
    if observed.group.spec.plan.backend == Backend::Unknown {
        let version = env!("CARGO_PKG_VERSION");
        let message = format!(
            "its plan has a backend of a newer release than this operator's {version}; update the operator, which leaves the group alone until then"
        );
        return at(Reason::NewerRelease, message);
    }
    if !observed.lost.is_empty() {
        return at(Reason::LeaseExpired, format!("node {} is lost", names(&observed.lost)));
    }
    if states.iter().all(|state| state.is(Type::Serving)) {
        return GroupProgress {
            reserved,
            formed,
            ready: true,
            reason: Reason::Serving,
            message: match observed.unreachable.is_empty() {
                true => "every rank serves".to_owned(),
                false => format!(
                    "every rank serves as far as is known: node {} is unreachable, and lost if that lasts a minute",
                    names(&observed.unreachable)
                ),
            },
        };
    }
    for (rank, state) in states.iter().enumerate() {
        let claimed = state.status.and_then(|status| get(&status.conditions, Type::Claimed));
        if let Some(claimed) = claimed
            && claimed.status == "False"
            && let Some(reason) = [Reason::MemoryRefused, Reason::HeldAfterPanics, Reason::NewerRelease]
                .into_iter()
                .find(|reason| claimed.reason == format!("{reason:?}"))
        {
            return at(reason, format!("rank {rank} on {}: {}", node(state), claimed.message));
        }
    }
    if !reserved {
        let waiting: Vec<String> = observed
            .group
            .spec
            .plan
            .members
            .iter()
            .zip(states)
            .filter(|(_, state)| !state.is(Type::Claimed))
            .map(|(member, _)| {
                let silent = if observed.unreachable.contains(&member.node_name) {
                    ", which is unreachable"
                } else {
                    ""
                };
                format!("rank {} on {}{silent}", member.rank, member.node_name)
            })
            .collect();
        return at(Reason::WaitingForAgent, format!("not claimed yet: {}", waiting.join("; ")));
    }
    if !observed.missing_files.is_empty() {
        let missing: Vec<String> =
            observed.missing_files.iter().map(|(node, missing)| format!("node {node}: {missing}")).collect();
        return at(Reason::WaitingForCopies, missing.join("; "));
    }
    let loading: Vec<String> = states
        .iter()
        .enumerate()
        .filter(|(_, state)| !state.is(Type::Loaded))
        .map(|(rank, state)| match state.status {
            Some(status) if status.total_bytes > 0 => {
                format!(
                    "rank {rank} on {}: {} of {}",
                    node(state),
                    show(status.loaded_bytes),
                    show(status.total_bytes)
                )
            }
            _ => format!("rank {rank} on {}: starts", node(state)),
        })
        .collect();
    if !loading.is_empty() {
        return at(Reason::Loading, loading.join("; "));
    }
    let late = |kind| {
        let ranks = states.iter().enumerate().filter(|(_, state)| !state.is(kind));
        let name = |(rank, state)| match node_and_message(state, kind) {
            (node, Some(words)) => format!("rank {rank} on {node} ({words})"),
            (node, None) => format!("rank {rank} on {node}"),
        };
        ranks.map(name).collect::<Vec<_>>().join("; ")
    };
    if formed {
        at(Reason::WaitingForRanks, format!("not serving yet: {}", late(Type::Serving)))
    } else {
        at(Reason::Joining, format!("not joined yet: {}", late(Type::Joined)))
    }
}

/// A rank's node, and the rank's message for a condition.
fn node_and_message<'a>(state: &RankState<'a>, kind: Type) -> (&'a str, Option<&'a str>) {
    let condition = state.status.and_then(|status| get(&status.conditions, kind));
    let words = condition.map(|condition| condition.message.as_str()).filter(|words| !words.is_empty());
    (node(state), words)
}

fn node<'a>(state: &RankState<'a>) -> &'a str {
    state.shard.map(|shard| shard.spec.node_name.as_str()).unwrap_or_default()
}

fn names(nodes: &std::collections::BTreeSet<String>) -> String {
    nodes.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
}
