//! Files in the store: a head, and parts of whole lines, so that a large file is never in memory as a whole. Not here: what
//! the lines say.

use rusqlite::{Connection, OptionalExtension as _, Row, Transaction, params};

use super::ResponseStoreError;

/// What a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FilePurpose {
    /// The requests of batches.
    Batch,
    /// What became of the requests of a batch.
    BatchOutput,
    /// Either of a batch of Anthropic's, which has no files: no list shows it, and it goes with its batch.
    MessageBatch,
}

impl FilePurpose {
    /// Its word in the store and in OpenAI's API.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Batch => "batch",
            Self::BatchOutput => "batch_output",
            Self::MessageBatch => "message_batch",
        }
    }

    fn parse(word: &str) -> Self {
        [Self::Batch, Self::BatchOutput]
            .into_iter()
            .find(|purpose| purpose.as_str() == word)
            .unwrap_or(Self::MessageBatch)
    }
}

/// A file: at first without its parts, and then, once it is complete, with as many bytes as they have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileHead {
    pub(crate) id: String,
    /// Whose it is: nobody else finds it.
    pub(crate) owner: String,
    pub(crate) name: String,
    pub(crate) purpose: FilePurpose,
    /// Seconds since 1970.
    pub(crate) created: u64,
    /// The same; it is deleted then.
    pub(crate) expires: u64,
    pub(crate) bytes: u64,
}

/// Consecutive whole lines of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FilePart {
    /// The number of the first one, from 0 on.
    pub(crate) first: u64,
    pub(crate) text: bytes::Bytes,
}

/// Which files of an owner are listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileQuery {
    pub(crate) purpose: Option<String>,
    pub(crate) newest_first: bool,
    /// The last one of the page before.
    pub(crate) after: Option<String>,
    pub(crate) limit: usize,
    /// Those that expired before, in seconds since 1970, are left out.
    pub(crate) now: u64,
}

/// A write to a file.
#[derive(Clone, Debug)]
pub(super) enum FileChange {
    Insert(FileHead),
    Append { id: String, part: FilePart },
    Complete { id: String, created: u64, expires: u64 },
    Delete { owner: String, id: String },
}

impl FileChange {
    /// Bytes that it adds.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Append { part, .. } => part.text.len(),
            Self::Insert(head) => head.name.len(),
            Self::Complete { .. } | Self::Delete { .. } => 0,
        }
    }
}

pub(super) const SCHEMA: &str = "
    CREATE TABLE file (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        name TEXT NOT NULL,
        purpose TEXT NOT NULL,
        created INTEGER NOT NULL,
        expires INTEGER NOT NULL,
        bytes INTEGER
    ) STRICT;
    CREATE INDEX file_created ON file (created);
    CREATE INDEX file_expires ON file (expires);
    CREATE TABLE file_part (
        file INTEGER NOT NULL REFERENCES file (number) ON DELETE CASCADE,
        first INTEGER NOT NULL,
        text BLOB NOT NULL,
        PRIMARY KEY (file, first)
    ) STRICT;
";

/// What makes room for others: a complete file that no batch needs any more. One of Anthropic's goes with its batch.
pub(super) const IS_FREE: &str = "bytes IS NOT NULL AND purpose <> 'message_batch' AND NOT EXISTS
    (SELECT 1 FROM batch WHERE ended = 0 AND file.id IN (input, output, errors))";

/// Makes one change; the number of rows that it changed.
pub(super) fn apply(transaction: &Transaction<'_>, change: &FileChange) -> Result<usize, ResponseStoreError> {
    let changed = match change {
        FileChange::Insert(FileHead { id, owner, name, purpose, created, expires, bytes: _ }) => transaction
            .execute(
                // That of a batch may be there from before a restart.
                "INSERT INTO file (id, owner, name, purpose, created, expires) VALUES (?1, ?2, ?3, ?4, ?5, ?6)
                    ON CONFLICT (id) DO UPDATE SET name = excluded.name",
                params![id, owner, name, purpose.as_str(), created.cast_signed(), expires.cast_signed()],
            )?,
        FileChange::Append { id, part: FilePart { first, text } } => transaction.execute(
            // A line that ran twice, around a restart, has one result.
            "INSERT OR REPLACE INTO file_part (file, first, text) SELECT number, ?2, ?3 FROM file WHERE id = ?1",
            params![id, first.cast_signed(), &text[..]],
        )?,
        FileChange::Complete { id, created, expires } => transaction.execute(
            "UPDATE file SET created = ?2, expires = ?3, bytes =
                (SELECT coalesce(sum(length(text)), 0) FROM file_part WHERE file_part.file = file.number)
                WHERE id = ?1",
            params![id, created.cast_signed(), expires.cast_signed()],
        )?,
        FileChange::Delete { owner, id } => {
            let using = "SELECT id FROM batch WHERE ended = 0 AND ?1 IN (input, output, errors)";
            if let Some(batch) = transaction.query_row(using, [id], |row| row.get(0)).optional()? {
                return Err(ResponseStoreError::InUse { batch });
            }
            return Ok(transaction.execute("DELETE FROM file WHERE owner = ?1 AND id = ?2", [owner, id])?);
        }
    };
    if changed == 0 { Err(ResponseStoreError::Deleted) } else { Ok(changed) }
}

