//! Kernel panics that a machine came back from, and the deployments under which they happened. Read once, as the agent
//! begins: a panic ends every process, so there are no others.
//!
//! A report names the process that ran. Where that is none of ours but the GPU's memory gave way, or nothing answered for
//! a minute and a half, the rank that had most of it is held to be the cause.

use std::path::{Path, PathBuf};

use russet_plan::quantity;
use serde::{Deserialize, Serialize};

use crate::join::identity::write;
use crate::macos::panic::{Panic, panic};
use crate::process::adopt::Record;

/// So many by one deployment, and it is granted nothing more.
const TOO_MANY: usize = 2;
/// A plan that needs less than this share of what panicked may be tried.
const LESS: f64 = 0.95;
/// Reports are some ten kibibytes; what is much longer is none.
const LONGEST: u64 = 16 << 20;

/// A panic that was read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Seen {
    /// Name of its report.
    pub report: String,
    /// What the kernel said, and where.
    pub message: String,
    /// Namespace and name of the deployment it happened under, where that is known.
    #[serde(default)]
    pub deployment: Option<String>,
    /// Bytes that its rank here had been granted.
    #[serde(default)]
    pub reserved: u64,
}

/// All panics this agent knows of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Panics {
    path: PathBuf,
    seen: Vec<Seen>,
}

impl Panics {
    /// Reads the reports in `folder` that were not read before and remembers them in `path`. `records` are the ranks as
    /// they were noted last, `boot_id` is the system that runs now. Also gives those that are new.
    pub fn read(path: &Path, folder: &Path, records: &[Record], boot_id: &str) -> (Self, Vec<Seen>) {
        let seen: Vec<Seen> = std::fs::read(path)
            .ok()
            .and_then(|text| {
                let read = serde_json::from_slice(&text);
                read.inspect_err(
                    |error| tracing::warn!(path = %path.display(), %error, "known panics are forgotten"),
                )
                .ok()
            })
            .unwrap_or_default();
        let mut panics = Self { path: path.to_owned(), seen };
        // Those that ran when the system before this one went down.
        let suspects: Vec<&Record> = records
            .iter()
            .filter(|record| record.process.as_ref().is_some_and(|process| process.boot_id != boot_id))
            .collect();
        let new: Vec<Seen> = reports(folder)
            .into_iter()
            .filter(|(name, _)| panics.seen.iter().all(|seen| seen.report != *name))
            .filter_map(|(name, text)| match panic(&text) {
                Ok(found) => Some(judged(name, &found, &suspects)),
                Err(error) => {
                    tracing::warn!(report = name, %error, "a panic report is left out");
                    None
                }
            })
            .collect();
        if !new.is_empty() {
            panics.seen.extend(new.iter().cloned());
            let text = format!("{:#}\n", serde_json::json!(panics.seen));
            if let Err(error) = write(path, &text) {
                tracing::error!(%error, "panics could not be noted; they are judged again at the next start");
            }
        }
        (panics, new)
    }

    /// Why a rank of this deployment is granted nothing.
    pub fn hold(&self, deployment: &str, reserved: u64) -> Option<String> {
        let of: Vec<&Seen> =
            self.seen.iter().filter(|seen| seen.deployment.as_deref() == Some(deployment)).collect();
        let least = of.iter().map(|seen| seen.reserved).min()?;
        if of.len() < TOO_MANY || (reserved as f64) < least as f64 * LESS {
            return None;
        }
        let last = of.last().map(|seen| format!("{} ({})", seen.report, seen.message)).unwrap_or_default();
        Some(format!(
            "this machine's kernel panicked {} times under {deployment}, last {last}; plan it with less than {} here, or remove {} and restart the agent to try again",
            of.len(),
            quantity::show(least),
            self.path.display()
        ))
    }
}

/// The reports in a folder, by name: the oldest first, for their names begin with the date.
fn reports(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<(String, Vec<u8>)> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let is_report = name.starts_with("panic-full-") && name.ends_with(".panic");
            let fits = entry.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() <= LONGEST);
            (is_report && fits).then(|| std::fs::read(entry.path()).ok().map(|text| (name, text)))?
        })
        .collect();
    found.sort();
    found
}

