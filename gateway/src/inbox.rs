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
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use thiserror::Error;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::{JoinError, JoinSet};
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
/// Requests of one owner that run at once and whose clients waited when they began: such a client may have left since.
const MAX_AWAITED_PER_OWNER: usize = 128;
/// The same of all owners.
const MAX_AWAITED: usize = 512;
/// What metrics call the states of requests that have not ended.
const PENDING: &str = InboxState::Pending.as_str();
const LEASED: &str = InboxState::Leased.as_str();
/// How often a request is leased: more, and it is what ends the gateway.
const MAX_ATTEMPTS: u32 = 5;

/// A request that is to run, and whether its client waits.
type Beginning = (Arc<InboxEntry>, bool);

/// Requests that have not ended.
pub(crate) struct Inbox {
    store: Arc<ResponseStore>,
    metrics: Arc<Metrics>,
    by_id: Mutex<HashMap<String, Arc<InboxEntry>>>,
    begin: mpsc::UnboundedSender<Beginning>,
    begun: Mutex<Option<mpsc::UnboundedReceiver<Beginning>>>,
    /// Requests that have ended and whose answers are to be published.
    answered: mpsc::UnboundedSender<InboxRow>,
    unpublished: Mutex<Option<mpsc::UnboundedReceiver<InboxRow>>>,
}

/// A request that has not ended.
pub(crate) struct InboxEntry {
    row: InboxRow,
    /// Clients that wait for the answer, and decide themselves what to do where the gateway is busy.
    followers: AtomicUsize,
    answer: watch::Sender<Answer>,
    /// The name under which its answer is published.
    reply: Mutex<Option<String>>,
    cancelled: CancellationToken,
    /// It is durable, and runs or will.
    begun: CancellationToken,
    /// Nothing runs it any more, or it did not begin.
    gone: CancellationToken,
}

/// A client that waits for the answer of a request, until this is dropped.
pub(crate) struct Follower(Arc<InboxEntry>);

