//! Kernel panics that the machine recovered from, and the deployments that were running. The agent scans for
//! reports at its start and for some minutes after: a panic ends every process, so no later ones exist, but
//! the system takes time to write the report.
//!
//! A report names the running process. If that is not an engine but the GPU's memory failed, or nothing
//! answered for a minute and a half (watchdog), the rank that used the most memory is held responsible.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use russet_plan::quantity;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::events::EventRecorder;
use crate::join::identity::write;
use crate::macos::panic::{KernelPanic, panic};
use crate::process::record::{self, EngineRecord};

/// Panics of one deployment after which it gets no more grants.
const MAX_PANICS: usize = 2;
/// A plan that needs less than this share of the panicked memory may be tried.
const RETRY_MEMORY_SHARE: f64 = 0.95;
/// Reports are some ten kibibytes; much longer files are not reports.
const MAX_REPORT_BYTES: u64 = 16 << 20;
/// Characters of the panic message to keep.
const MAX_MESSAGE_CHARS: usize = 200;
/// Interval between two scans, and their number.
const SCAN_SCHEDULE: (Duration, u32) = (Duration::from_secs(30), 20);

/// A rank that was running before the last reboot.
#[derive(Clone, Debug)]
pub struct Suspect {
    /// Its record.
    pub record: EngineRecord,
    /// When the record was written: an older report is not about it.
    pub recorded_at: SystemTime,
}

/// The ranks of `engines` that ran under another boot than `boot_id`.
pub fn suspects(engines: &Path, boot_id: &str) -> Vec<Suspect> {
    let ran =
        |record: &EngineRecord| record.process.as_ref().is_some_and(|process| process.boot_id != boot_id);
    let records = record::load(engines).into_iter().filter(ran);
    let noted =
        |record: &EngineRecord| record::recorded_at(engines, &record.shard).unwrap_or(SystemTime::UNIX_EPOCH);
    records.map(|record| Suspect { recorded_at: noted(&record), record }).collect()
}

/// Scans for reports.
pub(crate) struct PanicScanner {
    /// File of the known panics.
    pub known: PathBuf,
    /// Directory of the system's reports.
    pub reports: PathBuf,
    pub suspects: Vec<Suspect>,
    pub panicked: watch::Sender<Panics>,
    pub events: EventRecorder,
}

impl PanicScanner {
    /// Scans once, and reports panics of the ranks that were running.
    pub fn scan(&self) {
        let (panics, new) = Panics::load(&self.known, &self.reports, &self.suspects);
        for seen in new {
            tracing::warn!(
                report = seen.report,
                deployment = seen.deployment,
                seen.message,
                "this machine's kernel panicked"
            );
            self.events.kernel_panicked(&seen);
        }
        self.panicked.send_if_modified(|known| std::mem::replace(known, panics.clone()) != panics);
    }

    /// Repeats the scan for as long as a report may still appear, then waits until the agent exits.
    pub async fn run(self) {
        for _ in 0..SCAN_SCHEDULE.1 {
            tokio::time::sleep(SCAN_SCHEDULE.0).await;
            self.scan();
        }
        std::future::pending().await
    }
}

/// A recorded panic.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RecordedPanic {
    /// File name of its report.
    pub report: String,
    /// Panic message and location.
    pub message: String,
    /// Namespace and name of the deployment that was running, if known.
    #[serde(default)]
    pub deployment: Option<String>,
    /// Bytes granted to its rank on this machine.
    #[serde(default)]
    pub reserved: u64,
}

/// All known panics of this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Panics {
    path: PathBuf,
    recorded: Vec<RecordedPanic>,
}

