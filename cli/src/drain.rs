//! `russet drain`: moves all replicas off a node and returns once it is empty. Replacements start elsewhere
//! first if they fit; the old replica serves for up to half a minute before it stops.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, bail};
use kube::{Api, Client, ResourceExt as _};
use russet_crds::conditions::{self, Type};
use russet_crds::{InferenceNode, ModelDeployment, Scheduling, Shard, ShardGroup};
use russet_telemetry::say;
use tokio::time::Instant;

use crate::api_error;
use crate::client::Connection;
use crate::cordon::schedule;
use crate::stdout::{self, outln};

/// Arguments of `russet drain`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Name of the node.
    node: String,
    /// Maximum seconds to wait; the node continues to drain afterwards.
    #[arg(long, default_value_t = 600)]
    timeout_seconds: u64,
    #[command(flatten)]
    connection: Connection,
}

/// A group by namespace and name.
type GroupKey = (String, String);

/// Drains the node, with a line for every group that has moved.
pub async fn run(arguments: Arguments) -> Result<()> {
    let Arguments { node, timeout_seconds, connection } = arguments;
    let client = connection.client().await?;
    schedule(&client, &node, Scheduling::Draining).await?;
    outln!(
        "inferencenode/{node} draining: running replicas move to other nodes, no new work is placed here"
    )?;
    let deadline = Instant::now() + Duration::from_secs(timeout_seconds);
    let mut here = BTreeMap::new();
    let mut last = String::new();
    loop {
        // A control plane that restarts is waited for as well.
        let (drained, message) = match poll(&client, &node, &mut here).await {
            Ok(seen) => seen,
            Err(error) if stdout::is_stdout(&error) => return Err(error),
            Err(error) => (false, api_error::text(&error)),
        };
        if drained {
            outln!("inferencenode/{node} drained: no engine runs there")?;
            return Ok(());
        }
        if message != last {
            say!("waiting: {message}");
            last = message;
        }
        if Instant::now() >= deadline {
            bail!(
                "node {node} is not empty after {timeout_seconds} s: {last}; free memory on other nodes, scale down its deployments, or undo the drain with `russet uncordon {node}`"
            );
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

/// Whether the node is empty, and its message; prints groups that left since the last poll.
async fn poll(client: &Client, node: &str, here: &mut BTreeMap<GroupKey, String>) -> Result<(bool, String)> {
    let shards: Api<Shard> = Api::all(client.clone());
    let groups: Api<ShardGroup> = Api::all(client.clone());
    let deployments: Api<ModelDeployment> = Api::all(client.clone());
    let params = Default::default();
    let (shards, groups, deployments) =
        tokio::try_join!(shards.list(&params), groups.list(&params), deployments.list(&params))?;
    let deployment_of = |key: &GroupKey| {
        let group = groups
            .items
            .iter()
            .find(|group| group.namespace().as_deref() == Some(&key.0) && group.name_any() == key.1);
        group.map(|group| group.spec.deployment_ref.name.clone())
    };
    let now: BTreeMap<GroupKey, String> = shards
        .items
        .iter()
        .filter(|shard| shard.spec.node_name == node)
        .map(|shard| (shard.namespace().unwrap_or_default(), shard.spec.group_ref.name.clone()))
        .map(|key| {
            let deployment = deployment_of(&key).or_else(|| here.get(&key).cloned()).unwrap_or_default();
            (key, deployment)
        })
        .collect();
    for ((namespace, group), deployment) in here.iter().filter(|(key, _)| !now.contains_key(*key)) {
        outln!("shardgroup/{group} moved: {}", destinations(&groups.items, namespace, deployment))?;
    }
    here.clone_from(&now);

    let nodes: Api<InferenceNode> = Api::all(client.clone());
    let found = nodes.get(node).await?;
    let conditions = found.status.map(|status| status.conditions).unwrap_or_default();
    let drained = conditions::get(&conditions, Type::Drained);
    let current = drained.filter(|it| it.observed_generation == found.metadata.generation);
    let mut message = match current {
        Some(condition) => condition.message.clone(),
        None => "the operator has not processed the node yet".to_owned(),
    };
    // A replica that fits nowhere else stays, and its deployment says why.
    for ((namespace, _), deployment) in &now {
        let stuck = deployments
            .items
            .iter()
            .find(|it| it.namespace().as_deref() == Some(namespace) && it.name_any() == *deployment);
        let stuck = stuck.and_then(|it| it.status.as_ref());
        let why = stuck.and_then(|status| conditions::get(&status.conditions, Type::Stalled));
        if let Some(why) = why.filter(|why| why.status == "True") {
            message.push_str(&format!("; ModelDeployment {namespace}/{deployment}: {}", why.message));
        }
    }
    Ok((current.is_some_and(|condition| condition.status == "True"), message))
}

/// The current nodes of a deployment's groups.
fn destinations(groups: &[ShardGroup], namespace: &str, deployment: &str) -> String {
    let living = groups.iter().filter(|group| {
        group.namespace().as_deref() == Some(namespace)
            && group.spec.deployment_ref.name == deployment
            && group.metadata.deletion_timestamp.is_none()
    });
    let places: Vec<String> = living
        .map(|group| {
            let members = &group.spec.plan.members;
            let nodes: Vec<&str> = members.iter().map(|member| member.node_name.as_str()).collect();
            format!("{deployment} runs as shardgroup/{} on {}", group.name_any(), nodes.join(", "))
        })
        .collect();
    if places.is_empty() { format!("{deployment} runs nowhere else") } else { places.join("; ") }
}
