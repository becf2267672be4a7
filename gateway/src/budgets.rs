//! Budgets: what requests may use, reserved before they are answered and settled when they end. The limits hold for all gateways
//! together: each asks for grants in the status of the Budget, and its requests stay within these.
//!
//! ```text
//! request ─▶ reserve: within the grant? ──▶ journal ──▶ engine or provider ──▶ settle ──▶ journal
//!                         │ no   ▲                                               │
//!                         ▼      │                                               ▼
//!               claim: a larger grant, by compare and swap          give back, every two seconds
//! ```

mod account;
mod amount;
mod claim;
mod follow;
mod journal;
mod memory;
mod object;
mod reservation;
mod window;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use jiff::Timestamp;
use parking_lot::Mutex;
use russet_crds::{Budget, BudgetScope};
use tokio::sync::watch;

use crate::api_timeout::WriteError;
use crate::duration::short_text;
use crate::error::{ErrorKind, GatewayError, RETRY_AFTER};
use crate::metrics::Metrics;
use account::{Accounts, ClaimError, Hold};
use amount::{Amount, Thing};
use claim::Shortage;
pub(crate) use follow::follow;
use journal::{AccountKey, Journal, JournalEntry, JournalError};
pub(crate) use memory::MemoryBudgets;
use object::KubernetesBudgets;
use reservation::EntryHold;
pub(crate) use reservation::Reservation;
use window::WindowKey;

/// Writes of one status that others came before.
const MAX_CONFLICTS: u32 = 50;
/// Looks for what another gateway gives back: it does so every two seconds.
const MAX_LOOKS: u32 = 6;
/// Time between two looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// An answer that is cut for want of tokens has at least so many.
const MIN_ANSWER_TOKENS: u64 = 64;

/// Where Budgets are.
pub(crate) trait BudgetApi: Send + Sync {
    /// The Budget as it is now.
    fn read<'a>(&'a self, namespace: &'a str, name: &'a str) -> BoxFuture<'a, Result<Budget, WriteError>>;

    /// Writes the status of a Budget in place of the version that this object is; 409 where that is not the latest.
    fn write_status<'a>(&'a self, budget: &'a Budget) -> BoxFuture<'a, Result<Budget, WriteError>>;
}

/// The Budgets of a cluster, as this gateway keeps them.
pub(crate) struct Budgets {
    gateway: String,
    api: Box<dyn BudgetApi>,
    journal: Option<Journal>,
    /// What was used before this gateway started.
    recovered: HashMap<AccountKey, Amount>,
    entries: Mutex<BTreeMap<(String, String), Arc<Entry>>>,
    /// Budgets that cannot be decoded.
    unreadable: Mutex<BTreeSet<(String, String)>>,
    listed: watch::Sender<bool>,
    last_id: AtomicU64,
    metrics: Arc<Metrics>,
}

/// One Budget.
struct Entry {
    accounts: Mutex<Accounts>,
    /// One write of its status at a time.
    writing: tokio::sync::Mutex<()>,
}

impl Entry {
    fn key(&self, window: WindowKey) -> AccountKey {
        self.accounts.lock().key(window)
    }

    fn limits_money(&self) -> bool {
        self.accounts.lock().limits_money()
    }

    fn settle(&self, hold: &Hold, used: Amount) {
        self.accounts.lock().settle(hold, used);
    }
}

/// Whose request it is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BudgetSubject<'a> {
    /// The namespace of the model.
    pub(crate) namespace: &'a str,
    /// The name of the key.
    pub(crate) key: Option<&'a str>,
    /// Its owner.
    pub(crate) owner: Option<&'a str>,
    /// The name of the ModelRoute that the model's name is of.
    pub(crate) route: Option<&'a str>,
}

