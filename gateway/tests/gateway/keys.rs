//! Authentication by key, the models a key allows, and quotas.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use russet_crds::{AccessKey, KeyState};
use russet_gateway::routes::{DeploymentState, ModelAlias, RoutePolicy};
use serde_json::{Value, json};

use crate::harness::{GatewayLab, access_key, hello, limits};

/// Status, `type`, `code` and `param` of an error.
async fn error(response: reqwest::Response) -> (u16, Value, Value, Value) {
    let status = response.status().as_u16();
    let body: Value = response.json().await.unwrap();
    let error = &body["error"];
    assert!(!error["message"].as_str().unwrap().is_empty(), "{body}");
    (status, error["type"].clone(), error["code"].clone(), error["param"].clone())
}

#[tokio::test]
async fn loopback_is_open_until_a_key_exists_and_the_network_never_is() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    assert_eq!(lab.chat(json!({})).send().await.unwrap().status(), 200);
    assert_eq!(lab.network_chat(json!({})).send().await.unwrap().status(), 401);
    assert_eq!(lab.network_chat(json!({})).bearer_auth("any").send().await.unwrap().status(), 401);

    let key = access_key("one", "s-one", |_| {});
    lab.keys(std::slice::from_ref(&key));
    for chat in [GatewayLab::chat, GatewayLab::network_chat] {
        let unauthorized = (401, json!("invalid_request_error"), json!("invalid_api_key"), Value::Null);
        let response = chat(&lab, json!({})).send().await.unwrap();
        assert_eq!(response.headers()["www-authenticate"], "Bearer");
        assert_eq!(error(response).await, unauthorized);
        assert_eq!(
            error(chat(&lab, json!({})).bearer_auth("s-two").send().await.unwrap()).await,
            unauthorized
        );
        assert_eq!(chat(&lab, json!({})).bearer_auth("s-one").send().await.unwrap().status(), 200);
        assert_eq!(chat(&lab, json!({})).header("x-api-key", "s-one").send().await.unwrap().status(), 200);
    }
    // If the only key is disabled, every request is rejected, even from this machine.
    let mut disabled = key.clone();
    disabled.spec.state = KeyState::Disabled;
    lab.keys(&[disabled]);
    for secret in ["", "s-one"] {
        assert_eq!(lab.chat(json!({})).bearer_auth(secret).send().await.unwrap().status(), 401);
    }
    // Deleting it opens loopback again, and nothing else.
    lab.keys(&[]);
    assert_eq!(lab.chat(json!({})).send().await.unwrap().status(), 200);
    assert_eq!(lab.network_chat(json!({})).bearer_auth("s-one").send().await.unwrap().status(), 401);
    assert_eq!(engine.requests(), 6);
}

#[tokio::test]
async fn unknown_expired_and_disabled_keys_are_refused_alike() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    lab.keys(&[
        access_key("old", "s-old", |spec| spec.expires_at = Some(Time(jiff::Timestamp::UNIX_EPOCH))),
        access_key("off", "s-off", |spec| spec.state = KeyState::Disabled),
    ]);
    let mut responses = Vec::new();
    for secret in ["s-none", "s-old", "s-off"] {
        let response = lab.network_chat(json!({})).bearer_auth(secret).send().await.unwrap();
        let mut headers: Vec<String> = response.headers().keys().map(ToString::to_string).collect();
        headers.sort();
        responses.push((response.status(), headers, response.text().await.unwrap()));
    }
    assert!(responses.iter().all(|response| *response == responses[0]), "{responses:?}");
    assert_eq!(responses[0].0, 401);
    assert_eq!(engine.requests(), 0);
}

#[tokio::test]
async fn requests_are_rejected_until_the_keys_are_loaded() {
    let lab = GatewayLab::start(russet_gateway::dispatch::DispatchLimits {
        sync_timeout: std::time::Duration::from_millis(50),
        ..limits()
    })
    .await;
    let engine = lab.only_engine(hello());
    lab.clear_keys();
    for response in [
        lab.chat(json!({})).send().await.unwrap(),
        lab.chat(json!({})).bearer_auth("s-one").send().await.unwrap(),
        lab.network_chat(json!({})).bearer_auth("s-one").send().await.unwrap(),
        lab.client.get(lab.url("/v1/models")).send().await.unwrap(),
    ] {
        assert!(response.headers().contains_key("retry-after"));
        assert_eq!(error(response).await.0, 503);
    }
    assert_eq!(engine.requests(), 0);
    // Supervisors send no key.
    for url in [lab.url("/healthz"), lab.network_url("/healthz"), lab.network_url("/readyz")] {
        assert_eq!(lab.client.get(url).send().await.unwrap().status(), 200);
    }
}

