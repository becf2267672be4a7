//! `russet logs`: logs of the processes and engines of this machine. Logs of other machines stay there; the
//! error says on which machine to look.

use std::io::{Read as _, Seek as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::data_dir::DataDir;
use crate::stdout::{self, outln};

/// Arguments of `russet logs`.
#[derive(clap::Args)]
pub struct Arguments {
    /// `serve`, `gateway`, `agent`, or `engine/UID` as listed; without a name, list the logs.
    name: Option<String>,
    /// Number of lines from the end.
    #[arg(long, default_value_t = 100)]
    tail: usize,
    /// Continue to print new lines.
    #[arg(short, long)]
    follow: bool,
    /// Data folder of this machine.
    #[arg(long)]
    data_dir: Option<PathBuf>,
}

/// Prints a log, or the list of logs.
pub fn run(arguments: Arguments) -> Result<()> {
    let layout = DataDir::resolve(arguments.data_dir)?;
    let all = list(&layout);
    let Some(name) = arguments.name else {
        for (name, path) in all {
            outln!("{name:<48} {}", path.display())?;
        }
        return Ok(());
    };
    let matching: Vec<&(String, PathBuf)> = all
        .iter()
        .filter(|(known, _)| *known == name || known.starts_with(&format!("engine/{name}")))
        .collect();
    let path = match matching.as_slice() {
        [(_, path)] => path,
        [] => bail!(
            "no log \"{name}\" under {}; this machine has: {}. Engines of other machines keep their logs there: `russet get shards` names the node",
            layout.root().display(),
            all.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ")
        ),
        _ => bail!("\"{name}\" names several logs; write more of the name"),
    };
    print_tail(path, arguments.tail)?;
    if arguments.follow {
        follow(path)?;
    }
    Ok(())
}

fn list(layout: &DataDir) -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(layout.logs()).into_iter().flatten().flatten() {
        let path = entry.path();
        if let Some(stem) = path.file_stem().and_then(|stem| stem.to_str()) {
            found.push((stem.to_owned(), path.clone()));
        }
    }
    for entry in std::fs::read_dir(layout.agent().join("engines")).into_iter().flatten().flatten() {
        let log = entry.path().join("engine.log");
        if log.exists() {
            found.push((format!("engine/{}", entry.file_name().to_string_lossy()), log));
        }
    }
    found.sort();
    found
}

fn print_tail(path: &Path, lines: usize) -> Result<()> {
    let text = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let text = String::from_utf8_lossy(&text);
    let all: Vec<&str> = text.lines().collect();
    let last = &all[all.len().saturating_sub(lines)..];
    stdout::write(last.iter().map(|line| format!("{line}\n")).collect::<String>())?;
    Ok(())
}

fn follow(path: &Path) -> Result<()> {
    let mut file = std::fs::File::open(path)?;
    file.seek(std::io::SeekFrom::End(0))?;
    let mut buffer = Vec::new();
    loop {
        buffer.clear();
        file.read_to_end(&mut buffer)?;
        if buffer.is_empty() {
            // The log was truncated by rotation and starts from the beginning.
            if file.metadata()?.len() < file.stream_position()? {
                file.rewind()?;
                continue;
            }
            std::thread::sleep(std::time::Duration::from_millis(300));
            continue;
        }
        stdout::write(&buffer)?;
    }
}
