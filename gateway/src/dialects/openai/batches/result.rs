//! A line of a result file.

use serde::Serialize;
use serde_json::value::RawValue;

use crate::batches::{LineOutcome, LineResult};
use crate::dialects::json_line::json_line;

#[derive(Serialize)]
struct ResultLine<'a> {
    id: &'a str,
    custom_id: &'a str,
    response: Option<ResponseBody<'a>>,
    error: Option<ErrorBody>,
}

#[derive(Serialize)]
struct ResponseBody<'a> {
    status_code: u16,
    request_id: &'a str,
    body: &'a RawValue,
}

#[derive(Serialize)]
struct ErrorBody {
    code: &'static str,
    message: &'static str,
}

/// The line, without its end.
pub(super) fn format(LineResult { id, custom_id, outcome }: &LineResult<'_>) -> Vec<u8> {
    let (response, error) = match outcome {
        LineOutcome::Response { status, request_id, body } => {
            (Some(ResponseBody { status_code: status.as_u16(), request_id, body }), None)
        }
        LineOutcome::Cancelled => {
            let message = "The batch was cancelled before this request was executed.";
            (None, Some(ErrorBody { code: "batch_cancelled", message }))
        }
        LineOutcome::Expired => {
            let message = "This request could not be executed before the completion window expired.";
            (None, Some(ErrorBody { code: "batch_expired", message }))
        }
    };
    json_line(&ResultLine { id, custom_id, response, error })
}