impl BudgetSubject<'_> {
    fn is_in(&self, namespace: &str, scope: &BudgetScope) -> bool {
        let BudgetScope { keys, owners, routes } = scope;
        let matches = |names: &[String], name: Option<&str>| {
            names.is_empty() || name.is_some_and(|name| names.iter().any(|one| one == name))
        };
        self.namespace == namespace
            && matches(keys, self.key)
            && matches(owners, self.owner)
            && matches(routes, self.route)
    }
}

/// What a request may need.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestBound {
    /// Tokens of its prompt, at most.
    pub(crate) prompt_tokens: u64,
    /// Tokens of its answer, at most; `None` where it does not say.
    pub(crate) answer_tokens: Option<u32>,
}

impl Budgets {
    /// The Budgets of an API server, with a journal in that file. Without one, what a gateway was granted and did not use
    /// when it is killed stays lost until the window ends.
    pub(crate) fn open(client: kube::Client, journal: Option<&Path>, metrics: Arc<Metrics>) -> Self {
        Self::with_api(Box::new(KubernetesBudgets::new(client)), journal, metrics)
    }

    /// Budgets in memory: there is no API server.
    pub(crate) fn in_memory(memory: &MemoryBudgets, journal: Option<&Path>, metrics: Arc<Metrics>) -> Self {
        let budgets = Self::with_api(Box::new(memory.clone()), journal, metrics);
        budgets.apply(memory.objects.lock().values(), BTreeSet::new());
        budgets
    }

    fn with_api(api: Box<dyn BudgetApi>, journal: Option<&Path>, metrics: Arc<Metrics>) -> Self {
        let opened = journal.and_then(|path| {
            let log = |error: &JournalError| {
                let path = path.display();
                tracing::error!("{error}; what requests used is kept in memory until {path} can be written");
            };
            Journal::open(path, Timestamp::now().as_second()).inspect_err(log).ok()
        });
        let (journal, gateway, recovered) = match opened {
            Some((journal, recovered)) => (Some(journal), recovered.gateway, recovered.used),
            None => (None, journal::new_name(), HashMap::new()),
        };
        let (entries, unreadable) = (Mutex::default(), Mutex::default());
        let (listed, last_id) = (watch::Sender::new(false), AtomicU64::new(0));
        Self { gateway, api, journal, recovered, entries, unreadable, listed, last_id, metrics }
    }

    /// Whether the Budgets were listed once; before that no request is answered.
    pub(crate) fn listed(&self) -> watch::Receiver<bool> {
        self.listed.subscribe()
    }

