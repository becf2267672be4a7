//! The file: its schema, and what is written to it and read from it. Synchronous; who calls it when is not here.

use std::fs::{self, OpenOptions, Permissions};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::{
    Connection, ErrorCode, OpenFlags, OptionalExtension as _, Transaction, TransactionBehavior, params,
};

use super::{
    Change, ConversationError, ConversationLimits, EventChunk, NewRow, ResponseStoreError, StoredBody,
    StoredTurn, batches, files, inbox, runs,
};

/// 1 had responses alone, 2 files and batches too, 3 the inbox.
const SCHEMA_VERSION: i64 = 4;
/// Rows come in the order of their numbers: a response is younger than those that it continues.
const SCHEMA: &str = "
    CREATE TABLE response (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        created INTEGER NOT NULL,
        parent TEXT,
        finished INTEGER NOT NULL,
        body BLOB NOT NULL,
        input BLOB NOT NULL
    ) STRICT;
    CREATE INDEX response_created ON response (created);
    CREATE TABLE event (
        response INTEGER NOT NULL REFERENCES response (number) ON DELETE CASCADE,
        first INTEGER NOT NULL,
        next INTEGER NOT NULL,
        text BLOB NOT NULL,
        PRIMARY KEY (response, next)
    ) STRICT;
";
/// A commit is on the disk before it returns, on a Mac too. What is deleted is overwritten.
const SETTINGS: &str = "
    PRAGMA journal_mode = WAL;
    PRAGMA synchronous = FULL;
    PRAGMA fullfsync = ON;
    PRAGMA checkpoint_fullfsync = ON;
    PRAGMA foreign_keys = ON;
    PRAGMA secure_delete = ON;
";
/// Another process that looks into the file holds a write up for so long at most.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// The connection that writes.
pub(super) struct Database {
    connection: Connection,
    max_bytes: u64,
}

impl Database {
    /// Opens the file, or creates it; one that is damaged is renamed and begun anew.
    pub(super) fn open(path: &Path, max_bytes: u64) -> Result<Self, ResponseStoreError> {
        let connection = match connect(path) {
            Err(ResponseStoreError::Damaged(cause)) => {
                let aside = put_aside(path)?;
                tracing::warn!(
                    file = %path.display(), renamed_to = %aside.display(), cause,
                    "the store of responses is damaged: a new one begins, and what the old one kept is not found"
                );
                connect(path)?
            }
            connected => connected?,
        };
        files::delete_unfinished(&connection)?;
        Ok(Self { connection, max_bytes })
    }

    /// Makes all of these durable, or none; the numbers of rows that each changed.
    pub(super) fn commit(&mut self, changes: &[&Change]) -> Result<Vec<usize>, ResponseStoreError> {
        let max_bytes = self.max_bytes;
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let applied =
            changes.iter().map(|change| apply(&transaction, change, max_bytes)).collect::<Result<_, _>>()?;
        transaction.commit()?;
        Ok(applied)
    }

    /// Deletes at most `limit` responses, batches, requests and runs that were created longer than `retention` before `now`, and files that
    /// have expired; how many.
    pub(super) fn expire(
        &mut self,
        now: u64,
        retention: Duration,
        limit: usize,
    ) -> Result<usize, ResponseStoreError> {
        let created_before = now.saturating_sub(retention.as_secs());
        let mut deleted = 0;
        for (delete, time) in [
            (
                "DELETE FROM response WHERE number IN
                    (SELECT number FROM response WHERE created < ?1 ORDER BY created LIMIT ?2)"
                    .to_owned(),
                created_before,
            ),
            (
                "DELETE FROM batch WHERE number IN
                    (SELECT number FROM batch WHERE created < ?1 AND ended = 1 ORDER BY created LIMIT ?2)"
                    .to_owned(),
                created_before,
            ),
            (
                format!(
                    "DELETE FROM inbox WHERE number IN
                        (SELECT number FROM inbox WHERE created < ?1 AND {} ORDER BY created LIMIT ?2)",
                    inbox::HAS_ENDED
                ),
                created_before,
            ),
            (
                format!(
                    "DELETE FROM run WHERE number IN
                        (SELECT number FROM run WHERE created < ?1 AND {} ORDER BY created LIMIT ?2)",
                    runs::HAS_ENDED
                ),
                created_before,
            ),
            (
                format!(
                    "DELETE FROM file WHERE number IN
                        (SELECT number FROM file WHERE expires <= ?1 AND {} ORDER BY expires LIMIT ?2)",
                    files::IS_FREE
                ),
                now,
            ),
        ] {
            let left = (limit - deleted).cast_signed();
            deleted += self.connection.execute(&delete, params![time.cast_signed(), left])?;
        }
        Ok(deleted)
    }