#[tokio::test]
async fn a_key_opens_its_models_and_sees_no_others() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.engine("a", |_| hello());
    let name = ModelAlias {
        pattern: "gpt-4o".into(),
        route: "default/usual".into(),
        namespace: "default".into(),
        policy: Arc::new(RoutePolicy::to(["large"])),
        cache_ttl: None,
    };
    let ready = || DeploymentState::Ready;
    lab.publish_with(&[("m", ready(), &[&engine]), ("large", ready(), &[&engine])], vec![name]);
    let elsewhere = |mut key: AccessKey| {
        key.metadata.namespace = Some("lab".into());
        key
    };
    lab.keys(&[
        access_key("all", "s-all", |_| {}),
        access_key("some", "s-some", |spec| spec.models = vec!["gpt-*".into()]),
        elsewhere(access_key("other", "s-other", |_| {})),
    ]);
    for (secret, expected) in
        [("s-all", vec!["m", "large", "gpt-4o"]), ("s-some", vec!["gpt-4o"]), ("s-other", vec![])]
    {
        let list = lab.client.get(lab.network_url("/v1/models")).bearer_auth(secret);
        let list: Value = list.send().await.unwrap().json().await.unwrap();
        let ids: Vec<&str> =
            list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
        assert_eq!(ids, expected, "{secret}");
    }
    let model = |model: &str| (json!("invalid_request_error"), json!("model_not_found"), json!(model));
    for (secret, name, status) in [
        ("s-all", "m", 200),
        ("s-all", "default/m", 200),
        ("s-all", "nix", 404),
        ("s-some", "gpt-4o", 200),
        ("s-some", "large", 403),
        ("s-some", "nix", 403),
        ("s-some", "gpt-5", 404),
        ("s-other", "m", 404),
        ("s-other", "default/m", 404),
    ] {
        let response = lab.network_chat(json!({"model": name})).bearer_auth(secret).send().await.unwrap();
        if status == 200 {
            assert_eq!(response.status(), 200, "{secret} {name}");
        } else {
            let (kind, code, param) = model("model");
            assert_eq!(error(response).await, (status, kind, code, param), "{secret} {name}");
        }
        let one = lab.client.get(lab.network_url(&format!("/v1/models/{name}"))).bearer_auth(secret);
        assert_eq!(one.send().await.unwrap().status(), status, "{secret} {name}");
    }
    // The error does not list models that the key does not allow.
    let response = lab.network_chat(json!({"model": "nix"})).bearer_auth("s-other").send().await.unwrap();
    let text = response.text().await.unwrap();
    assert!(!text.contains("large") && !text.contains("gpt-4o"), "{text}");
}

#[tokio::test]
async fn a_quota_shows_itself_and_ends_in_429() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    let key = |per_minute| access_key("one", "s-one", |spec| spec.requests_per_minute = per_minute);
    lab.keys(&[key(Some(2)), access_key("two", "s-two", |_| {})]);
    let ask = |secret: &'static str| lab.chat(json!({})).bearer_auth(secret).send();
    for remaining in ["1", "0"] {
        let response = ask("s-one").await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["x-ratelimit-limit-requests"], "2");
        assert_eq!(response.headers()["x-ratelimit-remaining-requests"], remaining);
        assert!(!response.headers()["x-ratelimit-reset-requests"].is_empty());
    }
    let response = ask("s-one").await.unwrap();
    let header = |name: &str| response.headers()[name].to_str().unwrap().to_owned();
    assert_eq!(header("x-ratelimit-remaining-requests"), "0");
    let (seconds, ms): (u64, u64) =
        (header("retry-after").parse().unwrap(), header("retry-after-ms").parse().unwrap());
    assert!(ms > 0 && seconds == ms.div_ceil(1000) && seconds <= 30, "{seconds} s, {ms} ms");
    assert_eq!(error(response).await, (429, json!("requests"), json!("rate_limit_exceeded"), Value::Null));
    // Other keys are unaffected, lists cost nothing, and a larger quota applies at once.
    let other = ask("s-two").await.unwrap();
    assert!(other.status() == 200 && !other.headers().contains_key("x-ratelimit-limit-requests"));
    let list = lab.client.get(lab.url("/v1/models")).bearer_auth("s-one");
    assert_eq!(list.send().await.unwrap().status(), 200);
    lab.keys(&[key(None)]);
    assert_eq!(ask("s-one").await.unwrap().status(), 200);
    assert_eq!(engine.requests(), 4);
}

