//! `russet plan`: what the planner would do with YAML files, on a server's cluster or on a described one. It
//! writes nothing. Not here: decisions (`russet_plan::proposal`).

pub mod text;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use jiff::Timestamp;
use russet_crds::{GROUP, VERSION};
use russet_plan::manifests::{KINDS, ManifestOrigin, ManifestSet};
use russet_plan::placement::RemovalReason;
use russet_plan::proposal::{Proposal, ProposedReplica, propose};
use russet_telemetry::say;
use serde_json::{Value, json};

use crate::api_error;
use crate::client::{self, Connection};
use crate::manifests::{self, Document, is_standard_input};
use crate::stdout::{out, outln};

/// Exit code if an input cannot be read.
const UNREADABLE: u8 = 2;
/// Exit code if a replica is not placed.
const NOT_PLACED: u8 = 3;

/// Arguments of `russet plan`.
#[derive(clap::Args)]
#[command(
    after_help = "Exits with 0 when everything is placed, 3 when something is not, 2 when a file cannot be read."
)]
pub struct Arguments {
    /// Objects to plan as if applied: a YAML file, a folder of them, or `-`; may be given several times.
    #[arg(short, long = "filename", required = true)]
    filename: Vec<PathBuf>,
    /// The cluster, as `kubectl get inferencenodes,models,shardgroups,… -A -o yaml` prints it, instead of a
    /// server's.
    #[arg(long)]
    cluster: Vec<PathBuf>,
    /// `table`, `yaml` or `json`.
    #[arg(short, long, default_value = "table", value_parser = ["table", "yaml", "json"])]
    output: String,
    #[command(flatten)]
    connection: Connection,
}

/// Prints the proposals.
pub async fn run(arguments: Arguments) -> Result<ExitCode> {
    let Arguments { filename, cluster, output, connection } = arguments;
    let seen = match read(&filename, &cluster, &connection.namespace()) {
        // A description says since when a node is unreachable and not when it was written. An unreachable
        // node thus never counts as unreachable for so long that its replicas would move.
        Ok((spec, Some(described))) => {
            with_spec(described, spec).map(|described| (described, Timestamp::MIN))
        }
        Ok((spec, None)) => {
            with_spec(read_server(&connection).await?, spec).map(|listed| (listed, Timestamp::now()))
        }
        Err(error) => Err(error),
    };
    let (described, now) = match seen {
        Ok(seen) => seen,
        Err(error) => {
            say!("error: {}", api_error::text(&error));
            return Ok(ExitCode::from(UNREADABLE));
        }
    };
    let cluster = described.cluster();
    let view = cluster.snapshot(now);
    let proposals = propose(&cluster.models, &view, &described.deployments(), None);
    match output.as_str() {
        "json" => outln!("{}", serde_json::to_string_pretty(&json(&proposals))?)?,
        "yaml" => out!("{}", serde_norway::to_string(&json(&proposals))?)?,
        _ => out!("{}", text::show(&view, &proposals))?,
    }
    let placed = proposals.iter().all(|proposal| proposal.placed);
    Ok(if placed { ExitCode::SUCCESS } else { ExitCode::from(NOT_PLACED) })
}

/// The objects to plan, and the cluster if it is described.
fn read(
    filename: &[PathBuf],
    cluster: &[PathBuf],
    namespace: &str,
) -> Result<(Vec<Document>, Option<ManifestSet>)> {
    if filename.iter().chain(cluster).filter(|path| is_standard_input(path)).count() > 1 {
        bail!("standard input can be read once only; name a file in place of one of the `-`");
    }
    let spec = manifests::read(filename)?;
    if cluster.is_empty() {
        return Ok((spec, None));
    }
    let described = add_all(ManifestSet::new(namespace), ManifestOrigin::Cluster, manifests::read(cluster)?)?;
    Ok((spec, Some(described)))
}

/// The cluster with the objects to plan.
fn with_spec(cluster: ManifestSet, spec: Vec<Document>) -> Result<ManifestSet> {
    let described = add_all(cluster, ManifestOrigin::Spec, spec)?;
    if described.deployments().is_empty() {
        bail!(
            "the files hold no ModelDeployment of {GROUP}/{VERSION}, so there is nothing to plan; add one with -f"
        );
    }
    Ok(described)
}

/// Adds all documents, or lists the error of each one that cannot be read.
fn add_all(
    mut described: ManifestSet,
    origin: ManifestOrigin,
    documents: Vec<Document>,
) -> Result<ManifestSet> {
    let mut wrong = Vec::new();
    for document in documents {
        let place = document.to_string();
        wrong.extend(described.add(origin, &place, document.object).err());
    }
    match wrong.as_slice() {
        [] => Ok(described),
        all => bail!("{}", all.iter().map(ToString::to_string).collect::<Vec<_>>().join("\nerror: ")),
    }
}

/// Reads the cluster from the server.
pub async fn read_server(connection: &Connection) -> Result<ManifestSet> {
    let client = connection.client().await?;
    let mut described = ManifestSet::new(&connection.namespace());
    for (kind, plural) in KINDS {
        let path = format!("/apis/{GROUP}/{VERSION}/{plural}");
        let mut list = client::get_json(&client, &path, "application/json").await.with_context(|| {
            format!("the {plural} could not be listed; with --cluster no server is needed")
        })?;
        let items = list.get_mut("items").and_then(Value::as_array_mut).map(std::mem::take);
        for mut item in items.unwrap_or_default() {
            if let Some(fields) = item.as_object_mut() {
                fields.insert("apiVersion".to_owned(), json!(format!("{GROUP}/{VERSION}")));
                fields.insert("kind".to_owned(), json!(kind));
            }
            // An object of a newer release does not hide the others, as in the operator.
            if let Err(error) = described.add(ManifestOrigin::Server, "the server", item) {
                say!("warning: {error}");
            }
        }
    }
    Ok(described)
}

fn json(proposals: &[Proposal]) -> Value {
    let replica = |replica: &ProposedReplica| {
        let ProposedReplica { name, replica, plan } = replica;
        json!({"name": name, "replica": replica, "plan": plan})
    };
    let deployment = |proposal: &Proposal| {
        let Proposal {
            namespace,
            name,
            needs,
            tier,
            placed,
            report,
            create,
            keep,
            delete,
            preempt,
            waiting,
            notes,
        } = proposal;
        let delete = delete.iter().map(|old| json!({"name": old.name, "why": removal_word(old.reason)}));
        json!({
            "namespace": namespace,
            "name": name,
            "placed": placed,
            "needs": needs,
            "tier": tier,
            "report": report,
            "create": create.iter().map(replica).collect::<Vec<_>>(),
            "keep": keep.iter().map(replica).collect::<Vec<_>>(),
            "delete": delete.collect::<Vec<_>>(),
            "preempt": preempt,
            "waiting": waiting,
            "notes": notes,
        })
    };
    json!({"deployments": proposals.iter().map(deployment).collect::<Vec<_>>()})
}

fn removal_word(why: RemovalReason) -> &'static str {
    match why {
        RemovalReason::ScaledDown => "ScaledDown",
        RemovalReason::Idle => "Rests",
        RemovalReason::Replaced => "Replaced",
        RemovalReason::Drained => "Drained",
    }
}
