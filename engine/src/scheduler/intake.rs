//! Intake: validates a request, tokenises it off the serving threads, and queues it or refuses it with a
//! typed failure.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use jiff::Zoned;
use prometheus::IntGauge;
use russet_chat::template::{Prompt, TemplateArguments};
use russet_rpc::engine::EngineLoad;
use russet_wire::conversation::{Message, Tool};
use russet_wire::event::{FailureKind, FinishReason, GenerationFailure, Usage};
use russet_wire::request::{GenerationRequest, RawPrompt, StructuredOutput};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::byte_budget::ByteReservation;
use super::deadline::{RequestProgress, deadline_failure};
use super::kv_budget;
use super::queue_limit::{QueueLimit, overloaded};
use super::report_budget::ReportBudget;
use super::request::ScheduledRequest;
use super::response_sink::{ResponseSink, SentEvent, unavailable};
use super::tokenizer_pool::TokenizerPool;
use super::wait_queue::QueuePosition;
use crate::executor::DraftRewind;
use crate::lifecycle::Lifecycle;
use crate::metrics::EngineMetrics;
use crate::prefix_cache::block_hash::BlockHash;
use crate::prefix_cache::events::{BlockEvent, BlockEvents, marked_blocks};
use crate::sequence::{self, OutputStream, PromptReport, ResumeError, Sequence, ThinkingBudget};
use crate::served_adapters::ServedAdapters;
use crate::speculative::Proposers;
use crate::tokenizer::{
    ChatTokenizer, PreparedPrompt, PromptFit, PromptLimits, PromptSource, ResponseRules, TokenizerError,
};

/// Submits requests to the scheduler.
#[derive(Clone)]
pub struct Intake {
    pub(super) requests: UnboundedSender<ScheduledRequest>,
    pub(super) tokenizer_pool: TokenizerPool,
    pub(super) tokenizer: Arc<ChatTokenizer>,
    pub(super) context_tokens: u32,
    pub(super) slots: u32,
    pub(super) kv_tokens: u64,
    pub(super) proposers: Proposers,
    pub(super) draft_rewind: DraftRewind,
    pub(super) queue_limit: QueueLimit,
    pub(super) started: Instant,
    /// Requests so far.
    pub(super) next_number: Arc<AtomicU64>,
    pub(super) life: Lifecycle,
    pub(super) metrics: EngineMetrics,
    pub(super) block_events: BlockEvents,
    pub(super) root: BlockHash,
    pub(super) adapters: ServedAdapters,
    pub(super) reports: ReportBudget,
}

impl Intake {
    /// Submits a request and waits until its prompt is prepared, or refused: a gateway that loses this engine before
    /// the response begins knows what the engine was doing.
    pub async fn prepare(&self, request: GenerationRequest) -> UnboundedReceiver<SentEvent> {
        let (preparing, prepared) = oneshot::channel();
        let receiver = self.submit(request, preparing);
        // It is dropped, not sent: there is no other news.
        let _ = prepared.await;
        receiver
    }

    /// Submits a request; its events arrive on the receiver. Dropping the receiver cancels the request. `preparing` is
    /// dropped when the prompt is prepared.
    pub(super) fn submit(
        &self,
        request: GenerationRequest,
        preparing: oneshot::Sender<()>,
    ) -> UnboundedReceiver<SentEvent> {
        let (events, receiver) = mpsc::unbounded_channel();
        let sink = ResponseSink::new(request.id.clone(), events, self.reports.clone(), self.metrics.clone());
        if let Err(failure) = sequence::validate(&request) {
            sink.fail(failure);
            return receiver;
        }
        if let Some(reason) = self.life.unavailable_reason() {
            sink.fail(unavailable(reason));
            return receiver;
        }
        let position = QueuePosition {
            priority: request.priority,
            arrived: sink.arrived - self.started,
            number: self.next_number.fetch_add(1, Ordering::Relaxed),
        };
        let ticket = match self.queue_limit.acquire(position.number, position.priority) {
            Ok(ticket) => ticket,
            Err(failure) => {
                sink.fail(failure);
                return receiver;
            }
        };
        let room = match self.reserve(&request) {
            Ok(room) => room,
            Err(failure) => {
                sink.fail(failure);
                return receiver;
            }
        };
        let intake = self.clone();
        self.tokenizer_pool.spawn(room, move || {
            let _preparing = preparing;
            let timeout = request.deadline_milliseconds.map(Duration::from_millis);
            let (mut sequence, finished) = match intake.tokenize(&request, &sink) {
                Ok(prepared) => prepared,
                Err(_) if sink.is_closed() => return sink.finish(FinishReason::Cancelled, Usage::default()),
                Err(failure) => {
                    let failure = overdue(timeout, &sink).unwrap_or(failure);
                    return sink.fail(failure);
                }
            };
            if let Some(reason) = finished {
                // The engine that produced this output was lost after its last token and before its end; or the prompt is
                // all that is asked for, and no log-probability of it.
                sink.send(sequence.started_event());
                return match sink.report(sequence.prompt_events()) {
                    Ok(()) => sink.finish(reason, sequence.usage()),
                    Err(failure) => sink.fail(failure),
                };
            }
            let root = intake.root.scoped(sequence.prefix_scope());
            let marked = marked_blocks(root, sequence.prompt(), &request.prefix_marks);
            intake.block_events.publish_marks(marked);
            intake.enqueue(ScheduledRequest::new(position, sequence, sink, timeout, ticket));
        });
        receiver
    }

