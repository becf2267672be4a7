//! The decision for a Model, from its copies and the nodes alone.
//!
//! ```text
//! new ─▶ finalizer, headers on the first reachable node ─▶ resolved ─▶ shape in the status
//!                         └─ refused there ─▶ the next node ─▶ … ─▶ no node left: Stalled
//! deleted ─▶ groups gone? ─▶ copies deleted ─▶ finalizer removed
//! ```

use std::cmp::Reverse;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt as _;
use russet_crds::conditions::{self, Reason, Type, is_true};
use russet_crds::names::FINALIZER_COPIES;
use russet_crds::{CopyMode, Model, ModelCopy, ModelCopyStatus, ModelStatus};
use russet_model::adapter::AdapterShape;
use russet_model::shape::ModelShape;
use russet_plan::quantity;
use russet_plan::validate::{adapter_notes, shape_notes};

/// Agents that may go silent while they read the headers of a Model, until no other is asked: one may be a coincidence.
const MAX_SILENT_READERS: usize = 2;

/// A node that may read headers.
#[derive(Clone, Debug)]
pub struct HeaderReader {
    /// Its name.
    pub name: String,
    /// Whether its agent is reachable.
    pub reachable: bool,
    /// Whether it takes new work.
    pub open: bool,
}

/// The decision.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelDecision {
    /// The finalizers to set, if they change.
    pub finalizers: Option<Vec<String>>,
    /// Node to read the headers.
    pub header_node: Option<String>,
    /// Copies to delete, by name.
    pub delete: Vec<String>,
    /// The status.
    pub status: ModelStatus,
}

/// Decides for a Model. `users` are the ShardGroups that run it.
pub fn decide(
    model: &Model,
    copies: &[Arc<ModelCopy>],
    nodes: &[HeaderReader],
    users: &[String],
    now: Timestamp,
) -> ModelDecision {
    let before = model.status.clone().unwrap_or_default();
    let mut decision = ModelDecision { status: before.clone(), ..ModelDecision::default() };
    decision.status.observed_generation = model.metadata.generation;
    let ready_copies = copies
        .iter()
        .filter(|copy| copy.spec.want == CopyMode::Files && is_condition_true(copy, Type::Ready))
        .count();
    decision.status.copies = u32::try_from(ready_copies).unwrap_or(u32::MAX);
    if model.metadata.deletion_timestamp.is_some() {
        finalize_deletion(model, copies, users, now, &mut decision);
        return decision;
    }
    if !model.finalizers().iter().any(|finalizer| finalizer == FINALIZER_COPIES) {
        let mut finalizers = model.finalizers().to_vec();
        finalizers.push(FINALIZER_COPIES.to_owned());
        decision.finalizers = Some(finalizers);
    }
    match (newest_shape(copies, &before), &before.shape) {
        (Some(copy), _) => {
            decision.status.commit.clone_from(&copy.commit);
            decision.status.shape.clone_from(&copy.shape);
        }
        (None, Some(_)) => {}
        (None, None) => {
            find_reader(model, copies, nodes, now, &mut decision);
            return decision;
        }
    }
    describe(model, now, &mut decision.status);
    decision
}

