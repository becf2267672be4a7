//! Writes the record of one request while the request runs. Each of several responses has a recorder of its own; when the
//! last one goes and nothing has ended the request, its client has left. Not here: what a record has.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use russet_crds::Money;
use russet_wire::event::{FinishReason, Usage};

use super::message::{loggable, may_quote, shortened};
use super::record::OutsideAnswer;
use super::{
    AttemptOutcome, AttemptRecord, EndpointScore, FactsRecord, HoldRecord, LogEntry, PipelineRecord,
    ProviderRecord, RequestEnd, RequestOutcome, RequestRecord, RouteRecord, RuleMismatch, ScorePart,
    SkippedTarget,
};
use crate::audit::AuditLog;
use crate::energy::EnginePart;
use crate::error::GatewayError;
use crate::keys::Quota;
use crate::routes::{
    Deployment, Endpoint, ModelAlias, Provider, RequestFacts, TargetName, Verdict, task_name,
};
use crate::zones::ZoneLimit;

/// Most holds, attempts, candidates of an attempt, and targets of a route that a record keeps.
const MAX_PARTS: usize = 8;

/// Writes the record of a request, for one of its responses. The default writes nothing.
#[derive(Default)]
pub(crate) struct Recorder {
    request: Option<Arc<RunningRequest>>,
    response: u32,
    /// Whether other responses are to the same prompt, and count it.
    repeats_prompt: bool,
    /// The number of its last attempt.
    attempt: u32,
    /// Tokens of its response so far.
    generated: u32,
    /// The provider that it was sent to last, if it was not an engine.
    outside: Option<OutsideAnswer>,
}

/// A request that runs as long as it has recorders.
struct RunningRequest(Arc<LogEntry>, Option<AuditLog>);

impl Drop for RunningRequest {
    fn drop(&mut self) {
        let Self(entry, audit) = self;
        end(&mut entry.record.lock(), entry.elapsed_ms(), RequestEnd::ClientLeft);
        if let Some(audit) = audit {
            audit.completed(entry.completed());
        }
    }
}

/// Writes what one engine computed for a request.
pub(crate) struct EngineRecorder(Option<Arc<RunningRequest>>);

impl EngineRecorder {
    /// The engine has done so much, and does no more.
    pub(crate) fn computed(&self, part: EnginePart) {
        if let Some(request) = &self.0 {
            let RunningRequest(entry, _) = &**request;
            entry.record.lock().engines.add(part);
        }
    }
}

/// A request that is sent to an engine.
pub(crate) struct NewAttempt<'a> {
    /// The deployment.
    pub(crate) deployment: &'a Deployment,
    /// The chosen engine.
    pub(crate) endpoint: &'a Endpoint,
    /// The adapter; empty where the model itself answers.
    pub(crate) adapter: &'a str,
    /// Tokens after which the response goes on.
    pub(crate) resumed_after_tokens: usize,
}

impl Recorder {
    /// The recorder of a request that has just arrived.
    pub(super) fn new(entry: Arc<LogEntry>, audit: Option<AuditLog>) -> Self {
        Self { request: Some(Arc::new(RunningRequest(entry, audit))), ..Self::default() }
    }

    /// Tells `outcome` how the request ends.
    pub(crate) fn report_to(&self, outcome: &RequestOutcome) {
        if let Some(request) = &self.request {
            // A request has one.
            let _ = outcome.entry.set(request.0.clone());
            request.0.record.lock().step = outcome.step.clone();
            if let Some(repeat) = &outcome.repeat {
                let _ = request.0.repeat.set(repeat.clone());
            }
        }
    }

    /// The recorder of one of several responses, of which so many in a row are to one prompt.
    pub(crate) fn for_response(&self, response: usize, per_prompt: usize) -> Self {
        let number = u32::try_from(response).unwrap_or(u32::MAX);
        let repeats_prompt = !response.is_multiple_of(per_prompt.max(1));
        Self { request: self.request.clone(), response: number, repeats_prompt, ..Self::default() }
    }

    /// Whether another response to the same request counts the prompt.
    pub(crate) fn repeats_prompt(&self) -> bool {
        self.repeats_prompt
    }

    /// Whether a step of a Pipeline sent the request.
    pub(crate) fn is_of_step(&self) -> bool {
        self.request.as_ref().is_some_and(|request| request.0.record.lock().step.is_some())
    }

    /// What the request has in common with the same one that is sent again after a crash; none where that does not happen.
    pub(crate) fn repeat(&self) -> Option<Arc<str>> {
        self.request.as_ref()?.0.repeat.get().cloned()
    }

    /// Whether the request asks for several responses.
    pub(crate) fn is_one_of_several(&self) -> bool {
        self.request.as_ref().is_some_and(|request| request.0.record.lock().responses > 1)
    }

