//! The executor interface: what the serving half asks of the half that owns MLX. The implementation is the
//! MLX thread in `runtime`; tests use a fake, so the serving half is tested without MLX. Not here: text,
//! sockets, clocks.
//!
//! ```text
//! rank 0:      load ─▶ join ─▶ run [(slot, offset, tokens, sample spec), …] ─▶ [[token, …], …]
//! other ranks: load ─▶ join ─▶ run [(slot, offset, tokens), …]              ─▶ no tokens
//! all:         … ─▶ group lost ─▶ leave_group ─▶ load (weights are in memory) ─▶ join ─▶ …
//! ```

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use russet_model::{
    description::{Description, Task},
    state::Rewind,
};
use russet_wire::request::Sampling;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::sync::oneshot;

use crate::lifecycle::{FailureCause, FailureReport};
use crate::logit_edits::LogitEdits;
use crate::prefix_cache::{CacheCommand, block_hash::BlockHash};
use crate::speculative::MAX_DRAFT_TOKENS;
use crate::step_profiler::StepTotals;
use crate::token_masks::StepMask;

/// The tokens of one sequence that a batch runs through this rank's layers.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceStep {
    /// KV-cache slot: a number below `maxSequences`.
    pub slot: u32,
    /// Tokens of the sequence that are already in the KV cache.
    pub offset: u32,
    /// The next tokens. Empty means the token sampled last in this slot, which may not be known yet: in a
    /// group with one stage, the tensor ranks exchange it while they compute.
    pub tokens: Vec<u32>,
    /// Number of draft tokens at the end of `tokens`: on a step that samples, one more token is sampled
    /// before each of them. Rejected draft tokens stay in the KV cache until it is truncated; every rank
    /// keeps what its layers need for that.
    pub draft_tokens: u32,
    /// Number of the sequence's adapter, from 1 on in the order of the engine's configuration; 0 is the model itself.
    pub adapter: u32,
    /// How rank 0 samples the next token; absent on prefill steps that do not end the prompt, and on every
    /// other rank.
    pub sample: Option<SampleSpec>,
    /// What rank 0 tells of the tokens of a prompt that follow those of the step; on steps that prefill such a prompt.
    pub score: Option<ScoreSpec>,
}

/// What is told of given tokens: how probable each one is behind those before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScoreSpec {
    /// The token that follows each token of the step.
    pub tokens: Vec<u32>,
    /// Of how many of the most probable tokens in its place the log-probabilities are told too.
    pub top: u32,
}

/// How probable the model finds a token that it was given: its log-probability in 32 bits, before bans, masks, filters and
/// the temperature.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenScore {
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// One more than the number of tokens that are more probable.
    pub rank: u32,
    /// The most probable tokens and theirs, the first one first; of equal ones that with the lower id.
    pub top: Vec<(u32, f32)>,
}

impl SequenceStep {
    /// Number of tokens that the step adds to the KV cache.
    pub fn length(&self) -> u32 {
        self.tokens.len().max(1) as u32
    }

    /// Number of tokens of which scores are computed.
    pub fn scored_tokens(&self) -> u32 {
        self.score.as_ref().map_or(0, |score| score.tokens.len() as u32)
    }

    /// Sample specs of its output tokens: one for each draft token and one after them; empty if the step does
    /// not sample.
    pub fn samples(&self) -> impl Iterator<Item = SampleSpec> {
        let at = move |choice: &SampleSpec, position: u32| SampleSpec {
            index: choice.index + position,
            mask: choice.mask.as_ref().map(|mask| mask.after(position)),
            ..choice.clone()
        };
        self.sample
            .iter()
            .flat_map(move |choice| (0..=self.draft_tokens).map(move |position| at(choice, position)))
    }
}

