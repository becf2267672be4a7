//! What is kept of a batch, and the states that it goes through.
//!
//! ```text
//! Validating ─▶ InProgress ─▶ Finalizing ─▶ Completed
//!     │ │           │             └───────▶ Expired      some lines had no time
//!     │ └───────────┴─▶ Cancelling ───────▶ Cancelled    some lines did not run
//!     └─▶ Failed                                         no line ran
//! ```

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::line::LineError;
use crate::response_store::{BatchRow, FileHead, FilePurpose};

/// Where a batch is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum BatchStatus {
    /// Its lines are read.
    #[default]
    Validating,
    /// Its lines run.
    InProgress,
    /// Its results become files.
    Finalizing,
    Completed,
    /// A line is invalid, so none ran.
    Failed,
    /// What did not run is written down.
    Cancelling,
    Cancelled,
    /// Its time was over before all its lines had run.
    Expired,
}

impl BatchStatus {
    /// Whether lines may run still.
    pub(crate) fn is_working(self) -> bool {
        matches!(self, Self::Validating | Self::InProgress)
    }

    /// Whether nothing changes any more.
    pub(crate) fn has_ended(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled | Self::Expired)
    }
}

/// A batch.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    pub(crate) id: String,
    pub(crate) owner: String,
    /// The name of the dialect that made it.
    pub(crate) dialect: String,
    /// The ids of its files: the requests, the responses, and the errors.
    pub(crate) input: String,
    pub(crate) output: String,
    pub(crate) errors: String,
    pub(crate) record: BatchRecord,
}

/// What a batch is asked for, and how far it is. Times are seconds since 1970.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct BatchRecord {
    /// The path of its requests.
    pub(crate) endpoint: String,
    pub(crate) status: BatchStatus,
    pub(crate) created_at: u64,
    /// When its time is over.
    pub(crate) expires_at: u64,
    pub(crate) in_progress_at: Option<u64>,
    pub(crate) finalizing_at: Option<u64>,
    pub(crate) cancelling_at: Option<u64>,
    pub(crate) ended_at: Option<u64>,
    /// Whether its time was over before all its lines had run.
    pub(crate) has_expired: bool,
    /// Its lines.
    pub(crate) total: u64,
    /// Lines with a response.
    pub(crate) completed: u64,
    /// Lines with an error. The rest did not run, once it has ended.
    pub(crate) failed: u64,
    /// Why it failed.
    pub(crate) line_errors: Vec<LineError>,
    /// The client's.
    pub(crate) metadata: Option<Map<String, Value>>,
    /// How long the files of its results are kept, where the client says it.
    pub(crate) output_seconds: Option<u64>,
    /// The header `x-russet-labels` of the request that made it: its lines have it too.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) labels: String,
}

impl BatchRecord {
    /// Lines that did not run.
    pub(crate) fn not_run(&self) -> u64 {
        self.total.saturating_sub(self.completed + self.failed)
    }
}

impl Batch {
    /// The batch of a row.
    pub(crate) fn of_row(row: BatchRow) -> serde_json::Result<Self> {
        let BatchRow { id, owner, dialect, created: _, ended: _, input, output, errors, record } = row;
        Ok(Self { id, owner, dialect, input, output, errors, record: serde_json::from_slice(&record)? })
    }

    /// The files of its results, before they have any.
    pub(crate) fn result_files(&self, purpose: FilePurpose) -> [FileHead; 2] {
        [(&self.output, "output"), (&self.errors, "error")].map(|(id, name)| FileHead {
            id: id.clone(),
            owner: self.owner.clone(),
            name: format!("{}_{name}.jsonl", self.id),
            purpose,
            created: self.record.created_at,
            // Until it is complete, which says when.
            expires: u64::MAX >> 1,
            bytes: 0,
        })
    }

    /// The row of the batch.
    pub(super) fn to_row(&self) -> BatchRow {
        let Self { id, owner, dialect, input, output, errors, record } = self.clone();
        BatchRow {
            created: record.created_at,
            ended: record.status.has_ended(),
            record: self.record_text(),
            id,
            owner,
            dialect,
            input,
            output,
            errors,
        }
    }

    /// Its record as it is kept.
    pub(super) fn record_text(&self) -> Vec<u8> {
        // Strings, numbers and maps of them: serialising them into memory cannot fail.
        serde_json::to_vec(&self.record).unwrap_or_default()
    }
}
