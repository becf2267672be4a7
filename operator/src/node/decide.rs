//! Whether a node is reachable, ready and takes work. Pure: the age of its Lease is an argument.
//!
//! ```text
//! no Lease ─▶ unreachable      renewed within 20 s ─▶ reachable      no renewal for 20 s ─▶ unreachable
//!                                                                    … and 60 s more ─▶ lost
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt as _;
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{InferenceNode, Link, Scheduling, names};
use russet_plan::quantity;

use super::cables::{CableReport, FarEnds, cable_report, ports};

/// A Lease without renewal for this long has expired; agents renew every five seconds.
const LEASE_DURATION: Duration = Duration::from_secs(20);

/// The operator's conditions of a node.
pub const OPERATOR_CONDITIONS: [Type; 6] =
    [Type::Reachable, Type::Ready, Type::Reconciling, Type::Stalled, Type::Drained, Type::FabricHealthy];

/// Observations of a node: its Lease, and the ranks bound to it.
#[derive(Clone, Debug, Default)]
pub struct NodeObservation {
    /// Whether there is a Lease.
    pub exists: bool,
    /// Its renewal time.
    pub renewed: Option<Timestamp>,
    /// Time since it was observed to change, or first observed.
    pub age: Duration,
    /// Whether it was observed to change.
    pub changed: bool,
    /// The boot id of its holder.
    pub holder: Option<String>,
    /// The groups of the ranks bound to the node, one entry per rank.
    pub ranks: Vec<String>,
    /// The far ends of its cables.
    pub ends: FarEnds,
}

/// The writes.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeDecision {
    /// The operator's conditions.
    pub conditions: Vec<Condition>,
    /// Its links; `None` while its agent reports no ports.
    pub links: Option<Vec<Link>>,
    /// The operator's labels.
    pub labels: BTreeMap<String, String>,
    /// When to requeue without an event.
    pub requeue_after: Option<Duration>,
}

