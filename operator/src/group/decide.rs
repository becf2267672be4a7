//! One reconciliation step of a group, from its observed state to the writes. Pure.
//!
//! ```text
//!            all claimed, files there          all serve
//! Forming ───────── peers ─────────▶ Starting ───────────▶ Ready
//!    ▲                                  │                    │
//!    └──── epoch + 1, peers cleared ◀───┴─── any rank lost ──┘      20 times in 10 minutes: backoff, Stalled
//! ```

use std::time::Duration;

use jiff::Timestamp;
use kube::ResourceExt as _;
use russet_crds::conditions::{self, Reason, Type, get, is_true};
use russet_crds::{
    Backend, GroupPlan, LocalReference, Peer, Shard, ShardGroupStatus, ShardSpec, ShardStatus,
};
use russet_plan::fabric;

use super::observe::ObservedGroup;
use super::status;
use crate::memory::PeerTable;

/// Restarts within the window without backoff.
const RESTARTS_BEFORE_BACKOFF: usize = 20;
/// The window for counting restarts.
pub const RESTART_WINDOW: Duration = Duration::from_secs(600);
/// Least time between two epochs of which the first could not start an engine.
const START_PACE: Duration = Duration::from_secs(1);
/// Initial backoff; it doubles with every further restart.
const INITIAL_BACKOFF: Duration = Duration::from_secs(15);
/// Maximum backoff. Retries never stop.
const MAX_BACKOFF: Duration = Duration::from_secs(240);
/// Backoff after an engine has refused the model or its split: nothing but another engine or other files changes that,
/// and each try loads what others could use.
pub(super) const REFUSAL_BACKOFF: Duration = Duration::from_secs(1800);

/// The writes.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedGroup {
    /// The epoch from now on.
    pub epoch: i64,
    /// Why a new epoch begins, if one does.
    pub bump: Option<RankFailure>,
    /// Shards to write, by rank.
    pub shards: Vec<ShardSpec>,
    /// Shards to delete, by name.
    pub delete: Vec<String>,
    /// The status.
    pub status: ShardGroupStatus,
    /// When to requeue without an event.
    pub requeue_after: Option<Duration>,
}

/// The failure of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankFailure {
    /// The reason for conditions and metrics.
    pub reason: Reason,
    /// The condition message.
    pub message: String,
}

/// One rank at one epoch.
pub struct RankState<'a> {
    /// The Shard, if it exists.
    pub shard: Option<&'a Shard>,
    /// Its status, if it is for this epoch.
    pub status: Option<&'a ShardStatus>,
}

impl RankState<'_> {
    /// Whether a condition is true at the epoch.
    pub fn is(&self, kind: Type) -> bool {
        self.status.is_some_and(|status| is_true(&status.conditions, kind))
    }

    fn claimed(&self) -> bool {
        self.is(Type::Claimed) && self.status.is_some_and(|status| status.rendezvous.is_some())
    }
}

/// The ranks of a group at `epoch`, in order.
pub fn ranks(observed: &ObservedGroup, epoch: i64) -> Vec<RankState<'_>> {
    let members = &observed.group.spec.plan.members;
    let state = |rank: u32| {
        let shard = observed
            .shards
            .get(&rank)
            .map(AsRef::as_ref)
            .filter(|it: &&Shard| it.metadata.deletion_timestamp.is_none());
        let at_epoch = shard.filter(|shard| shard.spec.epoch == epoch);
        let status =
            at_epoch.and_then(|shard| shard.status.as_ref()).filter(|it| it.observed_epoch == Some(epoch));
        RankState { shard, status }
    };
    members.iter().map(|member| state(member.rank)).collect()
}

