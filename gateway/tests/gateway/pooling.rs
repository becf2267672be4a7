//! Embeddings and reranking: their bodies, keys, retries and errors.

use russet_gateway::routes::DeploymentState;
use russet_wire::event::{FailureKind, GenerationEvent, GenerationFailure};
use serde_json::{Value, json};

use crate::harness::{GatewayLab, ScriptStep, access_key, limits};

async fn sent(lab: &GatewayLab, path: &str, body: Value) -> (u16, Value) {
    let response = lab.client.post(lab.url(path)).json(&body).send().await.unwrap();
    let status = response.status().as_u16();
    (status, response.json().await.unwrap())
}

fn fail(kind: FailureKind, message: &str) -> Vec<ScriptStep> {
    vec![ScriptStep::Say(GenerationEvent::Failed(GenerationFailure { kind, message: message.into() }))]
}

#[tokio::test]
async fn vectors_come_as_floats_or_in_base64_in_order() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(vec![]);
    let input = json!({"model": "m", "input": ["a", "bcd"], "user": "x"});
    let response = lab.client.post(lab.url("/v1/embeddings")).json(&input).send().await.unwrap();
    assert_eq!(response.headers()["x-russet-ignored-parameters"], "user");
    assert_eq!(response.headers().get("x-request-id").map(|id| id.is_empty()), Some(false));
    let body: Value = response.json().await.unwrap();
    let vector = |index: usize, number: f32| json!({"object": "embedding", "index": index, "embedding": [number, number, number]});
    assert_eq!(
        body,
        json!({"object": "list", "data": [vector(0, 1.0), vector(1, 3.0)], "model": "m",
               "usage": {"prompt_tokens": 4, "total_tokens": 4}})
    );
    let base64 = json!({"model": "m", "input": [[5, 6], [7]], "encoding_format": "base64", "dimensions": 1});
    let (status, body) = sent(&lab, "/v1/embeddings", base64).await;
    // 2.0 and 1.0, little-endian.
    assert_eq!((status, &body["data"][0]["embedding"]), (200, &json!("AAAAQA==")), "{body}");
    assert_eq!(body["data"][1]["embedding"], "AACAPw==");
}

#[tokio::test]
async fn documents_come_back_best_first() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(vec![]);
    let body = json!({"model": "m", "query": "q", "documents": ["aa", {"text": "b"}, "cccc"], "top_n": 2});
    for path in ["/v1/rerank", "/v2/rerank", "/rerank"] {
        let (status, answer) = sent(&lab, path, body.clone()).await;
        assert_eq!(status, 200, "{path}: {answer}");
        let found: Vec<(u64, &str)> = answer["results"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| (one["index"].as_u64().unwrap(), one["document"]["text"].as_str().unwrap()))
            .collect();
        assert_eq!(found, [(2, "cccc"), (0, "aa")]);
        assert_eq!(answer["usage"], json!({"prompt_tokens": 7, "total_tokens": 7}));
        assert!(answer["id"].as_str().unwrap().starts_with("rerank-") && answer["model"] == "m", "{answer}");
    }
    let mut short = body;
    short["return_documents"] = json!(false);
    let (_, answer) = sent(&lab, "/v1/rerank", short).await;
    assert_eq!(answer["results"][0]["document"], Value::Null, "{answer}");
}

