//! The journal: what requests of this gateway may use and used, written before they are answered and before they end, so that
//! a gateway that is killed knows it when it starts again. One thread writes. What waits for it is one row of a log, and many
//! rows become few changes of the tables ([`Backlog`]): a request costs a part of a row. Nothing waits for the disk: after a
//! machine has stopped, all that the gateway was granted counts as used.

mod backlog;

use std::collections::HashMap;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use rusqlite::{Connection, ErrorCode, Statement, TransactionBehavior, params};
use russet_crds::BudgetPeriod;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::sync::oneshot;

use super::amount::Amount;
use super::window::WindowKey;
use backlog::Backlog;

/// Requests in one row of the log.
const MAX_GROUP: usize = 256;
/// Bytes of the log after which it goes into the tables: those of some thousand requests.
const MAX_LOG_BYTES: usize = 1 << 20;
/// How long another gateway may take to close the file.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);
/// How long what was used is remembered, by the length of the window: as long as a status may keep such a window.
const RETENTION_SECONDS: [(BudgetPeriod, i64); 4] = [
    (BudgetPeriod::Minute, 3600),
    (BudgetPeriod::Hour, 24 * 3600),
    (BudgetPeriod::Day, 7 * 24 * 3600),
    (BudgetPeriod::Month, 130 * 24 * 3600),
];
/// Time between two looks for what is forgotten.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(600);
/// Pages of the log after which it is written to the file: it stays small, as the disk of a pod is.
const CHECKPOINT_PAGES: u32 = 64;

/// The columns of an amount.
const THINGS: [&str; 4] = ["requests", "tokens", "money", "millijoules"];

/// A window of a Budget, by the Budget's uid: one that is created anew begins anew.
pub(super) type AccountKey = (String, WindowKey);

/// A change of what is reserved and used.
#[derive(Clone, Debug, Serialize, Deserialize)]
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
    /// Whether the file is none of SQLite's, or torn.
    is_damaged: bool,
}

impl JournalError {
    fn new(error: &dyn std::fmt::Display) -> Self {
        Self { message: error.to_string(), is_damaged: false }
    }
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
    sender: Sender<Waiting>,
}

/// Entries that wait.
struct Waiting {
    entries: Vec<JournalEntry>,
    /// Whether all that the log has is to be in the tables then.
    is_fold: bool,
    /// Who waits for them.
    done: oneshot::Sender<Result<(), JournalError>>,
}

impl Journal {
    /// Opens or creates the file. One that cannot be read is kept aside, and a new one begun: with another name this gateway
    /// takes nothing of what it was granted under the old one. An error where no file can be written.
    pub(super) fn open(path: &Path, now: i64) -> Result<(Self, Recovered), JournalError> {
        Self::open_with(path, now, MAX_LOG_BYTES)
    }

    /// The same with a log of so many bytes.
    fn open_with(path: &Path, now: i64, log_bytes: usize) -> Result<(Self, Recovered), JournalError> {
        let damaged = match Self::open_file(path, now, log_bytes) {
            Err(JournalError { is_damaged: true, message }) => message,
            opened => return opened,
        };
        let aside = path.with_extension("damaged");
        tracing::error!("{} cannot be read ({damaged}); it is now {}", path.display(), aside.display());
        std::fs::rename(path, &aside).map_err(|error| JournalError::new(&error))?;
        // What belongs to the file, and not to the next one.
        for suffix in ["-wal", "-shm"] {
            let mut name = path.as_os_str().to_owned();
            name.push(suffix);
            let _ = std::fs::remove_file(name);
        }
        Self::open_file(path, now, log_bytes)
    }

