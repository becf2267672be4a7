//! What a tenant tries on another one, on a machine with a gateway, an agent and both tenants: its models, its credentials,
//! the machine's networks and folders, its replicas, its names, its keys and its prompts. Each attempt is refused, or what
//! the two get is apart.

mod serving;
mod sources;

use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use futures::future::LocalBoxFuture;
use reqwest::Method;
use russet_tests::cluster::repository;
use russet_tests::tenants::{HOSTILE, MachineOptions, OTHER, RUSSET, TenantMachine};
use serde_json::{Value, json};

use crate::table;

/// A repository of the hub whose weights need a token.
const CLOSED: &str = "other/closed";
/// A repository of the hub that anybody may read.
const OPEN: &str = "hostile/open";
/// Where buckets listen; the machine's owner allowed sources there.
const BUCKETS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 0, 2));
/// Memory of the machine: for two replicas of the smoke model, or for one with much room for conversations.
const MEMORY: &str = "900Mi";
const SMOKE_FILES: &str = "engine/smoke/model";

/// A sequence of requests, and what it is called.
pub struct TenantSequence {
    pub name: &'static str,
    pub run: for<'a> fn(&'a TenantMachine) -> LocalBoxFuture<'a, Result<()>>,
}

/// A sequence by the name of its function.
macro_rules! sequence {
    ($room:ident::$name:ident) => {
        TenantSequence { name: stringify!($name), run: |machine| Box::pin($room::$name(machine)) }
    };
}

/// All of them, in this order: a key closes the gateway to callers without one.
pub const SEQUENCES: &[TenantSequence] = &[
    sequence!(sources::one_uri_is_each_tenants_own_bucket),
    sequence!(sources::closed_weights_need_the_tenants_own_credential),
    sequence!(sources::folders_of_the_machine_are_closed),
    sequence!(sources::sources_reach_no_private_address),
    sequence!(serving::replicas_of_others_stop_for_nobody_but_who_may_decide),
    sequence!(serving::a_route_takes_no_name_of_others),
    sequence!(serving::a_secret_stays_with_its_namespace),
    sequence!(serving::cached_prefixes_say_nothing_of_others),
];

/// Starts the machine in `folder`.
pub async fn start(folder: &Path) -> Result<TenantMachine> {
    let model = repository().join(SMOKE_FILES);
    let ranges = BUCKETS.to_string();
    let options = MachineOptions {
        repositories: &[(CLOSED, &model), (OPEN, &model)],
        arguments: &["--allow-private-sources", &ranges, "--memory", MEMORY],
        ..MachineOptions::default()
    };
    let machine = TenantMachine::start(folder, &options).await?;
    for namespace in [HOSTILE, OTHER] {
        let_nodes_read_secrets(&machine, namespace).await?;
    }
    create(&machine, HOSTILE, "models", table::model("smoke", "builtin://smoke")).await?;
    Ok(machine)
}

/// A row of `cargo xtask proof attempts`.
fn row(what: &str, answer: &str) {
    println!("attempts | tenant | {what} | {answer}");
}

/// Path of an object of a namespace.
fn path(namespace: &str, plural: &str, name: &str) -> String {
    format!("{}/{name}", collection(namespace, plural))
}

/// Path of the objects of a namespace.
fn collection(namespace: &str, plural: &str) -> String {
    let root = if plural == "secrets" { "/api/v1" } else { RUSSET };
    format!("{root}/namespaces/{namespace}/{plural}")
}

/// Sends a JSON object as the tenant of `namespace`; it must be accepted.
async fn create(machine: &TenantMachine, namespace: &str, plural: &str, object: Value) -> Result<()> {
    let path = collection(namespace, plural);
    let (code, answer) = send(machine, namespace, Method::POST, &path, &object).await?;
    ensure!(code == 201, "{path}: {code} {answer}");
    Ok(())
}

/// A request of the tenant of `namespace`: the status code, and the body.
async fn send(
    machine: &TenantMachine,
    namespace: &str,
    method: Method,
    path: &str,
    object: &Value,
) -> Result<(u16, Value)> {
    let media = if method == Method::PATCH { "application/merge-patch+json" } else { "application/json" };
    let body = if object.is_null() { Vec::new() } else { object.to_string().into_bytes() };
    let (code, answer) = machine.send(Some(namespace), method, path, media, body).await?;
    Ok((code.as_u16(), serde_json::from_slice(&answer)?))
}

async fn delete(machine: &TenantMachine, namespace: &str, plural: &str, name: &str) -> Result<()> {
    let path = path(namespace, plural, name);
    let (code, answer) = send(machine, namespace, Method::DELETE, &path, &Value::Null).await?;
    ensure!(code == 200, "{path}: {code} {answer}");
    machine.until_object("it is gone", &path, Value::is_null).await.map(drop)
}

/// An object with the fields of another one.
fn merged(mut object: Value, more: Value) -> Value {
    if let (Some(object), Value::Object(more)) = (object.as_object_mut(), more) {
        object.extend(more);
    }
    object
}

/// Lets nodes read the Secrets of `namespace` for sources, as `russet credentials add` does.
async fn let_nodes_read_secrets(machine: &TenantMachine, namespace: &str) -> Result<()> {
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "russet-sources"},
        "rules": [{"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["bucket", "endpoint", "hub"], "verbs": ["get"]}],
    });
    let path = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles/russet-sources");
    machine.apply(&path, role).await
}

/// Waits until a condition of an object has this reason; returns its message.
async fn reason(machine: &TenantMachine, path: &str, reason: &str) -> Result<String> {
    let of_reason = |object: &Value| {
        let conditions = object["status"]["conditions"].as_array()?;
        conditions.iter().find(|condition| condition["reason"] == reason).cloned()
    };
    let object = machine
        .until_object(&format!("{path} says {reason}"), path, |object| of_reason(object).is_some())
        .await?;
    let message = of_reason(&object).and_then(|condition| condition["message"].as_str().map(str::to_owned));
    message.with_context(|| format!("{reason} without a message"))
}
