//! Where the bytes of copies come from, against the embedded API server.

use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use russet_crds::conditions::{Type, get};
use russet_crds::{CopyPeer, Model, ModelCopy, Preload, PreloadPolicy, Supply, names};
use serde_json::json;

use crate::agent::{PEER_PORT, content};
use crate::harness::{Cluster, GIB, model, until};

/// Waits until the copy on a node is told this of its supply and says this of itself.
async fn told(cluster: &Cluster, node: &str, supply: Option<&Supply>, reason: &str) -> ModelCopy {
    let api: Api<ModelCopy> = Api::all(cluster.admin.clone());
    until(&format!("the copy on {node} has the supply {supply:?} and says {reason}"), || async {
        let copy = api.get(&names::model_copy("default", "m", node)).await.ok()?;
        let ready = get(&copy.status.as_ref()?.conditions, Type::Ready)?;
        (copy.spec.supply.as_ref() == supply && ready.reason == reason).then_some(copy.clone())
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_come_in_on_one_node_another_one_takes_over_and_the_rest_get_them_from_there() {
    let mut cluster = Cluster::start(&[("a", 32 * GIB), ("b", 32 * GIB)]).await;
    for node in ["a", "b"] {
        cluster.agent(node).hold_source(true);
    }
    let mut model = model("m", "llama", 4, GIB);
    model.spec.source.uri = model.spec.source.uri.replace("file:///", "hf://");
    model.spec.preload = Some(Preload { policy: PreloadPolicy::Always, ..Preload::default() });
    cluster.create(model).await;
    let waits = Supply::default();
    told(&cluster, "a", None, "Downloading").await;
    let copy = told(&cluster, "b", Some(&waits), "WaitingForPeer").await;
    assert_eq!(copy.labels()[names::LABEL_NODE], "b");
    let api: Api<Model> = Api::default_namespaced(cluster.admin.clone());
    until("the Model says that its files come", || async {
        let status = api.get("m").await.ok()?.status?;
        (get(&status.conditions, Type::Preloaded)?.reason == "Downloading").then_some(())
    })
    .await;

    // Its plug is pulled: the other one fetches, and is done.
    cluster.silence("a");
    told(&cluster, "b", None, "Downloading").await;
    cluster.agent("b").hold_source(false);
    told(&cluster, "b", None, "Verified").await;

    // Back, that one finds that it is to have the bytes from there.
    let b = CopyPeer { node_name: "b".to_owned(), address: format!("127.0.0.1:{PEER_PORT}") };
    let receives = Supply { content: Some(content()), from: vec![b] };
    told(&cluster, "a", Some(&receives), "Downloading").await;
    cluster.play("a", 32 * GIB).await;
    let copy = told(&cluster, "a", Some(&receives), "Verified").await;

    // Who asks for the files says nothing of where they come from, and takes none of it back.
    let copies: Api<ModelCopy> = Api::all(cluster.admin.clone());
    let asked = json!({"apiVersion": "russet.dev/v1alpha1", "kind": "ModelCopy",
                       "metadata": {"name": copy.name_any()}, "spec": copy.spec.work()});
    let operator = PatchParams::apply(names::OPERATOR_MANAGER).force();
    let copy = copies.patch(&copy.name_any(), &operator, &Patch::Apply(asked)).await.unwrap();
    assert_eq!(copy.spec.supply.as_ref(), Some(&receives));
    let managers = copy.managed_fields().iter().filter(|entry| {
        let fields = entry.fields_v1.as_ref().map(|fields| fields.0.to_string()).unwrap_or_default();
        fields.contains("f:supply")
    });
    let managers: Vec<&str> = managers.filter_map(|entry| entry.manager.as_deref()).collect();
    assert_eq!(managers, [names::SUPPLY_MANAGER]);
    cluster.stop().await;
}