    /// Writes what an engine computes for it, until after the response.
    pub(crate) fn of_engine(&self) -> EngineRecorder {
        EngineRecorder(self.request.clone())
    }

    fn write(&self, change: impl FnOnce(&mut RequestRecord, f64)) {
        if let Some(request) = &self.request {
            let RunningRequest(entry, _) = &**request;
            let now = entry.elapsed_ms();
            change(&mut entry.record.lock(), now);
        }
    }

    /// Changes its last attempt, if that is still kept.
    fn change_attempt(&self, change: impl FnOnce(&mut AttemptRecord, f64)) {
        self.write(|record, now| {
            if let Some(attempt) = record.attempts.iter_mut().rev().find(|one| one.number == self.attempt) {
                change(attempt, now);
            }
        });
    }

    fn end_attempt(&self, outcome: AttemptOutcome) {
        self.change_attempt(|attempt, now| {
            attempt.ended_ms = Some(now);
            attempt.outcome = Some(outcome);
        });
    }

    /// What its body asks for.
    pub(crate) fn parsed(&self, model: &str, responses: usize, streamed: bool) {
        self.write(|record, _| {
            record.model = shortened(model);
            record.responses = u32::try_from(responses).unwrap_or(u32::MAX);
            record.streamed = streamed;
        });
    }

    /// What is left of its key's quota.
    pub(crate) fn quota(&self, quota: &Quota) {
        self.write(|record, _| {
            record.limits.requests_per_minute = Some(quota.limit);
            record.limits.requests_remaining = Some(quota.remaining);
        });
    }

    /// Limits of the request itself, within those of its key.
    pub(crate) fn limits(&self, priority: i32, max_tokens: Option<u32>, timeout: Option<Duration>) {
        self.write(|record, _| {
            record.limits.priority = priority;
            record.limits.max_tokens = max_tokens;
            record.limits.timeout_ms = timeout.map(|timeout| timeout.as_secs_f64() * 1000.0);
        });
    }

    /// The priority that its rule gave it.
    pub(crate) fn priority(&self, priority: i32) {
        self.write(|record, _| record.limits.priority = priority);
    }

    /// The ModelRoute that has its model's name, and what its rules made of it.
    pub(crate) fn route(&self, alias: &ModelAlias, facts: Option<&RequestFacts>) {
        self.write(|record, _| {
            if record.route.is_none() {
                let selection = alias.policy.select(facts);
                let facts = facts.filter(|_| alias.policy.has_rules());
                let verdicts = facts.map(|facts| alias.policy.verdicts(facts)).unwrap_or_default();
                let mismatches = verdicts.into_iter().filter_map(|Verdict { rule, mismatch }| {
                    Some(RuleMismatch { rule: rule.to_owned(), reason: shortened(&mismatch?) })
                });
                record.route = Some(Box::new(RouteRecord {
                    model_route: alias.route.clone(),
                    pattern: shortened(&alias.pattern),
                    targets: selection.in_order().take(MAX_PARTS).map(TargetName::to_string).collect(),
                    rule: selection.rule.map(str::to_owned),
                    mismatches: mismatches.collect(),
                    request: facts.map(FactsRecord::from),
                }));
            }
        });
    }

    /// It got an answer that is so old.
    pub(crate) fn cached(&self, age: Duration) {
        self.write(|record, _| record.cached_response_ms = Some(age.as_secs_f64() * 1000.0));
    }

    /// What was created and deleted for it.
    pub(crate) fn changed(&self, changes: &[String]) {
        self.write(|record, _| {
            record.changes.extend(changes.iter().take(MAX_PARTS).map(|change| shortened(change)));
        });
    }

    /// The request waits for this deployment, for this reason.
    pub(crate) fn held(&self, deployment: &Deployment, reason: &str) {
        let (response, name, reason) = (self.response, deployment.full_name(), shortened(reason));
        self.write(|record, now| {
            let open = record.holds.iter().rev().find(|hold| hold.response == response);
            if open.is_some_and(|hold| {
                hold.until_ms.is_none() && hold.reason == reason && hold.deployment == name
            }) {
                return;
            }
            close_holds(record, response, now);
            record.holds_left_out += make_place(&mut record.holds);
            record.holds.push(HoldRecord {
                response,
                deployment: name,
                reason,
                from_ms: now,
                until_ms: None,
            });
        });
    }

