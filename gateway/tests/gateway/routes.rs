//! Rules of ModelRoutes over HTTP: which requests go where, what the log says of it, and edits while streams run.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use russet_crds::ModelRoute;
use russet_gateway::request_log::RequestRecord;
use russet_gateway::routes::{DeploymentState, ModelAlias, RoutingTable};
use russet_rpc::engine as pb;
use russet_wire::event::FinishReason;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::harness::{
    GatewayLab, ScriptStep, ScriptedEngine, TEST_TIMEOUT, access_key, finished, hello, limits, started,
    token, wait_for_metric,
};

/// Asks for much.
const HARD: &str = "Prove that the algorithm terminates, and analyse its complexity step by step. The proof must not use \
    induction, only invariants; state at least two of them, exactly as they are needed, without the axiom of choice. \
    Why is the bound tight? Compare it with the trivial one: where do they differ?";

/// The names of a ModelRoute with this spec.
pub fn names(spec: Value) -> Vec<ModelAlias> {
    let object = json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": "ModelRoute",
        "metadata": {"name": "auto", "namespace": "default"}, "spec": spec,
    });
    let route: ModelRoute = serde_json::from_value(object).unwrap();
    RoutingTable::from_objects(&[], &[], &[route]).aliases.into_iter().collect()
}

fn to(deployment: &str) -> Value {
    json!([{"deploymentRef": {"name": deployment}}])
}

/// Publishes deployments of these names, each with its engine, and the names of a route.
fn publish(lab: &GatewayLab, engines: &[(&str, &ScriptedEngine)], spec: Value) {
    let deployments: Vec<_> =
        engines.iter().map(|(name, engine)| (*name, DeploymentState::Ready, vec![*engine])).collect();
    let deployments: Vec<(&str, DeploymentState, &[&ScriptedEngine])> =
        deployments.iter().map(|(name, state, engines)| (*name, state.clone(), engines.as_slice())).collect();
    lab.publish_with(&deployments, names(spec));
}

/// An engine that answers with a name.
fn named(lab: &GatewayLab, name: &'static str) -> ScriptedEngine {
    lab.engine(name, move |_| vec![started(), token(name), finished(FinishReason::Stop)])
}

