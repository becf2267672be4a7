//! The inbox: requests that must not be lost. Each is on the disk before its client is told that it is accepted, runs whether
//! its client waits or not, and its answer is kept. Here is which of them run; `run` runs one. Not here: what clients see of
//! them, see `serving::inbox`.
//!
//! ```text
//! accept ─▶ pending ─▶ leased ─▶ done or failed          each arrow is a commit
//!                        │  ▲
//!                        └──┘ the gateway ended: it runs again, unless a client had a part of its answer
//! ```

mod answer;
mod preference;
mod run;

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use thiserror::Error;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;
use crate::offline::OfflineContext;
use crate::response_store::{InboxBody, InboxRow, InboxState, ResponseStore, ResponseStoreError};
use crate::serving::unix_seconds;
use answer::Answer;
pub(crate) use answer::{AnswerHead, NextBytes};
pub(crate) use preference::{IDEMPOTENCY_KEY, InboxPreference, PREFER};
use run::InboxRun;

/// Requests of one owner that have not ended.
const MAX_PER_OWNER: usize = 1000;
/// Requests of all owners that have not ended.
const MAX_UNENDED: usize = 10_000;
/// Requests of one owner that run at once while nobody waits for their answers; the others wait for their turn.
const MAX_RUNNING_PER_OWNER: usize = 32;
/// The same of all owners.
const MAX_RUNNING: usize = 64;
/// What metrics call the states of requests that have not ended.
const PENDING: &str = InboxState::Pending.as_str();
const LEASED: &str = InboxState::Leased.as_str();
/// How often a request is leased: more, and it is what ends the gateway.
const MAX_ATTEMPTS: u32 = 5;

/// Requests that have not ended.
pub(crate) struct Inbox {
    store: Arc<ResponseStore>,
    metrics: Arc<Metrics>,
    by_id: Mutex<HashMap<String, Arc<InboxEntry>>>,
    begin: mpsc::UnboundedSender<Arc<InboxEntry>>,
    begun: Mutex<Option<mpsc::UnboundedReceiver<Arc<InboxEntry>>>>,
    /// Requests that have ended and whose answers are to be published.
    answered: mpsc::UnboundedSender<InboxRow>,
    unpublished: Mutex<Option<mpsc::UnboundedReceiver<InboxRow>>>,
}

/// A request that has not ended.
pub(crate) struct InboxEntry {
    row: InboxRow,
    /// Whether its client waits for the answer, and decides itself what to do where the gateway is busy.
    is_awaited: bool,
    answer: watch::Sender<Answer>,
    /// The name under which its answer is published.
    reply: Mutex<Option<String>>,
    cancelled: CancellationToken,
    /// Nothing runs it any more.
    gone: CancellationToken,
}

/// A request that is to be accepted.
#[derive(Debug)]
pub(crate) struct NewRequest {
    pub(crate) row: InboxRow,
    pub(crate) body: InboxBody,
    /// Whether its client waits for the answer.
    pub(crate) is_awaited: bool,
}

/// What became of it.
pub(crate) enum Accepted {
    /// It runs, or will.
    Running(Arc<InboxEntry>),
    /// Its owner sent it before with the same key, and this is where it is.
    Ended(Box<InboxRow>),
}

/// Why a request is not accepted.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(crate) enum AcceptError {
    /// So many of its owner have not ended.
    #[error("{0} requests have not ended")]
    TooMany(usize),
    /// Its owner sent another request with the same key.
    #[error("the key belongs to request {0}")]
    OtherRequest(String),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] ResponseStoreError),
}

impl Inbox {
    /// The inbox of this store; what has not ended begins with [`Inbox::run`].
    pub(crate) fn open(store: Arc<ResponseStore>, metrics: Arc<Metrics>) -> Result<Self, ResponseStoreError> {
        let (begin, begun) = mpsc::unbounded_channel();
        let mut by_id = HashMap::new();
        metrics.inbox_moved(LEASED, 0);
        metrics.inbox_moved(PENDING, 0);
        for row in store.unended_requests()? {
            metrics.inbox_moved(PENDING, 1);
            let entry = Arc::new(InboxEntry::new(row, false));
            // The other end is here.
            let _ = begin.send(entry.clone());
            by_id.insert(entry.row.id.clone(), entry);
        }
        let (answered, unpublished) = mpsc::unbounded_channel();
        for row in store.unpublished_requests()? {
            let _ = answered.send(row);
        }
        let (by_id, begun, unpublished) =
            (Mutex::new(by_id), Mutex::new(Some(begun)), Mutex::new(Some(unpublished)));
        Ok(Self { store, metrics, by_id, begin, begun, answered, unpublished })
    }

