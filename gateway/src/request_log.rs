//! The log of the last requests, for `GET /requests/{id}/why`: a ring of slots in memory, one for each request, that is
//! there from its arrival on. Nothing of a prompt or a response is in it. Not here: what a record has, see `record`, and
//! who writes it, see `recorder`.
//!
//! ```text
//! begin ─▶ slot n % 10,000 ─▶ LogEntry ◀─ Recorder: held, attempt, started, first token, end
//!                                 └─▶ find (id) ─▶ RequestRecord
//! ```

mod cost;
mod message;
mod outcome;
mod record;
mod recorder;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use jiff::Timestamp;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::audit::{AuditLog, AuditUsage, CompletedRequest};
use crate::energy::EngineUse;
use crate::keys::Caller;
use crate::request_id::RequestId;
use cost::cost;
pub(crate) use outcome::RequestOutcome;
pub use record::{
    AttemptOutcome, AttemptRecord, EndpointScore, FactsRecord, HoldRecord, LimitsRecord, PipelineRecord,
    ProviderRecord, RequestEnd, RequestRecord, RouteRecord, RuleMismatch, Score, ScorePart, SkippedTarget,
};
pub(crate) use recorder::{EngineRecorder, NewAttempt, Recorder};

/// Requests in the log: minutes of a busy gateway, and days of a quiet one. A record has a kilobyte, and at most some 30.
pub const MAX_REQUESTS: usize = 10_000;
/// Hexadecimal digits of the unique part of an id.
const UNIQUE_DIGITS: usize = 24;

/// The last requests.
pub(crate) struct RequestLog {
    slots: Box<[Mutex<Option<Arc<LogEntry>>>]>,
    next: AtomicU64,
    /// Where it is written how requests end.
    audit: Option<AuditLog>,
}

/// One request.
pub(crate) struct LogEntry {
    /// How many came before it.
    sequence: u64,
    id: RequestId,
    caller: Caller,
    dialect: &'static str,
    received: Timestamp,
    begun: Instant,
    /// Tokens of its responses so far.
    generated: AtomicU32,
    /// What it has in common with the same request that is sent again after a crash.
    repeat: OnceLock<Arc<str>>,
    /// The rest of it.
    record: Mutex<RequestRecord>,
}

impl Default for RequestLog {
    fn default() -> Self {
        Self::with_slots(MAX_REQUESTS)
    }
}

impl RequestLog {
    fn with_slots(count: usize) -> Self {
        let slots = (0..count).map(|_| Mutex::new(None)).collect();
        Self { slots, next: AtomicU64::new(0), audit: None }
    }

    /// The same, which also writes there how requests end.
    pub(crate) fn with_audit_log(self, audit: Option<AuditLog>) -> Self {
        Self { audit, ..self }
    }

    /// Begins the record of a request, in place of the oldest one; the recorder writes it.
    pub(crate) fn begin(&self, id: &RequestId, caller: &Caller, dialect: &'static str) -> Recorder {
        let sequence = self.next.fetch_add(1, Ordering::Relaxed);
        let entry = Arc::new(LogEntry {
            sequence,
            id: id.clone(),
            caller: caller.clone(),
            dialect,
            received: Timestamp::now(),
            begun: Instant::now(),
            generated: AtomicU32::new(0),
            repeat: OnceLock::new(),
            record: Mutex::default(),
        });
        if let Some(slot) = self.slots.get((sequence % self.slots.len().max(1) as u64) as usize) {
            let mut slot = slot.lock();
            // One that came a whole ring later may be there first.
            if slot.as_ref().is_none_or(|other| other.sequence < sequence) {
                let oldest = slot.replace(entry.clone());
                drop(slot);
                drop(oldest);
            }
        }
        Recorder::new(entry, self.audit.clone())
    }

    /// The request with this id that `reader` may see: of several with an id that clients chose the newest. Looks at
    /// every slot, in a fraction of a millisecond, so that requests need no index.
    pub(crate) fn find(&self, id: &str, reader: &Caller) -> Option<RequestRecord> {
        let newest = self.slots.iter().filter_map(|slot| {
            let slot = slot.lock();
            slot.as_ref().filter(|entry| entry.has_id(id) && entry.is_visible_to(reader)).cloned()
        });
        newest.max_by_key(|entry| entry.sequence).map(|entry| entry.snapshot())
    }
}

