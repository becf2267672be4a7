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
mod rejection;
mod reservation;
mod window;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use jiff::Timestamp;
use kube::ResourceExt as _;
use parking_lot::Mutex;
use russet_crds::{Budget, BudgetScope};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::api_timeout::WriteError;
use crate::error::{ErrorKind, GatewayError};
use crate::metrics::Metrics;
use account::{Accounts, ClaimError};
use amount::Amount;
pub(crate) use follow::follow;
use journal::{AccountKey, Journal, JournalEntry, JournalError, Recovered};
pub(crate) use memory::MemoryBudgets;
use object::KubernetesBudgets;
use rejection::BudgetRejection;
use reservation::EntryHold;
pub(crate) use reservation::{EnergyCharge, Reservation};

/// Writes of one status for one request, most of which others come before.
const MAX_WRITES: u32 = 50;
/// Looks for what another gateway gives back: it does so every two seconds.
const MAX_LOOKS: u32 = 6;
/// Time between two looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// An answer that is cut for want of tokens has at least so many, where its request does not say how long it may be.
const MIN_ANSWER_TOKENS: u32 = 64;
/// The same where it does: many programs always name the most that a model has.
const MIN_CUT_TOKENS: u32 = 1024;

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
    /// Whether the last of that may be missing.
    has_rebooted: bool,
    known: Mutex<KnownBudgets>,
    listed: watch::Sender<bool>,
    last_id: AtomicU64,
    metrics: Arc<Metrics>,
}

/// The Budgets that exist, by namespace and name.
#[derive(Default)]
struct KnownBudgets {
    entries: BTreeMap<(String, String), Arc<Entry>>,
    /// Those that cannot be decoded.
    unreadable: BTreeSet<(String, String)>,
}

/// One Budget.
struct Entry {
    accounts: Mutex<Accounts>,
    /// One write of its status at a time, and when it was read last.
    writing: tokio::sync::Mutex<Instant>,
}

impl Entry {
    fn limits_money(&self) -> bool {
        self.accounts.lock().limits_money()
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
        let (journal, recovered) = opened.unzip();
        let Recovered { gateway, used: recovered, has_rebooted } =
            recovered.unwrap_or_else(|| Recovered { gateway: journal::new_name(), ..Recovered::default() });
        let (known, listed) = (Mutex::default(), watch::Sender::new(false));
        // Those of a process before this one may still be in the journal.
        let last_id = AtomicU64::new(u64::from(rand::random::<u32>()) << 20);
        Self { gateway, api, journal, recovered, has_rebooted, known, listed, last_id, metrics }
    }

    /// Whether the Budgets were listed once; before that no request is answered.
    pub(crate) fn listed(&self) -> watch::Receiver<bool> {
        self.listed.subscribe()
    }

    /// Whether there are none, so that nobody has to look whose request it is.
    pub(crate) fn is_empty(&self) -> bool {
        let known = self.known.lock();
        known.entries.is_empty() && known.unreadable.is_empty()
    }

    fn next_id(&self) -> u64 {
        self.last_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Takes over what exists now.
    fn apply<'a>(&self, objects: impl Iterator<Item = &'a Budget>, unreadable: BTreeSet<(String, String)>) {
        let mut known = self.known.lock();
        let mut seen = BTreeSet::new();
        for object in objects {
            let name = (object.namespace().unwrap_or_default(), object.name_any());
            match known.entries.get(&name) {
                Some(entry) => entry.accounts.lock().update(object.clone()),
                None => {
                    let mut accounts = Accounts::new(object.clone(), &self.recovered);
                    if self.has_rebooted {
                        accounts.count_grants(&self.gateway);
                    }
                    let accounts = Mutex::new(accounts);
                    let writing = tokio::sync::Mutex::new(Instant::now());
                    known.entries.insert(name.clone(), Arc::new(Entry { accounts, writing }));
                }
            }
            seen.insert(name);
        }
        known.entries.retain(|name, _| seen.contains(name));
        known.unreadable = unreadable;
        drop(known);
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
        // What energy it takes is known when it is there. Some of it must be left.
        let need = |answer: u64| Amount {
            requests: 1,
            tokens: prompt_tokens.saturating_add(answer),
            money: 0,
            millijoules: 1,
        };
        let least = answer_tokens.map_or(MIN_ANSWER_TOKENS, |asked| asked.min(MIN_CUT_TOKENS));
        let (held, answer) = match self.hold_all(&entries, need(most.into())).await {
            Ok(held) => (Ok(held), most),
            // With less left, the answer may be as long as that.
            Err(rejection) => {
                match rejection.tokens_left().and_then(|left| left.checked_sub(prompt_tokens)) {
                    Some(left) if left >= least.into() => {
                        let less = u32::try_from(left).unwrap_or(u32::MAX).min(most);
                        (self.hold_all(&entries, need(less.into())).await, less)
                    }
                    _ => (Err(rejection), most),
                }
            }
        };
        self.count(&entries, held.is_err());
        let held = held.map_err(|rejection| rejection.error())?;
        Reservation::new(self.clone(), held, prompt_tokens, answer).recorded().map(Some)
    }

