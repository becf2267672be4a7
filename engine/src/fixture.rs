//! A fake executor for tests, which follows a script, and the model folder that goes with it. Compiled for
//! tests only.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use crate::batch_monitor::BatchMonitor;
use crate::executor::{
    Addresses, BatchProgress, CacheSupport, DraftRequest, Executor, ExecutorError, LoadProgress, MlxMemory,
    PooledText, ReplyReceiver, SampleError, SampleSpec, Sampled, SampledToken, ScoreSpec, SequenceStep,
    StepResult, TokenScore,
};
use crate::prefix_cache::{
    CacheCommand,
    block_hash::{BLOCK_TOKENS, BlockHash},
};
use crate::step_profiler::StepTotals;

pub use crate::model::*;

/// Nothing in these tests takes a second on an idle machine; a busy one gets a minute.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// The result of `future`, which must be ready within the timeout.
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(TEST_TIMEOUT, future)
        .await
        .unwrap_or_else(|_| panic!("{what} took more than {TEST_TIMEOUT:?}"))
}

/// Waits until the condition holds, up to the timeout.
pub async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(what, wait).await;
}

/// Behaviour of a fake on each step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FakeBehaviour {
    /// Replies at once.
    Normal,
    /// Never replies, like a collective whose peer is lost.
    Hanging,
    /// Replies with an error.
    Failing,
    /// Samples this token in any case.
    FixedToken(u32),
    /// Returns NaN logits for sequences with this token.
    NotFiniteOn(u32),
    /// Panics in the caller, as only a bug does.
    Panicking,
}

/// The log-probability of a token behind others, as fakes have it: by how many there are, and the last of them.
pub fn fake_logprob(before: &[u32], token: u32) -> f32 {
    let last = before.iter().rev().take(8).chain([&token]);
    let mixed = last.fold(before.len() as u32, |sum, token| sum.wrapping_mul(31).wrapping_add(*token));
    (mixed % 1000) as f32 / -100.0
}

/// A fake executor that echoes the user's text byte by byte, over and over, and then ends its turn unless
/// that is banned. Every batch is recorded.
#[derive(Clone)]
pub struct FakeExecutor {
    state: Arc<Mutex<FakeState>>,
    batches: BatchMonitor,
    /// If set, released once per batch: lets a test step through batches.
    pub gate: Option<Arc<Notify>>,
    /// How long a batch takes.
    pub batch_time: Duration,
    /// Whether overlap scheduling pays.
    pub overlaps_steps: bool,
    /// What its caches can do.
    pub cache_support: CacheSupport,
}

struct FakeState {
    behaviour: FakeBehaviour,
    /// Tokens of each sequence.
    sequences: HashMap<u32, Vec<u32>>,
    /// Snapshots of sequences.
    snapshots: HashMap<u32, Vec<u32>>,
    /// Tokens before the last step of each sequence, where that verified draft tokens.
    step_beginnings: HashMap<u32, u32>,
    /// The last sampled token of each sequence.
    last_tokens: HashMap<u32, u32>,
    batches: Vec<Vec<SequenceStep>>,
    resets: Vec<u32>,
    /// All tokens up to the end of each block, in memory and on disk.
    in_memory: HashMap<BlockHash, Vec<u32>>,
    on_disk: HashMap<BlockHash, Vec<u32>>,
    damaged: bool,
    /// Most tokens it held at once.
    peak: usize,
    loadable: bool,
    /// Tokens in its draft model's KV cache, by slot.
    drafts: HashMap<u32, Vec<u32>>,
    /// Whether it left its group and has joined no other; like a rank, it runs no step then.
    left: bool,
    draft_broken: bool,
}

impl FakeExecutor {
    pub fn new() -> Arc<Self> {
        Self::with_timing(Duration::ZERO, None)
    }

    /// A fake that starts with this mood.
    pub fn with_behaviour(mood: FakeBehaviour) -> Arc<Self> {
        let fake = Self::new();
        fake.set_behaviour(mood);
        fake
    }