    /// Tokens of a request's prompt, also of one that is longer than the context. Dropping the future cancels it.
    pub async fn count_tokens(&self, request: GenerationRequest) -> Result<u32, GenerationFailure> {
        sequence::validate(&request)?;
        if let Some(reason) = self.life.unavailable_reason() {
            return Err(unavailable(reason));
        }
        let (sender, counted) = oneshot::channel();
        let (intake, room) = (self.clone(), self.reserve(&request)?);
        self.tokenizer_pool.spawn(room, move || {
            let limits = PromptLimits { context_tokens: u32::MAX, is_abandoned: &|| sender.is_closed() };
            let prepared = intake.prepared(&request, PromptFit::default(), &limits);
            // Its caller may have left.
            let _ = sender.send(prepared.map(|prepared| prepared.tokens.len() as u32));
        });
        counted.await.unwrap_or_else(|_| {
            let message =
                "the prompt could not be turned into tokens: a bug of this engine, see its log".to_owned();
            Err(GenerationFailure { kind: FailureKind::Internal, message })
        })
    }

    /// Room for the prompt of a request among those that wait to be tokenised.
    fn reserve(&self, request: &GenerationRequest) -> Result<ByteReservation, GenerationFailure> {
        self.tokenizer_pool.reserve(prompt_bytes(request)).map_err(|queued| {
            overloaded(format!(
                "prompts of {queued} bytes wait to be tokenised, and this one is too long to wait with them; try again later"
            ))
        })
    }

    /// What this engine has to do now, and how quick it is.
    pub fn load(&self) -> EngineLoad {
        let metrics = &self.metrics;
        let throughput = metrics.throughput.lock().average();
        let count = |gauge: &IntGauge| u32::try_from(gauge.get()).unwrap_or(0);
        EngineLoad {
            running: count(&metrics.running),
            waiting: count(&metrics.waiting),
            slots: self.slots,
            unread_tokens: u64::try_from(metrics.unread_tokens.get()).unwrap_or(0),
            prompt_tokens_per_second: throughput.map_or(0.0, |measured| measured.prompt_tokens_per_second),
            tokens_per_second: throughput.map_or(0.0, |measured| measured.tokens_per_second),
        }
    }

    /// Root hash of this model, and a subscription to the blocks cached here.
    pub fn prefixes(&self) -> (BlockHash, mpsc::Receiver<BlockEvent>) {
        (self.root, self.block_events.subscribe())
    }

    /// The sequence of a request, and its finish reason if the emitted tokens already end it. Ends early once the
    /// caller has left or the deadline has passed.
    fn tokenize(
        &self,
        request: &GenerationRequest,
        sink: &ResponseSink,
    ) -> Result<(Sequence, Option<FinishReason>), GenerationFailure> {
        let adapter = self.adapters.find(&request.adapter)?;
        let timeout = request.deadline_milliseconds.map(Duration::from_millis);
        let limits = PromptLimits {
            context_tokens: u32::try_from(self.kv_tokens).unwrap_or(u32::MAX).min(self.context_tokens),
            is_abandoned: &|| sink.is_closed() || overdue(timeout, sink).is_some(),
        };
        let fit = PromptFit {
            truncate_prompt_tokens: request.truncate_prompt_tokens,
            context_overflow: request.context_overflow,
            max_tokens: request.max_tokens,
        };
        let PreparedPrompt { tokens: prompt, parser, grammar, thinking_end } =
            self.prepared(request, fit, &limits)?;
        let limit = sequence::max_new_tokens(prompt.len(), request.max_tokens, self.context_tokens)?;
        let limit = kv_budget::max_answer_tokens(prompt.len() as u32, limit, self.kv_tokens)?;
        let seed = request.sampling.seed.unwrap_or_else(rand::random);
        let (ends, text) = (self.tokenizer.eos_token_ids().clone(), self.tokenizer.detokenizer());
        let mut output = OutputStream::new(request, limit, ends, text)
            .with_parser(parser)
            .with_grammar(grammar)
            .with_thinking_budget(self.thinking_budget(request, thinking_end)?)
            .with_token_texts(request.logprobs.map(|_| self.tokenizer.token_texts()));
        let checked = self.tokenizer.check_emitted(&request.emitted).map_err(ResumeError::from);
        let finished = checked.and_then(|()| output.resume(&request.emitted));
        let finished = finished.map_err(|error| error.failure())?;
        let report = PromptReport::new(request, prompt.len(), || self.tokenizer.token_texts())?;
        let sequence = Sequence::new(request, prompt, seed, output).with_adapter(adapter);
        let mut sequence = sequence.with_prompt_report(report);
        if let Some(dry) = &request.sampling.dry {
            let breakers = self.tokenizer.last_tokens(&dry.sequence_breakers);
            sequence = sequence.with_breakers(breakers.map_err(|error| prompt_failure(&error))?);
        }
        let finished = finished.or_else(|| sequence.ends_with_prompt().then_some(FinishReason::Length));
        Ok((sequence.with_speculation(self.proposers, self.draft_rewind), finished))
    }