fn describe(model: &Model, now: Timestamp, status: &mut ModelStatus) {
    let Some(shape) = status.shape.clone() else { return };
    status.size = Some(quantity::write(shape.total_bytes()));
    status.kv_bytes_per_token = Some(shape.kv_bytes_per_token());
    let generation = model.metadata.generation;
    let mut set = |kind, value, reason, message: &str| {
        conditions::set(&mut status.conditions, kind, value, reason, message, generation, now);
    };
    let text = match &shape.adapter {
        None => format!("{} layers, {}", shape.layers, quantity::show(shape.total_bytes())),
        Some(AdapterShape { kind, rank, modules, bytes, .. }) => {
            let size = quantity::show(*bytes);
            format!("an adapter: {} of rank {rank}, {modules} matrices, {size}", kind.name())
        }
    };
    set(Type::Resolved, true, Reason::HeadersRead, &text);
    let name = model.name_any();
    let notes = match &shape.adapter {
        None => shape_notes(&name, &shape),
        Some(_) => adapter_notes(&name, &shape),
    };
    match notes.first() {
        None => {
            let known: Vec<&str> =
                std::iter::once(&shape.architecture).chain(&shape.notes).map(String::as_str).collect();
            set(Type::Supported, true, Reason::ArchitectureKnown, &known.join("; "));
            set(Type::Ready, true, Reason::Settled, &text);
            set(Type::Reconciling, false, Reason::Settled, "");
            set(Type::Stalled, false, Reason::Settled, "");
        }
        Some(first) => {
            let (reason, message) = (first.reason(), russet_plan::note::join(&notes));
            set(Type::Supported, false, reason, &message);
            set(Type::Ready, false, reason, &message);
            set(Type::Reconciling, false, reason, "");
            set(Type::Stalled, true, reason, &message);
        }
    }
}

/// The copy whose agent read the headers last by release, if the model's shape is absent or of an older reader: a newer
/// release may support what that one did not. The bytes must be the same.
fn newest_shape<'a>(copies: &'a [Arc<ModelCopy>], known: &ModelStatus) -> Option<&'a ModelCopyStatus> {
    let mut resolved: Vec<_> = copies.iter().filter(|copy| is_condition_true(copy, Type::Resolved)).collect();
    resolved.sort_by_key(|copy| copy.name_any());
    let reader = |shape: &Option<ModelShape>| shape.as_ref().map(|shape| shape.reader);
    let is_newer = |status: &&ModelCopyStatus| reader(&status.shape) > reader(&known.shape);
    let is_same = |status: &&ModelCopyStatus| known.shape.is_none() || known.commit == status.commit;
    let read = resolved.iter().filter_map(|copy| copy.status.as_ref());
    read.filter(is_newer).filter(is_same).min_by_key(|status| Reverse(reader(&status.shape)))
}

/// No node has read the headers yet: wait for the current reader, or try the next node.
fn find_reader(
    model: &Model,
    copies: &[Arc<ModelCopy>],
    nodes: &[HeaderReader],
    now: Timestamp,
    decision: &mut ModelDecision,
) {
    let mut refusals: Vec<(&str, &Condition)> =
        copies.iter().filter_map(|copy| Some((copy.spec.node_name.as_str(), refusal(copy)?))).collect();
    // The reason that says most comes first, whichever node wrote its status last.
    refusals.sort_by_key(|(node, condition)| (precedence(reason_of(condition)), *node));
    let requested = |node: &HeaderReader| copies.iter().any(|copy| copy.spec.node_name == node.name);
    let refused = |node: &str| refusals.iter().any(|(name, _)| *name == node);
    let busy = nodes.iter().find(|node| node.reachable && requested(node) && !refused(&node.name));
    // Asked, never answered, and gone: what they were asked to read may be why.
    let silent: Vec<&str> = copies
        .iter()
        .filter(|copy| !has_answered(copy))
        .map(|copy| copy.spec.node_name.as_str())
        .filter(|name| !nodes.iter().any(|node| node.name == *name && node.reachable))
        .collect();
    let is_suspect = busy.is_none() && silent.len() >= MAX_SILENT_READERS;
    if busy.is_none() && !is_suspect {
        let free = |node: &&HeaderReader| node.reachable && !requested(node);
        // Nodes that take new work first: they may keep what they read.
        let next = nodes.iter().filter(free).find(|node| node.open).or_else(|| nodes.iter().find(free));
        decision.header_node = next.map(|node| node.name.clone());
    }
    let failures: Vec<String> =
        refusals.iter().map(|(node, condition)| format!("node {node}: {}", condition.message)).collect();
    let failures = failures.join("; ");
    let with = |text: String| if failures.is_empty() { text } else { format!("{text}; {failures}") };
    let (stalled, reason, message) = match (busy, &decision.header_node, refusals.first()) {
        _ if is_suspect => {
            let text = format!(
                "nodes {} went silent while they read the headers, so no other is asked; start their agents again, or delete their ModelCopies of this Model if its files were not why",
                silent.join(", ")
            );
            (false, Reason::WaitingForAgent, with(text))
        }
        (Some(node), _, _) => {
            (false, Reason::WaitingForAgent, with(format!("node {} reads the headers", node.name)))
        }
        (None, Some(node), _) => {
            (false, Reason::WaitingForAgent, with(format!("waiting for node {node} to read the headers")))
        }
        // Agents retry an unreachable source themselves; the spec needs no change.
        (None, None, Some((_, condition))) => {
            let reason = reason_of(condition);
            let retried =
                refusals.iter().any(|(_, condition)| reason_of(condition) == Reason::SourceUnreachable);
            // No agent can read what is written wrongly.
            (!retried || reason == Reason::InvalidSpec, reason, failures.clone())
        }
        (None, None, None) => (
            false,
            Reason::NoNodes,
            "no reachable node could read the headers; start an agent, or join a machine with `russet join`"
                .to_owned(),
        ),
    };
    let generation = model.metadata.generation;
    for (kind, value) in [
        (Type::Resolved, false),
        (Type::Ready, false),
        (Type::Reconciling, !stalled),
        (Type::Stalled, stalled),
    ] {
        conditions::set(&mut decision.status.conditions, kind, value, reason, &message, generation, now);
    }
}

