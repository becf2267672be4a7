//! A compute half for tests, which answers with a script, beside the model folder that goes with
//! it. Compiled for tests only.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use crate::compute::{
    Addresses, Answer, Choice, Chosen, Compute, ComputeError, Draft, Memory, Progress, SampleError, Step,
};
use crate::kept::{
    Order,
    chain::{BLOCK, Key},
};
use crate::meter::Totals;
use crate::pulse::{Batches, Pulse};

pub use crate::model::*;

/// Nothing in these tests takes a second on an idle machine; a busy one gets a minute.
const PATIENCE: Duration = Duration::from_secs(60);

/// What comes of it in time.
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future)
        .await
        .unwrap_or_else(|_| panic!("{what} took more than {PATIENCE:?}"))
}

/// Until the condition holds.
pub async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(what, wait).await;
}

/// What a fake does when asked to step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    /// Answers at once.
    Fine,
    /// Never answers, like a collective whose peer is gone.
    Hung,
    /// Answers with an error.
    Broken,
    /// Chooses this token whatever it is asked.
    Stuck(u32),
    /// Finds no number for sequences that hold this token.
    Poisoned(u32),
    /// Panics in the caller's face, as only a bug does.
    Buggy,
}

/// A compute half that says back what the user said, byte by byte and over and over, then ends
/// its turn unless that is banned. Every batch is recorded.
#[derive(Clone)]
pub struct Fake {
    state: Arc<Mutex<FakeState>>,
    batches: Batches,
    /// Released once per batch when set: lets a test watch one batch at a time.
    pub gate: Option<Arc<Notify>>,
    /// How long a batch takes.
    pub pace: Duration,
    /// Whether batches pay that follow one whose tokens nobody knows.
    pub looks_ahead: bool,
}

struct FakeState {
    mood: Mood,
    /// Tokens of each sequence.
    sequences: HashMap<u32, Vec<u32>>,
    /// The token chosen last for each.
    chosen: HashMap<u32, u32>,
    batches: Vec<Vec<Step>>,
    resets: Vec<u32>,
    /// All tokens up to the end of each block, in memory and on disk.
    held: HashMap<Key, Vec<u32>>,
    shelved: HashMap<Key, Vec<u32>>,
    damaged: bool,
    /// Most tokens it held at once.
    peak: usize,
    loadable: bool,
    /// What its draft model has read, by slot.
    drafts: HashMap<u32, Vec<u32>>,
    draft_broken: bool,
}

impl Fake {
    pub fn new() -> Arc<Self> {
        Self::with(Duration::ZERO, None)
    }

    /// One of this mood from the beginning.
    pub fn of(mood: Mood) -> Arc<Self> {
        let fake = Self::new();
        fake.set_mood(mood);
        fake
    }

    /// One for which it does not pay to choose ahead.
    pub fn that_waits() -> Arc<Self> {
        let Self { state, batches, gate, pace, .. } = Self::new().as_ref().clone();
        Arc::new(Self { state, batches, gate, pace, looks_ahead: false })
    }

    pub fn with(pace: Duration, gate: Option<Arc<Notify>>) -> Arc<Self> {
        let state = FakeState {
            mood: Mood::Fine,
            sequences: HashMap::new(),
            chosen: HashMap::new(),
            batches: Vec::new(),
            resets: Vec::new(),
            held: HashMap::new(),
            shelved: HashMap::new(),
            damaged: false,
            peak: 0,
            loadable: true,
            drafts: HashMap::new(),
            draft_broken: false,
        };
        Arc::new(Self {
            state: Arc::new(Mutex::new(state)),
            batches: Batches::new(1),
            gate,
            pace,
            looks_ahead: true,
        })
    }

    pub fn set_mood(&self, mood: Mood) {
        self.state.lock().mood = mood;
    }

    /// Makes loading fail.
    pub fn break_weights(&self) {
        self.state.lock().loadable = false;
    }

    /// Makes the draft model fail.
    pub fn break_draft(&self, broken: bool) {
        self.state.lock().draft_broken = broken;
    }

    /// Everything it was asked to run, one behind the other.
    pub fn steps(&self) -> Vec<Step> {
        self.batches().concat()
    }

    pub fn batches(&self) -> Vec<Vec<Step>> {
        self.state.lock().batches.clone()
    }

    /// Most tokens it held at once, of all sequences.
    pub fn peak(&self) -> usize {
        self.state.lock().peak
    }

    pub fn resets(&self) -> Vec<u32> {
        self.state.lock().resets.clone()
    }

