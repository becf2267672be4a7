//! Hedged requests: a second replica gets a request when the first has no first token in time, and one of them answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use russet_crds::ModelRoute;
use russet_gateway::request_log::{AttemptOutcome, RequestRecord};
use russet_gateway::routes::{DeploymentState, RoutingTable};
use russet_wire::event::FinishReason;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::harness::{
    GatewayLab, ScriptStep, ScriptedEngine, finished, limits, started, token, wait_for_metric,
};

/// The scripts of the engine that gets a request first, and of the one that gets it then.
type Scripts = [Vec<ScriptStep>; 2];

fn says(text: &str) -> Vec<ScriptStep> {
    vec![started(), token(text), finished(FinishReason::Stop)]
}

/// Two replicas of `m` behind a route that hedges after so many milliseconds.
struct HedgeLab {
    lab: GatewayLab,
    engines: [ScriptedEngine; 2],
}

impl HedgeLab {
    async fn start(milliseconds: Option<u32>, scripts: Scripts) -> Self {
        let lab = GatewayLab::start(limits()).await;
        let requests = Arc::<AtomicUsize>::default();
        let engines = ["a", "b"].map(|node| {
            let (scripts, requests) = (scripts.clone(), requests.clone());
            lab.engine(node, move |_| scripts[requests.fetch_add(1, Ordering::SeqCst).min(1)].clone())
        });
        let object = json!({
            "apiVersion": "russet.dev/v1alpha1", "kind": "ModelRoute",
            "metadata": {"name": "auto", "namespace": "default"},
            "spec": {
                "models": ["auto"], "targets": [{"deploymentRef": {"name": "m"}}],
                "hedgeAfterMilliseconds": milliseconds,
            },
        });
        let route: ModelRoute = serde_json::from_value(object).unwrap();
        let aliases = RoutingTable::from_objects(&[], &[], &[route]).aliases.into_iter().collect();
        lab.publish_with(&[("m", DeploymentState::Ready, &[&engines[0], &engines[1]])], aliases);
        lab.change(|table| {
            for endpoint in &mut table.deployments[0].endpoints {
                endpoint.group = format!("default/m-{}", endpoint.node).into();
            }
        });
        Self { lab, engines }
    }

    fn ask(&self) -> tokio::task::JoinHandle<(u16, Value)> {
        let request = self.lab.chat(json!({"model": "auto"})).header("x-request-id", "hedged");
        tokio::spawn(async move {
            let response = request.send().await.unwrap();
            (response.status().as_u16(), response.json().await.unwrap())
        })
    }

    /// The engines in the order in which they got the request.
    async fn in_order(&self) -> [&ScriptedEngine; 2] {
        let [a, b] = &self.engines;
        let record = self.record().await;
        if &*record.attempts[0].node == "a" { [a, b] } else { [b, a] }
    }

    async fn record(&self) -> RequestRecord {
        let url = self.lab.url("/requests/hedged/why");
        self.lab.client.get(url).send().await.unwrap().json().await.unwrap()
    }

    async fn outcomes(&self) -> Vec<Option<AttemptOutcome>> {
        self.record().await.attempts.into_iter().map(|attempt| attempt.outcome).collect()
    }

    /// Waits until no engine works for the request.
    async fn all_slots_are_free(&self) {
        for engine in &self.engines {
            engine.running(0).await;
        }
    }
}