/// A request to the draft model: propose the next tokens of a sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftRequest {
    /// Slot of the draft model's KV cache, as in [`SequenceStep`].
    pub slot: u32,
    /// Tokens of the sequence that stay in that KV cache; it is truncated after them.
    pub offset: u32,
    /// The tokens that follow them.
    pub tokens: Vec<u32>,
    /// Number of draft tokens to propose.
    pub draft_tokens: u32,
    /// Sampling of the first draft token; each one is sampled as if the draft model were the target model.
    pub sample: SampleSpec,
}

/// How to sample the next token from the logits of a step's last token.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleSpec {
    /// Temperature and filters; `seed` replaces `sampling.seed`.
    pub sampling: Arc<Sampling>,
    /// Fixed for a request, so that the sampled token is a function of (logits, seed, index).
    pub seed: u64,
    /// Number of output tokens before this one.
    pub index: u32,
    /// Tokens that must not be sampled.
    pub banned: Arc<[u32]>,
    /// Changes of the logits.
    pub edits: Option<Arc<LogitEdits>>,
    /// The tokens that may be sampled at all.
    pub mask: Option<StepMask>,
    /// Whether log-probabilities are asked for, and of how many of the most probable tokens besides the sampled one.
    pub top_logprobs: Option<u32>,
}

impl SampleSpec {
    /// The most probable token, of all of them.
    pub fn greedy(index: u32) -> Self {
        Self {
            sampling: Arc::default(),
            seed: 0,
            index,
            banned: Arc::from([]),
            edits: None,
            mask: None,
            top_logprobs: None,
        }
    }

    /// Fails if the ban list leaves no token of the vocabulary.
    pub fn check(&self, vocabulary: u32) -> Result<(), SampleError> {
        // The list is usually short, so this check is usually enough.
        if self.banned.len() < vocabulary as usize
            || (0..vocabulary).any(|token| !self.banned.contains(&token))
        {
            Ok(())
        } else {
            Err(SampleError::AllBanned { vocabulary: vocabulary as usize })
        }
    }
}

/// No token can be sampled.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum SampleError {
    /// NaN or infinite logits.
    #[error(
        "some logits are no finite numbers; the weights are damaged or overflow in this dtype, try dtype F32"
    )]
    NotFinite,
    /// Every token is banned.
    #[error("all {vocabulary} tokens are banned; ban fewer")]
    AllBanned {
        /// Size of the vocabulary.
        vocabulary: usize,
    },
    /// The grammar of the response allows no token that is not banned, or went beyond its limits.
    #[error("{0}")]
    Grammar(String),
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    /// Its id.
    pub id: u32,
    /// Where the sample spec asks for them.
    pub logprobs: Option<TopLogprobs>,
}

impl From<u32> for SampledToken {
    fn from(id: u32) -> Self {
        Self { id, logprobs: None }
    }
}

impl PartialEq<u32> for SampledToken {
    fn eq(&self, id: &u32) -> bool {
        self.id == *id
    }
}

/// Log-probabilities before bans, masks, filters and the temperature.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TopLogprobs {
    /// Of the sampled token.
    pub sampled: f32,
    /// The most probable tokens and theirs, the first one first.
    pub top: Vec<(u32, f32)>,
}

/// Addresses of this rank's MLX rings: one per member, in ring order. Empty for a ring that this rank is not
/// part of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Addresses {
    /// Ring of the tensor ranks of its stage.
    pub tensor: Vec<SocketAddr>,
    /// Pipeline ring: the same tensor rank of every stage.
    pub pipeline: Vec<SocketAddr>,
}

/// What the caches of a model's layers can do, all of them together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSupport {
    /// Most tokens that a slot can be truncated by, `None` is any number: rejected draft tokens and a prefix that the
    /// next request shares ask for it.
    pub max_rewind: Option<u32>,
    /// Whether positions can be copied out of a slot and into another: blocks of the prefix cache are such copies, one
    /// array for all layers.
    pub blocks: bool,
}

