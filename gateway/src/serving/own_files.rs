//! The files that one caller keeps: written part by part as they arrive, and read part by part.

use std::sync::Arc;

use super::kept_responses::{KeptResponses, not_stored, unread};
use super::unix_seconds;
use crate::batches::{LineSplitter, MAX_LINE_BYTES};
use crate::body_budget::{BodyBudget, BodyPermit};
use crate::error::{ErrorKind, GatewayError, shown};
use crate::keys::Caller;
use crate::response_store::{FileHead, FilePart, FilePurpose, FileQuery, ResponseStore, ResponseStoreError};

/// Largest file: OpenAI's limit for the requests of a batch.
const MAX_FILE_BYTES: u64 = 200_000_000;
/// The part of a store that one file may take.
const MAX_STORE_SHARE: u64 = 4;
const MIB: u64 = 1 << 20;

/// The files of one caller.
#[derive(Clone)]
pub(crate) struct OwnFiles {
    kept: Arc<KeptResponses>,
    owner: String,
    caller: Caller,
    bodies: BodyBudget,
}

impl OwnFiles {
    /// Those of this caller; what is uploaded counts against the budget of bodies until it is on the disk.
    pub(super) fn new(kept: Arc<KeptResponses>, caller: &Caller, bodies: BodyBudget) -> Self {
        Self { kept, owner: caller.owner(), caller: caller.clone(), bodies }
    }

    /// Begins a file with this name.
    pub(crate) async fn upload(&self, id: String, name: String) -> Result<FileUpload, GatewayError> {
        let store = self.kept.store.clone();
        let created = unix_seconds();
        let head = FileHead {
            id,
            owner: self.owner.clone(),
            name,
            purpose: FilePurpose::Batch,
            created,
            expires: created + store.retention().as_secs(),
            bytes: 0,
        };
        store.insert_file(head.clone()).await.map_err(|error| not_stored("the file", &error))?;
        Ok(FileUpload {
            max_bytes: MAX_FILE_BYTES.min(store.max_bytes() / MAX_STORE_SHARE),
            store,
            splitter: LineSplitter::default(),
            permit: self.bodies.hold(&self.caller, 0)?,
            bodies: self.bodies.clone(),
            head,
            is_complete: false,
        })
    }

    /// A file.
    pub(crate) async fn get(&self, id: &str) -> Result<FileHead, GatewayError> {
        let (owner, file) = (self.owner.clone(), id.to_owned());
        let read = self.kept.store.read(move |store| store.file(&owner, &file, unix_seconds())).await;
        read.map_err(|error| unread(&error))?.ok_or_else(|| file_not_found(id))
    }

    /// A page of files, and whether there are more.
    pub(crate) async fn list(&self, query: FileQuery) -> Result<(Vec<FileHead>, bool), GatewayError> {
        if let Some(after) = &query.after {
            let missing = |_| GatewayError::field("after", "`after` must be the id of a file");
            self.get(after).await.map_err(missing)?;
        }
        let (owner, limit) = (self.owner.clone(), query.limit);
        let read = self.kept.store.read(move |store| store.files(&owner, &query)).await;
        let mut files = read.map_err(|error| unread(&error))?;
        let has_more = files.len() > limit;
        files.truncate(limit);
        Ok((files, has_more))
    }

    /// The first part of a file that begins with the line numbered `from`, or later.
    pub(crate) async fn part(&self, id: &str, from: u64) -> Result<Option<FilePart>, GatewayError> {
        let (owner, id) = (self.owner.clone(), id.to_owned());
        let read = self.kept.store.read(move |store| store.part(&owner, &id, from)).await;
        read.map_err(|error| unread(&error))
    }

    /// Deletes a file.
    pub(crate) async fn delete(&self, id: &str) -> Result<(), GatewayError> {
        self.get(id).await?;
        match self.kept.store.delete_file(&self.owner, id).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(file_not_found(id)),
            Err(ResponseStoreError::InUse { batch }) => {
                let message =
                    format!("file '{id}' is of batch '{batch}', which has not ended; cancel it first");
                Err(GatewayError::new(ErrorKind::InvalidRequest, message))
            }
            Err(error) => Err(not_stored("that the file is deleted", &error)),
        }
    }
}

/// The error for an id that the caller keeps no file with.
fn file_not_found(id: &str) -> GatewayError {
    GatewayError::new(ErrorKind::FileNotFound, format!("No such File object: {}", shown(id)))
}

/// A file that arrives. It is gone again where this is dropped before its end.
pub(crate) struct FileUpload {
    store: Arc<ResponseStore>,
    head: FileHead,
    splitter: LineSplitter,
    max_bytes: u64,
    bodies: BodyBudget,
    permit: BodyPermit,
    is_complete: bool,
}

impl FileUpload {
    /// Adds bytes.
    pub(crate) async fn write(&mut self, bytes: &[u8]) -> Result<(), GatewayError> {
        self.head.bytes += bytes.len() as u64;
        if self.head.bytes > self.max_bytes {
            let message = format!(
                "the file is larger than {} MiB; a file has at most {} MB and a quarter of `--responses-max-size`",
                self.max_bytes / MIB,
                MAX_FILE_BYTES / 1_000_000
            );
            return Err(GatewayError::new(ErrorKind::TooLarge, message));
        }
        let missing = (self.splitter.buffered() + bytes.len()).saturating_sub(self.permit.bytes());
        self.bodies.grow(&mut self.permit, missing)?;
        let part = self.splitter.push(bytes).map_err(|line| {
            let message =
                format!("line {} of the file is longer than {} MiB", line + 1, MAX_LINE_BYTES as u64 / MIB);
            GatewayError::field("file", message)
        })?;
        self.append(part).await
    }

    /// The file is complete; it expires after so many seconds, if that is earlier than all others do.
    pub(crate) async fn finish(mut self, expires_after: Option<u64>) -> Result<FileHead, GatewayError> {
        let part = std::mem::take(&mut self.splitter).finish();
        self.append(part).await?;
        let seconds = self.store.retention().as_secs().min(expires_after.unwrap_or(u64::MAX));
        self.head.created = unix_seconds();
        self.head.expires = self.head.created + seconds;
        let FileHead { id, created, expires, .. } = &self.head;
        let completed = self.store.complete_file(id, *created, *expires).await;
        completed.map_err(|error| not_stored("the file", &error))?;
        self.is_complete = true;
        Ok(self.head.clone())
    }

    async fn append(&self, part: Option<FilePart>) -> Result<(), GatewayError> {
        let Some(part) = part else { return Ok(()) };
        let appended = self.store.append_part(&self.head.id, part).await;
        appended.map_err(|error| not_stored("the file", &error))
    }
}

impl Drop for FileUpload {
    fn drop(&mut self) {
        if self.is_complete {
            return;
        }
        let (store, owner, id) = (self.store.clone(), self.head.owner.clone(), self.head.id.clone());
        // Where the gateway ends first, it is deleted when it starts again.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { store.delete_file(&owner, &id).await });
        }
    }
}
