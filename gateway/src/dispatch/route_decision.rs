//! Routing decision for a model by one routing table: try an endpoint, wait, or reject. Pure; the caller says
//! which of several endpoints is the quickest (`backends`).

use std::collections::BTreeMap;
use std::time::Duration;

use russet_crds::{FallbackCause, TargetPick};

use crate::error::{ErrorKind, GatewayError, RETRY_AFTER};
use crate::providers::Closed;
use crate::routes::{
    Deployment, DeploymentState, Endpoint, ModelScope, Provider, RequestFacts, Resolved, RoutingTable,
    Target, TargetName, deployments,
};
use crate::zones::ZoneLimit;

/// The next action.
#[derive(Debug, PartialEq)]
pub(super) enum RouteDecision<'a> {
    /// Send the request to this endpoint of this deployment, for this adapter; it is empty where the model itself answers.
    Try(&'a Deployment, &'a Endpoint, &'a str),
    /// Send the request to a provider outside of the cluster.
    Leave(Box<Departure<'a>>),
    /// No endpoint is ready, but this deployment may become ready; the text is the reason.
    Wait(&'a Deployment, String),
    /// Waiting would not help.
    Refuse(GatewayError),
}

/// Where a request leaves to.
#[derive(Debug, PartialEq)]
pub(super) struct Departure<'a> {
    pub(super) provider: &'a Provider,
    /// The model, as the provider names it.
    pub(super) model: &'a str,
    /// How far it may go.
    pub(super) limit: ZoneLimit,
    /// The deployment that would have been preferred and may become ready: the request is its demand too.
    pub(super) awaited: Option<&'a Deployment>,
}

/// Where a started response can be resumed.
#[derive(Clone, Debug)]
pub(super) struct ResumePoint {
    /// `namespace/name` of the deployment.
    pub(super) deployment: String,
    /// Name of the Model.
    pub(super) model: String,
    /// Its adapter and the Model of that; both are empty where the model itself answers.
    pub(super) adapter: (String, String),
    /// Tokens of the prompt.
    pub(super) prompt_tokens: u32,
}

/// An endpoint that can resume a started response: one of the same deployment that runs the same Model, even
/// if the deployment was requested under another name or its names have changed since. Another model would continue
/// with a different response.
pub(super) fn choose_resume<'a>(
    table: &'a RoutingTable,
    resume_point: &ResumePoint,
    pick: impl Fn(Vec<&'a Endpoint>) -> Option<Picked<'a>>,
) -> RouteDecision<'a> {
    let ResumePoint { deployment: name, model, adapter: (adapter, adapter_model), prompt_tokens: _ } =
        resume_point;
    let Some(deployment) = table.deployments.iter().find(|one| one.full_name() == *name) else {
        let message = format!("ModelDeployment {name} was deleted");
        return RouteDecision::Refuse(GatewayError::new(ErrorKind::ModelNotReady, message));
    };
    let has_adapter =
        |of: &BTreeMap<String, String>| adapter.is_empty() || of.get(adapter) == Some(adapter_model);
    let same = deployment.endpoints.iter().filter(|endpoint| endpoint.model == *model);
    let same = same.filter(|endpoint| has_adapter(&endpoint.adapters));
    if let Some((endpoint, _)) = pick(same.collect()) {
        let adapter = endpoint.adapters.get_key_value(adapter).map_or("", |(name, _)| name);
        return RouteDecision::Try(deployment, endpoint, adapter);
    }
    if !has_adapter(&deployment.adapters) {
        let message =
            format!("ModelDeployment {name} has no adapter {adapter} of the Model {adapter_model} any more");
        return RouteDecision::Refuse(GatewayError::new(ErrorKind::ModelNotReady, message));
    }
    if deployment.model != *model {
        let new = &deployment.model;
        let message = format!("ModelDeployment {name} changed from the Model {model} to {new}");
        return RouteDecision::Refuse(GatewayError::new(ErrorKind::ModelNotReady, message));
    }
    match pending_reason(deployment, adapter) {
        Some(reason) => RouteDecision::Wait(deployment, reason),
        None => RouteDecision::Refuse(not_servable(name, &[deployment])),
    }
}