/// Decides the next step of a group.
pub fn decide(observed: &ObservedGroup, now: Timestamp) -> PlannedGroup {
    let group = &observed.group;
    let epoch = group.spec.epoch;
    let states = ranks(observed, epoch);
    let written = states
        .iter()
        .filter_map(|state| state.shard)
        .find(|shard| shard.spec.epoch == epoch && !shard.spec.peers.is_empty())
        .map(|shard| PeerTable { peers: shard.spec.peers.clone(), transport: shard.spec.transport });
    let written = observed.peer_table.clone().or(written);
    // A plan of a newer release may have unknown fields; it is left alone.
    let known = group.spec.plan.backend != Backend::Unknown;
    let loss = find_failure(&states, written.as_ref().map(|peer_table| peer_table.peers.as_slice()))
        .filter(|_| known);
    let pause = loss.as_ref().and_then(|loss| match loss.reason {
        Reason::ModelRefused => refusal_pause(observed, now),
        _ => backoff(&observed.epoch_starts, now),
    });
    // What an engine lacked to start, such as room on a disk, it lacks a moment later, too: without a pace, twenty
    // attempts were over before room could be made.
    let not_started = loss.as_ref().is_some_and(|loss| loss.reason == Reason::EngineNotStarted);
    let pace = if not_started { remaining_pace(&observed.epoch_starts, now) } else { None };
    let bump = if pause.or(pace).is_some() { None } else { loss.clone() };

    let (epoch, peer_table) = match (&bump, written) {
        (Some(_), _) => (epoch + 1, PeerTable::default()),
        (None, Some(table)) => (epoch, table),
        (None, None) => (epoch, rendezvous(observed, &states).unwrap_or_default()),
    };
    let mut shards = Vec::new();
    for rank in (0..states.len() as u32).filter(|_| known) {
        let leaving =
            observed.shards.get(&rank).is_some_and(|shard| shard.metadata.deletion_timestamp.is_some());
        let name = russet_crds::names::shard(&group.name_any(), rank);
        // The name is in use until the former Shard is gone; its deletion triggers this group again.
        if leaving || observed.orphans.iter().any(|shard| shard.name_any() == name) {
            continue;
        }
        let spec = shard_spec(observed, rank, epoch, &peer_table);
        if observed.shards.get(&rank).is_none_or(|shard| shard.spec != spec) {
            shards.push(spec);
        }
    }
    let going = observed.orphans.iter().filter(|shard| shard.metadata.deletion_timestamp.is_none());
    let status = status::status(observed, &states, loss.as_ref(), pause, epoch, now);
    PlannedGroup {
        epoch,
        bump,
        shards,
        delete: going.map(|shard| shard.name_any()).collect(),
        status,
        requeue_after: pause.or(pace),
    }
}