    /// The prompt of a request in tokens, with what reads and constrains the answer.
    fn prepared(
        &self,
        request: &GenerationRequest,
        fit: PromptFit,
        limits: &PromptLimits<'_>,
    ) -> Result<PreparedPrompt, GenerationFailure> {
        let arguments = TemplateArguments::new(&request.template_arguments)
            .map_err(|error| prompt_failure(&error.into()))?;
        let conversation = Prompt {
            messages: &request.messages,
            tools: &request.tools,
            arguments: &[&arguments],
            continue_final_message: request.continue_final_message,
            now: &Zoned::now(),
        };
        let rules = ResponseRules {
            tool_choice: Some(&request.tool_choice),
            single_tool_call: request.single_tool_call,
            structured_output: request.structured_output.as_ref(),
        };
        let source = match &request.raw_prompt {
            Some(raw) => PromptSource::Raw(raw),
            None => PromptSource::Conversation(&conversation),
        };
        self.tokenizer.prepare(source, rules, fit, limits).map_err(|error| match error {
            TokenizerError::ContextLength { tokens, .. }
                if self.kv_tokens < u64::from(self.context_tokens) =>
            {
                kv_budget::prompt_exceeds_capacity(&format!("at least {tokens}"), self.kv_tokens)
            }
            error => prompt_failure(&error),
        })
    }

    /// The budget of a request's thinking, on a model that ends it with this text.
    fn thinking_budget(
        &self,
        request: &GenerationRequest,
        end: Option<&str>,
    ) -> Result<ThinkingBudget, GenerationFailure> {
        let (Some(tokens), Some(end)) = (request.thinking_budget, end) else {
            return Ok(ThinkingBudget::default());
        };
        let end = self.tokenizer.encode_marker(end).map_err(|error| prompt_failure(&error))?;
        Ok(ThinkingBudget::new(tokens, end))
    }

    fn enqueue(&self, job: ScheduledRequest) {
        if let Some(failure) = job.rejection(&self.metrics) {
            return job.sink.fail(failure);
        }
        if let Err(mpsc::error::SendError(job)) = self.requests.send(job) {
            let reason = self.life.unavailable_reason().unwrap_or_else(|| "this engine has stopped".into());
            job.sink.fail(unavailable(reason));
        }
    }
}

/// Bytes of a request that the pool holds until they are tokens, each message with what a template keeps of it.
fn prompt_bytes(request: &GenerationRequest) -> usize {
    const MESSAGE_BYTES: usize = 256;
    let message = |message: &Message| MESSAGE_BYTES + message.texts().map(str::len).sum::<usize>();
    let tools: usize = request.tools.iter().flat_map(Tool::texts).map(str::len).sum();
    request.messages.iter().map(message).sum::<usize>()
        + tools
        + request.raw_prompt.as_ref().map_or(0, RawPrompt::bytes)
        + request.template_arguments.len()
        + request.structured_output.as_ref().map_or(0, StructuredOutput::bytes)
        + size_of_val(request.emitted.as_slice())
}

/// The failure of a request whose deadline has passed before it is a sequence.
fn overdue(timeout: Option<Duration>, sink: &ResponseSink) -> Option<GenerationFailure> {
    let waited = sink.arrived.elapsed();
    let progress =
        RequestProgress { timeout: timeout?, waited, generated: 0, prefill_tokens: 0, prefill_time: None };
    deadline_failure(&progress)
}

/// What the request asks for is its own fault; a template that fails on a sound conversation, and a tokenizer that does,
/// are the model's.
fn prompt_failure(error: &TokenizerError) -> GenerationFailure {
    let kind = match error {
        TokenizerError::ContextLength { .. } | TokenizerError::Undivided { .. } => {
            FailureKind::ContextLengthExceeded
        }
        TokenizerError::Template(error) if !error.is_refusal() => FailureKind::Internal,
        TokenizerError::Template(_)
        | TokenizerError::Grammar(_)
        | TokenizerError::NoTemplate
        | TokenizerError::NotInModel { .. }
        | TokenizerError::LongWord { .. } => FailureKind::InvalidRequest,
        TokenizerError::Abandoned => FailureKind::DeadlineExceeded,
        _ => FailureKind::Internal,
    };
    GenerationFailure { kind, message: error.to_string() }
}
