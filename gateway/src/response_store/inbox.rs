//! Requests of the inbox in the store: each with its state, its body, and the answer as far as it is known. Not here: who runs
//! them, see `inbox`.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension as _, Row, Transaction, params};
use serde::Serialize;

use super::ResponseStoreError;
use crate::request_id::RequestId;

/// How long a request is kept for, if nothing serves it.
const WINDOW_SECONDS: u64 = 86_400;

/// Where a request of the inbox is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum InboxState {
    /// It waits for its turn.
    Pending,
    /// It runs, or ran when the gateway ended.
    Leased,
    /// It has its answer.
    Done,
    /// It has an error instead, and the same key may try again.
    Failed,
}

impl InboxState {
    const ALL: [Self; 4] = [Self::Pending, Self::Leased, Self::Done, Self::Failed];

    /// Its word in the store, and for clients.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Leased => "leased",
            Self::Done => "done",
            Self::Failed => "failed",
        }
    }

    pub(crate) fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == word)
    }

    /// Whether nothing of it runs any more.
    pub(crate) fn has_ended(self) -> bool {
        matches!(self, Self::Done | Self::Failed)
    }
}

/// A request, without its body and its answer. That of a response in the background has the response's id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InboxRow {
    pub(crate) id: String,
    /// Whose it is: nobody else finds it.
    pub(crate) owner: String,
    /// The idempotency key: an owner has one request with it.
    pub(crate) key: Option<String>,
    /// Of what is asked for, so that one key stands for one request.
    pub(crate) fingerprint: Vec<u8>,
    /// As its client sees it.
    pub(crate) request_id: String,
    pub(crate) path: String,
    /// Seconds since 1970, like every time here.
    pub(crate) created: u64,
    /// After this it does not begin any more.
    pub(crate) expires: u64,
    pub(crate) state: InboxState,
    /// How often it was leased.
    pub(crate) attempts: u32,
    /// Whether a client has had a part of an answer that has no end yet.
    pub(crate) delivered: bool,
    pub(crate) leased: Option<u64>,
    pub(crate) ended: Option<u64>,
    /// Status and headers of the answer, in JSON.
    pub(crate) head: Option<String>,
    /// The name under which its answer is also published to a broker.
    pub(crate) reply: Option<String>,
}

impl InboxRow {
    /// A request of this owner to this path.
    pub(crate) fn new(owner: &str, id: &RequestId, path: &str, now: u64) -> Self {
        Self {
            id: format!("inbox_{}", id.unique),
            owner: owner.to_owned(),
            key: None,
            fingerprint: Vec::new(),
            request_id: id.shown.to_string(),
            path: path.to_owned(),
            created: now,
            expires: now + WINDOW_SECONDS,
            state: InboxState::Pending,
            attempts: 0,
            delivered: false,
            leased: None,
            ended: None,
            head: None,
            reply: None,
        }
    }

    /// The same, to run again from the beginning.
    pub(crate) fn reopened(self, now: u64, expires: u64) -> Self {
        let (state, head) = (InboxState::Pending, None);
        let (attempts, delivered, leased, ended) = (0, false, None, None);
        // Later than before: what it does is told apart by this.
        let created = now.max(self.created + 1);
        Self { state, attempts, delivered, leased, ended, head, created, expires, ..self }
    }

    /// The same each time that it is sent until it ends, and another one when it is reopened.
    pub(crate) fn repeat(&self) -> String {
        format!("{}/{}", self.id, self.created)
    }

    /// The unique part of the id of the response in the background that it asks for; `None` for any other request.
    pub(crate) fn response(&self) -> Option<&str> {
        self.id.strip_prefix("resp_")
    }
}

/// What is sent to its route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InboxBody {
    /// Names and values, in JSON.
    pub(crate) headers: String,
    pub(crate) body: Bytes,
}