impl LogEntry {
    /// Whether `id` is the client's, ours, or one that a dialect makes of ours, as in `chatcmpl-…`.
    fn has_id(&self, id: &str) -> bool {
        let RequestId { unique, shown } = &self.id;
        let is_of_dialect = || {
            let prefix = id.strip_suffix(&**unique).filter(|_| unique.len() == UNIQUE_DIGITS);
            prefix.is_some_and(|prefix| prefix.is_empty() || prefix.ends_with(['-', '_']))
        };
        **shown == *id || is_of_dialect()
    }

    /// Whether this caller may read it: its own key, and who needs no key on this machine.
    fn is_visible_to(&self, reader: &Caller) -> bool {
        match (reader, &self.caller) {
            (Caller::Anonymous, _) => true,
            (Caller::Key(_), Caller::Anonymous) => false,
            (Caller::Key(reader), Caller::Key(owner)) => {
                (&reader.namespace, &reader.name) == (&owner.namespace, &owner.name)
            }
        }
    }

    /// Milliseconds since it arrived.
    fn elapsed_ms(&self) -> f64 {
        // Microseconds are exact enough, and short.
        self.begun.elapsed().as_micros() as f64 / 1000.0
    }

    /// How it ended and what it used, for the audit log.
    fn completed(&self) -> CompletedRequest {
        let record = self.record.lock();
        let outcome = match &record.end {
            Some(RequestEnd::Finished { .. }) => "finished",
            Some(RequestEnd::Failed { code, .. }) => code,
            Some(RequestEnd::ClientLeft | RequestEnd::Other) | None => "client_left",
        };
        let (prompt_tokens, completion_tokens) = self.tokens(&record);
        let [prompt_tokens, cached_tokens, completion_tokens] =
            [prompt_tokens, record.cached_tokens, completion_tokens].map(u64::from);
        let prompt_tokens = if record.is_count { 0 } else { prompt_tokens };
        let EngineUse { engine_microseconds, millijoules, source, electricity, is_unmetered } =
            record.engines.known();
        let usage = AuditUsage {
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            kept_answer: record.cached_response_ms.is_some(),
            provider: record.outside.values().next().map(|answer| answer.provider.clone()),
            cost: cost(&record.outside, completion_tokens),
            engine_microseconds,
            millijoules,
            power: source,
            electricity,
            unmetered: is_unmetered,
        };
        CompletedRequest {
            request: self.id.unique.to_string(),
            key: self.caller.key_name().map(str::to_owned),
            model: record.model.clone(),
            step: record.step.as_deref().map(str::to_owned),
            run: record
                .attempts
                .iter()
                .rev()
                .find_map(|attempt| Some(attempt.pipeline.as_ref()?.run.clone())),
            zone: record.farthest.to_string(),
            outcome: outcome.to_owned(),
            usage: Some(usage),
        }
    }

    /// The record as of now.
    fn snapshot(&self) -> RequestRecord {
        let mut record = self.record.lock().clone();
        let limits = self.caller.limits();
        record.id = self.id.shown.to_string();
        record.engine_id = self.id.unique.to_string();
        record.received_at = self.received.to_string();
        record.dialect = self.dialect.to_owned();
        record.caller = self.caller.key_name().map(str::to_owned);
        record.limits.key_max_tokens = limits.max_tokens;
        record.limits.key_max_ms = limits.max_duration.map(|duration| duration.as_secs_f64() * 1000.0);
        if record.end.is_none() {
            record.total_ms = self.elapsed_ms();
        }
        (record.prompt_tokens, record.completion_tokens) = self.tokens(&record);
        record
    }

    /// Tokens of its prompts and of its responses; of a request that is not complete as its last engine counted.
    fn tokens(&self, record: &RequestRecord) -> (u32, u32) {
        let counted = || record.attempts.iter().rev().find_map(|attempt| attempt.prompt_tokens);
        let prompt = match record.prompt_tokens {
            0 => counted().unwrap_or_default(),
            prompt => prompt,
        };
        (prompt, record.completion_tokens.max(self.generated.load(Ordering::Relaxed)))
    }
}