    /// The request is sent to an engine, chosen among these, of which the log keeps the first.
    pub(crate) fn attempt(
        &mut self,
        new: NewAttempt<'_>,
        candidates: impl ExactSizeIterator<Item = EndpointScore>,
    ) {
        self.outside = None;
        let NewAttempt { deployment, endpoint, adapter, resumed_after_tokens } = new;
        self.push_attempt(|| {
            let left_out = candidates.len().saturating_sub(MAX_PARTS);
            AttemptRecord {
                deployment: deployment.full_name(),
                adapter: adapter.to_owned(),
                node: endpoint.node.clone(),
                group: endpoint.group.clone(),
                epoch: endpoint.epoch,
                address: endpoint.address.clone(),
                candidates: candidates.take(MAX_PARTS).collect(),
                candidates_left_out: u32::try_from(left_out).unwrap_or(u32::MAX),
                resumed_after_tokens: u32::try_from(resumed_after_tokens).unwrap_or(u32::MAX),
                ..AttemptRecord::default()
            }
        });
    }

    /// Adds an attempt: what is recorded next is of it.
    fn push_attempt(&mut self, attempt: impl FnOnce() -> AttemptRecord) {
        let (response, mut number) = (self.response, 0);
        self.write(|record, now| {
            close_holds(record, response, now);
            number = record.attempts.last().map_or(0, |last| last.number) + 1;
            record.attempts_left_out += make_place(&mut record.attempts);
            // Most requests have one: a list that grows by itself begins with room for four.
            record.attempts.reserve_exact(1);
            record.attempts.push(AttemptRecord { number, response, sent_ms: now, ..attempt() });
        });
        self.attempt = number;
    }

    /// The request is sent to a second engine while the first one has said nothing: its recorder.
    pub(crate) fn hedge(
        &self,
        new: NewAttempt<'_>,
        candidates: impl ExactSizeIterator<Item = EndpointScore>,
    ) -> Self {
        let (request, response) = (self.request.clone(), self.response);
        let mut second = Self { request, response, repeats_prompt: self.repeats_prompt, ..Self::default() };
        second.attempt(new, candidates);
        second
    }

    /// The request leaves for a model of a provider, as this limit allows.
    pub(crate) fn left(&mut self, provider: &Provider, model: &str, limit: &ZoneLimit, prompt_tokens: u64) {
        let (name, price) = (provider.full_name(), provider.price(model));
        self.outside =
            Some(OutsideAnswer { provider: name, price, prompt_tokens, reported_cost: None, usage: None });
        self.write(|record, _| record.farthest = record.farthest.max(provider.spec.zone));
        self.push_attempt(|| {
            let provider = ProviderRecord {
                name: provider.full_name(),
                model: shortened(model),
                zone: provider.spec.zone.as_str().into(),
                limit: limit.zone().as_str().into(),
                limit_by: shortened(limit.by()),
            };
            AttemptRecord { provider: Some(Box::new(provider)), ..AttemptRecord::default() }
        });
    }

    /// A run of a Pipeline answers the request: its `namespace/name`.
    pub(crate) fn ran(&mut self, pipeline: &str, run: &str) {
        self.outside = None;
        self.push_attempt(|| {
            let pipeline = PipelineRecord { name: pipeline.to_owned(), run: run.to_owned() };
            AttemptRecord { pipeline: Some(Box::new(pipeline)), ..AttemptRecord::default() }
        });
    }

    /// What the provider says that its answer cost.
    pub(crate) fn reported_cost(&mut self, cost: Option<Money>) {
        if let Some(outside) = &mut self.outside {
            outside.reported_cost = cost;
        }
    }

    /// Providers that could have answered and were not asked.
    pub(crate) fn skipped(&self, skipped: Vec<SkippedTarget>) {
        if skipped.is_empty() {
            return;
        }
        self.write(|record, _| {
            for one in skipped {
                let is_known =
                    |known: &SkippedTarget| (&known.provider, &known.model) == (&one.provider, &one.model);
                if record.skipped.len() < MAX_PARTS && !record.skipped.iter().any(is_known) {
                    record.skipped.push(one);
                }
            }
        });
    }

    /// The engine has prepared the prompt.
    pub(crate) fn prepared(&self) {
        self.change_attempt(|attempt, now| attempt.prepared_ms = Some(now));
    }

    /// The request left the engine's queue, with so many tokens of its prompt.
    pub(crate) fn started(&self, prompt_tokens: u32) {
        self.change_attempt(|attempt, now| {
            attempt.started_ms = Some(now);
            attempt.prompt_tokens = Some(prompt_tokens);
        });
    }

    /// The engine sent its first text, or all of its answer.
    pub(crate) fn first_token(&self) {
        self.change_attempt(|attempt, now| attempt.first_token_ms = Some(now));
        self.write(|record, now| {
            record.first_token_ms.get_or_insert(now);
            if let Some(outside) = &self.outside {
                record.outside.insert(self.response, outside.clone());
            }
        });
    }

