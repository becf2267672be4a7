//! Batches: requests of a file that run without a client, at the lowest priority, and whose results are kept. Here is which
//! of them run; `runner` runs one. Not here: what clients see of them, which is the dialects'.

mod input;
mod line;
mod record;
mod result;
mod runner;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use thiserror::Error;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::offline::OfflineContext;
use crate::response_store::{ResponseStore, ResponseStoreError};
pub(crate) use input::{LineSplitter, MAX_LINE_BYTES};
pub(crate) use record::{Batch, BatchRecord, BatchStatus};
pub(crate) use result::{FormatResult, LineOutcome, LineResult};
use runner::BatchRun;

/// Batches of one owner that have not ended: more than a person follows.
const MAX_PER_OWNER: usize = 100;
/// Batches of all owners that have not ended.
const MAX_UNFINISHED: usize = 1000;
/// Batches of one owner that run at once; the others wait.
const MAX_RUNNING_PER_OWNER: usize = 8;
/// Batches that run at once. Each has a part of its input in memory.
const MAX_RUNNING: usize = 32;
/// Lines of all batches that run at once: a few engines' slots. Requests of clients come before those that wait.
const MAX_RUNNING_LINES: usize = 64;
/// How long a store that is busy may take to say that a batch is to end.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(30);

/// The batches that have not ended.
pub(crate) struct Batches {
    store: Arc<ResponseStore>,
    by_id: Mutex<HashMap<String, Arc<RunningBatch>>>,
    begin: mpsc::UnboundedSender<Arc<RunningBatch>>,
    begun: Mutex<Option<mpsc::UnboundedReceiver<Arc<RunningBatch>>>>,
}

/// A batch that has not ended.
pub(crate) struct RunningBatch {
    /// As it is kept, and how many of its lines have results.
    batch: watch::Sender<Batch>,
    cancelled: CancellationToken,
    /// Nobody runs it any more.
    gone: CancellationToken,
}

/// Why a batch cannot begin.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(crate) enum BeginError {
    /// So many have not ended.
    #[error("{0} batches have not ended")]
    TooMany(usize),
    /// The store failed; `Deleted` says that the input is gone.
    #[error(transparent)]
    Store(#[from] ResponseStoreError),
}

impl Batches {
    /// The batches of this store; those that have not ended begin with [`Batches::run`].
    pub(crate) fn open(store: Arc<ResponseStore>) -> Result<Self, ResponseStoreError> {
        let (begin, begun) = mpsc::unbounded_channel();
        let mut by_id = HashMap::new();
        for row in store.unfinished_batches()? {
            let id = row.id.clone();
            match Batch::of_row(row) {
                Ok(batch) => {
                    let running = Arc::new(RunningBatch::new(batch));
                    // The other end is here.
                    let _ = begin.send(running.clone());
                    by_id.insert(id, running);
                }
                Err(error) => tracing::error!(id, %error, "a batch is kept in a form that cannot be read"),
            }
        }
        Ok(Self { store, by_id: Mutex::new(by_id), begin, begun: Mutex::new(Some(begun)) })
    }

    /// Begins a batch, durably. It is not lost once this returns.
    pub(crate) async fn begin(&self, batch: Batch) -> Result<(), BeginError> {
        let (id, row) = (batch.id.clone(), batch.to_row());
        let running = {
            let mut by_id = self.by_id.lock();
            let owned = by_id.values().filter(|one| one.batch.borrow().owner == batch.owner).count();
            if owned >= MAX_PER_OWNER || by_id.len() >= MAX_UNFINISHED {
                return Err(BeginError::TooMany(owned));
            }
            let running = Arc::new(RunningBatch::new(batch));
            by_id.insert(id.clone(), running.clone());
            running
        };
        // Its place is free again where the client leaves or the store fails.
        let registration = Registration { batches: self, id: Some(id) };
        self.store.insert_batch(row).await?;
        registration.keep();
        let _ = self.begin.send(running);
        Ok(())
    }

    /// A batch of this owner that has not ended.
    pub(crate) fn get(&self, owner: &str, id: &str) -> Option<Arc<RunningBatch>> {
        self.by_id.lock().get(id).filter(|running| running.batch.borrow().owner == owner).cloned()
    }

    /// Runs every batch until `context.stopping`, and then to the end of the lines that run.
    pub(crate) async fn run(self: Arc<Self>, context: OfflineContext) {
        let Some(mut begun) = self.begun.lock().take() else { return };
        let (all, lines) =
            (Arc::new(Semaphore::new(MAX_RUNNING)), Arc::new(Semaphore::new(MAX_RUNNING_LINES)));
        let input = Arc::new(Semaphore::new(input::MAX_READ_KIB));
        let mut owners: HashMap<String, Arc<Semaphore>> = HashMap::new();
        let mut tasks = JoinSet::new();
        loop {
            let running = tokio::select! {
                () = context.stopping.cancelled() => break,
                Some(ended) = tasks.join_next() => {
                    if let Err(error) = ended {
                        tracing::error!(%error, "a batch stopped; it goes on when the gateway starts again");
                    }
                    continue;
                }
                begun = begun.recv() => match begun {
                    Some(running) => running,
                    None => break,
                },
            };
            owners.retain(|_, owner| Arc::strong_count(owner) > 1);
            let owner = running.batch.borrow().owner.clone();
            let owner =
                owners.entry(owner).or_insert_with(|| Arc::new(Semaphore::new(MAX_RUNNING_PER_OWNER)));
            let run = BatchRun {
                context: context.clone(),
                store: self.store.clone(),
                registration: Registration { id: Some(running.id()), batches: self.clone() },
                running,
                places: [owner.clone(), all.clone()],
                lines: lines.clone(),
                input: input.clone(),
            };
            tasks.spawn(run.run());
        }
        while tasks.join_next().await.is_some() {}
    }
}

impl RunningBatch {
    fn new(batch: Batch) -> Self {
        Self {
            batch: watch::Sender::new(batch),
            cancelled: CancellationToken::new(),
            gone: CancellationToken::new(),
        }
    }

    fn id(&self) -> String {
        self.batch.borrow().id.clone()
    }

    /// As it is now.
    pub(crate) fn batch(&self) -> Batch {
        self.batch.borrow().clone()
    }

    /// Ends it early; returns once it is durable that it ends, or `None` where nobody runs it, or its store has no room.
    pub(crate) async fn cancel(&self) -> Option<Batch> {
        self.cancelled.cancel();
        let mut batch = self.batch.subscribe();
        tokio::select! {
            ending = batch.wait_for(|batch| !batch.record.status.is_working()) => Some(ending.ok()?.clone()),
            () = self.gone.cancelled() => None,
            () = tokio::time::sleep(CANCEL_TIMEOUT) => None,
        }
    }
}

/// The place of a batch among those that have not ended, which is free again when this is dropped.
struct Registration<B: std::ops::Deref<Target = Batches>> {
    batches: B,
    id: Option<String>,
}

impl<B: std::ops::Deref<Target = Batches>> Registration<B> {
    fn keep(mut self) {
        self.id = None;
    }
}

impl<B: std::ops::Deref<Target = Batches>> Drop for Registration<B> {
    fn drop(&mut self) {
        let removed = self.id.take().and_then(|id| self.batches.by_id.lock().remove(&id));
        if let Some(running) = removed {
            running.gone.cancel();
        }
    }
}
