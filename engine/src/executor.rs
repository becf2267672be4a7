//! What the serving half asks of the half that owns MLX. The real answer is the one MLX thread
//! behind `runtime`; tests answer with a fake, so that everything above this line is tested
//! without MLX. No tokens of text, no sockets, no clock here.
//!
//! ```text
//! rank 0:      load ─▶ join ─▶ run [(slot, offset, tokens, choice), …] ─▶ [[token, …], …]
//! other ranks: load ─▶ join ─▶ run [(slot, offset, tokens), …]         ─▶ nothing to say
//! all:         … ─▶ the group is lost ─▶ disband ─▶ load (there already) ─▶ join ─▶ …
//! ```

use std::net::SocketAddr;
use std::sync::Arc;

use russet_wire::request::Sampling;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::sync::oneshot;

use crate::prefix_cache::{CacheCommand, block_hash::BlockHash};
use crate::lifecycle::{FailureCause, FailureReport};
use crate::step_profiler::StepTotals;
use crate::batch_monitor::BatchProgress;

/// Tokens of one sequence to run through this rank's layers.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceStep {
    /// Which KV cache: a number below `--max-sequences`.
    pub slot: u32,
    /// Tokens of the sequence already in the cache.
    pub offset: u32,
    /// The tokens that follow them. None stands for the one that was chosen last in this slot, which nobody needs
    /// to know yet: where a group has a single stage, its members tell it each other as they compute.
    pub tokens: Vec<u32>,
    /// How many of the last tokens are guesses, of what will be chosen: where there is a choice, one is made before
    /// each of them too. Told on rank 0 alone; wrong ones are in the cache until it is trimmed.
    pub draft_tokens: u32,
    /// How rank 0 chooses the next token; absent while a prompt is still being read and on every
    /// other rank.
    pub sample: Option<SampleSpec>,
}

impl SequenceStep {
    /// How many tokens it adds to the cache.
    pub fn length(&self) -> u32 {
        self.tokens.len().max(1) as u32
    }

    /// The choices of its tokens: one for each guess and one behind them all, if there are any.
    pub fn samples(&self) -> impl Iterator<Item = SampleSpec> {
        let place =
            move |choice: &SampleSpec, guess: u32| SampleSpec { index: choice.index + guess, ..choice.clone() };
        self.sample.iter().flat_map(move |choice| (0..=self.draft_tokens).map(move |guess| place(choice, guess)))
    }
}

/// A text for the draft model, which guesses how it goes on.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftRequest {
    /// Which of its KV caches, as of a [`Step`].
    pub slot: u32,
    /// Tokens of the text that stay in that cache; behind them it is cut.
    pub offset: u32,
    /// The tokens that follow them.
    pub tokens: Vec<u32>,
    /// How many tokens to guess.
    pub draft_tokens: u32,
    /// How the first of them will be chosen; each as it would be if the draft model were the model.
    pub sample: SampleSpec,
}

/// How the next token is chosen from the logits of a step's last token.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleSpec {
    /// Temperature and cut-offs; `sampling.seed` has already become `seed`.
    pub sampling: Sampling,
    /// Fixed for a request, so that the choice is a function of (logits, seed, index).
    pub seed: u64,
    /// How many tokens of the answer came before this one.
    pub index: u32,
    /// Tokens that must not be chosen.
    pub banned: Arc<[u32]>,
}

impl SampleSpec {
    /// Whether it leaves any of the vocabulary's tokens.
    pub fn check(&self, vocabulary: u32) -> Result<(), SampleError> {
        // Few are banned as a rule, so that this is all there is to do.
        if self.banned.len() < vocabulary as usize
            || (0..vocabulary).any(|token| !self.banned.contains(&token))
        {
            Ok(())
        } else {
            Err(SampleError::AllBanned { vocabulary: vocabulary as usize })
        }
    }
}

/// No token can be chosen.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum SampleError {
    /// The model computed something that is not a number, or is infinite.
    #[error(
        "some logits are no finite numbers; the weights are damaged or overflow in this dtype, try --dtype f32"
    )]
    NotFinite,
    /// Every token is banned.
    #[error("all {vocabulary} tokens are banned; ban fewer")]
    AllBanned {
        /// Tokens in all.
        vocabulary: usize,
    },
}

