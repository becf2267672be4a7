//! The inbox as clients see it: requests that its headers put there, and the requests of one caller. Not here: how they run,
//! see `inbox`.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures::Stream;
use http_body_util::BodyExt as _;
use serde::Serialize;
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};
use tokio::time::timeout;

use super::affinity::Session;
use super::api_state::ApiState;
use super::dialect::Dialect;
use super::kept_responses::{KeptResponses, not_stored, unread};
use super::stalled_reader::{ReadBody, ReadLimits};
use super::streamed_response::set_length;
use super::{read_bytes, unix_seconds};
use crate::body_budget::BodyPermit;
use crate::discard::discard;
use crate::error::{ErrorKind, GatewayError, RETRY_AFTER, shown};
use crate::inbox::{
    AcceptError, Accepted, AnswerHead, Follower, IDEMPOTENCY_KEY, InboxEntry, InboxPreference, NewRequest,
    NextBytes, PREFER,
};
use crate::keys::Caller;
use crate::request_id::RequestId;
use crate::response_store::{InboxBody, InboxQuery, InboxRow, InboxState, ResponseStore, ResponseStoreError};

/// The id of a request in the inbox, with its answer.
const INBOX_ID: HeaderName = HeaderName::from_static("x-russet-inbox-id");
/// Says that an answer was given before.
const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
/// Says which preferences were granted.
const PREFERENCE_APPLIED: HeaderName = HeaderName::from_static("preference-applied");

/// Marks a request that comes from the inbox.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InboxRequest;

/// Marks a request for a response in the background that is generated again: it ends when its response does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplayedResponse {
    /// When it was asked for, in seconds since 1970.
    pub(crate) created: u64,
}

/// What one caller has in the inbox.
#[derive(Clone)]
pub(crate) struct OwnInbox {
    kept: Arc<KeptResponses>,
    caller: Caller,
    owner: String,
}

/// A request as its owner sees it.
#[derive(Debug, Serialize)]
pub(crate) struct InboxRecord {
    id: String,
    object: &'static str,
    status: InboxState,
    path: String,
    idempotency_key: Option<String>,
    request_id: String,
    attempts: u32,
    created_at: u64,
    expires_at: u64,
    started_at: Option<u64>,
    ended_at: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response: Option<InboxAnswer>,
}

/// The answer of a request.
#[derive(Debug, Serialize)]
struct InboxAnswer {
    status_code: u16,
    /// JSON as it is; a stream as text.
    body: Box<RawValue>,
}

/// Keeps the request in the inbox, and answers it from there, if its headers want that; otherwise it goes on.
pub(super) async fn keep_if_wanted(
    api: &Arc<ApiState>,
    dialect: &'static Dialect,
    id: &RequestId,
    caller: &Caller,
    request: Request,
) -> ControlFlow<Response, Request> {
    let headers = request.headers();
    let is_plain = !headers.contains_key(IDEMPOTENCY_KEY) && !headers.contains_key(PREFER);
    if is_plain || request.extensions().get::<InboxRequest>().is_some() {
        return ControlFlow::Continue(request);
    }
    let preference = match InboxPreference::of_headers(headers) {
        Ok(preference) if preference.is_kept() => preference,
        Ok(_) => return ControlFlow::Continue(request),
        Err(error) => {
            discard(request.into_body()).await;
            return ControlFlow::Break((dialect.error_response)(&error, id));
        }
    };
    let answered = async {
        let own = match api.own_inbox(caller) {
            Ok(own) => own,
            Err(error) => {
                discard(request.into_body()).await;
                return Err(error);
            }
        };
        let path = request.uri().path().to_owned();
        let headers = kept_headers(request.headers());
        let (body, _permit) = read_bytes(api, caller, request).await?;
        let new = NewInboxRequest { path, headers, body, reply: None };
        own.answer(api, dialect, id, new, &preference).await
    };
    let answered = answered.await;
    ControlFlow::Break(answered.unwrap_or_else(|error| {
        api.metrics.rejected(&error);
        (dialect.error_response)(&error, id)
    }))
}

/// A request for the inbox.
#[derive(Debug)]
pub(crate) struct NewInboxRequest {
    pub(crate) path: String,
    /// Those that its route reads.
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// The name under which its answer is published.
    pub(crate) reply: Option<String>,
}