/// Who answered.
async fn answer(request: reqwest::RequestBuilder) -> String {
    let response = request.send().await.unwrap();
    let (status, body) = (response.status(), response.json::<Value>().await.unwrap());
    assert_eq!(status, 200, "{body}");
    body["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

/// A route to `m` that keeps answers.
pub fn keeping() -> Value {
    json!({"models": ["auto"], "targets": to("m"), "cache": {"ttlSeconds": 60}})
}

fn says(text: &str) -> Value {
    json!({"model": "auto", "messages": [{"role": "user", "content": text}]})
}

#[tokio::test]
async fn each_request_goes_where_the_first_matching_rule_says() {
    let lab = GatewayLab::start(limits()).await;
    let engines = ["daily", "coder", "deep", "team", "kids"].map(|name| named(&lab, name));
    let [daily, coder, deep, team, kids] = &engines;
    let spec = json!({
        "models": ["auto"],
        "rules": [
            {"name": "kids", "match": {"keys": ["kid-*"]}, "targets": to("kids")},
            {"name": "team", "match": {"labels": {"team": "blue"}}, "targets": to("team")},
            {"name": "hard", "match": {"complexityAbovePercent": 50}, "targets": to("deep")},
            {"name": "large", "match": {"minPromptTokens": 1000}, "targets": to("deep")},
            {"name": "code", "match": {"tasks": ["Code"]}, "targets": to("coder")},
        ],
        "targets": to("daily"),
    });
    let all = [("daily", daily), ("coder", coder), ("deep", deep), ("team", team), ("kids", kids)];
    publish(&lab, &all, spec);
    let large = "word ".repeat(1000);
    let tools = json!([{"type": "function", "function": {"name": "apply_patch", "parameters": {}}}]);
    let with = |mut body: Value, name: &str, value: Value| {
        body[name] = value;
        body
    };
    for (headers, body, expected, complexity) in [
        (vec![], says("Hi"), "daily", "0.00"),
        (vec![], says("```\nx = 1\n```"), "coder", "0.15"),
        (vec![], with(says("Hi"), "tools", tools), "coder", "0.01"),
        (vec![], with(says("Hi"), "model", json!("auto:code")), "coder", "0.00"),
        (vec![], with(says("Hi"), "model", json!("auto:chat")), "daily", "0.00"),
        (vec![("x-russet-task", "code")], with(says("Hi"), "model", json!("auto:chat")), "coder", "0.00"),
        (vec![("x-russet-task", "chat")], says("```\nx\n```"), "daily", "0.15"),
        (vec![], says(HARD), "deep", "0.56"),
        (vec![], says(&large), "deep", "0.21"),
        (vec![("x-russet-labels", "team=blue")], says(HARD), "team", "0.56"),
        (vec![("x-russet-labels", "team=red")], says("Hi"), "daily", "0.00"),
    ] {
        let mut request = lab.chat(body.clone()).header("x-request-id", "r1");
        for (name, value) in &headers {
            request = request.header(*name, *value);
        }
        let response = request.send().await.unwrap();
        assert_eq!(response.headers()["x-russet-complexity"], complexity, "{body}");
        let found = response.json::<Value>().await.unwrap();
        assert_eq!(found["choices"][0]["message"]["content"], expected, "{headers:?} {body}");
    }
    // The log says which rules did not match, and why.
    let record = lab.client.get(lab.url("/requests/r1/why")).send().await.unwrap();
    let route = record.json::<RequestRecord>().await.unwrap().route.unwrap();
    let mismatches: Vec<_> =
        route.mismatches.iter().map(|one| (one.rule.as_str(), one.reason.as_str())).collect();
    let expected = [
        ("kids", "it has no key"),
        ("team", "its label team is \"red\", not \"blue\""),
        ("hard", "its complexity is 0 %, not above 50 %"),
        ("large", "its prompt has about 2 tokens, fewer than 1000"),
        ("code", "its task is chat, not code"),
    ];
    assert_eq!(
        (mismatches.as_slice(), route.rule, route.targets),
        (&expected[..], None, vec!["daily".into()])
    );
    assert_eq!(route.request.unwrap().task, "chat");

    // A key's own labels come before those of a header.
    let mut blue = access_key("anna", "s-anna", |_| {});
    blue.metadata.labels = Some(BTreeMap::from([("team".to_owned(), "blue".to_owned())]));
    lab.keys(&[blue, access_key("kid-1", "s-kid", |_| {})]);
    let by =
        |secret: &str| lab.network_chat(says("Hi")).bearer_auth(secret).header("x-russet-labels", "team=red");
    assert_eq!((answer(by("s-anna")).await, answer(by("s-kid")).await), ("team".into(), "kids".into()));
}

#[tokio::test]
async fn a_header_that_says_nothing_is_refused_by_its_name() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    for (header, value, words) in [
        ("x-russet-task", "poetry", "the header x-russet-task names no task; there are chat, code"),
        ("x-russet-labels", "team", ""),
        ("x-russet-labels", "team=very blue", "the header x-russet-labels is not like team=blue"),
    ] {
        let response = lab.chat(json!({})).header(header, value).send().await.unwrap();
        let (status, body) = (response.status().as_u16(), response.json::<Value>().await.unwrap());
        if words.is_empty() {
            assert_eq!(status, 200, "{body}");
            continue;
        }
        let message = body["error"]["message"].as_str().unwrap();
        assert!(status == 400 && message.contains(words), "{status}: {body}");
        assert_eq!(body["error"]["param"], header);
    }
}

#[tokio::test]
async fn an_edited_route_leads_elsewhere_and_breaks_no_stream() {
    let lab = GatewayLab::start(limits()).await;
    let go_on = CancellationToken::new();
    let waits = go_on.clone();
    let old = lab.engine("old", move |_| {
        vec![
            started(),
            token("be"),
            ScriptStep::Until(waits.clone()),
            token("gun"),
            finished(FinishReason::Stop),
        ]
    });
    let new = named(&lab, "new");
    let spec = |deployment: &str| {
        let rule = json!({"name": "all", "targets": to(deployment)});
        json!({"models": ["auto"], "rules": [rule], "targets": to("old")})
    };
    let both = [("old", &old), ("new", &new)];
    publish(&lab, &both, spec("old"));
    let body = json!({"model": "auto", "stream": true});
    let stream = lab.chat(body).send().await.unwrap();
    let edited = Instant::now();
    publish(&lab, &both, spec("new"));
    assert_eq!(answer(lab.chat(says("Hi"))).await, "new");
    println!("the edit acted within {:?}", edited.elapsed());
    go_on.cancel();
    let text = stream.text().await.unwrap();
    assert!(text.contains("\"be\"") && text.contains("\"gun\"") && text.ends_with("[DONE]\n\n"), "{text}");
    assert_eq!((old.requests(), new.requests()), (1, 1));
}

#[tokio::test]
async fn a_share_of_the_conversations_goes_to_each_target_and_stays() {
    let lab = GatewayLab::start(limits()).await;
    let (stable, canary) = (named(&lab, "stable"), named(&lab, "canary"));
    let targets = |canary: u32| {
        json!([
            {"deploymentRef": {"name": "stable"}, "weight": 100 - canary},
            {"deploymentRef": {"name": "canary"}, "weight": canary},
        ])
    };
    let both = [("stable", &stable), ("canary", &canary)];
    publish(&lab, &both, json!({"models": ["auto"], "targets": targets(25)}));
    let turns = |number: usize, more: &[&str]| {
        let first = format!("conversation {number}");
        let roles = ["user", "assistant"].into_iter().cycle();
        let texts = std::iter::once(first.as_str()).chain(more.iter().copied());
        let messages: Vec<Value> =
            roles.zip(texts).map(|(role, text)| json!({"role": role, "content": text})).collect();
        json!({"model": "auto", "messages": messages})
    };
    let mut to_canary = 0;
    for number in 0..200 {
        let first = answer(lab.chat(turns(number, &[]))).await;
        assert_eq!(answer(lab.chat(turns(number, &["Yes?", "Go on"]))).await, first, "{number}");
        to_canary += usize::from(first == "canary");
    }
    assert!((25..=75).contains(&to_canary), "{to_canary} of 200 conversations");
    // A session that its client names stays, whatever it says.
    let mut of_session = Vec::new();
    for number in 0..10 {
        of_session.push(answer(lab.chat(turns(number, &[])).header("x-session-id", "one")).await);
    }
    of_session.dedup();
    assert_eq!(of_session.len(), 1, "{of_session:?}");
    // Where the canary cannot answer, the other one does.
    let state = DeploymentState::Working("copying".into());
    let spec = names(json!({"models": ["auto"], "targets": targets(100)}));
    lab.publish_with(&[("stable", DeploymentState::Ready, &[&stable]), ("canary", state, &[])], spec);
    assert_eq!(answer(lab.chat(turns(1, &[]))).await, "stable");
}

#[tokio::test]
async fn the_fastest_target_is_the_one_that_is_free() {
    let lab = GatewayLab::start(limits()).await;
    let busy = lab.engine("busy", |request| match request.messages[0].content.as_str() {
        "wait" => vec![started(), ScriptStep::Hang],
        _ => vec![started(), token("busy"), finished(FinishReason::Stop)],
    });
    let free = named(&lab, "free");
    let targets = json!([{"deploymentRef": {"name": "first"}}, {"deploymentRef": {"name": "second"}}]);
    let spec = |pick: &str| json!({"models": ["auto"], "targets": targets, "pick": pick});
    let both = [("first", &busy), ("second", &free)];
    publish(&lab, &both, spec("InOrder"));
    let mut waiting = Vec::new();
    for _ in 0..4 {
        waiting.push(tokio::spawn(lab.chat(says("wait")).send()));
    }
    busy.running(4).await;
    assert_eq!(answer(lab.chat(says("Hi"))).await, "busy");
    publish(&lab, &both, spec("Fastest"));
    assert_eq!(answer(lab.chat(says("Hi")).header("x-request-id", "r1")).await, "free");
    let record = lab.client.get(lab.url("/requests/r1/why")).send().await.unwrap();
    let record: RequestRecord = record.json().await.unwrap();
    let candidates: Vec<_> =
        record.attempts[0].candidates.iter().map(|one| (&*one.node, one.score.is_some())).collect();
    assert_eq!(candidates, [("free", true), ("busy", true)]);
    waiting.iter().for_each(|request| request.abort());
}

/// Two deployments of one replica each, of two models, of which the fastest answers.
fn two_models(lab: &GatewayLab, engines: &[(&str, &ScriptedEngine)]) {
    let targets: Vec<Value> = engines.iter().map(|(name, _)| to(name)[0].clone()).collect();
    publish(lab, engines, json!({"models": ["auto"], "targets": targets, "pick": "Fastest"}));
    lab.change(|table| {
        for deployment in &mut table.deployments {
            deployment.endpoints[0].model = deployment.name.as_str().into();
        }
    });
}

#[tokio::test]
async fn a_conversation_stays_with_one_of_two_equal_models() {
    let lab = GatewayLab::start(limits()).await;
    let (one, two) = (named(&lab, "one"), named(&lab, "two"));
    two_models(&lab, &[("first", &one), ("second", &two)]);
    // A client that names no session, as Hermes Agent does not.
    let mut answered = BTreeMap::new();
    for conversation in 0..20 {
        let mut messages = vec![json!({"role": "user", "content": format!("Question {conversation}?")})];
        let by = answer(lab.chat(json!({"model": "auto", "messages": messages}))).await;
        for turn in 0..4 {
            messages.push(json!({"role": "assistant", "content": by}));
            messages.push(json!({"role": "user", "content": format!("And {turn}?")}));
            assert_eq!(answer(lab.chat(json!({"model": "auto", "messages": messages}))).await, by);
        }
        *answered.entry(by).or_insert(0) += 1;
    }
    assert_eq!(answered.len(), 2, "each model gets conversations: {answered:?}");
}

#[tokio::test]
async fn the_fastest_of_two_models_is_where_the_prompt_is_cached() {
    let lab = GatewayLab::start(limits()).await;
    let (one, two) = (named(&lab, "one"), named(&lab, "two"));
    let system = json!({"role": "system", "content": "Be brief. ".repeat(4000)});
    let ask = async |text: &str| {
        let messages = json!([system, {"role": "user", "content": text}]);
        answer(lab.chat(json!({"model": "auto", "messages": messages}))).await
    };
    two_models(&lab, &[("first", &one), ("second", &two)]);
    let (first, other) = if ask("Hi").await == "one" { (&one, (&two, "two")) } else { (&two, (&one, "one")) };
    let marks = first.marks.lock().unwrap()[0].clone();
    // The other one says that it has the beginning: whatever the conversation, that is quicker.
    let (cached, other) = other;
    cached.has_cached(&marks[..marks.len() - 1]);
    let followed = tokio::time::timeout(TEST_TIMEOUT, async { while ask("Hi").await != other {} });
    assert!(
        followed.await.is_ok(),
        "the gateway does not follow what deployments of one replica have cached"
    );
    for number in 0..20 {
        assert_eq!(ask(&format!("Question {number}?")).await, other);
    }
}

#[tokio::test]
async fn only_engines_whose_route_compares_them_are_followed() {
    let lab = GatewayLab::start(limits()).await;
    let (one, two) = (named(&lab, "one"), named(&lab, "two"));
    let both = [("first", &one), ("second", &two)];
    let targets = json!([to("first")[0], to("second")[0]]);
    let spec = |pick: &str| json!({"models": ["auto"], "targets": targets, "pick": pick});
    // They have other prompts.
    one.has_cached(&[pb::PrefixMark { key: 1, bytes: 1 }]);
    two.has_cached(&[pb::PrefixMark { key: 2, bytes: 1 }]);
    let unfollowed = one.followers();
    let chat = json!({"model": "auto", "messages": [{"role": "user", "content": "Be brief. ".repeat(4000)}]});
    let cached = async |id: &str| {
        answer(lab.chat(chat.clone()).header("x-request-id", id)).await;
        let record = lab.client.get(lab.url(&format!("/requests/{id}/why"))).send().await.unwrap();
        let record: RequestRecord = record.json().await.unwrap();
        record.attempts[0].candidates.iter().filter_map(|one| one.cached_tokens).max().unwrap_or(0)
    };
    let followed = async |count: usize| {
        let waited = tokio::time::timeout(TEST_TIMEOUT, async {
            while [&one, &two].iter().any(|engine| engine.followers() != count) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        assert!(waited.await.is_ok(), "{} and {} follow", one.followers(), two.followers());
    };
    publish(&lab, &both, spec("Fastest"));
    followed(unfollowed + 1).await;
    assert_eq!(cached("first").await, 0);
    let sent = |engine: &ScriptedEngine| engine.marks.lock().unwrap().first().cloned();
    let marks = sent(&one).or(sent(&two)).unwrap();
    one.has_cached(&marks[..marks.len() - 1]);
    let known = tokio::time::timeout(TEST_TIMEOUT, async { while cached("more").await == 0 {} });
    assert!(known.await.is_ok(), "the gateway does not follow what the engine has cached");
    // Where each is alone nobody compares them: the streams end, and what they told is forgotten.
    let alone = json!({"name": "second", "match": {"tasks": ["Embed"]}, "targets": to("second")});
    publish(&lab, &both, json!({"models": ["auto"], "targets": to("first"), "rules": [alone]}));
    followed(unfollowed).await;
    assert_eq!(cached("alone").await, 0);
    // In order a request with a deadline passes over the one that is too slow for it.
    publish(&lab, &both, spec("InOrder"));
    followed(unfollowed + 1).await;
}

#[tokio::test]
async fn vectors_and_counts_of_tokens_go_the_same_way() {
    let lab = GatewayLab::start(limits()).await;
    let [chat, code, vectors] = ["chat", "code", "vectors"].map(|name| named(&lab, name));
    let spec = json!({
        "models": ["auto"],
        "rules": [
            {"name": "vectors", "match": {"tasks": ["Embed"]}, "targets": to("vectors")},
            {"name": "code", "match": {"tasks": ["Code"]}, "targets": to("code")},
        ],
        "targets": to("chat"),
    });
    publish(&lab, &[("chat", &chat), ("code", &code), ("vectors", &vectors)], spec);
    let post = |path: &str, body: Value| lab.client.post(lab.url(path)).json(&body).send();
    let response = post("/v1/embeddings", json!({"model": "auto", "input": "text"})).await.unwrap();
    assert_eq!(response.status(), 200, "{:?}", response.text().await);
    assert!(chat.requests() == 0 && vectors.requests() > 0);
    let messages = json!([{"role": "user", "content": "```\nx = 1\n```"}]);
    let body = json!({"model": "auto", "messages": messages});
    assert_eq!(post("/v1/messages/count_tokens", body.clone()).await.unwrap().status(), 200);
    assert!(chat.requests() == 0 && code.requests() > 0);
    let whole = json!({"model": "auto", "messages": messages, "max_tokens": 9});
    for (path, body) in [("/v1/messages", whole), ("/api/chat", body)] {
        let response = post(path, body).await.unwrap();
        assert_eq!(response.headers()["x-russet-complexity"], "0.15");
        assert!(response.text().await.unwrap().contains("code"));
    }
}

#[tokio::test]
async fn a_route_keeps_answers_for_the_caller_that_had_them() {
    let lab = GatewayLab::start(limits()).await;
    let engine = named(&lab, "m");
    publish(&lab, &[("m", &engine)], keeping());
    let greedy = |more: Value| {
        let mut body = says("Hi");
        body["temperature"] = json!(0);
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        body
    };
    // What an engine is asked for, in order; all else is answered from the cache.
    let mut asked = 0;
    for (case, body, header, is_asked) in [
        ("the first", greedy(json!({})), None, true),
        ("the same", greedy(json!({})), None, false),
        ("another priority and seed", greedy(json!({"seed": 7, "priority": 3})), None, false),
        ("a new one", greedy(json!({})), Some("no-cache"), true),
        ("which nobody may have", greedy(json!({})), Some("no-store"), true),
        ("and the same again", greedy(json!({})), None, false),
        ("another length", greedy(json!({"max_tokens": 9})), None, true),
        ("any answer will do", says("Hi"), None, true),
        ("of any other", says("Hi"), None, true),
        ("the deployment's own name", greedy(json!({"model": "m"})), None, true),
    ] {
        let mut request = lab.chat(body).header("x-request-id", "r1");
        if let Some(value) = header {
            request = request.header("cache-control", value);
        }
        let response = request.send().await.unwrap().json::<Value>().await.unwrap();
        assert!(response["error"].is_null(), "{case}: {response}");
        assert_eq!(response["choices"][0]["message"]["content"], "m", "{case}");
        asked += usize::from(is_asked);
        assert_eq!(engine.requests(), asked, "{case}");
        let cached = &response["usage"]["prompt_tokens_details"]["cached_tokens"];
        assert_eq!(cached, if is_asked { 2 } else { 7 }, "{case}");
        let record = lab.client.get(lab.url("/requests/r1/why")).send().await.unwrap();
        let record: RequestRecord = record.json().await.unwrap();
        assert_eq!(record.route.is_some(), record.model == "auto", "{case}");
        assert_eq!(
            (record.cached_response_ms.is_none(), record.attempts.len()),
            (is_asked, usize::from(is_asked))
        );
    }
    // Streamed, and with a share of the probable tokens, of which the most probable one is taken.
    let body = greedy(json!({"stream": true, "top_p": 0.9}));
    let stream = lab.chat(body).send().await.unwrap().text().await.unwrap();
    assert!(stream.contains("\"content\":\"m\"") && stream.ends_with("[DONE]\n\n"), "{stream}");
    assert_eq!(engine.requests(), asked);
    // While the model is not there, the answer is.
    let names = names(keeping());
    lab.publish_with(&[("m", DeploymentState::Working("copying".into()), &[])], names);
    assert_eq!(answer(lab.chat(greedy(json!({})))).await, "m");
    let names = lab.metrics().await;
    assert!(names.contains("russet_gateway_response_cache_total{outcome=\"hit\"} 5\n"), "{names}");
}

#[tokio::test]
async fn callers_do_not_share_what_is_kept() {
    let lab = GatewayLab::start(limits()).await;
    let engine = named(&lab, "m");
    publish(&lab, &[("m", &engine)], keeping());
    lab.keys(&[access_key("anna", "s-anna", |_| {}), access_key("berta", "s-berta", |_| {})]);
    let mut greedy = says("Hi");
    greedy["temperature"] = json!(0);
    for (secret, asked) in [("s-anna", 1), ("s-anna", 1), ("s-berta", 2), ("s-berta", 2), ("s-anna", 2)] {
        answer(lab.network_chat(greedy.clone()).bearer_auth(secret)).await;
        assert_eq!(engine.requests(), asked, "{secret}");
    }
}

#[tokio::test]
async fn equal_requests_at_once_are_answered_by_one() {
    let lab = GatewayLab::start(limits()).await;
    let go_on = CancellationToken::new();
    let waits = go_on.clone();
    let engine = lab.engine("m", move |request| match request.messages[0].content.as_str() {
        "broken" => {
            vec![started(), ScriptStep::Until(waits.clone()), ScriptStep::Break(tonic::Code::Internal, "no")]
        }
        _ => vec![started(), token("m"), ScriptStep::Until(waits.clone()), finished(FinishReason::Stop)],
    });
    publish(&lab, &[("m", &engine)], keeping());
    let ask = |text: &str| {
        let mut body = says(text);
        body["temperature"] = json!(0);
        lab.chat(body)
    };
    let first = tokio::spawn(ask("Hi").send());
    engine.running(1).await;
    let others: Vec<_> = (0..20).map(|_| tokio::spawn(ask("Hi").send())).collect();
    // One of them is not willing to wait.
    let late = ask("Hi").header("x-request-timeout", "0.05").send().await.unwrap();
    let body = late.json::<Value>().await.unwrap();
    let message = body["error"]["message"].as_str().unwrap();
    assert!(message.contains("an equal request had no answer by then"), "{message}");
    // The client of the first leaves: one of the others goes on, and all have its answer.
    first.abort();
    engine.requested(2).await;
    go_on.cancel();
    for other in others {
        let body = other.await.unwrap().unwrap().json::<Value>().await.unwrap();
        assert_eq!(body["choices"][0]["message"]["content"], "m", "{body}");
    }
    assert_eq!(engine.requests(), 2);
}

#[tokio::test]
async fn the_next_of_several_models_takes_what_the_first_cannot() {
    let lab = GatewayLab::start(limits()).await;
    let [one, two] = ["one", "two"].map(|name| named(&lab, name));
    let working = DeploymentState::Working("copying".into());
    let halted = DeploymentState::Halted("stopped".into());
    let ready = || DeploymentState::Ready;
    lab.publish(&[
        ("one", ready(), &[&one]),
        ("two", ready(), &[&two]),
        ("late", working, &[]),
        ("off", halted, &[]),
    ]);
    let ask = |body: Value| lab.client.post(lab.url("/v1/chat/completions")).json(&body);
    let messages = json!([{"role": "user", "content": "Hi"}]);
    for (model, models, expected) in [
        (json!("one"), json!(["two"]), "one"),
        (json!("late"), json!(["two", "one"]), "two"),
        (json!("nix"), json!(["off", "one"]), "one"),
        (Value::Null, json!(["off", "two"]), "two"),
        (json!("two"), json!([]), "two"),
    ] {
        let body = json!({"model": model, "models": models, "messages": messages});
        assert_eq!(answer(ask(body)).await, expected, "{model} {models}");
    }
    for (model, models, status, words) in [
        (json!("nix"), json!(["gone"]), 404, "model `nix` does not exist"),
        (json!("one"), json!("two"), 400, "`models` must be a list of at most 16"),
        (json!("one"), json!([7]), 400, "`models` must have names"),
        (Value::Null, json!([]), 400, "`model` is missing"),
    ] {
        let response =
            ask(json!({"model": model, "models": models, "messages": messages})).send().await.unwrap();
        let (found, body) = (response.status().as_u16(), response.json::<Value>().await.unwrap());
        let message = body["error"]["message"].as_str().unwrap();
        assert!(found == status && message.contains(words), "{found}: {message}");
    }
}

#[tokio::test]
async fn a_rule_without_targets_sends_its_requests_nowhere_else() {
    let lab = GatewayLab::start(limits()).await;
    let daily = named(&lab, "daily");
    let spec = json!({
        "models": ["auto"],
        "rules": [{"name": "code", "match": {"tasks": ["Code"]}, "targets": to("gone")}],
        "targets": to("daily"),
    });
    publish(&lab, &[("daily", &daily)], spec);
    assert_eq!(answer(lab.chat(says("Hi"))).await, "daily");
    let response = lab.chat(says("```\nx\n```")).send().await.unwrap();
    let (status, body) = (response.status().as_u16(), response.json::<Value>().await.unwrap());
    let message = body["error"]["message"].as_str().unwrap();
    let expected = "a name of ModelRoute default/auto, but none of the rule code's targets exists: gone";
    assert!(status == 404 && message.contains(expected), "{status}: {message}");
    assert_eq!(daily.requests(), 1);
}

#[tokio::test]
async fn a_rule_says_who_waits_and_who_comes_first() {
    let lab = GatewayLab::start(limits()).await;
    let spec = json!({
        "models": ["auto"], "targets": to("m"),
        "rules": [{
            "name": "background", "match": {"labels": {"urgent": "no"}}, "targets": to("m"),
            "onUnavailable": "Fail", "maxPriority": -50,
        }],
    });
    let waking = DeploymentState::Working("it is scaled to zero".into());
    lab.publish_with(&[("m", waking, &[])], names(spec.clone()));
    let background = || lab.chat(says("later")).header("x-russet-labels", "urgent=no");
    let response = background().send().await.unwrap();
    assert_eq!(response.status(), 503, "the rule holds no request");
    let held = tokio::spawn(answer(lab.chat(says("now"))));
    wait_for_metric(&lab, "russet_gateway_num_requests_waiting{name=\"m\",namespace=\"default\"} 1\n").await;
    let engine = named(&lab, "m");
    publish(&lab, &[("m", &engine)], spec);
    assert_eq!(held.await.unwrap(), "m");
    assert_eq!(answer(background()).await, "m");
    let low =
        lab.chat(json!({"model": "auto", "messages": [{"role": "user", "content": "x"}], "priority": 80}));
    assert_eq!(answer(low.header("x-russet-labels", "urgent=no")).await, "m");
    let priorities: Vec<i32> =
        engine.received.lock().unwrap().iter().map(|request| request.priority).collect();
    assert_eq!(priorities, [0, -50, -80], "a request that asks for less keeps that");
}
