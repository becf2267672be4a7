//! `russet explain route`: where a request to a model would go. It reads the objects and decides as a gateway does; no
//! request is sent. Not here: which replica of a deployment is the quickest, which only gateways know (`russet why`).

use std::fmt::Write as _;

use anyhow::{Context, Result, bail};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Namespace;
use kube::ResourceExt;
use russet_crds::{
    AccessKey, Model, ModelDeployment, ModelProvider, ModelRoute, PauseReason, ProviderPause, ShardGroup,
    TargetPick,
};
use russet_gateway::routes::{
    Deployment, DeploymentState, FactsCaller, ModelScope, Provider, RequestFacts, Resolved, RouteHeaders,
    RoutingTable, Target, task_name,
};
use russet_gateway::zones::ZoneLimit;
use russet_rpc::list_item::list_decodable;

use crate::client::Connection;
use crate::get::format_table;
use crate::stdout::out;
use crate::why::text::shown_parts;

/// Arguments of `russet explain route`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Name of the model as a client sends it.
    model: String,
    /// What the client's user says.
    #[arg(long, default_value = "")]
    prompt: String,
    /// The header x-russet-task: chat, code, reasoning or embed.
    #[arg(long, default_value = "")]
    task: String,
    /// A label of the header x-russet-labels; several times for several.
    #[arg(long = "label", value_name = "NAME=VALUE")]
    labels: Vec<String>,
    /// Name of a tool that the request offers; several times for several.
    #[arg(long = "tool", value_name = "NAME")]
    tools: Vec<String>,
    /// Name of the AccessKey of the request.
    #[arg(long, value_name = "NAME")]
    key: Option<String>,
    /// When the request arrives, such as 2026-11-29T18:00:00Z; default now.
    #[arg(long, value_name = "TIME")]
    at: Option<Timestamp>,
    #[command(flatten)]
    connection: Connection,
}

/// Prints where the request would go.
pub async fn run(arguments: Arguments) -> Result<()> {
    let Arguments { model, prompt, task, labels, tools, key, at, connection } = arguments;
    let client = connection.client().await?;
    let unlisted = |plural: &str| format!("the {plural} could not be listed");
    let routes: Vec<ModelRoute> = list_decodable(&client).await.with_context(|| unlisted("modelroutes"))?;
    let deployments: Vec<ModelDeployment> =
        list_decodable(&client).await.with_context(|| unlisted("modeldeployments"))?;
    let groups: Vec<ShardGroup> = list_decodable(&client).await.with_context(|| unlisted("shardgroups"))?;
    let models: Vec<Model> = list_decodable(&client).await.with_context(|| unlisted("models"))?;
    let providers: Vec<ModelProvider> =
        list_decodable(&client).await.with_context(|| unlisted("modelproviders"))?;
    let namespaces: Vec<Namespace> = list_decodable(&client).await.with_context(|| unlisted("namespaces"))?;
    let table = RoutingTable::from_objects(&deployments, &groups, &routes)
        .with_models(&models)
        .with_providers(&providers)
        .with_namespaces(&namespaces);
    let key = match key {
        None => None,
        Some(name) => {
            let keys: Vec<AccessKey> =
                list_decodable(&client).await.with_context(|| unlisted("accesskeys"))?;
            let namespace = connection.namespace();
            let is_named =
                |key: &AccessKey| key.name_any() == name && key.namespace().as_deref() == Some(&namespace);
            let found = keys.into_iter().find(is_named);
            Some(found.with_context(|| format!("there is no AccessKey {name} in namespace {namespace}"))?)
        }
    };
    let scope = key.as_ref().map_or(ModelScope::ALL, |key| {
        ModelScope::new(&key.namespace().unwrap_or_default(), &key.spec.models)
    });
    let headers = match RouteHeaders::parse(&task, &labels.join(",")) {
        Ok(headers) => headers.or_task(table.named_task(&model, &scope)),
        Err(error) => bail!("{}", error.message),
    };
    let name = key.as_ref().map(ResourceExt::name_any);
    let key_namespace = key.as_ref().and_then(ResourceExt::namespace);
    let caller = FactsCaller {
        key: name.as_deref(),
        namespace: key_namespace.as_deref(),
        labels: key.as_ref().map(ResourceExt::labels),
    };
    let at = at.unwrap_or_else(Timestamp::now);
    let facts = RequestFacts::of_prompt(&prompt, &tools, &headers, caller, at);
    out!("{}", explain(&table, &model, &scope, &facts, at)?)?;
    Ok(())
}

