//! The journal: what requests of this gateway may use and used, written before they are answered and before they end, so that
//! a gateway that is killed knows it when it starts again. Whoever has entries writes them to a place of a log ([`LogFile`])
//! itself: a system call, and nobody to wait for. A full log goes into the tables ([`tables`]) by a thread of its own, as few
//! changes ([`Backlog`]), while the next log is written. Nobody waits until it is on the disk (`fsync`): after a machine has
//! stopped, all that the gateway was granted counts as used.

mod backlog;
mod log;
mod open_log;
mod tables;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use parking_lot::Mutex;
use rusqlite::{Connection, ErrorCode};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::sync::oneshot;

use super::amount::Amount;
use super::window::WindowKey;
use backlog::Backlog;
use log::LogFile;
use open_log::{EndGuard, OpenLog, take_full};
pub(super) use tables::new_name;

/// Bytes of a log after which it goes into the tables: those of some thousand requests.
const MAX_LOG_BYTES: u64 = 2 << 20;
/// How many times as long a log becomes where the tables are not written in time; then no request begins.
const MAX_LOG_FACTOR: u64 = 16;
/// Time between two looks for what is forgotten.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(600);
/// Time until the tables are tried again that could not be written.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// A window of a Budget, by the Budget's uid: one that is created anew begins anew.
pub(super) type AccountKey = (String, WindowKey);

/// A change of what is reserved and used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum JournalEntry {
    /// A request may use this.
    Reserved { id: u64, account: AccountKey, amount: Amount },
    /// It used this, and may use no more.
    Used { id: u64, account: AccountKey, amount: Amount },
}

/// The journal cannot be written or read.
#[derive(Clone, Debug, Error)]
#[error("the journal of budgets: {message}")]
pub(super) struct JournalError {
    message: String,
    /// Whether a file is none of SQLite's or no log, or torn.
    is_damaged: bool,
}

impl From<rusqlite::Error> for JournalError {
    fn from(error: rusqlite::Error) -> Self {
        let is_damaged = match &error {
            rusqlite::Error::SqliteFailure(cause, _) => {
                matches!(cause.code, ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase)
            }
            rusqlite::Error::InvalidColumnType(..) => true,
            _ => false,
        };
        Self { message: error.to_string(), is_damaged }
    }
}

impl From<io::Error> for JournalError {
    fn from(error: io::Error) -> Self {
        // As serde_json says it of what is no JSON, and of what is cut.
        let is_damaged = matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof);
        Self { message: error.to_string(), is_damaged }
    }
}

/// What a journal knows from before.
#[derive(Debug, Default)]
pub(super) struct Recovered {
    /// The name that this gateway gave itself.
    pub(super) gateway: String,
    /// What it used. Requests that a crash cut used all that they might.
    pub(super) used: HashMap<AccountKey, Amount>,
    /// Whether the machine stopped since then, so that the last of it may be missing.
    pub(super) has_rebooted: bool,
}

/// The journal of a running gateway.
#[derive(Debug)]
pub(super) struct Journal {
    open: Arc<Mutex<OpenLog>>,
    /// To the thread that writes the tables, which ends with this.
    folds: Option<Sender<Fold>>,
    thread: Option<JoinHandle<()>>,
    max_log_bytes: u64,
    /// Whether the last write failed: that is logged once.
    is_failing: AtomicBool,
}

impl Drop for Journal {
    /// Waits until all that was written is in the tables.
    fn drop(&mut self) {
        self.folds = None;
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("the journal of budgets ended early; its logs have what its tables lack");
        }
    }
}

/// What the thread that writes the tables is asked for.
enum Fold {
    /// A log is full.
    Full,
    /// All that was written is to be in the tables. Who asked hears when that was tried.
    All(oneshot::Sender<()>),
}

impl Journal {
    /// Opens or creates the tables at `path` and the logs beside them. What cannot be read is kept aside, and a new journal begun:
    /// with another name this gateway takes nothing of what it was granted under the old one. An error where no file can be
    /// written.
    pub(super) fn open(path: &Path, now: i64) -> Result<(Self, Recovered), JournalError> {
        Self::open_with(path, now, MAX_LOG_BYTES)
    }

