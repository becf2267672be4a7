//! Engines that use too much memory, and machines whose kernel panicked under them: the engines compute
//! nothing and report what the test sets; the panic reports are synthetic.

use std::path::Path;

use k8s_openapi::api::core::v1::Event;
use kube::Api;
use kube::api::{ListParams, PostParams};
use russet_crds::conditions::{Type, get};
use russet_crds::{ModelDeployment, Shard};

use crate::plane::*;

/// Waits for an Event with this reason; returns its note.
async fn event(plane: &TestControlPlane, reason: &str) -> String {
    let events: Api<Event> = Api::all(plane.client.clone());
    wait_until(&format!("an Event that says {reason}"), || async {
        let events = events.list(&ListParams::default()).await.ok()?;
        let found = events.items.into_iter().rfind(|event| event.reason.as_deref() == Some(reason))?;
        found.message
    })
    .await
}

async fn serve(folder: &Path) -> (TestControlPlane, TestAgent, TestAgent, Vec<Shard>) {
    let plane = TestControlPlane::start(&folder.join("plane")).await;
    let one = TestAgent::join(&plane, folder, "one", None).await;
    let two = TestAgent::join(&plane, folder, "two", None).await;
    plane.create_model(folder).await;
    let deployments: Api<ModelDeployment> = Api::namespaced(plane.client.clone(), "default");
    deployments.create(&PostParams::default(), &deployment()).await.unwrap();
    let shards = plane.serving(1).await;
    (plane, one, two, shards)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_far_over_its_grant_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let (plane, mut one, mut two, before) = serve(folder.path()).await;
    signal(pid(&before[1]), "-USR2");
    let said = event(&plane, "MemoryExceeded").await;
    assert!(said.contains("its engine holds 64") && said.contains("was granted"), "{said}");
    let after = plane.serving(before[1].spec.epoch + 1).await;
    assert!(!alive(pid(&before[1])));
    assert_ne!(pid(&after[1]), pid(&before[1]));
    one.stop().await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deployment_is_held_on_a_node_after_two_kernel_panics() {
    let folder = tempfile::tempdir().unwrap();
    let (plane, mut one, mut two, mut shards) = serve(folder.path()).await;
    let node = shards[0].spec.node_name.clone();
    let agent = if node == "one" { &mut one } else { &mut two };
    let tools = folder.path().join("tools");
    std::fs::create_dir_all(tools.join("reports")).unwrap();
    agent.config.fabric_tools = Some(tools.clone());
    for day in 1..=2 {
        // A panic leaves dead processes of an earlier boot, and a report.
        agent.stop().await;
        let engine = pid(&shards[0]);
        signal(engine, "-9");
        let record =
            agent.config.data_dir.join("agent/engines").join(shards[0].metadata.uid.as_ref().unwrap());
        let record = record.join("state.json");
        let mut noted: serde_json::Value = serde_json::from_slice(&std::fs::read(&record).unwrap()).unwrap();
        noted["process"]["bootId"] = "before".into();
        std::fs::write(&record, noted.to_string()).unwrap();
        let report = format!(
            "panic(cpu 7): \"prepare count underflow\" @IOGPUMemory.cpp:550\nPanicked task 0x1: 9 pages: pid {engine}: russet-engine\n"
        );
        std::fs::write(tools.join(format!("reports/panic-full-2026-11-0{day}.panic")), report).unwrap();
        agent.start();
        if day == 1 {
            let said = event(&plane, "KernelPanicked").await;
            assert!(
                said.starts_with("the kernel panicked under default/chat: prepare count underflow @IOGPUMem"),
                "{said}"
            );
            shards = plane.serving(shards[0].spec.epoch + 1).await;
        }
    }
    let held = wait_until("a claim that is held", || async {
        let found = plane.shards().await;
        let of = found.iter().find(|shard| shard.spec.node_name == node)?;
        let claimed = get(&of.status.as_ref()?.conditions, Type::Claimed)?.clone();
        (claimed.reason == "HeldAfterPanics").then_some(claimed.message)
    })
    .await;
    assert!(held.contains("panicked 2 times under default/chat, last panic-full-2026-11-02"), "{held}");
    let deployments: Api<ModelDeployment> = Api::namespaced(plane.client.clone(), "default");
    wait_until("the deployment says so", || async {
        let status = deployments.get("chat").await.ok()?.status?;
        let ready = get(&status.conditions, Type::Ready)?;
        (ready.status == "False" && ready.message.contains("panicked 2 times")).then_some(())
    })
    .await;
    // Apply the remedy from the message.
    let agent = if node == "one" { &mut one } else { &mut two };
    agent.stop().await;
    std::fs::remove_file(agent.config.data_dir.join("agent/panics.json")).unwrap();
    agent.start();
    plane.serving(shards[0].spec.epoch + 1).await;
    one.stop().await;
    two.stop().await;
}