/// What of a request decides where it goes.
pub(super) struct Wish<'r> {
    /// The model names that its caller may use.
    pub(super) scope: &'r ModelScope,
    /// What is known of it.
    pub(super) facts: Option<&'r RequestFacts>,
    /// Why engines got it and do not answer it, if so.
    pub(super) cause: Option<FallbackCause>,
    /// The time that it has left.
    pub(super) left: Option<Duration>,
    /// Why a provider is not asked.
    pub(super) closed: &'r dyn Fn(&Provider, &str) -> Option<Closed>,
}

/// An endpoint, and how long a first token takes there, as far as that is known.
pub(super) type Picked<'a> = (&'a Endpoint, Duration);

/// The decision for the first of several models that can be answered now; else for the first that is worth waiting for, else
/// for the first.
pub(super) fn choose_model<'a, 'm>(
    table: &'a RoutingTable,
    models: impl Iterator<Item = &'m str>,
    wish: &Wish<'_>,
    pick: impl Fn(Vec<&'a Endpoint>) -> Option<Picked<'a>>,
) -> RouteDecision<'a> {
    let mut best = None;
    for model in models {
        match (choose(table, model, wish, &pick), &best) {
            (decision @ (RouteDecision::Try(..) | RouteDecision::Leave(..)), _) => return decision,
            (decision, None) | (decision @ RouteDecision::Wait(..), Some(RouteDecision::Refuse(_))) => {
                best = Some(decision);
            }
            (_, Some(_)) => {}
        }
    }
    best.unwrap_or_else(|| {
        RouteDecision::Refuse(GatewayError::new(ErrorKind::ModelNotFound, "no model is named"))
    })
}

/// Targets that are tried together.
enum Step<'a> {
    Engines(Vec<&'a Deployment>),
    Provider(&'a Provider, &'a str),
}

/// The targets in the order in which they are tried.
fn steps<'a>(targets: Vec<Target<'a>>, pick: TargetPick) -> Vec<Step<'a>> {
    let engines = match pick {
        // Of all deployments the fastest replica; nobody knows how fast a provider is.
        TargetPick::Fastest => vec![Step::Engines(deployments(&targets))],
        TargetPick::InOrder | TargetPick::Largest | TargetPick::Unknown => Vec::new(),
    };
    let is_single = engines.is_empty();
    let others = targets.into_iter().filter_map(|target| match target {
        Target::Deployment(deployment) => is_single.then(|| Step::Engines(vec![deployment])),
        Target::Provider(provider, model) => Some(Step::Provider(provider, model)),
    });
    engines.into_iter().chain(others).collect()
}