    /// Accepts a request, durably, unless its owner sent it before.
    pub(crate) async fn accept(&self, new: NewRequest) -> Result<Accepted, AcceptError> {
        let NewRequest { row, body, is_awaited } = new;
        let known = |row: &InboxRow| row.key.clone().map(|key| (row.owner.clone(), key));
        let Some((owner, key)) = known(&row) else {
            return self.begin(row, body, is_awaited).await?.map(Accepted::Running).ok_or_else(|| {
                ResponseStoreError::Failed("a request without a key has the id of another one".to_owned())
                    .into()
            });
        };
        let fingerprint = row.fingerprint.clone();
        loop {
            if let Some(entry) = self.begin(row.clone(), body.clone(), is_awaited).await? {
                return Ok(Accepted::Running(entry));
            }
            let (of, with) = (owner.clone(), key.clone());
            let known = self.store.read(move |store| store.request_with_key(&of, &with)).await?;
            let Some(known) = known else {
                // It was deleted meanwhile.
                continue;
            };
            if known.fingerprint != fingerprint {
                return Err(AcceptError::OtherRequest(known.id));
            }
            if known.state == InboxState::Failed {
                if let Some(entry) = self.begin_again(known, row.expires, is_awaited).await? {
                    return Ok(Accepted::Running(entry));
                }
            } else if known.state.has_ended() {
                return Ok(Accepted::Ended(known.into()));
            } else if let Some(entry) = self.get(&owner, &known.id) {
                return Ok(Accepted::Running(entry));
            }
            // It ended, or began again, between the two looks.
            tokio::task::yield_now().await;
        }
    }

    /// Keeps and begins a request; `None` where its owner has one with its key.
    async fn begin(
        &self,
        row: InboxRow,
        body: InboxBody,
        is_awaited: bool,
    ) -> Result<Option<Arc<InboxEntry>>, AcceptError> {
        let (registration, entry) = self.register(row.clone(), is_awaited)?;
        if !self.store.insert_request(row, body).await? {
            return Ok(None);
        }
        registration.keep();
        let _ = self.begin.send(entry.clone());
        Ok(Some(entry))
    }

    /// Begins a request again that has failed; `None` where somebody else does.
    async fn begin_again(
        &self,
        known: InboxRow,
        expires: u64,
        is_awaited: bool,
    ) -> Result<Option<Arc<InboxEntry>>, AcceptError> {
        let (id, now) = (known.id.clone(), unix_seconds());
        if self.by_id.lock().contains_key(&id) {
            return Ok(None);
        }
        let row = InboxRow {
            state: InboxState::Pending,
            attempts: 0,
            delivered: false,
            leased: None,
            ended: None,
            head: None,
            created: now,
            expires,
            ..known
        };
        let (registration, entry) = self.register(row, is_awaited)?;
        if !self.store.reopen_request(&id, now, expires).await? {
            return Ok(None);
        }
        registration.keep();
        let _ = self.begin.send(entry.clone());
        Ok(Some(entry))
    }

    fn register(
        &self,
        row: InboxRow,
        is_awaited: bool,
    ) -> Result<(Registration<&Self>, Arc<InboxEntry>), AcceptError> {
        let id = row.id.clone();
        let mut by_id = self.by_id.lock();
        let owned = by_id.values().filter(|one| one.row.owner == row.owner).count();
        if owned >= MAX_PER_OWNER || by_id.len() >= MAX_UNENDED {
            return Err(AcceptError::TooMany(owned));
        }
        let entry = Arc::new(InboxEntry::new(row, is_awaited));
        by_id.insert(id.clone(), entry.clone());
        self.metrics.inbox_moved(PENDING, 1);
        // Its place is free again where the client leaves or the store fails.
        Ok((Registration { inbox: self, id: Some(id) }, entry))
    }

    /// A request of this owner that has not ended.
    pub(crate) fn get(&self, owner: &str, id: &str) -> Option<Arc<InboxEntry>> {
        self.by_id.lock().get(id).filter(|entry| entry.row.owner == owner).cloned()
    }

    /// Requests that have ended and whose answers are to be published, one after the other; for one publisher.
    pub(crate) fn unpublished(&self) -> Option<mpsc::UnboundedReceiver<InboxRow>> {
        self.unpublished.lock().take()
    }

    /// The answer of a request that was accepted is published under this name; where it was before, once more, unless the
    /// broker has only delivered the same message `again`.
    pub(crate) async fn publish(
        &self,
        accepted: &Accepted,
        name: &str,
        again: bool,
    ) -> Result<(), ResponseStoreError> {
        match accepted {
            Accepted::Ended(row) if again && row.reply.as_deref() == Some(name) => {}
            Accepted::Ended(row) => {
                self.store.reply_to_request(&row.id, name, false).await?;
                let _ = self.answered.send(InboxRow { reply: Some(name.to_owned()), ..InboxRow::clone(row) });
            }
            Accepted::Running(entry) => {
                if entry.row.reply.as_deref() != Some(name) {
                    self.store.reply_to_request(&entry.row.id, name, false).await?;
                    *entry.reply.lock() = Some(name.to_owned());
                    self.publish_end(entry);
                }
            }
        }
        Ok(())
    }

