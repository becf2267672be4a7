//! Every condition type and reason that Russet writes, and the one way to set a condition. Reasons are
//! stable: alerts match on them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Condition types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Type {
    /// Summary condition of every kind: the one to wait for.
    Ready,
    /// kstatus: the controller is still working towards the spec.
    Reconciling,
    /// kstatus: the spec cannot be reached without a person.
    Stalled,
    /// InferenceNode: the agent renews its Lease (operator).
    Reachable,
    /// InferenceNode: no engine runs on it any more; set only while it is draining (operator).
    Drained,
    /// InferenceNode: memory is short (agent).
    MemoryPressure,
    /// InferenceNode: disk is short (agent).
    DiskPressure,
    /// InferenceNode: the agent could read this machine's ports (agent).
    PortsRead,
    /// InferenceNode: no problem limits what its cables can do (operator).
    FabricHealthy,
    /// InferenceNode: its network matches `spec.network` (agent).
    NetworkApplied,
    /// InferenceNode: the wired memory limit matches `spec.memory.wiredLimit` (agent).
    WiredLimitSet,
    /// Model: revision, digest and shape are known.
    Resolved,
    /// Model: the engine supports the architecture.
    Supported,
    /// Model: as many nodes hold the files as `spec.preload` asks for.
    Preloaded,
    /// ModelCopy: every wanted byte is on the node.
    Downloaded,
    /// ModelCopy: every byte was hashed after the last write.
    Verified,
    /// ShardingStrategy: it does not contradict itself, and at least one deployment that uses it can be split
    /// so.
    Valid,
    /// ModelDeployment: nodes and split are chosen.
    Placed,
    /// ModelDeployment: the chosen nodes hold the files.
    CopiesReady,
    /// ModelDeployment: at least one replica is ready.
    Available,
    /// ModelDeployment: a change is being rolled out.
    Progressing,
    /// ModelDeployment: an action that it needs waits for an Approval.
    AwaitingApproval,
    /// ShardGroup: it is about to be stopped for a replica of higher priority.
    DisruptionTarget,
    /// ModelDeployment: the number of replicas follows demand.
    ScalingActive,
    /// ShardGroup: every Shard is claimed by its agent.
    Reserved,
    /// ShardGroup: every rank joined at the current epoch.
    Formed,
    /// Shard: the agent granted the memory.
    Claimed,
    /// Shard: the weights are in memory.
    Loaded,
    /// Shard: the rank joined its group.
    Joined,
    /// Shard: the rank uses the cables to the nodes of its neighbours; set only where there are cables.
    OverCables,
    /// Shard: the rank is ready to serve.
    Serving,
    /// ModelRoute: every target exists.
    ResolvedRefs,
    /// Budget: four fifths of a limit are used (gateway).
    NearLimit,
    /// Budget: all of a limit is used (gateway).
    Exhausted,
}