impl InboxBody {
    /// A body with its headers.
    pub(crate) fn new(headers: &HeaderMap, body: Bytes) -> Self {
        let text = |(name, value): (&HeaderName, &HeaderValue)| {
            Some((name.as_str().to_owned(), value.to_str().ok()?.to_owned()))
        };
        let headers: Vec<(String, String)> = headers.iter().filter_map(text).collect();
        // Pairs of texts: serialising them into memory cannot fail.
        Self { headers: serde_json::to_string(&headers).unwrap_or_default(), body }
    }

    /// How many bytes it takes.
    pub(super) fn bytes(&self) -> u64 {
        (self.headers.len() + self.body.len()) as u64
    }

    /// The headers.
    pub(crate) fn headers(&self) -> HeaderMap {
        let pairs: Vec<(String, String)> = serde_json::from_str(&self.headers).unwrap_or_default();
        let header = |(name, value): (String, String)| {
            Some((name.parse::<HeaderName>().ok()?, value.parse::<HeaderValue>().ok()?))
        };
        pairs.into_iter().filter_map(header).collect()
    }
}

/// Consecutive bytes of an answer, the first of which has the number `start`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AnswerPart {
    pub(crate) start: u64,
    pub(crate) bytes: Vec<u8>,
}

impl AnswerPart {
    /// The number of the byte behind it.
    pub(crate) fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    /// Its bytes from this number on.
    pub(crate) fn from(&self, start: u64) -> &[u8] {
        let skipped = usize::try_from(start.saturating_sub(self.start)).unwrap_or(usize::MAX);
        self.bytes.get(skipped..).unwrap_or_default()
    }
}

/// Which requests of an owner are listed, the newest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InboxQuery {
    pub(crate) state: Option<InboxState>,
    /// The last one of the page before.
    pub(crate) after: Option<String>,
    pub(crate) limit: usize,
}

/// A write to the inbox.
#[derive(Clone, Debug)]
pub(super) enum InboxChange {
    /// Changes nothing where its owner has a request with its key.
    Insert(Box<InboxRow>, InboxBody),
    /// It runs, and its answer begins anew.
    Lease {
        id: String,
        now: u64,
    },
    /// It waits again, as if it had not run.
    Release {
        id: String,
    },
    Append {
        id: String,
        part: AnswerPart,
    },
    /// A client is about to get a part of the answer.
    Deliver {
        id: String,
        created: Option<u64>,
    },
    /// With the rest of the answer.
    End {
        id: String,
        state: InboxState,
        now: u64,
        head: String,
        part: AnswerPart,
    },
    /// One that has failed is to run again.
    Reopen {
        id: String,
        now: u64,
        expires: u64,
    },
    /// Its answer is to be published under this name, or was.
    Reply {
        id: String,
        name: String,
        published: bool,
    },
    Delete {
        owner: String,
        id: String,
    },
}

impl InboxChange {
    /// Bytes that it adds.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Insert(row, body) => row.path.len() + body.bytes() as usize,
            Self::Append { part, .. } => part.bytes.len(),
            Self::End { head, part, .. } => head.len() + part.bytes.len(),
            Self::Lease { .. }
            | Self::Release { .. }
            | Self::Deliver { .. }
            | Self::Reopen { .. }
            | Self::Reply { .. }
            | Self::Delete { .. } => 0,
        }
    }
}