/// The headers that say what is asked for. A key or a cookie is none of them: the request runs as its owner.
pub(crate) fn kept_headers(headers: &HeaderMap) -> HeaderMap {
    const NAMES: [&str; 3] = ["content-type", "cache-control", "x-request-timeout"];
    const PREFIXES: [&str; 3] = ["x-russet-", "anthropic-", "openai-"];
    let is_kept = |name: &str| {
        NAMES.contains(&name)
            || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
            || Session::is_named_by(name)
    };
    headers
        .iter()
        .filter(|(name, _)| is_kept(name.as_str()))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

impl OwnInbox {
    /// That of this caller.
    pub(super) fn new(kept: Arc<KeptResponses>, caller: &Caller) -> Self {
        Self { kept, caller: caller.clone(), owner: caller.owner() }
    }

    /// Keeps a request, and answers it as its client prefers.
    async fn answer(
        &self,
        api: &ApiState,
        dialect: &'static Dialect,
        id: &RequestId,
        new: NewInboxRequest,
        preference: &InboxPreference,
    ) -> Result<Response, GatewayError> {
        let (key, is_awaited) = (preference.key.clone(), !preference.respond_async);
        let (entry, follower) = match self.accept(id, new, key, is_awaited, false).await? {
            Accepted::Running(entry, follower) => (entry, follower),
            Accepted::Ended(row) => return self.response(api, *row, true).await,
        };
        if let Some(follower) = follower {
            return self.follow(api, dialect, id, entry, follower).await;
        }
        // Its answer, if it comes in time. Who does not wait is told that it is accepted, however soon it comes.
        let has_come = !preference.wait.is_zero() && timeout(preference.wait, entry.gone()).await.is_ok();
        let row = self.row(entry.id()).await?;
        let mut response =
            if has_come { self.response(api, row, false).await? } else { accepted_response(row) };
        let applied = HeaderValue::from_static("respond-async");
        response.headers_mut().insert(PREFERENCE_APPLIED, applied);
        Ok(response)
    }

    /// Keeps a request, durably.
    pub(crate) async fn accept(
        &self,
        id: &RequestId,
        new: NewInboxRequest,
        key: Option<String>,
        is_awaited: bool,
        again: bool,
    ) -> Result<Accepted, GatewayError> {
        let NewInboxRequest { path, headers, body, reply } = new;
        let mut fingerprint = Sha256::new_with_prefix(&path);
        fingerprint.update([0]);
        fingerprint.update(&body);
        let fingerprint = fingerprint.finalize().to_vec();
        let row =
            InboxRow { key, fingerprint, reply, ..InboxRow::new(&self.owner, id, &path, unix_seconds()) };
        let body = InboxBody::new(&headers, body);
        let accepted = self.kept.inbox.accept(NewRequest { row, body, is_awaited, again }).await;
        accepted.map_err(|error| match error {
            AcceptError::TooMany(owned) => {
                let message = format!(
                    "{owned} requests of this caller wait in the inbox or run, which is as many as this gateway takes; wait until one has ended, or delete one"
                );
                GatewayError::new(ErrorKind::Overloaded, message).retry_after(RETRY_AFTER)
            }
            AcceptError::OtherRequest(other) => {
                let message = format!(
                    "another request of this caller, {other}, has this `Idempotency-Key`; a new request needs a new one"
                );
                let param = Some(IDEMPOTENCY_KEY.as_str().to_owned());
                GatewayError { param, ..GatewayError::new(ErrorKind::IdempotencyKeyReused, message) }
            }
            AcceptError::Store(error) => not_stored("the request", &error),
        })
    }

    /// The answer of a request that was accepted is published under this name; not for a message that comes `again`.
    pub(crate) async fn publish(
        &self,
        accepted: &Accepted,
        name: &str,
        again: bool,
    ) -> Result<(), GatewayError> {
        let published = self.kept.inbox.publish(accepted, name, again).await;
        published.map_err(|error| not_stored("the request", &error))
    }

    /// The answer of a request that runs, as it comes.
    async fn follow(
        &self,
        api: &ApiState,
        dialect: &'static Dialect,
        id: &RequestId,
        mut entry: Arc<InboxEntry>,
        mut follower: Follower,
    ) -> Result<Response, GatewayError> {
        let head = loop {
            if let Some(head) = entry.head().await.filter(|head| !head.is_whole()) {
                break head;
            }
            // One in a piece is given away once it is durable.
            entry.gone().await;
            // It may have failed, and another retry has begun it again. In this order: what runs has an end in the store before it
            // runs no more.
            let other = self.entry(entry.id());
            let row = self.kept_row(entry.id()).await?;
            if !row.state.has_ended() {
                entry = other.ok_or_else(interrupted)?;
            } else if let Some(response) = self.stored(api, &row, false).await? {
                return Ok(response);
            } else {
                // It has begun anew since its row was read, and may have ended again.
                continue;
            }
            follower = Follower::of(&entry);
        };
        if let Err(error) = self.kept.inbox.deliver(&entry).await {
            // A retry of its client gets an answer in one piece, at the price of a second run.
            tracing::warn!(%error, "it is not kept that a client reads an answer");
        }
        let row = entry.row();
        let error = (dialect.error_response)(&interrupted(), id);
        let error = error.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        let bytes = follow(self.kept.store.clone(), entry, follower, head.clone(), error);
        Ok(response(api, &head, &row, false, bytes))
    }

    /// The answer of a request that has ended; none where it has begun anew since.
    async fn stored(
        &self,
        api: &ApiState,
        row: &InboxRow,
        is_replayed: bool,
    ) -> Result<Option<Response>, GatewayError> {
        let head = row.head.as_deref().and_then(AnswerHead::parse).ok_or_else(unreadable)?;
        let Some(bytes) = self.answer_bytes(row).await? else { return Ok(None) };
        let body = parts(self.kept.store.clone(), row.clone());
        let mut response = response(api, &head, row, is_replayed, body);
        set_length(&mut response, bytes);
        Ok(Some(response))
    }

    /// Bytes of the answer of a request that has ended; none where it has begun anew since.
    async fn answer_bytes(&self, row: &InboxRow) -> Result<Option<u64>, GatewayError> {
        let (id, created) = (row.id.clone(), row.created);
        let read = self.kept.store.read(move |store| store.answer_bytes(&id, created)).await;
        read.map_err(|error| unread(&error))
    }

    /// A request, and after its end or so long.
    pub(crate) async fn get(&self, id: &str, wait: Duration) -> Result<InboxRow, GatewayError> {
        if let Some(entry) = self.entry(id) {
            let _ = timeout(wait, entry.gone()).await;
        }
        self.row(id).await
    }

    /// A request that has not ended.
    fn entry(&self, id: &str) -> Option<Arc<InboxEntry>> {
        self.kept.inbox.get(&self.owner, id).filter(|entry| !entry.is_response())
    }

    /// A request as it is now.
    async fn row(&self, id: &str) -> Result<InboxRow, GatewayError> {
        // First what runs: what is kept of a request that has ended says so before it runs no more.
        match self.entry(id) {
            Some(entry) => Ok(entry.row()),
            None => self.kept_row(id).await,
        }
    }

    /// A request as the store has it.
    async fn kept_row(&self, id: &str) -> Result<InboxRow, GatewayError> {
        let (owner, wanted) = (self.owner.clone(), id.to_owned());
        let read = self.kept.store.read(move |store| store.request(&owner, &wanted)).await;
        // Those of responses are seen as responses.
        let row = read.map_err(|error| unread(&error))?.filter(|row| row.response().is_none());
        row.ok_or_else(|| {
            let message = format!("No request found in the inbox with id '{}'.", shown(id));
            GatewayError::new(ErrorKind::RequestNotFound, message)
        })
    }

    /// A page of requests, and whether there are more.
    pub(crate) async fn list(&self, query: InboxQuery) -> Result<(Vec<InboxRecord>, bool), GatewayError> {
        if let Some(after) = &query.after {
            self.row(after).await?;
        }
        let (owner, limit) = (self.owner.clone(), query.limit);
        let read = self.kept.store.read(move |store| store.requests(&owner, &query)).await;
        let mut rows = read.map_err(|error| unread(&error))?;
        let has_more = rows.len() > limit;
        rows.truncate(limit);
        Ok((rows.into_iter().map(|row| InboxRecord::of(row, None)).collect(), has_more))
    }

    /// A request with its answer, if it has one, and the memory that it takes.
    pub(crate) async fn record(
        &self,
        api: &ApiState,
        row: InboxRow,
    ) -> Result<(InboxRecord, BodyPermit), GatewayError> {
        let mut permit = api.bodies.hold(&self.caller, 0)?;
        let Some(head) = row.head.as_deref() else { return Ok((InboxRecord::of(row, None), permit)) };
        let head = AnswerHead::parse(head).ok_or_else(unreadable)?;
        let bytes = self.answer_bytes(&row).await?.ok_or_else(interrupted)?;
        let mut body = Vec::new();
        while (body.len() as u64) < bytes {
            let part = part(&self.kept.store, &row, body.len() as u64).await;
            let part = part.map_err(|error| unread(&error))?.ok_or_else(interrupted)?;
            // Twice: as it is read, and as it is written.
            api.bodies.grow(&mut permit, 2 * part.len())?;
            body.extend_from_slice(&part);
        }
        let text = String::from_utf8_lossy(&body).into_owned();
        let whole = head.is_whole().then(|| RawValue::from_string(text.clone()).ok()).flatten();
        let body = match whole {
            Some(value) => value,
            None => serde_json::value::to_raw_value(&text).map_err(|_| unreadable())?,
        };
        let answer = InboxAnswer { status_code: head.status, body };
        Ok((InboxRecord::of(row, Some(answer)), permit))
    }

    /// The answer of a request as its client would have got it; the request where it has none yet.
    pub(crate) async fn response(
        &self,
        api: &ApiState,
        row: InboxRow,
        is_replayed: bool,
    ) -> Result<Response, GatewayError> {
        if !row.state.has_ended() {
            return Ok(accepted_response(row));
        }
        self.stored(api, &row, is_replayed).await?.ok_or_else(interrupted)
    }

    /// Deletes a request; one that runs ends.
    pub(crate) async fn delete(&self, id: &str) -> Result<(), GatewayError> {
        self.row(id).await?;
        let deleted = self.kept.store.delete_request(&self.owner, id).await;
        deleted.map_err(|error| not_stored("that the request is deleted", &error))?;
        if let Some(entry) = self.kept.inbox.get(&self.owner, id) {
            entry.cancel().await;
        }
        Ok(())
    }
}

impl InboxRecord {
    fn of(row: InboxRow, response: Option<InboxAnswer>) -> Self {
        Self {
            id: row.id,
            object: "inbox.request",
            status: row.state,
            path: row.path,
            idempotency_key: row.key,
            request_id: row.request_id,
            attempts: row.attempts,
            created_at: row.created,
            expires_at: row.expires,
            started_at: row.leased,
            ended_at: row.ended,
            response,
        }
    }
}

/// The response to a request whose answer comes later.
fn accepted_response(row: InboxRow) -> Response {
    let location = format!("/v1/inbox/{}", row.id);
    let headers = [(header::LOCATION, location), (header::RETRY_AFTER, "1".to_owned())];
    (StatusCode::ACCEPTED, headers, Json(InboxRecord::of(row, None))).into_response()
}

/// A response with this head and body.
fn response(
    api: &ApiState,
    head: &AnswerHead,
    row: &InboxRow,
    is_replayed: bool,
    bytes: impl Stream<Item = Bytes> + Send + 'static,
) -> Response {
    let limits = ReadLimits { timeout: api.stream_timeouts.read, deadline: None };
    let mut response = Response::new(Body::from_stream(ReadBody::new(bytes, limits)));
    *response.status_mut() = StatusCode::from_u16(head.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    for (name, value) in &head.headers {
        if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), value.parse::<HeaderValue>()) {
            headers.insert(name, value);
        }
    }
    if let Ok(id) = row.id.parse() {
        headers.insert(INBOX_ID, id);
    }
    if is_replayed {
        headers.insert(REPLAYED, HeaderValue::from_static("true"));
    }
    response
}