/// Whether a copy's agent has said anything of the headers.
fn has_answered(copy: &ModelCopy) -> bool {
    let status = copy.status.as_ref();
    status.is_some_and(|status| conditions::get(&status.conditions, Type::Resolved).is_some())
}

/// Why a copy's agent cannot read the source; that agent retries by itself.
fn refusal(copy: &ModelCopy) -> Option<&Condition> {
    let condition = conditions::get(&copy.status.as_ref()?.conditions, Type::Resolved)?;
    let final_ = [
        Reason::SourceNotAllowed,
        Reason::SourceForbidden,
        Reason::SourceNotFound,
        Reason::SourceUnreachable,
        Reason::CorruptModel,
        Reason::InvalidSpec,
    ];
    (condition.status == "False" && final_.iter().any(|reason| condition.reason == format!("{reason:?}")))
        .then_some(condition)
}

/// Order of the reasons where nodes differ: what the user has to change, then what a node lacks, then what passes.
fn precedence(reason: Reason) -> u8 {
    match reason {
        Reason::InvalidSpec => 0,
        Reason::CorruptModel => 1,
        Reason::SourceForbidden => 2,
        Reason::SourceNotFound => 3,
        Reason::SourceNotAllowed => 4,
        _ => 5,
    }
}

fn reason_of(condition: &Condition) -> Reason {
    conditions::reason(condition).unwrap_or(Reason::SourceUnreachable)
}

fn finalize_deletion(
    model: &Model,
    copies: &[Arc<ModelCopy>],
    users: &[String],
    now: Timestamp,
    decision: &mut ModelDecision,
) {
    let generation = model.metadata.generation;
    let message = if !users.is_empty() {
        format!(
            "deleted once ShardGroup {} is gone; delete or scale down its ModelDeployment",
            users.join(", ")
        )
    } else if !copies.is_empty() {
        format!("removes {} copies", copies.len())
    } else {
        "goes".to_owned()
    };
    if users.is_empty() {
        let going = copies.iter().filter(|copy| copy.metadata.deletion_timestamp.is_none());
        decision.delete = going.map(|copy| copy.name_any()).collect();
        if copies.is_empty() && model.finalizers().iter().any(|finalizer| finalizer == FINALIZER_COPIES) {
            let rest = model.finalizers().iter().filter(|finalizer| *finalizer != FINALIZER_COPIES);
            decision.finalizers = Some(rest.cloned().collect());
        }
    }
    for (kind, value) in [(Type::Ready, false), (Type::Reconciling, true)] {
        conditions::set(
            &mut decision.status.conditions,
            kind,
            value,
            Reason::InProgress,
            &message,
            generation,
            now,
        );
    }
}