pub(super) const SCHEMA: &str = "
    CREATE TABLE inbox (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        key TEXT,
        fingerprint BLOB NOT NULL,
        request_id TEXT NOT NULL,
        path TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        created INTEGER NOT NULL,
        expires INTEGER NOT NULL,
        state TEXT NOT NULL,
        attempts INTEGER NOT NULL DEFAULT 0,
        delivered INTEGER NOT NULL DEFAULT 0,
        leased INTEGER,
        ended INTEGER,
        head TEXT,
        reply TEXT,
        published INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    CREATE UNIQUE INDEX inbox_key ON inbox (owner, key) WHERE key IS NOT NULL;
    CREATE INDEX inbox_created ON inbox (created);
    CREATE INDEX inbox_owner ON inbox (owner, number);
    CREATE INDEX inbox_unended ON inbox (owner, bytes) WHERE state IN ('pending', 'leased');
    CREATE TABLE inbox_body (
        request INTEGER PRIMARY KEY REFERENCES inbox (number) ON DELETE CASCADE,
        headers TEXT NOT NULL,
        body BLOB NOT NULL
    ) STRICT;
    CREATE TABLE inbox_answer (
        request INTEGER NOT NULL REFERENCES inbox (number) ON DELETE CASCADE,
        start INTEGER NOT NULL,
        bytes BLOB NOT NULL,
        PRIMARY KEY (request, start)
    ) STRICT;
";

/// What is deleted when it is old.
pub(super) const HAS_ENDED: &str = "state IN ('done', 'failed')";
/// What makes room for others: nobody waits for its answer.
pub(super) const IS_FREE: &str = "state IN ('done', 'failed') AND (reply IS NULL OR published = 1)";

/// Makes one change; the number of rows that it changed.
pub(super) fn apply(
    transaction: &Transaction<'_>,
    change: &InboxChange,
) -> Result<usize, ResponseStoreError> {
    let changed = match change {
        InboxChange::Insert(row, body) => return insert(transaction, row, body),
        InboxChange::Lease { id, now } => {
            transaction.execute(
                "DELETE FROM inbox_answer WHERE request = (SELECT number FROM inbox WHERE id = ?1)",
                [id],
            )?;
            transaction.execute(
                "UPDATE inbox SET state = 'leased', attempts = attempts + 1, leased = ?2
                    WHERE id = ?1 AND state IN ('pending', 'leased')",
                params![id, now.cast_signed()],
            )?
        }
        InboxChange::Release { id } => transaction.execute(
            "UPDATE inbox SET state = 'pending', attempts = max(attempts - 1, 0)
                WHERE id = ?1 AND state = 'leased'",
            [id],
        )?,
        InboxChange::Append { id, part } => append(transaction, id, part)?,
        InboxChange::Deliver { id, created } => transaction.execute(
            "UPDATE inbox SET delivered = 1 WHERE id = ?1 AND (?2 IS NULL OR created = ?2)",
            params![id, created.map(u64::cast_signed)],
        )?,
        InboxChange::End { id, state, now, head, part } => {
            append(transaction, id, part)?;
            transaction.execute(
                "UPDATE inbox SET state = ?2, ended = ?3, head = ?4 WHERE id = ?1",
                params![id, state.as_str(), now.cast_signed(), head],
            )?
        }
        InboxChange::Reopen { id, now, expires } => {
            return Ok(transaction.execute(
                "UPDATE inbox SET state = 'pending', attempts = 0, delivered = 0, leased = NULL, ended = NULL,
                    head = NULL, published = 0, created = max(?2, created + 1), expires = ?3 WHERE id = ?1 AND state = 'failed'",
                params![id, now.cast_signed(), expires.cast_signed()],
            )?);
        }
        InboxChange::Reply { id, name, published } => transaction.execute(
            "UPDATE inbox SET reply = ?2, published = ?3 WHERE id = ?1",
            params![id, name, published],
        )?,
        InboxChange::Delete { owner, id } => {
            let delete = "DELETE FROM inbox WHERE owner = ?1 AND id = ?2";
            return Ok(transaction.execute(delete, [owner, id])?);
        }
    };
    if changed == 0 { Err(ResponseStoreError::Deleted) } else { Ok(changed) }
}

/// Adds a request, unless its owner has one with its key; how many it added.
pub(super) fn insert(
    transaction: &Transaction<'_>,
    row: &InboxRow,
    kept: &InboxBody,
) -> Result<usize, ResponseStoreError> {
    let added = transaction.execute(
        "INSERT INTO inbox (id, owner, key, fingerprint, request_id, path, bytes, created, expires, state, delivered,
            reply)
            VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)
            ON CONFLICT (owner, key) WHERE key IS NOT NULL DO NOTHING",
        params![
            row.id,
            row.owner,
            row.key,
            row.fingerprint,
            row.request_id,
            row.path,
            kept.bytes().cast_signed(),
            row.created.cast_signed(),
            row.expires.cast_signed(),
            row.state.as_str(),
            row.delivered,
            row.reply,
        ],
    )?;
    if added > 0 {
        transaction.execute(
            "INSERT INTO inbox_body (request, headers, body) VALUES (last_insert_rowid(), ?1, ?2)",
            params![kept.headers, &kept.body[..]],
        )?;
    }
    Ok(added)
}