/// Where the request goes, as text.
fn explain(
    table: &RoutingTable,
    model: &str,
    scope: &ModelScope,
    facts: &RequestFacts,
    at: Timestamp,
) -> Result<String> {
    let mut text = String::new();
    let alias = table.matching_alias(model, scope);
    let route = alias.map_or("no name of a ModelRoute".to_owned(), |alias| {
        format!("`{}` of ModelRoute {}", alias.pattern, alias.route)
    });
    let _ = writeln!(text, "Model        {model}: {route}");
    let _ = writeln!(text, "Task         {}", task_name(facts.task));
    let parts = shown_parts(facts.complexity.parts());
    let parts = if parts.is_empty() { parts } else { format!(": {parts}") };
    let _ = writeln!(text, "Complexity   {} %{parts}", facts.complexity.percent());
    let _ =
        writeln!(text, "Request      about {} tokens of prompt, tools: {}", facts.prompt_tokens, facts.tools);
    if !facts.labels.is_empty() {
        let labels: Vec<String> =
            facts.labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let _ = writeln!(text, "Labels       {}", labels.join(","));
    }
    if let Some(alias) = alias.filter(|alias| alias.policy.has_rules()) {
        let mut rows = vec![["RULE", "MATCHES", "WHY NOT"].map(str::to_owned).to_vec()];
        let verdicts = alias.policy.verdicts(facts);
        let matched = verdicts.iter().any(|verdict| verdict.mismatch.is_none());
        for verdict in verdicts {
            let (matches, why) = verdict.mismatch.map_or(("yes", String::new()), |why| ("no", why));
            rows.push(vec![verdict.rule.to_owned(), matches.to_owned(), why]);
        }
        if !matched {
            rows.push(["-", "yes", "no rule matches: spec.targets"].map(str::to_owned).to_vec());
        }
        let _ = write!(text, "\n{}", format_table(&rows));
    }
    let resolution = table.resolve_request(model, scope, Some(facts));
    let pick = resolution.pick();
    let targets = match resolution.resolved {
        Resolved::Targets(targets) => targets,
        Resolved::Dangling(_, selection) => {
            let names: Vec<String> = selection.targets.names.iter().map(ToString::to_string).collect();
            bail!("{text}\nnone of the targets exists: {}", names.join(", "))
        }
        Resolved::Ambiguous(names) => bail!("several namespaces have the name: {}", names.join(", ")),
        Resolved::Forbidden => bail!("the key does not allow the model {model}"),
        Resolved::Unknown => bail!("there is no model {model}"),
    };
    let mut rows = vec![["TARGET", "REPLICAS", "STATE"].map(str::to_owned).to_vec()];
    let limit = resolution.alias.map(|(alias, selection)| table.zone_limit(alias, &selection, Some(facts)));
    for target in &targets {
        let (replicas, state) = match target {
            Target::Deployment(deployment) => (deployment.endpoints.len().to_string(), state(deployment)),
            Target::Pipeline(_) => {
                ("-".to_owned(), "a run of it answers, no farther than the zone".to_owned())
            }
            Target::Provider(provider, model) => {
                ("-".to_owned(), permission((provider, model), limit.as_ref(), at))
            }
        };
        rows.push(vec![target.full_name(), replicas, state]);
    }
    let leaves = targets.iter().any(|target| target.deployment().is_none());
    if let Some(limit) = limit.filter(|_| leaves) {
        let _ = writeln!(text, "\nZone {}, as {} says.", limit.zone(), limit.by());
    }
    let order = match pick {
        TargetPick::Fastest => {
            "The one that is expected to answer first gets the request, of those that are ready."
        }
        TargetPick::Largest => {
            "The one with the most parameters is first; the next one where it cannot answer."
        }
        TargetPick::Cheapest => {
            "The one that costs least is first, which a deployment does; the next one where it cannot answer."
        }
        TargetPick::InOrder | TargetPick::Unknown => "The first that can answer gets the request.",
    };
    let _ = write!(text, "\n{}\n{order}\n", format_table(&rows));
    Ok(text)
}

/// Whether a request may go to a model of a provider, and whether that is left alone at this time.
fn permission((provider, model): (&Provider, &str), limit: Option<&ZoneLimit>, at: Timestamp) -> String {
    let zone = provider.spec.zone;
    if !limit.is_some_and(|limit| limit.allows(zone)) {
        return format!("zone {zone}, not allowed");
    }
    let rest = match provider.pause(model, at) {
        None => "where no deployment before it answers".to_owned(),
        Some(ProviderPause { reason: PauseReason::NoCredits, until, .. }) => {
            format!("it has no credits, and a gateway leaves it alone until {:.0}", until.0)
        }
        Some(ProviderPause { until, .. }) => {
            format!("nothing of its rate limit remains, and a gateway leaves it alone until {:.0}", until.0)
        }
    };
    format!("zone {zone}, allowed; {rest}")
}

