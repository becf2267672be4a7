//! Prompts that are told with their tokens: echoed completions and vLLM's `prompt_logprobs`, whole and streamed, over lost
//! engines, from the response cache, and of engines that do not know what they are asked for.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use russet_gateway::routes::DeploymentState;
use russet_rpc::engine::{GenerateRequest, raw_prompt::Prompt};
use russet_wire::event::{
    Delta, FailureKind, FinishReason, GenerationEvent, GenerationFailure, Logprobs, PromptLogprobs,
    PromptToken, TokenLogprob, Usage,
};
use serde_json::{Value, json};

use crate::harness::{GatewayLab, ScriptStep, ScriptedEngine, hello, limits};
use crate::routes::{keeping, names};

/// The log-probability of a token: one that has no short form.
fn logprob(id: u32) -> f32 {
    -0.1 - id as f32 / 3.0
}

fn number(logprob: f32) -> Value {
    Value::from(f64::from(logprob))
}

fn letter(id: u32) -> TokenLogprob {
    TokenLogprob { id, bytes: vec![id as u8], logprob: logprob(id) }
}

/// The tokens of a prompt, each a letter, as an engine tells them.
fn tokens(ids: &[u32], top: Option<u32>) -> Vec<PromptToken> {
    let of = |(at, id): (usize, &u32)| {
        let numbers = |top: u32| PromptLogprobs {
            logprob: logprob(*id),
            rank: 3,
            top: (u32::from(b'x')..).take(top as usize).map(letter).collect(),
        };
        PromptToken { id: *id, bytes: vec![*id as u8], logprobs: top.filter(|_| at > 0).map(numbers) }
    };
    ids.iter().enumerate().map(of).collect()
}

/// What the engine says to such a request, whose prompt is letters: the prompt in pieces of two tokens, then two tokens.
fn telling(request: &GenerateRequest) -> Vec<ScriptStep> {
    let ids: Vec<u32> = match request.raw_prompt.as_ref().and_then(|raw| raw.prompt.clone()) {
        Some(Prompt::Tokens(tokens)) => tokens.ids,
        Some(Prompt::Text(text)) => text.bytes().map(u32::from).collect(),
        None => b"hi".map(u32::from).to_vec(),
    };
    let emitted = request.emitted.len();
    let started =
        GenerationEvent::Started { prompt_tokens: ids.len() as u32, emitted_tokens: emitted as u32 };
    let mut events = vec![started];
    if emitted == 0 && (request.echo || request.prompt_logprobs.is_some()) {
        let expected_count = tokens(&ids, request.prompt_logprobs);
        events.extend(
            expected_count.chunks(2).map(|tokens| GenerationEvent::Prompt { tokens: tokens.to_vec() }),
        );
    }
    let most = request.max_tokens.unwrap_or(2).min(2);
    for id in [u32::from(b'o'), u32::from(b'k')].into_iter().take(most as usize).skip(emitted) {
        let logprobs = request.logprobs.map(|_| Logprobs { sampled: letter(id), top: vec![] });
        let delta = Delta {
            logprobs: logprobs.into_iter().collect(),
            ..Delta::text(char::from(id as u8).to_string())
        };
        events.push(GenerationEvent::Token { id, delta });
    }
    let usage = Usage { prompt_tokens: ids.len() as u32, completion_tokens: most, cached_tokens: 0 };
    events.push(GenerationEvent::Finished { reason: FinishReason::Length, usage });
    events.into_iter().map(ScriptStep::Say).collect()
}

async fn complete(lab: &GatewayLab, more: Value) -> (u16, Value) {
    let mut body = json!({"model": "m", "max_tokens": 2});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    let response = lab.client.post(lab.url("/v1/completions")).json(&body).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

/// The choices of the chunks of a stream, in order.
async fn streamed(lab: &GatewayLab, more: Value) -> Vec<Value> {
    let mut body = json!({"model": "m", "max_tokens": 2, "stream": true});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    let response = lab.client.post(lab.url("/v1/completions")).json(&body).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let text = response.text().await.unwrap();
    let data = text.split_terminator("\n\n").filter_map(|event| event.strip_prefix("data: "));
    let chunks =
        data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str::<Value>(data).unwrap());
    chunks.flat_map(|chunk| chunk["choices"].as_array().unwrap().clone()).collect()
}

