//! The batches of one caller: begun, read, listed, cancelled and deleted. Not here: how they run, see `batches`.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::dialect::Dialect;
use super::kept_responses::{KeptResponses, not_stored, unread};
use super::unix_seconds;
use crate::batches::{Batch, BatchRecord, BatchStatus, BeginError};
use crate::error::{ErrorKind, GatewayError, RETRY_AFTER, shown};
use crate::keys::Caller;
use crate::response_store::{BatchQuery, BatchRow, FileHead, FilePart, FilePurpose, ResponseStoreError};

/// How long a batch has: OpenAI's only window, and Anthropic's.
const WINDOW_SECONDS: u64 = 86_400;

/// The batches of one caller.
#[derive(Clone)]
pub(crate) struct OwnBatches {
    kept: Arc<KeptResponses>,
    owner: String,
}

/// A batch that is asked for.
pub(crate) struct NewBatch {
    pub(crate) id: String,
    /// The path of its requests.
    pub(crate) endpoint: String,
    /// The id of the file that has them.
    pub(crate) input: String,
    /// The ids of the files that it writes.
    pub(crate) output: String,
    pub(crate) errors: String,
    pub(crate) metadata: Option<Map<String, Value>>,
    /// How long these are kept, where the client says it.
    pub(crate) output_seconds: Option<u64>,
    /// The header `x-russet-labels`.
    pub(crate) labels: String,
}

/// Batches of a list, the newest first.
pub(crate) struct BatchPage {
    pub(crate) batches: Vec<Batch>,
    pub(crate) has_more: bool,
}

impl OwnBatches {
    /// Those of this caller.
    pub(super) fn new(kept: Arc<KeptResponses>, caller: &Caller) -> Self {
        Self { kept, owner: caller.owner() }
    }

    /// Begins a batch of a file that is there; its lines are not checked yet.
    pub(crate) async fn begin(&self, dialect: &Dialect, new: NewBatch) -> Result<Batch, GatewayError> {
        let batch = self.batch(dialect, new);
        self.keep(batch).await
    }

    /// Begins a batch of these lines, which were checked.
    pub(crate) async fn begin_checked(
        &self,
        dialect: &Dialect,
        new: NewBatch,
        lines: Vec<FilePart>,
        total: u64,
    ) -> Result<Batch, GatewayError> {
        let mut batch = self.batch(dialect, new);
        let record = &mut batch.record;
        (record.status, record.total) = (BatchStatus::InProgress, total);
        record.in_progress_at = Some(record.created_at);
        let input =
            FileHead { id: batch.input.clone(), ..batch.result_files(FilePurpose::MessageBatch)[0].clone() };
        let written = async {
            for head in batch.result_files(FilePurpose::MessageBatch).into_iter().chain([input]) {
                self.kept.store.insert_file(head).await?;
            }
            for part in lines {
                self.kept.store.append_part(&batch.input, part).await?;
            }
            Ok(())
        };
        let (input, output, errors) = (batch.input.clone(), batch.output.clone(), batch.errors.clone());
        let begun = match written.await {
            Ok(()) => self.keep(batch).await,
            Err(error) => Err(not_stored("the batch", &error)),
        };
        if begun.is_err() {
            for file in [input, output, errors] {
                // What is left of them is deleted when the gateway starts again.
                let _ = self.kept.store.delete_file(&self.owner, &file).await;
            }
        }
        begun
    }

    fn batch(&self, dialect: &Dialect, new: NewBatch) -> Batch {
        let NewBatch { id, endpoint, input, output, errors, metadata, output_seconds, labels } = new;
        let created_at = unix_seconds();
        let record = BatchRecord {
            endpoint,
            created_at,
            expires_at: created_at + WINDOW_SECONDS,
            metadata,
            output_seconds,
            labels,
            ..BatchRecord::default()
        };
        let (owner, dialect) = (self.owner.clone(), dialect.name.to_owned());
        Batch { id, owner, dialect, input, output, errors, record }
    }

    async fn keep(&self, batch: Batch) -> Result<Batch, GatewayError> {
        let begun = self.kept.batches.begin(batch.clone()).await;
        begun.map(|()| batch).map_err(|error| match error {
            BeginError::TooMany(owned) => {
                let message = format!(
                    "{owned} batches of this caller have not ended, which is as many as this gateway takes; wait until one has ended, or cancel one"
                );
                GatewayError::new(ErrorKind::Overloaded, message).retry_after(RETRY_AFTER)
            }
            BeginError::Store(error) => not_stored("the batch", &error),
        })
    }

