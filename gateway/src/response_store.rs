//! Responses, files, batches, requests of the inbox and runs of Pipelines that are kept on disk, in SQLite: rows, bytes, and
//! whose they are. A write returns once it is durable; several become durable together. Not here: what the bytes mean, which
//! is the dialect's, responses that still run, see `background`, and batches and runs that do, see `batches` and `pipelines`.

mod batches;
mod commit;
mod database;
mod files;
mod inbox;
mod runs;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use rusqlite::Connection;
use thiserror::Error;

use batches::BatchChange;
pub(crate) use batches::{BatchQuery, BatchRow};
use commit::CommitQueue;
use database::Database;
use files::FileChange;
pub(crate) use files::{FileHead, FilePart, FilePurpose, FileQuery};
use inbox::InboxChange;
pub(crate) use inbox::{AnswerPart, InboxBody, InboxQuery, InboxRow, InboxState};
use runs::RunChange;
pub(crate) use runs::{Artifact, RunRow};

/// Where responses, files and batches are kept, and for how long.
#[derive(Clone, Debug)]
pub struct ResponseStoreConfig {
    /// The file; SQLite puts its log beside it.
    pub path: PathBuf,
    /// What is older is deleted.
    pub retention: Duration,
    /// The oldest is deleted where the file would use more.
    pub max_bytes: u64,
}

impl ResponseStoreConfig {
    /// OpenAI's thirty days, and a gibibyte: some 100,000 responses of agents.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), retention: Duration::from_secs(30 * 86_400), max_bytes: 1 << 30 }
    }
}

/// Why the store cannot do what it was called for.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ResponseStoreError {
    /// The file cannot be created or renamed.
    #[error("cannot open {path}: {cause}")]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        cause: String,
    },
    /// It was written by a later release.
    #[error(
        "{path} has version {found}, and this release reads up to {known}; run the release that wrote it, or name another file"
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: i64,
        /// The last one that is known.
        known: i64,
    },
    /// It is a database, and no store of responses.
    #[error("{path} is the database of another program; name another file")]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// The bytes on disk are not what SQLite wrote.
    #[error("the file is damaged: {0}")]
    Damaged(String),
    /// The disk has no room.
    #[error("the disk is full")]
    DiskFull,
    /// Nothing is left to be deleted for it.
    #[error("{bytes} bytes have no room in the store, which holds {max}")]
    TooLarge {
        /// Of the write.
        bytes: u64,
        /// Of the store.
        max: u64,
    },
    /// Requests that have not ended take as much as they may.
    #[error("{bytes} bytes of requests that have not ended are kept, and at most {max} may be")]
    InboxFull {
        /// Of the owner's requests.
        bytes: u64,
        /// An owner's share.
        max: u64,
    },
    /// Runs that have not ended take as much as they may.
    #[error(
        "runs that have not ended take as much of the store as they may, which is {max} bytes for one key; end some"
    )]
    RunsFull {
        /// An owner's share.
        max: u64,
    },
    /// What a write is about was deleted.
    #[error("it was deleted")]
    Deleted,
    /// A batch that has not ended needs the file.
    #[error("batch {batch} needs the file")]
    InUse {
        /// Its id.
        batch: String,
    },
    /// Anything else, in SQLite's words.
    #[error("{0}")]
    Failed(String),
}

/// A response to keep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NewRow {
    pub(crate) id: String,
    /// Whose it is: nobody else finds it.
    pub(crate) owner: String,
    /// Seconds since 1970.
    pub(crate) created: u64,
    /// The response that it continues.
    pub(crate) parent: Option<String>,
    /// Whether it ended. If not, [`ResponseStore::finish`] says so.
    pub(crate) finished: bool,
    pub(crate) body: Bytes,
    /// The input that came with it, without that of its parents.
    pub(crate) input: Bytes,
    /// The request that is sent again where the gateway ends before the response does.
    pub(crate) replay: Option<Box<(InboxRow, InboxBody)>>,
}

/// A kept response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredBody {
    pub(crate) finished: bool,
    pub(crate) body: Vec<u8>,
}

/// A response of a conversation, with its own input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredTurn {
    pub(crate) id: String,
    pub(crate) finished: bool,
    pub(crate) body: Vec<u8>,
    pub(crate) input: Vec<u8>,
}

/// Limits of a conversation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConversationLimits {
    pub(crate) turns: usize,
    pub(crate) bytes: usize,
}

