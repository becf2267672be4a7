//! Why: everything a decision has to say to a person. Every note names the object and the numbers,
//! and the last one of a refusal names the remedy. Not a log; notes are shown in conditions, in the
//! placement report and by `russet plan`.

use std::fmt;

use jiff::Timestamp;
use russet_crds::conditions::Reason;
use russet_crds::{Backend, FabricKind};

use crate::copies::Lack;
use crate::fabric::show_bits;
use crate::fit::Need;
use crate::pool::Demand;
use crate::quantity::show;
use crate::shard::backend_words;
use crate::snapshot::Availability;

/// One remark of the planner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// The named Model does not exist, or its headers are not read yet.
    ModelUnknown {
        /// The Model.
        model: String,
    },
    /// The engine does not know the architecture.
    Architecture {
        /// The Model.
        model: String,
        /// Its architecture.
        architecture: String,
    },
    /// The headers contradict themselves.
    Headers {
        /// The Model.
        model: String,
        /// How.
        why: String,
    },
    /// The spec contradicts itself or the model.
    Invalid {
        /// The field, as a path.
        field: String,
        /// What is wrong and what to do.
        why: String,
    },
    /// The spec uses a word of a newer release.
    Newer {
        /// The field, as a path.
        field: String,
    },
    /// The named ShardingStrategy does not exist.
    StrategyUnknown {
        /// The ShardingStrategy.
        strategy: String,
        /// Those there are.
        known: Vec<String>,
    },
    /// The named Tier does not exist.
    TierUnknown {
        /// The Tier.
        tier: String,
        /// Those there are.
        known: Vec<String>,
    },
    /// A workload group has no node yet that could take work.
    NoOwnNodes {
        /// The Tier.
        tier: String,
        /// The workload group.
        group: String,
    },
    /// A named NodePool does not exist.
    PoolUnknown {
        /// The NodePool.
        pool: String,
        /// Those there are.
        known: Vec<String>,
    },
    /// A NodePool makes no sense.
    PoolBroken {
        /// The NodePool.
        pool: String,
        /// Why.
        why: Box<Note>,
    },
    /// No node of the NodePools can take work.
    NoNodesInPools {
        /// The NodePools.
        pools: Vec<String>,
        /// How many nodes they have together.
        nodes: usize,
    },
    /// Nodes are not joined as is asked of those that share a group.
    Apart {
        /// Who asks.
        asks: String,
        /// What is asked.
        demand: Demand,
        /// Which pairs lack what.
        why: String,
    },
    /// A replica stays outside its deployment's NodePools, because its nodes left them.
    Outside {
        /// The ShardGroup.
        group: String,
        /// Its nodes that are in none of them, or all when no pool has all.
        nodes: Vec<String>,
        /// The NodePools.
        pools: Vec<String>,
    },
    /// A node cannot take new work.
    Closed {
        /// The node.
        node: String,
        /// Why.
        availability: Availability,
    },
    /// The model's files cannot come to a node.
    Disk {
        /// Why.
        lack: Lack,
    },
    /// A node lacks the backend groups of several ranks need.
    NoRing {
        /// The node.
        node: String,
    },
    /// The engine of a node cannot hold parts of layers.
    NoTensor {
        /// The node.
        node: String,
        /// Its build.
        build: Option<String>,
    },
    /// Nodes have different engines and cannot share a group.
    Builds {
        /// Build and nodes, of every build.
        builds: Vec<(String, Vec<String>)>,
    },
    /// The cables between nodes do not carry the backend asked for.
    Links {
        /// The backend.
        backend: Backend,
        /// Which pair lacks what.
        why: String,
    },
    /// Cables are there, and in use for a while.
    PortsBusy {
        /// The backend, for people.
        backend: &'static str,
        /// Which port, and by whom.
        why: String,
    },
    /// A node has too little memory for one rank of the kind that was tried.
    TooSmall {
        /// The node.
        node: String,
        /// What was to be put there.
        what: String,
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
        /// Bytes models may take there in all.
        limit: u64,
    },
    /// Several nodes together have too little memory.
    Together {
        /// The nodes.
        nodes: Vec<String>,
        /// Bytes all ranks need together.
        needed: u64,
        /// Bytes free on all of them.
        free: u64,
    },
    /// More ranks are wanted than nodes can take work.
    TooFewNodes {
        /// Ranks wanted.
        ranks: u32,
        /// Nodes with equal engines that can take work.
        nodes: usize,
    },
    /// No node at all can take work.
    NoNodes,
    /// The last word of a refusal.
    NothingFits {
        /// Index of the replica.
        replica: i32,
        /// What the whole model needs on one node.
        needed: Need,
        /// Nodes that would hold it and take no work.
        closed: Vec<String>,
        /// Nodes to which the files cannot come.
        full: Vec<String>,
    },
    /// A replica waits although it fits, because what else waits is worth more.
    Outweighed {
        /// Index of the replica.
        replica: i32,
        /// The deployments that get the room.
        by: Vec<String>,
    },
    /// Replicas of lower priority make room for one that fits nowhere.
    Preempts {
        /// Index of the replica.
        replica: i32,
        /// Their deployments.
        deployments: Vec<String>,
        /// Bytes they hold.
        frees: u64,
    },
    /// They will, once they have run for long enough.
    Resident {
        /// Index of the replica.
        replica: i32,
        /// Their deployments.
        deployments: Vec<String>,
        /// Bytes they hold.
        frees: u64,
        /// When they have.
        until: Timestamp,
    },
    /// They could, if the tier of the one that waits said so.
    CouldPreempt {
        /// Index of the replica.
        replica: i32,
        /// Their deployments.
        deployments: Vec<String>,
        /// Bytes they hold.
        frees: u64,
        /// The tier of the one that waits.
        tier: Option<String>,
    },
    /// A person is asked first.
    AwaitsApproval {
        /// Index of the replica.
        replica: i32,
        /// What for.
        hash: String,
        /// Deployments of which replicas would be stopped; none where the replica itself is to be replaced.
        deployments: Vec<String>,
        /// Bytes they hold.
        frees: u64,
    },
    /// A person said no.
    Denied {
        /// Index of the replica.
        replica: i32,
        /// To what.
        hash: String,
    },
    /// A running replica stays although the spec changed, because its successor fits nowhere.
    KeptOutdated {
        /// The ShardGroup.
        group: String,
    },
    /// A replica goes on as it is until another one has its successor.
    InTurn {
        /// Index of the replica.
        replica: i32,
    },
    /// Files come first, before anything stops for a replica.
    FetchFirst {
        /// Index of the replica.
        replica: i32,
        /// Nodes that lack them.
        nodes: Vec<String>,
    },
    /// A replica must go before its successor can come.
    DrainFirst {
        /// The ShardGroup.
        group: String,
    },
    /// A replica will fit once agents release what deleted groups held.
    WaitingForRelease {
        /// Index of the replica.
        replica: i32,
        /// What still holds memory, with the bytes.
        holders: Vec<String>,
    },
    /// A replica is placed where others of its deployment fail together with it.
    FailsTogether {
        /// Index of the replica.
        replica: i32,
        /// The label that tells domains apart.
        key: String,
        /// Its values there.
        domains: Vec<String>,
        /// The others.
        with: Vec<i32>,
        /// The best way apart from more of them; nothing where none fits.
        apart: Option<String>,
    },
    /// A replica was placed.
    Placed {
        /// Index of the replica.
        replica: i32,
        /// Split and nodes.
        decision: String,
    },
}

