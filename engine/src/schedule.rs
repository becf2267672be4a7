//! Requests to slots, slots to batches: one loop that runs all sequences together, a step at a time. On a rank by
//! itself a batch is begun before the tokens of the one before it are read, so that MLX is never without work.
//! Answers end here and in `entrance` only, so every request gets exactly one `Finished` or
//! `Failed` (invariant 10). How tokens become text is `sequence`'s business; whose turn it is, who has room and until
//! when a request is of use are pure decisions of modules of their own.
//!
//! ```text
//! submit ─▶ tokenise ─▶ waiting ─▶ slot: a turn in every batch ─▶ Finished
//!    │          │        │   ▲      │  │
//!    │          │        │   └──────┘  │  room for others is needed
//!    └──────────┴────────┴─────────────┴────────────────────────▶ Failed
//! ```

mod batch;
mod caller;
pub mod deadline;
pub mod deal;
mod desk;
mod entrance;
mod guesses;
mod job;
mod places;
pub mod pool;
pub mod queue;
mod slots;
pub mod smoke;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use russet_wire::event::{Failure, FailureKind, FinishReason};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::time::Instant;

use crate::compute::{Chosen, Compute, Step};
use crate::follow::Followers;
use crate::guess::{Costs, Sources};
use crate::kept::chain::Key;
use crate::kept::feed::Feed;
use crate::kept::{self, Cache, Limits, STEP};
use crate::life::Life;
use crate::metrics::Metrics;
use crate::tokens::Tokens;

use batch::{Asked, Begun, Done, Lap, Work};
use caller::unavailable;
use deal::{Ready, Turn, deal};
use desk::Desk;
pub use entrance::Entrance;
use job::Job;
pub use places::MOST_WAITING;
use places::Places;
use pool::{Entry, Pool, Tenant};
use queue::Queue;
use slots::Fetched;

/// What a group has room for.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Tokens of one sequence.
    pub context_tokens: u32,
    /// Sequences at a time.
    pub max_sequences: u32,
    /// Tokens of all sequences together.
    pub kv_tokens: u64,
    /// Batches at a time: the stages of its pipeline.
    pub stages: u32,
    /// Whether what requests leave is kept for others.
    pub keeps: bool,
    /// Who guesses the next tokens of answers.
    pub guesses: Sources,
}

/// The loop over slots.
pub struct Schedule {
    compute: Arc<dyn Compute>,
    followers: Followers,
    tokens: Arc<Tokens>,
    life: Life,
    metrics: Metrics,
    places: Places,
    jobs: UnboundedReceiver<Job>,
    waiting: Queue<Job>,
    /// In the order of their turns: so prompts are read.
    running: Vec<Job>,
    slots: usize,
    cache: Cache,
    feed: Feed,
    fetches: (UnboundedSender<Fetched>, UnboundedReceiver<Fetched>),
    pool: Pool,
    context_tokens: u32,
    /// Stages of the pipeline.
    stages: usize,
    /// Stays in slots so far.
    stays: u64,
    /// Since when nobody but this loop has had work.
    since: Instant,
    /// When a batch ended last.
    ended: Instant,
    lap: Option<Lap>,
    costs: Costs,
    draft_failed: bool,
}

/// From the first request to an engine that rests until it begins to read: who comes in a burst is read together, in
/// far less time than one after the other.
const GATHERING: Duration = Duration::from_millis(1);

