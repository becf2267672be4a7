//! The sentence of every note.

use std::fmt;

use russet_crds::{ADAPTERS, DRAFT_MODEL, FabricKind};

use super::{DrainReason, Note, draft_share};
use crate::fabric::show_bits;
use crate::pool::LinkDemand;
use crate::quantity::show;
use crate::search_budget::MAX_SEARCH_STEPS;
use crate::shard::backend_label;
use crate::snapshot::Availability;

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
                russet_model::families::list()
            ),
            Note::Unsupported { model, why } => write!(out, "Model {model:?} cannot be run: {why}"),
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
                alternatives("ShardingStrategies", known)
            ),
            Note::TierUnknown { tier, known } => {
                write!(out, "Tier {tier:?} does not exist; {}", alternatives("Tiers", known))
            }
            Note::TierNotAllowed { tier, namespace } => write!(
                out,
                "Tier {tier} is not for namespace {namespace}; name another tier, or have an administrator add the namespace to its spec.namespaces"
            ),
            Note::NoDedicatedNodes { tier, group } => write!(
                out,
                "workload group {group} of Tier {tier} has no node that takes work; `kubectl describe tier {tier}` says why"
            ),
            Note::PoolUnknown { pool, known } => {
                write!(out, "NodePool {pool:?} does not exist; {}", alternatives("NodePools", known))
            }
            Note::PoolInvalid { pool, why } => write!(out, "NodePool {pool}: {why}"),
            Note::NoNodesInPools { pools, nodes } => write!(
                out,
                "none of the {nodes} nodes of {} can take work; `kubectl get nodepools` shows which nodes they have, `russet join` adds one",
                named_pools(pools)
            ),
            Note::NotLinked { demanded_by: asks, demand, why } => {
                let LinkDemand { kind, bits } = demand;
                let kind = match kind {
                    FabricKind::Any | FabricKind::Unknown => "a link",
                    FabricKind::Thunderbolt => "a Thunderbolt link",
                    FabricKind::ThunderboltRdma => "an RDMA link over Thunderbolt",
                };
                let speed = if *bits > 0 { format!(" of {}", show_bits(*bits)) } else { String::new() };
                write!(
                    out,
                    "{asks}: every two nodes of a group need {kind}{speed}: {why}; connect them so, or require less"
                )
            }
            Note::OutsidePools { group, nodes, pools } => write!(
                out,
                "ShardGroup {group} stays on {}, which {} no longer has: a ready group is not moved without a request; delete that ShardGroup to place it again",
                nodes.join(", "),
                named_pools(pools)
            ),
            Note::CableLost { group, why } => write!(
                out,
                "ShardGroup {group} does not answer, and {why}; connect them again, or delete that ShardGroup to place it again"
            ),
            Note::NodeUnavailable { node, availability } => match availability {
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
                    "node {node}: unreachable for so long that its work moves to other nodes; start its agent or its network"
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
            Note::NoEngineOption { node, build, option } => {
                let build = build.as_deref().unwrap_or("an unknown build");
                let missing = match *option {
                    ADAPTERS => "adapters".to_owned(),
                    DRAFT_MODEL => "draft models".to_owned(),
                    field => format!("engine.{field}"),
                };
                write!(
                    out,
                    "node {node}: its engine ({build}) is of a release that has no {missing}; update the node"
                )
            }
            Note::NoTensorParallelism { node, build } => write!(
                out,
                "node {node}: its engine ({}) is of a release that cannot cut layers; update the node",
                build.as_deref().unwrap_or("an unknown build")
            ),
            Note::MixedBuilds { builds } => {
                let builds: Vec<String> =
                    builds.iter().map(|(build, nodes)| format!("{build} on {}", nodes.join(", "))).collect();
                write!(
                    out,
                    "nodes with different engine builds cannot share a group: {}; bring them to one release",
                    builds.join("; ")
                )
            }
            Note::MissingCables { backend, why } => write!(
                out,
                "{} is not possible: {why}; cable the nodes and enable RDMA on them, or leave the backend to Auto",
                backend_label(*backend)
            ),
            Note::PortsBusy { backend, why } => write!(out, "{backend} waits for its ports: {why}"),
            Note::PortsTaken { backend, why } => write!(out, "{backend} is not possible: {why}"),
            Note::TooSmall { node, what, needed, free, limit } => write!(
                out,
                "node {node}: {what} needs {}, {} free of {}",
                show(*needed),
                show(*free),
                show(*limit)
            ),
            Note::TooSmallTogether { nodes, needed, free } => write!(
                out,
                "{} ranks on {}: {} needed in all, {} free in all, and no split keeps every rank within its node",
                nodes.len(),
                nodes.join(", "),
                show(*needed),
                show(*free)
            ),
            Note::SearchGivenUp { layers, stages, steps } => write!(
                out,
                "the search for the best split of {layers} layers over {stages} stages was given up after {steps} steps, the limit is {MAX_SEARCH_STEPS}; ask for a number of ranks or for the layers of each (spec.sharding), or for fewer replicas"
            ),
            Note::TooFewNodes { ranks, nodes } => write!(
                out,
                "{ranks} ranks need {ranks} nodes with the same engine build, one each, and {nodes} can take work; join more nodes or ask for fewer ranks"
            ),
            Note::NoNodes => write!(out, "no node can take work; join one with `russet join`"),
            Note::Disk { shortage: lack } => write!(out, "the model's files do not come to {lack}"),
            Note::NothingFits { replica, needed, draft, adapters, closed: _, full, ports: _ }
                if !full.is_empty() =>
            {
                write!(
                    out,
                    "replica {replica} fits nowhere ({needed}{}{}) where its model's files could come: not to {}; free some disk there, lower spec.disk.reserve of these nodes, unpin or delete a Model, free memory on others, or join another node",
                    draft_share(draft.as_deref()),
                    adapters.share(),
                    full.join(", ")
                )
            }
            Note::NothingFits { replica, ports: true, .. } => write!(
                out,
                "replica {replica} fits nowhere: there is memory for it, and the RDMA ports it needs are in use; delete or scale down what uses them, cable other nodes, or leave the backend to Auto"
            ),
            Note::NothingFits { replica, needed, draft, adapters, closed, full: _, ports: false }
                if !closed.is_empty() =>
            {
                write!(
                    out,
                    "replica {replica} fits nowhere else ({needed}{}{}) than on {}, which take no work now: start the agent of one, or set its spec.scheduling to Enabled",
                    draft_share(draft.as_deref()),
                    adapters.share(),
                    closed.join(", ")
                )
            }
            Note::NothingFits { replica, needed, draft, adapters, closed: _, full: _, ports: false } => {
                write!(
                    out,
                    "replica {replica} fits nowhere ({needed}{}{}); free memory by deleting or scaling down other deployments, lower kv.contextTokens or kv.maxSequences of its sharding, choose a smaller or quantised model{}, or join another node",
                    draft_share(draft.as_deref()),
                    adapters.share(),
                    match (draft, adapters.adapters) {
                        (Some(_), _) => ", do without the draft model",
                        (None, 0) => "",
                        (None, _) => ", do without some adapters",
                    },
                )
            }
            Note::Outweighed { replica, by } => write!(
                out,
                "replica {replica} fits, but the memory there is serves {} better together; add a node, or ask for less context, a smaller model or fewer replicas",
                by.join(", ")
            ),
            Note::Preempts { replica, deployments, frees } => {
                let who = replicas_of(deployments);
                write!(out, "replica {replica} preempts {who} ({}): its priority is higher", show(*frees))
            }
            Note::Resident { replica, deployments, frees, until } => write!(
                out,
                "replica {replica} preempts {} ({}) at {until}, when they have run for their tier's minResidencySeconds",
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
            Note::AwaitsApproval { replica, hash, deployments, .. } if deployments.is_empty() => {
                write!(
                    out,
                    "replica {replica} is to be replaced because its spec was edited; `russet approve` or spec.approvedPlan {hash} allows it"
                )
            }
            Note::AwaitsApproval { replica, hash, deployments, frees, foreign: true } => write!(
                out,
                "replica {replica} fits if {} stop ({}); they are of other namespaces, so `russet approve` allows plan {hash}, by a user who may approve in those",
                replicas_of(deployments),
                show(*frees)
            ),
            Note::AwaitsApproval { replica, hash, deployments, frees, foreign: false } => write!(
                out,
                "replica {replica} fits if {} stop ({}); `russet approve` or spec.approvedPlan {hash} allows it",
                replicas_of(deployments),
                show(*frees)
            ),
            Note::Denied { replica, hash } => write!(
                out,
                "replica {replica} waits: Approval {hash} was denied; it is asked for again when that is deleted, or the spec edited"
            ),
            Note::WaitsForRollout { replica } => {
                write!(out, "replica {replica} stays as it is until the replica before it is ready again")
            }
            Note::OutdatedStays { group } => {
                write!(out, "ShardGroup {group} keeps running as it was, because its successor fits nowhere")
            }
            Note::FetchFirst { replica, nodes } => write!(
                out,
                "replica {replica} waits for its model's files on {}; what runs there keeps running until they arrive",
                nodes.join(", ")
            ),
            Note::DrainFirst { group, why } => {
                let why = match why {
                    DrainReason::Memory => "memory does not allow old and new side by side",
                    DrainReason::Ports => "its successor needs the RDMA ports it uses",
                    DrainReason::Requested => "spec.rollout.strategy is DrainThenReplace",
                    DrainReason::NodeLost => {
                        "a node of it is lost, and its successor needs fewer nodes without it"
                    }
                };
                write!(out, "ShardGroup {group} makes room first: {why}")
            }
            Note::WaitingForRelease { replica, holders } => {
                write!(out, "replica {replica} waits until agents release memory: {}", holders.join(", "))
            }
            Note::SharedFailureDomain { replica, key, domains, with, apart } => {
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

/// Existing alternatives to the name that was not found.
fn alternatives(kind: &str, known: &[String]) -> String {
    /// Maximum number of names to show.
    const MAX_SHOWN: usize = 8;
    match known.len() {
        0 => format!("there are no {kind}: create it, or leave the reference out"),
        count => {
            let more = if count > MAX_SHOWN { ", …" } else { "" };
            let names: Vec<&str> = known.iter().take(MAX_SHOWN).map(String::as_str).collect();
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