#[tokio::test]
async fn a_key_is_counted_by_name_and_its_secret_is_shown_nowhere() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    lab.keys(&[access_key("one", "s-one-secret", |spec| spec.requests_per_minute = Some(1))]);
    let mut texts = Vec::new();
    for secret in ["s-one-secret", "s-one-secret", "s-wrong-secret"] {
        let response = lab.chat(json!({})).bearer_auth(secret).send().await.unwrap();
        texts.push(format!("{:?}", response.headers()));
        texts.push(response.text().await.unwrap());
    }
    let metrics = lab.metrics().await;
    for line in [
        "russet_gateway_key_request_total{key=\"default/one\",outcome=\"taken\"} 1",
        "russet_gateway_key_request_total{key=\"default/one\",outcome=\"refused\"} 1",
        "russet_gateway_request_error_total{error_code=\"invalid_api_key\",model_name=\"unknown\"} 1",
        "russet_gateway_request_error_total{error_code=\"quota_exceeded\",model_name=\"unknown\"} 1",
    ] {
        assert!(metrics.lines().any(|one| one == line), "{line} is not in\n{metrics}");
    }
    texts.push(metrics);
    for text in texts {
        assert!(!text.contains("secret"), "{text}");
    }
    // Other machines see no metrics, with a key or without.
    for secret in ["", "s-one-secret"] {
        let metrics = lab.client.get(lab.network_url("/metrics")).bearer_auth(secret);
        assert_eq!(metrics.send().await.unwrap().status(), 404);
    }
}

#[tokio::test]
async fn prefixes_are_shared_within_a_namespace_alone() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    let salt_of = |secret: Option<&'static str>, more: Value| {
        let request = lab.chat(more);
        let request = match secret {
            Some(secret) => request.bearer_auth(secret),
            None => request,
        };
        let received = engine.received.clone();
        async move {
            assert_eq!(request.send().await.unwrap().status(), 200);
            received.lock().unwrap().pop().unwrap().cache_salt
        }
    };
    assert_eq!(salt_of(None, json!({})).await, "", "keyless callers are one");
    assert_eq!(salt_of(None, json!({"cache_salt": "mine"})).await, "/mine");
    let mut elsewhere = access_key("elsewhere", "s-lab", |_| {});
    elsewhere.metadata.namespace = Some("lab".into());
    lab.keys(&[access_key("one", "s-one", |_| {}), access_key("two", "s-two", |_| {}), elsewhere]);
    lab.change(|table| {
        let twin = table.deployments[0].clone();
        table.deployments.push(russet_gateway::routes::Deployment { namespace: "lab".into(), ..twin });
    });
    let own = salt_of(Some("s-one"), json!({})).await;
    assert_eq!(salt_of(Some("s-two"), json!({})).await, own, "keys of a namespace are one");
    let others = [
        salt_of(Some("s-lab"), json!({})).await,
        salt_of(Some("s-one"), json!({"cache_salt": "mine"})).await,
        salt_of(Some("s-lab"), json!({"cache_salt": "mine"})).await,
        String::new(),
    ];
    let distinct: std::collections::BTreeSet<&String> = others.iter().chain([&own]).collect();
    assert_eq!(distinct.len(), others.len() + 1, "{own} {others:?}");
}

#[tokio::test]
async fn a_key_opens_only_from_the_addresses_it_names() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.engine("a", |_| hello());
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    lab.keys(&[
        access_key("desk", "s-desk", |spec| {
            spec.source_ranges = vec!["127.0.0.2/31".into(), "fd00::/8".into()]
        }),
        access_key("wrong", "s-wrong", |spec| spec.source_ranges = vec!["127.0.0.0/99".into()]),
        access_key("any", "s-any", |_| {}),
    ]);
    for (address, secret, expected) in [
        ([127, 0, 0, 1], "s-desk", 401),
        ([127, 0, 0, 2], "s-desk", 200),
        ([127, 0, 0, 3], "s-desk", 200),
        ([127, 0, 0, 4], "s-desk", 401),
        ([127, 0, 0, 2], "s-wrong", 401),
        ([127, 0, 0, 4], "s-any", 200),
    ] {
        let client = lab.client_from(address);
        for url in [lab.url("/v1/models"), lab.network_url("/v1/models")] {
            // What a client says of where it is counts for nothing.
            let request = client.get(&url).bearer_auth(secret).header("x-forwarded-for", "127.0.0.2");
            assert_eq!(
                request.send().await.unwrap().status(),
                expected,
                "{secret} from {address:?} at {url}"
            );
        }
    }
}