/// The lists of a choice of `abc`, followed by `ok`, with one other token beside each of the prompt.
fn lists() -> Value {
    let of = |byte: u8| number(logprob(u32::from(byte)));
    json!({
        "tokens": ["a", "b", "c", "o", "k"],
        "token_logprobs": [null, of(b'b'), of(b'c'), of(b'o'), of(b'k')],
        "top_logprobs": [
            null, {"b": of(b'b'), "x": of(b'x')}, {"c": of(b'c'), "x": of(b'x')}, {"o": of(b'o')}, {"k": of(b'k')},
        ],
        "text_offset": [0, 1, 2, 3, 4],
    })
}

#[tokio::test]
async fn echoed_prompts_have_the_logprobs_of_their_tokens() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.engine("a", telling);
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    // Tokens and texts, with and without an answer, as an evaluation sends them.
    let prompts = json!([[97, 98, 99], "abc"]);
    let asked = json!({"prompt": prompts, "echo": true, "logprobs": 1, "temperature": 0, "seed": 1234});
    let (status, body) = complete(&lab, asked).await;
    assert_eq!(status, 200, "{body}");
    for choice in body["choices"].as_array().unwrap() {
        assert_eq!((&choice["text"], &choice["logprobs"]), (&"abcok".into(), &lists()), "{choice}");
        assert_eq!(choice["finish_reason"], "length");
        assert!(choice.get("prompt_logprobs").is_none());
    }
    assert_eq!(body["usage"]["prompt_tokens"], 6);
    let received = engine.received.lock().unwrap()[0].clone();
    assert_eq!((received.echo, received.prompt_logprobs, received.logprobs), (true, Some(1), Some(1)));
    // The prompt alone.
    let asked = json!({"prompt": [[97, 98, 99]], "echo": true, "logprobs": 1, "max_tokens": 0});
    let (status, body) = complete(&lab, asked).await;
    assert_eq!(status, 200, "{body}");
    let choice = &body["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&"abc".into(), &"length".into()));
    let all = lists();
    for (name, list) in all.as_object().unwrap() {
        assert_eq!(choice["logprobs"][name].as_array().unwrap()[..], list.as_array().unwrap()[..3], "{name}");
    }
    assert_eq!(body["usage"]["completion_tokens"], 0);
    // Tokens can be repeated without any number.
    let (_, body) = complete(&lab, json!({"prompt": [97, 98], "echo": true})).await;
    assert_eq!(
        (&body["choices"][0]["text"], &body["choices"][0]["logprobs"]),
        (&"abok".into(), &Value::Null)
    );
}

#[tokio::test]
async fn a_stream_tells_each_prompt_before_its_response() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.engine("a", telling);
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    let asked = json!({"prompt": [[97, 98, 99], [97, 98, 99]], "echo": true, "logprobs": 1});
    let chunks = streamed(&lab, asked).await;
    for choice in [0, 1] {
        let own: Vec<&Value> = chunks.iter().filter(|chunk| chunk["index"] == choice).collect();
        let texts: Vec<&str> = own.iter().map(|chunk| chunk["text"].as_str().unwrap()).collect();
        assert_eq!(texts, ["abc", "o", "k", ""]);
        for (name, list) in lists().as_object().unwrap() {
            let parts = own.iter().filter_map(|chunk| chunk["logprobs"][name].as_array());
            assert_eq!(Value::from(parts.flatten().cloned().collect::<Vec<_>>()), *list, "{name}");
        }
    }
}

#[tokio::test]
async fn a_prompt_comes_once_whenever_its_engine_is_lost() {
    let lab = GatewayLab::start(limits()).await;
    let sound = lab.engine("b", telling);
    lab.publish(&[("m", DeploymentState::Ready, &[&sound])]);
    let asked = json!({"prompt": [97, 98, 99], "echo": true, "logprobs": 1});
    let (one_stream, one_whole) =
        (streamed(&lab, asked.clone()).await, complete(&lab, asked.clone()).await.1);
    let failure = GenerationFailure { kind: FailureKind::Unavailable, message: "rank 1 died".into() };
    for end in [vec![ScriptStep::Say(GenerationEvent::Failed(failure))], vec![]] {
        // After the start, either piece of the prompt, and either token.
        for cut in 0..=5 {
            let end = end.clone();
            let steps = move |request: &GenerateRequest| {
                telling(request).into_iter().take(cut).chain(end.clone()).collect()
            };
            let lost = lab.engine("a", steps);
            lab.publish(&[("m", DeploymentState::Ready, &[&lost, &sound])]);
            assert_eq!(streamed(&lab, asked.clone()).await, one_stream, "after {cut} events");
            let whole = complete(&lab, asked.clone()).await.1;
            assert_eq!(whole["choices"], one_whole["choices"], "after {cut} events");
        }
    }
}