    /// The same with logs of so many bytes.
    fn open_with(path: &Path, now: i64, max_log_bytes: u64) -> Result<(Self, Recovered), JournalError> {
        let damaged = match Self::open_files(path, now, max_log_bytes) {
            Err(JournalError { is_damaged: true, message }) => message,
            opened => return opened,
        };
        let suffix = format!("damaged-{}-{}", Timestamp::now().as_millisecond(), std::process::id());
        let aside = path.with_extension(&suffix);
        tracing::error!("{} cannot be read ({damaged}); it is now {}", path.display(), aside.display());
        std::fs::rename(path, &aside)?;
        log::set_aside(path, &suffix)?;
        // What belongs to the tables, and not to the next ones.
        for suffix in ["-wal", "-shm"] {
            let mut name = path.as_os_str().to_owned();
            name.push(suffix);
            let _ = std::fs::remove_file(name);
        }
        Self::open_files(path, now, max_log_bytes)
    }

    fn open_files(path: &Path, now: i64, max_log_bytes: u64) -> Result<(Self, Recovered), JournalError> {
        let mut connection = tables::open(path)?;
        let (recovered, folded) = tables::recover(&mut connection, path, now)?;
        remove_folded(path, folded);
        let logs = Logs { path: path.to_owned(), gateway: recovered.gateway.clone() };
        let open = OpenLog::new(logs.create(folded + 1)?, Some(logs.create(folded + 2)?));
        let open = Arc::new(Mutex::new(open));
        let (folds, receiver) = mpsc::channel();
        let write = {
            let open = open.clone();
            move || {
                let _guard = EndGuard(open.clone());
                if let Err(error) = write_tables(&connection, &logs, &open, &receiver, folded) {
                    tracing::error!("{error}");
                }
            }
        };
        let thread = std::thread::Builder::new().name("budgets".to_owned()).spawn(write)?;
        let journal = Self {
            open,
            folds: Some(folds),
            thread: Some(thread),
            max_log_bytes,
            is_failing: AtomicBool::new(false),
        };
        Ok((journal, recovered))
    }

    /// Brings the log into the tables, for a release before this one, which reads these alone.
    pub(super) async fn fold(&self) {
        let (done, tried) = oneshot::channel();
        self.ask(Fold::All(done));
        let _ = tried.await;
    }

    /// Writes entries down: a process that is killed afterwards knows them when it starts again.
    pub(super) fn write(&self, entries: Vec<JournalEntry>) -> Result<(), JournalError> {
        // What was used is written, of requests that run, also where no request begins any more: that says nothing.
        let begins = entries.iter().any(|entry| matches!(entry, JournalEntry::Reserved { .. }));
        let written = self.append(entries, begins);
        let is_failing = written.is_err();
        if (begins || is_failing) && self.is_failing.swap(is_failing, Ordering::Relaxed) != is_failing {
            match &written {
                Ok(()) => tracing::info!("the journal of budgets is written again"),
                Err(error) => tracing::error!("{error}"),
            }
        }
        written
    }

    fn append(&self, entries: Vec<JournalEntry>, begins: bool) -> Result<(), JournalError> {
        let line = log::line(&entries)?;
        // Nobody waits here for a write: two threads of the gateway would stand still where one is interrupted.
        let place = {
            let mut open = self.open.lock();
            self.make_room(&mut open, begins)?;
            open.entries.extend(entries);
            open.log.place(&line)
        };
        place.write(&line).inspect_err(|_| {
            if begins {
                self.open.lock().take_back(&line);
            }
        })?;
        Ok(())
    }

    /// Goes on with the next log where this one is full. An error where nothing may be written, or no request may begin.
    fn make_room(&self, open: &mut OpenLog, begins: bool) -> Result<(), JournalError> {
        let refused = |message| Err(JournalError { message, is_damaged: false });
        if open.has_ended {
            return refused("the thread that writes its tables has ended; see the gateway's log".to_owned());
        }
        if open.log.bytes < self.max_log_bytes {
            return Ok(());
        }
        if let Some(next) = open.next.take() {
            open.end(next);
            self.ask(Fold::Full);
        } else if begins && open.log.bytes >= self.max_log_bytes.saturating_mul(MAX_LOG_FACTOR) {
            let bytes = open.log.bytes;
            return refused(format!(
                "its log has {bytes} bytes that are not in its tables yet; see the gateway's log"
            ));
        }
        Ok(())
    }

