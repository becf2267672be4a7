//! The audit log: an entry when a request is about to leave for a provider, written to disk before a byte of it goes, and one
//! when a request has ended. Each entry has the hash of the one before it, and a signature of the gateway, so that nobody can
//! change, insert or leave out one without that `russet audit verify` sees it. No text of a prompt or an answer is in it.
//!
//! ```text
//! attempt_loop ── left ──▶ ┐                        ┌─▶ audit-00000001.log … (chain of lines, signed)
//! request_log ─── ended ─▶ ┴─ channel ─▶ writer ────┴─▶ key.pk8 (made once, readable by the gateway alone)
//! ```

mod entry;
mod usage;
mod verify;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

use thiserror::Error;
use tokio::sync::oneshot;

pub use entry::{AuditEvent, AuditUsage, CompletedRequest, DepartedRequest};
pub use usage::{UsageField, UsageReport, UsageTotal, usage};
pub use verify::{AuditPeriod, AuditReport, verify};
use writer::{AuditCommand, AuditWriter};

/// Entries that wait for the disk.
const MAX_WAITING: usize = 65_536;

/// Why there is no audit log, or no intact one.
#[derive(Debug, Error)]
pub enum AuditError {
    /// A file cannot be read or written.
    #[error("the audit log {path} cannot be used: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The key is not one.
    #[error("{0} is no Ed25519 key in PKCS #8; move it away, and the gateway makes another one")]
    Key(PathBuf),
    /// Another process writes it.
    #[error(
        "another gateway writes the audit log of {0}; give each one a folder of its own with --audit-log"
    )]
    Locked(PathBuf),
    /// A line is not what was written.
    #[error("{path}, line {line}: {what}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The number of the line, from 1.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
    /// There is nothing to verify.
    #[error(
        "{0} has no audit log; a gateway writes one with --audit-log FOLDER, and `russet up` does by default"
    )]
    Empty(PathBuf),
}

impl AuditError {
    fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }
}

/// Where entries go. Clones share it.
#[derive(Clone, Debug)]
pub struct AuditLog {
    sender: SyncSender<AuditCommand>,
    /// Entries for which there was no room.
    lost: Arc<AtomicU64>,
}

impl AuditLog {
    /// The log in this folder, which goes on with what is there. A thread of its own writes it.
    pub fn open(folder: &Path) -> Result<Self, AuditError> {
        let (sender, receiver) = sync_channel(MAX_WAITING);
        let lost = Arc::<AtomicU64>::default();
        let writer = AuditWriter::open(folder, lost.clone())?;
        let spawned = std::thread::Builder::new().name("audit".into()).spawn(move || writer.run(&receiver));
        spawned.map_err(AuditError::io(folder))?;
        Ok(Self { sender, lost })
    }

    /// Writes that a request leaves; returns once that is on the disk. On an error it must not leave.
    pub(crate) async fn departed(&self, departed: DepartedRequest) -> Result<(), String> {
        let (done, written) = oneshot::channel();
        let command = AuditCommand { event: AuditEvent::Left(departed), done: Some(done) };
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = self.sender.try_send(command) {
            return Err("the audit log takes no more entries".to_owned());
        }
        written.await.unwrap_or_else(|_| Err("the audit log ended".to_owned()))
    }

    /// Writes that a request ended, soon.
    pub(crate) fn completed(&self, completed: CompletedRequest) {
        let command = AuditCommand { event: AuditEvent::Completed(completed), done: None };
        if self.sender.try_send(command).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}