    /// The engine was full.
    pub(crate) fn busy(&self, message: &str) {
        self.end_attempt(AttemptOutcome::Busy { message: shortened(message) });
    }

    /// Another engine sent its first text before this one.
    pub(crate) fn overtaken(&self) {
        self.end_attempt(AttemptOutcome::Overtaken);
    }

    /// It was taken back from one of two engines, because of what the other one said.
    pub(crate) fn taken_back(&self) {
        self.end_attempt(AttemptOutcome::Cancelled);
    }

    /// The engine was lost.
    pub(crate) fn lost(&self, message: &str) {
        let after_tokens = self.generated;
        self.end_attempt(AttemptOutcome::Lost { message: shortened(message), after_tokens });
    }

    /// No engine would do better.
    pub(crate) fn rejected(&self, error: &GatewayError) {
        self.write(|record, _| record.quoted |= may_quote(error.kind));
        self.end_attempt(AttemptOutcome::Rejected { code: error.kind.as_str().into() });
    }

    /// The response has so many tokens so far, whichever engines generated them.
    pub(crate) fn generated(&mut self, tokens: usize) {
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        if let Some(request) = &self.request {
            request.0.generated.fetch_add(tokens.saturating_sub(self.generated), Ordering::Relaxed);
        }
        self.generated = tokens;
    }

    /// The tokens of the prompt were counted, and nothing was computed of them.
    pub(crate) fn counted(&self, prompt_tokens: u32) {
        self.write(|record, _| record.is_count = true);
        self.finished(None, Usage { prompt_tokens, ..Usage::default() });
    }

    /// The response is complete; the request with the last of them.
    pub(crate) fn finished(&self, reason: Option<FinishReason>, usage: Usage) {
        self.change_attempt(|attempt, now| {
            attempt.ended_ms = Some(now);
            attempt.outcome = Some(AttemptOutcome::Answered);
            attempt.prompt_tokens = Some(usage.prompt_tokens);
            attempt.cached_tokens = Some(usage.cached_tokens);
        });
        self.write(|record, now| {
            record.complete += 1;
            if let Some(outside) = &self.outside {
                let answer = OutsideAnswer { usage: Some(usage), ..outside.clone() };
                record.outside.insert(self.response, answer);
            }
            record.completion_tokens = record.completion_tokens.saturating_add(usage.completion_tokens);
            if !self.repeats_prompt {
                record.prompt_tokens = record.prompt_tokens.saturating_add(usage.prompt_tokens);
                record.cached_tokens = record.cached_tokens.saturating_add(usage.cached_tokens);
            }
            if record.complete >= record.responses {
                end(record, now, RequestEnd::Finished { reason: reason.map(|one| one.as_str().into()) });
            }
        });
    }

    /// The request failed, before or during its response.
    pub(crate) fn failed(&self, error: &GatewayError) {
        self.write(|record, now| {
            let message = loggable(error).filter(|_| !record.quoted);
            let (code, param) = (error.kind.as_str().into(), error.param.as_deref().map(shortened));
            end(record, now, RequestEnd::Failed { code, message, param });
        });
    }
}

impl From<&RequestFacts> for FactsRecord {
    fn from(facts: &RequestFacts) -> Self {
        let part = |(name, value): (&'static str, f64)| ScorePart { name: name.into(), value };
        Self {
            task: task_name(facts.task).into(),
            complexity: facts.complexity.score(),
            complexity_parts: facts.complexity.parts().map(part).collect(),
            prompt_tokens: facts.prompt_tokens,
            tools: facts.tools,
        }
    }
}

/// Ends the request, unless it has ended.
fn end(record: &mut RequestRecord, now: f64, end: RequestEnd) {
    if record.end.is_some() {
        return;
    }
    for hold in record.holds.iter_mut().filter(|hold| hold.until_ms.is_none()) {
        hold.until_ms = Some(now);
    }
    for attempt in record.attempts.iter_mut().filter(|attempt| attempt.outcome.is_none()) {
        attempt.ended_ms = Some(now);
        attempt.outcome = Some(AttemptOutcome::Cancelled);
    }
    record.total_ms = now;
    record.end = Some(end);
}

fn close_holds(record: &mut RequestRecord, response: u32, now: f64) {
    let open = record.holds.iter_mut().filter(|hold| hold.response == response && hold.until_ms.is_none());
    open.for_each(|hold| hold.until_ms = Some(now));
}

/// Removes one from the middle of a full list: how it began and how it ended say most. Returns how many it removed.
fn make_place<T>(list: &mut Vec<T>) -> u32 {
    if list.len() < MAX_PARTS {
        return 0;
    }
    list.remove(MAX_PARTS / 2);
    1
}
