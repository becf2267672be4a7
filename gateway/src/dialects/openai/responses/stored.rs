//! Responses that are kept: what a request says of it, when a response is written to the store, and the conversation that a
//! later one continues. Not here: the routes that read them, see `routes`.

mod current;
mod input_items;
mod replay;
mod routes;

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::http::header;
use axum::response::IntoResponse as _;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::background::RunningResponse;
use crate::body_budget::BodyPermit;
use crate::dialects::values::{JsonObject, boolean};
use crate::error::{ErrorKind, GatewayError, shown};
use crate::response_store::{NewRow, StoredTurn};
use crate::serving::{AcceptedResponse, DetachedResponse, OwnResponses, RequestContext};
pub(in crate::dialects::openai) use routes::routes;

/// What a request says of keeping its response.
pub(super) struct StorageFields<'a> {
    own: Option<&'a OwnResponses>,
    is_kept: bool,
    pub(super) background: bool,
    /// The response that it continues.
    pub(super) previous: Option<String>,
}

impl<'a> StorageFields<'a> {
    /// Parses `store`, `background` and `previous_response_id`. Like OpenAI, the gateway keeps what does not say otherwise,
    /// if it keeps anything.
    pub(super) fn parse(
        fields: &JsonObject,
        own: Option<&'a OwnResponses>,
        ignored: &mut BTreeSet<String>,
    ) -> Result<Self, GatewayError> {
        let store = boolean(fields, "store")?;
        let background = boolean(fields, "background")?.unwrap_or(false);
        let previous = match fields.get("previous_response_id") {
            None => None,
            // Clients send it for none.
            Some(Value::String(id)) if id.is_empty() => None,
            Some(Value::String(id)) => Some(id.clone()),
            Some(_) => {
                let message = "`previous_response_id` must be the id of a response";
                return Err(GatewayError::field("previous_response_id", message));
            }
        };
        if own.is_none() {
            let needing = [("previous_response_id", previous.is_some()), ("background", background)];
            if let Some((field, _)) = needing.into_iter().find(|(_, is_there)| *is_there) {
                let message = format!(
                    "`{field}` needs a response that is kept, and no response is kept by this gateway: the whole conversation is the `input`"
                );
                return Err(GatewayError::field(field, message));
            }
            if store == Some(true) {
                ignored.insert("store".to_owned());
            }
        }
        if background && store == Some(false) {
            let message = "`background` needs a response that is kept; leave out `store: false`";
            return Err(GatewayError::field("background", message));
        }
        Ok(Self { own, is_kept: own.is_some() && store.unwrap_or(true), background, previous })
    }

    /// The conversation that the request continues. Blocks.
    pub(super) fn conversation(&self) -> Result<Option<Conversation>, GatewayError> {
        let (Some(own), Some(id)) = (self.own, &self.previous) else { return Ok(None) };
        let (turns, permit) = own.conversation(id)?;
        if let Some(turn) = turns.iter().find(|turn| !turn.finished) {
            let message = format!(
                "response '{}' has not ended, so nothing continues it; wait until GET /v1/responses/{} says that it has",
                turn.id, turn.id
            );
            return Err(GatewayError::field("previous_response_id", message));
        }
        Ok(Some(Conversation { turns, permit }))
    }

    /// How the response with this input is kept; `None` where it is not.
    pub(super) fn record(
        &self,
        context: &RequestContext<'_>,
        input: Option<&Value>,
        streamed: bool,
    ) -> Result<Option<ResponseRecord>, GatewayError> {
        let Some(own) = self.own.filter(|_| self.is_kept) else { return Ok(None) };
        let input: Bytes = input_items::stored(input, &context.id.unique).into();
        Ok(Some(ResponseRecord {
            own: if self.background { own.clone() } else { own.without_request() },
            row: RowHead {
                id: format!("resp_{}", context.id.unique),
                created: context.unix_seconds,
                parent: self.previous.clone(),
            },
            _held: own.hold(input.len())?,
            input,
            is_replayed: own.is_replayed(),
            background: self.background.then_some(Background { streamed, running: None, has_begun: false }),
        }))
    }
}

/// How a response is kept.
#[derive(Debug)]
pub(super) struct ResponseRecord {
    own: OwnResponses,
    row: RowHead,
    input: Bytes,
    _held: BodyPermit,
    background: Option<Background>,
    /// Whether it is generated again.
    is_replayed: bool,
}

#[derive(Debug)]
struct RowHead {
    id: String,
    created: u64,
    parent: Option<String>,
}

/// A response that runs in the background.
struct Background {
    streamed: bool,
    running: Option<Arc<RunningResponse>>,
    /// Whether its stream says that an engine generates it.
    has_begun: bool,
}

impl std::fmt::Debug for Background {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Background").field("streamed", &self.streamed).finish_non_exhaustive()
    }
}

