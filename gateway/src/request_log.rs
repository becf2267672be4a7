//! The log of the last requests, for `GET /requests/{id}/why`: a ring of slots in memory, one for each request, that is
//! there from its arrival on. Nothing of a prompt or a response is in it. Not here: what a record has, see `record`, and
//! who writes it, see `recorder`.
//!
//! ```text
//! begin ─▶ slot n % 10,000 ─▶ LogEntry ◀─ Recorder: held, attempt, started, first token, end
//!                                 └─▶ find (id) ─▶ RequestRecord
//! ```

mod message;
mod record;
mod recorder;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use jiff::Timestamp;
use parking_lot::Mutex;
use russet_crds::Money;
use tokio::time::Instant;

use crate::audit::{AuditLog, AuditUsage, CompletedRequest};
use crate::energy::EngineUse;
use crate::keys::Caller;
use crate::request_id::RequestId;
use record::OutsideAnswer;
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

/// How a request ended, for whoever sent it on the inside.
#[derive(Clone, Default)]
pub(crate) struct RequestOutcome {
    entry: Arc<OnceLock<Arc<LogEntry>>>,
    /// `namespace/pipeline/step` of the step of a Pipeline that sends it.
    step: Option<Arc<str>>,
    /// What it has in common with the same request that a gateway sends again after a crash.
    repeat: Option<Arc<str>>,
}

impl RequestOutcome {
    /// Of a request that this step of a Pipeline sends, `namespace/pipeline/step`.
    pub(crate) fn of_step(step: &str) -> Self {
        Self { step: Some(step.into()), ..Self::default() }
    }

    /// Of a request that is sent again after a crash, with the same text here.
    pub(crate) fn of_repeated(repeat: &str) -> Self {
        Self { repeat: Some(repeat.into()), ..Self::default() }
    }

    /// Whether it ended with an error, if only in the middle of a stream.
    pub(crate) fn has_failed(&self) -> bool {
        let has_failed =
            |entry: &Arc<LogEntry>| matches!(entry.record.lock().end, Some(RequestEnd::Failed { .. }));
        self.entry.get().is_some_and(has_failed)
    }

    /// The class of the error it ended with, and its message where that cannot quote the request.
    pub(crate) fn failure(&self) -> Option<String> {
        match &self.entry.get()?.record.lock().end {
            Some(RequestEnd::Failed { code, message, .. }) => {
                Some(message.clone().unwrap_or_else(|| code.to_string()))
            }
            _ => None,
        }
    }