    /// A fake for which overlap scheduling does not pay.
    pub fn without_overlap() -> Arc<Self> {
        Arc::new(Self { overlaps_steps: false, ..Self::new().as_ref().clone() })
    }

    /// A fake whose caches can do this.
    pub fn with_cache_support(cache_support: CacheSupport) -> Arc<Self> {
        Arc::new(Self { cache_support, ..Self::new().as_ref().clone() })
    }

    pub fn with_timing(pace: Duration, gate: Option<Arc<Notify>>) -> Arc<Self> {
        let state = FakeState {
            behaviour: FakeBehaviour::Normal,
            sequences: HashMap::new(),
            snapshots: HashMap::new(),
            step_beginnings: HashMap::new(),
            last_tokens: HashMap::new(),
            batches: Vec::new(),
            resets: Vec::new(),
            in_memory: HashMap::new(),
            on_disk: HashMap::new(),
            damaged: false,
            peak: 0,
            loadable: true,
            drafts: HashMap::new(),
            left: false,
            draft_broken: false,
        };
        Arc::new(Self {
            state: Arc::new(Mutex::new(state)),
            batches: BatchMonitor::new(1, Duration::ZERO),
            gate,
            batch_time: pace,
            overlaps_steps: true,
            cache_support: CacheSupport::ALL,
        })
    }

    pub fn set_behaviour(&self, mood: FakeBehaviour) {
        self.state.lock().behaviour = mood;
    }

    /// Makes loading fail.
    pub fn break_weights(&self) {
        self.state.lock().loadable = false;
    }

    /// Makes the draft model fail.
    pub fn break_draft(&self, broken: bool) {
        self.state.lock().draft_broken = broken;
    }

    /// All steps it ran, in order.
    pub fn steps(&self) -> Vec<SequenceStep> {
        self.batches().concat()
    }

    pub fn batches(&self) -> Vec<Vec<SequenceStep>> {
        self.state.lock().batches.clone()
    }

    /// Most tokens it held at once, over all sequences.
    pub fn peak(&self) -> usize {
        self.state.lock().peak
    }

    pub fn resets(&self) -> Vec<u32> {
        self.state.lock().resets.clone()
    }

    /// A new process with the same disk contents.
    pub fn restarted(&self) -> Arc<Self> {
        let fake = Self::new();
        fake.state.lock().on_disk = self.state.lock().on_disk.clone();
        fake
    }

    /// Damages every file, which is detected only on reading.
    pub fn damage(&self) {
        self.state.lock().damaged = true;
    }
}

impl FakeState {
    fn apply_cache_command(&mut self, order: CacheCommand, support: CacheSupport) {
        match order {
            CacheCommand::Reset { slot } => {
                self.sequences.remove(&slot);
                self.snapshots.remove(&slot);
                self.step_beginnings.remove(&slot);
                self.resets.push(slot);
            }
            CacheCommand::Truncate { slot, length } => {
                let sequence = self.sequences.get_mut(&slot).expect("only what is there can be cut");
                let dropped = sequence.len() as u32 - length;
                let can_drop = support.max_rewind.is_none_or(|most| dropped <= most)
                    || self.step_beginnings.remove(&slot) == Some(length);
                assert!(can_drop, "{dropped} tokens are cut off of layers that do not go back there");
                sequence.truncate(length as usize);
            }
            CacheCommand::Snapshot { slot } => {
                let sequence = self.sequences[&slot].clone();
                self.snapshots.insert(slot, sequence);
            }
            CacheCommand::Restore { slot } => {
                self.sequences.insert(slot, self.snapshots[&slot].clone());
                self.step_beginnings.remove(&slot);
            }
            CacheCommand::Fork { from, to } => {
                let copy = self.sequences[&from].clone();
                assert!(self.sequences.insert(to, copy).is_none(), "slot {to} was not empty");
            }
            CacheCommand::Store { slot, blocks } => {
                for block in blocks {
                    let tokens =
                        self.sequences[&slot][..((block.index + 1) * BLOCK_TOKENS) as usize].to_vec();
                    if block.in_memory {
                        self.in_memory.insert(block.hash, tokens.clone());
                    }
                    if block.on_disk {
                        self.on_disk.insert(block.hash, tokens);
                    }
                }
            }
            CacheCommand::Load { slot, hashes: keys } => {
                assert_eq!(self.load_blocks(slot, &keys) as usize, keys.len());
            }
            CacheCommand::Evict { in_memory, on_disk } => {
                in_memory.iter().for_each(|key| drop(self.in_memory.remove(key).expect("it was in_memory")));
                on_disk.iter().for_each(|key| drop(self.on_disk.remove(key)));
            }
        }
    }

