//! Other tenants' replicas, names, keys and prompts.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use reqwest::Method;
use russet_tests::chat;
use russet_tests::cluster::{WAIT_TIMEOUT, condition, is_ready_as_edited};
use russet_tests::tenants::{HOSTILE, OTHER, RUSSET, TenantMachine};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::{collection, create, delete, merged, path, reason, row, send};

fn deployment(name: &str, more: Value) -> Value {
    let spec = merged(json!({"modelRef": {"name": "smoke"}}), more);
    json!({"apiVersion": "russet.dev/v1alpha1", "kind": "ModelDeployment", "metadata": {"name": name}, "spec": spec})
}

/// T1: a tier is for its namespaces, and what it takes of others is not the taker's to approve.
pub async fn replicas_of_others_stop_for_nobody_but_who_may_decide(machine: &TenantMachine) -> Result<()> {
    let tier = |name: &str, more: Value| {
        let spec = merged(json!({"mode": "Cluster", "priority": 100, "preemption": "LowerPriority"}), more);
        json!({"apiVersion": "russet.dev/v1alpha1", "kind": "Tier", "metadata": {"name": name}, "spec": spec})
    };
    for (name, more) in [("others-own", json!({"namespaces": [OTHER]})), ("for-all", json!({}))] {
        machine.apply(&format!("{RUSSET}/tiers/{name}"), tier(name, more)).await?;
    }
    // Too large to run beside the other one.
    let large = |tier: &str| {
        deployment(
            "taker",
            json!({"tierRef": {"name": tier}, "sharding": {"mode": "Single", "kv": {"contextTokens": 2048, "maxSequences": 64}}}),
        )
    };
    let taker = path(HOSTILE, "modeldeployments", "taker");
    create(machine, HOSTILE, "modeldeployments", large("others-own")).await?;
    reason(machine, &taker, "TierNotAllowed").await?;
    row("use a tier of other namespaces", "refused");
    delete(machine, HOSTILE, "modeldeployments", "taker").await?;

    create(machine, HOSTILE, "modeldeployments", large("for-all")).await?;
    let message = reason(machine, &taker, "AwaitingApproval").await?;
    ensure!(message.contains(&format!("{OTHER}/smoke")), "{message}");
    let approvals = machine.get(&collection(HOSTILE, "approvals")).await?;
    let [approval] = approvals["items"].as_array().map(Vec::as_slice).unwrap_or_default() else {
        bail!("not one Approval: {approvals}");
    };
    let hash = approval["spec"]["planHash"].as_str().context("an Approval without its plan")?;
    row("stop another namespace's replica by a higher priority", "refused");
    let (code, answer) =
        send(machine, HOSTILE, Method::PATCH, &taker, &json!({"spec": {"approvedPlan": hash}})).await?;
    ensure!(code == 200, "{code} {answer}");
    let answered = |object: &Value| {
        object["status"]["observedGeneration"] == object["metadata"]["generation"]
            && condition(object, "Ready").is_some_and(|ready| ready["reason"] == "AwaitingApproval")
    };
    machine.until_object("its own approvedPlan does not count", &taker, answered).await?;
    row("approve that in its own deployment", "refused");
    let name = approval["metadata"]["name"].as_str().context("an Approval without a name")?;
    let by = format!("system:serviceaccount:{HOSTILE}:tenant");
    let decision = json!({"spec": {"decision": "Approved", "decidedBy": by}});
    let (code, answer) =
        send(machine, HOSTILE, Method::PATCH, &path(HOSTILE, "approvals", name), &decision).await?;
    let says = answer["message"].as_str().is_some_and(|text| text.contains("replicas of other namespaces"));
    ensure!(code == 403 && says, "{code} {answer}");
    row("decide the Approval in its own namespace", "refused");
    let served = machine.get(&path(OTHER, "modeldeployments", "smoke")).await?;
    ensure!(is_ready_as_edited(&served), "the other namespace's replica stopped: {}", served["status"]);
    ask(machine, None, "other/smoke", "Is it still there?").await?;
    delete(machine, HOSTILE, "modeldeployments", "taker").await
}

/// A chat request: its status code and body.
async fn chat_as(
    machine: &TenantMachine,
    key: Option<&str>,
    model: &str,
    text: &str,
    more: Value,
) -> Result<(u16, Value)> {
    let body = chat::question(model, text, merged(json!({"stream": false, "max_tokens": 4}), more));
    let mut request = chat::client()?.post(format!("{}/v1/chat/completions", machine.gateway())).json(&body);
    if let Some(key) = key {
        request = request.bearer_auth(key);
    }
    let answer = request.send().await?;
    Ok((answer.status().as_u16(), answer.json().await?))
}

/// A chat request that must be answered.
async fn ask(machine: &TenantMachine, key: Option<&str>, model: &str, text: &str) -> Result<Value> {
    let (code, answer) = chat_as(machine, key, model, text, json!({})).await?;
    ensure!(code == 200, "{model}: {code} {answer}");
    Ok(answer)
}

