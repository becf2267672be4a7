//! Decisions by tables that are written out.

use std::sync::Arc;

use jiff::Timestamp;
use russet_crds::{LocalReference, ModelProviderSpec, ModelRoute, ModelRouteSpec, RouteTarget, Zone};

use super::*;
use crate::routes::fixtures::{self, endpoint};
use crate::routes::{Aliases, FactsCaller, ModelAlias, RouteHeaders, RoutePolicy};

fn deployment(name: &str, state: DeploymentState, addresses: &[&str]) -> Deployment {
    let endpoints = addresses.iter().map(|address| endpoint(address)).collect();
    Deployment { state, endpoints, ..fixtures::deployment("default", name) }
}

fn table() -> RoutingTable {
    let alias = |pattern: &str, names: &[&str]| ModelAlias {
        pattern: pattern.into(),
        route: "default/r".into(),
        namespace: "default".into(),
        policy: Arc::new(RoutePolicy::to(names.iter().copied())),
        cache_ttl: None,
    };
    RoutingTable {
        synced: true,
        models: BTreeMap::new(),
        providers: Vec::new(),
        namespace_zones: None,
        group_energy: BTreeMap::new(),
        deployments: vec![
            deployment("up", DeploymentState::Ready, &["1", "2"]),
            deployment("late", DeploymentState::Working("copying".into()), &["3"]),
            deployment("soon", DeploymentState::Working("copying".into()), &[]),
            deployment("between", DeploymentState::Ready, &[]),
            deployment("stuck", DeploymentState::Halted("needs 9 GiB".into()), &[]),
        ],
        aliases: Aliases::from(vec![
            alias("any", &["stuck", "soon", "up"]),
            alias("queued", &["stuck", "soon"]),
            alias("none", &["gone"]),
        ]),
    }
}

fn summary(decision: RouteDecision<'_>) -> String {
    match decision {
        RouteDecision::Try(_, endpoint, _) => format!("try {}", endpoint.address),
        RouteDecision::Leave(departure) => {
            let awaited = departure.awaited.map_or(String::new(), |one| format!(", awaits {}", one.name));
            format!("leave for {} of {}{awaited}", departure.model, departure.provider.name)
        }
        RouteDecision::Run(route) => format!("run {} within {}", route.target.name, route.limit.zone()),
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

fn may_run(_: PipelineTarget<'_>) -> Option<Closed> {
    None
}

fn may_not_run(_: PipelineTarget<'_>) -> Option<Closed> {
    Some(Closed::of("it is asked for text alone", ErrorKind::InvalidRequest))
}

fn plain_query() -> RouteQuery<'static> {
    static EVERYTHING: ModelScope = ModelScope::ALL;
    RouteQuery {
        scope: &EVERYTHING,
        facts: None,
        cause: None,
        left: None,
        closed: &is_open,
        not_run: &may_run,
    }
}

/// Picks the first endpoint that is none of these.
fn first_but<'t>(backed_off: &[&str]) -> impl Fn(Vec<&'t Endpoint>) -> Option<Picked<'t>> {
    let is_free = |endpoint: &&Endpoint| !backed_off.contains(&&*endpoint.address);
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
            None => choose(table, model, &plain_query(), any),
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
    let RouteDecision::Try(_, endpoint, adapter) = choose_of(&pirate, &pirate, "chat:pirate", None) else {
        panic!("no endpoint");
    };
    assert_eq!((&*endpoint.address, adapter), ("2", "pirate"));
    let waits = "wait: none of its replicas has the adapter pirate yet";
    assert_eq!(summary(choose_of(&pirate, &other, "chat:pirate", None)), waits);
    let unknown = summary(choose_of(&[], &pirate, "chat:pirate", None));
    assert!(unknown.starts_with("model_not_found: model `chat:pirate` does not exist"), "{unknown}");
    assert_eq!(summary(choose_of(&other, &pirate, "", Some("p1"))), "try 2", "it goes on as it began");
    let gone = "model_not_ready: ModelDeployment default/chat has no adapter pirate of the Model p1 any more";
    assert_eq!(summary(choose_of(&other, &other, "", Some("p1"))), gone);
    assert_eq!(summary(choose_of(&pirate, &other, "", Some("p1"))), waits);
}