/// The first target that can answer now; otherwise wait or reject by the deployments' state.
pub(super) fn choose<'a>(
    table: &'a RoutingTable,
    model: &str,
    wish: &Wish<'_>,
    pick: impl Fn(Vec<&'a Endpoint>) -> Option<Picked<'a>>,
) -> RouteDecision<'a> {
    let resolution = table.resolve_request(model, wish.scope, wish.facts);
    let (adapter, target_pick, alias) = (resolution.adapter, resolution.pick(), resolution.alias);
    let targets = match resolution.resolved {
        Resolved::Targets(targets) => targets,
        other => return RouteDecision::Refuse(unresolved(table, model, wish.scope, &other)),
    };
    let policy = alias.map(|(alias, _)| &*alias.policy);
    let is_cause = |cause| policy.is_some_and(|policy| policy.fallback_on.contains(&cause));
    let max_wait = policy.and_then(|policy| policy.max_wait).or(wish.left);
    let all = deployments(&targets);
    let (mut waiting, mut slow, mut denied, mut closed) = (None, None, None, Vec::new());
    let mut all_busy = true;
    // Why the engines before a provider do not answer.
    let mut cause = None;
    for step in steps(targets, target_pick) {
        match step {
            Step::Engines(_) if wish.cause == Some(FallbackCause::Error) => cause = wish.cause,
            Step::Engines(engines) => {
                let endpoints = engines.iter().flat_map(|one| one.endpoints_with(adapter)).collect();
                let found = pick(endpoints).and_then(|(endpoint, wait)| {
                    let mut owners = engines.iter().copied();
                    Some((owners.find(|one| one.endpoints.contains(endpoint))?, endpoint, wait))
                });
                match found {
                    Some((deployment, endpoint, wait)) if max_wait.is_some_and(|most| wait > most) => {
                        slow.get_or_insert((deployment, endpoint));
                        cause = Some(FallbackCause::Deadline);
                    }
                    Some((deployment, endpoint, _)) => {
                        return RouteDecision::Try(deployment, endpoint, adapter);
                    }
                    None => {
                        let pending = |one: &&'a Deployment| Some((*one, pending_reason(one, adapter)?));
                        waiting = waiting.or_else(|| engines.iter().find_map(pending));
                        cause = Some(wish.cause.unwrap_or(FallbackCause::Unavailable));
                    }
                }
            }
            Step::Provider(provider, provider_model) => {
                if cause.is_some_and(|cause| !is_cause(cause)) {
                    continue;
                }
                let limit = alias.map(|(alias, selection)| table.zone_limit(alias, &selection, wish.facts));
                let Some(limit) = limit else { continue };
                if !limit.allows(provider.spec.zone) {
                    denied.get_or_insert_with(|| limit.denied(provider.spec.zone, &provider.full_name()));
                } else if let Some(Closed { why, is_busy }) = (wish.closed)(provider, provider_model) {
                    all_busy &= is_busy;
                    closed.push(format!("ModelProvider {} ({provider_model}): {why}", provider.full_name()));
                } else {
                    let awaited = waiting.as_ref().map(|(deployment, _)| *deployment);
                    return RouteDecision::Leave(Box::new(Departure {
                        provider,
                        model: provider_model,
                        limit,
                        awaited,
                    }));
                }
            }
        }
    }
    if let Some((deployment, endpoint)) = slow {
        return RouteDecision::Try(deployment, endpoint, adapter);
    }
    if let Some((deployment, reason)) = waiting {
        return RouteDecision::Wait(deployment, reason);
    }
    RouteDecision::Refuse(match denied {
        Some(denied) => denied,
        None if closed.is_empty() => not_servable(model, &all),
        None => {
            let message = format!("model `{model}` cannot be answered now: {}", closed.join("; "));
            let kind = if all_busy { ErrorKind::Overloaded } else { ErrorKind::ProviderFailed };
            GatewayError::new(kind, message).retry_after(RETRY_AFTER)
        }
    })
}

/// Why a deployment without endpoints may become ready soon; `None` if it will not.
fn pending_reason(deployment: &Deployment, adapter: &str) -> Option<String> {
    match &deployment.state {
        _ if !deployment.endpoints.is_empty() && deployment.endpoints_with(adapter).next().is_none() => {
            Some(format!("none of its replicas has the adapter {adapter} yet"))
        }
        _ if !deployment.endpoints.is_empty() => Some("its engines do not respond".to_owned()),
        DeploymentState::Ready => Some("its group is being re-formed".to_owned()),
        DeploymentState::Working(message) => Some(message.clone()),
        DeploymentState::Halted(_) => None,
    }
}

