//! `russet leave`: takes this machine out of the cluster it joined.

use std::path::PathBuf;

use anyhow::{Result, bail};
use russet_telemetry::say;

use crate::data_dir::DataDir;
use crate::stdout::outln;

/// Arguments of `russet leave`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Folder that the machine joined with; default ~/.russet.
    #[arg(long)]
    data_dir: Option<PathBuf>,
    /// Leave at once without contacting the cluster, where the node has to be deleted afterwards.
    #[arg(long)]
    force: bool,
    /// Delete the model files too.
    #[arg(long)]
    purge: bool,
    /// Socket of this machine's root helper, which restores the machine's network.
    #[arg(long, env = "RUSSET_HELPER", default_value = russet_agent::helper::SOCKET)]
    helper: PathBuf,
}

/// Leaves the cluster, and returns once no process of this node runs any more.
pub async fn run(arguments: Arguments) -> Result<()> {
    let Arguments { data_dir, force, purge, helper } = arguments;
    russet_telemetry::logs::init("leave", false);
    let layout = DataDir::resolve(data_dir)?;
    if layout.serve().exists() {
        bail!(
            "{} is the folder of a control plane, whose own node cannot leave it; start it with `russet up --no-agent`",
            layout.root().display()
        );
    }
    if !force {
        say!("Replicas on this node move to other nodes first; this may take some minutes.");
    }
    let data_dir = layout.root().to_owned();
    let config = russet_agent::leave::LeaveConfig { data_dir, force, purge, helper };
    let node = russet_agent::leave::leave(config).await?;
    outln!("Node {node} has left its cluster.")?;
    if force {
        outln!(
            "The cluster does not know this yet; remove the node there: kubectl delete inferencenode {node}"
        )?;
    }
    if !purge {
        outln!(
            "Its model files are still in {}; --purge removes them.",
            layout.agent().join("models").display()
        )?;
    }
    Ok(())
}
