//! Autoscaling against the embedded API server: stub gateways, which may write a deployment's demand and
//! nothing else of it.

use jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt as _};
use russet_crds::conditions::{Type, get};
use russet_crds::{Autoscaling, ModelDeployment, PredictiveScaling, Sharding, ShardingMode};
use serde_json::{Value, json};

use crate::harness::{ClusterHarness, GIB, deployment, model, until};
use crate::{ready, says};

/// Writes the demand of gateway `name` for the deployment `chat`.
async fn report(gateway: &Client, name: &str, waiting: u32, active: u32) {
    let now = Timestamp::now();
    let entry = json!({
        "gateway": name, "reportedAt": now, "lastRequestTime": now, "waiting": waiting, "active": active,
    });
    apply(gateway, name, json!({"demand": [entry]})).await.unwrap();
}

async fn apply(gateway: &Client, name: &str, status: Value) -> Result<ModelDeployment, kube::Error> {
    let api: Api<ModelDeployment> = Api::default_namespaced(gateway.clone());
    let patch = json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": "ModelDeployment", "metadata": {"name": "chat"}, "status": status,
    });
    let params = PatchParams::apply(&russet_crds::names::gateway_manager(name)).force();
    api.patch_status("chat", &params, &Patch::Apply(patch)).await
}

fn scaled(deployment: &ModelDeployment, replicas: i32, reason: &str) -> bool {
    let generation = deployment.metadata.generation;
    let active = deployment.status.as_ref().and_then(|status| get(&status.conditions, Type::ScalingActive));
    deployment.spec.replicas == replicas
        && active.is_some_and(|it| it.reason == reason && it.observed_generation <= generation)
}

