//! Providers outside of this cluster: what they are asked, what they answer, and whether they are asked at all. Not here:
//! which requests go to them (`routes`), and how far from home those may go (`zones`).
//!
//! ```text
//! attempt_loop ─▶ zones: Cleared ─▶ client ─▶ openai | anthropic: body ─▶ HTTPS
//!       ▲                                                                   │
//!       └── events ◀── provider_stream ◀── openai | anthropic ◀── server_sent_events
//! ```

mod anthropic;
mod circuit;
mod client;
mod credits;
mod openai;
mod pauses;
mod provider_stream;
mod rate_limits;
mod report;
mod request;
mod secrets;
mod server_sent_events;
mod trial;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use parking_lot::Mutex;
use russet_crds::{PauseReason, PauseScope, ProviderPause};
use tokio::time::Instant;

use crate::audit::AuditLog;
use crate::error::ErrorKind;
use crate::metrics::Metrics;
use crate::routes::Provider;
use crate::zone_client::ZoneClients;
use circuit::Circuit;
pub(crate) use client::ProviderError;
use pauses::{Moment, Pauses};
pub(crate) use provider_stream::ProviderStream;
use report::ProviderHealth;
pub(crate) use report::report;
pub(crate) use request::{ProviderRequest, untranslatable};
pub(crate) use secrets::SecretReader;
use trial::Trial;

/// What this gateway knows of the providers.
pub(crate) struct Providers {
    clients: ZoneClients,
    secrets: Arc<SecretReader>,
    audit: Option<AuditLog>,
    metrics: Arc<Metrics>,
    circuits: Mutex<HashMap<ModelKey, Circuit>>,
    in_flight: Mutex<HashMap<String, Arc<AtomicU32>>>,
    /// What was seen of each.
    health: Mutex<HashMap<ProviderKey, ProviderHealth>>,
}

/// `namespace/name` of a provider, and its endpoint: one whose endpoint is mended starts anew.
type ProviderKey = (String, String);

fn provider_key(provider: &Provider) -> ProviderKey {
    (provider.full_name(), provider.spec.endpoint.clone())
}

/// The same, and one of its models.
type ModelKey = (String, String, String);

fn key(provider: &Provider, model: &str) -> ModelKey {
    (provider.full_name(), provider.spec.endpoint.clone(), model.to_owned())
}

/// Most circuits that are remembered: more providers and models than anybody has.
const MAX_CIRCUITS: usize = 10_000;

/// Why a provider is not asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Closed {
    /// For people, in the gateway's words.
    pub(crate) why: String,
    /// What the provider said, which may quote a request.
    pub(crate) said: Option<String>,
    /// What that makes of a request that nothing else answers.
    pub(crate) kind: ErrorKind,
    /// For how long, as far as anybody knows.
    pub(crate) left: Option<Duration>,
    /// Whether it is only because another request tries whether it answers again: one that nothing else answers is sent too.
    pub(crate) is_tried: bool,
}

impl Closed {
    /// Closed because it has too much to do.
    pub(crate) fn busy(why: impl Into<String>) -> Self {
        Self::of(why, ErrorKind::Overloaded)
    }

    /// Closed for another reason than too many requests.
    pub(crate) fn for_good(why: impl Into<String>) -> Self {
        Self::of(why, ErrorKind::ProviderFailed)
    }

    /// Closed for a reason that makes this of a request.
    pub(crate) fn of(why: impl Into<String>, kind: ErrorKind) -> Self {
        Self { why: why.into(), said: None, kind, left: None, is_tried: false }
    }

    /// Closed while one request tries it.
    fn tried(kind: ErrorKind) -> Self {
        let why = "it was left alone, and one request tries whether it answers again";
        Self { is_tried: true, ..Self::of(why, kind) }
    }

    /// All that is known.
    pub(crate) fn message(&self) -> String {
        let Self { why, said, .. } = self;
        said.as_ref().map_or_else(|| why.clone(), |said| format!("{why}: {said}"))
    }

