//! Priorities against the embedded API server: approval first, then preemption, and OnDemand deployments.

use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use russet_crds::conditions::{Type, get};
use russet_crds::{Approval, LocalReference, ModelDeployment, Sharding};
use serde_json::{Value, json};

use crate::harness::{ClusterHarness, GIB, deployment, model, until};
use crate::tiers::{apply_tier, runs_on};
use crate::{ready, says};

fn of_tier(name: &str, tier: &str) -> ModelDeployment {
    let mut deployment = deployment(name, "m", Sharding::default());
    deployment.spec.tier_ref = Some(LocalReference::new(tier));
    deployment
}

/// Waits until a deployment's Ready has this reason; returns the message.
async fn wait_ready_reason(cluster: &ClusterHarness, name: &str, reason: &str) -> String {
    let deployments: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
    let found = until(&format!("{name} says {reason}"), || async {
        deployments.get(name).await.ok().filter(|deployment| says(deployment, Type::Ready, reason))
    })
    .await;
    let status = found.status.unwrap();
    get(&status.conditions, Type::Ready).unwrap().message.clone()
}

async fn decide(
    cluster: &ClusterHarness,
    approval: &str,
    decision: &str,
    by: &str,
) -> Result<Approval, kube::Error> {
    let api: Api<Approval> = Api::default_namespaced(cluster.admin.clone());
    let patch = json!({"spec": {"decision": decision, "decidedBy": by}});
    api.patch(approval, &PatchParams::default(), &Patch::Merge(patch)).await
}

