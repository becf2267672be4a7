//! Responses whose engine is lost after part of the text was sent: another engine resumes them, and the
//! client sees one response. If none can resume, the client sees a typed error.

use std::time::Duration;

use russet_gateway::dispatch::DispatchLimits;
use russet_gateway::routes::{DeploymentState, Endpoint, RoutingTable};
use russet_rpc::engine::GenerateRequest;
use russet_wire::event::{Delta, FailureKind, FinishReason, GenerationEvent, GenerationFailure, Usage};
use serde_json::{Value, json};

use crate::harness::{GatewayLab, ScriptStep, ScriptedEngine, limits, transcript, wait_for_metric};

/// The texts of the response's tokens: their ids count from 10, and some have no text of their own.
const TEXTS: [&str; 6] = ["Hel", "lo", "", " th", "", "ere"];

/// The remaining steps of the response, from an engine that is given the emitted tokens.
fn remaining_steps(request: &GenerateRequest) -> Vec<ScriptStep> {
    let emitted_tokens = request.emitted.len() as u32;
    let started = GenerationEvent::Started { prompt_tokens: 7, emitted_tokens };
    let tokens = (10..).zip(TEXTS).skip(request.emitted.len());
    let tokens = tokens.map(|(id, text)| GenerationEvent::Token { id, delta: Delta::text(text) });
    let usage = Usage { prompt_tokens: 7, completion_tokens: TEXTS.len() as u32, cached_tokens: 0 };
    let finished = GenerationEvent::Finished { reason: FinishReason::Length, usage };
    [started].into_iter().chain(tokens).chain([finished]).map(ScriptStep::Say).collect()
}

/// The same, interrupted after `tokens` more tokens.
fn interrupted_steps(
    tokens: usize,
    end: &[ScriptStep],
) -> impl Fn(&GenerateRequest) -> Vec<ScriptStep> + Send + Sync + use<> {
    let end = end.to_vec();
    move |request| remaining_steps(request).into_iter().take(1 + tokens).chain(end.clone()).collect()
}

/// Every way in which an engine can be lost during a response.
fn failure_modes() -> Vec<Vec<ScriptStep>> {
    let failure = GenerationFailure { kind: FailureKind::Unavailable, message: "rank 1 died".into() };
    let cancelled = GenerationEvent::Finished { reason: FinishReason::Cancelled, usage: Usage::default() };
    vec![
        vec![ScriptStep::Break(tonic::Code::Unavailable, "rank 0 died")],
        vec![ScriptStep::Break(tonic::Code::Unknown, "a cable was pulled")],
        vec![ScriptStep::Say(GenerationEvent::Failed(failure))],
        vec![ScriptStep::Say(cancelled)],
        // The stream just ends.
        vec![],
    ]
}

async fn streamed(lab: &GatewayLab) -> Vec<Value> {
    let more = json!({"stream": true, "stream_options": {"include_usage": true}});
    let response = lab.chat(more).send().await.unwrap();
    assert_eq!(response.status(), 200);
    transcript(&response.text().await.unwrap())
}

async fn whole(lab: &GatewayLab) -> Value {
    let response = lab.chat(json!({})).send().await.unwrap();
    assert_eq!(response.status(), 200);
    crate::harness::normalize(response.json().await.unwrap())
}

/// The text of a stream's chunks.
fn text(events: &[Value]) -> String {
    events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect()
}

/// Reads until this text has arrived.
async fn read(response: &mut reqwest::Response, until: &str) -> String {
    let mut read = String::new();
    while !text(&transcript(&read)).contains(until) {
        read.push_str(std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap());
    }
    read
}

#[tokio::test]
async fn answer_resumed_after_any_token_equals_the_unbroken_one() {
    let lab = GatewayLab::start(limits()).await;
    let other = lab.engine("b", remaining_steps);
    lab.publish(&[("m", DeploymentState::Ready, &[&other])]);
    let (one_stream, one_whole) = (streamed(&lab).await, whole(&lab).await);
    assert_eq!(text(&one_stream), "Hello there");
    for end in failure_modes() {
        for cut in 0..=TEXTS.len() {
            let lost = lab.engine("a", interrupted_steps(cut, &end));
            lab.publish(&[("m", DeploymentState::Ready, &[&lost, &other])]);
            assert_eq!(streamed(&lab).await, one_stream, "after {cut} tokens");
            assert_eq!(whole(&lab).await, one_whole, "after {cut} tokens");
            let first = lost.received.lock().unwrap()[0].clone();
            let mut received = other.received.lock().unwrap().clone();
            received.retain(|request| request.id == first.id);
            // Everything else is unchanged, including the seed that the client did not set.
            let emitted = (10..).take(cut).collect();
            assert!(first.sampling.as_ref().unwrap().seed.is_some());
            assert_eq!(received, [GenerateRequest { emitted, ..first }], "after {cut} tokens");
        }
    }
    let count = 2 * failure_modes().len() * TEXTS.len();
    let continued =
        format!("russet_gateway_request_continued_total{{model_name=\"m\",outcome=\"continued\"}} {count}\n");
    wait_for_metric(&lab, &continued).await;
    wait_for_metric(&lab, "russet_gateway_num_requests_running{name=\"m\",namespace=\"default\"} 0").await;
}