    fn load_blocks(&mut self, slot: u32, keys: &[BlockHash]) -> u32 {
        let on_disk = |key| self.on_disk.get(key).filter(|_| !self.damaged);
        let found: Vec<&Vec<u32>> =
            keys.iter().map_while(|key| self.in_memory.get(key).or_else(|| on_disk(key))).collect();
        let (loaded, tokens) = (found.len() as u32, found.last().map(|tokens| (*tokens).clone()));
        let before = self.sequences.insert(slot, tokens.unwrap_or_default());
        assert!(before.is_none(), "slot {slot} is filled while it is empty");
        loaded
    }

    /// Proposes the tokens that the model samples, except for every seventh one.
    fn draft(
        &mut self,
        DraftRequest { slot, offset, tokens, draft_tokens: count, sample: choice }: &DraftRequest,
    ) -> Vec<u32> {
        let mut read = self.drafts.remove(slot).unwrap_or_default();
        assert!(*offset as usize <= read.len(), "the draft model has read {} of {offset} tokens", read.len());
        read.truncate(*offset as usize);
        read.extend(tokens);
        let history = self.sequences[slot].len();
        assert_eq!(read[..history], self.sequences[slot], "both models read the same");
        let draft_tokens: Vec<u32> = (0..*count)
            .map(|position| {
                let index = choice.index + position;
                let chosen = self.sample(&read, &SampleSpec { index, ..choice.clone() }).unwrap_or(END);
                let token = if index % 7 == 6 { END } else { chosen };
                read.push(token);
                token
            })
            .collect();
        // The last draft token has not been run.
        read.pop();
        self.drafts.insert(*slot, read);
        draft_tokens
    }

    fn run(&mut self, step: &SequenceStep) -> StepResult {
        let sequence = self.sequences.entry(step.slot).or_default();
        assert_eq!(step.offset as usize, sequence.len(), "the cache holds what the steps brought");
        if step.tokens.is_empty() {
            // A rank that does not sample learns the token while it computes, which is not visible here.
            let last = step.sample.as_ref().map_or(END, |_| self.last_tokens[&step.slot]);
            sequence.push(last);
        }
        sequence.extend(&step.tokens);
        match step.draft_tokens {
            0 => drop(self.step_beginnings.remove(&step.slot)),
            _ => drop(self.step_beginnings.insert(step.slot, step.offset)),
        }
        self.peak = self.peak.max(self.sequences.values().map(Vec::len).sum());
        let sequence = &self.sequences[&step.slot];
        let before_drafts = sequence.len() - step.draft_tokens as usize;
        let chosen: Sampled = (before_drafts..)
            .zip(step.samples())
            .map(|(length, choice)| self.sample(&sequence[..length], &choice).map(SampledToken::from))
            .collect();
        match chosen.as_slice() {
            [Ok(token)] => drop(self.last_tokens.insert(step.slot, token.id)),
            // A step that follows before the error is known still has a token to run, as on a device.
            [Err(_)] => drop(self.last_tokens.insert(step.slot, END)),
            [] => {}
            // After draft tokens the next token must be given.
            _ => drop(self.last_tokens.remove(&step.slot)),
        }
        let scores = step.score.as_ref().map_or(Vec::new(), |spec| self.scores(step, spec));
        StepResult { sampled: chosen, scores }
    }

