//! What requests take of engines in joules and money: in the audit log and in metrics, also where the client leaves,
//! another engine goes on, or an engine does not say it.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use russet_crds::{GroupEnergy, PowerSource};
use russet_gateway::audit::{AuditLog, AuditPeriod, UsageField, UsageTotal, usage};
use russet_gateway::routes::DeploymentState;
use russet_wire::event::{FinishReason, GenerationEvent};
use serde_json::{Value, json};

use crate::harness::{
    GatewayLab, ScriptStep, TEST_TIMEOUT, finished, limits, started, token, wait_for_metric,
};

/// Microseconds for which an engine computes at a time.
const TURN: u64 = 20_000;

/// 6 kW that were measured, at 0.30 a kilowatt hour: 120 J a turn.
fn measured() -> GroupEnergy {
    let price_per_hour = Some("1.80".parse().unwrap());
    GroupEnergy { busy_watts: 6000, source: PowerSource::Measured, price_per_hour }
}

/// An answer for which so much is computed before each of its tokens.
fn answer(microseconds: [u64; 2], end: &[ScriptStep]) -> Vec<ScriptStep> {
    let [first, second] = microseconds.map(ScriptStep::Compute);
    [vec![started(), first, token("a"), second, token("b")], end.to_vec()].concat()
}