/// Decides for a node.
pub fn decide(node: &InferenceNode, seen: &NodeObservation, now: Timestamp) -> NodeDecision {
    let status = node.status.clone().unwrap_or_default();
    let before =
        conditions::get(&status.conditions, Type::Reachable).map(|condition| condition.status == "True");
    let (reachable, message) = reachable(seen, before, now);
    let generation = node.metadata.generation;
    let CableReport { links, health } = cable_report(node, &seen.ends);
    let mut conditions: Vec<Condition> = status
        .conditions
        .iter()
        .filter(|condition| {
            OPERATOR_CONDITIONS.iter().any(|kind| condition.type_ == format!("{kind:?}"))
                && (draining(node) || condition.type_ != format!("{:?}", Type::Drained))
                && (health.is_some() || condition.type_ != format!("{:?}", Type::FabricHealthy))
        })
        .cloned()
        .collect();
    let reason = if reachable { Reason::LeaseRenewed } else { Reason::LeaseExpired };
    conditions::set(&mut conditions, Type::Reachable, reachable, reason, &message, generation, now);

    let (ready, reason, message) = if !reachable {
        (false, Reason::LeaseExpired, message)
    } else if let Some((holder, boot)) = conflicting_boots(seen, status.boot_id.as_deref()) {
        (
            false,
            Reason::WaitingForAgent,
            format!(
                "two machines act as this node (boots {holder} and {boot}); give one another --node-name"
            ),
        )
    } else if status.memory.is_none() {
        (false, Reason::WaitingForAgent, "the agent has not reported its memory yet".to_owned())
    } else {
        match node.spec.scheduling {
            Scheduling::Enabled => (true, Reason::Settled, "takes work".to_owned()),
            Scheduling::Cordoned => {
                (true, Reason::Unschedulable, "cordoned: running engines stay, no new work is placed here".to_owned())
            }
            Scheduling::Unknown => (
                true,
                Reason::NewerRelease,
                "spec.scheduling has a value of a newer release; running engines stay, no new work is placed here".to_owned(),
            ),
            Scheduling::Draining => {
                (true, Reason::Unschedulable, "draining: running replicas move to other nodes".to_owned())
            }
        }
    };
    conditions::set(&mut conditions, Type::Ready, ready, reason, &message, generation, now);
    // A node is reconciling until its agent reports; an unreachable one is not.
    let waiting = !ready && reason == Reason::WaitingForAgent;
    conditions::set(&mut conditions, Type::Reconciling, waiting, reason, &message, generation, now);
    conditions::set(&mut conditions, Type::Stalled, false, reason, "", generation, now);

    if draining(node) {
        let granted = status.memory.as_ref().map_or(0, |memory| memory.granted_bytes);
        let (drained, message) = drained(&seen.ranks, granted);
        let reason = if drained { Reason::Settled } else { Reason::InProgress };
        conditions::set(&mut conditions, Type::Drained, drained, reason, message, generation, now);
    }

    if let Some((healthy, reason, message)) = health {
        conditions::set(&mut conditions, Type::FabricHealthy, healthy, reason, message, generation, now);
    }

    let mut labels = BTreeMap::new();
    // A label with its name, so that a pool can select machines.
    let name = node.name_any();
    if name.len() <= 63 {
        labels.insert(names::LABEL_HOSTNAME.to_owned(), name);
    }
    // The manufacturer adds nothing to the chip's name.
    let chip = status.chip.as_deref().map(|chip| chip.strip_prefix("Apple ").unwrap_or(chip));
    if let Some(chip) = chip.and_then(label_value) {
        labels.insert(names::LABEL_CHIP.to_owned(), chip);
    }
    if let Some(memory) = &status.memory {
        labels.insert(names::LABEL_MEMORY.to_owned(), format!("{}Gi", nominal_gib(memory.total_bytes)));
    }
    let again = reachable.then(|| LEASE_DURATION.saturating_sub(seen.age) + Duration::from_millis(50));
    let links = (!ports(node).is_empty()).then_some(links);
    NodeDecision { conditions, links, labels, requeue_after: again }
}

fn draining(node: &InferenceNode) -> bool {
    node.spec.scheduling == Scheduling::Draining || node.metadata.deletion_timestamp.is_some()
}

/// Whether no engine is left on a draining node; an engine counts until its memory is released.
fn drained(ranks: &[String], granted: u64) -> (bool, String) {
    let groups: BTreeSet<&str> = ranks.iter().map(String::as_str).collect();
    let names = groups.into_iter().collect::<Vec<_>>().join(", ");
    match (ranks.len(), granted) {
        (0, 0) => (true, "no engine runs here".to_owned()),
        (0, bytes) => (
            false,
            format!(
                "no rank is bound to this node; engines that are stopping still hold {}",
                quantity::show(bytes)
            ),
        ),
        (1, _) => (false, format!("1 rank still here, of {names}")),
        (count, _) => (false, format!("{count} ranks still here, of {names}")),
    }
}

fn reachable(seen: &NodeObservation, before: Option<bool>, now: Timestamp) -> (bool, String) {
    if !seen.exists {
        return (false, "the agent has not created its Lease".to_owned());
    }
    if seen.age >= LEASE_DURATION {
        let since = seen.renewed.map_or_else(String::new, |time| format!(" since {time:.0}"));
        return (
            false,
            format!("the agent has not renewed its Lease{since}; start the agent or its network"),
        );
    }
    // First observed: the clocks of two machines may differ, so the renewal time can prove that it is fresh,
    // but not that it is stale; then the previous state stays.
    let fresh = seen.renewed.is_some_and(|time| now.duration_since(time).unsigned_abs() < LEASE_DURATION);
    if seen.changed || fresh || before == Some(true) {
        (true, "the agent renews its Lease".to_owned())
    } else {
        (false, "the Lease has not been renewed since the operator started".to_owned())
    }
}