    /// A number for each token that depends on those before it.
    fn scores(&self, step: &SequenceStep, ScoreSpec { tokens, top }: &ScoreSpec) -> Vec<TokenScore> {
        let sequence = &self.sequences[&step.slot];
        assert!(tokens.len() <= step.tokens.len(), "each is behind a token of the step");
        let score = |(length, token): (usize, &u32)| {
            let before = &sequence[..length];
            if let FakeBehaviour::NotFiniteOn(bad) = self.behaviour
                && before.contains(&bad)
            {
                return TokenScore { logprob: f32::NAN, ..TokenScore::default() };
            }
            let logprob = fake_logprob(before, *token);
            TokenScore { logprob, rank: 2, top: (0..*top).map(|id| (id, fake_logprob(before, id))).collect() }
        };
        (step.offset as usize + 1..).zip(tokens).map(score).collect()
    }

    /// What it would say, or the first token that it may where it may not.
    fn sample(&self, sequence: &[u32], choice: &SampleSpec) -> Result<u32, SampleError> {
        let token = self.say(sequence, choice)?;
        let mask = choice.mask.as_ref().map_or(Ok(None), |mask| mask.get());
        match mask.map_err(|error| SampleError::Grammar(error.to_string()))? {
            Some(mask) if !mask.allows(token) => {
                let first = (0..=END).find(|token| mask.allows(*token));
                first.ok_or_else(|| SampleError::Grammar("no token is allowed".into()))
            }
            Some(_) | None => Ok(token),
        }
    }

    fn say(&self, sequence: &[u32], choice: &SampleSpec) -> Result<u32, SampleError> {
        match self.behaviour {
            FakeBehaviour::FixedToken(token) => return Ok(token),
            FakeBehaviour::NotFiniteOn(token) if sequence.contains(&token) => {
                return Err(SampleError::NotFinite);
            }
            _ => {}
        }
        let start = sequence.iter().rposition(|&token| token == USER).map_or(0, |at| at + 1);
        let answer = sequence[start..].iter().position(|&token| token == ASSISTANT);
        let end = answer.map_or(sequence.len(), |length| start + length);
        let said: Vec<u32> = sequence[start..end].iter().copied().filter(|&token| token < 256).collect();
        let length = said.len() as u32;
        // What it has said so far is part of what it reads.
        let (index, answered) = (choice.index as usize, sequence.get(end + 1..).unwrap_or_default());
        let goes_on = answered.len() == index && answered.iter().eq(said.iter().cycle().take(index));
        if length == 0 || !goes_on || (choice.index >= length && !choice.banned.contains(&END)) {
            return Ok(END);
        }
        Ok(said[(choice.index % length) as usize])
    }
}

impl Executor for FakeExecutor {
    fn load(&self) -> ReplyReceiver<()> {
        let (sender, answer) = oneshot::channel();
        let result = if self.state.lock().loadable {
            Ok(())
        } else {
            Err(ExecutorError::Local("model.safetensors is broken: its header ends at byte 7".into()))
        };
        let _ = sender.send(result);
        answer
    }

    fn progress(&self) -> LoadProgress {
        LoadProgress { loaded_bytes: 10, total_bytes: 10 }
    }

    fn join(&self, _: Addresses) -> ReplyReceiver<()> {
        let (sender, answer) = oneshot::channel();
        self.state.lock().left = false;
        let _ = sender.send(Ok(()));
        answer
    }

    fn leave_group(&self) -> ReplyReceiver<()> {
        let (sender, answer) = oneshot::channel();
        let mut state = self.state.lock();
        // A hung fake never gets there.
        if state.behaviour == FakeBehaviour::Hanging {
            std::mem::forget(sender);
            return answer;
        }
        state.left = true;
        state.sequences.clear();
        state.last_tokens.clear();
        state.in_memory.clear();
        state.drafts.clear();
        let _ = sender.send(Ok(()));
        answer
    }

