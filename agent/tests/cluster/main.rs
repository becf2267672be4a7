//! Agents in a whole cluster: the real API server and the real operator in this process, real
//! engine processes that compute nothing (`examples/fake_engine.rs`).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, whichever function of it does")]

mod fabric;
mod guard;
mod joining;
mod mac_network;
mod mqtt;
mod network;
mod plane;
mod upgrade;

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt as _};
use russet_agent::Access;
use russet_agent::process::record;
use russet_crds::conditions::{Type, get, is_true};
use russet_crds::{
    CopyMode, InferenceNode, Model, ModelCopy, ModelCopySpec, ModelDeployment, ModelSource,
    NamespacedReference, Shard, ShardSpec,
};
use serde_json::json;

use self::plane::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_serve_through_kills_and_control_plane_loss() {
    let folder = tempfile::tempdir().unwrap();
    let mut plane = TestControlPlane::start(&folder.path().join("plane")).await;
    let mut one = TestAgent::join(&plane, folder.path(), "one", None).await;
    // As with an API server that does not trust the data-plane CA.
    let mut two = TestAgent::join(&plane, folder.path(), "two", Some(Access::Token)).await;

    plane.create_model(folder.path()).await;
    let deployments: Api<ModelDeployment> = Api::namespaced(plane.client.clone(), "default");
    deployments.create(&PostParams::default(), &deployment()).await.unwrap();

    // From nothing to serving: headers, plan, copies, claims, peers, engines.
    let first = plane.serving(1).await;
    assert_ne!(pid(&first[0]), pid(&first[1]));
    let nodes: Api<InferenceNode> = Api::all(plane.client.clone());
    wait_until("granted memory in the node's status", || async {
        let memory = nodes.get("one").await.ok()?.status?.memory?;
        (memory.granted_bytes > 0 && memory.total_bytes == 1 << 30).then_some(())
    })
    .await;
    let copies: Api<ModelCopy> = Api::all(plane.client.clone());
    for copy in copies.list(&ListParams::default()).await.unwrap() {
        let status = copy.status.clone().unwrap_or_default();
        assert!(is_true(&status.conditions, Type::Verified), "{status:?}");
        assert!(status.sha256.is_some() && status.bytes_done > 0, "{status:?}");
    }
    wait_until("both copies were used", || async {
        let copies = copies.list(&ListParams::default()).await.ok()?;
        copies
            .iter()
            .all(|copy| copy.status.as_ref().is_some_and(|it| it.last_used_time.is_some()))
            .then_some(())
    })
    .await;

    // Kill -9 of one rank: the whole group is formed again at a higher epoch.
    signal(pid(&first[1]), "-9");
    let second = plane.serving(first[0].spec.epoch + 1).await;
    for (before, after) in first.iter().zip(&second) {
        assert_ne!(pid(before), pid(after));
        assert!(!alive(pid(before)), "an engine of an older epoch lives on");
    }

    // The loss of an agent disturbs no engine, and the next agent adopts it.
    one.stop().await;
    two.stop().await;
    assert!(second.iter().all(|shard| alive(pid(shard))));
    one.start();
    two.start();
    // The kill of an adopted engine is noticed although it is not a child of this agent.
    let leases: Api<Lease> = Api::namespaced(plane.client.clone(), "russet-system");
    let renewed = |leases: Api<Lease>| async move {
        let lease = leases.get("node-one").await.ok()?;
        lease.spec?.renew_time
    };
    let before = renewed(leases.clone()).await;
    wait_until("a Lease renewed by the restarted agent", || async {
        let now = renewed(leases.clone()).await;
        (now > before).then_some(())
    })
    .await;
    let adopted = plane.serving(second[0].spec.epoch).await;
    assert_eq!(adopted.iter().map(pid).collect::<Vec<_>>(), second.iter().map(pid).collect::<Vec<_>>());

    // The loss of the control plane disturbs nothing either.
    plane.stop().await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(adopted.iter().all(|shard| alive(pid(shard))));
    plane.restart().await;
    let back = plane.serving(adopted[0].spec.epoch).await;
    assert_eq!(back.iter().map(pid).collect::<Vec<_>>(), adopted.iter().map(pid).collect::<Vec<_>>());
    let leases: Api<Lease> = Api::namespaced(plane.client.clone(), "russet-system");
    let before = renewed(leases.clone()).await;
    wait_until("a Lease renewed after the control plane came back", || async {
        (renewed(leases.clone()).await > before).then_some(())
    })
    .await;

    // The death of an adopted engine is noticed by its process alone.
    signal(pid(&back[0]), "-9");
    let third = plane.serving(back[0].spec.epoch + 1).await;

    // Deleting the deployment stops the engines and frees the memory.
    let deployments: Api<ModelDeployment> = Api::namespaced(plane.client.clone(), "default");
    deployments.delete("chat", &DeleteParams::default()).await.unwrap();
    let models: Api<Model> = Api::namespaced(plane.client.clone(), "default");
    models.delete("tiny", &DeleteParams::default()).await.unwrap();
    wait_until("engines that are gone", || async {
        (!third.iter().any(|shard| alive(pid(shard)))).then_some(())
    })
    .await;
    let nodes: Api<InferenceNode> = Api::all(plane.client.clone());
    wait_until("memory that is free again", || async {
        let memory = nodes.get("two").await.ok()?.status?.memory?;
        (memory.granted_bytes == 0).then_some(())
    })
    .await;
    // A deleted Model leaves no files behind, whether its copy or its engine ends first.
    let published = |agent: &TestAgent| {
        let entries = std::fs::read_dir(agent.config.data_dir.join("agent/models")).unwrap();
        let hidden = |name: std::ffi::OsString| name.to_string_lossy().starts_with('.');
        entries.filter(|entry| !hidden(entry.as_ref().unwrap().file_name())).count()
    };
    wait_until("stores that are empty", || async { (published(&one) + published(&two) == 0).then_some(()) })
        .await;
    one.stop().await;
    two.stop().await;
    plane.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_rejoins_the_reformed_group_or_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let mut plane = TestControlPlane::start(&folder.path().join("plane")).await;
    let mut one = TestAgent::join(&plane, folder.path(), "one", None).await;
    let mut two = TestAgent::join(&plane, folder.path(), "two", None).await;
    plane.create_model(folder.path()).await;
    let deployments: Api<ModelDeployment> = Api::namespaced(plane.client.clone(), "default");
    for (name, restarts, stays) in [("again", false, true), ("mute", false, false), ("mute", true, false)] {
        let story = format!("{name}, its agent restarts meanwhile: {restarts}");
        deployments.create(&PostParams::default(), &deployment_of(name)).await.unwrap();
        let before = plane.serving(1).await;
        // The survivor is rank 0; which agent runs it depends on the placement.
        signal(pid(&before[1]), "-9");
        let left = if before[0].spec.node_name == "one" { &mut one } else { &mut two };
        if restarts {
            let engines = left.config.data_dir.join("agent/engines");
            wait_until("an engine that is kept for the next formation", || async {
                record::load(&engines).iter().any(|record| record.kept).then_some(())
            })
            .await;
            left.stop().await;
            left.start();
        }
        let after = plane.serving(before[0].spec.epoch + 1).await;
        assert_eq!(after[0].spec.epoch, before[0].spec.epoch + 1, "{story}: more than one epoch passed");
        assert_eq!(pid(&after[0]) == pid(&before[0]), stays, "{story}");
        assert_eq!(alive(pid(&before[0])), stays, "{story}: an engine of an older epoch lives on");
        assert_ne!(pid(&after[1]), pid(&before[1]), "{story}");
        deployments.delete(name, &DeleteParams::default()).await.unwrap();
        wait_until("ranks that are gone", || async {
            let gone = !after.iter().any(|shard| alive(pid(shard)));
            (gone && plane.shards().await.is_empty()).then_some(())
        })
        .await;
    }
    one.stop().await;
    two.stop().await;
    plane.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hung_engine_is_killed_and_its_group_reforms() {
    let folder = tempfile::tempdir().unwrap();
    let mut plane = TestControlPlane::start(&folder.path().join("plane")).await;
    let mut one = TestAgent::join(&plane, folder.path(), "one", None).await;
    let mut two = TestAgent::join(&plane, folder.path(), "two", None).await;
    plane.create_model(folder.path()).await;
    let deployments: Api<ModelDeployment> = Api::namespaced(plane.client.clone(), "default");
    deployments.create(&PostParams::default(), &deployment()).await.unwrap();
    let events: Api<k8s_openapi::api::events::v1::Event> = Api::default_namespaced(plane.client.clone());
    let mut ranks = plane.serving(1).await;
    for (story, rank, name, reason, words) in [
        (
            "a process that is stopped answers nothing, not even SIGTERM",
            0,
            "-STOP",
            "EngineSilent",
            "sent no heartbeat for",
        ),
        (
            "one that beats, and whose batch does not end",
            1,
            "-USR1",
            "EngineHung",
            "where 0.020 s were forecast",
        ),
    ] {
        let before = ranks;
        signal(pid(&before[rank]), name);
        ranks = plane.serving(before[0].spec.epoch + 1).await;
        assert_eq!(ranks[0].spec.epoch, before[0].spec.epoch + 1, "{story}: more than one epoch passed");
        assert!(
            !before.iter().any(|shard| alive(pid(shard))),
            "{story}: an engine of an older epoch lives on"
        );
        wait_until(&format!("{story}: an event"), || async {
            let all = events.list(&ListParams::default()).await.ok()?.items;
            let says = |event: &k8s_openapi::api::events::v1::Event| {
                event.reason.as_deref() == Some(reason)
                    && event
                        .note
                        .as_ref()
                        .is_some_and(|note| note.contains(words) && note.contains(&format!("rank {rank}")))
            };
            all.iter().any(says).then_some(())
        })
        .await;
    }
    // A healthy engine is left alone.
    let epoch = ranks[0].spec.epoch;
    one.stop().await;
    one.start();
    let same = plane.serving(epoch).await;
    assert_eq!(same.iter().map(pid).collect::<Vec<_>>(), ranks.iter().map(pid).collect::<Vec<_>>());
    deployments.delete("chat", &DeleteParams::default()).await.unwrap();
    wait_until("engines that are gone", || async {
        (!same.iter().any(|shard| alive(pid(shard)))).then_some(())
    })
    .await;
    one.stop().await;
    two.stop().await;
    plane.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn oversized_or_unreadable_models_are_refused_in_status() {
    let folder = tempfile::tempdir().unwrap();
    let mut plane = TestControlPlane::start(&folder.path().join("plane")).await;
    let mut agent = TestAgent::join(&plane, folder.path(), "one", None).await;

    let copy = |name: &str, uri: String| {
        let spec = ModelCopySpec {
            model_ref: NamespacedReference { namespace: "default".into(), name: name.into() },
            source: ModelSource { uri, ..ModelSource::default() },
            commit: None,
            node_name: "one".into(),
            want: CopyMode::Files,
            retention: None,
            supply: None,
        };
        ModelCopy::new(name, spec)
    };
    let corrupt = folder.path().join("corrupt");
    let uri = model(&corrupt);
    std::fs::write(corrupt.join("model.safetensors"), [9_u8; 64]).unwrap();
    let copies: Api<ModelCopy> = Api::all(plane.client.clone());
    for (name, uri, reason, part) in [
        ("forbidden", "file:///etc".to_owned(), "SourceNotAllowed", "--allow-file-root"),
        ("absent", format!("file://{}/none", folder.path().display()), "SourceNotFound", "none"),
        ("corrupt", uri, "CorruptModel", "model.safetensors"),
    ] {
        copies.create(&PostParams::default(), &copy(name, uri)).await.unwrap();
        let ready = wait_until(name, || async {
            let status = copies.get(name).await.ok()?.status?;
            get(&status.conditions, Type::Ready).filter(|ready| ready.reason == reason).cloned()
        })
        .await;
        assert!(ready.status == "False" && ready.message.contains(part), "{}", ready.message);
    }

    // The owner's reserve is kept: no byte arrives, and the copy starts by itself when there is space.
    let nodes: Api<InferenceNode> = Api::all(plane.client.clone());
    let reserve = async |reserve: &str, bytes: u64| {
        let patch = Patch::Merge(json!({"spec": {"disk": {"reserve": reserve}}}));
        nodes.patch("one", &PatchParams::default(), &patch).await.unwrap();
        wait_until("a reserve in the node's status", || async {
            nodes.get("one").await.ok()?.status?.disk.filter(|disk| disk.reserve_bytes == Some(bytes))
        })
        .await
    };
    let disk = reserve("900Ti", 900 << 40).await;
    assert_eq!((disk.models_limit_bytes, disk.models_limit.as_deref()), (Some(0), Some("0")));
    assert!(disk.free_bytes > 0 && disk.total_bytes >= disk.free_bytes, "{disk:?}");
    copies
        .create(&PostParams::default(), &copy("roomless", model(&folder.path().join("good"))))
        .await
        .unwrap();
    let roomless = || async { copies.get("roomless").await.ok()?.status };
    let said = wait_until("a copy without room", || async {
        let ready = get(&roomless().await?.conditions, Type::Ready)?.clone();
        (ready.reason == "DiskPressure").then_some(ready.message)
    })
    .await;
    assert!(said.contains("900.0 TiB stay reserved") && said.contains("spec.disk.reserve"), "{said}");
    assert_eq!(roomless().await.unwrap().bytes_done, 0);
    reserve("1", 1).await;
    wait_until("the copy is there", || async {
        is_true(&roomless().await?.conditions, Type::Ready).then_some(())
    })
    .await;

    let spec = ShardSpec {
        group_ref: russet_crds::LocalReference::new("group"),
        group_uid: "g".into(),
        served_model_name: "chat".into(),
        model_ref: russet_crds::LocalReference::new("tiny"),
        node_name: "one".into(),
        layers_per_rank: vec![4],
        tensor_size: 1,
        weight_bytes: 2 << 30,
        context_tokens: 16,
        max_sequences: 1,
        kv_tokens: None,
        epoch: 1,
        ..ShardSpec::default()
    };
    let shards: Api<Shard> = Api::namespaced(plane.client.clone(), "default");
    shards.create(&PostParams::default(), &Shard::new("large", spec)).await.unwrap();
    let claimed = wait_until("a refusal", || async {
        let status = shards.get("large").await.ok()?.status?;
        get(&status.conditions, Type::Claimed).cloned()
    })
    .await;
    assert_eq!((claimed.status.as_str(), claimed.reason.as_str()), ("False", "MemoryRefused"));
    assert!(
        claimed.message.contains("2147483648") && claimed.message.contains("servingLimit"),
        "{}",
        claimed.message
    );
    assert_eq!(shards.get("large").await.unwrap().name_any(), "large");
    agent.stop().await;
    plane.stop().await;
}