    /// What it used so far; none before it is in the log.
    pub(crate) fn usage(&self) -> Option<AuditUsage> {
        self.entry.get()?.completed().usage
    }
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

/// What answers of providers cost, of a request whose responses have so many tokens; none where nobody knows one of the prices
/// and the provider does not say the cost. A provider takes the prompt of each of several responses. One that did not complete
/// cost its prompt and what came of it.
fn cost(outside: &BTreeMap<u32, OutsideAnswer>, completion_tokens: u64) -> Option<Money> {
    let complete = outside.values().filter_map(|answer| answer.usage);
    let complete: u64 = complete.map(|usage| u64::from(usage.completion_tokens)).sum();
    let mut rest = completion_tokens.saturating_sub(complete);
    let costs = outside.values().map(|answer| {
        let Some(price) = answer.price else { return answer.reported_cost };
        Some(match answer.usage {
            Some(usage) => {
                let [prompt, cached, completion] =
                    [usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens].map(u64::from);
                price.of(prompt, cached, completion)
            }
            None => price.of(answer.prompt_tokens, 0, std::mem::take(&mut rest)),
        })
    });
    let costs: Option<Vec<Money>> = costs.collect();
    costs.filter(|costs| !costs.is_empty()).map(|costs| costs.into_iter().fold(Money::ZERO, Money::plus))
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

#[cfg(test)]
mod tests {
    use russet_crds::{ModelPrice, ModelProviderSpec, ProviderModel, TokenPrice, Zone};
    use russet_wire::event::Usage;

    use super::*;
    use crate::routes::Provider;
    use crate::zones::ZoneLimit;

    fn id(shown: &str, unique: u32) -> RequestId {
        RequestId { unique: format!("{unique:024x}").into(), shown: shown.into() }
    }

    fn found(log: &RequestLog, id: &str) -> Option<String> {
        log.find(id, &Caller::Anonymous).map(|record| record.engine_id)
    }

    #[test]
    fn a_request_costs_what_each_of_its_responses_does() {
        let money = |text: &str| text.parse::<Money>().unwrap();
        let tokens = TokenPrice { input: money("1"), cached_input: None, output: money("10") };
        let price = ModelPrice { tokens, request: money("0.25") };
        let answer = |price, completion: Option<u32>| {
            let usage =
                |completion_tokens| Usage { prompt_tokens: 1_000_000, completion_tokens, cached_tokens: 0 };
            let usage = completion.map(usage);
            OutsideAnswer {
                provider: "p".into(),
                price,
                prompt_tokens: 2_000_000,
                reported_cost: None,
                usage,
            }
        };
        let says = |cost, answer| OutsideAnswer { reported_cost: Some(money(cost)), ..answer };
        let (some, known) = (Some(100_000), Some(price));
        for (answers, completion_tokens, expected) in [
            (vec![], 5, None),
            (vec![answer(known, some)], 100_000, Some("2.25")),
            // Each response has its prompt, and one that did not complete its estimated one and what came of it.
            (vec![answer(known, some), answer(known, some)], 200_000, Some("4.5")),
            (vec![answer(known, some), answer(known, None)], 150_000, Some("5")),
            (vec![answer(known, None)], 0, Some("2.25")),
            (vec![answer(known, some), answer(None, some)], 200_000, None),
            // What a provider says counts where nobody knows its price.
            (vec![says("0.5", answer(None, some))], 100_000, Some("0.5")),
            (vec![says("0.5", answer(known, some))], 100_000, Some("2.25")),
            (vec![says("0.5", answer(None, some)), answer(known, some)], 200_000, Some("2.75")),
        ] {
            let outside = (0..).zip(answers).collect();
            assert_eq!(cost(&outside, completion_tokens), expected.map(money), "{outside:?}");
        }
    }

    #[test]
    fn a_record_of_one_attempt_has_room_for_no_more() {
        let log = RequestLog::default();
        let mut recorder = log.begin(&id("r", 1), &Caller::Anonymous, "openai");
        recorder.ran("Pipeline home/p", "home/run-1");
        let entry = log.slots[0].lock().clone().unwrap();
        // Ten thousand records are kept.
        assert_eq!(entry.record.lock().attempts.capacity(), 1);
        let bytes = size_of::<LogEntry>() + size_of::<AttemptRecord>();
        assert!(bytes <= 1024, "a record has {bytes} bytes without its texts");
        recorder.ran("Pipeline home/p", "home/run-2");
        assert_eq!(entry.record.lock().attempts.len(), 2);
    }

    #[test]
    fn a_reported_cost_counts_where_nobody_knows_the_price() {
        let log = RequestLog::default();
        let spec = |price: &str| {
            let prices = format!(r#"{{"input": "{price}", "output": "0"}}"#);
            let models = vec![ProviderModel {
                name: "priced".into(),
                price_per_million_tokens: serde_json::from_str(&prices).ok(),
                ..ProviderModel::default()
            }];
            ModelProviderSpec { models, zone: Zone::Cloud, ..ModelProviderSpec::default() }
        };
        let provider = Provider { spec: spec("2"), ..Provider::default() };
        let limit = ZoneLimit::of_route(Zone::Cloud, "the route".into());
        let usage = Usage { prompt_tokens: 1_000_000, completion_tokens: 0, cached_tokens: 0 };
        for (number, (model, reported, expected)) in
            [("priced", Some("7"), Some("2")), ("other", Some("7"), Some("7")), ("other", None, None)]
                .into_iter()
                .enumerate()
        {
            let id = id("r", number as u32);
            let mut recorder = log.begin(&id, &Caller::Anonymous, "openai");
            recorder.left(&provider, model, &limit, 5);
            recorder.first_token();
            recorder.reported_cost(reported.map(|text| text.parse().unwrap()));
            recorder.finished(None, usage);
            let slot = log.slots[number].lock().clone().unwrap();
            let used = slot.completed().usage.unwrap();
            assert_eq!(used.cost, expected.map(|text| text.parse().unwrap()), "{model} {reported:?}");
        }
    }

    #[test]
    fn ten_thousand_requests_are_kept_and_not_one_more() {
        let log = RequestLog::default();
        for number in 0..=MAX_REQUESTS as u32 {
            drop(log.begin(&id(&format!("r{number}"), number), &Caller::Anonymous, "openai"));
        }
        let kept = log.slots.iter().filter(|slot| slot.lock().is_some()).count();
        assert_eq!(kept, MAX_REQUESTS);
        assert_eq!((found(&log, "r0"), found(&log, "r1").is_some()), (None, true));
    }

    #[test]
    fn a_request_is_found_by_every_id_that_its_client_sees() {
        let log = RequestLog::with_slots(4);
        let first = id("mine", 1);
        drop(log.begin(&first, &Caller::Anonymous, "openai"));
        drop(log.begin(&id("mine", 2), &Caller::Anonymous, "openai"));
        assert_eq!(found(&log, "mine"), Some(format!("{:024x}", 2)), "the newest");
        for word in ["", "req_", "chatcmpl-", "msg_"] {
            assert_eq!(
                found(&log, &format!("{word}{}", first.unique)),
                Some(first.unique.to_string()),
                "{word}"
            );
        }
        for other in ["min", "", "x0", &first.unique[1..], &format!("a{}", first.unique)] {
            assert_eq!(found(&log, other), None, "{other}");
        }
    }

    #[test]
    fn threads_that_begin_at_once_lose_no_request() {
        let log = RequestLog::with_slots(1000);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let log = &log;
                scope.spawn(move || {
                    for number in 0..250 {
                        let id = id(&format!("{thread}-{number}"), thread * 250 + number);
                        drop(log.begin(&id, &Caller::Anonymous, "openai"));
                    }
                });
            }
        });
        let all = (0..4).flat_map(|thread| (0..250).map(move |number| format!("{thread}-{number}")));
        assert_eq!(all.filter(|id| found(&log, id).is_none()).count(), 0);
    }
}