    /// An answer was published.
    pub(crate) async fn published(&self, row: &InboxRow) -> Result<(), ResponseStoreError> {
        let name = row.reply.as_deref().unwrap_or_default();
        self.store.reply_to_request(&row.id, name, true).await
    }

    /// Hands a request to the publisher, once, when it has ended and is to be published.
    fn publish_end(&self, entry: &InboxEntry) {
        if entry.answer.borrow().end.is_some()
            && let Some(name) = entry.reply.lock().take()
        {
            let _ = self.answered.send(InboxRow { reply: Some(name), ..entry.row.clone() });
        }
    }

    /// A client is about to get a part of this answer, which has no end yet: the request does not run again.
    pub(crate) async fn deliver(&self, entry: &InboxEntry) -> Result<(), ResponseStoreError> {
        self.store.deliver_answer(&entry.row.id).await
    }

    /// Runs every request until `context.stopping`, and then those that run to their ends.
    pub(crate) async fn run(self: Arc<Self>, context: OfflineContext) {
        let Some(mut begun) = self.begun.lock().take() else { return };
        let all = Arc::new(Semaphore::new(MAX_RUNNING));
        let mut owners: HashMap<String, Arc<Semaphore>> = HashMap::new();
        let mut tasks = JoinSet::new();
        loop {
            let entry = tokio::select! {
                () = context.stopping.cancelled() => break,
                Some(ended) = tasks.join_next() => {
                    if let Err(error) = ended {
                        tracing::error!(%error, "a request of the inbox stopped; it goes on when the gateway starts again");
                    }
                    continue;
                }
                begun = begun.recv() => match begun {
                    Some(entry) => entry,
                    None => break,
                },
            };
            owners.retain(|_, owner| Arc::strong_count(owner) > 1);
            let owner = entry.row.owner.clone();
            let owner =
                owners.entry(owner).or_insert_with(|| Arc::new(Semaphore::new(MAX_RUNNING_PER_OWNER)));
            let run = InboxRun {
                context: context.clone(),
                store: self.store.clone(),
                metrics: self.metrics.clone(),
                registration: Registration { id: Some(entry.row.id.clone()), inbox: self.clone() },
                entry,
                places: [owner.clone(), all.clone()],
            };
            tasks.spawn(run.run());
        }
        while tasks.join_next().await.is_some() {}
    }
}

impl InboxEntry {
    fn new(row: InboxRow, is_awaited: bool) -> Self {
        Self {
            reply: Mutex::new(row.reply.clone()),
            row,
            is_awaited,
            answer: watch::Sender::default(),
            cancelled: CancellationToken::new(),
            gone: CancellationToken::new(),
        }
    }

    /// As it is now.
    pub(crate) fn row(&self) -> InboxRow {
        let answer = self.answer.borrow();
        let attempts = self.row.attempts + u32::from(answer.leased.is_some());
        match answer.leased {
            Some(leased) => {
                InboxRow { state: InboxState::Leased, leased: Some(leased), attempts, ..self.row.clone() }
            }
            None => self.row.clone(),
        }
    }

    /// Ends it early; returns once nothing runs it.
    pub(crate) async fn cancel(&self) {
        self.cancelled.cancel();
        self.gone.cancelled().await;
    }

    /// Returns once nothing runs it.
    pub(crate) async fn gone(&self) {
        self.gone.cancelled().await;
    }

    /// The head of its answer, once it is known; `None` where nothing runs it any more.
    pub(crate) async fn head(&self) -> Option<AnswerHead> {
        let mut answer = self.answer.subscribe();
        tokio::select! {
            biased;
            answer = answer.wait_for(|answer| answer.head.is_some()) => answer.ok()?.head.clone(),
            () = self.gone.cancelled() => None,
        }
    }

    /// Where the bytes of its answer from this number on are, once there are any.
    pub(crate) async fn bytes(&self, from: u64) -> NextBytes {
        let mut answer = self.answer.subscribe();
        tokio::select! {
            biased;
            answer = answer.wait_for(|answer| answer.has(from) || answer.end.is_some()) => match answer {
                Ok(answer) => answer.bytes(from),
                Err(_) => NextBytes::Interrupted,
            },
            () = self.gone.cancelled() => NextBytes::Interrupted,
        }
    }
}

/// The place of a request among those that have not ended, which is free again when this is dropped.
struct Registration<I: std::ops::Deref<Target = Inbox>> {
    inbox: I,
    id: Option<String>,
}

impl<I: std::ops::Deref<Target = Inbox>> Registration<I> {
    fn keep(mut self) {
        self.id = None;
    }
}

impl<I: std::ops::Deref<Target = Inbox>> Drop for Registration<I> {
    fn drop(&mut self) {
        let removed = self.id.take().and_then(|id| self.inbox.by_id.lock().remove(&id));
        if let Some(entry) = removed {
            let state = if entry.answer.borrow().leased.is_some() { LEASED } else { PENDING };
            self.inbox.metrics.inbox_moved(state, -1);
            entry.gone.cancel();
        }
    }
}