fn text((status, body): (u16, Value)) -> String {
    assert_eq!(status, 200, "{body}");
    body["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

fn metric(outcome: &str) -> String {
    format!("russet_gateway_hedged_request_total{{model_name=\"auto\",outcome=\"{outcome}\"}} 1\n")
}

#[tokio::test]
async fn a_second_replica_answers_for_one_that_says_nothing() {
    for silence in [vec![ScriptStep::Hang], vec![started(), ScriptStep::Hang], vec![ScriptStep::Prepare]] {
        let hedged = HedgeLab::start(Some(20), [silence, says("second")]).await;
        assert_eq!(text(hedged.ask().await.unwrap()), "second");
        wait_for_metric(&hedged.lab, &metric("second")).await;
        hedged.all_slots_are_free().await;
        let outcomes = hedged.outcomes().await;
        assert_eq!(outcomes, [Some(AttemptOutcome::Overtaken), Some(AttemptOutcome::Answered)]);
        let record = hedged.record().await;
        assert_ne!(record.attempts[0].node, record.attempts[1].node);
        assert_eq!((record.prompt_tokens, record.completion_tokens), (7, 3));
    }
}

#[tokio::test]
async fn a_replica_that_was_overtaken_is_asked_last() {
    let hedged = HedgeLab::start(Some(20), [vec![ScriptStep::Hang], says("second")]).await;
    assert_eq!(text(hedged.ask().await.unwrap()), "second");
    let [slow, quick] = hedged.in_order().await;
    for _ in 0..6 {
        let (status, body) = {
            let response = hedged.lab.chat(json!({"model": "auto"})).send().await.unwrap();
            (response.status().as_u16(), response.json().await.unwrap())
        };
        assert_eq!(text((status, body)), "second");
    }
    assert_eq!((slow.requests(), quick.requests()), (1, 7), "it holds nothing, and looks idle");
}

#[tokio::test]
async fn the_first_replica_answers_if_it_speaks_first_after_all() {
    let go = CancellationToken::new();
    let first = [vec![started(), ScriptStep::Until(go.clone())], says("first")[1..].to_vec()].concat();
    let hedged = HedgeLab::start(Some(20), [first, vec![started(), ScriptStep::Hang]]).await;
    let asked = hedged.ask();
    for engine in &hedged.engines {
        engine.requested(1).await;
    }
    // Two engines have it, and it is one request of the deployment.
    let running = "russet_gateway_num_requests_running{name=\"m\",namespace=\"default\"} 1\n";
    wait_for_metric(&hedged.lab, running).await;
    go.cancel();
    assert_eq!(text(asked.await.unwrap()), "first");
    wait_for_metric(&hedged.lab, &metric("first")).await;
    hedged.all_slots_are_free().await;
    let outcomes = hedged.outcomes().await;
    assert_eq!(outcomes, [Some(AttemptOutcome::Answered), Some(AttemptOutcome::Overtaken)]);
}

#[tokio::test]
async fn a_first_replica_that_is_lost_or_full_leaves_it_to_the_second() {
    let (full, go) = (CancellationToken::new(), CancellationToken::new());
    let broken = ScriptStep::Break(tonic::Code::ResourceExhausted, "full");
    let first = vec![ScriptStep::Until(full.clone()), broken];
    let second = [vec![started(), ScriptStep::Until(go.clone())], says("second")[1..].to_vec()].concat();
    let hedged = HedgeLab::start(Some(20), [first, second]).await;
    let asked = hedged.ask();
    for engine in &hedged.engines {
        engine.requested(1).await;
    }
    let [first, _] = hedged.in_order().await;
    full.cancel();
    first.running(0).await;
    go.cancel();
    assert_eq!(text(asked.await.unwrap()), "second");
    let outcomes = hedged.outcomes().await;
    // The words of the second may come before those of the first.
    let is_known = matches!(outcomes[0], Some(AttemptOutcome::Busy { .. } | AttemptOutcome::Overtaken));
    assert!(is_known && outcomes[1] == Some(AttemptOutcome::Answered), "{outcomes:?}");
}

#[tokio::test]
async fn nobody_is_asked_twice_without_need() {
    // In time, and where no route hedges.
    for milliseconds in [Some(600_000), None] {
        let hedged = HedgeLab::start(milliseconds, [says("first"), says("second")]).await;
        assert_eq!(text(hedged.ask().await.unwrap()), "first");
        let requests: usize = hedged.engines.iter().map(ScriptedEngine::requests).sum();
        assert_eq!(requests, 1);
        assert!(!hedged.lab.metrics().await.contains("hedged_request_total{"));
    }
}

#[tokio::test]
async fn two_that_fail_count_as_one_attempt_each() {
    let full = || vec![ScriptStep::Break(tonic::Code::ResourceExhausted, "full")];
    let late = CancellationToken::new();
    let first = [vec![ScriptStep::Until(late.clone())], full()].concat();
    let hedged = HedgeLab::start(Some(20), [first, full()]).await;
    let asked = hedged.ask();
    for engine in &hedged.engines {
        engine.requested(1).await;
    }
    late.cancel();
    let (status, body) = asked.await.unwrap();
    assert_eq!((status, body["error"]["code"].as_str()), (429, Some("rate_limit_exceeded")), "{body}");
    wait_for_metric(&hedged.lab, &metric("none")).await;
    let outcomes = hedged.outcomes().await;
    assert!(
        outcomes.len() == 2 && outcomes.iter().all(|one| matches!(one, Some(AttemptOutcome::Busy { .. }))),
        "{outcomes:?}"
    );
}
