//! Requests for vectors of texts and for scores of pairs: of models that do not generate, in place of the scheduler.
//! Nothing is kept of a text, so there are no slots: a request is tokenised, its texts are put into batches, the shortest
//! first, and between batches every other request has its turn.
//!
//! ```text
//! request ─▶ validate ─▶ tokenise (threads of their own) ─▶ batches ─▶ turn ─▶ MLX thread ─▶ vectors, in order
//!    └───────────┴──────────────────┴───────────────────────────┴── cancelled: dropped with the call
//! ```

mod batches;
mod pooled_request;
#[cfg(test)]
mod tests;
mod text_tokenizer;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use russet_model::cost::PREFILL_TOKENS;
use russet_model::description::Task;
use russet_rpc::engine as pb;
use russet_wire::event::{FailureKind, GenerationFailure};
use thiserror::Error;
use tokio::sync::{Semaphore, oneshot, watch};

use crate::executor::{Executor, ExecutorError, PooledModel, PooledText};
use crate::lifecycle::{FailureReport, Lifecycle, Phase};
use crate::metrics::EngineMetrics;
use crate::scheduler::{TokenizerPool, overloaded, unavailable};
use batches::batches;
use pooled_request::PooledRequest;
pub use text_tokenizer::{TextInput, TextTokenizer};

/// Most texts of a request: OpenAI's limit.
pub const MAX_INPUTS: usize = 2048;
/// Most bytes of the vectors of a response.
pub const MAX_REPLY_BYTES: usize = 32 << 20;
/// Most requests that wait or are computed. Their texts are bounded in bytes as well.
const MAX_REQUESTS: usize = 1024;

/// Vectors of texts, in their order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PooledTexts {
    /// A vector of each; a score is one of one number.
    pub vectors: Vec<Vec<f32>>,
    /// Tokens of each.
    pub tokens: Vec<u32>,
    /// Microseconds of their batches, in which there is no other request.
    pub engine_microseconds: u64,
}

/// Takes requests.
#[derive(Clone)]
pub struct PoolingIntake(Arc<PoolingState>);

struct PoolingState {
    compute: Arc<dyn Executor>,
    model: PooledModel,
    tokenizer: TextTokenizer,
    tokenizer_pool: TokenizerPool,
    /// Most tokens of a text.
    context_tokens: u32,
    /// One batch at a time, in the order in which requests ask for it: so that a long request does not keep the others
    /// waiting for all of its batches.
    turn: Semaphore,
    /// Requests that wait or are computed.
    active: watch::Sender<usize>,
    life: Lifecycle,
    metrics: EngineMetrics,
}

/// Why a sound model cannot serve.
#[derive(Debug, Error)]
pub enum PoolingError {
    /// The system cannot start threads.
    #[error("cannot start the threads that read requests: {0}")]
    Threads(#[from] std::io::Error),
    /// The test text was refused, or a step failed.
    #[error("the test text got no vector: {0}")]
    Failed(String),
    /// The weights give no numbers.
    #[error(
        "some numbers of the test text's vector are not finite; the weights are damaged or overflow in this dtype, try dtype F32"
    )]
    NotFinite,
}

impl PoolingIntake {
    /// Of a model that is loaded.
    pub fn new(
        compute: Arc<dyn Executor>,
        model: PooledModel,
        tokenizer: TextTokenizer,
        context_tokens: u32,
        life: Lifecycle,
        metrics: EngineMetrics,
    ) -> Result<Self, PoolingError> {
        Ok(Self(Arc::new(PoolingState {
            compute,
            model,
            tokenizer,
            tokenizer_pool: TokenizerPool::start()?,
            context_tokens,
            turn: Semaphore::new(1),
            active: watch::Sender::new(0),
            life,
            metrics,
        })))
    }

    /// Computes a test text before the first request.
    pub async fn smoke(&self) -> Result<(), PoolingError> {
        let input = match self.0.model.task {
            Task::Rerank => TextInput::Pair("Hello".into(), "world".into()),
            _ => TextInput::Text("Hello".into()),
        };
        let begun = Instant::now();
        let texts = self.tokenize(vec![input], None).await;
        let pooled = match texts {
            Ok(texts) => self.compute(texts, None).await,
            Err(failure) => Err(failure),
        };
        let pooled = pooled.map_err(|failure| PoolingError::Failed(failure.message))?;
        let finite = pooled.vectors.iter().flatten().all(|number| number.is_finite());
        self.0.metrics.record_smoke_test(begun.elapsed());
        if finite { Ok(()) } else { Err(PoolingError::NotFinite) }
    }