impl Panics {
    /// Reads new reports in `folder` and records them in `path`. Also returns the new ones that may be about
    /// one of the suspects.
    pub fn load(path: &Path, folder: &Path, suspects: &[Suspect]) -> (Self, Vec<RecordedPanic>) {
        let seen: Vec<RecordedPanic> = std::fs::read(path)
            .ok()
            .and_then(|text| {
                let read = serde_json::from_slice(&text);
                read.inspect_err(
                    |error| tracing::warn!(path = %path.display(), %error, "the record of known panics cannot be read and is replaced"),
                )
                .ok()
            })
            .unwrap_or_default();
        let mut panics = Self { path: path.to_owned(), recorded: seen };
        let mut unread = reports(folder);
        unread.retain(|report| panics.recorded.iter().all(|seen| seen.report != report.name));
        if unread.is_empty() {
            return (panics, Vec::new());
        }
        let mut new = Vec::new();
        for report in unread {
            let of: Vec<&EngineRecord> = suspects
                .iter()
                .filter(|suspect| suspect.recorded_at <= report.written)
                .map(|suspect| &suspect.record)
                .collect();
            let seen = match panic(&report.text) {
                Ok(found) => attribute_panic(report.name, &found, &of),
                Err(error) => RecordedPanic {
                    report: report.name,
                    message: error.to_string(),
                    ..RecordedPanic::default()
                },
            };
            panics.recorded.push(seen.clone());
            if !of.is_empty() {
                new.push(seen);
            }
        }
        let text = format!("{:#}\n", serde_json::json!(panics.recorded));
        if let Err(error) = write(path, &text) {
            tracing::error!(%error, "panics could not be noted; they are judged again at the next start");
        }
        (panics, new)
    }

    /// Why a rank of this deployment gets no grant, if it does not.
    pub fn refusal(&self, deployment: &str, reserved: u64) -> Option<String> {
        let of: Vec<&RecordedPanic> =
            self.recorded.iter().filter(|seen| seen.deployment.as_deref() == Some(deployment)).collect();
        let most = of.iter().map(|seen| (seen.reserved as f64 * RETRY_MEMORY_SHARE) as u64).min()?;
        if of.len() < MAX_PANICS || reserved < most {
            return None;
        }
        let last = of.last().map(|seen| format!("{} ({})", seen.report, seen.message)).unwrap_or_default();
        Some(format!(
            "this machine's kernel panicked {} times under {deployment}, last {last}; plan it with less than {} here, or remove {} and restart the agent to try again",
            of.len(),
            quantity::show(most),
            self.path.display()
        ))
    }
}

/// A report file.
struct PanicReport {
    name: String,
    written: SystemTime,
    text: Vec<u8>,
}

/// The reports in a folder, by name: oldest first, because names begin with the date.
fn reports(folder: &Path) -> Vec<PanicReport> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PanicReport> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let metadata = entry.metadata().ok()?;
            let is_report = name.starts_with("panic-full-") && name.ends_with(".panic");
            if !is_report || !metadata.is_file() || metadata.len() > MAX_REPORT_BYTES {
                return None;
            }
            let written = metadata.modified().ok()?;
            Some(PanicReport { name, written, text: std::fs::read(entry.path()).ok()? })
        })
        .collect();
    found.sort_by(|one, other| one.name.cmp(&other.name));
    found
}

