//! The status of a pool, from the nodes and the reservations on them. Pure.

use std::collections::BTreeSet;
use std::sync::Arc;

use jiff::Timestamp;
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{InferenceNode, NodePool, NodePoolStatus, PoolMemory};
use russet_plan::cluster::{labels, resolve_pool};
use russet_plan::fabric::LinkGraph;
use russet_plan::pool;
use russet_plan::snapshot::Availability;
use russet_plan::{Snapshot, quantity};

/// Maximum number of domains in a status; the schema says the same.
const MAX_DOMAINS: usize = 16;

/// Memory of some nodes together.
pub fn memory(view: &Snapshot, nodes: &BTreeSet<String>) -> PoolMemory {
    let mut memory = PoolMemory::default();
    let committed = view.committed_bytes(|_| false);
    for (name, node) in view.nodes.iter().filter(|(name, _)| nodes.contains(*name)) {
        let committed = committed.get(name.as_str()).copied().unwrap_or(0);
        memory.serving_limit_bytes = memory.serving_limit_bytes.saturating_add(node.serving_limit);
        memory.committed_bytes = memory.committed_bytes.saturating_add(committed);
        if node.availability == Availability::Open {
            let free = node.serving_limit.saturating_sub(committed);
            memory.free_bytes = memory.free_bytes.saturating_add(free);
        }
    }
    memory.committed = quantity::write(memory.committed_bytes);
    memory.free = quantity::write(memory.free_bytes);
    memory
}