    fn ask(&self, fold: Fold) {
        if let Some(folds) = &self.folds {
            // Where the thread has ended, the next start reads what it did not.
            let _ = folds.send(fold);
        }
    }
}

/// Where logs are created.
struct Logs {
    path: PathBuf,
    gateway: String,
}

impl Logs {
    fn create(&self, number: u64) -> io::Result<LogFile> {
        LogFile::create(&self.path, number, &self.gateway)
    }
}

/// Writes logs that are full into the tables, until there is no journal any more.
fn write_tables(
    connection: &Connection,
    logs: &Logs,
    open: &Mutex<OpenLog>,
    receiver: &Receiver<Fold>,
    mut folded: u64,
) -> Result<(), JournalError> {
    let mut tables = tables::Statements::prepare(connection)?;
    let mut backlog = Backlog::default();
    let mut expiry_due = Instant::now() + EXPIRY_INTERVAL;
    let mut is_open = true;
    while is_open {
        let is_behind = open.lock().next.is_none();
        let wait = if is_behind { RETRY_INTERVAL } else { EXPIRY_INTERVAL };
        let mut asked = None;
        match receiver.recv_timeout(wait) {
            Ok(Fold::Full) | Err(RecvTimeoutError::Timeout) => {}
            Ok(Fold::All(done)) => asked = Some(done),
            Err(RecvTimeoutError::Disconnected) => is_open = false,
        }
        if asked.is_some() {
            prepare_next(logs, open);
        }
        {
            let mut open = open.lock();
            if !is_open {
                open.end_entries();
            } else if asked.is_some()
                && !open.entries.is_empty()
                && let Some(next) = open.next.take()
            {
                open.end(next);
            }
        }
        let (full, last) = take_full(open);
        backlog.add(full);
        if folded < last {
            // Where it fails, the logs have it still.
            match fold(connection, &mut tables, &mut backlog, last) {
                Ok(()) => folded = last,
                Err(error) => tracing::error!("{error}"),
            }
            remove_folded(&logs.path, folded);
        }
        if is_open && folded == last {
            prepare_next(logs, open);
        }
        if let Some(done) = asked {
            let _ = done.send(());
        }
        if expiry_due <= Instant::now() {
            expiry_due = Instant::now() + EXPIRY_INTERVAL;
            if let Err(error) = tables::expire(connection, Timestamp::now().as_second()) {
                tracing::warn!("{error}");
            }
        }
    }
    Ok(())
}

/// Removes the logs that the tables have. One that stays counts for nothing, and is tried again with the next.
fn remove_folded(path: &Path, folded: u64) {
    if let Err(error) = log::remove_through(path, folded) {
        tracing::warn!("a log that is in the tables of the journal of budgets stays: {error}");
    }
}

/// Creates the next log, where there is none.
fn prepare_next(logs: &Logs, open: &Mutex<OpenLog>) {
    let number = {
        let open = open.lock();
        if open.next.is_some() {
            return;
        }
        open.log.number + 1
    };
    // Without a next one nobody ends the log, so the number is right.
    match logs.create(number) {
        Ok(next) => open.lock().next = Some(next),
        Err(error) => tracing::error!("the next log of the journal of budgets: {error}"),
    }
}

fn fold(
    connection: &Connection,
    tables: &mut tables::Statements<'_>,
    backlog: &mut Backlog,
    last: u64,
) -> Result<(), JournalError> {
    // Where one fails, all of them are taken back when this is dropped.
    let transaction = connection.unchecked_transaction()?;
    let mut folded = backlog.clone();
    tables.fold(&mut folded, last)?;
    transaction.commit()?;
    *backlog = folded;
    Ok(())
}

#[cfg(test)]
mod tests;