impl Schedule {
    /// A loop over the slots of `room`, and its entrance.
    ///
    /// # Errors
    /// The system gives no threads.
    pub fn new(
        compute: Arc<dyn Compute>,
        followers: Followers,
        tokens: Arc<Tokens>,
        life: Life,
        metrics: Metrics,
        room: Room,
        root: Key,
    ) -> io::Result<(Self, Entrance)> {
        let Room { context_tokens, max_sequences, kv_tokens, stages, keeps, guesses } = room;
        let feed = Feed::default();
        let shelved = followers.shelved_everywhere(compute.shelved());
        let most = u64::from(context_tokens) * u64::from(max_sequences);
        let rounded = u64::from(context_tokens.next_multiple_of(STEP)) * u64::from(max_sequences);
        let limits = Limits {
            slots: max_sequences,
            tokens: if kv_tokens < most { kv_tokens } else { rounded },
            shelf: compute.has_shelf(),
            enabled: keeps,
        };
        let (sender, jobs) = mpsc::unbounded_channel();
        let places = Places::new(metrics.clone(), max_sequences);
        let born = Instant::now();
        let entrance = Entrance {
            jobs: sender,
            desk: Desk::open()?,
            tokens: tokens.clone(),
            context_tokens,
            kv_tokens,
            guesses,
            places: places.clone(),
            born,
            number: Arc::default(),
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
            places,
            jobs,
            waiting: Queue::default(),
            running: Vec::new(),
            slots: max_sequences as usize,
            cache: Cache::new(root, limits, &shelved),
            feed,
            fetches: mpsc::unbounded_channel(),
            pool: Pool::new(kv_tokens, context_tokens),
            context_tokens,
            stages: stages as usize,
            stays: 0,
            since: born,
            ended: born,
            lap: None,
            costs: Costs::default(),
            draft_failed: false,
        };
        Ok((schedule, entrance))
    }

    /// Runs until the rank failed, or until it was asked to stop and everything is answered.
    pub async fn run(mut self) {
        let life = self.life.clone();
        let mut begun = VecDeque::new();
        loop {
            self.receive();
            self.dismiss();
            self.admit();
            while begun.len() < self.most_batches()
                && let Some(batch) = self.begin(begun.len())
            {
                begun.push_back(batch);
            }
            let Some(Begun { rows, since, work }) = begun.pop_front() else {
                tokio::select! {
                    biased;
                    reason = life.failed() => return self.fail(&reason),
                    Some(fetched) = self.fetches.1.recv() => self.fetched(&fetched),
                    job = self.jobs.recv() => match job {
                        Some(job) => {
                            self.waiting.push(job.standing, job);
                            tokio::time::sleep(GATHERING).await;
                        }
                        None => return life.stop(),
                    },
                    // What was accepted is answered; what is still on its way here is refused.
                    _ = life.until(|now| now.draining.is_some()), if !self.jobs.is_closed() => {
                        self.jobs.close();
                    }
                }
                self.since = Instant::now();
                continue;
            };
            tokio::select! {
                biased;
                reason = life.failed() => return self.fail(&reason),
                done = work.done() => match done {
                    Ok(Done::Draft(guesses)) => self.drafted(rows, since, guesses),
                    Ok(Done::Batch { reads, guesses, chosen }) => {
                        let now = Instant::now();
                        self.metrics.batch.observe((now - since).as_secs_f64());
                        if !reads {
                            // What it waited for others is not its own.
                            self.costs.learn(rows.len() as u32, guesses, now - since.max(self.ended));
                        }
                        (self.since, self.ended) = (now, now);
                        self.end(rows, reads || guesses > 0, chosen);
                    }
                    Err(failure) => {
                        life.fail_with(failure);
                        return self.fail(&life.failed().await);
                    }
                },
            }
        }
    }

    /// Batches that are on their way at the same time: one for each stage of a pipeline, so that all of them work;
    /// of a single stage one that follows another whose tokens nobody has read yet.
    fn most_batches(&self) -> usize {
        self.stages.max(2)
    }

    /// Whether a token is chosen after one that is not known yet: where whoever computes it hears of that one, and it
    /// pays.
    fn looks_ahead(&self) -> bool {
        self.stages == 1 && self.compute.looks_ahead()
    }

    fn receive(&mut self) {
        while let Ok(job) = self.jobs.try_recv() {
            self.waiting.push(job.standing, job);
        }
        while let Ok(fetched) = self.fetches.1.try_recv() {
            self.fetched(&fetched);
        }
    }

