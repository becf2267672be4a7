//! The tables of the journal, in SQLite: what was used in each window, and what requests that run may use. Logs up to the
//! number in `folded` are in them.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, Statement, Transaction, TransactionBehavior, params};
use russet_crds::BudgetPeriod;

use super::backlog::Backlog;
use super::{JournalError, Recovered, log};
use crate::budgets::amount::Amount;

/// How long another gateway may take to close the file.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);
/// How long what was used is remembered, by the length of the window: as long as a status may keep such a window.
const RETENTION_SECONDS: [(BudgetPeriod, i64); 4] = [
    (BudgetPeriod::Minute, 3600),
    (BudgetPeriod::Hour, 24 * 3600),
    (BudgetPeriod::Day, 7 * 24 * 3600),
    (BudgetPeriod::Month, 130 * 24 * 3600),
];
/// Pages of SQLite's own log after which it is written to the file: it stays small, as the disk of a pod is.
const CHECKPOINT_PAGES: u32 = 64;

/// The columns of an amount.
const THINGS: [&str; 4] = ["requests", "tokens", "money", "millijoules"];

/// Opens or creates the file, and what it lacks.
pub(super) fn open(path: &Path) -> Result<Connection, JournalError> {
    let connection = Connection::open(path)?;
    // A gateway that ended a moment ago may still have it, and one that runs keeps it: two would spend one grant twice.
    connection.busy_timeout(BUSY_TIMEOUT)?;
    connection.pragma_update(None, "locking_mode", "exclusive")?;
    connection.pragma_update(None, "journal_mode", "wal")?;
    // A process that is killed has written what it committed; only a machine that stops has not. Waiting for the disk would
    // make that no better.
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
             CREATE TABLE IF NOT EXISTS folded (log INTEGER NOT NULL);",
    )?;
    for table in ["used", "reserved"] {
        // Those of earlier releases have none.
        if !connection.column_exists(None, table, "millijoules")? {
            connection.execute_batch(&format!(
                "ALTER TABLE {table} ADD COLUMN millijoules INTEGER NOT NULL DEFAULT 0"
            ))?;
        }
    }
    Ok(connection)
}

/// Settles what a crash cut, and reads what was used. Returns the number of the last log that the tables have then, too.
pub(super) fn recover(
    connection: &mut Connection,
    path: &Path,
    now: i64,
) -> Result<(Recovered, u64), JournalError> {
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
    add_log_table(&transaction, &mut backlog)?;
    let folded =
        transaction.query_row("SELECT max(log) FROM folded", [], |row| row.get::<_, Option<i64>>(0))?;
    let mut last = match folded {
        Some(number) => u64::try_from(number).unwrap_or(0),
        None => 0,
    };
    for number in log::numbers(path)? {
        if number > last {
            log::read(path, number, &gateway, |entries| backlog.add(entries)).map_err(|error| {
                let JournalError { message, is_damaged } = error.into();
                JournalError { message: format!("its log {number}: {message}"), is_damaged }
            })?;
            last = number;
        }
    }
    Statements::prepare(&transaction)?.fold(&mut backlog, last)?;
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
    Ok((Recovered { gateway, used, has_rebooted }, last))
}

/// Takes over the log of the release before this one, which was a table.
fn add_log_table(transaction: &Transaction<'_>, backlog: &mut Backlog) -> Result<(), JournalError> {
    if !transaction.table_exists(None, "log")? {
        return Ok(());
    }
    {
        let mut rows = transaction.prepare("SELECT entries FROM log ORDER BY number")?;
        let mut rows = rows.query([])?;
        while let Some(row) = rows.next()? {
            let entries: String = row.get(0)?;
            let damaged = |error| JournalError { message: format!("its log: {error}"), is_damaged: true };
            backlog.add(serde_json::from_str(&entries).map_err(damaged)?);
        }
    }
    transaction.execute_batch("DROP TABLE log")?;
    Ok(())
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
pub(crate) fn new_name() -> String {
    format!("gateway-{:012x}", rand::random::<u64>() >> 16)
}

/// Forgets windows that are long over.
pub(super) fn expire(connection: &Connection, now: i64) -> Result<(), JournalError> {
    for (per, seconds) in RETENTION_SECONDS {
        let oldest = now - seconds;
        connection
            .execute("DELETE FROM used WHERE per = ?1 AND start < ?2", params![per.as_str(), oldest])?;
    }
    Ok(())
}

pub(super) fn period(name: &str) -> Option<BudgetPeriod> {
    RETENTION_SECONDS.into_iter().map(|(per, _)| per).find(|per| per.as_str() == name)
}

/// What the thread that writes executes, parsed once: parsing takes as long as writing.
pub(super) struct Statements<'c> {
    clear: Statement<'c>,
    folded: Statement<'c>,
    reserve: Statement<'c>,
    settle: Statement<'c>,
    release: Statement<'c>,
}

impl<'c> Statements<'c> {
    pub(super) fn prepare(connection: &'c Connection) -> Result<Self, JournalError> {
        let (things, added) = (THINGS.join(", "), added());
        Ok(Self {
            clear: connection.prepare("DELETE FROM folded")?,
            folded: connection.prepare("INSERT INTO folded (log) VALUES (?1)")?,
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

    /// Changes the tables by a backlog, which is empty then, and has the logs up to this one.
    pub(super) fn fold(&mut self, backlog: &mut Backlog, last: u64) -> Result<(), JournalError> {
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
        self.folded.execute([stored_number(last)])?;
        Ok(())
    }
}

/// What a row becomes by what is added to it. Sums stay within what SQLite counts exactly.
fn added() -> String {
    THINGS.map(|thing| format!("{thing} = min({thing} + excluded.{thing}, {MAX_AMOUNT})")).join(", ")
}

/// The most that is stored of anything: two of it are still a number of SQLite.
pub(super) const MAX_AMOUNT: i64 = 4_000_000_000_000_000_000;

fn stored_number(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(MAX_AMOUNT).min(MAX_AMOUNT)
}

fn stored(amount: Amount) -> [i64; THINGS.len()] {
    let Amount { requests, tokens, money, millijoules } = amount;
    [requests, tokens, money, millijoules].map(stored_number)
}
