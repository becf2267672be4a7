//! Every condition type and reason Russet writes, and the one way to set a condition. Reasons are
//! stable: people alert on them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Condition types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Type {
    /// Summary of every kind: the one to wait for.
    Ready,
    /// kstatus: the controller is still working towards the spec.
    Reconciling,
    /// kstatus: the spec cannot be reached without a person.
    Stalled,
    /// InferenceNode: the agent renews its Lease (operator).
    Reachable,
    /// InferenceNode: nothing runs here any more; only while it is draining (operator).
    Drained,
    /// InferenceNode: memory is short (agent).
    MemoryPressure,
    /// InferenceNode: disk is short (agent).
    DiskPressure,
    /// InferenceNode: this machine's ports could be looked at (agent).
    PortsRead,
    /// InferenceNode: nothing keeps its cables from what they could do (operator).
    FabricHealthy,
    /// InferenceNode: its network is as `spec.network` wants it (agent).
    NetworkApplied,
    /// InferenceNode: so much memory may be wired as `spec.memory.wiredLimit` says (agent).
    WiredLimitSet,
    /// Model: revision, digest and shape are known.
    Resolved,
    /// Model: the engine knows the architecture.
    Supported,
    /// Model: as many nodes hold the files as `spec.preload` asks for.
    Preloaded,
    /// ModelCopy: every wanted byte is on the node.
    Downloaded,
    /// ModelCopy: every byte was hashed after the last write.
    Verified,
    /// ShardingStrategy: it does not contradict itself, and some deployment that uses it can be split so.
    Valid,
    /// ModelDeployment: nodes and split are chosen.
    Placed,
    /// ModelDeployment: the chosen nodes hold the files.
    CopiesReady,
    /// ModelDeployment: at least one replica answers.
    Available,
    /// ModelDeployment: a change is being carried out.
    Progressing,
    /// ModelDeployment: what it needs waits for an Approval.
    AwaitingApproval,
    /// ShardGroup: it is about to be stopped for something more important.
    DisruptionTarget,
    /// ModelDeployment: demand decides how many replicas there are.
    ScalingActive,
    /// ShardGroup: every Shard was claimed by its agent.
    Reserved,
    /// ShardGroup: every rank joined at the current epoch.
    Formed,
    /// Shard: the agent granted the memory.
    Claimed,
    /// Shard: the weights are in memory.
    Loaded,
    /// Shard: the rank joined its group.
    Joined,
    /// Shard: the rank meets the next ones over the cables that lead to their nodes; only where cables do.
    OverCables,
    /// Shard: the rank answers or follows.
    Serving,
    /// ModelRoute: every target exists.
    ResolvedRefs,
}