    /// Closed until a time that the provider named.
    fn paused(pause: &ProviderPause) -> Self {
        let until = format!("{:.0}", pause.until.0);
        let (models, are) = match pause.scope {
            PauseScope::Model => ("this model", "is"),
            PauseScope::Free => ("free models", "are"),
            PauseScope::Paid => ("models that are not free", "are"),
            PauseScope::All | PauseScope::Unknown => ("all of its models", "are"),
        };
        let left = Duration::try_from(pause.until.0.duration_since(Timestamp::now())).ok();
        let closed = match pause.reason {
            PauseReason::NoCredits => {
                Self::for_good(format!("it has no credits, and {models} {are} left alone until {until}"))
            }
            PauseReason::RateLimited | PauseReason::Unknown => Self::busy(format!(
                "nothing of its rate limit remains until {until}, and {models} {are} left alone until then"
            )),
        };
        Self { left, ..closed }
    }
}

/// A request that tries a model that was left alone: until this is dropped, the others go to their next targets.
#[derive(Debug, Default)]
pub(crate) struct Trials {
    running: Vec<Trial>,
    /// When it was sent, where its answer lets the others follow.
    reopens: Option<Instant>,
}

impl Trials {
    /// Of a request that goes to a model which another one tries, because nothing else answers it.
    pub(crate) fn of_another() -> Self {
        Self { running: Vec::new(), reopens: Some(Instant::now()) }
    }
}

/// One of the requests that a provider has at once.
pub(crate) struct ProviderPermit(Arc<AtomicU32>);

impl Drop for ProviderPermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Providers {
    /// Providers whose keys are read so, and what is sent to which is written there.
    pub(crate) fn new(
        clients: ZoneClients,
        secrets: Arc<SecretReader>,
        audit: Option<AuditLog>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let (circuits, in_flight, health) = (Mutex::default(), Mutex::default(), Mutex::default());
        Self { clients, secrets, audit, metrics, circuits, in_flight, health }
    }

    /// What was seen of a provider.
    fn health(&self, provider: &Provider) -> ProviderHealth {
        let key = provider_key(provider);
        self.health.lock().get(&key).cloned().unwrap_or_default()
    }

    /// Forgets what was seen of others than these.
    fn forget_health(&self, providers: &[Provider]) {
        let is_known = |(name, endpoint): &(String, String)| {
            providers.iter().any(|one| one.full_name() == *name && one.spec.endpoint == *endpoint)
        };
        self.health.lock().retain(|seen, health| {
            let is_known = is_known(seen);
            if !is_known && health.credits.said.is_some() {
                self.metrics.provider_credits(&seen.0, None);
            }
            is_known
        });
    }

    /// Why a model of a provider is not asked now, if it is not.
    pub(crate) fn closed(&self, provider: &Provider, model: &str) -> Option<Closed> {
        let now = Instant::now();
        let seen = provider_key(provider);
        let pause = self
            .health
            .lock()
            .get(&seen)
            .and_then(|health| health.pauses.of(model, provider.generation, now).map(Closed::paused));
        if pause.is_some() {
            return pause;
        }
        let circuits = self.circuits.lock();
        let circuit = circuits.get(&key(provider, model));
        let Some((circuit, left)) = circuit.and_then(|circuit| Some((circuit, circuit.open_for(now)?)))
        else {
            drop(circuits);
            return self.tried(provider, model, now);
        };
        let why = format!("it is left alone for {} s", left.as_secs().max(1));
        let kind = circuit.error_kind();
        Some(Closed { said: Some(circuit.last_error().to_owned()), ..Closed::of(why, kind) })
    }

    /// Whether one request tries a model now that was left alone.
    fn tried(&self, provider: &Provider, model: &str, now: Instant) -> Option<Closed> {
        let seen = provider_key(provider);
        let mut health = self.health.lock();
        let pauses = health.get_mut(&seen).map(|health| &mut health.pauses);
        if pauses.is_some_and(|pauses| pauses.are_tried(model, provider.generation, now)) {
            return Some(Closed::tried(ErrorKind::Overloaded));
        }
        drop(health);
        let circuits = self.circuits.lock();
        let circuit = circuits.get(&key(provider, model))?;
        circuit.is_tried(now).then(|| Closed::tried(circuit.error_kind()))
    }

