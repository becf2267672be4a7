//! Runs one request of the inbox: leases it, sends it to its route, keeps the answer, and says how it ended.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Extensions, HeaderMap, StatusCode};
use axum::response::Response;
use http_body_util::BodyExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::answer::AnswerHead;
use super::{InboxEntry, LEASED, MAX_ATTEMPTS, PENDING, Registration};
use crate::error::{ErrorKind, GatewayError};
use crate::metrics::Metrics;
use crate::offline::{Interruption, OfflineContext, OfflineRequest, retry_after};
use crate::request_id::RequestId;
use crate::request_log::RequestOutcome;
use crate::response_store::{AnswerPart, InboxBody, InboxState, ResponseStore, ResponseStoreError};
use crate::serving::{InboxRequest, ReplayedResponse, unix_seconds};

/// Bytes of an answer that are kept in memory before they go to the store.
const MAX_TAIL_BYTES: usize = 64 << 10;
/// Longest answer that is kept: vectors of a full request in JSON.
const MAX_ANSWER_BYTES: u64 = 64 << 20;

/// The first time between two tries of a response in the background, which do not say how long they want to wait.
const RESPONSE_RETRY: Duration = Duration::from_secs(1);

/// A request that is to run.
pub(super) struct InboxRun {
    pub(super) context: OfflineContext,
    pub(super) store: Arc<ResponseStore>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) entry: Arc<InboxEntry>,
    /// Its place among those that have not ended.
    pub(super) registration: Registration,
    /// Where requests wait for others: of their owner, and of all.
    pub(super) places: [Arc<Semaphore>; 2],
}

impl InboxRun {
    pub(super) async fn run(self) {
        let id = &self.entry.row.id;
        let ended = tokio::select! {
            ended = self.run_to_end() => ended,
            // Who cancels it deletes it.
            () = self.entry.cancelled.cancelled() => Err(Interruption::Lost(ResponseStoreError::Deleted)),
        };
        match ended {
            Ok(state) => {
                self.metrics.inbox_ended(state.as_str());
                self.registration.inbox.publish_end(&self.entry);
            }
            Err(Interruption::Stopping) => {
                let was_leased = self.entry.answer.borrow().leased.is_some();
                // Where the store fails, it counts as one more attempt.
                if was_leased && let Err(error) = self.store.release_request(id).await {
                    tracing::warn!(id, %error, "a request of the inbox stays leased");
                }
                tracing::info!(id, "a request of the inbox goes on when the gateway starts again");
            }
            Err(Interruption::Lost(ResponseStoreError::Deleted)) => tracing::info!(id, "it was deleted"),
            Err(Interruption::Lost(error)) => {
                tracing::error!(id, %error, "a request of the inbox cannot go on")
            }
        }
        // Gone only now: who looks for it finds it here or as it is kept.
        drop(self.registration);
    }

    async fn run_to_end(&self) -> Result<InboxState, Interruption> {
        let row = &self.entry.row;
        self.context.keys().await?;
        if row.delivered {
            let message = "the gateway ended while its client read the answer, so it was not asked for again; send the request again";
            return self.fail(&GatewayError::new(ErrorKind::EngineLost, message)).await;
        }
        if row.attempts >= MAX_ATTEMPTS {
            let message = format!(
                "the gateway ended {} times while it ran, so it is not run again; its log may say why",
                row.attempts
            );
            return self.fail(&GatewayError::new(ErrorKind::PoisonRequest, message)).await;
        }
        let (mut is_leased, mut tries, mut unkept) = (false, 0, 0);
        loop {
            let turns = self.turns().await?;
            let now = unix_seconds();
            if row.expires <= now {
                let message = format!(
                    "the request did not end within the {} hours that it is kept for; send it again",
                    row.expires.saturating_sub(row.created) / 3600
                );
                return self.fail(&GatewayError::new(ErrorKind::DeadlineExceeded, message)).await;
            }
            if !std::mem::replace(&mut is_leased, true) {
                self.context.persist(&row.id, || self.store.lease_request(&row.id, now)).await?;
                self.leased(now);
            }
            // In memory as long as it runs.
            let body = self.body().await?;
            let outcome = RequestOutcome::of_repeated(&row.repeat());
            let response = self.respond(&body, outcome.clone()).await;
            drop(body);
            let wait = retry_after(response.status(), response.headers());
            let wait = match row.response() {
                // A client that waits decides itself whether it tries again.
                None => match wait.filter(|_| !self.entry.is_awaited()) {
                    None => return self.keep(response, outcome).await,
                    wait => wait,
                },
                Some(_) => {
                    match self.end_of_response(response.status(), wait, &outcome, &mut unkept).await? {
                        Some(state) => return Ok(state),
                        None => wait,
                    }
                }
            };
            drop((response, turns));
            tries += 1;
            self.context.wait_to_retry(wait.unwrap_or(RESPONSE_RETRY), tries).await?;
        }
    }