    /// Ends what is of no more use to anybody: of callers that left, beyond its deadline, without a place to wait in.
    fn dismiss(&mut self) {
        for job in self.waiting.take_where(|job| job.caller.gone()) {
            job.finish(FinishReason::Cancelled, &self.metrics);
        }
        let metrics = self.metrics.clone();
        for job in self.waiting.take_where(|job| job.refused(&metrics).is_some()) {
            self.refuse(job);
        }
        // A slot that is being filled stays until it is.
        let over = |job: &Job| !job.fetching && (job.caller.gone() || job.refused(&metrics).is_some());
        let (over, running): (Vec<_>, Vec<_>) = self.running.drain(..).partition(over);
        self.running = running;
        for job in over {
            self.vacate(&job);
            self.refuse(job);
        }
    }

    /// Tells a caller that is still there why its request is not answered.
    fn refuse(&self, job: Job) {
        match job.refused(&self.metrics) {
            Some(failure) if !job.caller.gone() => job.caller.fail(failure),
            _ => job.finish(FinishReason::Cancelled, &self.metrics),
        }
    }

    /// Gives slots and room to those that wait, in the order of their turns: nobody passes one that does not fit yet,
    /// or large requests would wait for ever.
    fn admit(&mut self) {
        self.cache.unshelve(&self.compute.lost());
        while let Some(first) = self.waiting.first() {
            let running: Vec<Tenant> = self.running.iter().map(Job::tenant).collect();
            let Entry::After(leave) = self.pool.entry(&first.tenant(), &running, self.slots - running.len())
            else {
                break;
            };
            let Some(mut job) = self.waiting.take_first() else { break };
            for index in leave.into_iter().rev() {
                self.preempt(index);
            }
            let Some(kept::Entry { slot, cached, fetch }) = self.cache.enter(job.sequence.history()) else {
                self.waiting.push(job.standing, job);
                break;
            };
            self.stays += 1;
            self.lap = None;
            self.metrics.running.inc();
            job.enter(slot, cached, self.stays, &self.metrics);
            job.fetching = !fetch.is_empty();
            self.arrange();
            if job.fetching {
                self.fetch(slot, fetch);
            }
            let place = self.running.partition_point(|other| other.standing.precedes(&job.standing));
            self.running.insert(place, job);
        }
    }

    /// Has one that runs leave its slot, to wait for another. What it held is kept as far as there is room for it;
    /// the rest is read again when it comes back.
    fn preempt(&mut self, index: usize) {
        let mut job = self.running.remove(index);
        self.lap = None;
        self.vacate(&job);
        job.leave(self.places.keep(job.standing.number, job.standing.priority), &self.metrics);
        self.waiting.push(job.standing, job);
    }

    /// Whose turn it is, once those have left for whose next tokens there is no room; `ahead` allows to choose tokens
    /// after some that are not known yet.
    fn turns(&mut self, ahead: bool) -> Vec<Turn> {
        loop {
            let ready: Vec<Ready> = self.running.iter().map(|job| job.ready(ahead)).collect();
            let answering = self
                .running
                .iter()
                .zip(&ready)
                .any(|(job, ready)| !job.reads_its_prompt() && !matches!(ready, Ready::Read(_)));
            let turns = deal(&ready, self.stages, answering, self.context_tokens);
            let mut more = vec![0; ready.len()];
            for Turn { index, tokens } in &turns {
                more[*index] = *tokens;
            }
            let running: Vec<Tenant> = self.running.iter().map(Job::tenant).collect();
            match self.pool.leaves(&running, &more) {
                Some(index) => self.preempt(index),
                // Who could leave does so once its slot is filled.
                None if running.iter().any(|one| one.fixed) && !self.pool.holds(&running, &more) => {
                    return Vec::new();
                }
                None => return turns,
            }
        }
    }

