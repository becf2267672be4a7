//! The status of a route, from its targets alone.

use std::collections::BTreeSet;
use std::sync::Arc;

use jiff::Timestamp;
use russet_crds::active_hours::{InvalidSchedule, active_hours};
use russet_crds::conditions::{self, Reason, Type, is_true};
use russet_crds::{ModelDeployment, ModelRoute, ModelRouteStatus};

/// The status of a route; each target with its deployment, if there is one.
pub fn status(
    route: &ModelRoute,
    targets: &[(&str, Option<Arc<ModelDeployment>>)],
    now: Timestamp,
) -> ModelRouteStatus {
    let generation = route.metadata.generation;
    // Several rules may have one target.
    let missing: BTreeSet<&str> =
        targets.iter().filter(|(_, found)| found.is_none()).map(|(name, _)| *name).collect();
    let missing: Vec<&str> = missing.into_iter().collect();
    let answers: BTreeSet<&str> = targets
        .iter()
        .filter(|(_, found)| {
            let status = found.as_ref().and_then(|deployment| deployment.status.as_ref());
            status.is_some_and(|status| is_true(&status.conditions, Type::Available))
        })
        .map(|(name, _)| *name)
        .collect();
    let mut conditions = route.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default();
    let mut set = |kind, status, reason, message: &str| {
        conditions::set(&mut conditions, kind, status, reason, message, generation, now);
    };
    let missing_text = format!(
        "ModelDeployment {} does not exist in this namespace; create it or remove the target",
        missing.join(", ")
    );
    let answers: Vec<&str> = answers.into_iter().collect();
    let invalid = invalid_schedule(route, now);
    let (ready, reason, text) = if !missing.is_empty() {
        (false, Reason::TargetNotFound, missing_text.clone())
    } else if let Some(invalid) = invalid.clone() {
        (false, Reason::InvalidSpec, invalid)
    } else if answers.is_empty() {
        (false, Reason::InProgress, "no target answers yet".to_owned())
    } else {
        (true, Reason::Serving, format!("{} answers", answers.join(", ")))
    };
    match missing.is_empty() {
        true => set(Type::ResolvedRefs, true, Reason::Settled, "every target exists"),
        false => set(Type::ResolvedRefs, false, Reason::TargetNotFound, &missing_text),
    }
    set(Type::Ready, ready, reason, &text);
    let stalled = !missing.is_empty() || invalid.is_some();
    set(Type::Reconciling, !ready && !stalled, reason, &text);
    set(Type::Stalled, stalled, reason, &text);
    ModelRouteStatus { observed_generation: generation, conditions }
}

/// What is wrong with the schedules of a rule, which matches no request then.
fn invalid_schedule(route: &ModelRoute, now: Timestamp) -> Option<String> {
    route.spec.rules.iter().find_map(|rule| {
        let InvalidSchedule { index, why } = active_hours(&rule.r#match.schedules, now).err()?;
        Some(format!("the rule {} matches no request: match.schedules[{index}]: {why}", rule.name))
    })
}

#[cfg(test)]
mod tests {
    use russet_crds::{ModelDeploymentSpec, ModelDeploymentStatus, ModelRouteSpec};
    use russet_crds::{RouteMatch, RouteRule, Schedule};

    use super::*;

    fn deployment(available: bool) -> Option<Arc<ModelDeployment>> {
        let mut deployment = ModelDeployment::new("chat", ModelDeploymentSpec::default());
        let mut status = ModelDeploymentStatus::default();
        let now = Timestamp::UNIX_EPOCH;
        conditions::set(&mut status.conditions, Type::Available, available, Reason::Serving, "", None, now);
        deployment.status = Some(status);
        Some(Arc::new(deployment))
    }

    #[test]
    fn a_route_is_ready_when_all_targets_exist_and_one_answers() {
        let route = ModelRoute::new("auto", ModelRouteSpec::default());
        for (targets, ready, reason, stalled) in [
            (vec![("a", deployment(true)), ("b", deployment(false))], "True", "Serving", "False"),
            (vec![("a", deployment(false))], "False", "InProgress", "False"),
            (vec![("a", deployment(true)), ("b", None)], "False", "TargetNotFound", "True"),
        ] {
            let status = status(&route, &targets, Timestamp::UNIX_EPOCH);
            let condition = conditions::get(&status.conditions, Type::Ready).unwrap();
            assert_eq!((condition.status.as_str(), condition.reason.as_str()), (ready, reason));
            assert_eq!(conditions::get(&status.conditions, Type::Stalled).unwrap().status, stalled);
        }
    }

    #[test]
    fn a_rule_that_can_match_nothing_is_named() {
        let zone = |time_zone: &str| Schedule {
            from: "08:00".into(),
            until: "18:00".into(),
            time_zone: time_zone.into(),
            ..Schedule::default()
        };
        let rule = |name: &str, schedules| RouteRule {
            name: name.into(),
            r#match: RouteMatch { schedules, ..RouteMatch::default() },
            ..RouteRule::default()
        };
        let rules =
            vec![rule("by-day", vec![zone("UTC")]), rule("far", vec![zone("UTC"), zone("Mars/Base")])];
        let route = ModelRoute::new("auto", ModelRouteSpec { rules, ..ModelRouteSpec::default() });
        let status = status(&route, &[("a", deployment(true))], Timestamp::UNIX_EPOCH);
        let condition = conditions::get(&status.conditions, Type::Ready).unwrap();
        assert_eq!((condition.status.as_str(), condition.reason.as_str()), ("False", "InvalidSpec"));
        let expected =
            "the rule far matches no request: match.schedules[1]: timeZone \"Mars/Base\" is no IANA";
        assert!(condition.message.starts_with(expected), "{}", condition.message);
        assert_eq!(conditions::get(&status.conditions, Type::Stalled).unwrap().status, "True");
    }
}
