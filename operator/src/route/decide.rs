//! The status of a route, from its targets alone.

use std::collections::BTreeSet;
use std::sync::Arc;

use jiff::Timestamp;
use russet_crds::active_hours::{InvalidSchedule, active_hours};
use russet_crds::conditions::{self, Reason, Type, is_true};
use russet_crds::{
    ModelDeployment, ModelProvider, ModelRoute, ModelRouteStatus, Pipeline, RouteTarget, Zone,
};

/// A target's name, and what has it.
pub enum FoundTarget<'a> {
    /// A deployment, if there is one.
    Deployment(&'a str, Option<Arc<ModelDeployment>>),
    /// A provider, if there is one.
    Provider(&'a str, Option<Arc<ModelProvider>>),
    /// A Pipeline, if there is one.
    Pipeline(&'a str, Option<Arc<Pipeline>>),
}

impl<'a> FoundTarget<'a> {
    /// What a target of a route names; none where it is of a newer release.
    pub fn of(
        target: &'a RouteTarget,
        deployment: impl Fn(&str) -> Option<Arc<ModelDeployment>>,
        provider: impl Fn(&str) -> Option<Arc<ModelProvider>>,
        pipeline: impl Fn(&str) -> Option<Arc<Pipeline>>,
    ) -> Option<Self> {
        let deployed = target.deployment_name().map(|name| Self::Deployment(name, deployment(name)));
        let provided = || target.provider_name().map(|name| Self::Provider(name, provider(name)));
        let run = || target.pipeline_name().map(|name| Self::Pipeline(name, pipeline(name)));
        deployed.or_else(provided).or_else(run)
    }

    /// Its kind and name, where nothing has that.
    fn missing(&self) -> Option<String> {
        match self {
            Self::Deployment(name, None) => Some(format!("ModelDeployment {name}")),
            Self::Provider(name, None) => Some(format!("ModelProvider {name}")),
            Self::Pipeline(name, None) => Some(format!("Pipeline {name}")),
            Self::Deployment(_, Some(_)) | Self::Provider(_, Some(_)) | Self::Pipeline(_, Some(_)) => None,
        }
    }

    /// Its name, where it answers as far as the operator knows: whether a provider or a Pipeline does, only gateways see.
    fn answers(&self) -> Option<&'a str> {
        match self {
            Self::Deployment(name, found) => {
                let status = found.as_ref().and_then(|deployment| deployment.status.as_ref())?;
                is_true(&status.conditions, Type::Available).then_some(*name)
            }
            Self::Provider(name, found) => found.as_ref().map(|_| *name),
            Self::Pipeline(name, found) => found.as_ref().map(|_| *name),
        }
    }
}

/// The status of a route with these targets.
pub fn status(route: &ModelRoute, targets: &[FoundTarget<'_>], now: Timestamp) -> ModelRouteStatus {
    let generation = route.metadata.generation;
    // Several rules may have one target.
    let missing: BTreeSet<String> = targets.iter().filter_map(FoundTarget::missing).collect();
    let missing: Vec<String> = missing.into_iter().collect();
    let answers: BTreeSet<&str> = targets.iter().filter_map(FoundTarget::answers).collect();
    let answers: Vec<&str> = answers.into_iter().collect();
    let mut conditions = route.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default();
    let mut set = |kind, status, reason, message: &str| {
        conditions::set(&mut conditions, kind, status, reason, message, generation, now);
    };
    let missing_text =
        format!("{} does not exist in this namespace; create it or remove the target", missing.join(", "));
    let invalid = invalid_schedule(route, now).or_else(|| out_of_zone(route, targets));
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

/// What is wrong with a target that no request may ever go to, because it is too far from home.
fn out_of_zone(route: &ModelRoute, targets: &[FoundTarget<'_>]) -> Option<String> {
    let zone_of = |name: &str| {
        targets.iter().find_map(|target| match target {
            FoundTarget::Provider(found, Some(provider)) if *found == name => Some(provider.spec.zone),
            FoundTarget::Provider(..) | FoundTarget::Deployment(..) | FoundTarget::Pipeline(..) => None,
        })
    };
    let outside = |of: &[RouteTarget], limit: Zone| {
        let names = of.iter().filter_map(RouteTarget::provider_name);
        names.filter_map(|name| Some((name.to_owned(), zone_of(name)?))).find(|(_, zone)| *zone > limit)
    };
    let own = route.spec.zone.as_limit();
    let by_route = outside(&route.spec.targets, own).map(|found| (found, "spec.zone".to_owned(), own));
    let by_rule = route.spec.rules.iter().find_map(|rule| {
        let narrowed = rule.zone.map(Zone::as_limit).filter(|zone| *zone < own);
        let field = match narrowed {
            Some(_) => format!("zone of the rule {}", rule.name),
            None => "spec.zone".to_owned(),
        };
        let limit = narrowed.unwrap_or(own);
        outside(&rule.targets, limit).map(|found| (found, field, limit))
    });
    let ((name, zone), field, limit) = by_route.or(by_rule)?;
    Some(format!(
        "ModelProvider {name} is in the zone {zone}, and {field} is {limit}, so no request goes there; set it to {zone}, or \
         remove the target"
    ))
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
    use russet_crds::{
        ModelDeploymentSpec, ModelDeploymentStatus, ModelProviderSpec, ModelRouteSpec, RouteMatch, RouteRule,
        Schedule,
    };

    use super::*;

    fn deployment(name: &'static str, available: bool) -> FoundTarget<'static> {
        let mut deployment = ModelDeployment::new("chat", ModelDeploymentSpec::default());
        let mut status = ModelDeploymentStatus::default();
        let now = Timestamp::UNIX_EPOCH;
        conditions::set(&mut status.conditions, Type::Available, available, Reason::Serving, "", None, now);
        deployment.status = Some(status);
        FoundTarget::Deployment(name, Some(Arc::new(deployment)))
    }

    fn provider(name: &'static str, zone: Zone) -> FoundTarget<'static> {
        let spec = ModelProviderSpec { zone, ..ModelProviderSpec::default() };
        FoundTarget::Provider(name, Some(Arc::new(ModelProvider::new(name, spec))))
    }

    #[test]
    fn a_provider_beyond_the_zone_of_its_route_is_named() {
        let to = |name: &str| vec![RouteTarget::provider(name, "m")];
        let rule = |zone, name: &str| RouteRule {
            name: "code".into(),
            zone,
            targets: to(name),
            ..RouteRule::default()
        };
        for (zone, rules, targets, expected) in [
            (Zone::Cloud, vec![], to("far"), None),
            (Zone::Lan, vec![], to("near"), None),
            (
                Zone::Lan,
                vec![],
                to("far"),
                Some("ModelProvider far is in the zone Cloud, and spec.zone is Lan, so"),
            ),
            (
                Zone::Unknown,
                vec![],
                to("near"),
                Some("ModelProvider near is in the zone Lan, and spec.zone is Local"),
            ),
            (Zone::Cloud, vec![rule(None, "far"), rule(Some(Zone::Cloud), "far")], to("far"), None),
            (
                Zone::Cloud,
                vec![rule(Some(Zone::Local), "near")],
                to("far"),
                Some("ModelProvider near is in the zone Lan, and zone of the rule code is Local, so"),
            ),
            // A rule cannot widen.
            (
                Zone::Lan,
                vec![rule(Some(Zone::Cloud), "far")],
                to("near"),
                Some("ModelProvider far is in the zone Cloud, and spec.zone is Lan, so"),
            ),
        ] {
            let route =
                ModelRoute::new("auto", ModelRouteSpec { zone, rules, targets, ..Default::default() });
            let found = [provider("near", Zone::Lan), provider("far", Zone::Cloud)];
            let status = status(&route, &found, Timestamp::UNIX_EPOCH);
            let condition = conditions::get(&status.conditions, Type::Stalled).unwrap();
            match expected {
                None => assert_eq!(condition.status, "False", "{}", condition.message),
                Some(expected) => assert!(condition.message.starts_with(expected), "{}", condition.message),
            }
        }
    }

    #[test]
    fn a_route_is_ready_when_all_targets_exist_and_one_answers() {
        let route = ModelRoute::new("auto", ModelRouteSpec { zone: Zone::Lan, ..ModelRouteSpec::default() });
        for (targets, ready, reason, stalled) in [
            (vec![deployment("a", true), deployment("b", false)], "True", "Serving", "False"),
            (vec![deployment("a", false)], "False", "InProgress", "False"),
            (
                vec![deployment("a", true), FoundTarget::Deployment("b", None)],
                "False",
                "TargetNotFound",
                "True",
            ),
            (
                vec![deployment("a", true), FoundTarget::Provider("p", None)],
                "False",
                "TargetNotFound",
                "True",
            ),
            (vec![deployment("a", false), provider("p", Zone::Lan)], "True", "Serving", "False"),
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
        let status = status(&route, &[deployment("a", true)], Timestamp::UNIX_EPOCH);
        let condition = conditions::get(&status.conditions, Type::Ready).unwrap();
        assert_eq!((condition.status.as_str(), condition.reason.as_str()), ("False", "InvalidSpec"));
        let expected =
            "the rule far matches no request: match.schedules[1]: timeZone \"Mars/Base\" is no IANA";
        assert!(condition.message.starts_with(expected), "{}", condition.message);
        assert_eq!(conditions::get(&status.conditions, Type::Stalled).unwrap().status, "True");
    }
}