/// What was used, by model, once so many requests are in the log.
async fn used(folder: &Path, requests: u64) -> BTreeMap<String, UsageTotal> {
    let ended = async {
        loop {
            let zone = jiff::tz::TimeZone::UTC;
            let report = usage(folder, &AuditPeriod::default(), &[UsageField::Model], &zone, None).unwrap();
            if report.total().requests == requests {
                return report.totals.into_iter().map(|(key, total)| (key[0].clone(), total)).collect();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, ended).await.expect("the requests are never in the log")
}

/// The usage of the only request for a model in the log.
fn entry(folder: &Path, model: &str) -> Value {
    let lines = std::fs::read_to_string(folder.join("audit-00000001.log")).unwrap();
    let entries = lines.lines().filter_map(|line| serde_json::from_str(line.split('\t').next()?).ok());
    let mut found = entries.filter(|entry: &Value| entry["model"] == model);
    let entry = found.next().expect("it is in the log");
    assert_eq!(found.next(), None);
    entry["usage"].clone()
}

#[tokio::test]
async fn energy_of_a_request_is_its_engine_time_by_the_watts() {
    let folder = tempfile::tempdir().unwrap();
    let lab = GatewayLab::start_audited(limits(), AuditLog::open(folder.path()).unwrap()).await;
    let end = [finished(FinishReason::Stop)];
    let steps = answer([TURN, 2 * TURN], &end);
    let new = lab.engine("a", move |_| steps.clone());
    let old = lab.engine("b", move |_| [vec![started(), token("a")], end.to_vec()].concat());
    let pooled = lab.engine("c", |_| vec![ScriptStep::Compute(TURN / 2)]);
    let ready = DeploymentState::Ready;
    let deployments = ["m", "unknown-watts", "old", "embeds"].into_iter().zip([&new, &new, &old, &pooled]);
    let engines: Vec<_> = deployments.map(|(name, engine)| (name, ready.clone(), [engine])).collect();
    let engines: Vec<_> = engines.iter().map(|(name, state, of)| (*name, state.clone(), &of[..])).collect();
    lab.publish(&engines);
    let declared = GroupEnergy { source: PowerSource::Declared, price_per_hour: None, ..measured() };
    lab.change(|table| {
        let known = [("m", measured()), ("old", measured()), ("embeds", declared)];
        table.group_energy = known.map(|(name, energy)| (format!("default/{name}-0").into(), energy)).into();
    });
    for (model, stream) in [("m", false), ("m", true), ("unknown-watts", false), ("old", false)] {
        let reply = lab.chat(json!({"model": model, "stream": stream})).send().await.unwrap();
        assert_eq!(reply.status(), 200, "{model}");
        reply.text().await.unwrap();
    }
    let embed = lab.client.post(lab.url("/v1/embeddings")).json(&json!({"model": "embeds", "input": "text"}));
    assert_eq!(embed.send().await.unwrap().status(), 200);
    let used = used(folder.path(), 5).await;
    let total = &used["m"];
    assert_eq!((total.requests, total.millijoules, total.measured_millijoules), (2, 480_000, 480_000));
    // 480 J are 0.000133 kWh.
    assert_eq!((total.electricity.to_string().as_str(), total.unmetered), ("0.00004", 0));
    for model in ["unknown-watts", "old"] {
        assert_eq!((used[model].millijoules, used[model].unmetered), (0, 1), "{model}");
    }
    let expected = json!({"prompt_tokens": 7, "cached_tokens": 2, "completion_tokens": 3, "unmetered": true});
    assert_eq!(entry(folder.path(), "old"), expected, "of an engine that does not count nothing is claimed");
    assert_eq!(entry(folder.path(), "unknown-watts")["engine_microseconds"], 2 * TURN);
    let embedded = entry(folder.path(), "embeds");
    assert_eq!((&embedded["millijoules"], &embedded["power"]), (&json!(60_000), &json!("Declared")));
    assert_eq!((used["embeds"].measured_millijoules, used["embeds"].unpriced_electricity), (0, 1));
    let metrics = lab.metrics().await;
    for line in [
        "russet_gateway_energy_joules_total{model_name=\"m\",source=\"measured\"} 480\n",
        "russet_gateway_energy_joules_total{model_name=\"embeds\",source=\"declared\"} 60\n",
        "russet_gateway_electricity_cost_total{model_name=\"m\"} 0.00004\n",
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    let claims =
        |line: &&str| line.contains("energy_joules_total{") || line.contains("electricity_cost_total{");
    assert_eq!(metrics.lines().filter(claims).count(), 3, "{metrics}");
}

#[tokio::test]
async fn a_client_that_leaves_pays_for_what_was_computed() {
    let folder = tempfile::tempdir().unwrap();
    let lab = GatewayLab::start_audited(limits(), AuditLog::open(folder.path()).unwrap()).await;
    let engine = lab.only_engine(answer([TURN / 4, TURN / 2], &[ScriptStep::Hang]));
    lab.change(|table| table.group_energy = [("default/m-0".into(), measured())].into());
    let mut response = lab.chat(json!({"stream": true})).send().await.unwrap();
    let mut read = String::new();
    while !read.contains("\"b\"") {
        read.push_str(std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap());
    }
    drop(response);
    engine.running(0).await;
    let total = used(folder.path(), 1).await["m"];
    assert_eq!((total.millijoules, total.unmetered, total.completion_tokens), (60_000, 0, 2));
    wait_for_metric(&lab, "russet_gateway_energy_joules_total{model_name=\"m\",source=\"measured\"} 60\n")
        .await;
}

#[tokio::test]
async fn an_answer_of_two_engines_takes_the_energy_of_both() {
    let folder = tempfile::tempdir().unwrap();
    let lab = GatewayLab::start_audited(limits(), AuditLog::open(folder.path()).unwrap()).await;
    let lost = answer([TURN, TURN], &[ScriptStep::Break(tonic::Code::Unavailable, "rank 0 died")]);
    let first = lab.engine("a", move |_| lost.clone());
    let second = lab.engine("b", |request| {
        let emitted_tokens = request.emitted.len() as u32;
        let begin = ScriptStep::Say(GenerationEvent::Started { prompt_tokens: 7, emitted_tokens });
        vec![begin, ScriptStep::Compute(3 * TURN), token("c"), finished(FinishReason::Stop)]
    });
    lab.publish(&[("m", DeploymentState::Ready, &[&first])]);
    let power = GroupEnergy { busy_watts: 2000, source: PowerSource::Declared, ..measured() };
    let groups = ["default/m-0", "default/m-1"];
    lab.change(|table| {
        table.group_energy = groups.map(Into::into).into_iter().zip([measured(), power]).collect();
    });
    let mut response = lab.chat(json!({"stream": true})).send().await.unwrap();
    first.requested(1).await;
    // The other one is there once the first is lost.
    lab.change(|table| {
        let endpoints = &mut table.deployments[0].endpoints;
        let mut other = endpoints[0].clone();
        (other.address, other.node, other.group) =
            (second.address.to_string().into(), "b".into(), groups[1].into());
        endpoints.push(other);
    });
    let mut read = String::new();
    while let Some(chunk) = response.chunk().await.unwrap() {
        read.push_str(std::str::from_utf8(&chunk).unwrap());
    }
    assert!(read.contains("[DONE]"), "{read}");
    let total = used(folder.path(), 1).await["m"];
    assert_eq!((first.requests(), second.requests()), (1, 1));
    // A turn at 6 kW and three at 2 kW; one group was declared.
    assert_eq!((total.millijoules, total.measured_millijoules), (240_000, 0));
    let entry = entry(folder.path(), "m");
    assert_eq!((&entry["engine_microseconds"], &entry["power"]), (&json!(4 * TURN), &json!("Declared")));
    for line in ["source=\"measured\"} 120\n", "source=\"declared\"} 120\n"] {
        wait_for_metric(&lab, &format!("russet_gateway_energy_joules_total{{model_name=\"m\",{line}")).await;
    }
}

#[tokio::test]
async fn an_engine_that_claims_too_much_damages_no_log() {
    let folder = tempfile::tempdir().unwrap();
    let lab = GatewayLab::start_audited(limits(), AuditLog::open(folder.path()).unwrap()).await;
    let claims = ScriptStep::Claim(u64::MAX);
    let engine = lab.only_engine(vec![started(), claims, token("a"), finished(FinishReason::Stop)]);
    // Whatever an hour costs: a moment of it is more than there is.
    let dear = Some("999999999.999999999".parse().unwrap());
    let power = GroupEnergy { busy_watts: u32::MAX, price_per_hour: dear, ..measured() };
    lab.change(|table| table.group_energy = [("default/m-0".into(), power)].into());
    let began = std::time::Instant::now();
    let reply = lab.chat(json!({})).send().await.unwrap();
    assert_eq!(reply.status(), 200);
    reply.text().await.unwrap();
    engine.running(0).await;
    // To read what was used is to verify the log.
    let total = used(folder.path(), 1).await["m"];
    let passed = began.elapsed().as_micros();
    let microseconds = entry(folder.path(), "m")["engine_microseconds"].as_u64().unwrap();
    assert!(u128::from(microseconds) <= passed, "{microseconds} µs of {passed}");
    assert_eq!(total.millijoules, microseconds * u64::from(u32::MAX) / 1000);
    // A gateway that starts goes on with it.
    let copy = tempfile::tempdir().unwrap();
    let name = "audit-00000001.log";
    std::fs::copy(folder.path().join(name), copy.path().join(name)).unwrap();
    AuditLog::open(copy.path()).map(drop).unwrap();
}