/// Whose a panic was.
fn judged(report: String, found: &Panic, suspects: &[&Record]) -> Seen {
    let ran =
        |record: &&&Record| record.process.as_ref().is_some_and(|process| Some(process.pid) == found.pid);
    let ours = found.is_of_gpu_memory() || found.is_of_the_watchdog();
    let cause = suspects
        .iter()
        .find(ran)
        .or_else(|| suspects.iter().max_by_key(|record| record.reserved).filter(|_| ours));
    let of = cause.and_then(|record| Some((record, record.deployment.as_ref()?)));
    Seen {
        report,
        message: format!("{} @{}", found.message, found.place),
        deployment: of.map(|(record, name)| format!("{}/{name}", record.namespace)),
        reserved: cause.map_or(0, |record| record.reserved),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::adopt::Process;

    const GPU: &str = "panic(cpu 7): \"prepare count underflow\" @IOGPUMemory.cpp:550\n\
                       Panicked task 0xfffffe2: 1891705 pages, 85 threads: pid ";

    fn record(deployment: &str, pid: u32, reserved: u64) -> Record {
        Record {
            shard: format!("uid-{pid}"),
            namespace: "home".to_owned(),
            deployment: Some(deployment.to_owned()),
            reserved,
            process: Some(Process { pid, start: "1".to_owned(), boot_id: "before".to_owned() }),
            ..Record::default()
        }
    }

    fn deployments(new: &[Seen]) -> Vec<Option<&str>> {
        new.iter().map(|seen| seen.deployment.as_deref()).collect()
    }

    #[test]
    fn after_two_panics_a_deployment_is_held_until_it_wants_less() {
        let folder = tempfile::tempdir().unwrap();
        let known = folder.path().join("panics.json");
        let records = [record("small", 40, 1 << 30), record("large", 41, 8 << 30)];
        let read = || Panics::read(&known, folder.path(), &records, "now");
        let write = |day: u32, text: &str| {
            let name = format!("panic-full-2026-11-{day:02}-101010.0001.panic");
            std::fs::write(folder.path().join(name), text).unwrap();
        };
        assert_eq!(read(), (Panics { path: known.clone(), seen: vec![] }, vec![]));
        assert!(!known.exists());

        write(1, &format!("{GPU}41: russet-engine\n"));
        let (panics, new) = read();
        assert_eq!(deployments(&new), [Some("home/large")]);
        assert_eq!(panics.hold("home/large", 8 << 30), None, "once is chance");
        assert!(read().1.is_empty(), "it is read once");

        write(2, &format!("{GPU}40: russet-engine\n"));
        assert_eq!(deployments(&read().1), [Some("home/small")], "the process is named");
        write(3, &format!("{GPU}0: kernel_task\n"));
        assert_eq!(deployments(&read().1), [Some("home/large")], "who had most");
        let (panics, _) = read();
        let why = panics.hold("home/large", 8 << 30).unwrap();
        assert!(why.starts_with(
            "this machine's kernel panicked 2 times under home/large, last panic-full-2026-11-03"
        ));
        assert!(
            why.contains("prepare count underflow @IOGPUMemory.cpp:550") && why.contains("panics.json"),
            "{why}"
        );
        assert_eq!(panics.hold("home/large", 7 << 30), None, "it wants less");
        assert_eq!(panics.hold("home/small", 1 << 30), None);
        assert_eq!(panics.hold("away/large", 8 << 30), None);

        std::fs::remove_file(&known).unwrap();
        std::fs::remove_file(folder.path().join("panic-full-2026-11-01-101010.0001.panic")).unwrap();
        assert_eq!(read().0.hold("home/large", 8 << 30), None, "a person removed what was noted");
    }

    #[test]
    fn panics_that_are_nobodys_hold_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let known = folder.path().join("panics.json");
        let records = [record("chat", 41, 1 << 30)];
        let write = |day: u32, text: &str| {
            let name = format!("panic-full-2026-11-{day:02}-101010.0001.panic");
            std::fs::write(folder.path().join(name), text).unwrap();
        };
        write(1, "panic(cpu 0): \"a driver\" @AppleUSB.cpp:7\n");
        write(2, "no report at all");
        write(
            3,
            "panic(cpu 0): \"watchdog timeout: no checkins from watchdogd in 91 seconds\" @IOWatchdog.cpp:9\n",
        );
        std::fs::write(folder.path().join("panic-base-2026.panic"), format!("{GPU}41: russet-engine\n"))
            .unwrap();
        let (_, new) = Panics::read(&known, folder.path(), &records, "now");
        assert_eq!(deployments(&new), [None, Some("home/chat")], "another driver's is not ours");
        // What this very system runs did not bring down the one before.
        write(4, &format!("{GPU}41: russet-engine\n"));
        let (panics, new) = Panics::read(&known, folder.path(), &records, "before");
        assert_eq!(deployments(&new), [None]);
        assert_eq!(panics.hold("home/chat", 1 << 30), None);
        std::fs::write(&known, "{").unwrap();
        assert_eq!(Panics::read(&known, folder.path(), &[], "now").1.len(), 3, "noted anew");
    }
}