    /// Waits until the rank has failed, or until it was asked to stop and every request has ended.
    pub async fn run(&self) {
        let life = &self.0.life;
        tokio::select! {
            biased;
            _ = life.wait_failed() => return,
            _ = life.wait_until(|now| now.draining.is_some()) => {}
        }
        let mut active = self.0.active.subscribe();
        tokio::select! {
            biased;
            _ = life.wait_failed() => {}
            _ = active.wait_for(|active| *active == 0) => life.stop(),
        }
    }

    /// Vectors of the texts of a request. Dropping the future cancels it: batches that have not begun are not computed.
    pub async fn embed(&self, request: pb::EmbedRequest) -> Result<(u32, PooledTexts), GenerationFailure> {
        let model = &self.0.model;
        if model.task != Task::Embed {
            return Err(invalid(
                "the model scores documents and embeds no texts; send the request to /v1/rerank, or name a model that embeds".to_owned(),
            ));
        }
        let pb::EmbedRequest { id: _, inputs, dimensions, truncate_prompt_tokens, deadline_milliseconds } =
            request;
        let dimensions = dimensions.unwrap_or(model.width);
        if dimensions == 0 || dimensions > model.width {
            return Err(invalid(format!(
                "dimensions is {dimensions}, but vectors of this model have 1 to {}; leave it out for all",
                model.width
            )));
        }
        check_count("input", inputs.len())?;
        let bytes = inputs.len().saturating_mul(dimensions as usize).saturating_mul(size_of::<f32>());
        if bytes > MAX_REPLY_BYTES {
            return Err(invalid(format!(
                "{} vectors of {dimensions} numbers have {bytes} bytes, more than the limit of {MAX_REPLY_BYTES} of a response; send fewer inputs at once",
                inputs.len()
            )));
        }
        let inputs = inputs.into_iter().map(|input| match input.input {
            Some(pb::embed_input::Input::Text(text)) => TextInput::Text(text),
            Some(pb::embed_input::Input::TokenIds(pb::TokenIds { ids })) => TextInput::Tokens(ids),
            None => TextInput::Tokens(Vec::new()),
        });
        let work = self.pool(inputs.collect(), truncate_prompt_tokens);
        let mut pooled = self.timed(deadline_milliseconds, work).await?;
        if dimensions < model.width {
            pooled.vectors.iter_mut().for_each(|vector| shorten(vector, dimensions as usize));
        }
        Ok((dimensions, pooled))
    }

    /// Scores of the documents of a request. Dropping the future cancels it.
    pub async fn rerank(&self, request: pb::RerankRequest) -> Result<PooledTexts, GenerationFailure> {
        if self.0.model.task != Task::Rerank {
            return Err(invalid(
                "the model embeds texts and scores no documents; send the request to /v1/embeddings, or name a cross-encoder".to_owned(),
            ));
        }
        let pb::RerankRequest { id: _, query, documents, truncate_prompt_tokens, deadline_milliseconds } =
            request;
        check_count("documents", documents.len())?;
        let query: Arc<str> = query.into();
        let pairs = documents.into_iter().map(|document| TextInput::Pair(query.clone(), document));
        let work = self.pool(pairs.collect(), truncate_prompt_tokens);
        self.timed(deadline_milliseconds, work).await
    }

    /// The result of `work` within the request's deadline.
    async fn timed(
        &self,
        milliseconds: Option<u64>,
        work: impl Future<Output = Result<PooledTexts, GenerationFailure>>,
    ) -> Result<PooledTexts, GenerationFailure> {
        let Some(milliseconds) = milliseconds else { return work.await };
        let timed = tokio::time::timeout(Duration::from_millis(milliseconds), work).await;
        timed.unwrap_or_else(|_| {
            let message =
                format!("the texts were not computed within the request's deadline of {milliseconds} ms");
            Err(GenerationFailure { kind: FailureKind::DeadlineExceeded, message })
        })
    }

    async fn pool(
        &self,
        inputs: Vec<TextInput>,
        truncate: Option<i32>,
    ) -> Result<PooledTexts, GenerationFailure> {
        if let Some(reason) = self.0.life.unavailable_reason() {
            return Err(unavailable(reason));
        }
        let mut request = PooledRequest::begin(self.clone())?;
        let result = match self.tokenize(inputs, truncate).await {
            Ok(texts) => self.compute(texts, Some(&mut request)).await,
            Err(failure) => Err(failure),
        };
        request.end(&result);
        result
    }

