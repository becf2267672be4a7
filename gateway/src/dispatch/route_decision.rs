//! Routing decision for a model by one routing table: try an endpoint, wait, or reject. Pure; the caller says
//! which of several endpoints is the quickest (`backends`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use russet_crds::{FallbackCause, TargetPick};

use crate::error::{ErrorKind, GatewayError, RETRY_AFTER};
use crate::providers::Closed;
use crate::routes::{
    Deployment, DeploymentState, Endpoint, ModelScope, PipelineTarget, Provider, RequestFacts, Resolved,
    RoutingTable, Target, TargetName, deployments,
};
use crate::zones::ZoneLimit;

/// The next action.
#[derive(Debug, PartialEq)]
pub(super) enum RouteDecision<'a> {
    /// Send the request to this endpoint of this deployment, for this adapter; it is empty where the model itself answers.
    Try(&'a Deployment, &'a Endpoint, &'a str),
    /// Send the request to a provider outside of the cluster.
    Leave(Box<Departure<'a>>),
    /// Run a Pipeline with the request.
    Run(Box<PipelineRoute<'a>>),
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
    /// Whether another request tries it now, after it was left alone: it is asked where nothing else answers.
    pub(super) is_tried: bool,
}

/// The Pipeline that a request starts a run of.
#[derive(Debug, PartialEq)]
pub(super) struct PipelineRoute<'a> {
    pub(super) target: PipelineTarget<'a>,
    /// How far anything of the run may go.
    pub(super) limit: ZoneLimit,
}

/// Where a started response can be resumed.
#[derive(Clone, Debug)]
pub(super) struct ResumePoint {
    /// `namespace/name` of the deployment.
    pub(super) deployment: String,
    /// Name of the Model.
    pub(super) model: Arc<str>,
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
    if *deployment.model != **model {
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
pub(super) struct RouteQuery<'r> {
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
    /// Why a Pipeline is not run.
    pub(super) not_run: &'r dyn Fn(PipelineTarget<'_>) -> Option<Closed>,
}

/// An endpoint, and how long a first token takes there, as far as that is known.
pub(super) type Picked<'a> = (&'a Endpoint, Duration);

/// The decision for the first of several models that can be answered now; else for the first that a provider may answer which
/// another request tries, else for the first that is worth waiting for, else for the first; and that model.
pub(super) fn choose_model<'a, 'm>(
    table: &'a RoutingTable,
    models: impl Iterator<Item = &'m str>,
    query: &RouteQuery<'_>,
    pick: impl Fn(Vec<&'a Endpoint>) -> Option<Picked<'a>>,
) -> (RouteDecision<'a>, &'m str) {
    const ANSWERS: u8 = 3;
    let rank = |decision: &RouteDecision<'_>| match decision {
        RouteDecision::Leave(departure) if departure.is_tried => 2,
        RouteDecision::Try(..) | RouteDecision::Leave(_) | RouteDecision::Run(_) => ANSWERS,
        RouteDecision::Wait(..) => 1,
        RouteDecision::Refuse(_) => 0,
    };
    let mut best: Option<(RouteDecision<'_>, &str)> = None;
    for model in models {
        let decision = choose(table, model, query, &pick);
        let found = rank(&decision);
        if best.as_ref().is_none_or(|(best, _)| found > rank(best)) {
            best = Some((decision, model));
        }
        if found == ANSWERS {
            break;
        }
    }
    best.unwrap_or_else(|| {
        let error = GatewayError::new(ErrorKind::ModelNotFound, "no model is named");
        (RouteDecision::Refuse(error), "")
    })
}

/// Targets that are tried together.
enum Step<'a> {
    Engines(Vec<&'a Deployment>),
    Provider(&'a Provider, &'a str),
    Pipeline(PipelineTarget<'a>),
}

/// The targets in the order in which they are tried.
fn steps<'a>(targets: Vec<Target<'a>>, pick: TargetPick) -> Vec<Step<'a>> {
    let engines = match pick {
        // Of all deployments the fastest replica; nobody knows how fast a provider is.
        TargetPick::Fastest => vec![Step::Engines(deployments(&targets))],
        TargetPick::InOrder | TargetPick::Largest | TargetPick::Cheapest | TargetPick::Unknown => Vec::new(),
    };
    let is_single = engines.is_empty();
    let others = targets.into_iter().filter_map(|target| match target {
        Target::Deployment(deployment) => is_single.then(|| Step::Engines(vec![deployment])),
        Target::Provider(provider, model) => Some(Step::Provider(provider, model)),
        Target::Pipeline(pipeline) => Some(Step::Pipeline(pipeline)),
    });
    engines.into_iter().chain(others).collect()
}