impl CacheSupport {
    /// Of a model with keys and values of every position, alike in all layers.
    pub const ALL: Self = Self { max_rewind: None, blocks: true };

    /// Of a model.
    pub fn of(description: &Description) -> Self {
        let max_rewind = match description.rewind() {
            Rewind::Anywhere => None,
            Rewind::Recent { tokens } => Some(tokens),
            Rewind::ToSnapshots => Some(0),
        };
        Self { max_rewind, blocks: max_rewind.is_none() && description.has_uniform_state() }
    }

    /// How far a slot is truncated where draft tokens were rejected.
    pub fn draft_rewind(self) -> DraftRewind {
        match self.max_rewind {
            Some(most) if most < MAX_DRAFT_TOKENS as u32 => DraftRewind::ToStepBeginning,
            Some(_) | None => DraftRewind::ToLastAccepted,
        }
    }
}

/// Where a sequence goes back to when draft tokens of a step were rejected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftRewind {
    /// Behind its last accepted draft token.
    #[default]
    ToLastAccepted,
    /// To where the step began. A recurrent state has seen all tokens of the step or none, so every rank keeps the
    /// states of before the step, and the tokens that count run again with the next step.
    ToStepBeginning,
}

/// A text in tokens, of which nothing is kept: for a model that embeds or scores.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PooledText {
    /// Its tokens, one at least.
    pub tokens: Vec<u32>,
    /// The segment of each: that of a query is 0, that of its document 1.
    pub token_types: Vec<u32>,
}

/// What a model gives that embeds or scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PooledModel {
    /// What it is asked for.
    pub task: Task,
    /// Numbers of each vector; 1 of a model that scores.
    pub width: u32,
    /// Segments that it tells apart.
    pub token_types: u32,
    /// Tokens of its vocabulary.
    pub vocabulary: u32,
}

impl PooledModel {
    /// Of a model; `None` where that generates.
    pub fn of(description: &Description) -> Option<Self> {
        let task = description.task();
        let width = match (task, &description.pooling) {
            (Task::Embed, Some(pooling)) => pooling.width(description.hidden_size),
            (Task::Rerank, _) => 1,
            _ => return None,
        };
        let token_types = description.encoder.map_or(1, |encoder| encoder.token_types);
        Some(Self { task, width, token_types, vocabulary: description.vocab_size })
    }
}

/// Bytes of weights loaded so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes in memory.
    pub loaded_bytes: u64,
    /// Bytes of this rank's shard; 0 while unknown.
    pub total_bytes: u64,
}

/// Memory that MLX holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MlxMemory {
    /// Bytes now.
    pub bytes: u64,
    /// Peak bytes so far.
    pub peak_bytes: u64,
}

/// A failure after which the group must be re-formed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ExecutorError {
    /// This rank failed.
    #[error("{0}")]
    Local(String),
    /// The connection to another rank failed.
    #[error("{0}")]
    Group(String),
    /// The model or its split is refused, and would be again.
    #[error("{0}")]
    Refused(String),
}

impl From<ExecutorError> for FailureReport {
    fn from(error: ExecutorError) -> Self {
        match error {
            ExecutorError::Local(reason) => Self { cause: FailureCause::Other, reason },
            ExecutorError::Group(reason) => Self::group(reason),
            ExecutorError::Refused(reason) => Self::model(reason),
        }
    }
}

/// The sampled tokens of one step: one for each of its [sample specs](SequenceStep::samples). The first one
/// counts; each later one counts if the draft token before it equals the token sampled there. An error ends
/// only that sequence.
pub type Sampled = Vec<Result<SampledToken, SampleError>>;

/// What a step gives.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepResult {
    /// For its sample specs.
    pub sampled: Sampled,
    /// For the tokens of its [score spec](ScoreSpec).
    pub scores: Vec<TokenScore>,
}

/// A reply of the compute thread. A dropped sender means that the thread is gone, which is a failure like any
/// other.
pub type ReplyReceiver<T> = oneshot::Receiver<Result<T, ExecutorError>>;