/// The status of a pool.
pub fn status(
    pool: &NodePool,
    nodes: &[Arc<InferenceNode>],
    view: &Snapshot,
    now: Timestamp,
) -> NodePoolStatus {
    let generation = pool.metadata.generation;
    let labels = labels(nodes);
    let area = resolve_pool(pool, &labels);
    let of_pool = |name: &str| area.as_ref().is_ok_and(|area| area.contains(name));
    let taken: Vec<_> = view.nodes.iter().filter(|(name, _)| of_pool(name)).collect();
    let open = |node: &russet_plan::snapshot::NodeInfo| node.availability == Availability::Open;
    let ready = taken.iter().filter(|(_, node)| open(node)).count();
    let names: Vec<&str> = taken.iter().map(|(name, _)| name.as_str()).collect();
    let demand = area.as_ref().ok().and_then(|area| area.demand);
    let web = LinkGraph::new(&view.nodes);
    let fabric_domains = web.status_domains(&names, demand, MAX_DOMAINS);

    let (good, stalled, reason, message) = match &area {
        Err(note) => (false, true, note.reason(), note.to_string()),
        Ok(_) if labels.is_empty() => {
            let message = "there are no InferenceNodes yet; `russet join` on a machine adds one".to_owned();
            (false, true, Reason::NoNodes, message)
        }
        Ok(_) if taken.is_empty() => {
            let hint = pool::hint(&pool.spec.selector, labels.values().copied());
            let message = format!("spec.selector takes none of the {} InferenceNodes: {hint}", labels.len());
            (false, true, Reason::NoNodes, message)
        }
        Ok(_) if ready == 0 => {
            let message =
                format!("none of {} nodes takes work; `kubectl get inferencenodes` says why", taken.len());
            (false, false, Reason::WaitingForAgent, message)
        }
        Ok(_) => {
            let mut message = match (ready, taken.len()) {
                (1, 1) => "its one node takes work".to_owned(),
                (ready, all) if ready == all => format!("all {all} nodes take work"),
                (ready, all) => format!("{ready} of {all} nodes take work"),
            };
            if let Some(demand) = demand.filter(|_| fabric_domains.is_empty() && names.len() > 1) {
                let missing = web.missing_links(&names, demand);
                message.push_str(&format!(
                    ", each for groups of one rank only, because no two are connected as spec.fabric requires: {missing}"
                ));
            }
            (true, false, Reason::Settled, message)
        }
    };
    let mut conditions = pool.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default();
    for (kind, value) in
        [(Type::Ready, good), (Type::Reconciling, !good && !stalled), (Type::Stalled, stalled)]
    {
        conditions::set(&mut conditions, kind, value, reason, message.as_str(), generation, now);
    }
    NodePoolStatus {
        observed_generation: generation,
        nodes: count(taken.len()),
        ready_nodes: count(ready),
        summary: Some(format!("{ready}/{}", taken.len())),
        memory: Some(memory(view, &taken.iter().map(|(name, _)| (*name).clone()).collect())),
        fabric_domains,
        conditions,
    }
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use russet_crds::{
        FabricDemand, FabricKind, InferenceNodeSpec, Link, LinkKind, NodePoolSpec, NodeSelector,
    };
    use russet_plan::snapshot::NodeInfo;

    use super::*;

    /// Two machines of 512 GiB with a cable, and one of 64 GiB; `a` has 100 GiB that are not free.
    fn cluster() -> (Vec<Arc<InferenceNode>>, Snapshot) {
        let mut view = Snapshot::default();
        let mut nodes = Vec::new();
        for (name, gib, peer, availability) in [
            ("a", 512, Some("b"), Availability::Open),
            ("b", 512, Some("a"), Availability::Cordoned),
            ("c", 64, None, Availability::Unreachable),
        ] {
            let mut node = InferenceNode::new(name, InferenceNodeSpec::default());
            node.metadata.labels = Some([("russet.dev/memory".to_owned(), format!("{gib}Gi"))].into());
            nodes.push(Arc::new(node));
            let cable = |peer: &str| Link {
                peer: peer.to_owned(),
                kind: LinkKind::Thunderbolt,
                bits_per_second: Some(40_000_000_000),
                ..Link::default()
            };
            let seen = NodeInfo {
                serving_limit: gib << 30,
                unreleased: if name == "a" { 100 << 30 } else { 0 },
                availability,
                links: peer.map(cable).into_iter().collect(),
                ..NodeInfo::default()
            };
            view.nodes.insert(name.to_owned(), seen);
        }
        (nodes, view)
    }

    fn pool(memory: &str, kind: Option<FabricKind>) -> NodePool {
        let selector = NodeSelector {
            match_labels: [("russet.dev/memory".to_owned(), memory.to_owned())].into(),
            ..NodeSelector::default()
        };
        let fabric = kind.map(|kind| FabricDemand { kind, min_bits_per_second: None });
        let mut pool = NodePool::new("p", NodePoolSpec { selector, fabric });
        pool.metadata.generation = Some(3);
        pool
    }

    #[test]
    fn pool_status_shows_nodes_memory_and_fabric_domains() {
        let (nodes, view) = cluster();
        let status = status(&pool("512Gi", None), &nodes, &view, Timestamp::UNIX_EPOCH);
        assert_eq!((status.nodes, status.ready_nodes, status.summary.as_deref()), (2, 1, Some("1/2")));
        let memory = status.memory.unwrap();
        assert_eq!((memory.free.as_str(), memory.committed.as_str()), ("412Gi", "100Gi"));
        assert_eq!(memory.serving_limit_bytes, 1 << 40);
        let domains = &status.fabric_domains;
        assert_eq!((domains.len(), domains[0].nodes.concat().as_str()), (1, "ab"));
        assert_eq!(domains[0].kind, FabricKind::Thunderbolt);
    }

    #[test]
    fn every_situation_of_a_pool_reads_right_at_a_glance() {
        let (nodes, view) = cluster();
        let none = (Vec::new(), Snapshot::default());
        for (story, (nodes, view), pool, expected, words) in [
            (
                "works",
                (&nodes, &view),
                pool("512Gi", None),
                "True False False Settled",
                "1 of 2 nodes take work",
            ),
            (
                "its nodes are not joined",
                (&nodes, &view),
                pool("512Gi", Some(FabricKind::ThunderboltRdma)),
                "True False False Settled",
                "each for groups of one rank only, because no two are connected as spec.fabric requires: a and b have no RDMA link",
            ),
            (
                "its node is away",
                (&nodes, &view),
                pool("64Gi", None),
                "False True False WaitingForAgent",
                "none of 1 nodes takes work",
            ),
            (
                "a typing error",
                (&nodes, &view),
                pool("512", None),
                "False False True NoNodes",
                "takes none of the 3 InferenceNodes: russet.dev/memory is 512Gi, 64Gi on the nodes there are",
            ),
            (
                "nobody has joined",
                (&none.0, &none.1),
                pool("512Gi", None),
                "False False True NoNodes",
                "russet join",
            ),
            (
                "a word of a newer release",
                (&nodes, &view),
                pool("512Gi", Some(FabricKind::Unknown)),
                "False False True NewerRelease",
                "spec.fabric.kind is a word of a newer release",
            ),
        ] {
            let status = status(&pool, nodes, view, Timestamp::UNIX_EPOCH);
            let value = |kind| conditions::get(&status.conditions, kind).unwrap().status.as_str();
            let ready = conditions::get(&status.conditions, Type::Ready).unwrap();
            let line = [Type::Ready, Type::Reconciling, Type::Stalled].map(value).join(" ");
            assert_eq!(format!("{line} {}", ready.reason), expected, "{story}");
            assert!(ready.message.contains(words), "{story}: {}", ready.message);
            assert!(status.conditions.iter().all(|it| it.observed_generation == Some(3)), "{story}");
            let mut again = pool.clone();
            again.status = Some(status.clone());
            let later = Timestamp::from_second(9).unwrap();
            assert_eq!(
                super::status(&again, nodes, view, later),
                status,
                "{story}: looking again changes nothing"
            );
        }
    }
}