#[tokio::test]
async fn answer_resumes_repeatedly_up_to_the_loss_limit() {
    let lab = GatewayLab::start(DispatchLimits { endpoint_backoff: Duration::ZERO, ..limits() }).await;
    // Each engine emits some more tokens, and each token is sent to the client once.
    for (tokens, expected) in [(3, Some("Hello there")), (2, Some("Hello there")), (1, None)] {
        let end = [ScriptStep::Break(tonic::Code::Unavailable, "rank 1 died")];
        let engine = lab.engine("a", move |request| match TEXTS.len() - request.emitted.len() {
            left if left > tokens => interrupted_steps(tokens, &end)(request),
            _ => remaining_steps(request),
        });
        lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
        let events = streamed(&lab).await;
        match expected {
            Some(expected) => {
                assert_eq!(text(&events), expected);
                assert_eq!(events.last().unwrap(), &json!("[DONE]"));
            }
            None => {
                let error = &events.last().unwrap()["error"];
                assert_eq!(error["code"], "engine_lost", "{events:?}");
                assert!(error["message"].as_str().unwrap().starts_with("3 engines were lost"), "{error}");
                assert_eq!(engine.requests(), 3);
            }
        }
    }
    wait_for_metric(
        &lab,
        "russet_gateway_request_continued_total{model_name=\"m\",outcome=\"given_up\"} 1\n",
    )
    .await;
}

#[tokio::test]
async fn answers_resume_on_the_reformed_group_without_loss() {
    let interval = Duration::from_millis(20);
    let lab = GatewayLab::start(DispatchLimits { heartbeat: interval, ..limits() }).await;
    let mut killed = lab.engine("a", interrupted_steps(2, &[ScriptStep::Hang]));
    lab.publish(&[("m", DeploymentState::Ready, &[&killed])]);
    let mut responses = Vec::new();
    for _ in 0..3 {
        let mut response = lab.chat(json!({"stream": true})).send().await.unwrap();
        let read = read(&mut response, "Hello").await;
        responses.push((response, read));
    }
    killed.kill();
    lab.publish(&[("m", DeploymentState::Working("forming epoch 2".into()), &[])]);
    // Interrupted responses count as waiting, and their streams get keep-alives.
    wait_for_metric(&lab, "russet_gateway_num_requests_waiting{name=\"m\",namespace=\"default\"} 3\n").await;
    for (response, read) in &mut responses {
        while read.matches(": still working\n\n").count() < 2 {
            read.push_str(std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap());
        }
    }
    // A client that disconnects now stops counting.
    drop(responses.pop());
    wait_for_metric(&lab, "russet_gateway_num_requests_waiting{name=\"m\",namespace=\"default\"} 2\n").await;
    let reformed = lab.engine("b", remaining_steps);
    lab.publish(&[("m", DeploymentState::Ready, &[&reformed])]);
    for (response, read) in responses {
        let events = transcript(&(read + &response.text().await.unwrap()));
        assert_eq!(text(&events), "Hello there");
        assert_eq!(events.last().unwrap(), &json!("[DONE]"));
    }
    assert_eq!(reformed.requests(), 2);
}

