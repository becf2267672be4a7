//! Batches in the store: whose each is, its files, and its record. Not here: what the record says, see `batches`.

use rusqlite::{Connection, OptionalExtension as _, Row, Transaction, params};

use super::ResponseStoreError;

/// A batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BatchRow {
    pub(crate) id: String,
    /// Whose it is: nobody else finds it.
    pub(crate) owner: String,
    /// The name of the dialect that made it.
    pub(crate) dialect: String,
    /// Seconds since 1970.
    pub(crate) created: u64,
    /// Whether nothing of it runs any more.
    pub(crate) ended: bool,
    /// The ids of its files: the requests, the responses, and the errors.
    pub(crate) input: String,
    pub(crate) output: String,
    pub(crate) errors: String,
    pub(crate) record: Vec<u8>,
}

/// Which batches of an owner are listed, the newest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BatchQuery {
    pub(crate) dialect: &'static str,
    /// Only older ones than this.
    pub(crate) after: Option<String>,
    /// Only younger ones than this. Without `after` the page ends there.
    pub(crate) before: Option<String>,
    pub(crate) limit: usize,
}

/// A write to a batch.
#[derive(Clone, Debug)]
pub(super) enum BatchChange {
    /// Its input must be there.
    Insert(BatchRow),
    Update {
        id: String,
        ended: bool,
        record: Vec<u8>,
    },
    /// Only one that has ended.
    Delete {
        owner: String,
        id: String,
    },
}

impl BatchChange {
    /// Bytes that it adds.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Insert(row) => row.record.len(),
            Self::Update { record, .. } => record.len(),
            Self::Delete { .. } => 0,
        }
    }
}

pub(super) const SCHEMA: &str = "
    CREATE TABLE batch (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        dialect TEXT NOT NULL,
        created INTEGER NOT NULL,
        ended INTEGER NOT NULL,
        input TEXT NOT NULL,
        output TEXT NOT NULL,
        errors TEXT NOT NULL,
        record BLOB NOT NULL
    ) STRICT;
    CREATE INDEX batch_created ON batch (created);
    CREATE INDEX batch_unfinished ON batch (ended) WHERE ended = 0;
    CREATE TRIGGER message_batch_files AFTER DELETE ON batch BEGIN
        DELETE FROM file WHERE purpose = 'message_batch' AND id IN (OLD.input, OLD.output, OLD.errors);
    END;
";

/// Makes one change; the number of rows that it changed.
pub(super) fn apply(
    transaction: &Transaction<'_>,
    change: &BatchChange,
) -> Result<usize, ResponseStoreError> {
    let changed = match change {
        BatchChange::Insert(row) => {
            let BatchRow { id, owner, dialect, created, ended, input, output, errors, record } = row;
            transaction.execute(
                "INSERT INTO batch (id, owner, dialect, created, ended, input, output, errors, record)
                    SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9
                    WHERE EXISTS (SELECT 1 FROM file WHERE owner = ?2 AND id = ?6)",
                params![id, owner, dialect, created.cast_signed(), ended, input, output, errors, record],
            )?
        }
        BatchChange::Update { id, ended, record } => transaction
            .execute("UPDATE batch SET ended = ?2, record = ?3 WHERE id = ?1", params![id, ended, record])?,
        BatchChange::Delete { owner, id } => {
            let delete = "DELETE FROM batch WHERE owner = ?1 AND id = ?2 AND ended = 1";
            return Ok(transaction.execute(delete, [owner, id])?);
        }
    };
    if changed == 0 { Err(ResponseStoreError::Deleted) } else { Ok(changed) }
}

const COLUMNS: &str = "id, owner, dialect, created, ended, input, output, errors, record";

fn batch_row(row: &Row<'_>) -> rusqlite::Result<BatchRow> {
    Ok(BatchRow {
        id: row.get(0)?,
        owner: row.get(1)?,
        dialect: row.get(2)?,
        created: row.get::<_, i64>(3)?.cast_unsigned(),
        ended: row.get(4)?,
        input: row.get(5)?,
        output: row.get(6)?,
        errors: row.get(7)?,
        record: row.get(8)?,
    })
}

/// A batch of this owner.
pub(super) fn batch(
    connection: &Connection,
    owner: &str,
    id: &str,
) -> Result<Option<BatchRow>, ResponseStoreError> {
    let select = format!("SELECT {COLUMNS} FROM batch WHERE owner = ?1 AND id = ?2");
    Ok(connection.query_row(&select, [owner, id], batch_row).optional()?)
}

/// A page of the batches of this owner, the newest first, and whether there are more of them.
pub(super) fn batches(
    connection: &Connection,
    owner: &str,
    query: &BatchQuery,
) -> Result<(Vec<BatchRow>, bool), ResponseStoreError> {
    let BatchQuery { dialect, after, before, limit } = query;
    let backwards = after.is_none() && before.is_some();
    let order = if backwards { "ASC" } else { "DESC" };
    let number_of =
        |parameter: &str| format!("(SELECT number FROM batch WHERE owner = ?1 AND id = {parameter})");
    let select = format!(
        "SELECT {COLUMNS} FROM batch WHERE owner = ?1 AND dialect = ?2
            AND (?3 IS NULL OR number < {}) AND (?4 IS NULL OR number > {}) ORDER BY number {order} LIMIT ?5",
        number_of("?3"),
        number_of("?4"),
    );
    let mut statement = connection.prepare(&select)?;
    let rows =
        statement.query_map(params![owner, dialect, after, before, (limit + 1).cast_signed()], batch_row)?;
    let mut rows: Vec<BatchRow> = rows.collect::<Result<_, _>>()?;
    let has_more = rows.len() > *limit;
    rows.truncate(*limit);
    if backwards {
        rows.reverse();
    }
    Ok((rows, has_more))
}

/// Every batch that has not ended, the oldest first.
pub(super) fn unfinished(connection: &Connection) -> Result<Vec<BatchRow>, ResponseStoreError> {
    let select = format!("SELECT {COLUMNS} FROM batch WHERE ended = 0 ORDER BY number");
    let mut statement = connection.prepare(&select)?;
    let rows = statement.query_map([], batch_row)?;
    Ok(rows.collect::<Result<_, _>>()?)
}
