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

use crate::kept::{Order, chain::Key};
use crate::life::{Cause, Failure};
use crate::meter::Totals;
use crate::pulse::Pulse;

/// Tokens of one sequence to run through this rank's layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Which KV cache: a number below `--max-sequences`.
    pub slot: u32,
    /// Tokens of the sequence already in the cache.
    pub offset: u32,
    /// The tokens that follow them. None stands for the one that was chosen last in this slot, which nobody needs
    /// to know yet: where a group has a single stage, its members tell it each other as they compute.
    pub tokens: Vec<u32>,
    /// How many of the last tokens are guesses, of what will be chosen: where there is a choice, one is made before
    /// each of them too. Told on rank 0 alone; wrong ones are in the cache until it is trimmed.
    pub guesses: u32,
    /// How rank 0 chooses the next token; absent while a prompt is still being read and on every
    /// other rank.
    pub choice: Option<Choice>,
}

impl Step {
    /// How many tokens it adds to the cache.
    pub fn length(&self) -> u32 {
        self.tokens.len().max(1) as u32
    }

    /// The choices of its tokens: one for each guess and one behind them all, if there are any.
    pub fn choices(&self) -> impl Iterator<Item = Choice> {
        let place =
            move |choice: &Choice, guess: u32| Choice { index: choice.index + guess, ..choice.clone() };
        self.choice.iter().flat_map(move |choice| (0..=self.guesses).map(move |guess| place(choice, guess)))
    }
}

/// A text for the draft model, which guesses how it goes on.
#[derive(Clone, Debug, PartialEq)]
pub struct Draft {
    /// Which of its KV caches, as of a [`Step`].
    pub slot: u32,
    /// Tokens of the text that stay in that cache; behind them it is cut.
    pub offset: u32,
    /// The tokens that follow them.
    pub tokens: Vec<u32>,
    /// How many tokens to guess.
    pub guesses: u32,
    /// How the first of them will be chosen; each as it would be if the draft model were the model.
    pub choice: Choice,
}

/// How the next token is chosen from the logits of a step's last token.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// Temperature and cut-offs; `sampling.seed` has already become `seed`.
    pub sampling: Sampling,
    /// Fixed for a request, so that the choice is a function of (logits, seed, index).
    pub seed: u64,
    /// How many tokens of the answer came before this one.
    pub index: u32,
    /// Tokens that must not be chosen.
    pub banned: Arc<[u32]>,
}

impl Choice {
    /// Whether it leaves any of the vocabulary's tokens.
    pub fn check(&self, vocabulary: u32) -> Result<(), SampleError> {
        // Few are banned as a rule, so that this is all there is to do.
        if self.banned.len() < vocabulary as usize
            || (0..vocabulary).any(|token| !self.banned.contains(&token))
        {
            Ok(())
        } else {
            Err(SampleError::NothingLeft { vocabulary: vocabulary as usize })
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
    NothingLeft {
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
pub struct Progress {
    /// In memory.
    pub loaded_bytes: u64,
    /// What this rank holds in the end; 0 while unknown.
    pub total_bytes: u64,
}

/// What MLX holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Bytes now.
    pub bytes: u64,
    /// Most bytes so far.
    pub peak_bytes: u64,
}

/// This rank cannot go on: the group must be re-formed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ComputeError {
    /// For a reason of its own.
    #[error("{0}")]
    Own(String),
    /// The way to another rank broke.
    #[error("{0}")]
    Group(String),
}

impl From<ComputeError> for Failure {
    fn from(error: ComputeError) -> Self {
        match error {
            ComputeError::Own(reason) => Self { cause: Cause::Other, reason },
            ComputeError::Group(reason) => Self::group(reason),
        }
    }
}

/// What came of one step of a batch: a token for each of its [choices](Step::choices), the first of which counts, and
/// each one behind it if the guess before is the token chosen there. An error ends that sequence and no other.
pub type Chosen = Vec<Result<u32, SampleError>>;

/// An answer that arrives when the compute thread got there. A dropped sender means the thread is
/// gone, which is a failure like any other.
pub type Answer<T> = oneshot::Receiver<Result<T, ComputeError>>;

/// One rank's share of the model. Calls return at once and are carried out **in the order of the
/// calls**, whatever thread made them: with more than one rank that order is the protocol.
pub trait Compute: Send + Sync + 'static {
    /// Read this rank's weights into memory. A rank that has them answers at once, and has nothing left of an earlier
    /// group.
    fn load(&self) -> Answer<()>;
    /// How far `load` has come; cheap, asked four times a second.
    fn progress(&self) -> Progress;
    /// Join the rings of ranks; answers when every neighbour is connected. With one rank it answers
    /// at once. May block for ever when a peer dies, so nobody waits for it alone.
    fn join(&self, addresses: Addresses) -> Answer<()>;
    /// Leave the groups and forget every sequence and block in memory; weights and what is on disk stay. From the call on
    /// nothing that is computed is kept or told, whatever came from neighbours. It answers once what was begun before has
    /// ended, so never where MLX waits for a lost neighbour for ever: who asks waits a while.
    fn disband(&self) -> Answer<()>;
    /// Run steps of different sequences together; what came of each, in their order.
    fn run(&self, batch: Vec<Step>) -> Answer<Vec<Chosen>>;
    /// Whether it pays to have a batch run before the last one's tokens are known.
    fn looks_ahead(&self) -> bool;
    /// Have the draft model guess tokens: for each text as many as asked, or none where that cannot be. An error says why
    /// there will be none any more; the model itself goes on.
    fn draft(&self, drafts: Vec<Draft>) -> Answer<Vec<Vec<u32>>>;
    /// Carry out an order on what is cached.
    fn arrange(&self, order: Order);
    /// Forget a sequence: the slot's cache is empty afterwards.
    fn reset(&self, slot: u32) {
        self.arrange(Order::Reset { slot });
    }
    /// Fill an empty slot from blocks in memory and on disk; how many of the first ones there were.
    fn fetch(&self, slot: u32, keys: Vec<Key>) -> Answer<u32>;
    /// Whether this rank keeps blocks on disk.
    fn has_shelf(&self) -> bool;
    /// Blocks on this rank's disk, the one used longest ago first; none before the weights are loaded.
    fn shelved(&self) -> Vec<Key>;
    /// Blocks that this rank's disk lost since this was asked last.
    fn lost(&self) -> Vec<Key>;
    /// What MLX holds; cheap, asked four times a second.
    fn memory(&self) -> Memory;
    /// What becomes of the batches; cheap, and never waits for one.
    fn pulse(&self) -> Pulse;
    /// What batches are made of; cheap, asked four times a second.
    fn totals(&self) -> Totals;
}