fn state(deployment: &Deployment) -> String {
    match &deployment.state {
        DeploymentState::Ready => "ready".to_owned(),
        DeploymentState::Working(why) => format!("not ready: {why}"),
        DeploymentState::Halted(why) => format!("stopped: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use russet_crds::{
        ModelDeploymentSpec, ModelProviderSpec, ModelProviderStatus, ModelRouteSpec, PauseScope, RouteMatch,
        RouteRule, RouteTarget, RouteTask, Zone,
    };

    use super::*;

    #[test]
    fn an_explanation_says_until_when_a_provider_is_left_alone() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let shown = |pauses: &[(PauseScope, PauseReason)], model: &str, second: i64| {
            let pause = |(scope, reason): &(PauseScope, PauseReason)| ProviderPause {
                scope: *scope,
                model: None,
                reason: *reason,
                until: Time(at(60)),
            };
            let pauses = pauses.iter().map(pause).collect();
            let spec = ModelProviderSpec { zone: Zone::Lan, ..ModelProviderSpec::default() };
            let mut provider = ModelProvider::new("p", spec);
            provider.metadata.namespace = Some("default".into());
            provider.status = Some(ModelProviderStatus { pauses, ..ModelProviderStatus::default() });
            let target = serde_json::json!({"providerRef": {"name": "p"}, "model": model});
            let spec = serde_json::json!({"models": ["auto"], "zone": "Lan", "targets": [target]});
            let mut route = ModelRoute::new("auto", serde_json::from_value(spec).unwrap());
            route.metadata.namespace = Some("default".into());
            let namespace = Namespace {
                metadata: kube::core::ObjectMeta { name: Some("default".into()), ..Default::default() },
                ..Namespace::default()
            };
            let table = RoutingTable::from_objects(&[], &[], &[route])
                .with_providers(&[provider])
                .with_namespaces(&[namespace]);
            let (headers, caller) = (RouteHeaders::default(), FactsCaller::default());
            let facts = RequestFacts::of_prompt("Hi", &[], &headers, caller, at(second));
            explain(&table, "auto", &ModelScope::ALL, &facts, at(second)).unwrap()
        };
        let limited = (PauseScope::Free, PauseReason::RateLimited);
        let unpaid = (PauseScope::Paid, PauseReason::NoCredits);
        for (pauses, model, second, expected) in [
            (
                &[limited, unpaid][..],
                "m:free",
                59,
                "nothing of its rate limit remains, and a gateway leaves it alone until 1970-01-01T00:01:00Z",
            ),
            (
                &[limited, unpaid],
                "m",
                59,
                "it has no credits, and a gateway leaves it alone until 1970-01-01T00:01:00Z",
            ),
            (&[limited], "m", 59, "where no deployment before it answers"),
            (&[limited], "m:free", 60, "where no deployment before it answers"),
        ] {
            let text = shown(pauses, model, second);
            assert!(text.contains("zone Lan, allowed; ") && text.contains(expected), "{model}: {text}");
        }
    }

    #[test]
    fn an_explanation_shows_rules_and_targets() {
        let deployment = |name: &str| {
            let mut object =
                ModelDeployment::new(name, ModelDeploymentSpec { replicas: 1, ..Default::default() });
            object.metadata.namespace = Some("default".into());
            object
        };
        let target = |name: &str| RouteTarget::deployment(name);
        let mut route = ModelRoute::new(
            "auto",
            ModelRouteSpec {
                models: vec!["auto".into()],
                rules: vec![
                    RouteRule {
                        name: "deep".into(),
                        r#match: RouteMatch { complexity_above_percent: Some(80), ..Default::default() },
                        targets: vec![target("r1")],
                        ..Default::default()
                    },
                    RouteRule {
                        name: "code".into(),
                        r#match: RouteMatch { tasks: vec![RouteTask::Code], ..Default::default() },
                        targets: vec![target("coder")],
                        ..Default::default()
                    },
                ],
                targets: vec![target("daily")],
                ..Default::default()
            },
        );
        route.metadata.namespace = Some("default".into());
        let table = RoutingTable::from_objects(&["r1", "coder", "daily"].map(deployment), &[], &[route]);
        let shown = |model: &str, prompt: &str| {
            let headers = RouteHeaders::default().or_task(table.named_task(model, &ModelScope::ALL));
            let caller = FactsCaller::default();
            let facts = RequestFacts::of_prompt(prompt, &[], &headers, caller, Timestamp::UNIX_EPOCH);
            explain(&table, model, &ModelScope::ALL, &facts, Timestamp::UNIX_EPOCH)
                .map_err(|error| error.to_string())
        };
        let expected = "\
Model        auto:code: `auto` of ModelRoute default/auto
Task         code
Complexity   3 %: questions 0.03
Request      about 2 tokens of prompt, tools: 0

RULE   MATCHES   WHY NOT
deep   no        its complexity is 3 %, not above 80 %
code   yes

TARGET          REPLICAS   STATE
default/coder   0          not ready: it is being set up

The first that can answer gets the request.
";
        assert_eq!(shown("auto:code", "Who?").unwrap(), expected);
        let other = shown("auto", "Hi").unwrap();
        assert!(
            other.contains("no rule matches: spec.targets") && other.contains("default/daily"),
            "{other}"
        );
        assert_eq!(shown("nix", "Hi").unwrap_err(), "there is no model nix");
    }
}
