//! Requests to slots, slots to batches: one loop that runs all sequences together, a step at a time.
//! Answers end here and in `entrance` only, so every request gets exactly one `Finished` or
//! `Failed` (invariant 10). How tokens become text is `sequence`'s business.
//!
//! ```text
//! submit ─▶ tokenise ─▶ waiting ─▶ slot: a turn in every round ─▶ Finished
//!    └──────────┴──────────┴──────────────────┴──────────────────▶ Failed
//! ```

mod deal;
mod entrance;
pub mod smoke;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use russet_wire::event::{Event, Failure, FailureKind, FinishReason, Usage};
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::time::Instant;

use crate::compute::{Answer, Chosen, Compute, Step};
use crate::follow::Followers;
use crate::life::Life;
use crate::metrics::Metrics;
use crate::sequence::{Accepted, Sequence};
use crate::tokens::Tokens;

use deal::{Turn, deal};
use entrance::{Caller, Ticket, unavailable};
pub use entrance::{Entrance, MOST_WAITING};

/// A step that takes longer hangs. Reading 2,048 tokens with the largest model on the slowest
/// machine we know of takes a fraction of it.
const STEP_DEADLINE: Duration = Duration::from_secs(300);

/// A sequence and who waits for it.
struct Running {
    sequence: Sequence,
    caller: Caller,
    started: Instant,
    first: Option<Instant>,
    last: Instant,
    /// Whether nobody else had a slot while its prompt was read.
    alone: bool,
}

/// What a group has room for.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Tokens of one sequence.
    pub context_tokens: u32,
    /// Sequences at a time.
    pub max_sequences: u32,
    /// Batches at a time: the stages of its pipeline.
    pub stages: u32,
}

/// The loop over slots.
pub struct Schedule {
    compute: Arc<dyn Compute>,
    followers: Followers,
    tokens: Arc<Tokens>,
    life: Life,
    metrics: Metrics,
    tickets: UnboundedReceiver<Ticket>,
    waiting: VecDeque<Ticket>,
    /// In the order in which they came.
    running: Vec<Running>,
    free: BTreeSet<u32>,
    capacity: f64,
    /// Stages of the pipeline.
    stages: usize,
}

impl Schedule {
    /// A loop over the slots of `room`, and its entrance.
    pub fn new(
        compute: Arc<dyn Compute>,
        followers: Followers,
        tokens: Arc<Tokens>,
        life: Life,
        metrics: Metrics,
        room: Room,
    ) -> (Self, Entrance) {
        let Room { context_tokens, max_sequences, stages } = room;
        let (sender, tickets) = mpsc::unbounded_channel();
        let entrance = Entrance {
            tickets: sender,
            tokens: tokens.clone(),
            context_tokens,
            life: life.clone(),
            metrics: metrics.clone(),
        };
        let schedule = Self {
            compute,
            followers,
            tokens,
            life,
            metrics,
            tickets,
            waiting: VecDeque::new(),
            running: Vec::new(),
            free: (0..max_sequences).collect(),
            capacity: f64::from(context_tokens) * f64::from(max_sequences),
            stages: stages as usize,
        };
        (schedule, entrance)
    }

    /// Runs until the rank failed, or until it was asked to stop and everything is answered.
    pub async fn run(mut self) {
        let life = self.life.clone();
        loop {
            self.admit();
            if self.running.is_empty() && self.waiting.is_empty() {
                tokio::select! {
                    biased;
                    reason = life.failed() => return self.fail(&reason),
                    ticket = self.tickets.recv() => match ticket {
                        Some(ticket) => self.waiting.push_back(ticket),
                        None => return life.stop(),
                    },
                    // What was accepted is answered; what is still on its way here is refused.
                    _ = life.until(|now| now.draining.is_some()), if !self.tickets.is_closed() => {
                        self.tickets.close();
                    }
                }
                continue;
            }
            let round = self.round();
            tokio::select! {
                biased;
                reason = life.failed() => return self.fail(&reason),
                result = round => if let Err(reason) = result {
                    life.fail(reason);
                },
            }
        }
    }

    /// Moves requests towards slots, dropping those whose caller left.
    fn admit(&mut self) {
        while let Ok(ticket) = self.tickets.try_recv() {
            self.waiting.push_back(ticket);
        }
        let (gone, waiting): (VecDeque<_>, _) =
            self.waiting.drain(..).partition(|ticket| ticket.caller.gone());
        self.waiting = waiting;
        for Ticket { prompt, caller, .. } in gone {
            let usage = Usage { prompt_tokens: prompt.len() as u32, completion_tokens: 0 };
            caller.finish(FinishReason::Cancelled, usage);
        }
        while !self.waiting.is_empty() {
            let Some(slot) = self.free.pop_first() else { break };
            let Some(Ticket { request, prompt, limit, caller, place }) = self.waiting.pop_front() else {
                break;
            };
            drop(place);
            self.metrics.running.inc();
            let now = Instant::now();
            self.metrics.queue.observe((now - caller.arrived).as_secs_f64());
            caller.tell(Event::Started { prompt_tokens: prompt.len() as u32 });
            let seed = request.sampling.seed.unwrap_or_else(rand::random);
            let sequence = Sequence::new(
                slot,
                &request,
                prompt,
                limit,
                seed,
                self.tokens.ends().clone(),
                self.tokens.stream(),
            );
            self.running.push(Running {
                sequence,
                caller,
                started: now,
                first: None,
                last: now,
                alone: true,
            });
        }
    }

