//! Auto-revert: edits that never become ready are replaced by the last known good spec, with memory for both
//! and without.

use kube::Api;
use kube::api::{Patch, PatchParams};
use russet_crds::conditions::{Type, get, is_true};
use russet_crds::{ModelDeployment, ShardGroup, Sharding};
use serde_json::json;

use crate::harness::{ClusterHarness, GIB, deployment, model, until};
use crate::stub_agent::FAILING_CONTEXT_TOKENS;
use crate::{ready, says};

async fn edit(cluster: &ClusterHarness, model: &str, context: u32) {
    let deployments: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
    let spec = json!({"modelRef": {"name": model}, "sharding": {"kv": {"contextTokens": context}}});
    let patch = Patch::Merge(json!({"spec": spec}));
    deployments.patch("chat", &PatchParams::default(), &patch).await.unwrap();
}

/// The contexts of the ready groups, and the number of all groups.
async fn groups(cluster: &ClusterHarness) -> (Vec<u32>, usize) {
    let groups: Api<ShardGroup> = Api::default_namespaced(cluster.admin.clone());
    let all = groups.list(&Default::default()).await.unwrap().items;
    let answers = |group: &&ShardGroup| {
        group.status.as_ref().is_some_and(|status| is_true(&status.conditions, Type::Ready))
    };
    (all.iter().filter(answers).map(|group| group.spec.plan.context_tokens).collect(), all.len())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn edit_that_never_becomes_ready_is_rolled_back() {
    for (story, gib, beside, edited) in [
        ("room for both", 32, true, "m"),
        ("room for one", 8, false, "m"),
        ("room for both, of another model", 32, true, "n"),
        ("room for one, of another model", 8, false, "n"),
    ] {
        let cluster = ClusterHarness::start(&[("a", gib * GIB)]).await;
        let deployments: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
        cluster.create(model("m", "llama", 4, GIB)).await;
        cluster.create(model("n", "llama", 4, GIB)).await;
        cluster.create(deployment("chat", "m", Sharding::default())).await;
        until("chat is ready", || async { deployments.get("chat").await.ok().filter(ready) }).await;
        let first: Api<ShardGroup> = Api::default_namespaced(cluster.admin.clone());
        let first = first.list(&Default::default()).await.unwrap().items[0].metadata.uid.clone();

        edit(&cluster, edited, FAILING_CONTEXT_TOKENS).await;
        let chat = until("chat is rolled back", || async {
            let chat = deployments.get("chat").await.ok()?;
            (says(&chat, Type::Ready, "RolledBack") && groups(&cluster).await == (vec![1024], 1))
                .then_some(chat)
        })
        .await;
        let status = chat.status.unwrap();
        let message = &get(&status.conditions, Type::Ready).unwrap().message;
        assert!(
            message.contains("out of luck") && message.contains("edit the spec to try again"),
            "{message}"
        );
        assert!(is_true(&status.conditions, Type::Stalled) && is_true(&status.conditions, Type::Available));
        let now: Api<ShardGroup> = Api::default_namespaced(cluster.admin.clone());
        let now = now.list(&Default::default()).await.unwrap().items.remove(0);
        assert_eq!(now.spec.model_ref.name, "m", "{story}");
        assert_eq!(
            now.metadata.uid == first,
            beside,
            "{story}: whether what answered before went on all the time"
        );

        edit(&cluster, "m", 512).await;
        let good = until("chat answers by another edit", || async {
            let chat = deployments.get("chat").await.ok().filter(ready)?;
            (groups(&cluster).await == (vec![512], 1)).then_some(chat)
        });
        let rollout = good.await.status.unwrap().rollout.unwrap();
        assert_eq!((rollout.failed, rollout.proven.is_some()), (None, true), "{story}");
        assert_eq!(cluster.refusals(), 0, "{story}");
        cluster.stop().await;
    }
}