    /// Makes a request the one that tries a model that was left alone, where that is needed; an error where another one does.
    pub(crate) fn trials(&self, provider: &Provider, model: &str) -> Result<Trials, Closed> {
        let now = Instant::now();
        let seen = provider_key(provider);
        let (mut health, mut circuits) = (self.health.lock(), self.circuits.lock());
        let pauses = health.get_mut(&seen).map(|health| &mut health.pauses);
        let circuit = circuits.get_mut(&key(provider, model));
        if let Some(circuit) = circuit.as_ref().filter(|circuit| circuit.is_tried(now)) {
            return Err(Closed::tried(circuit.error_kind()));
        }
        let mut running = Vec::new();
        if let Some(pauses) = pauses {
            if pauses.are_tried(model, provider.generation, now) {
                return Err(Closed::tried(ErrorKind::Overloaded));
            }
            running = pauses.trials(model, provider.generation, now);
        }
        running.extend(circuit.and_then(|circuit| circuit.trial(now)));
        Ok(Trials { reopens: (!running.is_empty()).then_some(now), running })
    }

    /// A request that tried a model has the beginning of an answer: the others may follow.
    fn reopened(&self, provider: &Provider, model: &str, Trials { running: _running, reopens }: Trials) {
        let Some(sent) = reopens else { return };
        self.pause(provider, |pauses, generation, _| pauses.answered(model, generation, sent));
        if let Some(circuit) = self.circuits.lock().get_mut(&key(provider, model)) {
            circuit.closes(Instant::now());
        }
    }

    /// Changes which models of the provider are left alone.
    fn pause(&self, provider: &Provider, change: impl FnOnce(&mut Pauses, Option<i64>, Moment)) {
        let seen = provider_key(provider);
        change(&mut self.health.lock().entry(seen).or_default().pauses, provider.generation, Moment::now());
    }

    /// One of the requests that the provider may have at once; none while it has as many as it may have.
    fn permit(&self, provider: &Provider) -> Option<ProviderPermit> {
        let running = self.in_flight.lock().entry(provider.full_name()).or_default().clone();
        let limit = provider.spec.max_concurrent_requests;
        let taken = running.fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| {
            (count < limit).then_some(count.saturating_add(1))
        });
        taken.is_ok().then(|| ProviderPermit(running))
    }

    /// Counts how a request ended, and opens the circuit of a model that fails.
    fn record(&self, provider: &Provider, model: &str, outcome: Outcome<'_>) {
        let name = provider.full_name();
        self.metrics.provider_request(&name, outcome.as_str());
        self.health.lock().entry(provider_key(provider)).or_default().record(
            &name,
            outcome,
            Moment::now().time,
        );
        let mut circuits = self.circuits.lock();
        if circuits.len() >= MAX_CIRCUITS {
            circuits.clear();
        }
        let circuit = circuits.entry(key(provider, model)).or_default();
        match outcome {
            Outcome::Answered => *circuit = Circuit::default(),
            // What it says of the request says nothing of the provider.
            Outcome::Rejected => circuit.trial_ended(),
            Outcome::Failed { message, is_busy, pause } => {
                circuit.failed(message, is_busy, pause, Instant::now());
            }
        }
    }
}

/// How a request to a provider ended.
#[derive(Clone, Copy, Debug)]
enum Outcome<'a> {
    /// With an answer.
    Answered,
    /// The provider refused the request for what is in it.
    Rejected,
    /// The provider did not answer, or not to the end; it may ask for a pause.
    Failed { message: &'a str, is_busy: bool, pause: Option<Duration> },
}

impl Outcome<'_> {
    fn as_str(self) -> &'static str {
        match self {
            Self::Answered => "answered",
            Self::Rejected => "rejected",
            Self::Failed { .. } => "failed",
        }
    }
}