    /// As if the disk had room for so many pages.
    #[cfg(test)]
    pub(super) fn limit_pages(&self, pages: u32) {
        self.connection.pragma_update(None, "max_page_count", pages).unwrap();
    }

    #[cfg(test)]
    pub(super) fn used_bytes(&self) -> u64 {
        used_bytes(&self.connection).unwrap()
    }
}

/// A connection to the file, whose schema is there.
fn connect(path: &Path) -> Result<Connection, ResponseStoreError> {
    let unopened =
        |error: std::io::Error| ResponseStoreError::Open { path: path.into(), cause: error.to_string() };
    // SQLite gives its log the permissions of the file.
    let file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path);
    let file = file.map_err(unopened)?;
    file.set_permissions(Permissions::from_mode(0o600)).map_err(unopened)?;
    drop(file);
    let mut connection = Connection::open_with_flags(
        path,
        OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX,
    )?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    connection.execute_batch(SETTINGS)?;
    let check: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
    if check != "ok" {
        return Err(ResponseStoreError::Damaged(check));
    }
    let missing = match connection.query_row("PRAGMA user_version", [], |row| row.get(0))? {
        SCHEMA_VERSION => return Ok(connection),
        0 => [SCHEMA, files::SCHEMA, batches::SCHEMA, inbox::SCHEMA, runs::SCHEMA].concat(),
        1 => [files::SCHEMA, batches::SCHEMA, inbox::SCHEMA, runs::SCHEMA].concat(),
        2 => [inbox::SCHEMA, runs::SCHEMA].concat(),
        3 => runs::SCHEMA.to_owned(),
        found => return Err(ResponseStoreError::Newer { path: path.into(), found, known: SCHEMA_VERSION }),
    };
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let tables: i64 = transaction.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if tables > 0 && missing.starts_with(SCHEMA) {
        return Err(ResponseStoreError::Foreign { path: path.into() });
    }
    transaction.execute_batch(&missing)?;
    transaction.pragma_update(None, "user_version", SCHEMA_VERSION)?;
    transaction.commit()?;
    Ok(connection)
}

/// Renames the file and its log; the new name.
fn put_aside(path: &Path) -> Result<PathBuf, ResponseStoreError> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let with = |path: &Path, suffix: &str| {
        let mut name = path.as_os_str().to_owned();
        name.push(suffix);
        PathBuf::from(name)
    };
    let aside = with(path, &format!(".damaged-{seconds}"));
    fs::rename(path, &aside)
        .map_err(|error| ResponseStoreError::Open { path: path.into(), cause: error.to_string() })?;
    // There is none where SQLite could not begin; a log without its file must not be read with the next one.
    let _ = fs::rename(with(path, "-wal"), with(&aside, "-wal"));
    let _ = fs::remove_file(with(path, "-shm"));
    Ok(aside)
}

/// A connection that reads.
pub(super) fn open_reader(path: &Path) -> Result<Connection, ResponseStoreError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    Ok(connection)
}