fn conflicting_boots<'a>(seen: &'a NodeObservation, boot: Option<&'a str>) -> Option<(&'a str, &'a str)> {
    let (holder, boot) = (seen.holder.as_deref()?, boot?);
    (holder != boot).then_some((holder, boot))
}

/// The nominal gibibytes of a machine. Kernels and firmware reserve up to a twentieth and do not count it; a
/// whole number of gibibytes is taken as it is.
fn nominal_gib(bytes: u64) -> u64 {
    const GIB: u64 = 1 << 30;
    let nearest = (bytes + GIB / 2) / GIB;
    // A power of two, or that plus an eighth, a quarter, a half or three quarters of it.
    let power = 1 << bytes.max(GIB).ilog2();
    let sold =
        [8, 9, 10, 12, 14, 16].map(|eighths| power / 8 * eighths).into_iter().find(|sold| *sold >= bytes);
    match sold {
        Some(sold) if !bytes.is_multiple_of(GIB) && bytes >= sold / 20 * 19 && sold.is_multiple_of(GIB) => {
            sold / GIB
        }
        _ => nearest,
    }
}

/// A text as a label value: letters, digits, `-`, `_` and `.`, at most 63 of them.
fn label_value(text: &str) -> Option<String> {
    let sanitized: String = text
        .chars()
        .map(
            |letter| {
                if letter.is_ascii_alphanumeric() || letter == '.' || letter == '_' { letter } else { '-' }
            },
        )
        .collect();
    let mut words: Vec<&str> = sanitized.split('-').filter(|word| !word.is_empty()).collect();
    loop {
        let value = words.join("-");
        let value = value.trim_matches(['-', '_', '.']);
        if value.len() <= 63 {
            return (!value.is_empty()).then(|| value.to_owned());
        }
        if words.len() == 1 {
            return Some(value[..63].trim_matches(['-', '_', '.']).to_owned());
        }
        words.pop();
    }
}