/// Lets a user decide on Approvals of a namespace.
async fn let_decide(cluster: &ClusterHarness, user: &str, namespace: &str) {
    let role: Role = serde_json::from_value(json!({
        "metadata": {"name": "decides"},
        "rules": [{"apiGroups": ["russet.dev"], "resources": ["approvals"], "verbs": ["get", "update", "patch"]}],
    }))
    .unwrap();
    let binding: RoleBinding = serde_json::from_value(json!({
        "metadata": {"name": "decides"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "decides"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    }))
    .unwrap();
    let admin = &cluster.admin;
    Api::namespaced(admin.clone(), namespace).create(&Default::default(), &role).await.unwrap();
    Api::namespaced(admin.clone(), namespace).create(&Default::default(), &binding).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_others_is_decided_by_who_may_decide_there() {
    let cluster = ClusterHarness::start(&[]).await;
    let other: Namespace = serde_json::from_value(json!({"metadata": {"name": "other"}})).unwrap();
    Api::all(cluster.admin.clone()).create(&Default::default(), &other).await.unwrap();
    let jane = cluster.client("jane", "people").await;
    let decide = async |name: &str| {
        let api: Api<Approval> = Api::default_namespaced(jane.clone());
        let patch = json!({"spec": {"decision": "Approved", "decidedBy": "jane"}});
        api.patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await
            .map_err(|error| error.to_string())
    };
    for (name, affects) in [("own", "default/low"), ("others", "other/low")] {
        let mut approval = Approval::new(name, Default::default());
        approval.spec.deployment_ref = Some(LocalReference::new("high"));
        approval.spec.plan_hash = "0123456789abcdef".to_owned();
        approval.spec.affects = vec![affects.to_owned()];
        cluster.create(approval).await;
    }
    let_decide(&cluster, "jane", "default").await;
    decide("own").await.unwrap();
    let refused = decide("others").await.unwrap_err();
    assert!(refused.contains("it stops replicas of other namespaces, other/low"), "{refused}");
    let_decide(&cluster, "jane", "other").await;
    decide("others").await.unwrap();
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn approved_preemption_stops_lower_priority_replicas() {
    let cluster = ClusterHarness::start(&[("a", 8 * GIB)]).await;
    cluster.create(model("m", "llama", 4, GIB)).await;
    let (spare, daily) = (
        json!({"mode": "Cluster", "priority": 10, "minResidencySeconds": 0, "approvals": ["Preempt"]}),
        json!({"mode": "Cluster", "priority": 100, "preemption": "LowerPriority"}),
    );
    apply_tier(&cluster, "spare", spare).await.unwrap();
    apply_tier(&cluster, "daily", daily).await.unwrap();
    cluster.create(of_tier("low", "spare")).await;
    assert_eq!(runs_on(&cluster, "low").await, "a");
    cluster.create(of_tier("high", "daily")).await;
    let message = wait_ready_reason(&cluster, "high", "AwaitingApproval").await;
    assert!(message.contains("fits if replicas of default/low stop"), "{message}");

    // The decision carries the user name of its author.
    let approvals: Api<Approval> = Api::default_namespaced(cluster.admin.clone());
    let asked = approvals.list(&Default::default()).await.unwrap().items;
    let [asked] = asked.as_slice() else { panic!("one question: {asked:?}") };
    assert_eq!(asked.spec.affects, ["default/low"]);
    assert!(message.contains(&asked.spec.plan_hash), "{message}");
    let name = asked.name_any();
    let refused = decide(&cluster, &name, "Approved", "somebody-else").await.unwrap_err().to_string();
    assert!(
        refused.contains("decidedBy is who decides") && refused.contains("not somebody-else"),
        "{refused}"
    );
    let reviews: Api<SelfSubjectReview> = Api::all(cluster.admin.clone());
    let review = reviews.create(&Default::default(), &SelfSubjectReview::default()).await.unwrap();
    let me = review.status.unwrap().user_info.unwrap().username.unwrap();
    decide(&cluster, &name, "Denied", &me).await.unwrap();
    let message = wait_ready_reason(&cluster, "high", "Denied").await;
    assert!(message.contains("was denied"), "{message}");
    assert_eq!(runs_on(&cluster, "low").await, "a");

    decide(&cluster, &name, "Approved", &me).await.unwrap();
    assert_eq!(runs_on(&cluster, "high").await, "a");
    wait_ready_reason(&cluster, "low", "NothingFits").await;
    let answered = until("the answer is seen", || async {
        let status = approvals.get(&name).await.ok()?.status?;
        let ready = get(&status.conditions, Type::Ready)?.clone();
        (ready.reason == "Approved" && status.decided_at.is_some()).then_some(ready.message)
    });
    assert_eq!(answered.await, format!("approved by {me}"));
    let events: Api<Event> = Api::default_namespaced(cluster.admin.clone());
    until("an event on low names the deployment it stopped for", || async {
        let all = events.list(&Default::default()).await.ok()?;
        let mut notes = all.iter().filter(|event| event.reason.as_deref() == Some("Preempted"));
        notes.find(|event| {
            event.note.as_deref().is_some_and(|note| note.contains("to free memory for default/high"))
        })?;
        Some(())
    })
    .await;
    assert_eq!(cluster.refusals(), 0);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_demand_deployment_runs_only_while_requested() {
    let cluster = ClusterHarness::start(&[("a", 8 * GIB)]).await;
    let deployments: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
    cluster.create(model("m", "llama", 4, GIB)).await;
    let rare = json!({"mode": "Cluster", "residency": "OnDemand", "idleSeconds": 10});
    apply_tier(&cluster, "rare", rare).await.unwrap();
    cluster.create(of_tier("seldom", "rare")).await;
    let message = wait_ready_reason(&cluster, "seldom", "Idle").await;
    assert!(message.contains("it starts with the next request"), "{message}");
    assert!(deployments.get("seldom").await.is_ok_and(|seldom| ready(&seldom)), "what rests is settled");

    // A gateway holds a request; it is answered, and no further request follows.
    let report = async |waiting: u32| {
        let now = jiff::Timestamp::now();
        let demand = json!([{"gateway": "g", "reportedAt": now, "lastRequestTime": now, "waiting": waiting, "active": 0}]);
        let status: Value = json!({
            "apiVersion": "russet.dev/v1alpha1", "kind": "ModelDeployment", "metadata": {"name": "seldom"},
            "status": {"demand": demand},
        });
        let params = PatchParams::apply("gateway").force();
        deployments.patch_status("seldom", &params, &Patch::Apply(status)).await.unwrap();
    };
    report(1).await;
    wait_ready_reason(&cluster, "seldom", "Serving").await;
    assert_eq!(runs_on(&cluster, "seldom").await, "a");
    report(0).await;
    wait_ready_reason(&cluster, "seldom", "Idle").await;
    until("its memory is free", || async { (cluster.granted("a").await == 0).then_some(()) }).await;
    cluster.stop().await;
}