/// The first target that can answer now; otherwise wait or reject by the deployments' state.
pub(super) fn choose<'a>(
    table: &'a RoutingTable,
    model: &str,
    query: &RouteQuery<'_>,
    pick: impl Fn(Vec<&'a Endpoint>) -> Option<Picked<'a>>,
) -> RouteDecision<'a> {
    let resolution = table.resolve_request(model, query.scope, query.facts);
    let (adapter, target_pick, alias) = (resolution.adapter, resolution.pick(), resolution.alias);
    let targets = match resolution.resolved {
        Resolved::Targets(targets) => targets,
        other => return RouteDecision::Refuse(unresolved(table, model, query.scope, &other)),
    };
    let terms = alias.map(|(_, selection)| selection.terms);
    let is_cause = |cause| terms.is_some_and(|terms| terms.fallback_on.contains(&cause));
    let max_wait = terms.and_then(|terms| terms.max_wait).or(query.left);
    let all = deployments(&targets);
    let (mut waiting, mut slow, mut denied, mut closed) = (None, None, None, Vec::new());
    let mut tried = None;
    // Why the engines before a provider do not answer.
    let mut cause = None;
    for step in steps(targets, target_pick) {
        match step {
            Step::Engines(_) if query.cause == Some(FallbackCause::Error) => cause = query.cause,
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
                        cause = Some(query.cause.unwrap_or(FallbackCause::Unavailable));
                    }
                }
            }
            Step::Pipeline(_) if cause.is_some_and(|cause| !is_cause(cause)) => {}
            Step::Pipeline(target) => {
                let limit = alias.map(|(alias, selection)| table.zone_limit(alias, &selection, query.facts));
                let Some(limit) = limit else { continue };
                match (query.not_run)(target) {
                    Some(reason) => {
                        closed.push((
                            reason.kind,
                            format!("{}: {}", target.subject(), reason.why),
                            reason.left,
                        ));
                    }
                    None => return RouteDecision::Run(Box::new(PipelineRoute { target, limit })),
                }
            }
            Step::Provider(provider, provider_model) => {
                if cause.is_some_and(|cause| !is_cause(cause)) {
                    continue;
                }
                let limit = alias.map(|(alias, selection)| table.zone_limit(alias, &selection, query.facts));
                let Some(limit) = limit else { continue };
                if !limit.allows(provider.spec.zone) {
                    denied.get_or_insert_with(|| limit.denied(provider.spec.zone, &provider.subject()));
                    continue;
                }
                let reason = (query.closed)(provider, provider_model);
                let is_tried = reason.as_ref().is_some_and(|reason| reason.is_tried);
                if let Some(reason) = reason.filter(|_| !is_tried) {
                    let (name, why) = (provider.full_name(), reason.message());
                    let why = format!("ModelProvider {name} ({provider_model}): {why}");
                    closed.push((reason.kind, why, reason.left));
                    continue;
                }
                let awaited = waiting.as_ref().map(|(deployment, _)| *deployment);
                let departure =
                    Box::new(Departure { provider, model: provider_model, limit, awaited, is_tried });
                if !is_tried {
                    return RouteDecision::Leave(departure);
                }
                tried.get_or_insert(departure);
            }
        }
    }
    if let Some((deployment, endpoint)) = slow {
        return RouteDecision::Try(deployment, endpoint, adapter);
    }
    if let Some(departure) = tried {
        return RouteDecision::Leave(departure);
    }
    if let Some((deployment, reason)) = waiting {
        return RouteDecision::Wait(deployment, reason);
    }
    RouteDecision::Refuse(match denied {
        Some(denied) => denied,
        None if closed.is_empty() => not_servable(model, &all),
        None => {
            let reasons: Vec<&str> = closed.iter().map(|(_, why, _)| why.as_str()).collect();
            let message = format!("model `{model}` cannot be answered now: {}", reasons.join("; "));
            // What all of them agree on.
            let kind = closed
                .iter()
                .map(|(kind, ..)| *kind)
                .reduce(|one, other| if one == other { one } else { ErrorKind::ProviderFailed });
            let error = GatewayError::new(kind.unwrap_or(ErrorKind::ProviderFailed), message);
            // The first of them that answers again, if they all say when.
            let left: Option<Vec<Duration>> = closed.iter().map(|(.., left)| *left).collect();
            let left = left.and_then(|left| left.into_iter().min()).unwrap_or(RETRY_AFTER);
            match error.kind {
                ErrorKind::BudgetExceeded | ErrorKind::InvalidRequest | ErrorKind::ModelForbidden => error,
                _ => error.retry_after(left),
            }
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
mod tests;