/// The error when none of a model's deployments will become ready.
fn not_servable(model: &str, deployments: &[&Deployment]) -> GatewayError {
    let reasons: Vec<String> = deployments
        .iter()
        .filter_map(|deployment| match &deployment.state {
            DeploymentState::Halted(message) => Some(format!("{}: {message}", deployment.full_name())),
            DeploymentState::Ready | DeploymentState::Working(_) => None,
        })
        .collect();
    let message = format!("model `{model}` cannot serve requests: {}", reasons.join("; "));
    GatewayError::new(ErrorKind::ModelNotReady, message)
}

/// The error for names of which none resolves to a deployment for this caller: that of the first.
pub(super) fn all_unknown<'m>(
    table: &RoutingTable,
    models: impl Iterator<Item = &'m str>,
    request: (&ModelScope, Option<&RequestFacts>),
) -> Option<GatewayError> {
    let mut first = None;
    for model in models {
        let error = unknown(table, model, request)?;
        first.get_or_insert(error);
    }
    first
}

/// The error for a name that resolves to no deployment for this caller.
pub(super) fn unknown(
    table: &RoutingTable,
    model: &str,
    (scope, facts): (&ModelScope, Option<&RequestFacts>),
) -> Option<GatewayError> {
    match table.resolve_request(model, scope, facts).resolved {
        Resolved::Targets(_) => None,
        other => Some(unresolved(table, model, scope, &other)),
    }
}

/// Names listed in a message: enough to spot a typing error, few enough to read.
const MAX_LISTED_NAMES: usize = 20;

