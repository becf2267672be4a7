//! Observability: a real Prometheus scrapes every process of a serving cluster, and every query of the
//! dashboard, every rule and every documented metric is checked against it. `RUSSET_SEEN` selects these
//! scenarios.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use russet_tests::chat;
use russet_tests::cluster::{TestCluster, repository};
use russet_tests::processes::oracle;
use russet_tests::prometheus::{Prometheus, RULES};
use serde_json::{Value, json};

use crate::mistakes::apply;
use crate::path;

/// Scenarios that replace the usual ones.
pub fn scenarios() -> Vec<(&'static str, crate::Scenario)> {
    vec![
        ("promtool_accepts_the_rules_and_every_alert_fires_in_time", |c| Box::pin(promtool(c))),
        ("every_query_of_the_board_and_every_rule_returns_series", |c| Box::pin(seen(c))),
    ]
}

/// Dashboard queries that need hardware that no test machine has.
const UNSEEN_QUERIES: [&str; 6] =
    // Predictions need a chip of the catalogue on every machine.
    [
        "russet_modeldeployment_predicted_tokens_per_second",
        "russet_modeldeployment_predicted_total_tokens_per_second",
        // Simulated Macs measure no power.
        "russet_node_power_watts",
        // Nothing leaves.
        "russet_gateway_provider_request_total",
        "russet_gateway_provider_cost_total",
        // No request is held.
        "russet_gateway_request_queue_time_seconds",
    ];

/// Documented metrics that this cluster does not show.
const UNSEEN_METRICS: [&str; 27] = [
    "russet_modeldeployment_predicted_tokens_per_second",
    "russet_modeldeployment_predicted_total_tokens_per_second",
    "russet_modeldeployment_predicted_ttft_seconds",
    // Simulated Macs report neither load nor temperature.
    "russet_node_gpu_active_ratio",
    "russet_node_power_watts",
    "russet_node_energy_joules_total",
    "russet_node_temperature_celsius",
    "russet_node_swap_used_bytes",
    // Nothing is plugged into the machines' ports.
    "russet_inferencenode_link_bits_per_second",
    "russet_node_link_round_trip_seconds",
    "russet_node_link_pings_total",
    "russet_node_link_measured_bits_per_second",
    // Nothing running ends or stalls, and no request is retried.
    "russet_engine_ends_total",
    "russet_engine_kills_total",
    "russet_engine_reforms_total",
    "russet_gateway_request_retry_total",
    "russet_gateway_request_continued_total",
    "russet_gateway_hedged_request_total",
    // No claim is refused, no engine fails a request, no client disconnects, and there are no keys.
    "russet_shard_refusals_total",
    "russet_engine_request_failures_total",
    "russet_gateway_request_cancelled_total",
    "russet_gateway_key_request_total",
    // Nothing leaves the cluster.
    "russet_gateway_budget_request_total",
    "russet_gateway_provider_request_total",
    "russet_gateway_provider_cost_total",
    "russet_gateway_provider_credits",
    // A request is held only if it arrives before its model is ready.
    "russet_gateway_request_queue_time_seconds",
];

async fn promtool(_: &mut TestCluster) -> Result<()> {
    let rules = repository().join(RULES).display().to_string();
    let tests = repository().join("tests/prometheus/alerts.yaml");
    let text = std::fs::read_to_string(&tests)?;
    let page = std::fs::read_to_string(repository().join("docs/metrics.md"))?;
    for (name, _) in rules_of()?.iter().filter(|(_, rule)| rule.is_alert) {
        ensure!(
            text.contains(&format!("alertname=\"{name}\"")),
            "{} never sees {name} fire",
            tests.display()
        );
        let remedy = format!("\n### {name}\n");
        ensure!(page.contains(&remedy), "docs/metrics.md does not say what to do about {name}");
    }
    for arguments in [["check", "rules", &rules], ["test", "rules", &tests.display().to_string()]] {
        let output =
            tokio::process::Command::new(oracle("RUSSET_PROMTOOL")?).args(arguments).output().await?;
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        ensure!(output.status.success(), "promtool {} failed:\n{text}", arguments.join(" "));
        println!(
            "  promtool {} {}: {}",
            arguments[0],
            arguments[1],
            text.split_whitespace().collect::<Vec<_>>().join(" ")
        );
    }
    Ok(())
}

