//! Requests to slots, slots to batches: one loop that runs all sequences together, a step at a time. On a rank by
//! itself a batch is begun before the tokens of the one before it are read, so that MLX is never without work.
//! Answers end here and in `entrance` only, so every request gets exactly one `Finished` or
//! `Failed` (invariant 10). How tokens become text is `sequence`'s business.
//!
//! ```text
//! submit ─▶ tokenise ─▶ waiting ─▶ slot: a turn in every batch ─▶ Finished
//!    └──────────┴──────────┴──────────────────┴──────────────────▶ Failed
//! ```

pub mod deal;
mod entrance;
pub mod smoke;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use russet_wire::event::{Failure, FailureKind, FinishReason, Usage};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::time::Instant;

use crate::compute::{Answer, Chosen, Compute, Step};
use crate::follow::Followers;
use crate::kept::chain::Key;
use crate::kept::feed::Feed;
use crate::kept::{Cache, Entry, Limits, STEP};
use crate::life::Life;
use crate::metrics::Metrics;
use crate::sequence::{Accepted, Sequence};
use crate::tokens::Tokens;

use deal::{Ready, Turn, deal};
use entrance::{Caller, Ticket, started, unavailable};
pub use entrance::{Entrance, MOST_WAITING};

/// A step that takes longer hangs. Reading 2,048 tokens with the largest model on the slowest
/// machine we know of takes a fraction of it. The agent knows much sooner; this is for an engine without one.
const STEP_DEADLINE: Duration = Duration::from_secs(300);

