//! Strategies against the embedded API server: deployments that share a split, and their messages.

use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use russet_crds::conditions::{Type, get, is_true};
use russet_crds::{LocalReference, ModelDeployment, ShardGroup, Sharding, ShardingStrategy};
use serde_json::{Value, json};

use crate::harness::{ClusterHarness, GIB, deployment, model, until};
use crate::{ready, says};

async fn apply(cluster: &ClusterHarness, name: &str, spec: Value) -> Result<ShardingStrategy, kube::Error> {
    let api: Api<ShardingStrategy> = Api::all(cluster.admin.clone());
    let strategy = json!({"apiVersion": "russet.dev/v1alpha1", "kind": "ShardingStrategy", "metadata": {"name": name}, "spec": spec});
    api.patch(name, &PatchParams::apply("test").force(), &Patch::Apply(strategy)).await
}

/// Waits until a strategy, at its generation, has this many users and its Ready message has these words.
async fn wait_strategy(
    cluster: &ClusterHarness,
    name: &str,
    used: u32,
    status: &str,
    words: &str,
) -> ShardingStrategy {
    let api: Api<ShardingStrategy> = Api::all(cluster.admin.clone());
    until(&format!("strategy {name}: {status}, {words}"), || async {
        let strategy = api.get(name).await.ok()?;
        let seen = strategy.status.clone()?;
        let ready = get(&seen.conditions, Type::Ready)?;
        (seen.observed_generation == strategy.metadata.generation
            && seen.deployments == used
            && ready.status == status
            && ready.message.contains(words))
        .then_some(strategy)
    })
    .await
}

fn using(name: &str, strategy: &str) -> ModelDeployment {
    let mut deployment = deployment(name, "m", Sharding::default());
    deployment.spec.sharding = None;
    deployment.spec.strategy_ref = Some(LocalReference::new(strategy));
    deployment
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strategy_change_edits_every_deployment_that_uses_it() {
    let cluster = ClusterHarness::start(&[("a", 16 * GIB), ("b", 16 * GIB)]).await;
    let deployments: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
    let groups: Api<ShardGroup> = Api::default_namespaced(cluster.admin.clone());
    cluster.create(model("m", "llama", 4, GIB)).await;
    let decision = |chat: &ModelDeployment| chat.status.clone().unwrap().placement.unwrap().decision;

    // The message for a missing strategy lists existing ones.
    apply(&cluster, "triple", json!({"mode": "Tensor", "ranks": 3})).await.unwrap();
    wait_strategy(&cluster, "triple", 0, "True", "no deployment uses it").await;
    cluster.create(using("chat", "pair")).await;
    let chat = until("chat misses its strategy", || async {
        deployments.get("chat").await.ok().filter(|chat| says(chat, Type::Placed, "StrategyNotFound"))
    })
    .await;
    let status = chat.status.unwrap();
    let message = &get(&status.conditions, Type::Ready).unwrap().message;
    assert!(
        message.contains("ShardingStrategy \"pair\" does not exist; create it, or name one"),
        "{message}"
    );
    assert!(message.contains("triple") && is_true(&status.conditions, Type::Stalled), "{message}");

    let pair = json!({"mode": "Pipeline", "ranks": 2, "kv": {"contextTokens": 512}});
    apply(&cluster, "pair", pair).await.unwrap();
    let chat = until("chat is ready", || async { deployments.get("chat").await.ok().filter(ready) }).await;
    assert_eq!(decision(&chat), "2 ranks on a, b: layers 2 + 2");
    assert_eq!(
        chat.status.as_ref().unwrap().placement.as_ref().unwrap().reason,
        "ShardingStrategy pair spec.ranks asks for 2; layers are balanced by the time each rank takes for a token"
    );
    let group = groups.list(&Default::default()).await.unwrap().items.remove(0);
    assert_eq!(group.spec.plan.context_tokens, 512);
    wait_strategy(&cluster, "pair", 1, "True", "1 deployment uses it").await;

    // The model has four KV heads: three ranks cannot share them.
    cluster.create(using("odd", "triple")).await;
    let odd =
        "no deployment can use it: ModelDeployment default/odd: spec.ranks: 4 KV heads cannot be cut into 3";
    let strategy = wait_strategy(&cluster, "triple", 1, "False", odd).await;
    let conditions = strategy.status.unwrap().conditions;
    assert!(!is_true(&conditions, Type::Valid) && is_true(&conditions, Type::Stalled));
    until("odd says the same", || async {
        let odd = deployments.get("odd").await.ok().filter(|odd| says(odd, Type::Ready, "InvalidSpec"))?;
        let status = odd.status?;
        let message = &get(&status.conditions, Type::Ready)?.message;
        message.contains("ShardingStrategy triple spec.ranks: 4 KV heads").then_some(())
    })
    .await;
    // Another strategy is another result, and the first one has no users.
    let patch = Patch::Merge(json!({"spec": {"strategyRef": {"name": "pair"}}}));
    deployments.patch("odd", &PatchParams::default(), &patch).await.unwrap();
    wait_strategy(&cluster, "triple", 0, "True", "no deployment uses it").await;
    wait_strategy(&cluster, "pair", 2, "True", "2 deployments use it").await;
    until("odd is ready", || async { deployments.get("odd").await.ok().filter(ready) }).await;
    deployments.delete("odd", &Default::default()).await.unwrap();
    wait_strategy(&cluster, "pair", 1, "True", "1 deployment uses it").await;

    // A change of the strategy is an edit of every deployment that uses it.
    apply(&cluster, "pair", json!({"mode": "Tensor", "ranks": 2})).await.unwrap();
    until("chat is cut anew", || async {
        let chat = deployments.get("chat").await.ok().filter(ready)?;
        let alone = groups.list(&Default::default()).await.ok()?.items.len() == 1;
        (alone && decision(&chat).starts_with("tensor over 2 nodes (a, b)")).then_some(())
    })
    .await;
    // Without it running groups continue, and the deployment's status names the missing strategy.
    let strategies: Api<ShardingStrategy> = Api::all(cluster.admin.clone());
    let group = groups.list(&Default::default()).await.unwrap().items.remove(0).name_any();
    strategies.delete("pair", &Default::default()).await.unwrap();
    until("chat misses its strategy again", || async {
        let chat = deployments.get("chat").await.ok()?;
        (says(&chat, Type::Ready, "StrategyNotFound")
            && is_true(&chat.status.as_ref()?.conditions, Type::Available))
        .then_some(())
    })
    .await;
    assert_eq!(groups.list(&Default::default()).await.unwrap().items.remove(0).name_any(), group);

    // Mutually exclusive and contradictory fields are rejected on write.
    let mut both = using("both", "pair");
    both.spec.sharding = Some(Sharding::default());
    let error = deployments.create(&Default::default(), &both).await.unwrap_err().to_string();
    assert!(error.contains("sharding and strategyRef exclude each other"), "{error}");
    let error = apply(&cluster, "no", json!({"mode": "Single", "ranks": 2})).await.unwrap_err().to_string();
    assert!(error.contains("mode Single runs on one rank"), "{error}");
    assert_eq!(cluster.refusals(), 0);
    cluster.stop().await;
}