/// Reasons, for every condition type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Reason {
    /// Works.
    Serving,
    /// The object is as wanted.
    Settled,
    /// Scaled to zero or stopped on purpose; settled.
    Stopped,
    /// Work goes on; the message says which.
    InProgress,
    /// Waiting for an agent.
    WaitingForAgent,
    /// Waiting for the Model's headers.
    WaitingForModel,
    /// Waiting for files.
    WaitingForCopies,
    /// Waiting for ranks.
    WaitingForRanks,
    /// Waiting for another node, which fetches the same files.
    WaitingForPeer,
    /// Waiting for the end of hours in which no files may come.
    QuietHours,
    /// The node is alive.
    LeaseRenewed,
    /// The node did not renew its Lease.
    LeaseExpired,
    /// Cordoned or draining.
    Unschedulable,
    /// Enough is free.
    Sufficient,
    /// Too little is free.
    Insufficient,
    /// The planner chose nodes.
    PlanFound,
    /// No set of nodes can hold it; the message has the numbers.
    NothingFits,
    /// The named Tier does not exist.
    TierNotFound,
    /// A workload group of the tier lacks nodes.
    NodesMissing,
    /// It fits, and what else waits is worth more together.
    Outweighed,
    /// Replicas of lower priority make room for it.
    Preempting,
    /// It is stopped for something of higher priority.
    Preempted,
    /// What would make room for it has not run for its tier's minimum residency yet.
    Resident,
    /// What is asked for never came to answer, so what answered before runs in its place.
    RolledBack,
    /// A person is asked first: there is an Approval.
    AwaitingApproval,
    /// A person said no.
    Denied,
    /// A person said yes.
    Approved,
    /// Nobody answered in time, or the answer is too old.
    Expired,
    /// Stopped by its tier's schedules; settled.
    OutsideSchedule,
    /// Stopped because nobody asks for it, until somebody does; settled.
    Idle,
    /// No node can take work.
    NoNodes,
    /// The named Model does not exist.
    ModelNotFound,
    /// The named ShardingStrategy does not exist.
    StrategyNotFound,
    /// A named NodePool does not exist.
    PoolNotFound,
    /// A replica runs outside its deployment's NodePools, because nodes have left them.
    OutsidePools,
    /// A replica does not answer, and an RDMA cable that it runs over is not there any more.
    CableLost,
    /// A named target does not exist.
    TargetNotFound,
    /// The spec contradicts itself or asks for what this release cannot do.
    InvalidSpec,
    /// The engine does not know the architecture.
    UnsupportedArchitecture,
    /// The engine knows the architecture.
    ArchitectureKnown,
    /// Headers were read.
    HeadersRead,
    /// The source could not be reached; retried.
    SourceUnreachable,
    /// The source has no such model, revision or file.
    SourceNotFound,
    /// The source wants credentials, or refuses these.
    SourceForbidden,
    /// The agent may not read this path or scheme.
    SourceNotAllowed,
    /// A model file or header is not what it should be.
    CorruptModel,
    /// Bytes do not match their digest.
    DigestMismatch,
    /// Fewer bytes arrived than promised; resumed.
    Truncated,
    /// The disk has too little room.
    DiskFull,
    /// The files would leave less of the disk free than the node's reserve.
    DiskPressure,
    /// Files are being copied.
    Downloading,
    /// Files are being hashed.
    Verifying,
    /// Every byte matches.
    Verified,
    /// The agent granted the memory.
    MemoryGranted,
    /// The agent refused: less memory is free than the Shard needs.
    MemoryRefused,
    /// The engine held far more memory than it was granted; its agent ended it.
    MemoryExceeded,
    /// The machine's memory was at its end; its agent ended this rank of those there.
    MemoryShort,
    /// The kernel of the rank's machine went down and came back.
    KernelPanicked,
    /// The machine's kernel panicked twice under the deployment, which is granted nothing more there.
    HeldAfterPanics,
    /// The engine reads its weights.
    Loading,
    /// The engine waits for its peers.
    Joining,
    /// The object uses a word of a newer release than this one.
    NewerRelease,
    /// The engine process ended.
    EngineExited,
    /// The engine reported that it is of no more use.
    EngineFailed,
    /// The engine said nothing for so long that its process must be frozen; its agent killed it.
    EngineSilent,
    /// A batch took many times what was forecast for it, so that the engine must hang; its agent killed it.
    EngineHung,
    /// The engine did not answer its smoke prompt as a model answers; the message says what was wrong.
    SmokeFailed,
    /// The engine could not be started.
    EngineNotStarted,
    /// The rank's address is no longer its machine's; the group re-forms at another.
    AddressLost,
    /// A peer rank was lost; the group re-forms.
    PeerLost,
    /// The group failed too often in a short time.
    TooManyRestarts,
    /// The gateway takes the key.
    KeyAccepted,
    /// The key is disabled.
    KeyDisabled,
    /// The key's time is over.
    KeyExpired,
    /// An older AccessKey has the same secret, so this one is not taken.
    DuplicateSecret,
    /// There are as many replicas as demand asks for, or soon will be.
    ScaledByDemand,
    /// A person stopped it, so demand does not decide.
    ScalingDisabled,
    /// The Benchmark waits until its deployment answers.
    WaitingForDeployment,
    /// Another Benchmark of the same deployment runs first.
    WaitingForBenchmark,
    /// The Benchmark asks its deployment.
    Running,
    /// The Benchmark has its figures.
    Finished,
    /// A request of the Benchmark was not answered, so it has no figures.
    Failed,
    /// What the system's tools said of the ports was understood.
    PortsRead,
    /// It was not; the message says of which tool, and what it printed.
    PortsUnreadable,
    /// No cable leads to another node.
    NoCables,
    /// RDMA can run over every cable to another node.
    RdmaReady,
    /// Nothing is plugged into the port.
    NothingPlugged,
    /// A dock or a drive is plugged in, and no machine behind it.
    NoMachine,
    /// A machine is at the other end that is no node of this cluster.
    PeerNotJoined,
    /// Linux carries IP over Thunderbolt, and no RDMA.
    NoRdmaOnLinux,
    /// Thunderbolt 4 carries IP, and no RDMA that can be used.
    NoThunderbolt5,
    /// Something is plugged in that does not answer.
    CableSilent,
    /// A cable joins two ports of the same machine.
    CableLoop,
    /// One end sees the other, which does not see it.
    CableOneSided,
    /// Two nodes say that the same port is theirs.
    DomainTwice,
    /// macOS before 26.2.
    RdmaNotInThisSystem,
    /// RDMA was never enabled on this machine.
    RdmaDisabled,
    /// RDMA is not enabled on the machine at the other end.
    RdmaDisabledThere,
    /// The port has no RDMA device.
    NoRdmaDevice,
    /// The port of a Mac Studio that carries no RDMA.
    PortBesideEthernet,
    /// The cable was negotiated more slowly than the port can.
    LinkTooSlow,
    /// The RDMA device's port is down though a machine is there.
    RdmaPortDown,
    /// The port is a member of a bridge and has no address of its own.
    PortInBridge,
    /// The port has no address.
    NoPortAddress,
    /// The addresses at both ends of a cable are of different networks.
    AddressesApart,
    /// Several cables join bridges in a circle, which carries every broadcast round and round.
    BridgeLoop,
    /// The machine's internet traffic goes over a cable to another machine.
    DefaultRouteOverCable,
    /// Two ends of cables have the same address.
    AddressTwice,
    /// The builds of macOS at both ends differ.
    SystemsDiffer,
    /// Ranks meet over the cable.
    CablesUsed,
    /// Ranks meet over another network, although a cable leads from one's node to the other's.
    PathFallback,
    /// The agent at the other end of a cable is there and does not answer over it.
    LinkUnanswered,
    /// A cable carries less than half of what others that were negotiated alike do.
    LinkDegraded,
    /// The machine's root helper made it so.
    Applied,
    /// Nothing is asked for any more, and what was changed is as it was before.
    Restored,
    /// The machine has started anew since, and it was asked for until then.
    DroppedAtRestart,
    /// The machine has no root helper that answers; the message says how to install it.
    HelperAbsent,
    /// The root helper does not do this; the message has its words.
    HelperRefused,
}

