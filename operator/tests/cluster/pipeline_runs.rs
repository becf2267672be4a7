//! PipelineRuns against the embedded API server: a gateway makes those that requests ask for and no others, and the operator
//! deletes those that are to go after their end.

use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use russet_crds::conditions::{Type, get};
use russet_crds::{ModelRoute, Pipeline, PipelineRun};
use serde_json::{Value, json};

use crate::harness::{ClusterHarness, until};

fn run(name: &str, labels: Value, spec: &[(&str, Value)]) -> PipelineRun {
    let mut object = json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": "PipelineRun", "metadata": {"name": name, "labels": labels},
        "spec": {"pipelineRef": {"name": "p"}},
    });
    for (field, value) in spec {
        object["spec"][field] = value.clone();
    }
    serde_json::from_value(object).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_of_requests_come_and_go() {
    let cluster = ClusterHarness::start(&[]).await;
    let gateway = cluster.client(russet_rpc::tls::GATEWAY_USER, "russet:components").await;
    let (makes, runs): (Api<PipelineRun>, Api<PipelineRun>) =
        (Api::default_namespaced(gateway), Api::default_namespaced(cluster.admin.clone()));
    let marked = json!({"russet.dev/managed-by": "gateway", "russet.dev/gateway": "g"});
    let brief = [("ttlSecondsAfterFinished", json!(0))];
    for (what, object, words) in [
        ("of nobody", run("a", json!({}), &brief), "only objects with the label russet.dev/managed-by"),
        ("that stays", run("a", marked.clone(), &[]), "PipelineRuns with ttlSecondsAfterFinished only"),
    ] {
        let refused = makes.create(&Default::default(), &object).await.unwrap_err().to_string();
        assert!(refused.contains(words), "{what}: {refused}");
    }
    // What people made, the gateway does not delete, and neither does the operator while it runs.
    runs.create(&Default::default(), &run("theirs", json!({}), &[])).await.unwrap();
    assert!(makes.delete("theirs", &Default::default()).await.is_err());
    for name in ["left", "ends"] {
        makes.create(&Default::default(), &run(name, marked.clone(), &brief)).await.unwrap();
    }
    makes.delete("left", &Default::default()).await.unwrap();
    // Where it may go is as it was written.
    let wider = Patch::Merge(json!({"spec": {"zone": "Cloud"}}));
    assert!(runs.patch("ends", &PatchParams::default(), &wider).await.is_err());
    let finished = |at: &str| Patch::Merge(json!({"status": {"attempt": 1, "finishedAt": at}}));
    for name in ["theirs", "ends"] {
        makes.patch_status(name, &PatchParams::default(), &finished("2026-01-01T00:00:00Z")).await.unwrap();
    }
    until("a run whose time is over is gone", || async {
        let names: Vec<String> =
            runs.list(&Default::default()).await.ok()?.into_iter().map(|run| run.name_any()).collect();
        (names == ["theirs"]).then_some(())
    })
    .await;
    let operator = cluster.client("russet:operator", "russet:components").await;
    let refused =
        Api::<PipelineRun>::default_namespaced(operator).delete("theirs", &Default::default()).await;
    let refused = refused.map(|_| ()).unwrap_err().to_string();
    assert!(refused.contains("PipelineRuns that are to go after their end, not theirs"), "{refused}");
    // A route to a Pipeline answers once that is there.
    let routes: Api<ModelRoute> = Api::default_namespaced(cluster.admin.clone());
    let route = json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": "ModelRoute", "metadata": {"name": "writer"},
        "spec": {"models": ["writer"], "targets": [{"pipelineRef": {"name": "p"}, "parameter": "topic"}]},
    });
    routes.create(&Default::default(), &serde_json::from_value(route).unwrap()).await.unwrap();
    let says = async |words: &'static str| {
        until(words, || async {
            let route = routes.get("writer").await.ok()?;
            let status = route.status?;
            get(&status.conditions, Type::Ready)?.message.contains(words).then_some(())
        })
        .await;
    };
    says("Pipeline p does not exist in this namespace").await;
    let pipeline = json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": "Pipeline", "metadata": {"name": "p"},
        "spec": {"steps": [{"name": "ask", "chat": {"model": "m", "prompt": "x"}}]},
    });
    let pipelines: Api<Pipeline> = Api::default_namespaced(cluster.admin.clone());
    pipelines.create(&Default::default(), &serde_json::from_value(pipeline).unwrap()).await.unwrap();
    says("p answers").await;
}