/// The bytes of an answer in the store from this number on, as many as are kept together; none where there are no more.
async fn part(
    store: &Arc<ResponseStore>,
    row: &InboxRow,
    from: u64,
) -> Result<Option<Bytes>, ResponseStoreError> {
    let (id, created) = (row.id.clone(), row.created);
    let part = store.read(move |store| store.answer(&id, created, from)).await?;
    Ok(part.map(|part| Bytes::copy_from_slice(part.from(from))))
}

/// The bytes of an answer that is in the store.
fn parts(store: Arc<ResponseStore>, row: InboxRow) -> impl Stream<Item = Bytes> + Send + 'static {
    async_stream::stream! {
        let mut from = 0;
        loop {
            match part(&store, &row, from).await {
                Ok(Some(bytes)) => {
                    from += bytes.len() as u64;
                    yield bytes;
                }
                Ok(None) => return,
                Err(error) => {
                    tracing::error!(%error, "an answer in the inbox cannot be read");
                    return;
                }
            }
        }
    }
}

/// The bytes of an answer as they come, and those of an error where it has no end.
fn follow(
    store: Arc<ResponseStore>,
    entry: Arc<InboxEntry>,
    follower: Follower,
    head: AnswerHead,
    error: Bytes,
) -> impl Stream<Item = Bytes> + Send + 'static {
    async_stream::stream! {
        let _follower = follower;
        let mut from = 0;
        loop {
            let bytes = match entry.bytes(from).await {
                NextBytes::Newest(bytes) => Bytes::from(bytes),
                NextBytes::Stored => match part(&store, entry.begun_row(), from).await {
                    Ok(Some(bytes)) => bytes,
                    Ok(None) | Err(_) => break,
                },
                NextBytes::Ended => return,
                NextBytes::Interrupted => break,
            };
            from += bytes.len() as u64;
            yield bytes;
        }
        yield head.error_event(&error).into();
    }
}

fn interrupted() -> GatewayError {
    let message = "the request was deleted or begun anew, or the gateway is stopping and goes on with it when it starts again; ask again";
    GatewayError::new(ErrorKind::ShuttingDown, message).retry_after(RETRY_AFTER)
}

fn unreadable() -> GatewayError {
    GatewayError::new(ErrorKind::Internal, "the gateway cannot read the answer that it keeps")
}