    fn count(&self, entries: &[Arc<Entry>], is_refused: bool) {
        for entry in entries {
            self.metrics.budget_request(&full_name(&entry.accounts.lock().object), is_refused);
        }
    }

    /// The Budgets that count a request of any of these.
    fn of(&self, subjects: &[BudgetSubject<'_>]) -> Result<Vec<Arc<Entry>>, GatewayError> {
        let known = self.known.lock();
        let is_theirs =
            |(namespace, _): &&(String, String)| subjects.iter().any(|one| one.namespace == namespace);
        let hidden = known.unreadable.iter().find(is_theirs);
        if let Some((namespace, name)) = hidden {
            let message = format!(
                "Budget {namespace}/{name} cannot be read by this release of the gateway, so nothing is answered in its \
                 namespace; change or delete it"
            );
            return Err(GatewayError::new(ErrorKind::ModelNotReady, message));
        }
        let counts = |((namespace, _), entry): &(&(String, String), &Arc<Entry>)| {
            let accounts = entry.accounts.lock();
            subjects.iter().any(|one| one.is_in(namespace, &accounts.object.spec.scope))
        };
        Ok(known.entries.iter().filter(counts).map(|(_, entry)| entry.clone()).collect())
    }

    /// Reserves so much in all of them or in none.
    async fn hold_all(
        &self,
        entries: &[Arc<Entry>],
        need: Amount,
    ) -> Result<Vec<EntryHold>, BudgetRejection> {
        let mut held = Vec::new();
        for entry in entries {
            // Where one has too little, or the request is gone while it waits, the others have theirs back.
            held.extend(self.hold(entry, need).await?);
        }
        Ok(held)
    }

    /// Reserves so much of one Budget, and asks for a larger grant where this gateway has too little.
    async fn hold(&self, entry: &Arc<Entry>, need: Amount) -> Result<Vec<EntryHold>, BudgetRejection> {
        let held = || {
            let held = entry.accounts.lock().try_hold(need, &self.recovered, Timestamp::now())?;
            Some(held.into_iter().map(|hold| EntryHold::new(entry.clone(), hold)).collect())
        };
        let (mut writes, mut looks) = (0, 0);
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
                    writes += 1;
                    if writes > MAX_WRITES {
                        let cause =
                            "others write its status all the time, or the API server does not keep it";
                        return Err(BudgetRejection::Unavailable { name, cause: cause.to_owned() });
                    }
                    let object = self.described(entry, Budget { status: Some(status), ..object });
                    match self.write(entry, &object).await {
                        Ok(()) | Err(Unwritten::Conflict) => {}
                        Err(Unwritten::Failed(cause)) => {
                            return Err(BudgetRejection::Unavailable { name, cause });
                        }
                    }
                }
                Err(ClaimError::Short(shortage)) if shortage.is_held() && looks < MAX_LOOKS => {
                    looks += 1;
                    drop(writing);
                    tokio::time::sleep(LOOK_INTERVAL).await;
                    let mut read_at = entry.writing.lock().await;
                    // One of those that wait reads for all of them.
                    if read_at.elapsed() >= LOOK_INTERVAL {
                        self.read(entry)
                            .await
                            .map_err(|cause| BudgetRejection::Unavailable { name, cause })?;
                        *read_at = Instant::now();
                    }
                }
                Err(ClaimError::Short(shortage)) => return Err(BudgetRejection::Short { name, shortage }),
                Err(ClaimError::UnknownPeriod) => return Err(BudgetRejection::UnknownPeriod { name }),
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
            (accounts.object.namespace().unwrap_or_default(), accounts.object.name_any())
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
        let entries: Vec<Arc<Entry>> = self.known.lock().entries.values().cloned().collect();
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
        if let Some(journal) = &self.journal {
            journal.fold().await;
        }
    }

    /// Writes entries to the journal. An error where they cannot be written down, so that nobody would know of them.
    fn record(&self, entries: Vec<JournalEntry>) -> Result<(), GatewayError> {
        let Some(journal) = &self.journal else { return Ok(()) };
        journal.write(entries).map_err(|error| {
            let message =
                format!("what the request may use cannot be written down, so it is not answered: {error}");
            GatewayError::new(ErrorKind::StoreFull, message)
        })
    }

    /// The same for what was used: a request is answered all the same.
    fn record_used(&self, entries: Vec<JournalEntry>) {
        if let Some(journal) = &self.journal {
            // It says so itself.
            let _ = journal.write(entries);
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

fn full_name(object: &Budget) -> String {
    format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any())
}

#[cfg(test)]
mod tests;