    /// A batch.
    pub(crate) async fn get(&self, dialect: &Dialect, id: &str) -> Result<Batch, GatewayError> {
        // First what runs: what is kept of a batch that has ended says so before it runs no more.
        let batch = match self.kept.batches.get(&self.owner, id) {
            Some(running) => Some(running.batch()),
            None => {
                let (owner, id) = (self.owner.clone(), id.to_owned());
                let read = self.kept.store.read(move |store| store.batch(&owner, &id)).await;
                read.map_err(|error| unread(&error))?.map(of_row).transpose()?
            }
        };
        batch.filter(|batch| batch.dialect == dialect.name).ok_or_else(|| batch_not_found(id))
    }

    /// A page of batches.
    pub(crate) async fn list(&self, dialect: &Dialect, query: BatchQuery) -> Result<BatchPage, GatewayError> {
        for id in [&query.after, &query.before].into_iter().flatten() {
            self.get(dialect, id).await?;
        }
        let owner = self.owner.clone();
        let read = self.kept.store.read(move |store| store.batches(&owner, &query)).await;
        let (rows, has_more) = read.map_err(|error| unread(&error))?;
        let current = |row: BatchRow| match self.kept.batches.get(&self.owner, &row.id) {
            Some(running) => Ok(running.batch()),
            None => of_row(row),
        };
        Ok(BatchPage { batches: rows.into_iter().map(current).collect::<Result<_, _>>()?, has_more })
    }

    /// Ends a batch early; as it is then.
    pub(crate) async fn cancel(&self, dialect: &Dialect, id: &str) -> Result<Batch, GatewayError> {
        let batch = self.get(dialect, id).await?;
        if batch.record.status.has_ended() {
            let message = format!("batch '{}' has ended and cannot be cancelled", batch.id);
            return Err(GatewayError::new(ErrorKind::InvalidRequest, message));
        }
        let cancelled = match self.kept.batches.get(&self.owner, id) {
            Some(running) => running.cancel().await,
            // It has ended meanwhile.
            None => Some(self.get(dialect, id).await?),
        };
        cancelled.ok_or_else(|| {
            let message = format!("the gateway cannot cancel batch '{}' now; its log says why", batch.id);
            GatewayError::new(ErrorKind::ShuttingDown, message).retry_after(RETRY_AFTER)
        })
    }

    /// Deletes a batch that has ended.
    pub(crate) async fn delete(&self, dialect: &Dialect, id: &str) -> Result<(), GatewayError> {
        let batch = self.get(dialect, id).await?;
        let deleted = self.kept.store.delete_batch(&self.owner, id).await;
        if deleted.map_err(|error| not_stored("that the batch is deleted", &error))? {
            return Ok(());
        }
        let message = format!("batch '{}' has not ended; cancel it first, or wait until it has", batch.id);
        Err(GatewayError::new(ErrorKind::InvalidRequest, message))
    }

    /// Bytes of a file of a batch that has ended; none where it was deleted.
    pub(crate) async fn bytes(&self, file: &str) -> Result<Option<u64>, GatewayError> {
        let (owner, file) = (self.owner.clone(), file.to_owned());
        let read = self.kept.store.read(move |store| store.file_bytes(&owner, &file)).await;
        read.map_err(|error| unread(&error))
    }

    /// The first part of a file of a batch that begins with the line numbered `from`, or later.
    pub(crate) async fn part(&self, file: &str, from: u64) -> Result<Option<FilePart>, GatewayError> {
        let (owner, file) = (self.owner.clone(), file.to_owned());
        let read = self.kept.store.read(move |store| store.part(&owner, &file, from)).await;
        read.map_err(|error| unread(&error))
    }
}

fn of_row(row: BatchRow) -> Result<Batch, GatewayError> {
    Batch::of_row(row).map_err(|error| unread(&ResponseStoreError::Failed(error.to_string())))
}

/// The error for an id that the caller has no batch with.
fn batch_not_found(id: &str) -> GatewayError {
    GatewayError::new(ErrorKind::BatchNotFound, format!("No batch found with id '{}'.", shown(id)))
}