/// Makes one change; the number of rows that it changed.
fn apply(
    transaction: &Transaction<'_>,
    change: &Change,
    max_bytes: u64,
) -> Result<usize, ResponseStoreError> {
    let added = match change {
        Change::Inbox(change) => inbox::added(transaction, change)?,
        Change::Insert(NewRow { replay: Some(replay), .. }) => {
            Some((replay.0.owner.clone(), replay.1.bytes()))
        }
        _ => None,
    };
    if let Some((owner, bytes)) = added {
        inbox::check_room(transaction, &owner, bytes, max_bytes)?;
    }
    if let Change::Run(change) = change {
        runs::hold(transaction, change)?;
    }
    match make_room(transaction, change.bytes() as u64, max_bytes) {
        // What was accepted ends: its answer takes room beyond the limit rather than wait for ever.
        Err(ResponseStoreError::TooLarge { .. }) if change.is_end() => {}
        made => made?,
    }
    let changed = match change {
        Change::Insert(row) => insert(transaction, row)?,
        Change::Finish { id, body } => {
            inbox::forget(transaction, id)?;
            transaction.execute(
                "UPDATE response SET finished = 1, body = ?2 WHERE id = ?1",
                params![id, &body[..]],
            )?
        }
        Change::AppendEvents { id, chunk: EventChunk { first, next, text } } => transaction.execute(
            "INSERT INTO event (response, first, next, text)
                SELECT number, ?2, ?3, ?4 FROM response WHERE id = ?1",
            params![id, first.cast_signed(), next.cast_signed(), text],
        )?,
        Change::Delete { owner, id } => {
            let deleted = transaction
                .execute("DELETE FROM response WHERE owner = ?1 AND id = ?2", params![owner, id])?;
            if deleted > 0 {
                inbox::forget(transaction, id)?;
            }
            return Ok(deleted);
        }
        Change::File(change) => return files::apply(transaction, change),
        Change::Batch(change) => return batches::apply(transaction, change),
        Change::Inbox(change) => return inbox::apply(transaction, change),
        Change::Run(change) => return runs::apply(transaction, change, max_bytes),
    };
    if changed == 0 { Err(ResponseStoreError::Deleted) } else { Ok(changed) }
}

/// Adds a response; one that runs again begins anew.
fn insert(transaction: &Transaction<'_>, row: &NewRow) -> Result<usize, ResponseStoreError> {
    let NewRow { id, owner, created, parent, finished, body, input, replay } = row;
    if !finished {
        transaction.execute("DELETE FROM response WHERE id = ?1 AND finished = 0", [id])?;
    }
    let changed = transaction.execute(
        "INSERT INTO response (id, owner, created, parent, finished, body, input)
            VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        params![id, owner, created.cast_signed(), parent, finished, &body[..], &input[..]],
    )?;
    if let Some(replay) = replay {
        inbox::insert(transaction, &replay.0, &replay.1)?;
    }
    Ok(changed)
}

/// Deletes the oldest responses, batches, requests and runs that have ended, and files that no batch needs, until `bytes` more have room.
fn make_room(transaction: &Transaction<'_>, bytes: u64, max: u64) -> Result<(), ResponseStoreError> {
    while bytes > 0 && used_bytes(transaction)? + bytes > max {
        let mut oldest = None;
        for (table, condition) in [
            ("response", "1"),
            ("batch", "ended = 1"),
            ("file", files::IS_FREE),
            ("inbox", inbox::IS_FREE),
            ("run", runs::HAS_ENDED),
        ] {
            let select = format!(
                "SELECT created, number FROM {table} WHERE {condition} ORDER BY created, number LIMIT 1"
            );
            let found = transaction
                .query_row(&select, [], |row| Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?)))
                .optional()?;
            let found = found.map(|(created, number)| (created, table, number));
            oldest = [oldest, found].into_iter().flatten().min_by_key(|(created, ..)| *created);
        }
        let Some((_, table, number)) = oldest else {
            return Err(ResponseStoreError::TooLarge { bytes, max });
        };
        transaction.execute(&format!("DELETE FROM {table} WHERE number = ?1"), [number])?;
    }
    Ok(())
}

/// Bytes of the file that are in use. What was deleted is used again.
fn used_bytes(connection: &Connection) -> Result<u64, ResponseStoreError> {
    let pragma = |name: &str| connection.query_row(&format!("PRAGMA {name}"), [], |row| row.get::<_, i64>(0));
    let pages = pragma("page_count")? - pragma("freelist_count")?;
    Ok((pages * pragma("page_size")?).unsigned_abs())
}