/// Why a conversation cannot be read.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(crate) enum ConversationError {
    /// The owner has no response with this id, or no more.
    #[error("response {0} is missing")]
    Missing(String),
    /// It has more responses than the limit.
    #[error("it has more than {0} responses")]
    TooManyTurns(usize),
    /// It has more bytes than the limit.
    #[error("it has more than {0} bytes")]
    TooManyBytes(usize),
    /// The caller of the store does not admit so many bytes.
    #[error("there is no memory for it")]
    NotAdmitted,
    /// The store failed.
    #[error(transparent)]
    Store(#[from] ResponseStoreError),
}

/// Consecutive events of a response, numbered from `first` to before `next`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EventChunk {
    pub(crate) first: u64,
    pub(crate) next: u64,
    pub(crate) text: Vec<u8>,
}

/// A write.
#[derive(Clone, Debug)]
enum Change {
    Insert(NewRow),
    Finish { id: String, body: Bytes },
    AppendEvents { id: String, chunk: EventChunk },
    Delete { owner: String, id: String },
    File(FileChange),
    Batch(BatchChange),
    Inbox(InboxChange),
    Run(RunChange),
}

impl Change {
    /// Bytes that it adds.
    fn bytes(&self) -> usize {
        match self {
            Self::Insert(row) => {
                let replayed = row.replay.as_ref().map_or(0, |replay| replay.1.body.len());
                row.body.len() + row.input.len() + replayed
            }
            Self::Finish { body, .. } => body.len(),
            Self::AppendEvents { chunk, .. } => chunk.text.len(),
            Self::Delete { .. } => 0,
            Self::File(change) => change.bytes(),
            Self::Batch(change) => change.bytes(),
            Self::Inbox(change) => change.bytes(),
            Self::Run(change) => change.bytes(),
        }
    }
}

impl Change {
    /// Whether it ends, or goes on with, what was accepted.
    fn is_end(&self) -> bool {
        match self {
            Self::Inbox(change) => matches!(change, InboxChange::Append { .. } | InboxChange::End { .. }),
            Self::Run(change) => change.is_end(),
            _ => false,
        }
    }
}

/// Connections that read, so that a large response holds up no others.
const READERS: usize = 4;

/// The store. Writes are asynchronous; reads block, and [`ResponseStore::read`] moves them to a thread that may.
pub(crate) struct ResponseStore {
    queue: CommitQueue,
    readers: [Mutex<Connection>; READERS],
    next_reader: AtomicUsize,
    retention: Duration,
    max_bytes: u64,
}

impl ResponseStore {
    /// Opens the store, or begins it; a damaged file is put aside.
    pub(crate) fn open(config: &ResponseStoreConfig) -> Result<Self, ResponseStoreError> {
        let ResponseStoreConfig { path, retention, max_bytes } = config;
        let database = Database::open(path, *max_bytes)?;
        let reader = || database::open_reader(path).map(Mutex::new);
        let readers = [reader()?, reader()?, reader()?, reader()?];
        let queue = CommitQueue::start(database, *retention)
            .map_err(|error| ResponseStoreError::Open { path: path.clone(), cause: error.to_string() })?;
        let (retention, max_bytes) = (*retention, *max_bytes);
        Ok(Self { queue, readers, next_reader: AtomicUsize::new(0), retention, max_bytes })
    }

    /// Keeps a response.
    pub(crate) async fn insert(&self, row: NewRow) -> Result<(), ResponseStoreError> {
        self.queue.commit(Change::Insert(row)).await.map(|_| ())
    }

    /// A response that was kept before it ended has ended, with this body.
    pub(crate) async fn finish(&self, id: &str, body: Bytes) -> Result<(), ResponseStoreError> {
        self.queue.commit(Change::Finish { id: id.to_owned(), body }).await.map(|_| ())
    }

    /// Adds events to a response.
    pub(crate) async fn append_events(&self, id: &str, chunk: EventChunk) -> Result<(), ResponseStoreError> {
        self.queue.commit(Change::AppendEvents { id: id.to_owned(), chunk }).await.map(|_| ())
    }

    /// Deletes a response and its events; false where the owner has none with this id.
    pub(crate) async fn delete(&self, owner: &str, id: &str) -> Result<bool, ResponseStoreError> {
        let change = Change::Delete { owner: owner.to_owned(), id: id.to_owned() };
        Ok(self.queue.commit(change).await? > 0)
    }

