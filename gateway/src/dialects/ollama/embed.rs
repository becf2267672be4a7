//! Vectors of texts: `/api/embed`, and `/api/embeddings`, its older form for one text.

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use russet_rpc::engine as pb;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::clock::ResponseClock;
use super::keep_alive::keep_alive;
use super::request::fields::{embed_group_of, embeddings_group_of};
use crate::dialects::pooling_request::{SetFields, VectorTable, floats};
use crate::dialects::values::{boolean, integer};
use crate::dispatch::{PoolingReply, PoolingRequest};
use crate::error::GatewayError;
use crate::json_body::JsonBody;
use crate::serving::{ParsedPooling, RequestContext};

/// Most texts of a request: an engine's limit.
const MAX_INPUTS: usize = 2048;
/// As many tokens of a text as the model takes.
const MODEL_LIMIT: i32 = -1;

#[derive(Serialize)]
struct EmbedBody {
    model: String,
    embeddings: Vec<Vec<f32>>,
    /// In nanoseconds, as the next one.
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: u32,
}

/// Parses a request to `/api/embed`.
pub(super) fn parse(body: JsonBody<'_>, context: &RequestContext<'_>) -> Result<ParsedPooling, GatewayError> {
    let clock = ResponseClock::new(Instant::now());
    let SetFields { mut fields, model, ignored } = SetFields::read(body, embed_group_of)?;
    let texts = texts(fields.remove("input"))?;
    let dimensions = integer(&fields, "dimensions", 1, i64::from(u32::MAX))?.map(|number| number as u32);
    let truncate = boolean(&fields, "truncate")?.unwrap_or(true);
    let keep_alive = keep_alive(&fields)?;
    let name = model.clone();
    let respond = move |reply: PoolingReply| -> Result<Response, GatewayError> {
        let prompt_eval_count = reply.tokens();
        let embeddings = VectorTable::new(reply)?.vectors().map(floats).collect();
        let total_duration = clock.total(Instant::now());
        let body = EmbedBody { model: name, embeddings, total_duration, load_duration: 0, prompt_eval_count };
        Ok(Json(body).into_response())
    };
    Ok(ParsedPooling {
        model,
        request: request(context, texts, dimensions, truncate),
        keep_alive,
        ignored,
        respond: Box::new(respond),
    })
}

/// Parses a request to `/api/embeddings`.
pub(super) fn parse_embeddings(
    body: JsonBody<'_>,
    context: &RequestContext<'_>,
) -> Result<ParsedPooling, GatewayError> {
    let SetFields { mut fields, model, ignored } = SetFields::read(body, embeddings_group_of)?;
    let text = match fields.remove("prompt") {
        Some(Value::String(text)) if !text.is_empty() => text,
        _ => return Err(GatewayError::field("prompt", "`prompt` must be a text that is not empty")),
    };
    let keep_alive = keep_alive(&fields)?;
    let respond = |reply: PoolingReply| -> Result<Response, GatewayError> {
        let table = VectorTable::new(reply)?;
        Ok(Json(json!({"embedding": table.vectors().next().map(floats)})).into_response())
    };
    Ok(ParsedPooling {
        model,
        request: request(context, vec![text], None, true),
        keep_alive,
        ignored,
        respond: Box::new(respond),
    })
}

fn request(
    context: &RequestContext<'_>,
    texts: Vec<String>,
    dimensions: Option<u32>,
    truncate: bool,
) -> PoolingRequest {
    let input = |text| pb::EmbedInput { input: Some(pb::embed_input::Input::Text(text)) };
    PoolingRequest::Embed(pb::EmbedRequest {
        id: context.id.unique.to_string(),
        inputs: texts.into_iter().map(input).collect(),
        dimensions,
        truncate_prompt_tokens: truncate.then_some(MODEL_LIMIT),
        deadline_milliseconds: None,
    })
}

/// A text, or a list of texts.
fn texts(value: Option<Value>) -> Result<Vec<String>, GatewayError> {
    let invalid = || {
        let message =
            format!("`input` must be a text or a list of at most {MAX_INPUTS} texts, none of them empty");
        GatewayError::field("input", message)
    };
    let text = |value: Value| match value {
        Value::String(text) if !text.is_empty() => Ok(text),
        _ => Err(invalid()),
    };
    match value {
        Some(Value::Array(items)) if !items.is_empty() && items.len() <= MAX_INPUTS => {
            items.into_iter().map(text).collect()
        }
        Some(value) => Ok(vec![text(value)?]),
        None => Err(invalid()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_input_is_a_text_or_several() {
        for (value, expected) in [
            (json!("a"), Some(vec!["a"])),
            (json!(["a", "b"]), Some(vec!["a", "b"])),
            (json!(""), None),
            (json!([]), None),
            (json!(["a", ""]), None),
            (json!([1]), None),
            (json!({"text": "a"}), None),
            (json!(vec!["a"; MAX_INPUTS + 1]), None),
        ] {
            let expected = expected.map(|texts| texts.into_iter().map(str::to_owned).collect());
            let found = texts(Some(value.clone()));
            assert_eq!(found.as_ref().ok(), expected.as_ref(), "{value}");
            if let Err(error) = found {
                assert_eq!(error.param.as_deref(), Some("input"));
            }
        }
        assert!(texts(None).is_err());
    }
}