/// The deployment `chat`, once this is true of it.
async fn seen(
    deployments: Api<ModelDeployment>,
    what: &'static str,
    is: fn(&ModelDeployment) -> bool,
) -> ModelDeployment {
    until(what, || async { deployments.get("chat").await.ok().filter(is) }).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_follow_demand_and_sleep_without_it() {
    let cluster = ClusterHarness::start(&[("a", 8 * GIB), ("b", 8 * GIB)]).await;
    let deployments: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
    let gateway = cluster.client(russet_rpc::tls::GATEWAY_USER, "russet:components").await;
    let seen = |what, is| seen(deployments.clone(), what, is);
    cluster.create(model("m", "llama", 4, GIB)).await;
    // The two nodes' free memory would hold a third replica between them.
    let single = Sharding { mode: ShardingMode::Single, ..Sharding::default() };
    let mut chat = deployment("chat", "m", single);
    chat.spec.autoscaling = Some(Autoscaling {
        min_replicas: 0,
        max_replicas: 3,
        target_queue: 2,
        target_ttft_milliseconds: None,
        idle_seconds: 2,
        max_idle_seconds: None,
        predictive: None,
    });
    cluster.create(chat).await;
    seen("it answers", ready).await;

    // Without requests it is scaled to zero, settled, and holds no memory.
    seen("it sleeps", |chat| scaled(chat, 0, "Idle") && ready(chat) && says(chat, Type::Ready, "Stopped"))
        .await;

    // Two gateways hold requests: three replicas are needed, and two fit.
    report(&gateway, "one", 3, 0).await;
    report(&gateway, "two", 1, 2).await;
    let chat = seen("as many as fit", |chat| {
        scaled(chat, 2, "NothingFits") && chat.status.as_ref().is_some_and(|it| it.ready_replicas == 2)
    })
    .await;
    let owner = chat.managed_fields().iter().find(|fields| {
        fields.fields_v1.as_ref().is_some_and(|owned| owned.0["f:spec"].get("f:replicas").is_some())
    });
    assert_eq!(owner.unwrap().manager.as_deref(), Some("russet-autoscaler"));
    // Fields of the status that others write stay theirs.
    let demand = chat.status.unwrap().demand;
    assert_eq!(demand.iter().map(|entry| entry.gateway.as_str()).collect::<Vec<_>>(), ["one", "two"]);

    // A gateway may write nothing else of a deployment's status, and no spec.
    let refused = apply(&gateway, "one", json!({"readyReplicas": 9})).await.unwrap_err().to_string();
    assert!(refused.contains("the gateway may write status.demand"), "{refused}");
    let theirs: Api<ModelDeployment> = Api::default_namespaced(gateway.clone());
    let patch = Patch::Merge(json!({"spec": {"replicas": 9}}));
    assert!(theirs.patch("chat", &PatchParams::default(), &patch).await.is_err());
    assert!(theirs.patch_scale("chat", &PatchParams::default(), &patch).await.is_err());

    // All requests done: it is scaled to zero again.
    report(&gateway, "one", 0, 0).await;
    report(&gateway, "two", 0, 0).await;
    seen("it sleeps again", |chat| scaled(chat, 0, "Idle") && ready(chat)).await;

    // One request scales up one replica, also under an operator without history.
    let mut cluster = cluster;
    cluster.restart_operator().await;
    report(&gateway, "two", 1, 0).await;
    seen("it is awake", |chat| scaled(chat, 1, "ScaledByDemand") && ready(chat)).await;

    // Removing autoscaling returns the number of replicas to the user.
    let patch = Patch::Merge(json!({"spec": {"autoscaling": null}}));
    deployments.patch("chat", &PatchParams::default(), &patch).await.unwrap();
    seen("nothing is said of scaling", |chat| {
        let status = chat.status.as_ref();
        status.is_some_and(|status| get(&status.conditions, Type::ScalingActive).is_none())
    })
    .await;
    assert_eq!(cluster.refusals(), 0);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_starts_replicas_before_anybody_asks() {
    let cluster = ClusterHarness::start(&[("a", 8 * GIB), ("b", 8 * GIB)]).await;
    let deployments: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
    let gateway = cluster.client(russet_rpc::tls::GATEWAY_USER, "russet:components").await;
    let seen = |what, is| seen(deployments.clone(), what, is);
    let history = |chat: &ModelDeployment| chat.status.clone().and_then(|status| status.demand_history);
    cluster.create(model("m", "llama", 4, GIB)).await;
    let single = Sharding { mode: ShardingMode::Single, ..Sharding::default() };
    let mut chat = deployment("chat", "m", single);
    chat.spec.autoscaling = Some(Autoscaling {
        min_replicas: 0,
        max_replicas: 2,
        target_queue: 2,
        idle_seconds: 1,
        predictive: Some(PredictiveScaling { max_replicas: 2, ..PredictiveScaling::default() }),
        ..Autoscaling::default()
    });
    cluster.create(chat).await;
    let chat = seen("it sleeps", |chat| scaled(chat, 0, "Idle") && ready(chat)).await;
    let counted = history(&chat).expect("the hour is counted from the start");
    assert_eq!((counted.replicas, counted.time_zone.as_str()), (0, "UTC"));

    // What requests need is counted; of a deployment that sleeps again too.
    report(&gateway, "one", 3, 0).await;
    seen("two replicas answer", |chat| scaled(chat, 2, "ScaledByDemand") && ready(chat)).await;
    report(&gateway, "one", 0, 0).await;
    let chat = seen("it sleeps again", |chat| scaled(chat, 0, "Idle") && ready(chat)).await;
    // The hour may have changed since: then its digit says it.
    let counted = history(&chat).unwrap();
    let digits: String = counted.days.iter().flat_map(|day| day.weeks.clone()).collect();
    assert!(counted.replicas == 2 || digits.contains('2'), "{counted:?}");
    let owner = |path: &str| {
        let owns = |fields: &&k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry| {
            fields.fields_v1.as_ref().is_some_and(|owned| owned.0["f:status"].get(path).is_some())
        };
        chat.managed_fields()
            .iter()
            .filter(owns)
            .filter_map(|fields| fields.manager.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(owner("f:demandHistory"), ["russet-demand-history"]);

    // Two weeks needed two replicas at this hour, whichever it is.
    let every_hour = |day: &str| json!({"day": day, "weeks": vec!["2".repeat(24), "2".repeat(24)]});
    let days: Vec<Value> = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"].map(every_hour).into();
    let taught = json!({"timeZone": "UTC", "hour": counted.hour, "days": days});
    let patch = json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": "ModelDeployment", "metadata": {"name": "chat"},
        "status": {"demandHistory": taught},
    });
    // As the operator, which owns the field alone then.
    let params = PatchParams::apply(russet_crds::names::DEMAND_HISTORY_MANAGER).force();
    deployments.patch_status("chat", &params, &Patch::Apply(patch)).await.unwrap();
    let rule = json!({"spec": {"autoscaling": {"predictive": {"maxHoursPerDay": 24}}}});
    deployments.patch("chat", &PatchParams::default(), &Patch::Merge(rule)).await.unwrap();
    let chat = seen("two replicas wait for requests", |chat| {
        scaled(chat, 2, "ScaledByHistory") && ready(chat) && chat.status.as_ref().unwrap().ready_replicas == 2
    })
    .await;
    let status = chat.status.clone().unwrap();
    let why = get(&status.conditions, Type::ScalingActive).unwrap().message.clone();
    assert!(why.contains("2 replicas were needed on ") && why.contains("in 2 of the last 4 weeks"), "{why}");

    // A time zone that does not exist is named, and demand alone decides.
    let rule = json!({"spec": {"autoscaling": {"predictive": {"timeZone": "Mars/Base"}}}});
    deployments.patch("chat", &PatchParams::default(), &Patch::Merge(rule)).await.unwrap();
    seen("the time zone is named", |chat| {
        let active = chat.status.as_ref().and_then(|status| get(&status.conditions, Type::ScalingActive));
        let named = active.is_some_and(|it| it.status == "False" && it.message.contains("Mars/Base"));
        scaled(chat, 0, "InvalidSpec") && named
    })
    .await;
    // What was counted is kept until the name is right again.
    let chat = deployments.get("chat").await.unwrap();
    assert!(history(&chat).is_some_and(|history| history.days.len() == 7));

    // Without the rule nothing is counted.
    let rule = json!({"spec": {"autoscaling": {"predictive": null}}});
    deployments.patch("chat", &PatchParams::default(), &Patch::Merge(rule)).await.unwrap();
    seen("it sleeps, and has no history", |chat| {
        scaled(chat, 0, "Idle") && chat.status.as_ref().is_some_and(|status| status.demand_history.is_none())
    })
    .await;
    assert_eq!(cluster.refusals(), 0);
    cluster.stop().await;
}