/// Sets `kind` to `status`; the transition time moves only when the status does. Returns whether
/// anything changed, so that callers skip no-op writes.
pub fn set(
    conditions: &mut Vec<Condition>,
    kind: Type,
    status: bool,
    reason: Reason,
    message: impl Into<String>,
    generation: Option<i64>,
    now: jiff::Timestamp,
) -> bool {
    let status = if status { "True" } else { "False" };
    let type_ = format!("{kind:?}");
    let reason = format!("{reason:?}");
    let message = message.into();
    match conditions.iter_mut().find(|condition| condition.type_ == type_) {
        Some(old) => {
            let moved = old.status != status;
            let changed = moved
                || old.reason != reason
                || old.message != message
                || old.observed_generation != generation;
            if moved {
                old.last_transition_time = Time(now);
            }
            old.status = status.to_owned();
            old.reason = reason;
            old.message = message;
            old.observed_generation = generation;
            changed
        }
        None => {
            conditions.push(Condition {
                last_transition_time: Time(now),
                message,
                observed_generation: generation,
                reason,
                status: status.to_owned(),
                type_,
            });
            true
        }
    }
}

/// The condition of that type.
pub fn get(conditions: &[Condition], kind: Type) -> Option<&Condition> {
    let type_ = format!("{kind:?}");
    conditions.iter().find(|condition| condition.type_ == type_)
}

/// The reason of a condition; nothing where it is a word of a newer release.
pub fn reason(condition: &Condition) -> Option<Reason> {
    parse_reason(&condition.reason)
}

/// The reason of this name; nothing where it is a word of a newer release.
pub fn parse_reason(reason: &str) -> Option<Reason> {
    serde_json::from_value(serde_json::Value::String(reason.to_owned())).ok()
}

/// Whether the condition is there and `True`.
pub fn is_true(conditions: &[Condition], kind: Type) -> bool {
    get(conditions, kind).is_some_and(|condition| condition.status == "True")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_transition_time_moves_only_with_the_status() {
        let mut conditions = Vec::new();
        let at = |second| jiff::Timestamp::from_second(second).unwrap();
        assert!(set(&mut conditions, Type::Ready, false, Reason::InProgress, "a", Some(1), at(1)));
        assert!(set(&mut conditions, Type::Ready, false, Reason::InProgress, "b", Some(1), at(2)));
        assert_eq!(conditions[0].last_transition_time.0, at(1));
        assert!(!set(&mut conditions, Type::Ready, false, Reason::InProgress, "b", Some(1), at(3)));
        assert!(set(&mut conditions, Type::Ready, true, Reason::Serving, "", Some(1), at(4)));
        assert_eq!(conditions[0].last_transition_time.0, at(4));
        assert!(is_true(&conditions, Type::Ready) && conditions.len() == 1);
    }
}
