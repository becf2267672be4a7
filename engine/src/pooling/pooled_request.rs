//! One request for vectors or scores, counted while it is there: among those that wait until its first batch begins, then
//! among those that run.

use std::time::{Duration, Instant};

use russet_wire::event::{FinishReason, GenerationFailure, Usage};

use super::{MAX_REQUESTS, PooledTexts, PoolingIntake};
use crate::scheduler::{kind_label, overloaded};

/// A request that waits or runs.
pub(super) struct PooledRequest {
    intake: PoolingIntake,
    arrived: Instant,
    is_running: bool,
    /// When the batch began that is computed now.
    batch_began: Option<Instant>,
    /// Microseconds of its batches so far, in which there is no other request.
    engine_microseconds: u64,
    /// Whether its client is told of them, with its vectors.
    is_charged: bool,
    has_ended: bool,
}

impl PooledRequest {
    /// Counts a request; an error where there are too many.
    pub(super) fn begin(intake: PoolingIntake) -> Result<Self, GenerationFailure> {
        let begun = intake.0.active.send_if_modified(|active| {
            let has_room = *active < MAX_REQUESTS;
            *active += usize::from(has_room);
            has_room
        });
        if !begun {
            let failure =
                overloaded(format!("{MAX_REQUESTS} requests wait already, the limit; try again later"));
            intake.0.metrics.record_failure(kind_label(failure.kind));
            return Err(failure);
        }
        intake.0.metrics.waiting.inc();
        Ok(Self {
            intake,
            arrived: Instant::now(),
            is_running: false,
            batch_began: None,
            engine_microseconds: 0,
            is_charged: false,
            has_ended: false,
        })
    }

    /// One of its batches begins.
    pub(super) fn run(&mut self) {
        self.batch_began = Some(Instant::now());
        if self.is_running {
            return;
        }
        self.is_running = true;
        let metrics = &self.intake.0.metrics;
        metrics.waiting.dec();
        metrics.running.inc();
        metrics.queue.observe(self.arrived.elapsed().as_secs_f64());
    }

    /// The batch is over, however it went; returns how long it took.
    pub(super) fn end_batch(&mut self) -> Duration {
        let elapsed = self.batch_began.take().map(|began| began.elapsed()).unwrap_or_default();
        let microseconds = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        self.engine_microseconds = self.engine_microseconds.saturating_add(microseconds);
        elapsed
    }

    /// Microseconds of its batches.
    pub(super) fn engine_microseconds(&self) -> u64 {
        self.engine_microseconds
    }

    /// A batch of so many of its texts, of so many tokens, was computed.
    pub(super) fn count(&self, texts: usize, tokens: usize, elapsed: Duration) {
        let metrics = &self.intake.0.metrics;
        metrics.batch.observe(elapsed.as_secs_f64());
        metrics.batch_rows.observe(texts as f64);
        metrics.batch_prompt_tokens.observe(tokens as f64);
        metrics.prompt_tokens.inc_by(tokens as u64);
    }

    /// It is over.
    pub(super) fn end(mut self, result: &Result<PooledTexts, GenerationFailure>) {
        self.has_ended = true;
        self.is_charged = result.is_ok();
        let metrics = &self.intake.0.metrics;
        match result {
            Ok(pooled) => {
                let prompt_tokens =
                    pooled.tokens.iter().fold(0, |sum: u32, tokens| sum.saturating_add(*tokens));
                let usage = Usage { prompt_tokens, ..Usage::default() };
                metrics.record_finished(FinishReason::Stop, usage, self.arrived.elapsed());
            }
            Err(failure) => metrics.record_failure(kind_label(failure.kind)),
        }
    }
}

impl Drop for PooledRequest {
    /// Records what was computed for it. A batch that is still computed when the request is dropped counts until now: the
    /// next one, of another request, has the rest.
    fn drop(&mut self) {
        self.end_batch();
        let metrics = &self.intake.0.metrics;
        metrics.record_engine_time(self.engine_microseconds, self.is_charged);
        if self.is_running {
            metrics.running.dec()
        } else {
            metrics.waiting.dec()
        }
        if !self.has_ended {
            metrics.record_finished(FinishReason::Cancelled, Usage::default(), self.arrived.elapsed());
        }
        self.intake.0.active.send_modify(|active| *active -= 1);
    }
}