/// A response of this owner.
pub(super) fn body(
    connection: &Connection,
    owner: &str,
    id: &str,
) -> Result<Option<StoredBody>, ResponseStoreError> {
    let select = "SELECT finished, body FROM response WHERE owner = ?1 AND id = ?2";
    let row = connection
        .query_row(select, [owner, id], |row| Ok(StoredBody { finished: row.get(0)?, body: row.get(1)? }));
    Ok(row.optional()?)
}

/// The input of a response of this owner.
pub(super) fn input(
    connection: &Connection,
    owner: &str,
    id: &str,
) -> Result<Option<Vec<u8>>, ResponseStoreError> {
    let select = "SELECT input FROM response WHERE owner = ?1 AND id = ?2";
    Ok(connection.query_row(select, [owner, id], |row| row.get(0)).optional()?)
}

/// A response of this owner and those that it continues, the first one first. What is beyond the limits, or is not
/// admitted, is not read.
pub(super) fn conversation(
    connection: &Connection,
    owner: &str,
    id: &str,
    limits: ConversationLimits,
    mut admit: impl FnMut(usize) -> bool,
) -> Result<Vec<StoredTurn>, ConversationError> {
    let from_sqlite = |error: rusqlite::Error| ConversationError::Store(error.into());
    let mut size = connection
        .prepare(
            "SELECT number, parent, length(body) + length(input) FROM response WHERE owner = ?1 AND id = ?2",
        )
        .map_err(from_sqlite)?;
    let mut read = connection
        .prepare("SELECT id, finished, body, input FROM response WHERE number = ?1")
        .map_err(from_sqlite)?;
    let (mut turns, mut bytes, mut next) = (Vec::new(), 0, Some(id.to_owned()));
    while let Some(id) = next {
        if turns.len() == limits.turns {
            return Err(ConversationError::TooManyTurns(limits.turns));
        }
        let found = size
            .query_row([owner, &id], |row| {
                Ok((row.get::<_, i64>(0)?, row.get::<_, Option<String>>(1)?, row.get::<_, i64>(2)?))
            })
            .optional();
        let Some((number, parent, length)) = found.map_err(from_sqlite)? else {
            return Err(ConversationError::Missing(id));
        };
        let length = length.unsigned_abs() as usize;
        bytes += length;
        if bytes > limits.bytes {
            return Err(ConversationError::TooManyBytes(limits.bytes));
        }
        if !admit(length) {
            return Err(ConversationError::NotAdmitted);
        }
        let turn = read.query_row([number], |row| {
            Ok(StoredTurn { id: row.get(0)?, finished: row.get(1)?, body: row.get(2)?, input: row.get(3)? })
        });
        // A response that was deleted between the two is missing.
        turns.push(turn.optional().map_err(from_sqlite)?.ok_or(ConversationError::Missing(id))?);
        next = parent;
    }
    turns.reverse();
    Ok(turns)
}

/// The first chunk of a response that has events numbered `from` or later.
pub(super) fn events(
    connection: &Connection,
    owner: &str,
    id: &str,
    from: u64,
) -> Result<Option<EventChunk>, ResponseStoreError> {
    let select = "SELECT first, next, text FROM event
        WHERE response = (SELECT number FROM response WHERE owner = ?1 AND id = ?2) AND next > ?3
        ORDER BY next LIMIT 1";
    let row = connection.query_row(select, params![owner, id, from.cast_signed()], |row| {
        Ok(EventChunk {
            first: row.get::<_, i64>(0)?.cast_unsigned(),
            next: row.get::<_, i64>(1)?.cast_unsigned(),
            text: row.get(2)?,
        })
    });
    Ok(row.optional()?)
}

impl From<rusqlite::Error> for ResponseStoreError {
    fn from(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(ErrorCode::DiskFull) => Self::DiskFull,
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => Self::Damaged(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}