    /// One round of turns. All batches are handed out before the first is waited for, so that the stages of a
    /// pipeline work on different ones at the same time.
    async fn round(&mut self) -> Result<(), String> {
        let (gone, running): (Vec<_>, Vec<_>) = self.running.drain(..).partition(|one| one.caller.gone());
        self.running = running;
        for one in gone {
            self.release(one, FinishReason::Cancelled);
        }
        let (begun, streams) = (Instant::now(), self.running.len() as u32);
        let answering = self.running.iter().all(|one| one.first.is_some());
        let left: Vec<u32> = self.running.iter().map(|one| one.sequence.left()).collect();
        let mut answers = Vec::new();
        for turns in deal(&left, self.stages) {
            let mut steps = Vec::with_capacity(turns.len());
            for Turn { index, tokens } in &turns {
                let one = &mut self.running[*index];
                one.alone &= streams == 1;
                let step = one.sequence.step(*tokens);
                if one.first.is_none() {
                    self.metrics.prompt_tokens.inc_by(step.tokens.len() as u64);
                }
                steps.push(step);
            }
            answers.push((turns, self.ask(steps)));
        }
        let mut finished = Vec::new();
        for (turns, answer) in answers {
            let chosen = answer.answered().await?;
            for (Turn { index, .. }, chosen) in turns.into_iter().zip(chosen) {
                let end = match chosen {
                    Ok(None) => None,
                    Ok(Some(token)) => self.running[index].take(token, &self.metrics),
                    Err(error) => Some(Err(error.to_string())),
                };
                finished.extend(end.map(|end| (index, end)));
            }
        }
        let cached: u32 = self.running.iter().map(|one| one.sequence.cached()).sum();
        if answering && streams > 0 {
            self.metrics.rates.lock().round(streams, cached, begun.elapsed());
        }
        // From the back, so that the indices in front stay true.
        finished.sort_unstable_by_key(|(index, _)| std::cmp::Reverse(*index));
        for (index, end) in finished {
            let one = self.running.remove(index);
            match end {
                Ok(reason) => self.release(one, reason),
                Err(message) => {
                    let Running { sequence, caller, .. } = one;
                    self.vacate(sequence.slot());
                    caller.fail(Failure { kind: FailureKind::Internal, message });
                }
            }
        }
        let cached: u32 = self.running.iter().map(|one| one.sequence.cached()).sum();
        self.metrics.kv_usage.set(f64::from(cached) / self.capacity);
        Ok(())
    }

    /// Has every rank run the steps together.
    fn ask(&self, batch: Vec<Step>) -> Asked {
        let chooses = batch.iter().map(|step| step.choice.is_some()).collect();
        self.metrics.steps.inc_by(batch.len() as u64);
        self.followers.run(&batch);
        Asked { chooses, answer: self.compute.run(batch) }
    }

    fn release(&mut self, one: Running, reason: FinishReason) {
        let Running { sequence, caller, first, last, .. } = one;
        self.vacate(sequence.slot());
        if let Some(first) = first {
            self.metrics.decode.observe((last - first).as_secs_f64());
        }
        caller.finish(reason, sequence.usage());
    }

    fn vacate(&mut self, slot: u32) {
        self.followers.reset(slot);
        self.compute.reset(slot);
        self.free.insert(slot);
        self.metrics.running.dec();
    }

    /// Ends everything with the reason this rank failed.
    fn fail(mut self, reason: &str) {
        self.tickets.close();
        while let Ok(ticket) = self.tickets.try_recv() {
            self.waiting.push_back(ticket);
        }
        for ticket in self.waiting.drain(..) {
            ticket.caller.fail(unavailable(reason.to_owned()));
        }
        for one in self.running.drain(..) {
            self.metrics.running.dec();
            one.caller.fail(unavailable(reason.to_owned()));
        }
    }
}

/// A batch on its way.
struct Asked {
    /// Which of its steps choose a token.
    chooses: Vec<bool>,
    answer: Answer<Vec<Chosen>>,
}

impl Asked {
    /// What came of each step; an error is why the group cannot go on.
    async fn answered(self) -> Result<Vec<Chosen>, String> {
        let answered = match tokio::time::timeout(STEP_DEADLINE, self.answer).await {
            Ok(Ok(answered)) => answered.map_err(|error| error.to_string())?,
            Ok(Err(_)) => return Err("the compute thread is gone; see the engine's log".into()),
            Err(_) => {
                let seconds = STEP_DEADLINE.as_secs();
                return Err(format!("a step did not end within {seconds} s; the group hangs"));
            }
        };
        let as_asked = |(chooses, chosen): (&bool, &Chosen)| {
            chosen.as_ref().map_or(*chooses, |token| token.is_some() == *chooses)
        };
        if answered.len() != self.chooses.len() || !self.chooses.iter().zip(&answered).all(as_asked) {
            return Err("the compute half did not choose tokens where it had to, and only there".into());
        }
        Ok(answered)
    }
}

impl Running {
    /// Takes a chosen token; says how the answer ended if it did.
    fn take(&mut self, token: u32, metrics: &Metrics) -> Option<Result<FinishReason, String>> {
        let now = Instant::now();
        let Accepted { event, finished } = match self.sequence.accept(token) {
            Ok(accepted) => accepted,
            Err(error) => return Some(Err(error.to_string())),
        };
        match self.first {
            None => {
                self.first = Some(now);
                metrics.first_token.observe((now - self.caller.arrived).as_secs_f64());
                metrics.prefill.observe((now - self.started).as_secs_f64());
                if self.alone {
                    let tokens = self.sequence.usage().prompt_tokens;
                    metrics.rates.lock().prompt(tokens, now - self.started);
                }
            }
            Some(_) => metrics.between_tokens.observe((now - self.last).as_secs_f64()),
        }
        self.last = now;
        metrics.generated_tokens.inc();
        if let Some(event) = event {
            self.caller.tell(event);
        }
        finished.map(Ok)
    }
}
