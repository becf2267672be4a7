//! A batch as OpenAI shows it.

use serde_json::{Value, json};

use crate::batches::{Batch, BatchRecord, BatchStatus};

/// The batch in JSON.
pub(super) fn batch_body(batch: &Batch) -> Value {
    let Batch { id, owner: _, dialect: _, input, output, errors, record } = batch;
    let BatchRecord {
        endpoint,
        status,
        created_at,
        expires_at,
        in_progress_at,
        finalizing_at,
        cancelling_at,
        ended_at,
        has_expired: _,
        total,
        completed,
        failed,
        line_errors,
        metadata,
        output_seconds: _,
        labels: _,
    } = record;
    let ended_as = |expected: BatchStatus| ended_at.filter(|_| *status == expected);
    // They are there once nothing is added to them.
    let has_results = status.has_ended() && in_progress_at.is_some();
    let has_errors = has_results && *failed + record.not_run() > 0;
    let line_errors = (!line_errors.is_empty()).then(|| json!({"object": "list", "data": line_errors}));
    json!({
        "id": id,
        "object": "batch",
        "endpoint": endpoint,
        "errors": line_errors,
        "input_file_id": input,
        "completion_window": "24h",
        "status": status,
        "output_file_id": (has_results && *completed > 0).then_some(output),
        "error_file_id": has_errors.then_some(errors),
        "created_at": created_at,
        "in_progress_at": in_progress_at,
        "expires_at": expires_at,
        "finalizing_at": finalizing_at,
        "completed_at": ended_as(BatchStatus::Completed),
        "failed_at": ended_as(BatchStatus::Failed),
        "expired_at": ended_as(BatchStatus::Expired),
        "cancelling_at": cancelling_at,
        "cancelled_at": ended_as(BatchStatus::Cancelled),
        "request_counts": {"total": total, "completed": completed, "failed": failed},
        "metadata": metadata,
    })
}