    /// The texts in tokens.
    async fn tokenize(
        &self,
        inputs: Vec<TextInput>,
        truncate: Option<i32>,
    ) -> Result<Vec<PooledText>, GenerationFailure> {
        let context = self.0.context_tokens;
        let limit = match truncate {
            None => None,
            Some(-1) => Some(context),
            Some(tokens) if tokens > 0 && tokens as u32 <= context => Some(tokens as u32),
            Some(tokens) => {
                return Err(invalid(format!(
                    "truncate_prompt_tokens is {tokens}; use 1 to {context}, the longest text of this model, or -1 for that"
                )));
            }
        };
        let bytes = inputs.iter().map(TextInput::bytes).sum();
        let room = self.0.tokenizer_pool.reserve(bytes).map_err(|queued| {
            overloaded(format!(
                "texts of {queued} bytes wait to be tokenised, and these are too long to wait with them; try again later"
            ))
        })?;
        let (sender, receiver) = oneshot::channel();
        let (state, leaving) = (self.0.clone(), Arc::new(AtomicBool::new(false)));
        let _left = SetOnDrop(leaving.clone());
        self.0.tokenizer_pool.spawn(room, move || {
            let mut texts = Vec::with_capacity(inputs.len());
            for (index, input) in inputs.into_iter().enumerate() {
                if leaving.load(Ordering::Relaxed) {
                    return;
                }
                match state.tokenizer.tokenize(input, index, state.context_tokens, limit, &state.model) {
                    Ok(text) => texts.push(text),
                    Err(failure) => return drop(sender.send(Err(failure))),
                }
            }
            let _ = sender.send(Ok(texts));
        });
        receiver.await.unwrap_or_else(|_| {
            let message =
                "the texts could not be turned into tokens: a bug of this engine, see its log".to_owned();
            Err(GenerationFailure { kind: FailureKind::Internal, message })
        })
    }

    /// Vectors of texts, computed batch by batch. Those of a request are counted; those of the test text are not.
    async fn compute(
        &self,
        texts: Vec<PooledText>,
        mut request: Option<&mut PooledRequest>,
    ) -> Result<PooledTexts, GenerationFailure> {
        let tokens: Vec<u32> = texts.iter().map(|text| text.tokens.len() as u32).collect();
        let mut vectors: Vec<Vec<f32>> = vec![Vec::new(); texts.len()];
        let mut texts: Vec<Option<PooledText>> = texts.into_iter().map(Some).collect();
        for batch in batches(&tokens, PREFILL_TOKENS.max(self.0.context_tokens)) {
            let own: Vec<PooledText> =
                batch.iter().filter_map(|&index| texts.get_mut(index)?.take()).collect();
            let length: usize = own.iter().map(|text| text.tokens.len()).sum();
            let _turn = self.0.turn.acquire().await;
            let now = self.0.life.status();
            if now.phase == Phase::Failed {
                return Err(unavailable(now.message));
            }
            if let Some(request) = &mut request {
                request.run();
            }
            let pooled = self.0.compute.pool(own).await.unwrap_or_else(|_| {
                Err(ExecutorError::Local("the compute thread has ended; see the engine's log".to_owned()))
            });
            let elapsed = request.as_mut().map(|request| request.end_batch());
            match pooled {
                Ok(pooled) => {
                    if let (Some(request), Some(elapsed)) = (&request, elapsed) {
                        request.count(batch.len(), length, elapsed);
                    }
                    for (index, vector) in batch.into_iter().zip(pooled) {
                        vectors[index] = vector;
                    }
                }
                Err(error) => {
                    let message = error.to_string();
                    self.0.life.fail_with(FailureReport::from(error));
                    return Err(unavailable(message));
                }
            }
        }
        if vectors.iter().flatten().any(|number| !number.is_finite()) {
            let message =
                "some numbers of a vector are not finite; the weights overflow in this dtype, try dtype F32";
            return Err(GenerationFailure { kind: FailureKind::Internal, message: message.to_owned() });
        }
        let engine_microseconds = request.map_or(0, |request| request.engine_microseconds());
        Ok(PooledTexts { vectors, tokens, engine_microseconds })
    }
}

/// Tells a thread that its request has gone.
struct SetOnDrop(Arc<AtomicBool>);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn check_count(what: &str, count: usize) -> Result<(), GenerationFailure> {
    match count {
        1..=MAX_INPUTS => Ok(()),
        _ => Err(invalid(format!("{what} has {count} texts; send 1 to {MAX_INPUTS} at once"))),
    }
}

/// The first numbers of a vector, made as long as one again.
fn shorten(vector: &mut Vec<f32>, dimensions: usize) {
    vector.truncate(dimensions);
    let norm = vector.iter().map(|number| f64::from(*number).powi(2)).sum::<f64>().sqrt();
    if norm > 0.0 {
        vector.iter_mut().for_each(|number| *number = (f64::from(*number) / norm) as f32);
    }
}

/// The failure of a request that this model cannot serve.
pub(crate) fn invalid(message: String) -> GenerationFailure {
    GenerationFailure { kind: FailureKind::InvalidRequest, message }
}
