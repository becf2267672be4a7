//! `POST /v1/rerank`, `/v2/rerank` and `/rerank`: scores of documents for a query, the best first, in the form that
//! Jina, Cohere and vLLM share.

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use russet_rpc::engine as pb;
use serde_json::{Value, json};

use crate::dialects::field_table::{FieldGroup, Treatment, find, group, is_nothing};
use crate::dialects::pooling_request::{SetFields, mismatched};
use crate::dialects::values::{boolean, integer};
use crate::dispatch::{PoolingReply, PoolingRequest};
use crate::error::GatewayError;
use crate::json_body::JsonBody;
use crate::serving::{ParsedPooling, RequestContext};

/// Most documents of a request: an engine's limit.
const MAX_DOCUMENTS: usize = 2048;

/// What becomes of the fields; another one is left out and listed.
const FIELDS: &[FieldGroup] = &[
    group(
        "Jina's and vLLM's",
        Treatment::Honoured,
        &["model", "query", "documents", "top_n", "return_documents", "truncate_prompt_tokens"],
    ),
    group(
        "of Cohere, Jina and instructed rerankers",
        Treatment::Refused(is_nothing),
        &["rank_fields", "max_chunks_per_doc", "max_tokens_per_doc", "instruction", "return_embeddings"],
    ),
];

fn group_of(name: &str) -> Option<&'static FieldGroup> {
    find(FIELDS, name)
}

/// Parses a request.
pub(super) fn parse(body: JsonBody<'_>, context: &RequestContext<'_>) -> Result<ParsedPooling, GatewayError> {
    let SetFields { mut fields, model, ignored } = SetFields::read(body, group_of)?;
    let query = match fields.remove("query") {
        Some(Value::String(query)) if !query.is_empty() => query,
        _ => return Err(GatewayError::field("query", "`query` must be a text that is not empty")),
    };
    let documents = documents(fields.remove("documents"))?;
    let top_n =
        integer(&fields, "top_n", 1, i64::from(u32::MAX))?.map_or(usize::MAX, |number| number as usize);
    // Jina and vLLM return them unless told otherwise.
    let shown = boolean(&fields, "return_documents")?.unwrap_or(true).then(|| documents.clone());
    let request = pb::RerankRequest {
        id: context.id.unique.to_string(),
        query,
        documents,
        truncate_prompt_tokens: integer(&fields, "truncate_prompt_tokens", -1, i64::from(i32::MAX))?
            .map(|number| number as i32),
        deadline_milliseconds: None,
    };
    let (name, id) = (model.clone(), format!("rerank-{}", context.id.unique));
    Ok(ParsedPooling {
        keep_alive: None,
        model,
        request: PoolingRequest::Rerank(request),
        ignored,
        respond: Box::new(move |reply| respond(&id, &name, reply, top_n, shown.as_deref())),
    })
}

/// Texts, or objects with one each.
fn documents(value: Option<Value>) -> Result<Vec<String>, GatewayError> {
    let wrong = || {
        let message =
            "`documents` must be a list of texts or of objects {\"text\": text}, none of them empty";
        GatewayError::field("documents", message)
    };
    let Some(Value::Array(list)) = value else { return Err(wrong()) };
    if list.is_empty() || list.len() > MAX_DOCUMENTS {
        let message = format!("`documents` has {} texts; send 1 to {MAX_DOCUMENTS} at once", list.len());
        return Err(GatewayError::field("documents", message));
    }
    let text = |document: Value| match document {
        Value::String(text) if !text.is_empty() => Ok(text),
        Value::Object(mut fields) => match fields.remove("text") {
            Some(Value::String(text)) if !text.is_empty() => Ok(text),
            _ => Err(wrong()),
        },
        _ => Err(wrong()),
    };
    list.into_iter().map(text).collect()
}

fn respond(
    id: &str,
    model: &str,
    reply: PoolingReply,
    top_n: usize,
    documents: Option<&[String]>,
) -> Result<Response, GatewayError> {
    let tokens = reply.tokens();
    let PoolingReply::Rerank(pb::RerankReply { scores, prompt_tokens, .. }) = reply else {
        return Err(mismatched("no scores"));
    };
    if scores.len() != prompt_tokens.len()
        || documents.is_some_and(|documents| documents.len() != scores.len())
    {
        return Err(mismatched("another number of scores than of documents"));
    }
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&one, &other| scores[other].total_cmp(&scores[one]));
    let result = |&index: &usize| {
        let mut result = json!({"index": index, "relevance_score": scores[index]});
        if let Some(text) = documents.and_then(|documents| documents.get(index)) {
            result["document"] = json!({"text": text});
        }
        result
    };
    let results: Vec<Value> = order.iter().take(top_n).map(result).collect();
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    Ok(Json(json!({"id": id, "model": model, "results": results, "usage": usage})).into_response())
}