#[tokio::test]
async fn wrong_requests_name_their_field_and_reach_no_engine() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(vec![]);
    for (path, body, status, param) in [
        ("/v1/embeddings", json!({"input": "a"}), 400, "model"),
        ("/v1/embeddings", json!({"model": "m"}), 400, "input"),
        ("/v1/embeddings", json!({"model": "m", "input": ""}), 400, "input"),
        (
            "/v1/embeddings",
            json!({"model": "m", "input": "a", "encoding_format": "int8"}),
            400,
            "encoding_format",
        ),
        ("/v1/embeddings", json!({"model": "m", "input": "a", "dimensions": 0}), 400, "dimensions"),
        ("/v1/embeddings", json!({"model": "m", "input": "a", "task": "x"}), 400, "task"),
        ("/v1/embeddings", json!({"model": "nix", "input": "a"}), 404, "model"),
        ("/v1/rerank", json!({"model": "m", "documents": ["a"]}), 400, "query"),
        ("/v1/rerank", json!({"model": "m", "query": "q", "documents": []}), 400, "documents"),
        ("/v1/rerank", json!({"model": "m", "query": "q", "documents": [{"title": "a"}]}), 400, "documents"),
        ("/v1/rerank", json!({"model": "m", "query": "q", "documents": ["a"], "top_n": 0}), 400, "top_n"),
        (
            "/rerank",
            json!({"model": "m", "query": "q", "documents": ["a"], "rank_fields": ["a"]}),
            400,
            "rank_fields",
        ),
    ] {
        let (got, answer) = sent(&lab, path, body.clone()).await;
        assert_eq!(
            (got, answer["error"]["param"].as_str()),
            (status, Some(param)),
            "{path} {body}: {answer}"
        );
    }
    assert_eq!(engine.requests(), 0);
}

#[tokio::test]
async fn failures_of_engines_have_their_status_and_are_retried() {
    let lab = GatewayLab::start(limits()).await;
    let refuse = lab.engine("a", |request| match request.messages[0].content.as_str() {
        "long" => fail(FailureKind::ContextLengthExceeded, "text 0 has 9 tokens"),
        "chat" => fail(FailureKind::InvalidRequest, "the model generates text"),
        _ => fail(FailureKind::Unavailable, "this engine is stopping"),
    });
    let other = lab.engine("b", |_| vec![]);
    lab.publish(&[("m", DeploymentState::Ready, &[&refuse])]);
    let embed = |input: &str| json!({"model": "m", "input": input});
    let (status, answer) = sent(&lab, "/v1/embeddings", embed("long")).await;
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("context_length_exceeded")), "{answer}");
    assert_eq!(answer["error"]["param"], "input");
    let (status, answer) = sent(&lab, "/v1/embeddings", embed("chat")).await;
    assert_eq!((status, &answer["error"]["message"]), (400, &json!("the model generates text")), "{answer}");
    // One that stops is not the end of the request.
    lab.publish(&[("m", DeploymentState::Ready, &[&refuse, &other])]);
    let (status, answer) = sent(&lab, "/v1/embeddings", embed("anything")).await;
    assert_eq!((status, other.requests()), (200, 1), "{answer}");
    let rerank = json!({"model": "m", "query": "q", "documents": ["a"]});
    assert_eq!(sent(&lab, "/v1/rerank", rerank).await.0, 200);
    assert_eq!(other.requests(), 2);
}

#[tokio::test]
async fn keys_and_their_quotas_hold_for_vectors_too() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(vec![]);
    lab.keys(&[access_key("one", "s-one", |spec| spec.models = vec!["other".into()])]);
    let send = |secret: &'static str| {
        let body = json!({"model": "m", "input": "a"});
        lab.client.post(lab.url("/v1/embeddings")).bearer_auth(secret).json(&body).send()
    };
    assert_eq!(send("s-two").await.unwrap().status(), 401);
    assert_eq!(send("s-one").await.unwrap().status(), 403);
    lab.keys(&[access_key("one", "s-one", |_| {})]);
    assert_eq!(send("s-one").await.unwrap().status(), 200);
}

#[tokio::test]
async fn client_that_leaves_cancels_the_call() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(vec![ScriptStep::Hang]);
    let body = json!({"model": "m", "input": "a"});
    let waiting = tokio::spawn(lab.client.post(lab.url("/v1/embeddings")).json(&body).send());
    engine.running(1).await;
    waiting.abort();
    engine.running(0).await;
    assert_eq!(engine.requests(), 1);
}
