//! `russet restore`: makes the objects of a backup those of the control plane of this machine, which is stopped
//! meanwhile. Not here: keys and certificates, which stay as they are in the data folder.

use std::io::BufReader;
use std::path::PathBuf;

use anyhow::{Context, Result};
use russet_apiserver::store::backup::{self, RestoredStore};

use crate::data_dir::{DataDir, make_private};

/// Arguments of `russet restore`.
#[derive(clap::Args)]
pub struct Arguments {
    /// A file that `russet backup` wrote.
    file: PathBuf,
    /// Data folder of the control plane.
    #[arg(long)]
    data_dir: Option<PathBuf>,
}

/// Replaces the store; the former one is kept beside it.
pub fn run(arguments: &Arguments) -> Result<()> {
    let Arguments { file, data_dir } = arguments;
    let layout = DataDir::open(data_dir.clone())?;
    make_private(&layout.serve())?;
    let input = std::fs::File::open(file).with_context(|| format!("cannot open {}", file.display()))?;
    let store = layout.serve().join("store.redb");
    let restored = backup::restore(BufReader::new(input), &store)
        .with_context(|| format!("{} was not restored, and nothing was changed", file.display()))?;
    let RestoredStore { objects, revision, replaced } = restored;
    println!("{}: {objects} objects of revision {revision}", store.display());
    if let Some(replaced) = replaced {
        println!("The former store is {}; delete it when you no longer need it.", replaced.display());
    }
    println!(
        "Start the control plane again. Machines that joined after the backup are unknown to it: on each run `russet leave --force`, then join with a new token."
    );
    Ok(())
}