/// Attributes a panic to a rank.
fn attribute_panic(report: String, found: &KernelPanic, suspects: &[&EngineRecord]) -> RecordedPanic {
    let ran = |record: &&&EngineRecord| {
        record.process.as_ref().is_some_and(|process| Some(process.pid) == found.pid)
    };
    let ours = found.is_gpu_memory() || found.is_watchdog();
    let cause = suspects
        .iter()
        .find(ran)
        .or_else(|| suspects.iter().max_by_key(|record| record.reserved).filter(|_| ours));
    let of = cause.and_then(|record| Some((record, record.deployment.as_ref()?)));
    RecordedPanic {
        report,
        message: format!("{} @{}", found.message, found.location).chars().take(MAX_MESSAGE_CHARS).collect(),
        deployment: of.map(|(record, name)| format!("{}/{name}", record.namespace)),
        reserved: cause.map_or(0, |record| record.reserved),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::record::ProcessIdentity;

    const GPU: &str = "panic(cpu 7): \"prepare count underflow\" @IOGPUMemory.cpp:550\n\
                       Panicked task 0xfffffe2: 1891705 pages, 85 threads: pid ";

    fn suspect(deployment: &str, pid: u32, reserved: u64) -> Suspect {
        let record = EngineRecord {
            shard: format!("uid-{pid}"),
            namespace: "home".to_owned(),
            deployment: Some(deployment.to_owned()),
            reserved,
            process: Some(ProcessIdentity { pid, start: "1".to_owned(), boot_id: "before".to_owned() }),
            ..EngineRecord::default()
        };
        Suspect { record, recorded_at: SystemTime::UNIX_EPOCH }
    }

    fn deployments(new: &[RecordedPanic]) -> Vec<Option<&str>> {
        new.iter().map(|seen| seen.deployment.as_deref()).collect()
    }

    #[test]
    fn deployment_is_held_after_two_panics_until_it_needs_less() {
        let folder = tempfile::tempdir().unwrap();
        let known = folder.path().join("panics.json");
        let ran = [suspect("small", 40, 1 << 30), suspect("large", 41, 8 << 30)];
        let read = || Panics::load(&known, folder.path(), &ran);
        let write = |day: u32, text: &str| {
            let name = format!("panic-full-2026-11-{day:02}-101010.0001.panic");
            std::fs::write(folder.path().join(name), text).unwrap();
        };
        assert_eq!(read(), (Panics { path: known.clone(), recorded: vec![] }, vec![]));
        assert!(!known.exists());

        write(1, &format!("{GPU}41: russet-engine\n"));
        let (panics, new) = read();
        assert_eq!(deployments(&new), [Some("home/large")]);
        assert_eq!(panics.refusal("home/large", 8 << 30), None, "once is chance");
        assert!(read().1.is_empty(), "it is read once");

        write(2, &format!("{GPU}40: russet-engine\n"));
        assert_eq!(deployments(&read().1), [Some("home/small")], "the process is named");
        write(3, &format!("{GPU}0: kernel_task\n"));
        assert_eq!(deployments(&read().1), [Some("home/large")], "who had most");
        let (panics, _) = read();
        let why = panics.refusal("home/large", 8 << 30).unwrap();
        assert!(why.starts_with(
            "this machine's kernel panicked 2 times under home/large, last panic-full-2026-11-03"
        ));
        assert!(
            why.contains("prepare count underflow @IOGPUMemory.cpp:550") && why.contains("panics.json"),
            "{why}"
        );
        assert_eq!(panics.refusal("home/large", 7 << 30), None, "it wants less");
        assert_eq!(panics.refusal("home/small", 1 << 30), None);
        assert_eq!(panics.refusal("away/large", 8 << 30), None);

        // The remedy: delete the records and restart the agent. By then the suspects are gone.
        std::fs::remove_file(&known).unwrap();
        let (panics, new) = Panics::load(&known, folder.path(), &[]);
        assert_eq!((panics.refusal("home/large", 8 << 30), new), (None, vec![]));
        let later = Suspect { recorded_at: SystemTime::now() + Duration::from_secs(60), ..ran[1].clone() };
        std::fs::remove_file(&known).unwrap();
        let (panics, new) = Panics::load(&known, folder.path(), &[later]);
        assert_eq!((panics.refusal("home/large", 8 << 30), new), (None, vec![]), "it began after them");
    }

    #[test]
    fn unattributed_panics_hold_no_deployment() {
        let folder = tempfile::tempdir().unwrap();
        let known = folder.path().join("panics.json");
        let ran = [suspect("chat", 41, 1 << 30)];
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
        let (panics, new) = Panics::load(&known, folder.path(), &ran);
        let expected = [None, None, Some("home/chat")];
        assert_eq!(
            deployments(&new),
            expected,
            "another driver's is not ours, and what is unreadable nobody's"
        );
        assert!(new[1].message.contains("panic(cpu"), "{}", new[1].message);
        assert_eq!(panics.refusal("home/chat", 1 << 30), None);
        assert!(Panics::load(&known, folder.path(), &ran).1.is_empty(), "each is read once, readable or not");
        std::fs::write(&known, "{").unwrap();
        assert_eq!(Panics::load(&known, folder.path(), &ran).1.len(), 3, "noted anew");
    }

    #[test]
    fn ranks_of_the_previous_boot_are_suspects() {
        let engines = tempfile::tempdir().unwrap();
        let Suspect { record, .. } = suspect("chat", 41, 7);
        record::save(engines.path(), &record).unwrap();
        let found = suspects(engines.path(), "now");
        assert_eq!(found.iter().map(|one| one.record.clone()).collect::<Vec<_>>(), [record]);
        assert!(found[0].recorded_at > SystemTime::UNIX_EPOCH);
        assert!(
            suspects(engines.path(), "before").is_empty(),
            "what this very system runs brought none down"
        );
    }
}