#[test]
fn first_ready_target_is_chosen_else_a_pending_one_awaited() {
    let table = table();
    let decision = |model: &str, backed_off: &[&str]| {
        summary(choose(&table, model, &plain_query(), first_but(backed_off)))
    };
    for (model, backed_off, expected) in [
        ("up", vec![], "try 1"),
        ("up", vec!["1"], "try 2"),
        ("up", vec!["1", "2"], "wait: its engines do not respond"),
        ("late", vec![], "try 3"),
        ("soon", vec![], "wait: copying"),
        ("between", vec![], "wait: its group is being re-formed"),
        ("stuck", vec![], "model_not_ready: model `stuck` cannot serve requests: default/stuck: needs 9 GiB"),
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

/// A table with a route `m` to these targets: names of deployments, of providers with a zone, or of the Pipeline `brief`.
fn outside(targets: &[&str], change: impl Fn(&mut ModelRouteSpec)) -> RoutingTable {
    let target = |name: &&str| match (*name, zone_of(name)) {
        ("brief", _) => {
            RouteTarget { pipeline_ref: Some(LocalReference::new(*name)), ..RouteTarget::default() }
        }
        (_, Some(_)) => RouteTarget::provider(*name, "big"),
        (_, None) => RouteTarget::deployment(*name),
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
        ..Provider::default()
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

fn decided(
    table: &RoutingTable,
    facts: Option<&RequestFacts>,
    change: impl Fn(&mut RouteQuery<'_>),
) -> String {
    let mut query = RouteQuery { facts, ..plain_query() };
    change(&mut query);
    let wait = Duration::from_secs(30);
    let decision = choose(table, "m", &query, |endpoints| Some((endpoints.into_iter().next()?, wait)));
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
    let full = |query: &mut RouteQuery<'_>| query.cause = Some(FallbackCause::Overloaded);
    assert_eq!(decided(&table, Some(&open), full), "leave for big of far, awaits soon");
    // One that is left alone is passed over.
    let shut = outside(&["far"], any);
    let refused = decided(&shut, Some(&open), |query| query.closed = &is_shut);
    assert_eq!(
        refused,
        "provider_failed: model `m` cannot be answered now: ModelProvider default/far (big): 503"
    );
    assert_eq!(
        decided(&outside(&["soon", "far"], any), Some(&open), |query| query.closed = &is_shut),
        "wait: copying"
    );
}

#[test]
fn a_pipeline_runs_where_its_turn_comes() {
    let any = |_: &mut ModelRouteSpec| {};
    let open = facts(None);
    for (targets, expected, without) in [
        (
            &["brief"][..],
            "run brief within Cloud",
            "invalid_request: model `m` cannot be answered now: Pipeline default/brief: it is asked for text alone",
        ),
        (&["brief", "up"], "run brief within Cloud", "try 1"),
        (&["up", "brief"], "try 1", "try 1"),
        (&["soon", "brief"], "run brief within Cloud", "wait: copying"),
        (&["brief", "far"], "run brief within Cloud", "leave for big of far"),
    ] {
        let table = outside(targets, any);
        assert_eq!(decided(&table, Some(&open), |_| {}), expected, "{targets:?}");
        let decision = decided(&table, Some(&open), |query| query.not_run = &may_not_run);
        assert_eq!(decision, without, "{targets:?}");
    }
    // What it does goes no farther than the request may.
    for zone in ["Local", "Lan"] {
        let decision = decided(&outside(&["brief"], any), Some(&facts(Some(zone))), |_| {});
        assert_eq!(decision, format!("run brief within {zone}"));
    }
    let patient = |spec: &mut ModelRouteSpec| spec.fallback_on = vec![FallbackCause::Overloaded];
    assert_eq!(decided(&outside(&["soon", "brief"], patient), Some(&open), |_| {}), "wait: copying");
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
    let hurried = |query: &mut RouteQuery<'_>| query.left = Some(Duration::from_secs(10));
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
            for targets in [&["near", "far"][..], &["far", "near"], &["soon", "far"], &["stuck", "near"]] {
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
