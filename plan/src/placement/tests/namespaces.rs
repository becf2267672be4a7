//! Namespaces: who may use a tier, and who may say that replicas of others stop.

use russet_crds::{Autoscaling, ModelDeployment, PredictiveScaling};

use super::*;
use crate::snapshot::ApprovalDecisions;
use crate::tier::TierInfo;

/// A ready replica of tier `low` in this namespace fills the only node.
fn full(namespace: &str, allowed: &[&str]) -> Snapshot {
    let mut view = view(&[("a", 6)], 4);
    let shape = view.models[&("ns".to_owned(), "m".to_owned())].clone();
    view.models.insert((namespace.to_owned(), "m".to_owned()), shape);
    let low = TierInfo { priority: 1, ..TierInfo::default() };
    let namespaces = allowed.iter().map(|&name| name.to_owned()).collect();
    let high = TierInfo { priority: 2, preempts: true, namespaces, ..TierInfo::default() };
    view.tiers = [("low".to_owned(), low), ("high".to_owned(), high)].into();
    let low = validate(&view, namespace, "low", &of_tier("low")).unwrap();
    let (placement, _) = checked(&view, &low);
    ready(placement.apply(&view, &low))
}

fn of_tier(tier: &str) -> ModelDeploymentSpec {
    let tier_ref = Some(LocalReference::new(tier));
    ModelDeploymentSpec { tier_ref, ..spec(ShardingMode::Auto, None, 1) }
}

/// What becomes of a deployment of tier `high` in namespace `ns`, and what it asks.
fn outcome(view: &Snapshot, desired: &ValidDeployment) -> (String, Placement) {
    let (placement, notes) = checked(view, desired);
    let Placement { preempt, approval_requests, .. } = &placement;
    let word = match (preempt.len(), approval_requests.len()) {
        (1, 0) => "preempts".to_owned(),
        (0, 1) => "asks".to_owned(),
        other => format!("{other:?}: {notes}"),
    };
    (word, placement)
}

#[test]
fn tier_for_all_stops_replicas_of_others_by_approval_only() {
    for (story, victims, allowed, expected) in [
        ("its own namespace", "ns", &[][..], "preempts"),
        ("another namespace, a tier for all", "other", &[], "asks"),
        ("another namespace, a tier for named ones", "other", &["ns"], "preempts"),
    ] {
        let view = full(victims, allowed);
        let high = validate(&view, "ns", "high", &of_tier("high")).unwrap();
        assert_eq!(outcome(&view, &high).0, expected, "{story}");
    }
}

#[test]
fn what_only_history_expects_stops_nobody() {
    let view = full("ns", &[]);
    let predictive = |min_replicas| {
        let predictive = Some(PredictiveScaling::default());
        Some(Autoscaling { min_replicas, max_replicas: 2, predictive, ..Autoscaling::default() })
    };
    let fixed = Some(Autoscaling { max_replicas: 2, ..Autoscaling::default() });
    for (story, autoscaling, asked, expected) in [
        ("a person asked for it", None, None, true),
        ("demand asked for it", fixed, None, true),
        ("history may have, and nobody asks", predictive(0), None, false),
        ("somebody asked long ago", predictive(0), Some(300), false),
        ("somebody asked minutes ago", predictive(0), Some(299), true),
        ("it is one of the fewest", predictive(1), None, true),
    ] {
        let at = |second| jiff::Timestamp::from_second(second).unwrap();
        let mut high = ModelDeployment::new("high", ModelDeploymentSpec { autoscaling, ..of_tier("high") });
        high.metadata.namespace = Some("ns".to_owned());
        let last = asked.map(|ago| at(1000 - ago));
        // The gateway is gone, and with it its requests.
        let entry =
            serde_json::json!({"gateway": "g", "reportedAt": at(0), "active": 9, "lastRequestTime": last});
        high.status = Some(serde_json::from_value(serde_json::json!({"demand": [entry]})).unwrap());
        let high = crate::validate::read_at(&view, &high, at(1000)).unwrap();
        let (placement, _) = checked(&view, &high);
        assert_eq!(!placement.preempt.is_empty(), expected, "{story}");
    }
}

#[test]
fn an_approved_plan_of_a_spec_counts_in_its_namespace_only() {
    for (victims, expected) in [("ns", "preempts"), ("other", "asks")] {
        let mut view = full(victims, &["ns"]);
        let approvals = [russet_crds::ApprovalAction::Preempt].into();
        view.tiers.get_mut("low").unwrap().approvals = approvals;
        let mut high = validate(&view, "ns", "high", &of_tier("high")).unwrap();
        let (first, placement) = outcome(&view, &high);
        assert_eq!(first, "asks", "{victims}");
        let ask = placement.approval_requests[0].clone();
        assert_eq!(ask.affects, [format!("{victims}/low")]);
        high.approved_plan = Some(ask.hash.clone());
        assert_eq!(outcome(&view, &high).0, expected, "{victims}, in its own spec");
        high.approved_plan = None;
        // An Approval that does not name who stops was decided by somebody who was not asked about them.
        for (affects, expected) in [(Vec::new(), expected), (ask.affects, "preempts")] {
            let approved = [(ask.hash.clone(), affects.into_iter().collect())].into();
            view.approval_decisions.insert(high.key(), ApprovalDecisions { approved, ..Default::default() });
            high.approved = view.approval_decisions[&high.key()].approved.clone();
            assert_eq!(outcome(&view, &high).0, expected, "{victims}, by an Approval");
        }
    }
}

#[test]
fn a_tier_serves_the_namespaces_that_it_names() {
    for (allowed, refused) in [(&[][..], false), (&["ns", "b"], false), (&["b"], true)] {
        let view = full("b", allowed);
        let valid = validate(&view, "ns", "high", &of_tier("high"));
        let reasons = valid.err().unwrap_or_default();
        assert_eq!(!reasons.is_empty(), refused, "{allowed:?}: {reasons:?}");
        for note in reasons {
            assert_eq!(note.reason(), russet_crds::conditions::Reason::TierNotAllowed);
            assert!(note.to_string().contains("spec.namespaces"), "{note}");
        }
    }
}