async fn seen(cluster: &mut TestCluster) -> Result<()> {
    let control_plane = cluster.plane()?.metrics()?.remove(0).0;
    let gateway = format!("127.0.0.1:{}", cluster.gateway_port);
    let mut prometheus = Prometheus::start(control_plane.trim_start_matches("http://"), &gateway)?;
    // It scrapes before a group has formed, as counters are measured by their increase.
    cluster
        .until("Prometheus sees the operator lead and two machines open", async |_| {
            Ok(prometheus.is_ready().await?
                && prometheus.query("sum(russet_operator_leader)").await? == [1.0]
                && prometheus.query(OPEN_NODES_QUERY).await? == [2.0])
        })
        .await?;
    path::quickstart(cluster).await?;
    // Later, or the tier would give a machine to a group without deployments.
    apply(cluster, POOL_AND_TIER).await?;
    apply(cluster, UNPLACEABLE).await?;
    let mut targets = BTreeMap::new();
    let outcome = cluster
        .until("control plane, gateway, two agents and two engines are scraped", async |_| {
            targets = up(&prometheus).await?;
            Ok(targets.values().filter(|why| why.is_empty()).count() == 6 && targets.len() == 6)
        })
        .await;
    outcome.with_context(|| format!("{targets:#?}"))?;
    answers(cluster, &prometheus).await?;
    figures(cluster, &prometheus).await?;
    documented(&prometheus).await
}

/// Number of machines that take work.
const OPEN_NODES_QUERY: &str = "sum(russet_inferencenode_availability{state=\"open\"})";

/// Known values of this cluster.
const EXPECTED_VALUES: [(&str, f64); 9] = [
    ("sum(russet_modeldeployment_replicas_ready{deployment=\"smoke\"})", 1.0),
    ("russet_modeldeployment_ready{deployment=\"waiting\", reason=\"NothingFits\"}", 0.0),
    ("sum(russet_shardgroups{state=\"ready\"})", 1.0),
    ("count(russet_engine_steps_total)", 2.0),
    ("count(vllm:num_requests_running)", 1.0),
    ("russet_nodepool_nodes{pool=\"far\"}", 1.0),
    ("russet_tier_priority{tier=\"daily\"}", 100.0),
    ("count(russet_modelcopy_ready{model=\"smoke\"} == 1)", 2.0),
    (OPEN_NODES_QUERY, 2.0),
];

/// Values above zero.
const POSITIVE_QUERIES: [&str; 5] = [
    "sum(rate(vllm:generation_tokens_total[5m]))",
    // The two machines of the group together draw 80 W while they compute, and no more.
    "sum(rate(russet_gateway_energy_joules_total{source=\"declared\"}[5m])) <= 80",
    "russet_inferencenode_memory_committed_bytes",
    "russet_engine_memory_bytes",
    "russet:node_certificate_left:seconds > 432000",
];

/// A pool and a tier, and what machines draw, for their series.
const POOL_AND_TIER: &str = "apiVersion: russet.dev/v1alpha1\nkind: InferenceNode\nmetadata: {name: node-b, labels: {rack: far}}\n\
    spec: {energy: {busyWatts: 30, pricePerKilowattHour: \"0.30\"}}\n---\n\
    apiVersion: russet.dev/v1alpha1\nkind: InferenceNode\nmetadata: {name: node-a}\n\
    spec: {energy: {busyWatts: 50, pricePerKilowattHour: \"0.30\"}}\n---\n\
    apiVersion: russet.dev/v1alpha1\nkind: NodePool\nmetadata: {name: far}\nspec: {selector: {matchLabels: {rack: far}}}\n---\n\
    apiVersion: russet.dev/v1alpha1\nkind: Tier\nmetadata: {name: daily}\n\
    spec: {mode: Dedicated, workloadGroups: [chat], priority: 100}\n";

