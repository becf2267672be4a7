//! `POST /v1/embeddings`: vectors of texts, as floats or in base64, which OpenAI's SDKs ask for by themselves.

use axum::response::{IntoResponse as _, Response};
use axum::{Json, http::header};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use russet_rpc::engine as pb;
use serde::Serialize;
use serde_json::Value;

use crate::dialects::field_table::{FieldGroup, Treatment, find, group, is_nothing};
use crate::dialects::pooling_request::{SetFields, VectorTable, floats};
use crate::dialects::values::integer;
use crate::dispatch::{PoolingReply, PoolingRequest};
use crate::error::GatewayError;
use crate::json_body::JsonBody;
use crate::serving::{ParsedPooling, RequestContext};

/// Most texts of a request: OpenAI's limit, and an engine's.
const MAX_INPUTS: usize = 2048;

/// What becomes of the fields; another one is left out and listed.
const FIELDS: &[FieldGroup] = &[
    group(
        "OpenAI's and vLLM's",
        Treatment::Honoured,
        &["model", "input", "encoding_format", "dimensions", "truncate_prompt_tokens"],
    ),
    group(
        "of Jina, Cohere and Voyage",
        Treatment::Refused(is_nothing),
        &[
            "messages",
            "images",
            "embedding_types",
            "input_type",
            "task",
            "instruction",
            "late_chunking",
            "normalize",
        ],
    ),
];

fn group_of(name: &str) -> Option<&'static FieldGroup> {
    find(FIELDS, name)
}

/// Parses a request.
pub(super) fn parse(body: JsonBody<'_>, context: &RequestContext<'_>) -> Result<ParsedPooling, GatewayError> {
    let SetFields { mut fields, model, ignored } = SetFields::read(body, group_of)?;
    let inputs = inputs(fields.remove("input"))?;
    let base64 = match fields.get("encoding_format").map(Value::as_str) {
        None | Some(Some("float")) => false,
        Some(Some("base64")) => true,
        Some(_) => {
            let message = "`encoding_format` must be float or base64";
            return Err(GatewayError::field("encoding_format", message));
        }
    };
    let request = pb::EmbedRequest {
        id: context.id.unique.to_string(),
        inputs,
        dimensions: integer(&fields, "dimensions", 1, i64::from(u32::MAX))?.map(|number| number as u32),
        truncate_prompt_tokens: integer(&fields, "truncate_prompt_tokens", -1, i64::from(i32::MAX))?
            .map(|number| number as i32),
        deadline_milliseconds: None,
    };
    let name = model.clone();
    Ok(ParsedPooling {
        keep_alive: None,
        model,
        request: PoolingRequest::Embed(request),
        ignored,
        respond: Box::new(move |reply| respond(reply, name, base64)),
    })
}

/// A text, tokens, or a list of either.
fn inputs(value: Option<Value>) -> Result<Vec<pb::EmbedInput>, GatewayError> {
    let wrong = || {
        let message = "`input` must be a text, a list of texts, a list of token ids, or a list of such lists; no text may be empty";
        GatewayError::field("input", message)
    };
    let text = |text: String| pb::EmbedInput { input: Some(pb::embed_input::Input::Text(text)) };
    let tokens = |ids| pb::EmbedInput { input: Some(pb::embed_input::Input::TokenIds(pb::TokenIds { ids })) };
    let one = |value: Value| match value {
        Value::String(words) if !words.is_empty() => Ok(text(words)),
        Value::Array(list) if !list.is_empty() => token_ids(&list).map(tokens).ok_or_else(wrong),
        _ => Err(wrong()),
    };
    let inputs = match value {
        None => return Err(GatewayError::field("input", "`input` is missing: the texts to embed")),
        Some(Value::Array(list)) if list.first().is_some_and(|first| !first.is_number()) => {
            list.into_iter().map(one).collect::<Result<Vec<_>, _>>()?
        }
        Some(value) => vec![one(value)?],
    };
    if inputs.len() > MAX_INPUTS {
        let message = format!("`input` has {} texts; send at most {MAX_INPUTS} at once", inputs.len());
        return Err(GatewayError::field("input", message));
    }
    Ok(inputs)
}

fn token_ids(list: &[Value]) -> Option<Vec<u32>> {
    list.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
}

#[derive(Serialize)]
struct Embeddings {
    object: &'static str,
    data: Vec<Embedding>,
    model: String,
    usage: EmbeddingUsage,
}

#[derive(Serialize)]
struct Embedding {
    object: &'static str,
    index: usize,
    embedding: Numbers,
}

/// A vector in either encoding.
#[derive(Serialize)]
#[serde(untagged)]
enum Numbers {
    Floats(Vec<f32>),
    Base64(String),
}

#[derive(Serialize)]
struct EmbeddingUsage {
    prompt_tokens: u32,
    total_tokens: u32,
}

fn respond(reply: PoolingReply, model: String, base64: bool) -> Result<Response, GatewayError> {
    let tokens = reply.tokens();
    let numbers = |bytes: &[u8]| match base64 {
        true => Numbers::Base64(STANDARD.encode(bytes)),
        false => Numbers::Floats(floats(bytes)),
    };
    let table = VectorTable::new(reply)?;
    let vectors = table.vectors().map(numbers).enumerate();
    let data =
        vectors.map(|(index, embedding)| Embedding { object: "embedding", index, embedding }).collect();
    let usage = EmbeddingUsage { prompt_tokens: tokens, total_tokens: tokens };
    let mut response = Json(Embeddings { object: "list", data, model, usage }).into_response();
    response.headers_mut().insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    Ok(response)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn inputs_are_texts_or_tokens_and_nothing_else() {
        let text = |words: &str| pb::EmbedInput { input: Some(pb::embed_input::Input::Text(words.into())) };
        let tokens = |ids: &[u32]| pb::EmbedInput {
            input: Some(pb::embed_input::Input::TokenIds(pb::TokenIds { ids: ids.to_vec() })),
        };
        for (value, expected) in [
            (json!("a"), vec![text("a")]),
            (json!(["a", "b"]), vec![text("a"), text("b")]),
            (json!([1, 2]), vec![tokens(&[1, 2])]),
            (json!([[1, 2], [3]]), vec![tokens(&[1, 2]), tokens(&[3])]),
            (json!(["a", [3]]), vec![text("a"), tokens(&[3])]),
        ] {
            assert_eq!(inputs(Some(value.clone())).unwrap(), expected, "{value}");
        }
        for value in [
            json!(""),
            json!([]),
            json!(["a", ""]),
            json!([1, "a"]),
            json!([[]]),
            json!([-1]),
            json!([4_294_967_296_u64]),
            json!([1.5]),
            json!({"text": "a"}),
            json!(7),
            json!(vec!["a"; MAX_INPUTS + 1]),
        ] {
            assert_eq!(inputs(Some(value.clone())).unwrap_err().param.as_deref(), Some("input"), "{value}");
        }
        assert!(inputs(None).unwrap_err().message.contains("is missing"));
    }
}
