//! Approvals of steps against the embedded API server: a gateway asks for its own runs' steps, and answers none.

use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use russet_crds::conditions::{Type, get};
use russet_crds::{Approval, HttpEndpoint, PipelineRun};
use serde_json::{Value, json};

use crate::harness::{ClusterHarness, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_asks_for_its_steps_and_answers_none() {
    let cluster = ClusterHarness::start(&[]).await;
    let run: PipelineRun = serde_json::from_value(json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": "PipelineRun", "metadata": {"name": "r"},
        "spec": {"pipelineRef": {"name": "p"}},
    }))
    .unwrap();
    let runs: Api<PipelineRun> = Api::default_namespaced(cluster.admin.clone());
    let run = runs.create(&Default::default(), &run).await.unwrap();
    let gateway = cluster.client(russet_rpc::tls::GATEWAY_USER, "russet:components").await;
    let asks: Api<Approval> = Api::default_namespaced(gateway.clone());
    let owner = json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": "PipelineRun", "name": "r", "uid": run.uid().unwrap(),
    });
    let approval = |changes: &[(&str, Value)]| -> Approval {
        let mut object = json!({
            "apiVersion": "russet.dev/v1alpha1", "kind": "Approval",
            "metadata": {"name": "r-1", "ownerReferences": [owner]},
            "spec": {"pipelineRunRef": {"name": "r"}, "action": "Step", "planHash": "ab".repeat(32), "message": "send?"},
        });
        for (pointer, value) in changes {
            let (parent, field) = pointer.rsplit_once('/').unwrap();
            let fields = object.pointer_mut(parent).unwrap().as_object_mut().unwrap();
            match value {
                Value::Null => drop(fields.remove(field)),
                value => drop(fields.insert(field.to_owned(), value.clone())),
            }
        }
        serde_json::from_value(object).unwrap()
    };
    let blocking = json!([{"apiVersion": "russet.dev/v1alpha1", "kind": "PipelineRun", "name": "r", "uid": "u", "blockOwnerDeletion": true}]);
    let other =
        json!([{"apiVersion": "russet.dev/v1alpha1", "kind": "PipelineRun", "name": "other", "uid": "u"}]);
    for (what, changes) in [
        (
            "answered",
            &[("/spec/decision", json!("Approved")), ("/spec/decidedBy", json!("russet:gateway"))][..],
        ),
        (
            "for a deployment",
            &[("/spec/pipelineRunRef", Value::Null), ("/spec/deploymentRef", json!({"name": "d"}))],
        ),
        ("to preempt", &[("/spec/action", json!("Preempt"))]),
        ("that stops others", &[("/spec/affects", json!(["other/low"]))]),
        ("without owner", &[("/metadata/ownerReferences", Value::Null)]),
        ("of another run", &[("/metadata/ownerReferences", other)]),
        ("that keeps its run", &[("/metadata/ownerReferences", blocking)]),
        ("with a finalizer", &[("/metadata/finalizers", json!(["example.com/hold"]))]),
    ] {
        let refused = asks.create(&Default::default(), &approval(changes)).await;
        let refused = refused.map(|_| what).unwrap_err().to_string();
        let words = match what {
            "answered" => "russet:gateway asks and does not answer",
            _ => "the gateway may ask for an Approval of a step",
        };
        assert!(refused.contains(words), "{what}: {refused}");
    }
    asks.create(&Default::default(), &approval(&[])).await.unwrap();
    let seen: Api<Approval> = Api::default_namespaced(cluster.admin.clone());
    let waits = |approval: &Approval| {
        let status = approval.status.as_ref();
        let ready = status.and_then(|status| get(&status.conditions, Type::Ready));
        ready.is_some_and(|ready| ready.message.starts_with("PipelineRun r waits for a decision"))
    };
    until("the operator says who waits", || async { seen.get("r-1").await.ok().filter(waits) }).await;
    let decision = Patch::Merge(json!({"spec": {"decision": "Approved", "decidedBy": "russet:gateway"}}));
    assert!(asks.patch("r-1", &PatchParams::default(), &decision).await.is_err());
    assert!(asks.delete("r-1", &Default::default()).await.is_err());
    // Of runs it writes the status alone, and no addresses at all.
    let writes: Api<PipelineRun> = Api::default_namespaced(gateway.clone());
    let attempt = Patch::Merge(json!({"spec": {"attempt": 2}}));
    assert!(writes.patch("r", &PatchParams::default(), &attempt).await.is_err());
    let status = Patch::Merge(json!({"status": {"progress": "1/2"}}));
    writes.patch_status("r", &PatchParams::default(), &status).await.unwrap();
    let endpoints: Api<HttpEndpoint> = Api::default_namespaced(gateway);
    let endpoint =
        HttpEndpoint::new("e", serde_json::from_value(json!({"url": "http://127.0.0.1:1"})).unwrap());
    assert!(endpoints.create(&Default::default(), &endpoint).await.is_err());
    // A person decides, under the own name.
    let admin = cluster.client("jane", "system:masters").await;
    let people: Api<Approval> = Api::default_namespaced(admin);
    let decision = |by: &str| Patch::Merge(json!({"spec": {"decision": "Approved", "decidedBy": by}}));
    let refused =
        people.patch("r-1", &PatchParams::default(), &decision("ada")).await.unwrap_err().to_string();
    assert!(refused.contains("decidedBy is who decides, jane, and not ada"), "{refused}");
    people.patch("r-1", &PatchParams::default(), &decision("jane")).await.unwrap();
    cluster.stop().await;
}