/// A frozen machine keeps its connections; a higher epoch of its group is enough to abandon it.
#[tokio::test]
async fn silent_engine_is_abandoned_once_its_group_reforms() {
    let lab = GatewayLab::start(limits()).await;
    let frozen = lab.engine("a", interrupted_steps(2, &[ScriptStep::Hang]));
    let (reformed, elsewhere) = (lab.engine("b", remaining_steps), lab.engine("c", remaining_steps));
    lab.publish(&[("m", DeploymentState::Ready, &[&frozen])]);
    let mut response = lab.chat(json!({"stream": true})).send().await.unwrap();
    let read = read(&mut response, "Hello").await;
    // Other groups, the same epoch, and removal of the endpoint from the table do not interrupt it.
    lab.publish(&[
        ("m", DeploymentState::Ready, &[&elsewhere]),
        ("n", DeploymentState::Ready, &[&elsewhere]),
    ]);
    lab.change(|table| table.deployments[1].endpoints[0].epoch = 2);
    lab.publish(&[("m", DeploymentState::Working("forming epoch 2".into()), &[])]);
    frozen.running(1).await;
    let address = reformed.address.to_string().into();
    lab.change(|table| {
        let (node, group, model) = ("b".into(), "default/m-0".into(), "small".into());
        table.deployments[0].endpoints =
            vec![Endpoint { address, node, group, model, adapters: Default::default(), epoch: 2 }];
    });
    let events = transcript(&(read + &response.text().await.unwrap()));
    assert_eq!(text(&events), "Hello there");
    assert_eq!((reformed.requests(), elsewhere.requests()), (1, 0));
    frozen.running(0).await;
}

#[tokio::test]
async fn response_that_cannot_resume_ends_with_a_typed_error() {
    type TableEdit = fn(&mut RoutingTable);
    fn deployment(table: &mut RoutingTable) -> &mut russet_gateway::routes::Deployment {
        &mut table.deployments[0]
    }
    let (none, unchanged): (TableEdit, TableEdit) = (|table| deployment(table).endpoints.clear(), |_| {});
    let another: TableEdit = |table| {
        let one = deployment(table);
        one.model = "large".into();
        let large = one.endpoints.pop().map(|endpoint| Endpoint { model: "large".into(), ..endpoint });
        one.endpoints = large.into_iter().collect();
    };
    let older = |_: &GenerateRequest| remaining_steps(&GenerateRequest::default());
    let longer = |request: &GenerateRequest| {
        let emitted_tokens = request.emitted.len() as u32;
        vec![ScriptStep::Say(GenerationEvent::Started { prompt_tokens: 8, emitted_tokens }), ScriptStep::Hang]
    };
    let refusing = |_: &GenerateRequest| {
        let failure =
            GenerationFailure { kind: FailureKind::InvalidRequest, message: "the context holds 1".into() };
        vec![ScriptStep::Say(GenerationEvent::Failed(failure))]
    };
    type EngineScript = Box<dyn Fn(&GenerateRequest) -> Vec<ScriptStep> + Send + Sync>;
    let cases: Vec<(&str, TableEdit, EngineScript, &str)> = vec![
        ("deleted", |table| table.deployments.clear(), Box::new(remaining_steps), "default/m was deleted"),
        ("edited", another, Box::new(remaining_steps), "changed from the Model small to large"),
        (
            "stopped",
            |table| {
                let one = deployment(table);
                one.endpoints.clear();
                one.state = DeploymentState::Halted("spec.replicas is 0".into());
            },
            Box::new(remaining_steps),
            "spec.replicas is 0",
        ),
        ("no group in time", none, Box::new(remaining_steps), "no group was ready again within 0 s"),
        ("an older engine", unchanged, Box::new(older), "the engine on node b counts 7 and 0"),
        (
            "another prompt",
            unchanged,
            Box::new(longer),
            "a prompt of 7 tokens and 2 emitted tokens, but the engine on node b counts 8 and 2",
        ),
        (
            "no context there",
            unchanged,
            Box::new(refusing),
            "no other engine can resume the response: the context holds 1",
        ),
    ];
    let count = cases.len();
    let lab = GatewayLab::start(DispatchLimits { hold_timeout: Duration::ZERO, ..limits() }).await;
    for (case, change, other, expected) in cases {
        let mut lost = lab.engine("a", interrupted_steps(2, &[ScriptStep::Hang]));
        let other: ScriptedEngine = lab.engine("b", other);
        lab.publish(&[("m", DeploymentState::Ready, &[&lost, &other])]);
        let mut response = lab.chat(json!({"stream": true})).send().await.unwrap();
        let read = read(&mut response, "Hello").await;
        lab.change(change);
        lost.kill();
        let events = transcript(&(read + &response.text().await.unwrap()));
        assert_eq!(text(&events), "Hello", "{case}");
        let error = &events.last().unwrap()["error"];
        assert_eq!(
            (&error["code"], &error["type"]),
            (&json!("engine_lost"), &json!("server_error")),
            "{case}"
        );
        assert!(error["message"].as_str().unwrap().contains(expected), "{case}: {error}");
    }
    let continued =
        format!("russet_gateway_request_continued_total{{model_name=\"m\",outcome=\"given_up\"}} {count}\n");
    wait_for_metric(&lab, &continued).await;
}