impl Note {
    /// The condition reason this note stands for.
    pub fn reason(&self) -> Reason {
        match self {
            Note::ModelUnknown { .. } => Reason::ModelNotFound,
            Note::Architecture { .. } => Reason::UnsupportedArchitecture,
            Note::Headers { .. } => Reason::CorruptModel,
            Note::Invalid { .. } => Reason::InvalidSpec,
            Note::Newer { .. } => Reason::NewerRelease,
            Note::Closed { .. } => Reason::Unschedulable,
            Note::NoNodes | Note::NoNodesInPools { .. } => Reason::NoNodes,
            Note::StrategyUnknown { .. } => Reason::StrategyNotFound,
            Note::TierUnknown { .. } => Reason::TierNotFound,
            Note::NoOwnNodes { .. } => Reason::NoNodes,
            Note::PoolUnknown { .. } => Reason::PoolNotFound,
            Note::PoolBroken { why, .. } => why.reason(),
            Note::Outside { .. } => Reason::OutsidePools,
            Note::NoRing { .. }
            | Note::NoTensor { .. }
            | Note::TooSmall { .. }
            | Note::Together { .. }
            | Note::Builds { .. }
            | Note::Apart { .. }
            | Note::Links { .. }
            | Note::PortsBusy { .. }
            | Note::TooFewNodes { .. }
            | Note::NothingFits { .. }
            | Note::CouldPreempt { .. }
            | Note::KeptOutdated { .. } => Reason::NothingFits,
            Note::Disk { lack } => lack.reason(),
            Note::Outweighed { .. } => Reason::Outweighed,
            Note::Preempts { .. } => Reason::Preempting,
            Note::Resident { .. } => Reason::Resident,
            Note::AwaitsApproval { .. } => Reason::AwaitingApproval,
            Note::Denied { .. } => Reason::Denied,
            Note::InTurn { .. } | Note::DrainFirst { .. } => Reason::InProgress,
            Note::FetchFirst { .. } => Reason::WaitingForCopies,
            Note::WaitingForRelease { .. } => Reason::WaitingForAgent,
            Note::Placed { .. } | Note::FailsTogether { .. } => Reason::PlanFound,
        }
    }
}

