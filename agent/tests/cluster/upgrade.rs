//! An agent replaces one of another release: it adopts only engines with its own control version.

use kube::Api;
use kube::api::PostParams;
use russet_agent::process::record;
use russet_crds::ModelDeployment;

use super::plane::{TestAgent, TestControlPlane, alive, deployment, pid, wait_until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_of_another_version_is_replaced_and_group_reforms() {
    let folder = tempfile::tempdir().unwrap();
    let mut plane = TestControlPlane::start(&folder.path().join("plane")).await;
    let mut one = TestAgent::join(&plane, folder.path(), "one", None).await;
    let mut two = TestAgent::join(&plane, folder.path(), "two", None).await;
    plane.create_model(folder.path()).await;
    let deployments: Api<ModelDeployment> = Api::namespaced(plane.client.clone(), "default");
    deployments.create(&PostParams::default(), &deployment()).await.unwrap();
    let before = plane.serving(1).await;

    // One agent is updated to a release with the same control version, the other to one with another version.
    one.stop().await;
    two.stop().await;
    let engines = two.config.data_dir.join("agent/engines");
    let mut records = record::load(&engines);
    assert_eq!(records.len(), 1);
    assert_eq!(records[0].control, Some(russet_rpc::CONTROL_VERSION));
    records[0].control = Some(russet_rpc::CONTROL_VERSION + 1);
    let foreign = records[0].process.clone().unwrap().pid;
    record::save(&engines, &records[0]).unwrap();
    assert!(alive(foreign));
    one.start();
    two.start();

    let after = plane.serving(before[0].spec.epoch + 1).await;
    assert!(after.iter().all(|shard| pid(shard) != foreign));
    wait_until("the engine is gone", || async { (!alive(foreign)).then_some(()) }).await;
    one.stop().await;
    two.stop().await;
    plane.stop().await;
}
