//! The paths of kept responses: one is read, followed, cancelled or deleted, and its input is listed. Like a list of models,
//! none of them takes anything from the caller's quota.

use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::http::{Uri, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{MethodFilter, MethodRouter, on};
use axum::{Extension, Json, Router};
use serde_json::json;

use super::current::{ResponseHead, current};
use super::input_items::InputPage;
use super::{not_found, replay};
use crate::body_budget::BodyPermit;
use crate::dialects::openai::error::error_response;
use crate::dialects::openai::page_query::fields;
use crate::dialects::sse;
use crate::discard::discard;
use crate::error::{ErrorKind, GatewayError};
use crate::keys::Caller;
use crate::request_id::RequestId;
use crate::serving::{ApiState, OwnResponses};

/// The paths below `/v1/responses`.
pub(in crate::dialects::openai) fn routes() -> Router<Arc<ApiState>> {
    Router::new()
        .route("/v1/responses/{id}", kept(MethodFilter::GET, read).merge(kept(MethodFilter::DELETE, delete)))
        .route("/v1/responses/{id}/input_items", kept(MethodFilter::GET, list_input))
        .route("/v1/responses/{id}/cancel", kept(MethodFilter::POST, cancel))
}

/// A request for a kept response.
struct KeptRequest {
    api: Arc<ApiState>,
    own: OwnResponses,
    /// The id of the response.
    response: String,
    uri: Uri,
}

/// The handler of a method: `work` answers its requests, whose bodies say nothing, or has an error in OpenAI's format.
fn kept<F>(method: MethodFilter, work: fn(KeptRequest) -> F) -> MethodRouter<Arc<ApiState>>
where
    F: Future<Output = Result<Response, GatewayError>> + Send + 'static,
{
    on(
        method,
        move |State(api): State<Arc<ApiState>>,
              Extension(id): Extension<RequestId>,
              Extension(caller): Extension<Caller>,
              Path(response): Path<String>,
              request: Request| async move {
            let (parts, body) = request.into_parts();
            discard(body).await;
            let answered = match api.own_responses(&caller) {
                Some(own) => work(KeptRequest { api, own, response, uri: parts.uri }).await,
                None => Err(not_kept()),
            };
            answered.unwrap_or_else(|error| error_response(&error, &id))
        },
    )
}

/// The error of a gateway that keeps nothing.
fn not_kept() -> GatewayError {
    let message = "this gateway keeps no responses: none can be read, deleted or cancelled; send the whole conversation as the `input` of POST /v1/responses";
    GatewayError::new(ErrorKind::UnknownPath, message)
}

async fn read(KeptRequest { api, own, response, uri }: KeptRequest) -> Result<Response, GatewayError> {
    let Some(from) = first_event(&fields(&uri)?)? else {
        let body = current(&own, &response).await?;
        let permit = own.hold(body.len())?;
        return Ok(json_response(body, permit));
    };
    if !ResponseHead::of(&response, &current(&own, &response).await?)?.background {
        let message = format!(
            "response '{response}' did not run in the background, so its events are not kept; read it without `stream`"
        );
        return Err(GatewayError::field("stream", message));
    }
    Ok(api.stream(sse::STREAM_TYPE, replay::follow(own, response, from)))
}

async fn delete(KeptRequest { own, response, .. }: KeptRequest) -> Result<Response, GatewayError> {
    end(&own, &response).await?;
    if !own.delete(&response).await? {
        return Err(not_found(&response));
    }
    Ok(Json(json!({"id": response, "object": "response", "deleted": true})).into_response())
}

async fn list_input(KeptRequest { own, response, uri, .. }: KeptRequest) -> Result<Response, GatewayError> {
    let page = InputPage::parse(&fields(&uri)?)?;
    let input = own.input(&response).await?.ok_or_else(|| not_found(&response))?;
    let _input = own.hold(input.len())?;
    let page = page.of(&response, &input)?.to_string().into_bytes();
    let permit = own.hold(page.len())?;
    Ok(json_response(page, permit))
}

async fn cancel(KeptRequest { own, response, .. }: KeptRequest) -> Result<Response, GatewayError> {
    end(&own, &response).await?;
    // One that has ended is as it is.
    let body = current(&own, &response).await?;
    if !ResponseHead::of(&response, &body)?.background {
        let message =
            format!("response '{response}' did not run in the background: only those can be cancelled");
        return Err(GatewayError::new(ErrorKind::InvalidRequest, message));
    }
    let permit = own.hold(body.len())?;
    Ok(json_response(body, permit))
}

/// Ends a response that runs in the background, or waits to run again.
async fn end(own: &OwnResponses, response: &str) -> Result<(), GatewayError> {
    // First what would begin it.
    own.forget(response).await?;
    if let Some(running) = own.running(response) {
        running.cancel().await;
    }
    Ok(())
}

/// The number of the first event that a query asks for; `None` where it asks for no stream.
fn first_event(query: &[(String, String)]) -> Result<Option<u64>, GatewayError> {
    let value =
        |name: &str| query.iter().rev().find(|(other, _)| other == name).map(|(_, value)| value.as_str());
    let after = value("starting_after").map(|number| {
        let after = number.parse::<u64>().ok().and_then(|after| after.checked_add(1));
        let invalid = "`starting_after` must be the number of an event";
        after.ok_or_else(|| GatewayError::field("starting_after", invalid))
    });
    match value("stream") {
        None | Some("false") => match after.transpose()? {
            Some(_) => Err(GatewayError::field("starting_after", "`starting_after` needs `stream=true`")),
            None => Ok(None),
        },
        Some("true") => Ok(Some(after.transpose()?.unwrap_or(0))),
        Some(_) => Err(GatewayError::field("stream", "`stream` must be true or false")),
    }
}

/// A body whose memory counts until it is sent.
fn json_response(body: Vec<u8>, permit: BodyPermit) -> Response {
    let body = futures::stream::once(async move {
        let _permit = permit;
        Ok::<_, std::convert::Infallible>(body)
    });
    ([(header::CONTENT_TYPE, "application/json")], axum::body::Body::from_stream(body)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_says_from_which_event_on() {
        for (text, expected) in [
            ("", Ok(None)),
            ("?stream=false&include=x", Ok(None)),
            ("?stream=true", Ok(Some(0))),
            ("?stream=true&starting_after=0", Ok(Some(1))),
            ("?stream=true&starting_after=41", Ok(Some(42))),
            ("?stream=true&starting_after=-1", Err("starting_after")),
            ("?stream=true&starting_after=18446744073709551615", Err("starting_after")),
            ("?starting_after=4", Err("starting_after")),
            ("?stream=maybe", Err("stream")),
        ] {
            let uri: Uri = format!("/v1/responses/resp_1{text}").parse().unwrap();
            let found = first_event(&fields(&uri).unwrap());
            assert_eq!(
                found.map_err(|error| error.param),
                expected.map_err(|param| Some(param.to_owned())),
                "{text}"
            );
        }
    }
}
