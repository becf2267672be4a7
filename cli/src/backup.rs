//! `russet backup`: writes all objects into a file, as they are at one moment, while the control plane serves. Not
//! here: its format (`russet_apiserver::store::backup`).

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use futures::AsyncBufReadExt as _;

use crate::client::Connection;

/// Arguments of `russet backup`.
#[derive(clap::Args)]
pub struct Arguments {
    /// File to write; it may not exist yet. It contains every Secret: keep it like a private key.
    file: PathBuf,
    #[command(flatten)]
    connection: Connection,
}

/// Writes the file; it has its name only once it is complete and on disk.
pub async fn run(arguments: Arguments) -> Result<()> {
    let Arguments { file, connection } = arguments;
    ensure!(!file.exists(), "{} exists; name another file", file.display());
    let client = connection.client_without_retry().await?;
    let request = http::Request::get("/backup").body(Vec::new())?;
    let mut lines = Box::pin(client.request_stream(request).await.context(
        "the API server gave no backup; only the administrator of a control plane of Russet may ask for one",
    )?);
    let part = file.with_extension("part");
    let failed = || format!("cannot write {}", part.display());
    let mut output = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&part)
        .with_context(failed)?;
    let written = copy(&mut lines, &mut output).await.and_then(|objects| {
        output.sync_all()?;
        std::fs::rename(&part, &file)?;
        Ok(objects)
    });
    match written {
        Ok(objects) => {
            println!("{}: {objects} objects", file.display());
            Ok(())
        }
        Err(error) => {
            remove(&part);
            Err(error).with_context(failed)
        }
    }
}

/// Copies all lines; the number of objects. An error if the server ended before the last line.
async fn copy(lines: &mut (impl futures::AsyncBufRead + Unpin), output: &mut std::fs::File) -> Result<u64> {
    let (mut line, mut last, mut count) = (Vec::new(), Vec::new(), 0_u64);
    while lines.read_until(b'\n', &mut line).await? > 0 {
        output.write_all(&line)?;
        count += 1;
        std::mem::swap(&mut line, &mut last);
        line.clear();
    }
    // Besides the objects there are a first and a last line.
    let objects = count.saturating_sub(2);
    let end = format!("{{\"objects\":{objects}}}\n");
    ensure!(last == end.as_bytes(), "the API server ended after {count} lines; try again");
    Ok(objects)
}

fn remove(part: &Path) {
    if let Err(error) = std::fs::remove_file(part) {
        eprintln!("{} is incomplete and could not be removed: {error}", part.display());
    }
}