    fn open_file(path: &Path, now: i64, log_bytes: usize) -> Result<(Self, Recovered), JournalError> {
        let mut connection = Connection::open(path)?;
        // A gateway that ended a moment ago may still have it, and one that runs keeps it: two would spend one grant twice.
        connection.busy_timeout(BUSY_TIMEOUT)?;
        connection.pragma_update(None, "locking_mode", "exclusive")?;
        connection.pragma_update(None, "journal_mode", "wal")?;
        // A process that is killed has written what it committed; only a machine that stops has not. Waiting for the disk in
        // the middle of others' requests would make that no better.
        connection.pragma_update(None, "synchronous", "off")?;
        connection.pragma_update(None, "wal_autocheckpoint", CHECKPOINT_PAGES)?;
        connection.execute_batch(
            "CREATE TABLE IF NOT EXISTS gateway (name TEXT NOT NULL, boot TEXT NOT NULL);
             CREATE TABLE IF NOT EXISTS used (
                 budget TEXT NOT NULL, per TEXT NOT NULL, start INTEGER NOT NULL,
                 requests INTEGER NOT NULL, tokens INTEGER NOT NULL, money INTEGER NOT NULL,
                 PRIMARY KEY (budget, per, start)
             ) WITHOUT ROWID;
             CREATE TABLE IF NOT EXISTS reserved (
                 id INTEGER NOT NULL, budget TEXT NOT NULL, per TEXT NOT NULL, start INTEGER NOT NULL,
                 requests INTEGER NOT NULL, tokens INTEGER NOT NULL, money INTEGER NOT NULL,
                 PRIMARY KEY (id, budget, per, start)
             ) WITHOUT ROWID;
             CREATE TABLE IF NOT EXISTS log (number INTEGER PRIMARY KEY, entries TEXT NOT NULL);",
        )?;
        for table in ["used", "reserved"] {
            // Those of earlier releases have none.
            if !connection.column_exists(None, table, "millijoules")? {
                connection.execute_batch(&format!(
                    "ALTER TABLE {table} ADD COLUMN millijoules INTEGER NOT NULL DEFAULT 0"
                ))?;
            }
        }
        let recovered = recover(&mut connection, now)?;
        let (sender, receiver) = mpsc::channel();
        let write = move || {
            if let Err(error) = run(&connection, &receiver, log_bytes) {
                tracing::error!("{error}");
            }
        };
        let thread = std::thread::Builder::new().name("budgets".to_owned());
        thread.spawn(write).map_err(|error| JournalError::new(&error))?;
        Ok((Self { sender }, recovered))
    }

    /// Brings the log into the tables, for a release before this one, which reads these alone.
    pub(super) async fn fold(&self) {
        let _ = self.send(Vec::new(), true).await;
    }

    /// Writes entries; whoever awaits the answer knows that they are on the disk.
    pub(super) fn write(&self, entries: Vec<JournalEntry>) -> oneshot::Receiver<Result<(), JournalError>> {
        self.send(entries, false)
    }

    fn send(&self, entries: Vec<JournalEntry>, is_fold: bool) -> oneshot::Receiver<Result<(), JournalError>> {
        let (done, written) = oneshot::channel();
        if let Err(mpsc::SendError(Waiting { done, .. })) =
            self.sender.send(Waiting { entries, is_fold, done })
        {
            // Nobody may wait for it.
            let ended = "the thread that writes has ended; see the gateway's log";
            let _ = done.send(Err(JournalError::new(&ended)));
        }
        written
    }
}