    /// What its disk holds, as the next process finds it.
    pub fn restarted(&self) -> Arc<Self> {
        let fake = Self::new();
        fake.state.lock().shelved = self.state.lock().shelved.clone();
        fake
    }

    /// Makes every file damaged, though nobody knows before it is read.
    pub fn damage(&self) {
        self.state.lock().damaged = true;
    }
}

impl FakeState {
    fn arrange(&mut self, order: Order) {
        match order {
            Order::Reset { slot } => {
                self.sequences.remove(&slot);
                self.resets.push(slot);
            }
            Order::Trim { slot, length } => {
                let sequence = self.sequences.get_mut(&slot).expect("only what is there can be cut");
                sequence.truncate(length as usize);
                assert_eq!(sequence.len(), length as usize);
            }
            Order::Keep { slot, blocks } => {
                for block in blocks {
                    let tokens = self.sequences[&slot][..((block.index + 1) * BLOCK) as usize].to_vec();
                    if block.held {
                        self.held.insert(block.key, tokens.clone());
                    }
                    if block.shelved {
                        self.shelved.insert(block.key, tokens);
                    }
                }
            }
            Order::Restore { slot, keys } => {
                assert_eq!(self.fill(slot, &keys) as usize, keys.len());
            }
            Order::Forget { held, shelved } => {
                held.iter().for_each(|key| drop(self.held.remove(key).expect("it was held")));
                shelved.iter().for_each(|key| drop(self.shelved.remove(key)));
            }
        }
    }

    fn fill(&mut self, slot: u32, keys: &[Key]) -> u32 {
        let shelved = |key| self.shelved.get(key).filter(|_| !self.damaged);
        let found: Vec<&Vec<u32>> =
            keys.iter().map_while(|key| self.held.get(key).or_else(|| shelved(key))).collect();
        let (came, tokens) = (found.len() as u32, found.last().map(|tokens| (*tokens).clone()));
        let before = self.sequences.insert(slot, tokens.unwrap_or_default());
        assert!(before.is_none(), "slot {slot} is filled while it is empty");
        came
    }

    /// Guesses what the model says, but for every seventh token.
    fn draft(&mut self, Draft { slot, offset, tokens, guesses, choice }: &Draft) -> Vec<u32> {
        let mut read = self.drafts.remove(slot).unwrap_or_default();
        assert!(*offset as usize <= read.len(), "the draft model has read {} of {offset} tokens", read.len());
        read.truncate(*offset as usize);
        read.extend(tokens);
        let history = self.sequences[slot].len();
        assert_eq!(read[..history], self.sequences[slot], "both models read the same");
        let guesses: Vec<u32> = (0..*guesses)
            .map(|guess| {
                let index = choice.index + guess;
                let chosen = self.choose(&read, &Choice { index, ..choice.clone() }).unwrap_or(END);
                let token = if index % 7 == 6 { END } else { chosen };
                read.push(token);
                token
            })
            .collect();
        // The last one it has not read itself.
        read.pop();
        self.drafts.insert(*slot, read);
        guesses
    }

    fn run(&mut self, step: &Step) -> Chosen {
        let sequence = self.sequences.entry(step.slot).or_default();
        assert_eq!(step.offset as usize, sequence.len(), "the cache holds what the steps brought");
        if step.tokens.is_empty() {
            // Whoever does not choose hears of the token as it computes, which is nothing to be seen here.
            let told = step.choice.as_ref().map_or(END, |_| self.chosen[&step.slot]);
            sequence.push(told);
        }
        sequence.extend(&step.tokens);
        self.peak = self.peak.max(self.sequences.values().map(Vec::len).sum());
        let sequence = &self.sequences[&step.slot];
        let before_guesses = sequence.len() - step.guesses as usize;
        let chosen: Chosen = (before_guesses..)
            .zip(step.choices())
            .map(|(length, choice)| self.choose(&sequence[..length], &choice))
            .collect();
        match chosen.as_slice() {
            [Ok(token)] => drop(self.chosen.insert(step.slot, *token)),
            // A step that follows before anybody knows has something to read all the same, as on a device.
            [Err(_)] => drop(self.chosen.insert(step.slot, END)),
            [] => {}
            // Behind guesses it has to be told.
            _ => drop(self.chosen.remove(&step.slot)),
        }
        chosen
    }