    /// Whether there are none, so that nobody has to look whose request it is.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.lock().is_empty() && self.unreadable.lock().is_empty()
    }

    fn next_id(&self) -> u64 {
        self.last_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Takes over what exists now.
    fn apply<'a>(&self, objects: impl Iterator<Item = &'a Budget>, unreadable: BTreeSet<(String, String)>) {
        let mut entries = self.entries.lock();
        let mut seen = BTreeSet::new();
        for object in objects {
            let metadata = &object.metadata;
            let name =
                (metadata.namespace.clone().unwrap_or_default(), metadata.name.clone().unwrap_or_default());
            match entries.get(&name) {
                Some(entry) => entry.accounts.lock().update(object.clone()),
                None => {
                    let accounts = Mutex::new(Accounts::new(object.clone(), &self.recovered));
                    entries.insert(
                        name.clone(),
                        Arc::new(Entry { accounts, writing: tokio::sync::Mutex::default() }),
                    );
                }
            }
            seen.insert(name);
        }
        entries.retain(|name, _| seen.contains(name));
        *self.unreadable.lock() = unreadable;
        self.listed.send_replace(true);
    }

    /// Reserves what a request may need in all Budgets that count it; `None` where none does. An error says which has too little
    /// left.
    pub(crate) async fn reserve(
        self: &Arc<Self>,
        subjects: &[BudgetSubject<'_>],
        bound: RequestBound,
    ) -> Result<Option<Reservation>, GatewayError> {
        let entries = self.of(subjects)?;
        if entries.is_empty() {
            return Ok(None);
        }
        let RequestBound { prompt_tokens, answer_tokens } = bound;
        let default = entries.iter().filter_map(|entry| {
            let accounts = entry.accounts.lock();
            accounts.limits_answers().then_some(accounts.object.spec.default_max_tokens)
        });
        let most = answer_tokens.or(default.min()).unwrap_or(u32::MAX);
        let need =
            |answer: u64| Amount { requests: 1, tokens: prompt_tokens.saturating_add(answer), money: 0 };
        let (held, answer) = match self.hold_all(&entries, need(most.into())).await {
            Ok(held) => (Ok(held), most),
            // One that does not say how long its answer may be gets what is left.
            Err(refusal) => match refusal.tokens_left().and_then(|left| left.checked_sub(prompt_tokens)) {
                Some(left) if answer_tokens.is_none() && left >= MIN_ANSWER_TOKENS => {
                    let less = u32::try_from(left).unwrap_or(u32::MAX).min(most);
                    (self.hold_all(&entries, need(less.into())).await, less)
                }
                _ => (Err(refusal), most),
            },
        };
        self.count(&entries, held.is_err());
        let held = held.map_err(|refusal| refusal.error())?;
        Reservation::new(self.clone(), held, prompt_tokens, answer).recorded().await.map(Some)
    }

    fn count(&self, entries: &[Arc<Entry>], is_refused: bool) {
        for entry in entries {
            self.metrics.budget_request(&full_name(&entry.accounts.lock().object), is_refused);
        }
    }

    /// The Budgets that count a request of any of these.
    fn of(&self, subjects: &[BudgetSubject<'_>]) -> Result<Vec<Arc<Entry>>, GatewayError> {
        let unreadable = self.unreadable.lock();
        let hidden =
            unreadable.iter().find(|(namespace, _)| subjects.iter().any(|one| one.namespace == namespace));
        if let Some((namespace, name)) = hidden {
            let message = format!(
                "Budget {namespace}/{name} cannot be read by this release of the gateway, so nothing is answered in its \
                 namespace; change or delete it"
            );
            return Err(GatewayError::new(ErrorKind::ModelNotReady, message));
        }
        let entries = self.entries.lock();
        let counts = |((namespace, _), entry): &(&(String, String), &Arc<Entry>)| {
            let accounts = entry.accounts.lock();
            subjects.iter().any(|one| one.is_in(namespace, &accounts.object.spec.scope))
        };
        Ok(entries.iter().filter(counts).map(|(_, entry)| entry.clone()).collect())
    }

    /// Reserves so much in all of them or in none.
    async fn hold_all(&self, entries: &[Arc<Entry>], need: Amount) -> Result<Vec<EntryHold>, Refusal> {
        let mut held = Vec::new();
        for entry in entries {
            match self.hold(entry, need).await {
                Ok(more) => {
                    held.extend(more.into_iter().map(|hold| EntryHold { entry: entry.clone(), hold }))
                }
                Err(refusal) => {
                    self.release(held);
                    return Err(refusal);
                }
            }
        }
        Ok(held)
    }

    /// Gives back what was reserved and is not used.
    fn release(&self, held: Vec<EntryHold>) {
        for EntryHold { entry, hold } in held {
            entry.settle(&hold, Amount::ZERO);
        }
    }

    /// Reserves so much of one Budget, and asks for a larger grant where this gateway has too little.
    async fn hold(&self, entry: &Entry, need: Amount) -> Result<Vec<Hold>, Refusal> {
        let held = || entry.accounts.lock().try_hold(need, &self.recovered, Timestamp::now());
        let (mut conflicts, mut looks) = (0, 0);
        loop {
            if let Some(held) = held() {
                return Ok(held);
            }
            let writing = entry.writing.lock().await;
            // Whoever wrote before may have asked for enough.
            if let Some(held) = held() {
                return Ok(held);
            }
            let (object, claimed) = {
                let mut accounts = entry.accounts.lock();
                let claimed = accounts.claim(&self.gateway, need, &self.recovered, Timestamp::now());
                (accounts.object.clone(), claimed)
            };
            let name = full_name(&object);
            match claimed {
                Ok(status) => {
                    let object = self.described(entry, Budget { status: Some(status), ..object });
                    match self.write(entry, &object).await {
                        Ok(()) => {}
                        Err(Unwritten::Conflict) if conflicts < MAX_CONFLICTS => conflicts += 1,
                        Err(Unwritten::Conflict) => {
                            return Err(Refusal::Unavailable {
                                name,
                                cause: "others write its status all the time".into(),
                            });
                        }
                        Err(Unwritten::Failed(cause)) => return Err(Refusal::Unavailable { name, cause }),
                    }
                }
                Err(ClaimError::Short(Shortage::Limit { is_held: true, .. })) if looks < MAX_LOOKS => {
                    looks += 1;
                    drop(writing);
                    tokio::time::sleep(LOOK_INTERVAL).await;
                    let _writing = entry.writing.lock().await;
                    self.read(entry).await.map_err(|cause| Refusal::Unavailable { name, cause })?;
                }
                Err(ClaimError::Short(shortage)) => return Err(Refusal::Short { name, shortage }),
                Err(ClaimError::UnknownPeriod) => return Err(Refusal::UnknownPeriod { name }),
            }
        }
    }

    /// Writes a status in place of the one that was read. Afterwards the entry has the latest object.
    async fn write(&self, entry: &Entry, object: &Budget) -> Result<(), Unwritten> {
        match self.api.write_status(object).await {
            Ok(written) => {
                entry.accounts.lock().written(written, &self.gateway);
                Ok(())
            }
            Err(error) if error.code() == Some(409) => {
                self.read(entry).await.map_err(Unwritten::Failed)?;
                Err(Unwritten::Conflict)
            }
            Err(error) => Err(Unwritten::Failed(error.cause)),
        }
    }

    async fn read(&self, entry: &Entry) -> Result<(), String> {
        let (namespace, name) = {
            let accounts = entry.accounts.lock();
            let metadata = &accounts.object.metadata;
            (metadata.namespace.clone().unwrap_or_default(), metadata.name.clone().unwrap_or_default())
        };
        let object = self.api.read(&namespace, &name).await.map_err(|error| error.cause)?;
        entry.accounts.lock().update(object);
        Ok(())
    }

    /// The object with what its status says for people.
    fn described(&self, entry: &Entry, object: Budget) -> Budget {
        let now = Timestamp::now();
        let usage = {
            let accounts = entry.accounts.lock();
            object.status.as_ref().map(|status| accounts.usage(status, now)).unwrap_or_default()
        };
        object::described(object, &usage, now)
    }

    /// Says what was used, and gives back what is not needed, of every Budget. Returns why a status was not written.
    async fn give_back(&self) -> Option<String> {
        let entries: Vec<Arc<Entry>> = self.entries.lock().values().cloned().collect();
        let mut failed = None;
        for entry in entries {
            let _writing = entry.writing.lock().await;
            let before = entry.accounts.lock().object.clone();
            let status = entry.accounts.lock().give_back(&self.gateway, Timestamp::now());
            let after = self.described(&entry, Budget { status: Some(status), ..before.clone() });
            if after == before {
                continue;
            }
            match self.write(&entry, &after).await {
                // The next round has the latest object.
                Ok(()) | Err(Unwritten::Conflict) => {}
                Err(Unwritten::Failed(cause)) => {
                    failed = Some(format!(
                        "the status of Budget {} cannot be written: {cause}",
                        full_name(&before)
                    ));
                }
            }
        }
        failed
    }

    /// Gives back everything, when no request comes any more.
    pub(crate) async fn close(&self) {
        // The first round may keep a little for requests to come, or meet another gateway's write.
        for _ in 0..3 {
            self.give_back().await;
        }
    }

    /// Writes entries to the journal, and waits until they are on the disk.
    async fn record(&self, entries: Vec<JournalEntry>) -> Result<(), GatewayError> {
        let Some(journal) = &self.journal else { return Ok(()) };
        let unwritten = |error: &dyn std::fmt::Display| {
            let message =
                format!("what the request may use cannot be written down, so it is not answered: {error}");
            GatewayError::new(ErrorKind::StoreFull, message)
        };
        match journal.write(entries).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(unwritten(&error)),
            Err(ended) => Err(unwritten(&ended)),
        }
    }

    /// The same; the entries are on their way whether anybody awaits that or not.
    fn record_later(
        self: Arc<Self>,
        entries: Vec<JournalEntry>,
    ) -> impl Future<Output = Result<(), GatewayError>> {
        let written = self.journal.as_ref().map(|journal| journal.write(entries));
        async move {
            if let Some(written) = written {
                let _ = written.await;
            }
            Ok(())
        }
    }
}