/// Settles what a crash cut, and reads what was used.
fn recover(connection: &mut Connection, now: i64) -> Result<Recovered, JournalError> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let named = transaction.query_row("SELECT name, boot FROM gateway", [], |row| {
        Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?))
    });
    let boot = boot_id();
    let (gateway, has_rebooted) = match named {
        // Of a machine that does not say it, nobody knows.
        Ok((name, before)) => (name, boot.is_empty() || before != boot),
        Err(rusqlite::Error::QueryReturnedNoRows) => (new_name(), false),
        Err(error) => return Err(error.into()),
    };
    transaction.execute("DELETE FROM gateway", [])?;
    transaction.execute("INSERT INTO gateway (name, boot) VALUES (?1, ?2)", [&gateway, &boot])?;
    let mut backlog = Backlog::of_tables(&transaction)?;
    {
        let mut rows = transaction.prepare("SELECT entries FROM log ORDER BY number")?;
        let mut rows = rows.query([])?;
        while let Some(row) = rows.next()? {
            let entries: String = row.get(0)?;
            let damaged = |error| JournalError { message: format!("its log: {error}"), is_damaged: true };
            backlog.add(serde_json::from_str(&entries).map_err(damaged)?);
        }
    }
    Statements::prepare(&transaction)?.fold(&mut backlog)?;
    expire(&transaction, now)?;
    let things = THINGS.join(", ");
    let sums = THINGS.map(|thing| format!("sum({thing})")).join(", ");
    transaction.execute(
        &format!(
            "INSERT INTO used (budget, per, start, {things})
             SELECT budget, per, start, {sums} FROM reserved WHERE true GROUP BY budget, per, start
             ON CONFLICT DO UPDATE SET {}",
            added()
        ),
        [],
    )?;
    transaction.execute("DELETE FROM reserved", [])?;
    let mut used = HashMap::new();
    {
        let mut rows = transaction.prepare(&format!("SELECT budget, per, start, {things} FROM used"))?;
        let mut rows = rows.query([])?;
        while let Some(row) = rows.next()? {
            let per: String = row.get(1)?;
            let Some(per) = period(&per) else { continue };
            let count = |at| Ok::<_, rusqlite::Error>(u64::try_from(row.get::<_, i64>(at)?).unwrap_or(0));
            let amount =
                Amount { requests: count(3)?, tokens: count(4)?, money: count(5)?, millijoules: count(6)? };
            used.insert((row.get(0)?, (per, row.get(2)?)), amount);
        }
    }
    transaction.commit()?;
    Ok(Recovered { gateway, used, has_rebooted })
}

/// What the machine calls the time since it was started; empty where it does not say.
fn boot_id() -> String {
    let said = match cfg!(target_os = "macos") {
        true => std::process::Command::new("/usr/sbin/sysctl")
            .args(["-n", "kern.bootsessionuuid"])
            .output()
            .map(|output| String::from_utf8_lossy(&output.stdout).into_owned()),
        false => std::fs::read_to_string("/proc/sys/kernel/random/boot_id"),
    };
    said.map(|id| id.trim().to_owned()).unwrap_or_default()
}

/// A name that no other gateway has.
pub(super) fn new_name() -> String {
    format!("gateway-{:012x}", rand::random::<u64>() >> 16)
}

/// Forgets windows that are long over.
fn expire(connection: &Connection, now: i64) -> Result<(), JournalError> {
    for (per, seconds) in RETENTION_SECONDS {
        let oldest = now - seconds;
        connection
            .execute("DELETE FROM used WHERE per = ?1 AND start < ?2", params![per.as_str(), oldest])?;
    }
    Ok(())
}

fn period(name: &str) -> Option<BudgetPeriod> {
    RETENTION_SECONDS.into_iter().map(|(per, _)| per).find(|per| per.as_str() == name)
}

fn run(
    connection: &Connection,
    receiver: &Receiver<Waiting>,
    max_log_bytes: usize,
) -> Result<(), JournalError> {
    let mut statements = Statements::prepare(connection)?;
    let mut backlog = Backlog::default();
    let mut log_bytes = 0;
    let mut expiry_due = Instant::now() + EXPIRY_INTERVAL;
    while let Ok(Waiting { mut entries, is_fold: mut is_fold_due, done: first }) = receiver.recv() {
        let mut done = vec![first];
        while done.len() < MAX_GROUP
            && let Ok(Waiting { entries: more, is_fold, done: waiting }) = receiver.try_recv()
        {
            is_fold_due |= is_fold;
            entries.extend(more);
            done.push(waiting);
        }
        let result = statements.log(&entries);
        match &result {
            Ok(bytes) => {
                backlog.add(entries);
                log_bytes += bytes;
            }
            Err(error) => tracing::error!("{error}"),
        }
        if is_fold_due || log_bytes >= max_log_bytes {
            // Where it fails, the log has it still.
            match fold(connection, &mut statements, &mut backlog) {
                Ok(()) => log_bytes = 0,
                Err(error) => tracing::error!("{error}"),
            }
        }
        for waiting in done {
            // A request that was cancelled needs no word of it.
            let _ = waiting.send(result.clone().map(|_| ()));
        }
        if expiry_due <= Instant::now() {
            expiry_due = Instant::now() + EXPIRY_INTERVAL;
            if let Err(error) = expire(connection, Timestamp::now().as_second()) {
                tracing::warn!("{error}");
            }
        }
    }
    fold(connection, &mut statements, &mut backlog)
}