/// More ranks than machines.
const UNPLACEABLE: &str = "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: waiting}\n\
    spec: {modelRef: {name: smoke}, sharding: {mode: Pipeline, ranks: 3}}\n";

/// The targets, each with its error.
async fn up(prometheus: &Prometheus) -> Result<BTreeMap<String, String>> {
    let targets = prometheus.get("targets?state=active").await?;
    let targets = targets["activeTargets"].as_array().context("no list of targets")?;
    let one = |target: &Value| {
        let url = target["scrapeUrl"].as_str().unwrap_or_default().to_owned();
        let why = match target["health"].as_str() {
            Some("up") => String::new(),
            _ => format!("{} {}", target["health"], target["lastError"]),
        };
        (url, why)
    };
    Ok(targets.iter().map(one).collect())
}

/// Sends requests, some of which fail, until every query has a value.
async fn answers(cluster: &mut TestCluster, prometheus: &Prometheus) -> Result<()> {
    let mut queries = queries()?;
    let all = queries.len();
    let base = cluster.base_url();
    let outcome = cluster
        .until("every query has a number", async |_| {
            let answer = chat::answer(&base, "smoke", "What is 17 + 25?").await?;
            ensure!(answer.contains("42"), "17 + 25 is not \"{answer}\"");
            for model in ["waiting", "nosuch"] {
                let refused = chat::ask(&base, &chat::question(model, "hi", json!({}))).await;
                ensure!(refused.is_err(), "{model} answered");
            }
            let mut left = BTreeSet::new();
            for query in std::mem::take(&mut queries) {
                let values = prometheus.query(&query).await.with_context(|| query.clone())?;
                if values.is_empty() {
                    left.insert(query);
                }
            }
            queries = left;
            Ok(queries.is_empty())
        })
        .await;
    let left: Vec<&str> = queries.iter().map(String::as_str).collect();
    outcome
        .with_context(|| format!("{} of {all} queries have no number:\n{}", left.len(), left.join("\n")))?;
    println!("  {all} queries of board and rules have numbers");
    Ok(())
}

/// A rule: its expression, and whether it is an alert.
struct RuleUnderTest {
    measures: String,
    is_alert: bool,
}

/// Every rule by its name. Of an alert the left side of the comparison, which must be a number.
fn rules_of() -> Result<BTreeMap<String, RuleUnderTest>> {
    let text = std::fs::read_to_string(repository().join(RULES))?;
    let file: Value = serde_norway::from_str(&text)?;
    let groups = file["groups"].as_array().context("rules without groups")?;
    let mut rules = BTreeMap::new();
    for rule in groups.iter().filter_map(|group| group["rules"].as_array()).flatten() {
        let expression = rule["expr"].as_str().context("a rule without expr")?.to_owned();
        let (name, rule) = match rule["alert"].as_str() {
            None => (&rule["record"], RuleUnderTest { measures: expression, is_alert: false }),
            Some(name) => {
                let words: Vec<&str> = expression.split(' ').collect();
                let [measured, "==" | "<" | ">" | ">=", bound] = words.as_slice() else {
                    anyhow::bail!(
                        "{name} compares more than one recorded value with one number: {expression}"
                    );
                };
                bound.parse::<f64>().with_context(|| format!("{name}: {bound} is no number"))?;
                (&rule["alert"], RuleUnderTest { measures: (*measured).to_owned(), is_alert: true })
            }
        };
        let name = name.as_str().context("a rule without a name")?.to_owned();
        ensure!(rules.insert(name.clone(), rule).is_none(), "there are two rules {name}");
    }
    Ok(rules)
}

