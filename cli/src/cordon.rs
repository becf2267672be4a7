//! `russet cordon` and `russet uncordon`: whether a node takes new work. Running replicas stay.

use anyhow::{Context, Result};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use russet_crds::{InferenceNode, Scheduling};
use serde_json::json;

use crate::client::Connection;
use crate::stdout::outln;

/// Arguments of `russet cordon` and `russet uncordon`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Name of the node.
    node: String,
    #[command(flatten)]
    connection: Connection,
}

/// Cordons a node.
pub async fn run(arguments: Arguments) -> Result<()> {
    let Arguments { node, connection } = arguments;
    schedule(&connection.client().await?, &node, Scheduling::Cordoned).await?;
    outln!("inferencenode/{node} cordoned: running engines stay, no new work is placed here")?;
    Ok(())
}

/// Uncordons a node.
pub async fn undo(arguments: Arguments) -> Result<()> {
    let Arguments { node, connection } = arguments;
    schedule(&connection.client().await?, &node, Scheduling::Enabled).await?;
    outln!("inferencenode/{node} uncordoned: new work may come")?;
    Ok(())
}

/// Patches `spec.scheduling`.
pub async fn schedule(client: &Client, node: &str, scheduling: Scheduling) -> Result<()> {
    let nodes: Api<InferenceNode> = Api::all(client.clone());
    let patch = json!({"spec": {"scheduling": scheduling}});
    nodes
        .patch(node, &PatchParams::default(), &Patch::Merge(patch))
        .await
        .with_context(|| format!("the scheduling of node {node} could not be changed"))?;
    Ok(())
}