fn fold(
    connection: &Connection,
    statements: &mut Statements<'_>,
    backlog: &mut Backlog,
) -> Result<(), JournalError> {
    // Where one fails, all of them are taken back when this is dropped.
    let transaction = connection.unchecked_transaction()?;
    let mut folded = backlog.clone();
    statements.fold(&mut folded)?;
    transaction.commit()?;
    *backlog = folded;
    Ok(())
}

/// What the thread that writes executes, parsed once: parsing takes as long as writing.
struct Statements<'c> {
    log: Statement<'c>,
    clear: Statement<'c>,
    reserve: Statement<'c>,
    settle: Statement<'c>,
    release: Statement<'c>,
}

impl<'c> Statements<'c> {
    fn prepare(connection: &'c Connection) -> Result<Self, JournalError> {
        let (things, added) = (THINGS.join(", "), added());
        Ok(Self {
            log: connection.prepare("INSERT INTO log (entries) VALUES (?1)")?,
            clear: connection.prepare("DELETE FROM log")?,
            reserve: connection.prepare(&format!(
                "INSERT INTO reserved (budget, per, start, {things}, id) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)
                 ON CONFLICT DO UPDATE SET {added}"
            ))?,
            settle: connection.prepare(&format!(
                "INSERT INTO used (budget, per, start, {things}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
                 ON CONFLICT DO UPDATE SET {added}"
            ))?,
            release: connection
                .prepare("DELETE FROM reserved WHERE id = ?1 AND budget = ?2 AND per = ?3 AND start = ?4")?,
        })
    }

    /// Writes entries down, as one row of so many bytes.
    fn log(&mut self, entries: &[JournalEntry]) -> Result<usize, JournalError> {
        // Texts and numbers: serialising them cannot fail.
        let entries = serde_json::to_string(entries).map_err(|error| JournalError::new(&error))?;
        self.log.execute([&entries])?;
        Ok(entries.len())
    }

    /// Changes the tables by a backlog, which is empty then, and forgets the log.
    fn fold(&mut self, backlog: &mut Backlog) -> Result<(), JournalError> {
        for ((budget, (per, start)), amount) in backlog.used.drain() {
            let [requests, tokens, money, millijoules] = stored(amount);
            let per = per.as_str();
            self.settle.execute(params![budget, per, start, requests, tokens, money, millijoules])?;
        }
        for (id, (budget, (per, start))) in backlog.released.drain(..) {
            self.release.execute(params![stored_number(id), budget, per.as_str(), start])?;
        }
        for (key, amount) in backlog.reserved.drain() {
            let (id, (budget, (per, start))) = &key;
            let [requests, tokens, money, millijoules] = stored(amount);
            let (per, id) = (per.as_str(), stored_number(*id));
            self.reserve.execute(params![budget, per, start, requests, tokens, money, millijoules, id])?;
            backlog.in_table.insert(key);
        }
        self.clear.execute([])?;
        Ok(())
    }
}

/// What a row becomes by what is added to it. Sums stay within what SQLite counts exactly.
fn added() -> String {
    THINGS.map(|thing| format!("{thing} = min({thing} + excluded.{thing}, {MAX_AMOUNT})")).join(", ")
}

/// The most that is stored of anything: two of it are still a number of SQLite.
const MAX_AMOUNT: i64 = 4_000_000_000_000_000_000;

fn stored_number(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(MAX_AMOUNT).min(MAX_AMOUNT)
}