    /// Has the next batch run behind so many others, if anybody can go on.
    fn begin(&mut self, behind: usize) -> Option<Begun> {
        let least = self.least();
        let guessing = self.guess(least);
        if self.looks_ahead() && guessing && behind > 0 {
            return None;
        }
        if let Some(drafts) = self.draft(least) {
            return Some(drafts);
        }
        let turns = self.turns(self.looks_ahead() && !guessing);
        if turns.is_empty() {
            return None;
        }
        let (mut rows, mut steps) = (Vec::with_capacity(turns.len()), Vec::with_capacity(turns.len()));
        let streams = self.running.len();
        let (mut read, mut guesses) = (0, 0);
        for Turn { index, tokens } in &turns {
            let job = &mut self.running[*index];
            job.alone &= streams == 1;
            let step = job.sequence.step(*tokens);
            self.cache.grow(step.slot, job.sequence.cached());
            if job.reads_its_prompt() {
                self.metrics.prompt_tokens.inc_by(step.tokens.len() as u64);
            }
            if step.choice.is_none() {
                read += step.tokens.len();
            }
            guesses += step.guesses;
            rows.push(job.stay);
            steps.push(step);
        }
        self.arrange();
        self.metrics.batch_rows.observe(rows.len() as f64);
        self.metrics.batch_prompt_tokens.observe(read as f64);
        let answer = self.ask(steps);
        let now = Instant::now();
        self.metrics.schedule.observe((now - self.since).as_secs_f64());
        self.since = now;
        Some(Begun { rows, since: now, work: Work::Batch { reads: read > 0, guesses, answer } })
    }

    /// Takes what was chosen for one that runs; says how its answer ended if it did.
    fn take(&mut self, index: usize, chosen: Chosen) -> Option<Result<FinishReason, String>> {
        let job = &mut self.running[index];
        let slot = job.sequence.slot();
        // What no token can be chosen after is not kept: one number that is none makes none of those before it too,
        // where they were read at once.
        if job.reads_its_prompt() && chosen.first().is_some_and(Result::is_ok) {
            self.cache.read(slot, job.sequence.prompt());
        }
        let count = job.sequence.check(&chosen);
        if chosen.len() > 1 {
            self.metrics.guessed(job.sequence.was_drafted(), chosen.len() - 1, count - 1);
        }
        if count < chosen.len() {
            self.cache.shrink(slot, job.sequence.cached());
        }
        chosen.into_iter().take(count).find_map(|token| match token {
            Ok(token) => job.take(token, &self.metrics),
            Err(error) => Some(Err(error.to_string())),
        })
    }

    /// Takes what came of a batch: of `rows`, by their stays. Who ended or left meanwhile wants no more of it. Where
    /// it was `uneven`, because prompts were read or tokens guessed, it says nothing of how long one token takes.
    fn end(&mut self, rows: Vec<u64>, uneven: bool, chosen: Vec<Chosen>) {
        let (streams, mut told, mut some_ended) = (self.running.len() as u32, 0, false);
        for (stay, chosen) in rows.into_iter().zip(chosen) {
            let Some(index) = self.running.iter().position(|job| job.stay == stay) else { continue };
            if chosen.is_empty() {
                continue;
            }
            told += 1;
            let Some(end) = self.take(index, chosen) else { continue };
            some_ended = true;
            let job = self.running.remove(index);
            match end {
                Ok(reason) => {
                    self.vacate(&job);
                    self.pool.learn(job.sequence.usage().completion_tokens);
                    job.finish(reason, &self.metrics);
                }
                // Numbers that are none are nothing to keep.
                Err(message) => {
                    self.discard(&job);
                    job.caller.fail(Failure { kind: FailureKind::Internal, message });
                }
            }
        }
        self.arrange();
        let running: Vec<Tenant> = self.running.iter().map(Job::tenant).collect();
        self.metrics.kv_usage.set(self.pool.usage(&running));
        if uneven || some_ended {
            self.lap = None;
            return;
        }
        // Every stream got its token, in one batch or in those of all stages.
        let now = Instant::now();
        let cached = running.iter().map(|one| one.held).sum();
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
        let choices = batch.iter().map(|step| step.choices().count()).collect();
        self.metrics.steps.inc_by(batch.len() as u64);
        self.followers.run(&batch);
        Asked { choices, answer: self.compute.run(batch) }
    }

    /// Ends everything with the reason this rank failed.
    fn fail(mut self, reason: &str) {
        self.jobs.close();
        self.receive();
        for job in self.waiting.take_where(|_| true) {
            job.caller.fail(unavailable(reason.to_owned()));
        }
        for job in self.running.drain(..) {
            self.metrics.running.dec();
            job.caller.fail(unavailable(reason.to_owned()));
        }
    }
}

#[cfg(test)]
mod tests;