fn unresolved(
    table: &RoutingTable,
    model: &str,
    scope: &ModelScope,
    resolved: &Resolved<'_>,
) -> GatewayError {
    let message = match resolved {
        Resolved::Forbidden => {
            let allowed = scope.models().join(", ");
            let message = format!("this key does not allow the model `{model}`; it allows: {allowed}");
            return GatewayError {
                param: Some("model".into()),
                ..GatewayError::new(ErrorKind::ModelForbidden, message)
            };
        }
        Resolved::Dangling(alias, selection) => format!(
            "model `{model}` is a name of ModelRoute {}, but none of {} targets exists: {}",
            alias.route,
            selection.rule.map_or("its".to_owned(), |rule| format!("the rule {rule}'s")),
            selection.targets.names.iter().map(TargetName::to_string).collect::<Vec<_>>().join(", ")
        ),
        Resolved::Ambiguous(names) => {
            format!("model `{model}` exists in several namespaces; request one of: {}", names.join(", "))
        }
        Resolved::Targets(_) | Resolved::Unknown => {
            let names: Vec<String> = table.models(scope).into_iter().map(|(id, _)| id).collect();
            let shown =
                names.iter().take(MAX_LISTED_NAMES).map(String::as_str).collect::<Vec<_>>().join(", ");
            match names.len() {
                0 => format!(
                    "model `{model}` does not exist, and neither does any other; apply a ModelDeployment first"
                ),
                count if count > MAX_LISTED_NAMES => {
                    format!("model `{model}` does not exist; there are {count} models, among them: {shown}")
                }
                _ => format!("model `{model}` does not exist; existing models: {shown}"),
            }
        }
    };
    GatewayError { param: Some("model".into()), ..GatewayError::new(ErrorKind::ModelNotFound, message) }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use jiff::Timestamp;
    use russet_crds::{ModelProviderSpec, ModelRoute, ModelRouteSpec, RouteTarget, Zone};

    use super::*;
    use crate::request_defaults::RequestDefaults;
    use crate::routes::{FactsCaller, ModelAlias, RouteHeaders, RoutePolicy};

    fn endpoint(address: &str) -> Endpoint {
        let (node, group, model) = ("a".into(), "default/g".into(), "small".into());
        Endpoint { address: address.into(), node, group, model, adapters: BTreeMap::new(), epoch: 1 }
    }

    fn deployment(name: &str, state: DeploymentState, addresses: &[&str]) -> Deployment {
        Deployment {
            namespace: "default".into(),
            name: name.into(),
            created: 0,
            context_tokens: 1,
            model: "small".into(),
            adapters: BTreeMap::new(),
            defaults: RequestDefaults::default(),
            load_quantization: "",
            memory_bytes: 0,
            idle_limits: None,
            state,
            endpoints: addresses.iter().map(|address| endpoint(address)).collect(),
        }
    }

    fn table() -> RoutingTable {
        let alias = |pattern: &str, names: &[&str]| ModelAlias {
            pattern: pattern.into(),
            route: "default/r".into(),
            namespace: "default".into(),
            policy: Arc::new(RoutePolicy::to(names.iter().copied())),
            hold_timeout: None,
            cache_ttl: None,
        };
        RoutingTable {
            synced: true,
            models: BTreeMap::new(),
            providers: Vec::new(),
            namespace_zones: None,
            deployments: vec![
                deployment("up", DeploymentState::Ready, &["1", "2"]),
                deployment("late", DeploymentState::Working("copying".into()), &["3"]),
                deployment("soon", DeploymentState::Working("copying".into()), &[]),
                deployment("between", DeploymentState::Ready, &[]),
                deployment("stuck", DeploymentState::Halted("needs 9 GiB".into()), &[]),
            ],
            aliases: vec![
                alias("any", &["stuck", "soon", "up"]),
                alias("queued", &["stuck", "soon"]),
                alias("none", &["gone"]),
            ],
        }
    }

    fn summary(decision: RouteDecision<'_>) -> String {
        match decision {
            RouteDecision::Try(_, endpoint, _) => format!("try {}", endpoint.address),
            RouteDecision::Leave(departure) => {
                let awaited = departure.awaited.map_or(String::new(), |one| format!(", awaits {}", one.name));
                format!("leave for {} of {}{awaited}", departure.model, departure.provider.name)
            }
            RouteDecision::Wait(_, message) => format!("wait: {message}"),
            RouteDecision::Refuse(error) => format!("{}: {}", error.kind.as_str(), error.message),
        }
    }

    fn is_open(_: &Provider, _: &str) -> Option<Closed> {
        None
    }

    fn is_shut(_: &Provider, _: &str) -> Option<Closed> {
        Some(Closed::for_good("503"))
    }

    fn plain_wish() -> Wish<'static> {
        static EVERYTHING: ModelScope = ModelScope::ALL;
        Wish { scope: &EVERYTHING, facts: None, cause: None, left: None, closed: &is_open }
    }

    /// Picks the first endpoint that is none of these.
    fn first_but<'t>(backed_off: &[&str]) -> impl Fn(Vec<&'t Endpoint>) -> Option<Picked<'t>> {
        let is_free = |endpoint: &&Endpoint| !backed_off.contains(&endpoint.address.as_str());
        move |endpoints| Some((endpoints.into_iter().find(is_free)?, Duration::ZERO))
    }

    #[test]
    fn resume_needs_the_same_model_of_the_same_deployment() {
        let resume_point = |name: &str| ResumePoint {
            adapter: Default::default(),
            deployment: format!("default/{name}"),
            model: "small".into(),
            prompt_tokens: 7,
        };
        // A deployment in a rollout to another model: its first replica already runs the new one.
        let rolling = |endpoints: &[&str]| {
            let mut one = deployment("rolling", DeploymentState::Ready, endpoints);
            one.model = "large".into();
            one.endpoints[0].model = "large".into();
            one
        };
        let with = |one: Deployment| RoutingTable { deployments: vec![one], ..table() };
        for (case, table, name, backed_off, expected) in [
            ("another replica", table(), "up", vec!["1"], "try 2"),
            ("the only one", table(), "up", vec!["1", "2"], "wait: its engines do not respond"),
            ("between two epochs", table(), "between", vec![], "wait: its group is being re-formed"),
            ("it is being set up", table(), "soon", vec![], "wait: copying"),
            (
                "it cannot become ready",
                table(),
                "stuck",
                vec![],
                "model_not_ready: model `default/stuck` cannot serve requests: default/stuck: needs 9 GiB",
            ),
            (
                "deleted, and another deployment has its name",
                table(),
                "any",
                vec![],
                "model_not_ready: ModelDeployment default/any was deleted",
            ),
            ("an old replica still runs", with(rolling(&["1", "2"])), "rolling", vec![], "try 2"),
            (
                "no old replica runs",
                with(rolling(&["1"])),
                "rolling",
                vec![],
                "model_not_ready: ModelDeployment default/rolling changed from the Model small to large",
            ),
        ] {
            let decision = choose_resume(&table, &resume_point(name), first_but(&backed_off));
            assert_eq!(summary(decision), expected, "{case}");
        }
    }

    fn adapters(list: &[(&str, &str)]) -> BTreeMap<String, String> {
        list.iter().map(|&(name, model)| (name.to_owned(), model.to_owned())).collect()
    }

    #[test]
    fn endpoints_without_the_desired_adapter_are_not_tried() {
        let any = |endpoints: Vec<&'static Endpoint>| Some((endpoints.into_iter().next()?, Duration::ZERO));
        let choose_of = |wanted: &[(&str, &str)], has: &[(&str, &str)], model: &str, resume: Option<&str>| {
            let mut one = deployment("chat", DeploymentState::Ready, &["1", "2"]);
            one.adapters = adapters(wanted);
            one.endpoints[1].adapters = adapters(has);
            let table: &'static RoutingTable = Box::leak(Box::new(RoutingTable {
                synced: true,
                deployments: vec![one],
                ..RoutingTable::default()
            }));
            match resume {
                None => choose(table, model, &plain_wish(), any),
                Some(adapter_model) => {
                    let point = ResumePoint {
                        deployment: "default/chat".into(),
                        model: "small".into(),
                        adapter: ("pirate".into(), adapter_model.into()),
                        prompt_tokens: 7,
                    };
                    choose_resume(table, &point, any)
                }
            }
        };
        let (pirate, other) = ([("pirate", "p1")], [("pirate", "p2")]);
        assert_eq!(summary(choose_of(&pirate, &pirate, "chat", None)), "try 1");
        let RouteDecision::Try(_, endpoint, adapter) = choose_of(&pirate, &pirate, "chat:pirate", None)
        else {
            panic!("no endpoint");
        };
        assert_eq!((endpoint.address.as_str(), adapter), ("2", "pirate"));
        let waits = "wait: none of its replicas has the adapter pirate yet";
        assert_eq!(summary(choose_of(&pirate, &other, "chat:pirate", None)), waits);
        let unknown = summary(choose_of(&[], &pirate, "chat:pirate", None));
        assert!(unknown.starts_with("model_not_found: model `chat:pirate` does not exist"), "{unknown}");
        assert_eq!(summary(choose_of(&other, &pirate, "", Some("p1"))), "try 2", "it goes on as it began");
        let gone =
            "model_not_ready: ModelDeployment default/chat has no adapter pirate of the Model p1 any more";
        assert_eq!(summary(choose_of(&other, &other, "", Some("p1"))), gone);
        assert_eq!(summary(choose_of(&pirate, &other, "", Some("p1"))), waits);
    }

    #[test]
    fn first_ready_target_is_chosen_else_a_pending_one_awaited() {
        let table = table();
        let decision = |model: &str, backed_off: &[&str]| {
            summary(choose(&table, model, &plain_wish(), first_but(backed_off)))
        };
        for (model, backed_off, expected) in [
            ("up", vec![], "try 1"),
            ("up", vec!["1"], "try 2"),
            ("up", vec!["1", "2"], "wait: its engines do not respond"),
            ("late", vec![], "try 3"),
            ("soon", vec![], "wait: copying"),
            ("between", vec![], "wait: its group is being re-formed"),
            (
                "stuck",
                vec![],
                "model_not_ready: model `stuck` cannot serve requests: default/stuck: needs 9 GiB",
            ),
            ("any", vec![], "try 1"),
            ("any", vec!["1", "2"], "wait: copying"),
            ("queued", vec![], "wait: copying"),
            (
                "none",
                vec![],
                "model_not_found: model `none` is a name of ModelRoute default/r, but none of its targets exists: gone",
            ),
            (
                "nix",
                vec![],
                "model_not_found: model `nix` does not exist; existing models: up, late, soon, between, stuck, any, queued",
            ),
        ] {
            assert_eq!(decision(model, &backed_off), expected, "{model} {backed_off:?}");
        }
        let empty = RoutingTable { synced: true, ..RoutingTable::default() };
        let error = unknown(&empty, "nix", (&ModelScope::ALL, None)).unwrap();
        assert!(error.message.contains("neither does any other"), "{error}");
        assert_eq!(error.param.as_deref(), Some("model"));
    }

    fn facts(zone: Option<&str>) -> RequestFacts {
        let labels = zone.map(|zone| format!("russet.dev/zone={zone}")).unwrap_or_default();
        let headers = RouteHeaders::parse("", &labels).unwrap();
        RequestFacts::of_prompt("Hi", &[], &headers, FactsCaller::default(), Timestamp::UNIX_EPOCH)
    }

    /// A table with a route `m` to these targets: names of deployments, or of providers with a zone.
    fn outside(targets: &[&str], change: impl Fn(&mut ModelRouteSpec)) -> RoutingTable {
        let target = |name: &&str| match zone_of(name) {
            Some(_) => RouteTarget::provider(*name, "big"),
            None => RouteTarget::deployment(*name),
        };
        let mut spec = ModelRouteSpec {
            models: vec!["m".into()],
            targets: targets.iter().map(target).collect(),
            zone: Zone::Cloud,
            ..ModelRouteSpec::default()
        };
        change(&mut spec);
        let mut route = ModelRoute::new("r", spec);
        route.metadata.namespace = Some("default".into());
        let providers = ["near", "far"].map(|name| Provider {
            namespace: "default".into(),
            name: name.into(),
            spec: ModelProviderSpec { zone: zone_of(name).unwrap(), ..ModelProviderSpec::default() },
        });
        RoutingTable {
            aliases: RoutingTable::from_objects([], [], [&route]).aliases,
            providers: providers.to_vec(),
            namespace_zones: Some(BTreeMap::new()),
            ..table()
        }
    }

    fn zone_of(name: &str) -> Option<Zone> {
        match name {
            "near" => Some(Zone::Lan),
            "far" => Some(Zone::Cloud),
            _ => None,
        }
    }

    fn decided(table: &RoutingTable, facts: Option<&RequestFacts>, change: impl Fn(&mut Wish<'_>)) -> String {
        let mut wish = Wish { facts, ..plain_wish() };
        change(&mut wish);
        let wait = Duration::from_secs(30);
        let decision = choose(table, "m", &wish, |endpoints| Some((endpoints.into_iter().next()?, wait)));
        summary(decision)
    }

    #[test]
    fn a_provider_is_asked_where_no_deployment_before_it_answers() {
        let any = |_: &mut ModelRouteSpec| {};
        let open = facts(None);
        for (targets, expected) in [
            (&["up", "far"][..], "try 1"),
            (&["soon", "far"], "leave for big of far, awaits soon"),
            (&["stuck", "near", "far"], "leave for big of near"),
            (&["far", "up"], "leave for big of far"),
            (&["soon", "far", "up"], "leave for big of far, awaits soon"),
        ] {
            assert_eq!(decided(&outside(targets, any), Some(&open), |_| {}), expected, "{targets:?}");
        }
        // Only for a cause that the route names.
        let patient = |spec: &mut ModelRouteSpec| spec.fallback_on = vec![FallbackCause::Overloaded];
        let table = outside(&["soon", "far"], patient);
        assert_eq!(decided(&table, Some(&open), |_| {}), "wait: copying");
        let full = |wish: &mut Wish<'_>| wish.cause = Some(FallbackCause::Overloaded);
        assert_eq!(decided(&table, Some(&open), full), "leave for big of far, awaits soon");
        // One that is left alone is passed over.
        let shut = outside(&["far"], any);
        let refused = decided(&shut, Some(&open), |wish| wish.closed = &is_shut);
        assert_eq!(
            refused,
            "provider_failed: model `m` cannot be answered now: ModelProvider default/far (big): 503"
        );
        assert_eq!(
            decided(&outside(&["soon", "far"], any), Some(&open), |wish| wish.closed = &is_shut),
            "wait: copying"
        );
    }

    #[test]
    fn a_wait_that_is_too_long_bursts() {
        let within = |seconds| move |spec: &mut ModelRouteSpec| spec.max_wait_seconds = Some(seconds);
        let open = facts(None);
        let decide = |table: &RoutingTable| decided(table, Some(&open), |_| {});
        assert_eq!(decide(&outside(&["up", "far"], within(30))), "try 1", "30 s are expected");
        assert_eq!(decide(&outside(&["up", "far"], within(29))), "leave for big of far");
        // Without anybody to burst to it waits where it would have.
        assert_eq!(decide(&outside(&["up"], within(29))), "try 1");
        let home = facts(Some("Local"));
        assert_eq!(decided(&outside(&["up", "far"], within(29)), Some(&home), |_| {}), "try 1");
        // The time that a request has counts where the route says nothing.
        let hurried = |wish: &mut Wish<'_>| wish.left = Some(Duration::from_secs(10));
        assert_eq!(decided(&outside(&["up", "far"], |_| {}), Some(&open), hurried), "leave for big of far");
    }

    #[test]
    fn no_target_of_a_route_leads_beyond_any_of_its_limits() {
        let zones = [None, Some("Local"), Some("Lan"), Some("Cloud"), Some("Mars")];
        let permitted = |name: Option<&str>| name.map_or(Zone::Cloud, Zone::of_label);
        let mut left = 0;
        for route in [Zone::Local, Zone::Lan, Zone::Cloud] {
            for (label, namespace) in
                zones.iter().flat_map(|label| zones.iter().map(move |other| (*label, *other)))
            {
                for targets in [&["near", "far"][..], &["far", "near"], &["soon", "far"], &["stuck", "near"]]
                {
                    let mut table = outside(targets, |spec| spec.zone = route);
                    let label_of = |zone: &str| BTreeMap::from([("default".to_owned(), zone.to_owned())]);
                    table.namespace_zones = Some(namespace.map(label_of).unwrap_or_default());
                    let limit = route.min(permitted(label)).min(permitted(namespace));
                    let decision = decided(&table, Some(&facts(label)), |_| {});
                    let reached =
                        ["near", "far"].into_iter().find(|name| decision.contains(&format!("of {name}")));
                    let case = format!("{route} {label:?} {namespace:?} {targets:?}: {decision}");
                    if let Some(reached) = reached.filter(|_| decision.starts_with("leave")) {
                        left += 1;
                        assert!(zone_of(reached).unwrap() <= limit, "{case}");
                    } else {
                        let denied = decision.starts_with("zone_denied");
                        assert!(denied || decision == "wait: copying", "{case}");
                        assert!(
                            targets.iter().filter_map(|name| zone_of(name)).all(|zone| zone > limit),
                            "{case}"
                        );
                    }
                    // Of a request of which nothing is known, and before the namespaces are, nothing leaves.
                    assert!(!decided(&table, None, |_| {}).starts_with("leave"), "{case}");
                    table.namespace_zones = None;
                    assert!(!decided(&table, Some(&facts(label)), |_| {}).starts_with("leave"), "{case}");
                }
            }
        }
        assert!(left > 50, "{left}");
    }
}