#[cfg(test)]
mod tests {
    use russet_crds::{InferenceNodeStatus, NodeMemory};

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + second).unwrap()
    }

    fn named(name: &str) -> InferenceNode {
        InferenceNode::new(name, russet_crds::InferenceNodeSpec::default())
    }

    fn measured(name: &str) -> InferenceNode {
        let mut node = named(name);
        node.status = Some(InferenceNodeStatus {
            chip: Some("Apple M3 Ultra (32-core)".to_owned()),
            boot_id: Some("boot-1".to_owned()),
            memory: Some(NodeMemory { total_bytes: (512 << 30) - 5, ..NodeMemory::default() }),
            ..InferenceNodeStatus::default()
        });
        node
    }

    #[test]
    fn a_node_is_reachable_while_its_lease_is_seen_to_change() {
        let seen = |age: u64, changed: bool, renewed: i64| NodeObservation {
            exists: true,
            renewed: Some(at(renewed)),
            age: Duration::from_secs(age),
            changed,
            holder: Some("boot-1".to_owned()),
            ..NodeObservation::default()
        };
        for (story, seen, before, expected) in [
            ("no Lease", NodeObservation::default(), None, false),
            ("no Lease any more", NodeObservation::default(), Some(true), false),
            ("changed a moment ago", seen(1, true, 100), None, true),
            (
                "changed a moment ago, though its clock is an hour off",
                seen(1, true, -3500),
                Some(false),
                true,
            ),
            ("silent for 20 s", seen(20, true, 80), Some(true), false),
            ("silent for 20 s since the operator started", seen(20, false, 80), Some(true), false),
            ("first sight, fresh by its own clock", seen(0, false, 99), None, true),
            ("first sight, stale by its own clock, was alive", seen(0, false, 0), Some(true), true),
            ("first sight, stale by its own clock, was dead", seen(0, false, 0), Some(false), false),
            ("first sight, stale by its own clock, unknown", seen(0, false, 0), None, false),
        ] {
            let mut node = measured("a");
            if let (Some(before), Some(status)) = (before, node.status.as_mut()) {
                conditions::set(
                    &mut status.conditions,
                    Type::Reachable,
                    before,
                    Reason::LeaseRenewed,
                    "",
                    None,
                    at(0),
                );
            }
            let decision = decide(&node, &seen, at(100));
            assert_eq!(conditions::is_true(&decision.conditions, Type::Reachable), expected, "{story}");
            assert_eq!(conditions::is_true(&decision.conditions, Type::Ready), expected, "{story}");
            assert_eq!(decision.requeue_after.is_some(), expected, "{story}");
        }
    }

    #[test]
    fn draining_node_lists_remaining_ranks_until_drained() {
        let group = |name: &str| format!("ShardGroup default/{name}");
        for (scheduling, ranks, granted, expected) in [
            (
                Scheduling::Draining,
                vec![group("a"), group("a"), group("b")],
                9,
                Some((false, "3 ranks still here, of ShardGroup default/a, ShardGroup default/b")),
            ),
            (
                Scheduling::Draining,
                vec![group("a")],
                9,
                Some((false, "1 rank still here, of ShardGroup default/a")),
            ),
            (
                Scheduling::Draining,
                vec![],
                3 << 30,
                Some((false, "no rank is bound to this node; engines that are stopping still hold 3.0 GiB")),
            ),
            (Scheduling::Draining, vec![], 0, Some((true, "no engine runs here"))),
            (Scheduling::Cordoned, vec![], 0, None),
            (Scheduling::Enabled, vec![], 0, None),
        ] {
            let mut node = measured("a");
            node.spec.scheduling = scheduling;
            let status = node.status.as_mut().unwrap();
            status.memory.as_mut().unwrap().granted_bytes = granted;
            // The state of an earlier drain is reset once no drain is requested.
            conditions::set(&mut status.conditions, Type::Drained, true, Reason::Settled, "", None, at(0));
            let decision = decide(&node, &NodeObservation { ranks, ..NodeObservation::default() }, at(0));
            let found = conditions::get(&decision.conditions, Type::Drained);
            let found = found.map(|it| (it.status == "True", it.message.as_str()));
            assert_eq!(found, expected, "{scheduling:?}");
        }
    }

    #[test]
    fn labels_come_from_what_was_measured() {
        let decision = decide(&measured("a"), &NodeObservation::default(), at(0));
        let labels: Vec<String> =
            decision.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let expected =
            ["kubernetes.io/hostname=a", "russet.dev/chip=M3-Ultra-32-core", "russet.dev/memory=512Gi"];
        assert_eq!(labels, expected);
        assert!(label_value(&"word ".repeat(40)).unwrap().len() <= 63 && label_value("()").is_none());
    }

    #[test]
    fn memory_is_labelled_as_it_was_sold() {
        for (mebibytes, label) in [
            (512 * 1024, 512),
            (100 * 1024, 100), // configured to simulate it
            (515_600, 512),    // of Linux on 512 GiB
            (257_600, 256),
            (192_900, 192),
            (96_300, 96),
            (64_100, 64),
            (31_900, 32),
            (15_700, 16),
            (7_800, 8),
            (36_500, 36),
            (111_111, 112),
            (106_000, 104), // nothing sold is near
            (700, 1),
        ] {
            assert_eq!(nominal_gib(mebibytes << 20), label, "{mebibytes} MiB");
        }
    }

    #[test]
    fn two_machines_with_one_name_differ_by_their_boot_ids() {
        let seen = NodeObservation {
            exists: true,
            renewed: Some(at(0)),
            holder: Some("boot-2".to_owned()),
            ..NodeObservation::default()
        };
        let decision = decide(&measured("a"), &seen, at(0));
        let ready = conditions::get(&decision.conditions, Type::Ready).unwrap();
        assert!(
            ready.status == "False" && ready.message.contains("boots boot-2 and boot-1"),
            "{}",
            ready.message
        );
    }
}