/// Whose request a change adds to those that have not ended, and how many bytes it has.
pub(super) fn added(
    transaction: &Transaction<'_>,
    change: &InboxChange,
) -> Result<Option<(String, u64)>, ResponseStoreError> {
    match change {
        InboxChange::Insert(row, body) => Ok(Some((row.owner.clone(), body.bytes()))),
        InboxChange::Reopen { id, .. } => {
            let select = "SELECT owner, bytes FROM inbox WHERE id = ?1";
            let row = transaction
                .query_row(select, [id], |row| Ok((row.get(0)?, row.get::<_, i64>(1)?.cast_unsigned())));
            Ok(row.optional()?)
        }
        _ => Ok(None),
    }
}

/// An error where requests that have not ended would take more than a half of the store with so many bytes more, or those of
/// this owner more than a quarter: what they answer needs room too, and so do others.
pub(super) fn check_room(
    transaction: &Transaction<'_>,
    owner: &str,
    bytes: u64,
    max: u64,
) -> Result<(), ResponseStoreError> {
    let (all, own) = transaction.query_row(
        "SELECT coalesce(sum(bytes), 0), coalesce(sum(bytes) FILTER (WHERE owner = ?1), 0) FROM inbox
            WHERE state IN ('pending', 'leased')",
        [owner],
        |sums| Ok((sums.get::<_, i64>(0)?.cast_unsigned(), sums.get::<_, i64>(1)?.cast_unsigned())),
    )?;
    let fits = all + bytes <= max / 2 && own + bytes <= max / 4;
    if fits { Ok(()) } else { Err(ResponseStoreError::InboxFull { bytes: own, max: max / 4 }) }
}

/// A response that runs in the background needs no request any more.
pub(super) fn forget(transaction: &Transaction<'_>, id: &str) -> Result<(), ResponseStoreError> {
    transaction.execute("DELETE FROM inbox WHERE id = ?1", [id])?;
    Ok(())
}

fn append(transaction: &Transaction<'_>, id: &str, part: &AnswerPart) -> Result<usize, ResponseStoreError> {
    Ok(transaction.execute(
        "INSERT INTO inbox_answer (request, start, bytes) SELECT number, ?2, ?3 FROM inbox WHERE id = ?1",
        params![id, part.start.cast_signed(), part.bytes],
    )?)
}

const COLUMNS: &str =
    "id, owner, key, fingerprint, request_id, path, created, expires, state, attempts, delivered,
    leased, ended, head, reply";

fn inbox_row(row: &Row<'_>) -> rusqlite::Result<InboxRow> {
    let time = |index: usize| row.get::<_, i64>(index).map(i64::cast_unsigned);
    let optional_time =
        |index: usize| row.get::<_, Option<i64>>(index).map(|time| time.map(i64::cast_unsigned));
    Ok(InboxRow {
        id: row.get(0)?,
        owner: row.get(1)?,
        key: row.get(2)?,
        fingerprint: row.get(3)?,
        request_id: row.get(4)?,
        path: row.get(5)?,
        created: time(6)?,
        expires: time(7)?,
        // A later release may have more: nothing of this one runs it.
        state: InboxState::parse(&row.get::<_, String>(8)?).unwrap_or(InboxState::Failed),
        attempts: row.get(9)?,
        delivered: row.get(10)?,
        leased: optional_time(11)?,
        ended: optional_time(12)?,
        head: row.get(13)?,
        reply: row.get(14)?,
    })
}

/// A request of this owner.
pub(super) fn request(
    connection: &Connection,
    owner: &str,
    id: &str,
) -> Result<Option<InboxRow>, ResponseStoreError> {
    let select = format!("SELECT {COLUMNS} FROM inbox WHERE owner = ?1 AND id = ?2");
    Ok(connection.query_row(&select, [owner, id], inbox_row).optional()?)
}