/// Where MLX is told to meet this rank's neighbours: one address for each rank of a ring, in the order
/// of the ring. A ring this rank is not part of is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Addresses {
    /// The members of its stage.
    pub tensor: Vec<SocketAddr>,
    /// The same member of every stage.
    pub pipeline: Vec<SocketAddr>,
}

/// Bytes of weights read so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadProgress {
    /// In memory.
    pub loaded_bytes: u64,
    /// What this rank holds in the end; 0 while unknown.
    pub total_bytes: u64,
}

/// What MLX holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MlxMemory {
    /// Bytes now.
    pub bytes: u64,
    /// Most bytes so far.
    pub peak_bytes: u64,
}

/// This rank cannot go on: the group must be re-formed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ExecutorError {
    /// For a reason of its own.
    #[error("{0}")]
    Local(String),
    /// The way to another rank broke.
    #[error("{0}")]
    Group(String),
}

impl From<ExecutorError> for FailureReport {
    fn from(error: ExecutorError) -> Self {
        match error {
            ExecutorError::Local(reason) => Self { cause: FailureCause::Other, reason },
            ExecutorError::Group(reason) => Self::group(reason),
        }
    }
}

/// What came of one step of a batch: a token for each of its [choices](Step::choices), the first of which counts, and
/// each one behind it if the guess before is the token chosen there. An error ends that sequence and no other.
pub type Sampled = Vec<Result<u32, SampleError>>;

/// An answer that arrives when the compute thread got there. A dropped sender means the thread is
/// gone, which is a failure like any other.
pub type ReplyReceiver<T> = oneshot::Receiver<Result<T, ExecutorError>>;

/// One rank's share of the model. Calls return at once and are carried out **in the order of the
/// calls**, whatever thread made them: with more than one rank that order is the protocol.
pub trait Executor: Send + Sync + 'static {
    /// Read this rank's weights into memory. A rank that has them answers at once, and has nothing left of an earlier
    /// group.
    fn load(&self) -> ReplyReceiver<()>;
    /// How far `load` has come; cheap, asked four times a second.
    fn progress(&self) -> LoadProgress;
    /// Join the rings of ranks; answers when every neighbour is connected. With one rank it answers
    /// at once. May block for ever when a peer dies, so nobody waits for it alone.
    fn join(&self, addresses: Addresses) -> ReplyReceiver<()>;
    /// Leave the groups and forget every sequence and block in memory; weights and what is on disk stay. From the call on
    /// nothing that is computed is kept or told, whatever came from neighbours. It answers once what was begun before has
    /// ended, so never where MLX waits for a lost neighbour for ever: who asks waits a while.
    fn leave_group(&self) -> ReplyReceiver<()>;
    /// Run steps of different sequences together; what came of each, in their order.
    fn run(&self, batch: Vec<SequenceStep>) -> ReplyReceiver<Vec<Sampled>>;
    /// Whether it pays to have a batch run before the last one's tokens are known.
    fn overlaps_steps(&self) -> bool;
    /// Have the draft model guess tokens: for each text as many as asked, or none where that cannot be. An error says why
    /// there will be none any more; the model itself goes on.
    fn draft(&self, drafts: Vec<DraftRequest>) -> ReplyReceiver<Vec<Vec<u32>>>;
    /// Carry out an order on what is cached.
    fn apply_cache_command(&self, order: CacheCommand);
    /// Forget a sequence: the slot's cache is empty afterwards.
    fn reset(&self, slot: u32) {
        self.apply_cache_command(CacheCommand::Reset { slot });
    }
    /// Fill an empty slot from blocks in memory and on disk; how many of the first ones there were.
    fn fetch(&self, slot: u32, keys: Vec<BlockHash>) -> ReplyReceiver<u32>;
    /// Whether this rank keeps blocks on disk.
    fn has_disk_cache(&self) -> bool;
    /// Blocks on this rank's disk, the one used longest ago first; none before the weights are loaded.
    fn blocks_on_disk(&self) -> Vec<BlockHash>;
    /// Blocks that this rank's disk lost since this was asked last.
    fn take_lost_blocks(&self) -> Vec<BlockHash>;
    /// What MLX holds; cheap, asked four times a second.
    fn memory(&self) -> MlxMemory;
    /// What becomes of the batches; cheap, and never waits for one.
    fn batch_progress(&self) -> BatchProgress;
    /// What batches are made of; cheap, asked four times a second.
    fn step_totals(&self) -> StepTotals;
}