/// A sequence and who waits for it.
struct Running {
    /// Never used again, unlike its slot.
    number: u64,
    sequence: Sequence,
    caller: Caller,
    started: Instant,
    first: Option<Instant>,
    last: Instant,
    /// Whether nobody else had a slot while its prompt was read.
    alone: bool,
    /// Whether blocks of its prompt are still on their way from disk.
    fetching: bool,
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
    /// Whether what requests leave is kept for others.
    pub keeps: bool,
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
    cache: Cache,
    feed: Feed,
    fetches: (UnboundedSender<Fetched>, UnboundedReceiver<Fetched>),
    capacity: f64,
    context_tokens: u32,
    /// Stages of the pipeline.
    stages: usize,
    /// Whether there is no other rank.
    alone: bool,
    /// Sequences so far.
    number: u64,
    lap: Option<Lap>,
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
        root: Key,
    ) -> (Self, Entrance) {
        let Room { context_tokens, max_sequences, stages, keeps } = room;
        let feed = Feed::default();
        let shelved = followers.shelved_everywhere(compute.shelved());
        let limits = Limits {
            slots: max_sequences,
            tokens: u64::from(context_tokens.next_multiple_of(STEP)) * u64::from(max_sequences),
            shelf: compute.has_shelf(),
            enabled: keeps,
        };
        let alone = followers.is_empty();
        let (sender, tickets) = mpsc::unbounded_channel();
        let entrance = Entrance {
            tickets: sender,
            tokens: tokens.clone(),
            context_tokens,
            life: life.clone(),
            metrics: metrics.clone(),
            feed: feed.clone(),
            root,
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
            cache: Cache::new(root, limits, &shelved),
            feed,
            fetches: mpsc::unbounded_channel(),
            capacity: f64::from(context_tokens) * f64::from(max_sequences),
            context_tokens,
            stages: stages as usize,
            alone,
            number: 0,
            lap: None,
        };
        (schedule, entrance)
    }

    /// Runs until the rank failed, or until it was asked to stop and everything is answered.
    pub async fn run(mut self) {
        let life = self.life.clone();
        let mut begun = VecDeque::new();
        loop {
            self.admit();
            self.drop_callers_that_left();
            while begun.len() < self.most_batches()
                && let Some(batch) = self.begin()
            {
                begun.push_back(batch);
            }
            let Some(Begun { rows, reads, answer }) = begun.pop_front() else {
                tokio::select! {
                    biased;
                    reason = life.failed() => return self.fail(&reason),
                    Some(fetched) = self.fetches.1.recv() => self.fetched(&fetched),
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
            };
            tokio::select! {
                biased;
                reason = life.failed() => return self.fail(&reason),
                answered = answer.answered() => match answered {
                    Ok(chosen) => self.end(rows, reads, chosen),
                    Err(reason) => {
                        life.fail(reason);
                        return self.fail(&life.failed().await);
                    }
                },
            }
        }
    }

    /// Batches that are on their way at the same time: one for each stage of a pipeline, so that all of them work;
    /// of a rank by itself one that follows another whose tokens nobody has read yet.
    fn most_batches(&self) -> usize {
        if self.alone { 2 } else { self.stages }
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
            let usage = Usage { prompt_tokens: prompt.len() as u32, ..Usage::default() };
            caller.finish(FinishReason::Cancelled, usage);
        }
        while let Ok(fetched) = self.fetches.1.try_recv() {
            self.fetched(&fetched);
        }
        self.cache.unshelve(&self.compute.lost());
        while !self.waiting.is_empty() && self.cache.has_slot() {
            let Some(Ticket { request, prompt, telling, caller, place }) = self.waiting.pop_front() else {
                break;
            };
            let read = [prompt.as_slice(), &request.emitted].concat();
            let Some(Entry { slot, cached, fetch }) = self.cache.enter(&read) else { break };
            drop(place);
            self.metrics.running.inc();
            self.metrics.asked_prefix(read.len() as u32, cached);
            let now = Instant::now();
            self.metrics.queue.observe((now - caller.arrived).as_secs_f64());
            caller.tell(started(&request, &prompt));
            let seed = request.sampling.seed.unwrap_or_else(rand::random);
            let mut sequence = Sequence::new(slot, &request, prompt, seed, telling);
            self.number += 1;
            self.lap = None;
            sequence.skip(cached);
            let fetching = !fetch.is_empty();
            self.arrange();
            if fetching {
                self.fetch(slot, fetch);
            }
            self.running.push(Running {
                number: self.number,
                sequence,
                caller,
                started: now,
                first: None,
                last: now,
                // What is read of an answer that was begun elsewhere is more than its prompt.
                alone: request.emitted.is_empty(),
                fetching,
            });
        }
    }

    fn drop_callers_that_left(&mut self) {
        // A slot that is being filled stays until it is.
        let (gone, running): (Vec<_>, Vec<_>) =
            self.running.drain(..).partition(|one| one.caller.gone() && !one.fetching);
        self.running = running;
        for one in gone {
            self.release(one, FinishReason::Cancelled);
        }
    }

    /// Has the next batch run, if anybody can go on.
    fn begin(&mut self) -> Option<Begun> {
        let ready: Vec<Ready> = self.running.iter().map(|one| one.ready(self.alone)).collect();
        let answering = self.running.iter().any(|one| one.first.is_some());
        let turns = deal(&ready, self.stages, answering, self.context_tokens);
        if turns.is_empty() {
            return None;
        }
        let (mut rows, mut steps) = (Vec::with_capacity(turns.len()), Vec::with_capacity(turns.len()));
        let streams = self.running.len();
        for Turn { index, tokens } in &turns {
            let one = &mut self.running[*index];
            one.alone &= streams == 1;
            let step = one.sequence.step(*tokens);
            self.cache.grow(step.slot, one.sequence.cached());
            if one.first.is_none() {
                self.metrics.prompt_tokens.inc_by(step.tokens.len() as u64);
            }
            rows.push(one.number);
            steps.push(step);
        }
        self.arrange();
        let reads = steps.iter().any(|step| step.choice.is_none());
        Some(Begun { rows, reads, answer: self.ask(steps) })
    }

    /// Takes what came of a batch: of `rows`, by their numbers. Who ended meanwhile wants no more of it.
    fn end(&mut self, rows: Vec<u64>, reads: bool, chosen: Vec<Chosen>) {
        let (streams, mut told, mut some_ended) = (self.running.len() as u32, 0, false);
        for (number, chosen) in rows.into_iter().zip(chosen) {
            let Some(index) = self.running.iter().position(|one| one.number == number) else { continue };
            let end = match chosen {
                Ok(None) => continue,
                Ok(Some(token)) => {
                    let one = &mut self.running[index];
                    if one.first.is_none() {
                        self.cache.read(one.sequence.slot(), one.sequence.prompt());
                    }
                    one.take(token, &self.metrics)
                }
                Err(error) => Some(Err(error.to_string())),
            };
            told += 1;
            let Some(end) = end else { continue };
            some_ended = true;
            let one = self.running.remove(index);
            match end {
                Ok(reason) => self.release(one, reason),
                Err(message) => {
                    let Running { sequence, caller, .. } = one;
                    // Numbers that are none are nothing to keep.
                    self.cache.discard(sequence.slot());
                    self.vacated();
                    caller.fail(Failure { kind: FailureKind::Internal, message });
                }
            }
        }
        self.arrange();
        let cached: u32 = self.running.iter().map(|one| one.sequence.cached()).sum();
        self.metrics.kv_usage.set(f64::from(cached) / self.capacity);
        if reads || some_ended {
            self.lap = None;
            return;
        }
        // Every stream got its token, in one batch or in those of all stages.
        let now = Instant::now();
        let lap = self.lap.take().filter(|lap| lap.streams == streams);
        self.lap = Some(match lap {
            Some(lap) if lap.told + told < streams => Lap { told: lap.told + told, ..lap },
            lap => {
                if let Some(lap) = lap {
                    self.metrics.rates.lock().round(streams, cached, now - lap.begun);
                }
                Lap { begun: now, told: 0, streams }
            }
        });
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
        // Of an answer that was begun the numbers are sound; of a prompt alone nobody knows.
        if first.is_some() {
            self.cache.leave(sequence.slot(), sequence.history().to_vec());
        } else {
            self.cache.discard(sequence.slot());
        }
        self.vacated();
        if let Some(first) = first {
            self.metrics.decode.observe((last - first).as_secs_f64());
        }
        caller.finish(reason, sequence.usage());
    }

    fn vacated(&mut self) {
        self.arrange();
        self.metrics.running.dec();
    }

    /// Has every rank do what is to be done with its caches, before the next batch.
    fn arrange(&mut self) {
        for order in self.cache.orders() {
            self.followers.arrange(&order);
            self.compute.arrange(order);
        }
        self.feed.tell(self.cache.changes());
        self.metrics.kept(self.cache.sizes());
    }

    /// Has every rank fill a slot from its disk.
    fn fetch(&self, slot: u32, keys: Vec<Key>) {
        let theirs = self.followers.fetch(slot, &keys);
        let own = self.compute.fetch(slot, keys.clone());
        let (number, done) = (self.number, self.fetches.0.clone());
        tokio::spawn(async move {
            let own = own.await.map_or(0, |came| came.unwrap_or(0));
            let came = own.min(theirs.await.unwrap_or(0));
            // Nobody waits when the loop is over.
            let _ = done.send(Fetched { number, keys, came });
        });
    }

    /// A slot was filled from disk, if only as far as the blocks came; what did not is read.
    fn fetched(&mut self, Fetched { number, keys, came }: &Fetched) {
        let Some(one) = self.running.iter_mut().find(|one| one.number == *number) else { return };
        one.fetching = false;
        if (*came as usize) < keys.len() {
            self.cache.fetched(one.sequence.slot(), keys, *came);
            one.sequence.skip(0);
        }
        self.arrange();
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

/// A slot was filled from disk.
struct Fetched {
    /// Whose it is.
    number: u64,
    keys: Vec<Key>,
    /// How many of the first ones came, on every rank.
    came: u32,
}

/// A batch on its way, and whose it is.
struct Begun {
    /// Numbers of its sequences.
    rows: Vec<u64>,
    /// Whether a prompt is read.
    reads: bool,
    answer: Asked,
}

/// From one token of every stream to the next.
struct Lap {
    begun: Instant,
    /// Tokens so far.
    told: u32,
    streams: u32,
}

/// What was asked of a batch.
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
    fn ready(&self, ahead: bool) -> Ready {
        if self.fetching { Ready::Busy } else { self.sequence.ready(ahead) }
    }

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
                    let Usage { prompt_tokens, cached_tokens, .. } = self.sequence.usage();
                    metrics.rates.lock().prompt(prompt_tokens - cached_tokens, now - self.started);
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