#[tokio::test]
async fn an_engine_that_tells_no_prompt_is_no_answer() {
    let lab = GatewayLab::start(limits()).await;
    // Of an older release, which does not know the fields; and one that told a part of it.
    let cut = |request: &GenerateRequest| telling(request).into_iter().enumerate().filter(|(at, _)| *at != 2);
    let (older, cutting) = (
        lab.engine("a", |_| hello()),
        lab.engine("b", move |request| cut(request).map(|(_, step)| step).collect()),
    );
    for (engine, expected_count) in [(&older, "0 of the 7"), (&cutting, "2 of the 3")] {
        lab.publish(&[("m", DeploymentState::Ready, &[engine])]);
        for asked in [json!({"echo": true, "logprobs": 0}), json!({"prompt_logprobs": 1})] {
            let mut asked = asked;
            asked["prompt"] = json!([97, 98, 99]);
            let (status, body) = complete(&lab, asked).await;
            assert_eq!(status, 503, "{body}");
            let message = body["error"]["message"].as_str().unwrap();
            assert!(message.contains(expected_count) && message.contains("update Russet on"), "{message}");
        }
        // What asks for no prompt is answered.
        assert_eq!(complete(&lab, json!({"prompt": [97, 98, 99]})).await.0, 200);
    }
}

/// An engine of the release before: it knows no field that asks for the prompt, and no request without an answer.
fn older(request: &GenerateRequest) -> Vec<ScriptStep> {
    if request.max_tokens == Some(0) {
        let message = "max_tokens is 0; ask for at least 1".to_owned();
        let failure = GenerationFailure { kind: FailureKind::InvalidRequest, message };
        return vec![ScriptStep::Say(GenerationEvent::Failed(failure))];
    }
    telling(&GenerateRequest { echo: false, prompt_logprobs: None, ..request.clone() })
}

#[tokio::test]
async fn prompts_are_reported_by_the_replicas_that_can() {
    let lab = GatewayLab::start(limits()).await;
    let [one, two] = ["a", "b"].map(|node| lab.engine(node, older));
    let newer = lab.engine("c", telling);
    lab.publish(&[("m", DeploymentState::Ready, &[&one, &two, &newer])]);
    // By turns, so that each is the first: a rolling update has both.
    for _ in 0..3 {
        for max_tokens in [0, 2] {
            let asked =
                json!({"prompt": [97, 98, 99], "echo": true, "logprobs": 1, "max_tokens": max_tokens});
            let (status, body) = complete(&lab, asked).await;
            assert_eq!(status, 200, "{body}");
            let expected = if max_tokens == 0 { "abc" } else { "abcok" };
            assert_eq!(body["choices"][0]["text"], expected);
        }
    }
    assert_eq!(newer.requests(), 6);
    assert!(one.requests() > 0 && two.requests() > 0, "{} {}", one.requests(), two.requests());
    // None of them can.
    lab.publish(&[("m", DeploymentState::Ready, &[&one, &two])]);
    for max_tokens in [0, 2] {
        let asked = json!({"prompt": [97, 98, 99], "echo": true, "logprobs": 1, "max_tokens": max_tokens});
        let (status, body) = complete(&lab, asked).await;
        let message = body["error"]["message"].as_str().unwrap();
        assert_eq!((status, &body["error"]["code"]), (503, &json!("model_not_ready")), "{body}");
        assert!(message.contains("no replica of model `m` can answer"), "{message}");
        assert!(message.contains("update Russet on a, b,"), "{message}");
    }
    // An engine that is full may know it: the client may come again.
    let full = AtomicUsize::new(0);
    let busy = lab.engine("d", move |request| match full.fetch_add(1, Ordering::Relaxed) {
        0 => {
            let failure = GenerationFailure { kind: FailureKind::Overloaded, message: "full".into() };
            vec![ScriptStep::Say(GenerationEvent::Failed(failure))]
        }
        _ => telling(request),
    });
    lab.publish(&[("m", DeploymentState::Ready, &[&one, &busy])]);
    let asked = json!({"prompt": [97, 98, 99], "echo": true, "logprobs": 1});
    for expected in [429, 200] {
        let (status, body) = complete(&lab, asked.clone()).await;
        assert_eq!(status, expected, "{body}");
    }
}