/// Repeats a chat request until its status code is as it should be.
async fn until_answer(
    what: &str,
    ask: impl AsyncFn() -> Result<(u16, Value)>,
    is_met: impl Fn(u16) -> bool,
) -> Result<(u16, Value)> {
    let begin = Instant::now();
    loop {
        let (code, answer) = ask().await?;
        if is_met(code) {
            return Ok((code, answer));
        }
        ensure!(begin.elapsed() < WAIT_TIMEOUT, "not in time: {what}: {code} {answer}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Tokens of the prompt that the engine found in its cache.
fn cached_tokens(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
}

/// G1: an exact ModelRoute of another namespace wins over no deployment.
pub async fn a_route_takes_no_name_of_others(machine: &TenantMachine) -> Result<()> {
    // Nothing serves the trap: a request that it gets is not answered with 200.
    let names = ["smoke", "other/smoke", "only-here", "*"];
    let route = json!({"apiVersion": "russet.dev/v1alpha1", "kind": "ModelRoute", "metadata": {"name": "trap"},
        "spec": {"models": names, "targets": [{"deploymentRef": {"name": "trap"}}], "onUnavailable": "Fail"}});
    create(machine, HOSTILE, "modelroutes", route).await?;
    machine
        .until_object("the gateway knows the route", &path(HOSTILE, "modelroutes", "trap"), |route| {
            route["status"]["observedGeneration"] == route["metadata"]["generation"]
        })
        .await?;
    let (code, answer) = chat_as(machine, None, "only-here", "hi", json!({})).await?;
    ensure!(
        code != 200 && answer.to_string().contains("hostile/trap"),
        "the route is not used: {code} {answer}"
    );
    for (what, name) in
        [("take a deployment's full name by a route", "other/smoke"), ("take its short name", "smoke")]
    {
        ask(machine, None, name, "hi").await?;
        row(what, "refused");
    }
    delete(machine, HOSTILE, "modelroutes", "trap").await
}

fn access_key(name: &str, key: &str) -> Value {
    let hash = hex::encode(Sha256::digest(key));
    json!({"apiVersion": "russet.dev/v1alpha1", "kind": "AccessKey", "metadata": {"name": name}, "spec": {"secretSha256": hash}})
}

/// A key that the gateway accepts.
async fn accepted_key(machine: &TenantMachine, namespace: &str, name: &str, key: &str) -> Result<()> {
    create(machine, namespace, "accesskeys", access_key(name, key)).await?;
    machine
        .until_object("the key is Ready", &path(namespace, "accesskeys", name), is_ready_as_edited)
        .await
        .map(drop)
}

/// G5: whoever knows a hash does not get the requests of its key when the key is made anew.
pub async fn a_secret_stays_with_its_namespace(machine: &TenantMachine) -> Result<()> {
    let key = "sk-of-the-other-tenant";
    accepted_key(machine, OTHER, "mine", key).await?;
    ask(machine, Some(key), "smoke", "hi").await?;
    create(machine, HOSTILE, "accesskeys", access_key("copy", key)).await?;
    let copy = path(HOSTILE, "accesskeys", "copy");
    reason(machine, &copy, "ForeignSecret").await?;
    ask(machine, Some(key), "smoke", "hi").await?;
    row("copy the hash of another namespace's key", "refused");
    delete(machine, OTHER, "accesskeys", "mine").await?;
    let (code, answer) = until_answer(
        "the deleted key is closed",
        async || chat_as(machine, Some(key), "smoke", "hi", json!({})).await,
        |code| code != 200,
    )
    .await?;
    ensure!(code == 401, "{code} {answer}");
    reason(machine, &copy, "ForeignSecret").await?;
    row("get the requests of that key once its owner deleted it", "refused");
    accepted_key(machine, OTHER, "mine", key).await?;
    ask(machine, Some(key), "smoke", "hi").await?;
    delete(machine, HOSTILE, "accesskeys", "copy").await?;
    delete(machine, OTHER, "accesskeys", "mine").await
}

/// G2: how much of a prompt was cached says what one's own namespace asked.
pub async fn cached_prefixes_say_nothing_of_others(machine: &TenantMachine) -> Result<()> {
    let (theirs, own) = ("sk-prefix-other", "sk-prefix-hostile");
    accepted_key(machine, OTHER, "prefix", theirs).await?;
    accepted_key(machine, HOSTILE, "prefix", own).await?;
    // The same files, so the same blocks on the disk.
    create(machine, HOSTILE, "modeldeployments", deployment("smoke", json!({}))).await?;
    machine
        .until_object("it is Ready", &path(HOSTILE, "modeldeployments", "smoke"), is_ready_as_edited)
        .await?;
    let secret = "The merger with the lighthouse company is planned for the ninth of March. ".repeat(6);
    let cached = async |key: &str, more: Value| -> Result<u64> {
        let (code, answer) = chat_as(machine, Some(key), "smoke", &secret, more).await?;
        ensure!(code == 200, "{code} {answer}");
        Ok(cached_tokens(&answer))
    };
    let (first, second) = (cached(theirs, json!({})).await?, cached(theirs, json!({})).await?);
    ensure!(first == 0 && second >= 64, "its own second request found {second} tokens, its first {first}");
    let before = cached(own, json!({})).await?;
    ensure!(before == 0, "{before} tokens of another namespace's prompt were cached");
    row("learn from cached tokens what another namespace asked", "apart");
    for salt in ["other/", "other"] {
        let found = cached(own, json!({"cache_salt": salt})).await?;
        ensure!(found == 0, "{found} tokens with the salt {salt}");
    }
    row("learn it with a salt that looks like the other namespace's", "apart");
    let after = cached(own, json!({})).await?;
    ensure!(after >= 64, "its own second request found {after} tokens");
    for (namespace, key) in [(OTHER, theirs), (HOSTILE, own)] {
        ensure!(cached(key, json!({})).await? >= 64, "{namespace} lost its own prefixes");
        delete(machine, namespace, "accesskeys", "prefix").await?;
    }
    // One engine, asked without a key.
    let asked = async || chat_as(machine, None, "other/smoke", &secret, json!({})).await;
    let (_, answer) = until_answer("no key is needed again", asked, |code| code == 200).await?;
    let found = cached_tokens(&answer);
    ensure!(found == 0, "{found} tokens were cached for a caller without a key");
    row("learn it from the same engine without a key", "apart");
    delete(machine, HOSTILE, "modeldeployments", "smoke").await
}