/// Why a status was not written.
enum Unwritten {
    /// Another one came before.
    Conflict,
    /// The API server refused it, or could not be reached.
    Failed(String),
}

/// Why a request is not answered.
#[derive(Debug)]
enum Refusal {
    Short { name: String, shortage: Shortage },
    UnknownPeriod { name: String },
    Unavailable { name: String, cause: String },
}

impl Refusal {
    /// Tokens that are left, where tokens are what is short.
    fn tokens_left(&self) -> Option<u64> {
        match self {
            Self::Short {
                shortage: Shortage::Limit { thing: Thing::Tokens, limit, used, reserved, .. },
                ..
            } => Some(limit.minus(*used).minus(*reserved).tokens),
            _ => None,
        }
    }

    fn error(&self) -> GatewayError {
        match self {
            Self::Short {
                name,
                shortage: Shortage::Limit { window, thing, limit, used, reserved, need, .. },
            } => {
                let left = limit.minus(*used).minus(*reserved);
                let until = time_until(window.end);
                let running = match thing.of(*reserved) {
                    0 => String::new(),
                    _ => format!(", {} are reserved by requests that run", thing.shown(*reserved)),
                };
                let message = format!(
                    "Budget {name} allows {} {what} per {per}: {} are used{running}, {} are left, and this request may need {}; \
                     the next {per} begins in {}",
                    thing.shown(*limit),
                    thing.shown(*used),
                    thing.shown(left),
                    thing.shown(*need),
                    short_text(until),
                    what = thing.as_str(),
                    per = window.per.as_str(),
                );
                let is_short = window.per == russet_crds::BudgetPeriod::Minute;
                let kind = if is_short { ErrorKind::QuotaExceeded } else { ErrorKind::BudgetExceeded };
                GatewayError::new(kind, message).retry_after(until)
            }
            Self::Short { name, shortage: Shortage::Clock(window) } => {
                let message = format!(
                    "Budget {name} has newer windows than the {} of {}, so the clock of this gateway is or was wrong; set it",
                    window.per.as_str(),
                    window.start
                );
                GatewayError::new(ErrorKind::ModelNotReady, message)
            }
            Self::UnknownPeriod { name } => {
                let message = format!(
                    "Budget {name} has a limit per a length of time that this release does not know, so nothing is answered"
                );
                GatewayError::new(ErrorKind::ModelNotReady, message)
            }
            Self::Unavailable { name, cause } => {
                let message = format!("the gateway cannot ask for more of Budget {name}: {cause}");
                GatewayError::new(ErrorKind::ModelNotReady, message).retry_after(RETRY_AFTER)
            }
        }
    }
}

/// The time until a moment.
fn time_until(end: Timestamp) -> Duration {
    Duration::try_from(end.duration_since(Timestamp::now())).unwrap_or(Duration::ZERO)
}

fn full_name(object: &Budget) -> String {
    let metadata = &object.metadata;
    format!(
        "{}/{}",
        metadata.namespace.as_deref().unwrap_or_default(),
        metadata.name.as_deref().unwrap_or_default()
    )
}

#[cfg(test)]
mod tests;