    /// Reads on a thread that may block.
    pub(crate) async fn read<T: Send + 'static>(
        self: &Arc<Self>,
        read: impl FnOnce(&Self) -> Result<T, ResponseStoreError> + Send + 'static,
    ) -> Result<T, ResponseStoreError> {
        let store = self.clone();
        let ended = |_| ResponseStoreError::Failed("the read ended early; see the gateway's log".to_owned());
        tokio::task::spawn_blocking(move || read(&store)).await.map_err(ended)?
    }

    /// A response of this owner.
    pub(crate) fn body(&self, owner: &str, id: &str) -> Result<Option<StoredBody>, ResponseStoreError> {
        database::body(&self.reader().lock(), owner, id)
    }

    /// The input of a response of this owner.
    pub(crate) fn input(&self, owner: &str, id: &str) -> Result<Option<Vec<u8>>, ResponseStoreError> {
        database::input(&self.reader().lock(), owner, id)
    }

    /// A response of this owner and those that it continues, the first one first. `admit` says whether there is memory for
    /// the bytes of the next one, before they are read.
    pub(crate) fn conversation(
        &self,
        owner: &str,
        id: &str,
        limits: ConversationLimits,
        admit: impl FnMut(usize) -> bool,
    ) -> Result<Vec<StoredTurn>, ConversationError> {
        database::conversation(&self.reader().lock(), owner, id, limits, admit)
    }

    /// The first chunk of a response that has events numbered `from` or later.
    pub(crate) fn events(
        &self,
        owner: &str,
        id: &str,
        from: u64,
    ) -> Result<Option<EventChunk>, ResponseStoreError> {
        database::events(&self.reader().lock(), owner, id, from)
    }

    /// How long it keeps what it is given.
    pub(crate) fn retention(&self) -> Duration {
        self.retention
    }

    /// How many bytes it holds.
    pub(crate) fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    /// A run begins, in place of what is kept with its id.
    pub(crate) async fn insert_run(
        &self,
        row: RunRow,
        artifacts: Vec<Artifact>,
    ) -> Result<(), ResponseStoreError> {
        self.queue.commit(Change::Run(RunChange::Insert { row, artifacts })).await.map(|_| ())
    }

    /// A run is so far, with what is new of it.
    pub(crate) async fn save_run(
        &self,
        row: RunRow,
        artifacts: Vec<Artifact>,
    ) -> Result<(), ResponseStoreError> {
        self.queue.commit(Change::Run(RunChange::Save { row, artifacts })).await.map(|_| ())
    }

    /// Deletes a run and what it made.
    pub(crate) async fn delete_run(&self, id: &str) -> Result<(), ResponseStoreError> {
        self.queue.commit(Change::Run(RunChange::Delete { id: id.to_owned() })).await.map(|_| ())
    }

    /// The name of the gateway whose store this is.
    pub(crate) fn gateway_name(&self) -> Result<String, ResponseStoreError> {
        runs::gateway_name(&self.reader().lock())
    }

    /// The record of a run.
    pub(crate) fn run_record(&self, id: &str) -> Result<Option<Vec<u8>>, ResponseStoreError> {
        runs::record(&self.reader().lock(), id)
    }

    /// The ids of all runs.
    pub(crate) fn run_ids(&self) -> Result<Vec<String>, ResponseStoreError> {
        runs::ids(&self.reader().lock())
    }

    /// What a step of this run made.
    pub(crate) fn run_artifact(&self, id: &str, digest: &str) -> Result<Option<Vec<u8>>, ResponseStoreError> {
        runs::artifact(&self.reader().lock(), id, digest)
    }

    /// How many bytes a step of any run of this owner made.
    pub(crate) fn artifact_bytes(
        &self,
        owner: &str,
        digest: &str,
    ) -> Result<Option<usize>, ResponseStoreError> {
        runs::artifact_bytes(&self.reader().lock(), owner, digest)
    }

    /// What a step of any run of this owner made.
    pub(crate) fn artifact(&self, owner: &str, digest: &str) -> Result<Option<Vec<u8>>, ResponseStoreError> {
        runs::artifact_of(&self.reader().lock(), owner, digest)
    }

    /// Begins a file.
    pub(crate) async fn insert_file(&self, head: FileHead) -> Result<(), ResponseStoreError> {
        self.queue.commit(Change::File(FileChange::Insert(head))).await.map(|_| ())
    }

    /// Adds lines to a file, in place of those with the same number.
    pub(crate) async fn append_part(&self, id: &str, part: FilePart) -> Result<(), ResponseStoreError> {
        self.queue.commit(Change::File(FileChange::Append { id: id.to_owned(), part })).await.map(|_| ())
    }

    /// A file has all its parts; its times are in seconds since 1970.
    pub(crate) async fn complete_file(
        &self,
        id: &str,
        created: u64,
        expires: u64,
    ) -> Result<(), ResponseStoreError> {
        let change = FileChange::Complete { id: id.to_owned(), created, expires };
        self.queue.commit(Change::File(change)).await.map(|_| ())
    }

    /// Deletes a file that no running batch needs; false where the owner has none with this id.
    pub(crate) async fn delete_file(&self, owner: &str, id: &str) -> Result<bool, ResponseStoreError> {
        let change = FileChange::Delete { owner: owner.to_owned(), id: id.to_owned() };
        Ok(self.queue.commit(Change::File(change)).await? > 0)
    }

    /// A complete file of this owner that has not expired `now`, in seconds since 1970.
    pub(crate) fn file(
        &self,
        owner: &str,
        id: &str,
        now: u64,
    ) -> Result<Option<FileHead>, ResponseStoreError> {
        files::file(&self.reader().lock(), owner, id, now)
    }

    /// Bytes of a complete file, whatever it is for.
    pub(crate) fn file_bytes(&self, owner: &str, id: &str) -> Result<Option<u64>, ResponseStoreError> {
        files::file_bytes(&self.reader().lock(), owner, id)
    }

    /// A page of the complete files of this owner, and one more where there are more.
    pub(crate) fn files(&self, owner: &str, query: &FileQuery) -> Result<Vec<FileHead>, ResponseStoreError> {
        files::files(&self.reader().lock(), owner, query)
    }

    /// The first part of a file of this owner that begins with the line numbered `from`, or later.
    pub(crate) fn part(
        &self,
        owner: &str,
        id: &str,
        from: u64,
    ) -> Result<Option<FilePart>, ResponseStoreError> {
        files::part(&self.reader().lock(), owner, id, from)
    }

    /// The first line of every part of a file of this owner.
    pub(crate) fn part_numbers(&self, owner: &str, id: &str) -> Result<Vec<u64>, ResponseStoreError> {
        files::part_numbers(&self.reader().lock(), owner, id)
    }

    /// Keeps a batch, whose input must be there.
    pub(crate) async fn insert_batch(&self, row: BatchRow) -> Result<(), ResponseStoreError> {
        self.queue.commit(Change::Batch(BatchChange::Insert(row))).await.map(|_| ())
    }

    /// A batch has another record, and has ended or not.
    pub(crate) async fn update_batch(
        &self,
        id: &str,
        ended: bool,
        record: Vec<u8>,
    ) -> Result<(), ResponseStoreError> {
        let change = BatchChange::Update { id: id.to_owned(), ended, record };
        self.queue.commit(Change::Batch(change)).await.map(|_| ())
    }

    /// Deletes a batch that has ended; false where the owner has none with this id.
    pub(crate) async fn delete_batch(&self, owner: &str, id: &str) -> Result<bool, ResponseStoreError> {
        let change = BatchChange::Delete { owner: owner.to_owned(), id: id.to_owned() };
        Ok(self.queue.commit(Change::Batch(change)).await? > 0)
    }

    /// A batch of this owner.
    pub(crate) fn batch(&self, owner: &str, id: &str) -> Result<Option<BatchRow>, ResponseStoreError> {
        batches::batch(&self.reader().lock(), owner, id)
    }

    /// A page of the batches of this owner, the newest first, and whether there are more of them.
    pub(crate) fn batches(
        &self,
        owner: &str,
        query: &BatchQuery,
    ) -> Result<(Vec<BatchRow>, bool), ResponseStoreError> {
        batches::batches(&self.reader().lock(), owner, query)
    }

    /// Every batch that has not ended, the oldest first.
    pub(crate) fn unfinished_batches(&self) -> Result<Vec<BatchRow>, ResponseStoreError> {
        batches::unfinished(&self.reader().lock())
    }

    /// Keeps a request of the inbox; false where its owner has one with its key.
    pub(crate) async fn insert_request(
        &self,
        row: InboxRow,
        body: InboxBody,
    ) -> Result<bool, ResponseStoreError> {
        Ok(self.queue.commit(Change::Inbox(InboxChange::Insert(row.into(), body))).await? > 0)
    }

    /// A request runs, and its answer begins anew.
    pub(crate) async fn lease_request(&self, id: &str, now: u64) -> Result<(), ResponseStoreError> {
        self.change_request(InboxChange::Lease { id: id.to_owned(), now }).await.map(|_| ())
    }

    /// A request waits again, as if it had not run.
    pub(crate) async fn release_request(&self, id: &str) -> Result<(), ResponseStoreError> {
        self.change_request(InboxChange::Release { id: id.to_owned() }).await.map(|_| ())
    }

    /// Adds bytes to the answer of a request.
    pub(crate) async fn append_answer(&self, id: &str, part: AnswerPart) -> Result<(), ResponseStoreError> {
        self.change_request(InboxChange::Append { id: id.to_owned(), part }).await.map(|_| ())
    }

    /// A client is about to get a part of an answer that has no end yet; of a request that was created then, where that is said.
    pub(crate) async fn deliver_answer(
        &self,
        id: &str,
        created: Option<u64>,
    ) -> Result<(), ResponseStoreError> {
        self.change_request(InboxChange::Deliver { id: id.to_owned(), created }).await.map(|_| ())
    }

    /// A request has ended, with this head and the rest of its answer.
    pub(crate) async fn end_request(
        &self,
        id: &str,
        state: InboxState,
        now: u64,
        head: String,
        part: AnswerPart,
    ) -> Result<(), ResponseStoreError> {
        let change = InboxChange::End { id: id.to_owned(), state, now, head, part };
        self.change_request(change).await.map(|_| ())
    }

    /// A request that has failed is to run again; false where it has not failed.
    pub(crate) async fn reopen_request(
        &self,
        id: &str,
        now: u64,
        expires: u64,
    ) -> Result<bool, ResponseStoreError> {
        Ok(self.change_request(InboxChange::Reopen { id: id.to_owned(), now, expires }).await? > 0)
    }

    /// Deletes a request and its answer; false where the owner has none with this id.
    pub(crate) async fn delete_request(&self, owner: &str, id: &str) -> Result<bool, ResponseStoreError> {
        let change = InboxChange::Delete { owner: owner.to_owned(), id: id.to_owned() };
        Ok(self.change_request(change).await? > 0)
    }

    /// The answer of a request is to be published under this name, or was.
    pub(crate) async fn reply_to_request(
        &self,
        id: &str,
        name: &str,
        published: bool,
    ) -> Result<(), ResponseStoreError> {
        let change = InboxChange::Reply { id: id.to_owned(), name: name.to_owned(), published };
        self.change_request(change).await.map(|_| ())
    }

    /// Every request that has ended and whose answer is still to be published, the oldest first.
    pub(crate) fn unpublished_requests(&self) -> Result<Vec<InboxRow>, ResponseStoreError> {
        inbox::unpublished(&self.reader().lock())
    }

    async fn change_request(&self, change: InboxChange) -> Result<usize, ResponseStoreError> {
        self.queue.commit(Change::Inbox(change)).await
    }

    /// A request of this owner.
    pub(crate) fn request(&self, owner: &str, id: &str) -> Result<Option<InboxRow>, ResponseStoreError> {
        inbox::request(&self.reader().lock(), owner, id)
    }

    /// The request of this owner with this idempotency key.
    pub(crate) fn request_with_key(
        &self,
        owner: &str,
        key: &str,
    ) -> Result<Option<InboxRow>, ResponseStoreError> {
        inbox::request_with_key(&self.reader().lock(), owner, key)
    }

    /// A page of the requests of this owner, the newest first, and one more where there are more.
    pub(crate) fn requests(
        &self,
        owner: &str,
        query: &InboxQuery,
    ) -> Result<Vec<InboxRow>, ResponseStoreError> {
        inbox::requests(&self.reader().lock(), owner, query)
    }

    /// Every request that has not ended, the oldest first.
    pub(crate) fn unended_requests(&self) -> Result<Vec<InboxRow>, ResponseStoreError> {
        inbox::unended(&self.reader().lock())
    }

    /// What is sent to the route of a request.
    pub(crate) fn request_body(&self, id: &str) -> Result<Option<InboxBody>, ResponseStoreError> {
        inbox::body(&self.reader().lock(), id)
    }

    /// Bytes of the answer of a request that was created then, or reopened; none where it was deleted or reopened since.
    pub(crate) fn answer_bytes(&self, id: &str, created: u64) -> Result<Option<u64>, ResponseStoreError> {
        inbox::answer_bytes(&self.reader().lock(), id, created)
    }

    /// The first part of the answer of a request that was created then, or reopened, that has the byte with this number or a later
    /// one.
    pub(crate) fn answer(
        &self,
        id: &str,
        created: u64,
        from: u64,
    ) -> Result<Option<AnswerPart>, ResponseStoreError> {
        inbox::answer(&self.reader().lock(), id, created, from)
    }

    fn reader(&self) -> &Mutex<Connection> {
        &self.readers[self.next_reader.fetch_add(1, Ordering::Relaxed) % READERS]
    }
}

#[cfg(test)]
mod tests;
