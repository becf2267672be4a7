//! Speculation in the scheduler: proposals before the next batch, and their cost.

use tokio::time::Instant;

use super::Scheduler;
use super::in_flight::{InFlight, WorkKind};
use super::request::ScheduledRequest;
use crate::executor::DraftRequest;
use crate::speculative::AcceptanceThreshold;

impl Scheduler {
    /// Acceptance threshold at the current number of decoding sequences.
    pub(super) fn acceptance_threshold(&self) -> AcceptanceThreshold {
        let answers = self.running.iter().filter(|job| !job.is_prefilling()).count();
        let least = self.cost_model.acceptance_threshold(answers as u32);
        if self.draft_failed { AcceptanceThreshold { draft_model: f64::INFINITY, ..least } } else { least }
    }

    /// Runs prompt lookup for all sequences; returns whether any has draft tokens, or may have once its
    /// pending token is known. If so, all sequences of a single stage go into the same batch: a separate
    /// batch for the others would read the weights once more and delay the draft tokens.
    pub(super) fn propose(&mut self, least: AcceptanceThreshold) -> bool {
        let mut proposed = false;
        for job in &mut self.running {
            proposed |= job.sequence.propose(least);
        }
        proposed
    }

    /// Asks the draft model about sequences for which prompt lookup found nothing, where that pays.
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

    /// Takes the draft model's reply. If it failed, decoding continues without it.
    pub(super) fn receive_drafts(
        &mut self,
        rows: Vec<u64>,
        since: Instant,
        drafts: Result<Vec<Vec<u32>>, String>,
    ) {
        let took = since.elapsed();
        let drafts = drafts.unwrap_or_else(|error| {
            tracing::error!(error, "the draft model is of no use any more; answers go on without it");
            self.draft_failed = true;
            Vec::new()
        });
        let count: usize = drafts.iter().map(Vec::len).sum();
        self.cost_model.record_draft(count as u32, took);
        let mut drafts = drafts.into_iter();
        for stay in rows {
            let drafts = drafts.next().unwrap_or_default();
            let job: Option<&mut ScheduledRequest> =
                self.running.iter_mut().find(|job| job.admission_id == stay);
            if let Some(job) = job {
                job.sequence.receive_draft(drafts);
            }
        }
    }
}