/// Batch progress at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BatchProgress {
    /// Number of ended batches and of other work that delayed batches; tells one batch from the next.
    pub ended_batches: u64,
    /// Expected duration of the oldest running batch, predicted at its start; `None` while none runs.
    pub running_estimate: Option<Duration>,
}

/// One rank's shard of the model. Calls return at once and are executed **in call order**, whatever thread
/// made them: with more than one rank, that order is the protocol.
pub trait Executor: Send + Sync + 'static {
    /// Loads this rank's weights. A rank that has them replies at once, with no state of an earlier group.
    fn load(&self) -> ReplyReceiver<()>;
    /// Progress of `load`; cheap, polled four times a second.
    fn progress(&self) -> LoadProgress;
    /// Joins the rings; replies when every neighbour is connected, and at once with one rank. May block
    /// forever if a peer dies, so callers need another way to detect that.
    fn join(&self, addresses: Addresses) -> ReplyReceiver<()>;
    /// Leaves the groups and frees every sequence and in-memory block; weights and disk blocks stay. From
    /// this call on, no computed result is cached or returned, whatever arrives from neighbours. Replies once
    /// running batches have ended, so never if MLX waits forever for a lost neighbour: callers need a
    /// timeout.
    fn leave_group(&self) -> ReplyReceiver<()>;
    /// Runs steps of different sequences as one batch; returns their results in the same order.
    fn run(&self, batch: Vec<SequenceStep>) -> ReplyReceiver<Vec<StepResult>>;
    /// What the model gives, once it is loaded; `None` where it generates, and [`Executor::run`] is for it.
    fn pooled_model(&self) -> Option<PooledModel> {
        None
    }
    /// Computes texts as one batch, the shortest first; returns a vector of each in 32 bits. Between batches of texts the
    /// thread takes other commands.
    fn pool(&self, texts: Vec<PooledText>) -> ReplyReceiver<Vec<Vec<f32>>> {
        drop(texts);
        // As of a thread that is gone: the model has no such output.
        oneshot::channel().1
    }
    /// Whether it pays to start a batch before the tokens of the previous one are known.
    fn overlaps_steps(&self) -> bool;
    /// Has the draft model propose tokens: for each request as many as asked, or none where that is
    /// impossible. An error disables the draft model for good, with the reason; the target model is not
    /// affected.
    fn draft(&self, drafts: Vec<DraftRequest>) -> ReplyReceiver<Vec<Vec<u32>>>;
    /// What the caches of the model's layers can do; all of it before the weights are loaded.
    fn cache_support(&self) -> CacheSupport;
    /// Applies a command to the KV caches.
    fn apply_cache_command(&self, order: CacheCommand);
    /// Frees a sequence: the slot's KV cache is empty afterwards.
    fn reset(&self, slot: u32) {
        self.apply_cache_command(CacheCommand::Reset { slot });
    }
    /// Loads blocks from memory and disk into an empty slot; replies with how many leading blocks were
    /// loaded.
    fn fetch(&self, slot: u32, keys: Vec<BlockHash>) -> ReplyReceiver<u32>;
    /// Whether this rank has a disk tier.
    fn has_disk_cache(&self) -> bool;
    /// Blocks on this rank's disk, least recently used first; none before the weights are loaded.
    fn blocks_on_disk(&self) -> Vec<BlockHash>;
    /// Blocks that this rank's disk tier has lost since the last call.
    fn take_lost_blocks(&self) -> Vec<BlockHash>;
    /// Memory that MLX holds; cheap, polled four times a second.
    fn memory(&self) -> MlxMemory;
    /// Batch progress; cheap, never waits for a batch.
    fn batch_progress(&self) -> BatchProgress;
    /// Step profile totals; cheap, polled four times a second.
    fn step_totals(&self) -> StepTotals;
}
