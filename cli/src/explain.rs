//! `russet explain`: what a deployment needs, where it runs and why, and what keeps it from running. The
//! planner computes it from the cluster's current state; nothing is written. `russet explain route` says where a request
//! would go.

mod route;

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use jiff::Timestamp;
use kube::ResourceExt as _;
use russet_crds::ModelDeployment;
use russet_plan::proposal::propose;
use russet_rpc::list_item::list_decodable;

use crate::client::Connection;
use crate::plan::{read_server, text};
use crate::stdout::out;

/// Arguments of `russet explain`.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Arguments {
    #[command(subcommand)]
    subject: Option<Subject>,
    /// Name of the ModelDeployment; without it, all of the namespace.
    name: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

/// What else can be explained.
#[derive(clap::Subcommand)]
enum Subject {
    /// Says which targets of its ModelRoute a request to a model would try, by which rule, and why not others.
    Route(route::Arguments),
}

/// Prints the explanation.
pub async fn run(arguments: Arguments) -> Result<()> {
    let Arguments { subject, name, connection } = arguments;
    if let Some(Subject::Route(arguments)) = subject {
        return route::run(arguments).await;
    }
    let cluster = read_server(&connection).await?.cluster();
    let all =
        list_decodable(&connection.client().await?).await.context("the deployments could not be listed")?;
    // All deployments, since pending replicas are placed jointly.
    let deployments: Vec<Arc<ModelDeployment>> = all.into_iter().map(Arc::new).collect();
    let namespace = &connection.namespace();
    let known: Vec<String> = deployments
        .iter()
        .filter(|deployment| deployment.namespace().as_deref() == Some(namespace))
        .map(|deployment| deployment.name_any())
        .collect();
    if let Some(name) = name.as_ref().filter(|name| !known.contains(name)) {
        match known.as_slice() {
            [] => bail!(
                "there is no ModelDeployment in namespace {namespace}; apply one, or name another with -n"
            ),
            names => bail!(
                "there is no ModelDeployment {name} in namespace {namespace}; there are {}",
                names.join(", ")
            ),
        }
    }
    let now = Timestamp::now();
    let view = cluster.snapshot(now);
    let mut proposals = propose(&cluster.models, &view, &deployments, Some(now));
    proposals.retain(|proposal| {
        proposal.namespace == *namespace && name.as_ref().is_none_or(|name| *name == proposal.name)
    });
    out!("{}", text::show(&view, &proposals))?;
    Ok(())
}