impl fmt::Display for Note {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Note::ModelUnknown { model } => {
                write!(
                    out,
                    "Model {model:?} does not exist or its headers are not read yet; create it in the same namespace"
                )
            }
            Note::Architecture { model, architecture } => write!(
                out,
                "Model {model:?} has the architecture {architecture:?}, which this engine does not know; it knows {}",
                crate::validate::ARCHITECTURES.join(", ")
            ),
            Note::Headers { model, why } => {
                write!(
                    out,
                    "the headers of Model {model:?} contradict themselves: {why}; fetch the files again"
                )
            }
            Note::Invalid { field, why } => write!(out, "{field}: {why}"),
            Note::Newer { field } => write!(
                out,
                "{field} is a word of a newer release than this operator's {}; update the operator",
                env!("CARGO_PKG_VERSION")
            ),
            Note::StrategyUnknown { strategy, known } => write!(
                out,
                "ShardingStrategy {strategy:?} does not exist; {}",
                there_is("ShardingStrategies", known)
            ),
            Note::TierUnknown { tier, known } => {
                write!(out, "Tier {tier:?} does not exist; {}", there_is("Tiers", known))
            }
            Note::NoOwnNodes { tier, group } => write!(
                out,
                "workload group {group} of Tier {tier} has no node that takes work; `kubectl describe tier {tier}` says why"
            ),
            Note::PoolUnknown { pool, known } => {
                write!(out, "NodePool {pool:?} does not exist; {}", there_is("NodePools", known))
            }
            Note::PoolBroken { pool, why } => write!(out, "NodePool {pool}: {why}"),
            Note::NoNodesInPools { pools, nodes } => write!(
                out,
                "none of the {nodes} nodes of {} can take work; `kubectl get nodepools` shows which nodes they have, `russet join` adds one",
                named_pools(pools)
            ),
            Note::Apart { asks, demand, why } => {
                let Demand { kind, bits } = demand;
                let kind = match kind {
                    FabricKind::Any | FabricKind::Unknown => "a link",
                    FabricKind::Thunderbolt => "a Thunderbolt link",
                    FabricKind::ThunderboltRdma => "an RDMA link over Thunderbolt",
                };
                let speed = if *bits > 0 { format!(" of {}", show_bits(*bits)) } else { String::new() };
                write!(
                    out,
                    "{asks}: every two nodes of a group need {kind}{speed}: {why}; join them so, or ask for less"
                )
            }
            Note::Outside { group, nodes, pools } => write!(
                out,
                "ShardGroup {group} stays on {}, which {} has no longer: what answers is not moved unasked; delete that ShardGroup to have it placed anew",
                nodes.join(", "),
                named_pools(pools)
            ),
            Note::Closed { node, availability } => match availability {
                Availability::Open => write!(out, "node {node}: open"),
                Availability::Cordoned => {
                    write!(out, "node {node}: cordoned; set spec.scheduling to Enabled to use it")
                }
                Availability::Draining => {
                    write!(out, "node {node}: draining; set spec.scheduling to Enabled to use it")
                }
                Availability::Unreachable => {
                    write!(out, "node {node}: unreachable; start its agent or its network")
                }
                Availability::Lost => write!(
                    out,
                    "node {node}: unreachable for so long that its work moves away; start its agent or its network"
                ),
                Availability::Unmeasured => {
                    write!(out, "node {node}: its agent has not reported its memory yet")
                }
            },
            Note::NoRing { node } => {
                write!(
                    out,
                    "node {node}: its engine does not offer the ring backend, which groups of several ranks need"
                )
            }
            Note::NoTensor { node, build } => write!(
                out,
                "node {node}: its engine ({}) is of a release that cannot cut layers; update the node",
                build.as_deref().unwrap_or("an unknown build")
            ),
            Note::Builds { builds } => {
                let builds: Vec<String> =
                    builds.iter().map(|(build, nodes)| format!("{build} on {}", nodes.join(", "))).collect();
                write!(
                    out,
                    "nodes with different engine builds cannot share a group: {}; bring them to one release",
                    builds.join("; ")
                )
            }
            Note::Links { backend, why } => write!(
                out,
                "{} cannot be: {why}; cable the nodes and enable RDMA on them, or leave the backend to Auto",
                backend_words(*backend)
            ),
            Note::PortsBusy { backend, why } => write!(out, "{backend} waits for its ports: {why}"),
            Note::TooSmall { node, what, needed, free, limit } => write!(
                out,
                "node {node}: {what} needs {}, {} free of {}",
                show(*needed),
                show(*free),
                show(*limit)
            ),
            Note::Together { nodes, needed, free } => write!(
                out,
                "{} ranks on {}: {} needed in all, {} free in all, and no split keeps every rank within its node",
                nodes.len(),
                nodes.join(", "),
                show(*needed),
                show(*free)
            ),
            Note::TooFewNodes { ranks, nodes } => write!(
                out,
                "{ranks} ranks need {ranks} nodes with the same engine build, one each, and {nodes} can take work; join more nodes or ask for fewer ranks"
            ),
            Note::NoNodes => write!(out, "no node can take work; join one with `russet join`"),
            Note::Disk { lack } => write!(out, "the model's files do not come to {lack}"),
            Note::NothingFits { replica, needed, closed: _, full } if !full.is_empty() => write!(
                out,
                "replica {replica} fits nowhere ({needed}) where its model's files could come: not to {}; free some disk there, lower spec.disk.reserve of these nodes, unpin or delete a Model, free memory on others, or join another node",
                full.join(", ")
            ),
            Note::NothingFits { replica, needed, closed, full: _ } if !closed.is_empty() => write!(
                out,
                "replica {replica} fits nowhere else ({needed}) than on {}, which take no work now: start the agent of one, or set its spec.scheduling to Enabled",
                closed.join(", ")
            ),
            Note::NothingFits { replica, needed, closed: _, full: _ } => write!(
                out,
                "replica {replica} fits nowhere ({needed}); free memory by deleting or scaling down other deployments, lower kv.contextTokens or kv.maxSequences of its sharding, choose a smaller or quantised model, or join another node"
            ),
            Note::Outweighed { replica, by } => write!(
                out,
                "replica {replica} fits, but the room there is serves {} better together; add a node, or ask for less context, a smaller model or fewer replicas",
                by.join(", ")
            ),
            Note::Preempts { replica, deployments, frees } => {
                let who = replicas_of(deployments);
                write!(
                    out,
                    "replica {replica} has {who} make room ({}): its priority is higher",
                    show(*frees)
                )
            }
            Note::Resident { replica, deployments, frees, until } => write!(
                out,
                "replica {replica} has {} make room ({}) at {until}, when they have run for their tier's minResidencySeconds",
                replicas_of(deployments),
                show(*frees)
            ),
            Note::CouldPreempt { replica, deployments, frees, tier } => {
                let (who, bytes) = (replicas_of(deployments), show(*frees));
                let how = match tier {
                    Some(tier) => format!("set Tier {tier} spec.preemption to LowerPriority to allow it"),
                    None => "a Tier with preemption LowerPriority would allow it".to_owned(),
                };
                write!(
                    out,
                    "replica {replica} would fit if {who} of lower priority made room ({bytes}); {how}"
                )
            }
            Note::AwaitsApproval { replica, hash, deployments, frees: _ } if deployments.is_empty() => {
                write!(
                    out,
                    "replica {replica} is to be replaced because its spec was edited; `russet approve` or spec.approvedPlan {hash} allows it"
                )
            }
            Note::AwaitsApproval { replica, hash, deployments, frees } => write!(
                out,
                "replica {replica} fits if {} stop ({}); `russet approve` or spec.approvedPlan {hash} allows it",
                replicas_of(deployments),
                show(*frees)
            ),
            Note::Denied { replica, hash } => write!(
                out,
                "replica {replica} waits: Approval {hash} was denied; it is asked for again when that is deleted, or the spec edited"
            ),
            Note::InTurn { replica } => {
                write!(out, "replica {replica} goes on as it is until the replica before it answers anew")
            }
            Note::KeptOutdated { group } => {
                write!(out, "ShardGroup {group} keeps running as it was, because its successor fits nowhere")
            }
            Note::FetchFirst { replica, nodes } => write!(
                out,
                "replica {replica} waits for its model's files on {}; what runs there goes on until they have come",
                nodes.join(", ")
            ),
            Note::DrainFirst { group } => {
                write!(
                    out,
                    "ShardGroup {group} makes room first: memory does not allow old and new side by side"
                )
            }
            Note::WaitingForRelease { replica, holders } => {
                write!(out, "replica {replica} waits until agents release memory: {}", holders.join(", "))
            }
            Note::FailsTogether { replica, key, domains, with, apart } => {
                let others: Vec<String> = with.iter().map(ToString::to_string).collect();
                let word = if with.len() == 1 { "replica" } else { "replicas" };
                write!(
                    out,
                    "replica {replica} shares {key} {} with {word} {}: ",
                    domains.join(", "),
                    others.join(", ")
                )?;
                match apart {
                    Some(apart) => write!(out, "the best place apart from them is worth less ({apart})"),
                    None => write!(out, "nothing fits apart from them"),
                }
            }
            Note::Placed { replica, decision } => write!(out, "replica {replica}: {decision}"),
        }
    }
}