    /// What is sent to its route.
    async fn body(&self) -> Result<InboxBody, Interruption> {
        let id = &self.entry.row.id;
        let read = || {
            let id = id.clone();
            self.store.read(move |store| store.request_body(&id))
        };
        let body = self.context.persist(id, read).await?;
        body.ok_or(Interruption::Lost(ResponseStoreError::Deleted))
    }

    /// How the response in the background ended that was generated again; `None` where it is to be tried once more. What is
    /// kept is the response, and its request is forgotten with its end.
    async fn end_of_response(
        &self,
        status: StatusCode,
        wait: Option<Duration>,
        outcome: &RequestOutcome,
        unkept: &mut u32,
    ) -> Result<Option<InboxState>, Interruption> {
        let is_busy = wait.is_some() || (status.is_success() && outcome.has_failed());
        // A full disk has room again some time.
        let waits = is_busy || status == StatusCode::INSUFFICIENT_STORAGE;
        let id = self.entry.row.id.clone();
        let is_kept = self.store.read(move |store| Ok(store.request_body(&id)?.is_some())).await;
        match is_kept {
            Ok(false) => Ok(Some(InboxState::Done)),
            _ if self.context.stopping.is_cancelled() => Err(Interruption::Stopping),
            _ if waits => Ok(None),
            _ if !status.is_client_error() && *unkept < MAX_ATTEMPTS => {
                *unkept += 1;
                Ok(None)
            }
            _ => self.forget().await.map(Some),
        }
    }

    /// The response in the background that it asks for is not generated again.
    async fn forget(&self) -> Result<InboxState, Interruption> {
        let row = &self.entry.row;
        self.context.persist(&row.id, || self.store.delete_request(&row.owner, &row.id)).await?;
        Ok(InboxState::Failed)
    }

    fn leased(&self, now: u64) {
        self.entry.answer.send_modify(|answer| {
            if answer.leased.replace(now).is_none() {
                self.metrics.inbox_moved(PENDING, -1);
                self.metrics.inbox_moved(LEASED, 1);
            }
        });
    }

    /// Waits for its turn.
    async fn turns(&self) -> Result<Vec<OwnedSemaphorePermit>, Interruption> {
        let mut turns = Vec::new();
        for places in &self.places {
            tokio::select! {
                // They are never closed.
                turn = places.clone().acquire_owned() => turns.extend(turn),
                () = self.context.stopping.cancelled() => return Err(Interruption::Stopping),
            }
        }
        if self.context.stopping.is_cancelled() { Err(Interruption::Stopping) } else { Ok(turns) }
    }

    async fn respond(&self, body: &InboxBody, outcome: RequestOutcome) -> Response {
        let row = &self.entry.row;
        let mut extensions = Extensions::new();
        let unique = match row.response() {
            // Its response has the id that its client knows.
            Some(unique) => {
                extensions.insert(ReplayedResponse { created: row.created });
                unique.into()
            }
            None => RequestId::new(&HeaderMap::new()).unique,
        };
        let id = RequestId { unique, shown: row.request_id.as_str().into() };
        extensions.insert(InboxRequest);
        extensions.insert(outcome);
        let (owner, path) = (&row.owner, &row.path);
        let (headers, body) = (body.headers(), body.body.clone());
        let request = OfflineRequest { owner, what: "request", id, path, headers, body, extensions };
        self.context.respond((self.context.dialect_of)(path), request).await
    }