/// Every expression of the dashboard and of the rules.
fn queries() -> Result<BTreeSet<String>> {
    let mut queries: BTreeSet<String> = rules_of()?.into_values().map(|rule| rule.measures).collect();
    let board = std::fs::read_to_string(repository().join("charts/russet/dashboards/russet.json"))?;
    let board: Value = serde_json::from_str(&board)?;
    let page = std::fs::read_to_string(repository().join("docs/metrics.md"))?;
    let panels = board["panels"].as_array().context("a board without panels")?;
    let mut shown = 0;
    for panel in panels {
        let title = panel["title"].as_str().context("a panel without a title")?;
        ensure!(page.contains(title), "docs/metrics.md does not name the panel \"{title}\"");
        for target in panel["targets"].as_array().into_iter().flatten() {
            shown += 1;
            let expression = target["expr"].as_str().context("a target without expr")?;
            if !UNSEEN_QUERIES.iter().any(|unseen| expression.contains(unseen)) {
                queries.insert(expression.replace("$__rate_interval", "1m"));
            }
        }
    }
    ensure!(shown > 50, "the board has only {shown} queries");
    Ok(queries)
}

/// Known values. On a busy machine an operator may lose and regain leadership, so they are polled.
async fn figures(cluster: &mut TestCluster, prometheus: &Prometheus) -> Result<()> {
    let mut wrong = Vec::new();
    let outcome = cluster
        .until("the numbers are those of the cluster", async |_| {
            wrong.clear();
            for (query, expected) in EXPECTED_VALUES {
                let got = prometheus.query(query).await?;
                if got != [expected] {
                    wrong.push(format!("{query} is {got:?}, not {expected}"));
                }
            }
            for query in POSITIVE_QUERIES {
                let got = prometheus.query(query).await?;
                if got.is_empty() || got.iter().any(|value| *value <= 0.0) {
                    wrong.push(format!("{query} is {got:?}, which is not above 0"));
                }
            }
            Ok(wrong.is_empty())
        })
        .await;
    outcome.with_context(|| wrong.join("\n"))?;
    let rules = prometheus.get("rules").await?;
    let groups = rules["groups"].as_array().context("no groups of rules")?;
    for rule in groups.iter().filter_map(|group| group["rules"].as_array()).flatten() {
        ensure!(rule["health"] == "ok", "Prometheus cannot evaluate {rule}");
        if rule["name"] == "RussetPlacementWaits" {
            let alerts = rule["alerts"].to_string();
            ensure!(alerts.contains("pending") && alerts.contains("NothingFits"), "nobody waits: {rule}");
        }
    }
    Ok(())
}

/// Every scraped metric is documented with its type, and every documented one was scraped.
async fn documented(prometheus: &Prometheus) -> Result<()> {
    let page = std::fs::read_to_string(repository().join("docs/metrics.md"))?;
    let mut rows = BTreeMap::new();
    for line in page.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        if let ["", name, kind, _, _, ""] = cells.as_slice()
            && let Some(name) = name.strip_prefix('`').and_then(|name| name.strip_suffix('`'))
        {
            ensure!(rows.insert(name, *kind).is_none(), "docs/metrics.md names {name} twice");
        }
    }
    let metadata = prometheus.get("metadata").await?;
    let mut missing = Vec::new();
    for (name, about) in metadata.as_object().context("no metadata")? {
        let kind = about[0]["type"].as_str().unwrap_or_default();
        match rows.remove(name.as_str()) {
            Some(documented) if documented == kind => {}
            documented => missing.push(format!(
                "| `{name}` | {kind} | | {} | (the page says {documented:?})",
                about[0]["help"]
            )),
        }
    }
    ensure!(missing.is_empty(), "docs/metrics.md lacks:\n{}", missing.join("\n"));
    let unseen: Vec<&str> = rows.into_keys().filter(|name| !UNSEEN_METRICS.contains(name)).collect();
    ensure!(unseen.is_empty(), "docs/metrics.md names what nobody shows: {unseen:?}");
    Ok(())
}
