//! Runs of Pipelines in the store: how far each is, and what its steps made, by its SHA-256. Not here: what runs them, see
//! `pipelines`.

use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension as _, Transaction, params};

use super::ResponseStoreError;

/// The name of the gateway is that of its store: one that starts again knows its own runs.
pub(super) const SCHEMA: &str = "
    CREATE TABLE gateway (name TEXT NOT NULL) STRICT;
    INSERT INTO gateway SELECT lower(hex(randomblob(8)));
    CREATE TABLE run (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        created INTEGER NOT NULL,
        ended INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        record BLOB NOT NULL
    ) STRICT;
    CREATE INDEX run_created ON run (created);
    CREATE TABLE artifact (
        run INTEGER NOT NULL REFERENCES run (number) ON DELETE CASCADE,
        digest TEXT NOT NULL,
        bytes BLOB NOT NULL,
        PRIMARY KEY (run, digest)
    ) STRICT;
    CREATE INDEX artifact_digest ON artifact (digest);
";

/// Runs that may be deleted.
pub(super) const HAS_ENDED: &str = "ended = 1";

/// A run as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RunRow {
    /// The uid of its object.
    pub(crate) id: String,
    /// Whose it is: nobody else finds what it made.
    pub(crate) owner: String,
    /// When it was last further, in seconds since 1970: what has ended is kept from then on.
    pub(crate) created: u64,
    pub(crate) ended: bool,
    /// Of all that its steps made.
    pub(crate) bytes: u64,
    /// How far it is, in the words of `pipelines`.
    pub(crate) record: Bytes,
}

/// What a step made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Artifact {
    /// SHA-256 in hexadecimal.
    pub(crate) digest: String,
    pub(crate) bytes: Bytes,
}

/// A write.
#[derive(Clone, Debug)]
pub(super) enum RunChange {
    /// It begins.
    Insert {
        row: RunRow,
        artifacts: Vec<Artifact>,
    },
    /// It is so far, and these are new.
    Save {
        row: RunRow,
        artifacts: Vec<Artifact>,
    },
    Delete {
        id: String,
    },
}

impl RunChange {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Insert { row, artifacts } | Self::Save { row, artifacts } => {
                row.record.len() + artifacts.iter().map(|artifact| artifact.bytes.len()).sum::<usize>()
            }
            Self::Delete { .. } => 0,
        }
    }

    /// Whether it adds nothing that a step made.
    pub(super) fn is_end(&self) -> bool {
        matches!(self, Self::Save { artifacts, .. } if artifacts.is_empty())
    }
}

/// A run that goes on is not deleted to make room for itself.
pub(super) fn hold(transaction: &Transaction<'_>, change: &RunChange) -> Result<(), ResponseStoreError> {
    if let RunChange::Save { row, .. } = change {
        transaction.execute("UPDATE run SET ended = 0 WHERE id = ?1", [&row.id])?;
    }
    Ok(())
}

pub(super) fn apply(
    transaction: &Transaction<'_>,
    change: &RunChange,
    max_bytes: u64,
) -> Result<usize, ResponseStoreError> {
    let (row, artifacts) = match change {
        RunChange::Delete { id } => return Ok(transaction.execute("DELETE FROM run WHERE id = ?1", [id])?),
        RunChange::Insert { row, artifacts } | RunChange::Save { row, artifacts } => (row, artifacts),
    };
    let RunRow { id, owner, created, ended, bytes, record } = row;
    if !artifacts.is_empty() {
        check_room(transaction, row, max_bytes)?;
    }
    let statement = match change {
        RunChange::Insert { .. } => {
            "INSERT OR REPLACE INTO run (id, owner, created, ended, bytes, record) VALUES (?1, ?2, ?3, ?4, ?5, ?6)"
        }
        _ => "UPDATE run SET created = ?3, ended = ?4, bytes = ?5, record = ?6 WHERE id = ?1 AND owner = ?2",
    };
    let values = params![id, owner, created.cast_signed(), ended, bytes.cast_signed(), &record[..]];
    if transaction.execute(statement, values)? == 0 {
        return Err(ResponseStoreError::Deleted);
    }
    for Artifact { digest, bytes } in artifacts {
        transaction.execute(
            "INSERT OR IGNORE INTO artifact (run, digest, bytes) SELECT number, ?2, ?3 FROM run WHERE id = ?1",
            params![id, digest, &bytes[..]],
        )?;
    }
    Ok(1)
}

/// An error where runs that have not ended would take more than a half of the store, or those of this owner more than a
/// quarter: others need room too.
fn check_room(transaction: &Transaction<'_>, row: &RunRow, max: u64) -> Result<(), ResponseStoreError> {
    let (all, own) = transaction.query_row(
        "SELECT coalesce(sum(bytes), 0), coalesce(sum(bytes) FILTER (WHERE owner = ?1), 0) FROM run
            WHERE ended = 0 AND id != ?2",
        [&row.owner, &row.id],
        |sums| Ok((sums.get::<_, i64>(0)?.cast_unsigned(), sums.get::<_, i64>(1)?.cast_unsigned())),
    )?;
    let fits = all + row.bytes <= max / 2 && own + row.bytes <= max / 4;
    if fits { Ok(()) } else { Err(ResponseStoreError::RunsFull { max: max / 4 }) }
}

/// The name of the gateway.
pub(super) fn gateway_name(connection: &Connection) -> Result<String, ResponseStoreError> {
    Ok(connection.query_row("SELECT name FROM gateway", [], |row| row.get(0))?)
}

/// The record of a run.
pub(super) fn record(connection: &Connection, id: &str) -> Result<Option<Vec<u8>>, ResponseStoreError> {
    let select = "SELECT record FROM run WHERE id = ?1";
    Ok(connection.query_row(select, [id], |row| row.get(0)).optional()?)
}

/// The ids of all runs.
pub(super) fn ids(connection: &Connection) -> Result<Vec<String>, ResponseStoreError> {
    let mut select = connection.prepare("SELECT id FROM run")?;
    let rows = select.query_map([], |row| row.get(0))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// What a step of this run made.
pub(super) fn artifact(
    connection: &Connection,
    id: &str,
    digest: &str,
) -> Result<Option<Vec<u8>>, ResponseStoreError> {
    let select =
        "SELECT bytes FROM artifact WHERE digest = ?2 AND run = (SELECT number FROM run WHERE id = ?1)";
    Ok(connection.query_row(select, [id, digest], |row| row.get(0)).optional()?)
}

/// How many bytes a step of any run of this owner made.
pub(super) fn artifact_bytes(
    connection: &Connection,
    owner: &str,
    digest: &str,
) -> Result<Option<usize>, ResponseStoreError> {
    let select = "SELECT length(artifact.bytes) FROM artifact JOIN run ON run.number = artifact.run
        WHERE digest = ?2 AND owner = ?1 LIMIT 1";
    let bytes = connection.query_row(select, [owner, digest], |row| row.get::<_, i64>(0)).optional()?;
    Ok(bytes.map(|bytes| bytes.unsigned_abs() as usize))
}

/// What a step of any run of this owner made.
pub(super) fn artifact_of(
    connection: &Connection,
    owner: &str,
    digest: &str,
) -> Result<Option<Vec<u8>>, ResponseStoreError> {
    let select = "SELECT artifact.bytes FROM artifact JOIN run ON run.number = artifact.run
        WHERE digest = ?2 AND owner = ?1 LIMIT 1";
    Ok(connection.query_row(select, [owner, digest], |row| row.get(0)).optional()?)
}