    /// Keeps an answer as it comes; how it ended.
    async fn keep(&self, response: Response, outcome: RequestOutcome) -> Result<InboxState, Interruption> {
        let (parts, mut body) = response.into_parts();
        let head = AnswerHead::of(parts.status, &parts.headers);
        if !head.is_whole() {
            self.entry.answer.send_modify(|answer| answer.head = Some(head.clone()));
        }
        let mut is_complete = true;
        while let Some(frame) = body.frame().await {
            let Ok(frame) = frame else {
                is_complete = false;
                break;
            };
            let Some(data) = frame.data_ref() else { continue };
            is_complete = self.entry.answer.borrow().tail.end() + data.len() as u64 <= MAX_ANSWER_BYTES;
            if !is_complete {
                break;
            }
            self.entry.answer.send_modify(|answer| answer.tail.bytes.extend_from_slice(data));
            if self.entry.answer.borrow().tail.bytes.len() >= MAX_TAIL_BYTES {
                self.flush().await?;
            }
        }
        drop(body);
        let is_done = is_complete && parts.status.is_success() && !outcome.has_failed();
        if !is_done && self.context.stopping.is_cancelled() {
            // It may have failed for that.
            return Err(Interruption::Stopping);
        }
        if !is_complete {
            let message = format!(
                "the answer broke off, or is longer than the {} MiB that are kept of one",
                MAX_ANSWER_BYTES >> 20
            );
            return self.break_off(&head, &GatewayError::new(ErrorKind::Internal, message)).await;
        }
        self.end(if is_done { InboxState::Done } else { InboxState::Failed }, &head).await
    }

    /// Ends an answer that has a beginning alone: a stream with an error, and a whole one as an error.
    async fn break_off(&self, head: &AnswerHead, error: &GatewayError) -> Result<InboxState, Interruption> {
        if head.is_whole() {
            return self.fail(error).await;
        }
        let (_, body) = self.error_response(error).into_parts();
        let event = head.error_event(&whole(body).await);
        self.entry.answer.send_modify(|answer| answer.tail.bytes.extend_from_slice(&event));
        self.end(InboxState::Failed, head).await
    }

    /// An error in the words of its dialect.
    fn error_response(&self, error: &GatewayError) -> Response {
        let row = &self.entry.row;
        let id = RequestId { unique: "".into(), shown: row.request_id.as_str().into() };
        ((self.context.dialect_of)(&row.path).error_response)(error, &id)
    }

    /// Moves the newest bytes to the store.
    async fn flush(&self) -> Result<(), Interruption> {
        let id = &self.entry.row.id;
        let part = self.entry.answer.borrow().tail.clone();
        self.context.persist(id, || self.store.append_answer(id, part.clone())).await?;
        self.entry
            .answer
            .send_modify(|answer| answer.tail = AnswerPart { start: part.end(), bytes: Vec::new() });
        Ok(())
    }

    /// Keeps this error as the answer.
    async fn fail(&self, error: &GatewayError) -> Result<InboxState, Interruption> {
        let row = &self.entry.row;
        if row.response().is_some() {
            return self.forget().await;
        }
        let (parts, body) = self.error_response(error).into_parts();
        let head = AnswerHead::of(parts.status, &parts.headers);
        let bytes = whole(body).await;
        // What an earlier lease left of an answer goes.
        let now = unix_seconds();
        self.context.persist(&row.id, || self.store.lease_request(&row.id, now)).await?;
        self.leased(now);
        self.entry.answer.send_modify(|answer| {
            answer.head = Some(head.clone());
            answer.tail = AnswerPart { start: 0, bytes };
        });
        self.end(InboxState::Failed, &head).await
    }

    /// The answer has its end, durably.
    async fn end(&self, state: InboxState, head: &AnswerHead) -> Result<InboxState, Interruption> {
        let id = &self.entry.row.id;
        let part = self.entry.answer.borrow().tail.clone();
        let now = unix_seconds();
        let end = || self.store.end_request(id, state, now, head.to_text(), part.clone());
        self.context.persist(id, end).await?;
        self.entry.answer.send_modify(|answer| {
            answer.head = Some(head.clone());
            answer.tail = AnswerPart { start: part.end(), bytes: Vec::new() };
            answer.end = Some(state);
        });
        Ok(state)
    }
}

/// The bytes of an error, which are there.
async fn whole(body: Body) -> Vec<u8> {
    body.collect().await.map(|body| body.to_bytes().to_vec()).unwrap_or_default()
}