impl ResponseRecord {
    pub(super) fn is_background(&self) -> bool {
        self.background.is_some()
    }

    /// An engine generates the response; whether it is in the background and this is new.
    pub(super) fn begin(&mut self) -> bool {
        let Some(background) = &mut self.background else { return false };
        if let Some(running) = &background.running {
            running.generating();
        }
        !std::mem::replace(&mut background.has_begun, true)
    }

    /// Keeps a response that runs in the background before it begins.
    pub(super) async fn detach(&mut self, queued: Bytes) -> Result<Option<DetachedResponse>, GatewayError> {
        let streamed = self.background.as_ref().is_some_and(|background| background.streamed);
        let replay = self.own.replay(&self.row.id, self.row.created, streamed);
        let row = NewRow { replay, ..self.row(false, queued.clone()) };
        self.own = self.own.without_request();
        let Self { own, background: Some(background), row: RowHead { id, .. }, .. } = self else {
            return Ok(None);
        };
        let log = own.begin(id)?;
        own.insert(row).await?;
        background.running = Some(log.running());
        let accepted = if background.streamed {
            AcceptedResponse::Streamed(Box::pin(replay::follow(own.clone(), id.clone(), 0)))
        } else {
            let headers = [(header::CONTENT_TYPE, "application/json")];
            AcceptedResponse::Whole((headers, queued).into_response())
        };
        Ok(Some(DetachedResponse { log, accepted }))
    }

    /// Whether an error ends the response. One in the background that the gateway's own end interrupts is generated when it
    /// starts again, and one that is generated again waits for a model that is busy.
    pub(super) fn ends_by(&self, error: &GatewayError) -> bool {
        let has_begun = self.background.as_ref().is_some_and(|background| background.has_begun);
        let is_busy = self.is_replayed && !has_begun && error.retry_after.is_some();
        !self.is_background() || (error.kind != ErrorKind::ShuttingDown && !is_busy)
    }

    /// Keeps the response that has ended.
    pub(super) async fn end(&self, body: Bytes) -> Result<(), GatewayError> {
        if self.is_background() {
            self.own.finish(&self.row.id, body).await
        } else {
            self.own.insert(self.row(true, body)).await
        }
    }

    fn row(&self, finished: bool, body: Bytes) -> NewRow {
        let Self { own, row: RowHead { id, created, parent }, input, .. } = self;
        NewRow {
            id: id.clone(),
            owner: own.owner().to_owned(),
            created: *created,
            parent: parent.clone(),
            finished,
            body,
            input: input.clone(),
            replay: None,
        }
    }
}

/// A conversation that a response continues.
pub(super) struct Conversation {
    turns: Vec<StoredTurn>,
    permit: BodyPermit,
}

impl Conversation {
    /// Its items, input and output of each response in turn, each decoded when it is its turn.
    pub(super) fn items(&self) -> impl Iterator<Item = Result<Value, GatewayError>> {
        self.turns.iter().flat_map(|StoredTurn { id, finished: _, body, input }| {
            let input = serde_json::from_slice::<Vec<&RawValue>>(input);
            let output = serde_json::from_slice::<Output>(body);
            let input = input.map(|items| items.into_iter().map(|item| serde_json::from_str(item.get())));
            let output = output.map(|body| body.output.into_iter().map(serde_json::to_value));
            let items: Box<dyn Iterator<Item = serde_json::Result<Value>>> = match (input, output) {
                (Ok(input), Ok(output)) => Box::new(input.chain(output)),
                (Err(error), _) | (_, Err(error)) => Box::new(std::iter::once(Err(error))),
            };
            items.map(move |item| item.map_err(|error| unreadable(id, &error)))
        })
    }

    /// The memory that it takes: the request for the engine is as large.
    pub(super) fn into_permit(self) -> BodyPermit {
        self.permit
    }
}

/// The items of a response, as much of them as a later request is told.
#[derive(Deserialize)]
struct Output {
    output: Vec<OutputItem>,
}

#[derive(Deserialize, Serialize)]
struct OutputItem {
    r#type: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Vec<TextPart>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    summary: Option<Vec<TextPart>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    call_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    input: Option<String>,
}

#[derive(Deserialize, Serialize)]
struct TextPart {
    r#type: String,
    text: String,
}

/// The error for what is kept and is no JSON, or not this release's.
fn unreadable(id: &str, error: &serde_json::Error) -> GatewayError {
    tracing::error!(id, %error, "a kept response cannot be read");
    let message = format!(
        "response '{id}' is kept in a form that this gateway cannot read; send the whole conversation as the `input`"
    );
    GatewayError::new(ErrorKind::Internal, message)
}

/// The error for an id that the caller keeps no response with.
fn not_found(id: &str) -> GatewayError {
    let message = format!("Response with id '{}' not found.", shown(id));
    GatewayError::new(ErrorKind::ResponseNotFound, message)
}