/// Reasons, for every condition type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Reason {
    /// It works.
    Serving,
    /// The object is as specified.
    Settled,
    /// Scaled to zero or stopped on purpose; settled.
    Stopped,
    /// Work is in progress; the message says which.
    InProgress,
    /// Waiting for an agent.
    WaitingForAgent,
    /// Waiting for the Model's headers.
    WaitingForModel,
    /// Waiting for files.
    WaitingForCopies,
    /// Waiting for ranks.
    WaitingForRanks,
    /// Waiting for another node that fetches the same files.
    WaitingForPeer,
    /// Waiting for the end of quiet hours, in which no files are transferred.
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
    /// No set of nodes has enough memory; the message has the numbers.
    NothingFits,
    /// The named Tier does not exist.
    TierNotFound,
    /// The named Tier is not for the deployment's namespace.
    TierNotAllowed,
    /// A workload group of the tier has too few nodes.
    NodesMissing,
    /// The replica fits, but other pending replicas score higher together.
    Outweighed,
    /// Replicas of lower priority are stopped for it.
    Preempting,
    /// It is stopped for a replica of higher priority.
    Preempted,
    /// The replicas that could make room have not run for their tier's minimum residency yet.
    Resident,
    /// The requested spec never became ready, so the last known good one runs instead.
    RolledBack,
    /// A person's decision is needed first: there is an Approval.
    AwaitingApproval,
    /// A person denied it.
    Denied,
    /// A person approved it.
    Approved,
    /// No decision was made in time, or the decision is too old.
    Expired,
    /// Stopped by its tier's schedules; settled.
    OutsideSchedule,
    /// Scaled to zero because there are no requests; the next request scales it up. Settled.
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
    /// A replica is not ready, and an RDMA cable that it uses is gone.
    CableLost,
    /// A named target does not exist.
    TargetNotFound,
    /// The spec contradicts itself or asks for something that this release does not support.
    InvalidSpec,
    /// The engine does not support the architecture.
    UnsupportedArchitecture,
    /// The engine knows the architecture, and lacks something that the model uses; the message says what and where.
    UnsupportedModel,
    /// The engine supports the architecture.
    ArchitectureKnown,
    /// The headers were read.
    HeadersRead,
    /// The source could not be reached; retried.
    SourceUnreachable,
    /// The source has no such model, revision or file.
    SourceNotFound,
    /// The source requires credentials, or rejects these.
    SourceForbidden,
    /// The agent may not read this path or scheme.
    SourceNotAllowed,
    /// A model file or header is invalid.
    CorruptModel,
    /// The bytes do not match their digest.
    DigestMismatch,
    /// Fewer bytes arrived than announced; the transfer is resumed.
    Truncated,
    /// The disk has too little free space.
    DiskFull,
    /// The files would leave less free disk space than the node's reserve.
    DiskPressure,
    /// Files are being copied.
    Downloading,
    /// Files are being hashed.
    Verifying,
    /// Every byte matches its digest.
    Verified,
    /// The agent granted the memory.
    MemoryGranted,
    /// The agent refused: less memory is free than the Shard needs.
    MemoryRefused,
    /// The engine used far more memory than it was granted; its agent killed it.
    MemoryExceeded,
    /// The machine ran out of memory; its agent killed this rank.
    MemoryShort,
    /// The kernel of the rank's machine panicked and restarted.
    KernelPanicked,
    /// The machine's kernel panicked twice under this deployment, which gets no more memory on that machine.
    HeldAfterPanics,
    /// The engine loads its weights.
    Loading,
    /// The engine waits for its peers.
    Joining,
    /// The object uses a value from a newer release than this one.
    NewerRelease,
    /// The engine process ended.
    EngineExited,
    /// The engine reported a fatal failure.
    EngineFailed,
    /// The engine refused the model's files or the split, and would again; the group is formed anew after some
    /// minutes, not at once.
    ModelRefused,
    /// The engine missed its heartbeats for so long that its process must be frozen; its agent killed it.
    EngineSilent,
    /// A batch took many times its predicted duration, so the engine must be hung; its agent killed it.
    EngineHung,
    /// The engine's output for its smoke prompt was invalid; the message says how.
    SmokeFailed,
    /// The engine could not be started.
    EngineNotStarted,
    /// The machine no longer has the rank's address; the group re-forms at another one.
    AddressLost,
    /// A peer rank was lost; the group re-forms.
    PeerLost,
    /// The group failed too often in a short time.
    TooManyRestarts,
    /// The gateway accepts the key.
    KeyAccepted,
    /// The key is disabled.
    KeyDisabled,
    /// The key has expired.
    KeyExpired,
    /// An older AccessKey has the same secret, so this one is rejected.
    DuplicateSecret,
    /// The secret was first that of an AccessKey in another namespace, so this one is rejected.
    ForeignSecret,
    /// There are as many replicas as demand requires, or soon will be.
    ScaledByDemand,
    /// Replicas are loaded for the demand that the last weeks let expect.
    ScaledByHistory,
    /// A person stopped the deployment, so it does not scale.
    ScalingDisabled,
    /// The provider answered the last request.
    Answering,
    /// The provider did not answer the last request; the message says why.
    NotAnswering,
    /// No gateway has asked the provider yet.
    NotAsked,
    /// The Benchmark waits until its deployment is ready.
    WaitingForDeployment,
    /// Another Benchmark of the same deployment runs first.
    WaitingForBenchmark,
    /// The Benchmark sends its requests.
    Running,
    /// The Benchmark has its results.
    Finished,
    /// A request of the Benchmark failed, so it has no results.
    Failed,
    /// The operator cannot decode the object and leaves it out; an Event, and no condition.
    Undecodable,
    /// The output of the system's tools on the ports was parsed.
    PortsRead,
    /// The output of a system tool could not be parsed; the message names the tool and quotes the output.
    PortsUnreadable,
    /// No cable leads to another node.
    NoCables,
    /// RDMA can run over every cable to another node.
    RdmaReady,
    /// Nothing is plugged into the port.
    NothingPlugged,
    /// A dock or a drive is plugged in, and no machine behind it.
    NoMachine,
    /// The machine at the other end is not a node of this cluster.
    PeerNotJoined,
    /// Linux supports IP over Thunderbolt, but no RDMA.
    NoRdmaOnLinux,
    /// Thunderbolt 4 supports IP, but no usable RDMA.
    NoThunderbolt5,
    /// The plugged-in device does not respond.
    CableSilent,
    /// A cable joins two ports of the same machine.
    CableLoop,
    /// Only one end of the cable detects the other.
    CableOneSided,
    /// Two nodes claim the same port.
    DomainTwice,
    /// macOS is older than 26.2.
    RdmaNotInThisSystem,
    /// RDMA was never enabled on this machine.
    RdmaDisabled,
    /// RDMA is not enabled on the machine at the other end.
    RdmaDisabledThere,
    /// The port has no RDMA device.
    NoRdmaDevice,
    /// The port of a Mac Studio that does not support RDMA.
    PortBesideEthernet,
    /// The cable negotiated a lower speed than the port supports.
    LinkTooSlow,
    /// The RDMA device's port is down although a machine is connected.
    RdmaPortDown,
    /// The port is a member of a bridge and has no address of its own.
    PortInBridge,
    /// The port has no address.
    NoPortAddress,
    /// The addresses at both ends of a cable are in different networks.
    AddressesApart,
    /// Several cables join bridges in a loop, in which broadcasts circulate forever.
    BridgeLoop,
    /// The machine's internet traffic goes over a cable to another machine.
    DefaultRouteOverCable,
    /// Two ends of cables have the same address.
    AddressTwice,
    /// The builds of macOS at both ends differ.
    SystemsDiffer,
    /// Ranks connect over the cable.
    CablesUsed,
    /// Ranks connect over another network, although a cable joins their nodes.
    PathFallback,
    /// The agent at the other end of a cable is alive but does not respond over it.
    LinkUnanswered,
    /// A cable has less than half the bandwidth of others with the same negotiated speed.
    LinkDegraded,
    /// The machine's root helper applied it.
    Applied,
    /// Nothing is requested any more, and the previous settings are restored.
    Restored,
    /// The machine has restarted, and the settings were requested only until then.
    DroppedAtRestart,
    /// The machine has no working root helper; the message says how to install one.
    HelperAbsent,
    /// The root helper refused the change; the message has its error.
    HelperRefused,
}

/// Sets the condition `kind` to `status`. The transition time changes only with the status. Returns whether
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

/// The condition of this type.
pub fn get(conditions: &[Condition], kind: Type) -> Option<&Condition> {
    let type_ = format!("{kind:?}");
    conditions.iter().find(|condition| condition.type_ == type_)
}

/// What a condition says; `None` where it is not set or says nothing.
pub fn message(conditions: &[Condition], kind: Type) -> Option<&str> {
    get(conditions, kind).map(|condition| condition.message.trim()).filter(|message| !message.is_empty())
}

/// The reason of a condition; `None` for a reason from a newer release.
pub fn reason(condition: &Condition) -> Option<Reason> {
    parse_reason(&condition.reason)
}

/// The reason of this name; `None` for a reason from a newer release.
pub fn parse_reason(reason: &str) -> Option<Reason> {
    serde_json::from_value(serde_json::Value::String(reason.to_owned())).ok()
}

/// Whether the condition is set and `True`.
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