impl Follower {
    /// One more of this request.
    pub(crate) fn of(entry: &Arc<InboxEntry>) -> Self {
        entry.followers.fetch_add(1, Ordering::Relaxed);
        Self(entry.clone())
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.0.followers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A request that is to be accepted.
#[derive(Debug)]
pub(crate) struct NewRequest {
    pub(crate) row: InboxRow,
    pub(crate) body: InboxBody,
    /// Whether its client waits for the answer.
    pub(crate) is_awaited: bool,
    /// Whether it is the same message once more: one that failed does not run again for it.
    pub(crate) again: bool,
}

/// What became of it.
pub(crate) enum Accepted {
    /// It runs, or will; with its client, if that waits.
    Running(Arc<InboxEntry>, Option<Follower>),
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
            let entry = Arc::new(InboxEntry::new(row));
            entry.begun.cancel();
            // The other end is here.
            let _ = begin.send((entry.clone(), false));
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

    /// Accepts a request, durably, unless its owner sent it before. It is accepted, or not, also where its client leaves
    /// meanwhile.
    pub(crate) async fn accept(self: &Arc<Self>, new: NewRequest) -> Result<Accepted, AcceptError> {
        let stopped = |error: JoinError| ResponseStoreError::Failed(error.to_string());
        tokio::spawn(self.clone().accept_to_end(new)).await.map_err(stopped)?
    }

    async fn accept_to_end(self: Arc<Self>, new: NewRequest) -> Result<Accepted, AcceptError> {
        let NewRequest { row, body, is_awaited, again } = new;
        let running = |begun: StartedRequest| Accepted::Running(begun.entry, begun.follower);
        loop {
            let known = match row.key.clone() {
                None => None,
                Some(key) => {
                    let owner = row.owner.clone();
                    self.store.read(move |store| store.request_with_key(&owner, &key)).await?
                }
            };
            let Some(known) = known else {
                let (new, body) = (row.clone(), body.clone());
                let insert = async { self.store.insert_request(new, body).await };
                match self.begin(row.clone(), is_awaited, insert).await? {
                    Some(begun) => return Ok(running(begun)),
                    None if row.key.is_some() => continue,
                    None => {
                        let error = "a request without a key has the id of another one";
                        return Err(ResponseStoreError::Failed(error.to_owned()).into());
                    }
                }
            };
            if known.fingerprint != row.fingerprint {
                return Err(AcceptError::OtherRequest(known.id));
            }
            if known.state == InboxState::Done || (known.state == InboxState::Failed && again) {
                return Ok(Accepted::Ended(known.into()));
            }
            let registered = self.by_id.lock().get(&known.id).cloned();
            if let Some(entry) = registered {
                let follower = is_awaited.then(|| Follower::of(&entry));
                // Whoever registered it may find that it has ended, or that there is no room.
                if entry.begins().await {
                    return Ok(Accepted::Running(entry, follower));
                }
                continue;
            }
            let begun = if known.state == InboxState::Failed {
                let (id, now, expires) = (known.id.clone(), unix_seconds(), row.expires);
                let reopen = async { self.store.reopen_request(&id, now, expires).await };
                self.begin(known.reopened(now, expires), is_awaited, reopen).await?
            } else {
                // Nobody runs it: whoever did has lost it, or it has ended since it was read.
                let read = known.clone();
                let is_unchanged = async {
                    let row = self.store.read({
                        let (owner, id) = (read.owner.clone(), read.id.clone());
                        move |store| store.request(&owner, &id)
                    });
                    Ok(row.await?.is_some_and(|row| row == read))
                };
                self.begin(known, is_awaited, is_unchanged).await?
            };
            if let Some(begun) = begun {
                return Ok(running(begun));
            }
            // It ended, or began again, between the two looks.
            tokio::task::yield_now().await;
        }
    }

    /// Begins a request once `keep` has made that durable; `None` where it has not, or where somebody else begins it.
    async fn begin(
        self: &Arc<Self>,
        row: InboxRow,
        is_awaited: bool,
        keep: impl Future<Output = Result<bool, ResponseStoreError>>,
    ) -> Result<Option<StartedRequest>, AcceptError> {
        let Some(registration) = self.register(row)? else { return Ok(None) };
        let entry = registration.entry.clone();
        let follower = is_awaited.then(|| Follower::of(&entry));
        if !keep.await? {
            return Ok(None);
        }
        entry.begun.cancel();
        if self.begin.send((entry.clone(), is_awaited)).is_ok() {
            registration.keep();
        }
        // A gateway that stops begins it when it starts again.
        Ok(Some(StartedRequest { entry, follower }))
    }

    /// Its place among those that have not ended, which is free again where it does not begin; `None` where it has one.
    fn register(self: &Arc<Self>, row: InboxRow) -> Result<Option<Registration>, AcceptError> {
        let mut by_id = self.by_id.lock();
        if by_id.contains_key(&row.id) {
            return Ok(None);
        }
        let owned = by_id.values().filter(|one| one.row.owner == row.owner).count();
        if owned >= MAX_PER_OWNER || by_id.len() >= MAX_UNENDED {
            return Err(AcceptError::TooMany(owned));
        }
        let entry = Arc::new(InboxEntry::new(row));
        by_id.insert(entry.row.id.clone(), entry.clone());
        self.metrics.inbox_moved(PENDING, 1);
        Ok(Some(Registration { inbox: self.clone(), entry, is_kept: false }))
    }

    /// A request of this owner that has begun and not ended.
    pub(crate) fn get(&self, owner: &str, id: &str) -> Option<Arc<InboxEntry>> {
        let by_id = self.by_id.lock();
        by_id.get(id).filter(|entry| entry.row.owner == owner && entry.begun.is_cancelled()).cloned()
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
            Accepted::Running(entry, _) => {
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
        self.store.deliver_answer(&entry.row.id, Some(entry.row.created)).await
    }

    /// Runs every request until `context.stopping`, and then those that run to their ends.
    pub(crate) async fn run(self: Arc<Self>, context: OfflineContext) {
        let Some(mut begun) = self.begun.lock().take() else { return };
        let all = [MAX_RUNNING, MAX_AWAITED].map(|count| Arc::new(Semaphore::new(count)));
        let mut owners: HashMap<String, [Arc<Semaphore>; 2]> = HashMap::new();
        let mut tasks = JoinSet::new();
        loop {
            let (entry, is_awaited) = tokio::select! {
                () = context.stopping.cancelled() => break,
                Some(ended) = tasks.join_next() => {
                    if let Err(error) = ended {
                        tracing::error!(%error, "a request of the inbox stopped; it goes on when the gateway starts again");
                    }
                    continue;
                }
                begun = begun.recv() => match begun {
                    Some(begun) => begun,
                    None => break,
                },
            };
            owners.retain(|_, places| places.iter().any(|one| Arc::strong_count(one) > 1));
            let own = owners.entry(entry.row.owner.clone()).or_insert_with(|| {
                [MAX_RUNNING_PER_OWNER, MAX_AWAITED_PER_OWNER].map(|count| Arc::new(Semaphore::new(count)))
            });
            let [own, all] = [&*own, &all].map(|places| places[usize::from(is_awaited)].clone());
            let run = InboxRun {
                context: context.clone(),
                store: self.store.clone(),
                metrics: self.metrics.clone(),
                registration: Registration { inbox: self.clone(), entry: entry.clone(), is_kept: false },
                entry,
                places: [own, all],
            };
            tasks.spawn(run.run());
        }
        // What would begin now waits for the next start, and nobody for it.
        begun.close();
        while let Some((entry, _)) = begun.recv().await {
            drop(Registration { inbox: self.clone(), entry, is_kept: false });
        }
        while tasks.join_next().await.is_some() {}
    }
}

impl InboxEntry {
    fn new(row: InboxRow) -> Self {
        Self {
            reply: Mutex::new(row.reply.clone()),
            row,
            followers: AtomicUsize::new(0),
            answer: watch::Sender::default(),
            cancelled: CancellationToken::new(),
            begun: CancellationToken::new(),
            gone: CancellationToken::new(),
        }
    }

    /// Whether it begins, or has begun; returns once that is known.
    async fn begins(&self) -> bool {
        tokio::select! {
            biased;
            () = self.begun.cancelled() => true,
            () = self.gone.cancelled() => false,
        }
    }

    /// Whether a client waits for its answer.
    fn is_awaited(&self) -> bool {
        self.followers.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn id(&self) -> &str {
        &self.row.id
    }

    /// As it was when it began.
    pub(crate) fn begun_row(&self) -> &InboxRow {
        &self.row
    }

    /// Whether it asks for a response in the background, which is seen as one.
    pub(crate) fn is_response(&self) -> bool {
        self.row.response().is_some()
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

/// A request that begins, and its client, if that waits.
struct StartedRequest {
    entry: Arc<InboxEntry>,
    follower: Option<Follower>,
}

/// The place of a request among those that have not ended, which is free again when this is dropped.
struct Registration {
    inbox: Arc<Inbox>,
    entry: Arc<InboxEntry>,
    is_kept: bool,
}

impl Registration {
    fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        let mut by_id = self.inbox.by_id.lock();
        // It is only its own place that it leaves.
        if by_id.get(&self.entry.row.id).is_some_and(|entry| Arc::ptr_eq(entry, &self.entry)) {
            by_id.remove(&self.entry.row.id);
            drop(by_id);
            let state = if self.entry.answer.borrow().leased.is_some() { LEASED } else { PENDING };
            self.inbox.metrics.inbox_moved(state, -1);
        }
        self.entry.gone.cancel();
    }
}