/// Deletes what uploads and batches left unfinished when the gateway ended.
pub(super) fn delete_unfinished(connection: &Connection) -> Result<(), ResponseStoreError> {
    let delete = "DELETE FROM file WHERE bytes IS NULL AND NOT EXISTS
        (SELECT 1 FROM batch WHERE ended = 0 AND file.id IN (input, output, errors))";
    connection.execute(delete, [])?;
    Ok(())
}

const COLUMNS: &str = "id, owner, name, purpose, created, expires, bytes";

fn head(row: &Row<'_>) -> rusqlite::Result<FileHead> {
    Ok(FileHead {
        id: row.get(0)?,
        owner: row.get(1)?,
        name: row.get(2)?,
        purpose: FilePurpose::parse(&row.get::<_, String>(3)?),
        created: row.get::<_, i64>(4)?.cast_unsigned(),
        expires: row.get::<_, i64>(5)?.cast_unsigned(),
        bytes: row.get::<_, i64>(6)?.cast_unsigned(),
    })
}

/// A complete file of this owner that has not expired.
pub(super) fn file(
    connection: &Connection,
    owner: &str,
    id: &str,
    now: u64,
) -> Result<Option<FileHead>, ResponseStoreError> {
    let select = format!(
        "SELECT {COLUMNS} FROM file WHERE owner = ?1 AND id = ?2 AND bytes IS NOT NULL AND expires > ?3
            AND purpose <> 'message_batch'"
    );
    Ok(connection.query_row(&select, params![owner, id, now.cast_signed()], head).optional()?)
}

/// Bytes of a complete file of this owner, whatever it is for.
pub(super) fn file_bytes(
    connection: &Connection,
    owner: &str,
    id: &str,
) -> Result<Option<u64>, ResponseStoreError> {
    let select = "SELECT bytes FROM file WHERE owner = ?1 AND id = ?2 AND bytes IS NOT NULL";
    let bytes = connection.query_row(select, params![owner, id], |row| row.get::<_, i64>(0));
    Ok(bytes.optional()?.map(i64::cast_unsigned))
}

/// A page of the complete files of this owner, and one more where there are more.
pub(super) fn files(
    connection: &Connection,
    owner: &str,
    query: &FileQuery,
) -> Result<Vec<FileHead>, ResponseStoreError> {
    let FileQuery { purpose, newest_first, after, limit, now } = query;
    let (order, beyond, from) = if *newest_first { ("DESC", "<", i64::MAX) } else { ("ASC", ">", 0) };
    let select = format!(
        "SELECT {COLUMNS} FROM file WHERE owner = ?1 AND bytes IS NOT NULL AND expires > ?2
            AND purpose <> 'message_batch' AND (?3 IS NULL OR purpose = ?3)
            AND number {beyond} coalesce((SELECT number FROM file WHERE owner = ?1 AND id = ?4), ?5)
            ORDER BY number {order} LIMIT ?6"
    );
    let mut statement = connection.prepare(&select)?;
    let limit = (limit + 1).cast_signed();
    let rows = statement.query_map(params![owner, now.cast_signed(), purpose, after, from, limit], head)?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// The first part of a file of this owner that begins with the line numbered `from`, or later.
pub(super) fn part(
    connection: &Connection,
    owner: &str,
    id: &str,
    from: u64,
) -> Result<Option<FilePart>, ResponseStoreError> {
    let select = "SELECT first, text FROM file_part
        WHERE file = (SELECT number FROM file WHERE owner = ?1 AND id = ?2) AND first >= ?3 ORDER BY first LIMIT 1";
    let row = connection.query_row(select, params![owner, id, from.cast_signed()], |row| {
        Ok(FilePart { first: row.get::<_, i64>(0)?.cast_unsigned(), text: row.get::<_, Vec<u8>>(1)?.into() })
    });
    Ok(row.optional()?)
}

/// The first line of every part of a file of this owner.
pub(super) fn part_numbers(
    connection: &Connection,
    owner: &str,
    id: &str,
) -> Result<Vec<u64>, ResponseStoreError> {
    let select = "SELECT first FROM file_part
        WHERE file = (SELECT number FROM file WHERE owner = ?1 AND id = ?2) ORDER BY first";
    let mut statement = connection.prepare(select)?;
    let rows = statement.query_map([owner, id], |row| Ok(row.get::<_, i64>(0)?.cast_unsigned()))?;
    Ok(rows.collect::<Result<_, _>>()?)
}
