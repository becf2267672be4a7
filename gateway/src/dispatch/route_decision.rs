//! Routing decision for a model by one routing table: try an endpoint, wait, or reject. Pure; the caller says
//! which of several endpoints is the quickest (`backends`).

use std::collections::BTreeMap;

use russet_crds::TargetPick;

use crate::error::{ErrorKind, GatewayError};
use crate::routes::{
    Deployment, DeploymentState, Endpoint, ModelScope, RequestFacts, Resolution, Resolved, RoutingTable,
};

/// The next action.
#[derive(Debug, PartialEq)]
pub(super) enum RouteDecision<'a> {
    /// Send the request to this endpoint of this deployment, for this adapter; it is empty where the model itself answers.
    Try(&'a Deployment, &'a Endpoint, &'a str),
    /// No endpoint is ready, but this deployment may become ready; the text is the reason.
    Wait(&'a Deployment, String),
    /// Waiting would not help.
    Refuse(GatewayError),
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
    pick: impl Fn(Vec<&'a Endpoint>) -> Option<&'a Endpoint>,
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
    if let Some(endpoint) = pick(same.collect()) {
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

/// The decision for the first of several models that has an endpoint which `pick` accepts; else for the first that is worth
/// waiting for, else for the first.
pub(super) fn choose_model<'a, 'm>(
    table: &'a RoutingTable,
    models: impl Iterator<Item = &'m str>,
    request: (&ModelScope, Option<&RequestFacts>),
    pick: impl Fn(Vec<&'a Endpoint>) -> Option<&'a Endpoint>,
) -> RouteDecision<'a> {
    let mut best = None;
    for model in models {
        match (choose(table, model, request, &pick), &best) {
            (decision @ RouteDecision::Try(..), _) => return decision,
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

/// The first target with an endpoint that `pick` accepts; otherwise wait or reject by the deployments' state.
pub(super) fn choose<'a>(
    table: &'a RoutingTable,
    model: &str,
    (scope, facts): (&ModelScope, Option<&RequestFacts>),
    pick: impl Fn(Vec<&'a Endpoint>) -> Option<&'a Endpoint>,
) -> RouteDecision<'a> {
    let Resolution { resolved, adapter, pick: target_pick, .. } = table.resolve_request(model, scope, facts);
    let deployments = match resolved {
        Resolved::Deployments(deployments) => deployments,
        other => return RouteDecision::Refuse(unresolved(table, model, scope, &other)),
    };
    let endpoints = |deployment: &&'a Deployment| deployment.endpoints_with(adapter);
    let found = match target_pick {
        TargetPick::Fastest => pick(deployments.iter().flat_map(endpoints).collect()).and_then(|endpoint| {
            let mut owners = deployments.iter();
            Some((owners.find(|one| one.endpoints.contains(endpoint))?, endpoint))
        }),
        TargetPick::InOrder | TargetPick::Largest | TargetPick::Unknown => deployments
            .iter()
            .find_map(|deployment| Some((deployment, pick(endpoints(deployment).collect())?))),
    };
    if let Some((deployment, endpoint)) = found {
        return RouteDecision::Try(deployment, endpoint, adapter);
    }
    match deployments.iter().find_map(|deployment| Some((deployment, pending_reason(deployment, adapter)?))) {
        Some((deployment, reason)) => RouteDecision::Wait(deployment, reason),
        None => RouteDecision::Refuse(not_servable(model, &deployments)),
    }
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
        Resolved::Deployments(_) => None,
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
            selection.targets.names.join(", ")
        ),
        Resolved::Ambiguous(names) => {
            format!("model `{model}` exists in several namespaces; request one of: {}", names.join(", "))
        }
        Resolved::Deployments(_) | Resolved::Unknown => {
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

    use super::*;
    use crate::request_defaults::RequestDefaults;
    use crate::routes::{ModelAlias, RoutePolicy};

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
            RouteDecision::Wait(_, message) => format!("wait: {message}"),
            RouteDecision::Refuse(error) => format!("{}: {}", error.kind.as_str(), error.message),
        }
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
            let decision = choose_resume(&table, &resume_point(name), |endpoints| {
                endpoints.into_iter().find(|endpoint| !backed_off.contains(&endpoint.address.as_str()))
            });
            assert_eq!(summary(decision), expected, "{case}");
        }
    }

    fn adapters(list: &[(&str, &str)]) -> BTreeMap<String, String> {
        list.iter().map(|&(name, model)| (name.to_owned(), model.to_owned())).collect()
    }

    #[test]
    fn endpoints_without_the_desired_adapter_are_not_tried() {
        let any = |endpoints: Vec<&'static Endpoint>| endpoints.into_iter().next();
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
                None => choose(table, model, (&ModelScope::ALL, None), any),
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
            let decision = choose(&table, model, (&ModelScope::ALL, None), |endpoints| {
                endpoints.into_iter().find(|endpoint| !backed_off.contains(&endpoint.address.as_str()))
            });
            summary(decision)
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
}