/// The request of this owner with this idempotency key.
pub(super) fn request_with_key(
    connection: &Connection,
    owner: &str,
    key: &str,
) -> Result<Option<InboxRow>, ResponseStoreError> {
    let select = format!("SELECT {COLUMNS} FROM inbox WHERE owner = ?1 AND key = ?2");
    Ok(connection.query_row(&select, [owner, key], inbox_row).optional()?)
}

/// A page of the requests of this owner without those of responses, the newest first, and one more where there are more.
pub(super) fn requests(
    connection: &Connection,
    owner: &str,
    query: &InboxQuery,
) -> Result<Vec<InboxRow>, ResponseStoreError> {
    let InboxQuery { state, after, limit } = query;
    let select = format!(
        "SELECT {COLUMNS} FROM inbox WHERE owner = ?1 AND id NOT LIKE 'resp%' AND (?2 IS NULL OR state = ?2)
            AND (?3 IS NULL OR number < (SELECT number FROM inbox WHERE owner = ?1 AND id = ?3))
            ORDER BY number DESC LIMIT ?4"
    );
    let mut statement = connection.prepare(&select)?;
    let state = state.map(InboxState::as_str);
    let rows = statement.query_map(params![owner, state, after, (limit + 1).cast_signed()], inbox_row)?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Every request that has not ended, the oldest first.
pub(super) fn unended(connection: &Connection) -> Result<Vec<InboxRow>, ResponseStoreError> {
    let select = format!("SELECT {COLUMNS} FROM inbox WHERE state IN ('pending', 'leased') ORDER BY number");
    let mut statement = connection.prepare(&select)?;
    let rows = statement.query_map([], inbox_row)?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Every request that has ended and whose answer is still to be published, the oldest first.
pub(super) fn unpublished(connection: &Connection) -> Result<Vec<InboxRow>, ResponseStoreError> {
    let select = format!(
        "SELECT {COLUMNS} FROM inbox WHERE {HAS_ENDED} AND reply IS NOT NULL AND published = 0 ORDER BY number"
    );
    let mut statement = connection.prepare(&select)?;
    let rows = statement.query_map([], inbox_row)?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// What is sent to the route of a request.
pub(super) fn body(connection: &Connection, id: &str) -> Result<Option<InboxBody>, ResponseStoreError> {
    let select =
        "SELECT headers, body FROM inbox_body WHERE request = (SELECT number FROM inbox WHERE id = ?1)";
    let row = connection.query_row(select, [id], |row| {
        Ok(InboxBody { headers: row.get(0)?, body: row.get::<_, Vec<u8>>(1)?.into() })
    });
    Ok(row.optional()?)
}

/// Bytes of the answer of a request that was created then; none where there is no such request.
pub(super) fn answer_bytes(
    connection: &Connection,
    id: &str,
    created: u64,
) -> Result<Option<u64>, ResponseStoreError> {
    let select = "SELECT (SELECT max(start + length(bytes)) FROM inbox_answer WHERE request = number)
        FROM inbox WHERE id = ?1 AND created = ?2";
    let bytes = connection.query_row(select, params![id, created.cast_signed()], |row| {
        Ok(row.get::<_, Option<i64>>(0)?.unwrap_or_default().cast_unsigned())
    });
    Ok(bytes.optional()?)
}

/// The first part of an answer that has the byte with this number or a later one.
pub(super) fn answer(
    connection: &Connection,
    id: &str,
    created: u64,
    from: u64,
) -> Result<Option<AnswerPart>, ResponseStoreError> {
    // One that is reopened is created anew, and its answer is another one.
    let select = "SELECT start, bytes FROM inbox_answer
        WHERE request = (SELECT number FROM inbox WHERE id = ?1 AND created = ?2) AND start + length(bytes) > ?3
        ORDER BY start LIMIT 1";
    let row = connection.query_row(select, params![id, created.cast_signed(), from.cast_signed()], |row| {
        Ok(AnswerPart { start: row.get::<_, i64>(0)?.cast_unsigned(), bytes: row.get(1)? })
    });
    Ok(row.optional()?)
}
