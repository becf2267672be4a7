//! From an InferenceNode's spec through its agent and the root helper to the machine, and back.

use kube::Api;
use kube::api::{Patch, PatchParams};
use russet_agent::helper::HelperSocket;
use russet_crds::InferenceNode;
use russet_crds::conditions::{Type, get};
use serde_json::{Value, json};

use crate::mac_network::Mac;
use crate::plane::*;

/// Replaces the spec as a user; returns the new generation.
async fn set_spec(nodes: &Api<InferenceNode>, spec: Value) -> Option<i64> {
    let patch = json!({"apiVersion": "russet.dev/v1alpha1", "kind": "InferenceNode", "spec": spec});
    let params = PatchParams::apply("russet-fabric").force();
    nodes.patch("one", &params, &Patch::Apply(patch)).await.unwrap().metadata.generation
}

/// Waits until the agent has set this reason for that generation; returns the message.
async fn wait_condition(
    nodes: &Api<InferenceNode>,
    generation: Option<i64>,
    kind: Type,
    reason: &str,
) -> String {
    wait_until(&format!("{kind:?} is {reason}"), || async {
        let status = nodes.get("one").await.ok()?.status?;
        let condition = get(&status.conditions, kind)?;
        let is = condition.reason == reason && condition.observed_generation == generation;
        is.then(|| condition.message.clone())
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_network_spec_is_applied_and_removed_settings_revert() {
    let folder = tempfile::tempdir().unwrap();
    let plane = TestControlPlane::start(&folder.path().join("plane")).await;
    let mut agent = TestAgent::join(&plane, folder.path(), "one", None).await;
    let nodes: Api<InferenceNode> = Api::all(plane.client.clone());
    let mac = Mac::new();
    let before = mac.state();
    let port = json!({"interface": "en4", "address": "172.31.240.1/30"});
    let network = json!({"ports": [port], "serviceOrder": "CablesLast"});

    // There is no helper, and the message says how to install it.
    let asked = set_spec(&nodes, json!({"network": network})).await;
    let words = wait_condition(&nodes, asked, Type::NetworkApplied, "HelperAbsent").await;
    assert!(words.contains("sudo russet service install"), "{words}");
    // A restarted agent keeps the condition: an empty spec without a helper reverts nothing.
    agent.stop().await;
    let asked = set_spec(&nodes, json!({})).await;
    agent.start();
    wait_condition(&nodes, asked, Type::NetworkApplied, "HelperAbsent").await;

    let socket = HelperSocket::bind(&agent.config.helper, rustix::process::getuid().as_raw()).unwrap();
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let helping = tokio::spawn(mac.helper("one").serve(socket, async {
        ended.await.ok();
    }));
    let asked = set_spec(&nodes, json!({"network": network, "memory": {"wiredLimit": "20Gi"}})).await;
    let words = wait_condition(&nodes, asked, Type::NetworkApplied, "Applied").await;
    assert!(words.contains("en4 left bridge0; en4 has 172.31.240.1/30"), "{words}");
    wait_condition(&nodes, asked, Type::WiredLimitSet, "Applied").await;
    assert_eq!(mac.state(), ["Ethernet\nCable\n", "172.31.240.1\n", "", "20480\n"].map(str::to_owned));

    // A refused part does not block the other parts.
    let asked = set_spec(&nodes, json!({"network": network, "memory": {"wiredLimit": "60Gi"}})).await;
    let words = wait_condition(&nodes, asked, Type::WiredLimitSet, "HelperRefused").await;
    assert!(words.contains("50 % of this machine's memory"), "{words}");
    wait_condition(&nodes, asked, Type::NetworkApplied, "Applied").await;

    // A restarted agent reverts what the spec no longer contains.
    agent.stop().await;
    let asked = set_spec(&nodes, json!({})).await;
    agent.start();
    wait_condition(&nodes, asked, Type::NetworkApplied, "Restored").await;
    assert_eq!(mac.state(), before);

    // Leaving the cluster reverts the machine.
    let asked = set_spec(&nodes, json!({"network": network})).await;
    wait_condition(&nodes, asked, Type::NetworkApplied, "Applied").await;
    nodes.delete("one", &Default::default()).await.unwrap();
    agent.wait_removed().await;
    assert_eq!(mac.state(), before);
    end.send(()).unwrap();
    helping.await.unwrap();
}