fn stored(amount: Amount) -> [i64; THINGS.len()] {
    let Amount { requests, tokens, money, millijoules } = amount;
    [requests, tokens, money, millijoules].map(stored_number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_journal_whose_process_is_killed_is_what_was_written() {
        const NOW: i64 = 1_800_000_000;
        let folder = tempfile::tempdir().unwrap();
        let mut path = folder.path().join("budgets.db");
        let account = |window: i64| ("uid".to_owned(), (BudgetPeriod::Hour, NOW - window * 3600));
        let (mut used, mut open) = (HashMap::<AccountKey, u64>::new(), HashMap::<(u64, i64), u64>::new());
        let random = &mut rand::rng();
        for round in 0..20 {
            // Most of them go into the tables, and the last are in the log.
            let (journal, recovered) = Journal::open_with(&path, NOW, 1 << 11).unwrap();
            // What ran when the process was killed used all that it might.
            for ((_, window), tokens) in open.drain() {
                *used.entry(account(window)).or_default() += tokens;
            }
            let tokens = |(key, amount): (&AccountKey, &Amount)| (key.clone(), amount.tokens);
            assert_eq!(recovered.used.iter().map(tokens).collect::<HashMap<_, _>>(), used, "round {round}");
            for _ in 0..rand::Rng::random_range(random, 0..2000) {
                let key = (rand::Rng::random_range(random, 0..50), rand::Rng::random_range(random, 0..3));
                let (id, window) = key;
                let tokens = rand::Rng::random_range(random, 1..100);
                let amount = Amount { tokens, ..Amount::ZERO };
                // A provider's attempt reserves more, under the same number.
                let entry = if rand::Rng::random_bool(random, 0.6) {
                    *open.entry(key).or_default() += tokens;
                    JournalEntry::Reserved { id, account: account(window), amount }
                } else {
                    open.remove(&key);
                    *used.entry(account(window)).or_default() += tokens;
                    JournalEntry::Used { id, account: account(window), amount }
                };
                let _ = journal.write(vec![entry]).await.unwrap();
            }
            // As the kernel leaves the files of a process that is killed.
            let copy = folder.path().join(format!("{round}"));
            std::fs::create_dir(&copy).unwrap();
            for file in ["budgets.db", "budgets.db-wal"] {
                std::fs::copy(path.with_file_name(file), copy.join(file)).unwrap();
            }
            path = copy.join("budgets.db");
        }
    }

    #[tokio::test]
    async fn the_journal_stays_small_and_forgets_what_is_over() {
        const NOW: i64 = 1_800_000_000;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("budgets.db");
        let (journal, _) = Journal::open(&path, NOW).unwrap();
        let amount = Amount { requests: 1, tokens: 10, ..Amount::ZERO };
        let mut waiting = Vec::new();
        for id in 0..20_000_u64 {
            let start = NOW - 60 * i64::try_from(id).unwrap();
            let minute = ("uid".to_owned(), (BudgetPeriod::Minute, start));
            let month = ("uid".to_owned(), (BudgetPeriod::Month, NOW - 86_400 * 20));
            waiting.push(journal.write(vec![
                JournalEntry::Reserved { id, account: minute.clone(), amount },
                JournalEntry::Reserved { id, account: month.clone(), amount },
                JournalEntry::Used { id, account: minute, amount },
                JournalEntry::Used { id, account: month, amount },
            ]));
        }
        for written in waiting {
            written.await.unwrap().unwrap();
        }
        drop(journal);
        let (_, recovered) = Journal::open(&path, NOW).unwrap();
        // Those of an hour, and the month.
        assert_eq!(recovered.used.len(), 61 + 1);
        let month = ("uid".to_owned(), (BudgetPeriod::Month, NOW - 86_400 * 20));
        assert_eq!(recovered.used[&month].tokens, 200_000);
        // What a provider claims may be absurd, and is still a number after the next one.
        let (journal, _) = Journal::open(&path, NOW).unwrap();
        let absurd = Amount { requests: 1, ..Amount::MAX };
        for id in 0..5 {
            let entry = JournalEntry::Used { id, account: month.clone(), amount: absurd };
            journal.write(vec![entry]).await.unwrap().unwrap();
        }
        drop(journal);
        let (_, recovered) = Journal::open(&path, NOW).unwrap();
        assert_eq!(recovered.used[&month].tokens, MAX_AMOUNT as u64);
        let log = folder.path().join("budgets.db-wal");
        let bytes = std::fs::metadata(&log).map_or(0, |metadata| metadata.len());
        assert!(bytes < 4 << 20, "the log has {bytes} bytes");
    }
}