#[tokio::test]
async fn a_deployment_that_loads_may_report_the_prompt() {
    let lab = GatewayLab::start(limits()).await;
    let (old, new) = (lab.engine("a", older), lab.engine("b", telling));
    let target = |name: &str| json!({"deploymentRef": {"name": name}});
    let spec = json!({"models": ["m"], "targets": [target("old"), target("new")]});
    let publish = |state, engines: &[&ScriptedEngine]| {
        lab.publish_with(
            &[("old", DeploymentState::Ready, &[&old]), ("new", state, engines)],
            names(spec.clone()),
        );
    };
    publish(DeploymentState::Working("it loads".into()), &[]);
    let loads = async {
        while old.requests() == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        publish(DeploymentState::Ready, &[&new]);
    };
    let asked = json!({"prompt": [97, 98, 99], "echo": true, "logprobs": 1});
    let ((status, body), ()) = tokio::join!(complete(&lab, asked.clone()), loads);
    assert_eq!((status, &body["choices"][0]["text"]), (200, &json!("abcok")), "{body}");
    // One that will not come is waited for by nobody.
    publish(DeploymentState::Halted("no node fits".into()), &[]);
    let (status, body) = complete(&lab, asked).await;
    assert_eq!((status, &body["error"]["code"]), (503, &json!("model_not_ready")), "{body}");
}

#[tokio::test]
async fn vllms_prompt_logprobs_are_of_choices_and_of_chats() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.engine("a", telling);
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    let place = |byte: u8, rank: u32| {
        let logprob = number(logprob(u32::from(byte)));
        json!({"logprob": logprob, "rank": rank, "decoded_token": char::from(byte).to_string()})
    };
    let (status, body) = complete(&lab, json!({"prompt": "ab", "prompt_logprobs": 2})).await;
    assert_eq!(status, 200, "{body}");
    let expected = json!([null, {"98": place(b'b', 3), "120": place(b'x', 1), "121": place(b'y', 2)}]);
    assert_eq!(body["choices"][0]["prompt_logprobs"], expected);
    assert_eq!((&body["choices"][0]["text"], &body["choices"][0]["logprobs"]), (&"ok".into(), &Value::Null));
    let response = lab.chat(json!({"prompt_logprobs": 0, "max_tokens": 2})).send().await.unwrap();
    let body: Value = response.json().await.unwrap();
    assert_eq!(body["prompt_logprobs"], json!([null, {"105": place(b'i', 3)}]), "{body}");
    assert_eq!(body["choices"].as_array().unwrap().len(), 1);
    assert!(
        lab.chat(json!({}))
            .send()
            .await
            .unwrap()
            .json::<Value>()
            .await
            .unwrap()
            .get("prompt_logprobs")
            .is_none()
    );
    for (path, asked, param) in [
        ("/v1/chat/completions", json!({"prompt_logprobs": 1, "stream": true}), "prompt_logprobs"),
        ("/v1/completions", json!({"prompt_logprobs": -1}), "prompt_logprobs"),
        ("/v1/completions", json!({"echo": true, "logprobs": 20, "prompt": vec![97; 13_000]}), "echo"),
        ("/v1/completions", json!({"max_tokens": 0}), "max_tokens"),
    ] {
        let mut body = json!({"model": "m"});
        let default = if path.contains("chat") { "messages" } else { "prompt" };
        body[default] =
            if path.contains("chat") { json!([{"role": "user", "content": "hi"}]) } else { json!("ab") };
        for (name, value) in asked.as_object().unwrap() {
            body[name] = value.clone();
        }
        let response = lab.client.post(lab.url(path)).json(&body).send().await.unwrap();
        assert_eq!(response.status(), 400, "{asked}");
        let error: Value = response.json().await.unwrap();
        assert_eq!(error["error"]["param"], param, "{error}");
    }
}

#[tokio::test]
async fn a_kept_answer_has_its_prompt() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.engine("a", telling);
    lab.publish_with(&[("m", DeploymentState::Ready, &[&engine])], names(keeping()));
    let asked = |logprobs: u32| json!({"model": "auto", "prompt": [97, 98, 99], "echo": true, "logprobs": logprobs, "temperature": 0});
    let first = complete(&lab, asked(1)).await.1;
    assert_eq!(first["choices"][0]["logprobs"], lists(), "{first}");
    let again = complete(&lab, asked(1)).await.1;
    assert_eq!(again["choices"], first["choices"]);
    assert_eq!(engine.requests(), 1, "it was kept");
    complete(&lab, asked(0)).await;
    assert_eq!(engine.requests(), 2, "another number of tokens is another answer");
}