/// What there is instead of what was named.
pub(crate) fn there_is(kind: &str, known: &[String]) -> String {
    /// Names worth reading.
    const SHOWN: usize = 8;
    match known.len() {
        0 => format!("there are no {kind}: create it, or leave the reference out"),
        count => {
            let more = if count > SHOWN { ", …" } else { "" };
            let names: Vec<&str> = known.iter().take(SHOWN).map(String::as_str).collect();
            format!("create it, or name one of the {kind} there are: {}{more}", names.join(", "))
        }
    }
}

fn replicas_of(deployments: &[String]) -> String {
    format!("replicas of {}", deployments.join(", "))
}

fn named_pools(pools: &[String]) -> String {
    match pools {
        [one] => format!("NodePool {one}"),
        many => format!("NodePools {}", many.join(", ")),
    }
}

/// Notes as one text for a condition, bounded because conditions are.
pub fn join(notes: &[Note]) -> String {
    // The Kubernetes limit for a condition's message is 32768; a screenful serves people better.
    const LIMIT: usize = 2000;
    let mut text = String::new();
    for (index, note) in notes.iter().enumerate() {
        let next = note.to_string();
        if text.len() + next.len() > LIMIT {
            text.push_str(&format!("; and {} more", notes.len() - index));
            break;
        }
        if index > 0 {
            text.push_str("; ");
        }
        text.push_str(&next);
    }
    text
}