fn is_condition_true(copy: &ModelCopy, kind: Type) -> bool {
    copy.status.as_ref().is_some_and(|status| is_true(&status.conditions, kind))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use russet_crds::ModelSpec;

    use super::*;
    use crate::model::{copy_object, copy_spec};

    const NOW: Timestamp = Timestamp::UNIX_EPOCH;

    fn model() -> Model {
        let mut model = Model::new("m", ModelSpec::default());
        model.metadata.namespace = Some("ns".to_owned());
        model.metadata.finalizers = Some(vec![FINALIZER_COPIES.to_owned()]);
        model
    }

    fn readers(names: &[(&str, bool, bool)]) -> Vec<HeaderReader> {
        let reader = |(name, reachable, open): &(&str, bool, bool)| HeaderReader {
            name: (*name).to_owned(),
            reachable: *reachable,
            open: *open,
        };
        names.iter().map(reader).collect()
    }

    fn copy(node: &str, resolved: Option<(bool, Reason, &str)>, architecture: &str) -> Arc<ModelCopy> {
        let mut copy = copy_object(copy_spec(&model(), node, CopyMode::Headers));
        let mut status = ModelCopyStatus::default();
        if let Some((good, reason, message)) = resolved {
            conditions::set(&mut status.conditions, Type::Resolved, good, reason, message, None, NOW);
            let shape = ModelShape {
                architecture: architecture.to_owned(),
                layers: 2,
                layer_bytes: vec![1 << 30; 2],
                kv_bytes_per_token_per_layer: 8,
                ..ModelShape::default()
            };
            status.shape = good.then_some(shape);
        }
        copy.status = Some(status);
        Arc::new(copy)
    }

    #[test]
    fn headers_are_requested_from_one_node_at_a_time() {
        let refused = Some((false, Reason::SourceNotAllowed, "may not read /models"));
        let both = readers(&[("a", true, true), ("b", true, true)]);
        for (story, copies, nodes, read_on, stalled, reason) in [
            ("nobody there", vec![], vec![], None, false, "NoNodes"),
            ("nobody reachable", vec![], readers(&[("a", false, false)]), None, false, "NoNodes"),
            ("the first", vec![], both.clone(), Some("a"), false, "WaitingForAgent"),
            (
                "an open one before a cordoned one",
                vec![],
                readers(&[("a", true, false), ("b", true, true)]),
                Some("b"),
                false,
                "WaitingForAgent",
            ),
            ("one is at it", vec![copy("a", None, "")], both.clone(), None, false, "WaitingForAgent"),
            ("one refused", vec![copy("a", refused, "")], both.clone(), Some("b"), false, "WaitingForAgent"),
            (
                "one went away",
                vec![copy("a", None, "")],
                readers(&[("a", false, false), ("b", true, true)]),
                Some("b"),
                false,
                "WaitingForAgent",
            ),
            (
                "two went away",
                vec![copy("a", None, ""), copy("b", None, "")],
                readers(&[("a", false, false), ("b", false, false), ("c", true, true)]),
                None,
                false,
                "WaitingForAgent",
            ),
            (
                "one of two came back",
                vec![copy("a", None, ""), copy("b", refused, "")],
                readers(&[("a", false, false), ("b", true, true), ("c", true, true)]),
                Some("c"),
                false,
                "WaitingForAgent",
            ),
            (
                "all refused",
                vec![copy("a", refused, ""), copy("b", refused, "")],
                both.clone(),
                None,
                true,
                "SourceNotAllowed",
            ),
        ] {
            let decision = decide(&model(), &copies, &nodes, &[], NOW);
            assert_eq!(decision.header_node.as_deref(), read_on, "{story}");
            let conditions = &decision.status.conditions;
            assert_eq!(is_true(conditions, Type::Stalled), stalled, "{story}");
            assert_eq!(conditions::get(conditions, Type::Ready).unwrap().reason, reason, "{story}");
        }
    }

    #[test]
    fn reason_is_the_same_whichever_node_reports_last() {
        let nodes = readers(&[("a", true, true), ("b", true, true), ("c", true, true)]);
        let refused = |node: &str, reason| copy(node, Some((false, reason, "no")), "");
        for (reasons, stalled, shown) in [
            ([Reason::SourceUnreachable, Reason::InvalidSpec, Reason::SourceNotAllowed], true, "InvalidSpec"),
            (
                [Reason::SourceNotAllowed, Reason::SourceForbidden, Reason::SourceNotFound],
                true,
                "SourceForbidden",
            ),
            (
                [Reason::SourceUnreachable, Reason::SourceNotFound, Reason::SourceUnreachable],
                false,
                "SourceNotFound",
            ),
        ] {
            let mut copies: Vec<_> =
                nodes.iter().zip(reasons).map(|(node, reason)| refused(&node.name, reason)).collect();
            let first = decide(&model(), &copies, &nodes, &[], NOW).status;
            let ready = conditions::get(&first.conditions, Type::Ready).unwrap();
            assert_eq!((ready.reason.as_str(), is_true(&first.conditions, Type::Stalled)), (shown, stalled));
            for _ in 0..2 {
                copies.rotate_left(1);
                assert_eq!(decide(&model(), &copies, &nodes, &[], NOW).status, first, "{shown}");
            }
        }
    }

    #[test]
    fn model_is_never_given_to_who_may_not_read_its_source() {
        // A's copies are on every node, Ready; B names the same source and has no Secret.
        let nodes = readers(&[("a", true, true), ("b", true, true)]);
        let mut copies = Vec::new();
        for _ in 0..4 {
            let decision = decide(&model(), &copies, &nodes, &[], NOW);
            let Some(node) = decision.header_node else { break };
            copies.push(copy(&node, Some((false, Reason::SourceForbidden, "HTTP 401")), ""));
        }
        let status = decide(&model(), &copies, &nodes, &[], NOW).status;
        let ready = conditions::get(&status.conditions, Type::Ready).unwrap();
        assert_eq!((copies.len(), ready.reason.as_str()), (2, "SourceForbidden"));
        assert!(is_true(&status.conditions, Type::Stalled) && status.shape.is_none());
    }

    #[test]
    fn model_that_the_engine_lacks_something_for_says_what() {
        let mut copy = (*copy("a", Some((true, Reason::HeadersRead, "")), "llama")).clone();
        let why =
            "config.json rope_scaling.rope_type: rope scaling \"yarn\" is not supported; use another model";
        if let Some(shape) = copy.status.as_mut().and_then(|status| status.shape.as_mut()) {
            shape.unsupported = Some(why.to_owned());
        }
        let decision = decide(&model(), &[Arc::new(copy)], &readers(&[("a", true, true)]), &[], NOW);
        let conditions = &decision.status.conditions;
        for kind in [Type::Supported, Type::Ready] {
            let condition = conditions::get(conditions, kind).unwrap();
            assert_eq!((condition.status.as_str(), condition.reason.as_str()), ("False", "UnsupportedModel"));
            assert!(condition.message.contains(why), "{}", condition.message);
        }
        assert!(is_true(conditions, Type::Stalled));
        assert_eq!(decision.status.size.as_deref(), Some("2Gi"), "its size is known all the same");
    }

    #[test]
    fn shape_of_a_newer_reader_replaces_the_one_that_is_known() {
        let read_by = |node: &str, reader: u32, commit: &str, unsupported: Option<&str>| {
            let mut copy = (*copy(node, Some((true, Reason::HeadersRead, "")), "llama")).clone();
            let status = copy.status.as_mut().unwrap();
            status.commit = Some(commit.to_owned());
            let shape = status.shape.as_mut().unwrap();
            (shape.reader, shape.unsupported) = (reader, unsupported.map(str::to_owned));
            Arc::new(copy)
        };
        let nodes = readers(&[("a", true, true), ("b", true, true)]);
        let mut known = model();
        let first = read_by("a", 2, "c", Some("not yet"));
        known.status = Some(decide(&model(), std::slice::from_ref(&first), &nodes, &[], NOW).status);
        for (what, copies, reader, supported) in [
            ("the same reader", vec![read_by("a", 2, "c", None)], 2, false),
            ("an older reader", vec![read_by("a", 1, "c", None)], 2, false),
            ("other bytes", vec![read_by("a", 3, "other", None)], 2, false),
            ("newer, still refused", vec![read_by("a", 3, "c", Some("still not"))], 3, false),
            ("newer", vec![read_by("a", 3, "c", None)], 3, true),
            ("newer on another node", vec![first.clone(), read_by("b", 3, "c", None)], 3, true),
            (
                "two newer, newest first",
                vec![read_by("a", 4, "c", None), read_by("b", 3, "c", Some("no"))],
                4,
                true,
            ),
            (
                "two newer, newest last",
                vec![read_by("a", 3, "c", Some("no")), read_by("b", 4, "c", None)],
                4,
                true,
            ),
        ] {
            let decision = decide(&known, &copies, &nodes, &[], NOW);
            assert_eq!(decision.status.shape.as_ref().unwrap().reader, reader, "{what}");
            assert_eq!(is_true(&decision.status.conditions, Type::Supported), supported, "{what}");
            assert_eq!(decision.header_node, None, "{what}");
        }
    }

    #[test]
    fn resolved_model_shows_size_and_architecture_support() {
        for (architecture, ready, reason) in
            [("llama", true, "Settled"), ("mamba", false, "UnsupportedArchitecture")]
        {
            let copies = [copy("a", Some((true, Reason::HeadersRead, "")), architecture)];
            let decision = decide(&model(), &copies, &readers(&[("a", true, true)]), &[], NOW);
            assert_eq!(decision.status.size.as_deref(), Some("2Gi"));
            assert_eq!(decision.status.kv_bytes_per_token, Some(16));
            let conditions = &decision.status.conditions;
            assert!(is_true(conditions, Type::Resolved));
            assert_eq!(is_true(conditions, Type::Supported), ready);
            let condition = conditions::get(conditions, Type::Ready).unwrap();
            assert_eq!((condition.status == "True", condition.reason.as_str()), (ready, reason));
            // A known shape stays, even when the copies are gone.
            let mut known = model();
            known.status = Some(decision.status.clone());
            assert_eq!(decide(&known, &[], &[], &[], NOW).status, decision.status);
        }
    }

    #[test]
    fn deleted_model_waits_for_groups_then_removes_copies() {
        let mut gone = model();
        gone.metadata.deletion_timestamp = Some(Time(NOW));
        let copies = [copy("a", None, "")];
        let waits = decide(&gone, &copies, &[], &["chat-0-1".to_owned()], NOW);
        assert!(waits.delete.is_empty() && waits.finalizers.is_none());
        assert!(
            conditions::get(&waits.status.conditions, Type::Ready)
                .unwrap()
                .message
                .contains("ShardGroup chat-0-1")
        );
        let removes = decide(&gone, &copies, &[], &[], NOW);
        assert_eq!(
            (removes.delete.as_slice(), removes.finalizers.clone()),
            (&["ns.m.a".to_owned()][..], None)
        );
        assert_eq!(decide(&gone, &[], &[], &[], NOW).finalizers, Some(vec![]));
    }
}
