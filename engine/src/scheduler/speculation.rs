//! What the loop has to do with guesses of next tokens: who makes some before the next batch, and what they cost.

use tokio::time::Instant;

use super::Scheduler;
use super::in_flight::{InFlight, WorkKind};
use super::request::ScheduledRequest;
use crate::executor::DraftRequest;
use crate::speculative::AcceptanceThreshold;

impl Scheduler {
    /// How likely a guess has to be right among those that are answered just now.
    pub(super) fn acceptance_threshold(&self) -> AcceptanceThreshold {
        let answers = self.running.iter().filter(|job| !job.is_prefilling()).count();
        let least = self.cost_model.acceptance_threshold(answers as u32);
        if self.draft_failed { AcceptanceThreshold { draft_model: f64::INFINITY, ..least } } else { least }
    }

    /// Has all make their guesses; whether anybody has some, or may have once its token is known. Then all go on together
    /// in a single stage: who went ahead of those that guess would have weights read once more, and hold them up.
    pub(super) fn propose(&mut self, least: AcceptanceThreshold) -> bool {
        let mut guessing = false;
        for job in &mut self.running {
            guessing |= job.sequence.propose(least);
        }
        guessing
    }

    /// Asks the draft model about those that found nothing, if any of them are to be guessed.
    pub(super) fn request_drafts(&mut self, least: AcceptanceThreshold) -> Option<InFlight> {
        let ready = self.running.iter_mut().filter(|job| !job.fetching);
        let (rows, drafts): (Vec<u64>, Vec<DraftRequest>) =
            ready.filter_map(|job| Some((job.admission_id, job.sequence.request_draft(least)?))).unzip();
        if drafts.is_empty() {
            return None;
        }
        let answer = self.compute.draft(drafts);
        Some(InFlight { admissions: rows, started: Instant::now(), work: WorkKind::Draft { reply: answer } })
    }

    /// Takes what the draft model said. Where it failed, answers go on without it.
    pub(super) fn receive_drafts(&mut self, rows: Vec<u64>, since: Instant, guesses: Result<Vec<Vec<u32>>, String>) {
        let took = since.elapsed();
        let guesses = guesses.unwrap_or_else(|error| {
            tracing::error!(error, "the draft model is of no use any more; answers go on without it");
            self.draft_failed = true;
            Vec::new()
        });
        let count: usize = guesses.iter().map(Vec::len).sum();
        self.cost_model.record_draft(count as u32, took);
        let mut guesses = guesses.into_iter();
        for stay in rows {
            let guesses = guesses.next().unwrap_or_default();
            let job: Option<&mut ScheduledRequest> = self.running.iter_mut().find(|job| job.admission_id == stay);
            if let Some(job) = job {
                job.sequence.receive_draft(guesses);
            }
        }
    }
}
