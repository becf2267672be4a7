//! A line of the results of a batch.

use serde::Serialize;
use serde_json::value::RawValue;

use crate::batches::{LineOutcome, LineResult};
use crate::dialects::json_line::json_line;

#[derive(Serialize)]
struct ResultLine<'a> {
    custom_id: &'a str,
    result: ResultBody<'a>,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ResultBody<'a> {
    Succeeded { message: &'a RawValue },
    Errored { error: &'a RawValue },
    Canceled,
    Expired,
}

/// The line, without its end.
pub(super) fn format(LineResult { id: _, custom_id, outcome }: &LineResult<'_>) -> Vec<u8> {
    let result = match outcome {
        LineOutcome::Response { status, body, .. } if status.is_success() => {
            ResultBody::Succeeded { message: body }
        }
        LineOutcome::Response { body, .. } => ResultBody::Errored { error: body },
        LineOutcome::Cancelled => ResultBody::Canceled,
        LineOutcome::Expired => ResultBody::Expired,
    };
    json_line(&ResultLine { custom_id, result })
}