/// Why this epoch has failed: the first failure that is no consequence of another rank's.
fn find_failure(states: &[RankState<'_>], peers: Option<&[Peer]>) -> Option<RankFailure> {
    let mut consequence = None;
    for (rank, state) in states.iter().enumerate() {
        let Some(status) = state.status else { continue };
        let node = state.shard.map(|shard| shard.spec.node_name.as_str()).unwrap_or_default();
        if let Some(failure) = &status.failure {
            let reason = get(&status.conditions, Type::Serving)
                .and_then(conditions::reason)
                .filter(|reason| {
                    matches!(
                        reason,
                        Reason::EngineExited
                            | Reason::EngineNotStarted
                            | Reason::EngineSilent
                            | Reason::EngineHung
                            | Reason::SmokeFailed
                            | Reason::ModelRefused
                            | Reason::AddressLost
                            | Reason::MemoryExceeded
                            | Reason::MemoryShort
                            | Reason::PeerLost
                    )
                })
                .unwrap_or(Reason::EngineFailed);
            let loss = RankFailure { reason, message: format!("rank {rank} on {node}: {failure}") };
            if reason != Reason::PeerLost {
                return Some(loss);
            }
            consequence.get_or_insert(loss);
        }
        // The peers have an address that is no longer the rank's: they would wait for ever.
        if let (Some(peers), Some(now)) = (peers, &status.rendezvous)
            && peers
                .get(rank)
                .is_some_and(|peer| peer.rpc != now.rpc || peer.ring != now.ring || peer.tensor != now.tensor)
        {
            return Some(RankFailure {
                reason: Reason::PeerLost,
                message: format!("rank {rank} on {node} moved to {}", now.rpc),
            });
        }
    }
    if peers.is_some()
        && let Some(rank) = states.iter().position(|state| state.shard.is_none())
    {
        return Some(RankFailure {
            reason: Reason::PeerLost,
            message: format!("the Shard of rank {rank} was deleted"),
        });
    }
    consequence
}

/// The peer table, once all ranks have reported their addresses and every file is present.
fn rendezvous(observed: &ObservedGroup, states: &[RankState<'_>]) -> Option<PeerTable> {
    if !observed.missing_files.is_empty() || !states.iter().all(RankState::claimed) {
        return None;
    }
    let peers = states
        .iter()
        .enumerate()
        .map(|(rank, state)| {
            let rendezvous = state.status?.rendezvous.clone()?;
            let node_name = state.shard?.spec.node_name.clone();
            Some(Peer {
                rank: rank as u32,
                node_name,
                rpc: rendezvous.rpc,
                ring: rendezvous.ring,
                tensor: rendezvous.tensor,
            })
        })
        .collect::<Option<Vec<Peer>>>()?;
    let transport = fabric::transport(&observed.group.spec.plan, &peers, &observed.links);
    Some(PeerTable { peers, transport })
}

/// The rest of the least time between two epochs of which the first could not start an engine.
fn remaining_pace(epoch_starts: &[Timestamp], now: Timestamp) -> Option<Duration> {
    let youngest = epoch_starts.iter().map(|time| now.duration_since(*time).unsigned_abs()).min()?;
    START_PACE.checked_sub(youngest).filter(|remaining| !remaining.is_zero())
}

/// The rest of the backoff after the restarts of a group: a function of times, so not `backon`, whose delays are
/// an iterator.
fn backoff(epoch_starts: &[Timestamp], now: Timestamp) -> Option<Duration> {
    let age = |time: &Timestamp| now.duration_since(*time).unsigned_abs();
    let recent: Vec<Duration> = epoch_starts.iter().map(age).filter(|age| *age < RESTART_WINDOW).collect();
    let over = recent.len().checked_sub(RESTARTS_BEFORE_BACKOFF)?;
    let pause = INITIAL_BACKOFF.saturating_mul(1 << over.min(8)).min(MAX_BACKOFF);
    let remaining = pause.saturating_sub(recent.into_iter().min()?);
    (!remaining.is_zero()).then_some(remaining)
}

/// The rest of the backoff after a refusal, which began when the group stalled: that stands in its status, so an
/// operator that restarts goes on with it.
fn refusal_pause(observed: &ObservedGroup, now: Timestamp) -> Option<Duration> {
    let status = observed.group.status.as_ref();
    let stalled = status.and_then(|status| get(&status.conditions, Type::Stalled));
    let since = stalled.filter(|stalled| {
        stalled.status == "True" && conditions::reason(stalled) == Some(Reason::ModelRefused)
    });
    let waited =
        since.map_or(Duration::ZERO, |since| now.duration_since(since.last_transition_time.0).unsigned_abs());
    let remaining = REFUSAL_BACKOFF.saturating_sub(waited);
    (!remaining.is_zero()).then_some(remaining)
}

fn shard_spec(observed: &ObservedGroup, rank: u32, epoch: i64, peer_table: &PeerTable) -> ShardSpec {
    let group = &observed.group;
    let plan = &group.spec.plan;
    let member = plan.members.get(rank as usize).cloned().unwrap_or_default();
    ShardSpec {
        group_ref: LocalReference::new(group.name_any()),
        group_uid: group.uid().unwrap_or_default(),
        served_model_name: group.spec.deployment_ref.name.clone(),
        model_ref: group.spec.model_ref.clone(),
        node_name: member.node_name,
        rank,
        layers_per_rank: plan.members.iter().map(|member| member.layers).collect(),
        tensor_size: plan.tensor_size.max(1),
        backend: plan.backend,
        transport: peer_table.transport,
        rdma_devices: stage_devices(plan, rank),
        weight_bytes: member.weight_bytes,
        kv_bytes: member.kv_bytes,
        overhead_bytes: member.overhead_bytes,
        context_tokens: plan.context_tokens,
        max_sequences: plan.max_sequences,
        kv_tokens: plan.kv_tokens,
        engine: plan.engine,
        draft_model_ref: plan.draft_model_ref.clone().filter(|_| rank == 0),
        adapters: plan.adapters.clone(),
        epoch,
        peers: peer_table.peers.clone(),
    }
}

/// The device matrix of a rank's stage.
fn stage_devices(plan: &GroupPlan, rank: u32) -> Vec<Vec<Vec<String>>> {
    let size = plan.tensor_size.max(1) as usize;
    let stage = plan.members.chunks(size).nth(rank as usize / size).unwrap_or_default();
    if stage.iter().all(|member| member.rdma_devices.is_empty()) {
        return Vec::new();
    }
    stage.iter().map(|member| member.rdma_devices.clone()).collect()
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