    fn run(&self, batch: Vec<SequenceStep>) -> ReplyReceiver<Vec<StepResult>> {
        let (sender, answer) = oneshot::channel();
        if self.state.lock().left {
            let _ = sender.send(Err(ExecutorError::Group("rank 0 is leaving its group".into())));
            return answer;
        }
        self.batches.begin(&batch);
        let monitor = self.batches.clone();
        let (state, gate, pace) = (self.state.clone(), self.gate.clone(), self.batch_time);
        // The state changes in call order; only the reply is delayed.
        let (mood, tokens) = {
            let mut state = state.lock();
            assert_ne!(state.behaviour, FakeBehaviour::Panicking, "the fake was told to panic");
            let tokens: Vec<StepResult> = batch.iter().map(|step| state.run(step)).collect();
            state.batches.push(batch);
            (state.behaviour, tokens)
        };
        tokio::spawn(async move {
            if let Some(gate) = gate {
                gate.notified().await;
            }
            // Even a sleep of zero takes a millisecond.
            if !pace.is_zero() {
                tokio::time::sleep(pace).await;
            }
            if mood != FakeBehaviour::Hanging {
                monitor.end(mood != FakeBehaviour::Failing);
            }
            match mood {
                FakeBehaviour::Normal | FakeBehaviour::FixedToken(_) | FakeBehaviour::NotFiniteOn(_) => {
                    drop(sender.send(Ok(tokens)))
                }
                FakeBehaviour::Failing => {
                    let lost = "[ring] connection to a peer was lost";
                    drop(sender.send(Err(ExecutorError::Group(lost.into()))));
                }
                FakeBehaviour::Hanging | FakeBehaviour::Panicking => {
                    std::future::pending::<()>().await;
                    drop(sender);
                }
            }
        });
        answer
    }

    /// A number for each text.
    fn pool(&self, texts: Vec<PooledText>) -> ReplyReceiver<Vec<Vec<f32>>> {
        let (sender, answer) = oneshot::channel();
        let (mood, pace) = (self.state.lock().behaviour, self.batch_time);
        tokio::spawn(async move {
            tokio::time::sleep(pace).await;
            let number = match mood {
                FakeBehaviour::Hanging => std::future::pending().await,
                FakeBehaviour::Failing => Err(ExecutorError::Local("the GPU has no memory left".into())),
                FakeBehaviour::NotFiniteOn(_) => Ok(f32::NAN),
                FakeBehaviour::Normal | FakeBehaviour::FixedToken(_) | FakeBehaviour::Panicking => Ok(0.5),
            };
            drop(sender.send(number.map(|number| vec![vec![number]; texts.len()])));
        });
        answer
    }

    fn overlaps_steps(&self) -> bool {
        self.overlaps_steps
    }

    fn cache_support(&self) -> CacheSupport {
        self.cache_support
    }

    fn draft(&self, drafts: Vec<DraftRequest>) -> ReplyReceiver<Vec<Vec<u32>>> {
        let (sender, answer) = oneshot::channel();
        let mut state = self.state.lock();
        let draft_tokens = if state.draft_broken {
            Err(ExecutorError::Local("the draft model's weights are gone".into()))
        } else {
            Ok(drafts.iter().map(|draft| state.draft(draft)).collect())
        };
        let _ = sender.send(draft_tokens);
        answer
    }

    fn apply_cache_command(&self, order: CacheCommand) {
        let mut state = self.state.lock();
        // The caches went with the group.
        if !state.left {
            state.apply_cache_command(order, self.cache_support);
        }
    }

    fn fetch(&self, slot: u32, keys: Vec<BlockHash>) -> ReplyReceiver<u32> {
        let (sender, answer) = oneshot::channel();
        let loaded = self.state.lock().load_blocks(slot, &keys);
        let _ = sender.send(Ok(loaded));
        answer
    }

    fn has_disk_cache(&self) -> bool {
        true
    }

    fn blocks_on_disk(&self) -> Vec<BlockHash> {
        self.state.lock().on_disk.keys().copied().collect()
    }

    fn take_lost_blocks(&self) -> Vec<BlockHash> {
        Vec::new()
    }

    fn memory(&self) -> MlxMemory {
        MlxMemory { bytes: 10, peak_bytes: 20 }
    }

    fn batch_progress(&self) -> BatchProgress {
        self.batches.progress()
    }

    fn step_totals(&self) -> StepTotals {
        StepTotals { bytes: [5, 6, 7], seconds: [1.0, 0.5, 0.25], timed_batches: 2 }
    }
}