    fn choose(&self, sequence: &[u32], choice: &Choice) -> Result<u32, SampleError> {
        match self.mood {
            Mood::Stuck(token) => return Ok(token),
            Mood::Poisoned(token) if sequence.contains(&token) => {
                return Err(SampleError::NotFinite);
            }
            _ => {}
        }
        let start = sequence.iter().rposition(|&token| token == USER).map_or(0, |at| at + 1);
        let answer = sequence[start..].iter().position(|&token| token == ASSISTANT);
        let end = answer.map_or(sequence.len(), |length| start + length);
        let said: Vec<u32> = sequence[start..end].iter().copied().filter(|&token| token < 256).collect();
        let length = said.len() as u32;
        if length == 0 || (choice.index >= length && !choice.banned.contains(&END)) {
            return Ok(END);
        }
        Ok(said[(choice.index % length) as usize])
    }
}

impl Compute for Fake {
    fn load(&self) -> Answer<()> {
        let (sender, answer) = oneshot::channel();
        let result = if self.state.lock().loadable {
            Ok(())
        } else {
            Err(ComputeError::Own("model.safetensors is broken: its header ends at byte 7".into()))
        };
        let _ = sender.send(result);
        answer
    }

    fn progress(&self) -> Progress {
        Progress { loaded_bytes: 10, total_bytes: 10 }
    }

    fn join(&self, _: Addresses) -> Answer<()> {
        let (sender, answer) = oneshot::channel();
        let _ = sender.send(Ok(()));
        answer
    }

    fn disband(&self) -> Answer<()> {
        let (sender, answer) = oneshot::channel();
        let mut state = self.state.lock();
        // One that hangs never gets there.
        if state.mood == Mood::Hung {
            std::mem::forget(sender);
            return answer;
        }
        state.sequences.clear();
        state.chosen.clear();
        state.held.clear();
        state.drafts.clear();
        let _ = sender.send(Ok(()));
        answer
    }

    fn run(&self, batch: Vec<Step>) -> Answer<Vec<Chosen>> {
        let (sender, answer) = oneshot::channel();
        self.batches.begin(&batch);
        let told = self.batches.clone();
        let (state, gate, pace) = (self.state.clone(), self.gate.clone(), self.pace);
        // The state is touched in the order of the calls; only the answer takes time.
        let (mood, tokens) = {
            let mut state = state.lock();
            assert_ne!(state.mood, Mood::Buggy, "the fake was told to panic");
            let tokens: Vec<Chosen> = batch.iter().map(|step| state.run(step)).collect();
            state.batches.push(batch);
            (state.mood, tokens)
        };
        tokio::spawn(async move {
            if let Some(gate) = gate {
                gate.notified().await;
            }
            // Even to sleep for no time takes a millisecond.
            if !pace.is_zero() {
                tokio::time::sleep(pace).await;
            }
            if mood != Mood::Hung {
                told.end(mood != Mood::Broken);
            }
            match mood {
                Mood::Fine | Mood::Stuck(_) | Mood::Poisoned(_) => drop(sender.send(Ok(tokens))),
                Mood::Broken => {
                    let lost = "[ring] connection to a peer was lost";
                    drop(sender.send(Err(ComputeError::Group(lost.into()))));
                }
                Mood::Hung | Mood::Buggy => {
                    std::future::pending::<()>().await;
                    drop(sender);
                }
            }
        });
        answer
    }

    fn looks_ahead(&self) -> bool {
        self.looks_ahead
    }

    fn draft(&self, drafts: Vec<Draft>) -> Answer<Vec<Vec<u32>>> {
        let (sender, answer) = oneshot::channel();
        let mut state = self.state.lock();
        let guesses = if state.draft_broken {
            Err(ComputeError::Own("the draft model's weights are gone".into()))
        } else {
            Ok(drafts.iter().map(|draft| state.draft(draft)).collect())
        };
        let _ = sender.send(guesses);
        answer
    }

    fn arrange(&self, order: Order) {
        self.state.lock().arrange(order);
    }

    fn fetch(&self, slot: u32, keys: Vec<Key>) -> Answer<u32> {
        let (sender, answer) = oneshot::channel();
        let came = self.state.lock().fill(slot, &keys);
        let _ = sender.send(Ok(came));
        answer
    }

    fn has_shelf(&self) -> bool {
        true
    }

    fn shelved(&self) -> Vec<Key> {
        self.state.lock().shelved.keys().copied().collect()
    }

    fn lost(&self) -> Vec<Key> {
        Vec::new()
    }

    fn memory(&self) -> Memory {
        Memory { bytes: 10, peak_bytes: 20 }
    }

    fn pulse(&self) -> Pulse {
        self.batches.pulse()
    }

    fn totals(&self) -> Totals {
        Totals { bytes: [5, 6, 7], seconds: [1.0, 0.5, 0.25], timed: 2 }
    }
}
