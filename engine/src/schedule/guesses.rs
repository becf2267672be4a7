//! What the loop has to do with guesses of next tokens: who makes some before the next batch, and what they cost.

use tokio::time::Instant;

use super::Schedule;
use super::batch::{Begun, Work};
use super::job::Job;
use crate::compute::Draft;
use crate::guess::Least;

impl Schedule {
    /// How likely a guess has to be right among those that are answered just now.
    pub(super) fn least(&self) -> Least {
        let answers = self.running.iter().filter(|job| !job.reads_its_prompt()).count();
        let least = self.costs.least(answers as u32);
        if self.draft_failed { Least { draft: f64::INFINITY, ..least } } else { least }
    }

    /// Has all make their guesses; whether anybody has some, or may have once its token is known. Then all go on together
    /// in a single stage: who went ahead of those that guess would have weights read once more, and hold them up.
    pub(super) fn guess(&mut self, least: Least) -> bool {
        let mut guessing = false;
        for job in &mut self.running {
            guessing |= job.sequence.guess(least);
        }
        guessing
    }

    /// Asks the draft model about those that found nothing, if any of them are to be guessed.
    pub(super) fn draft(&mut self, least: Least) -> Option<Begun> {
        let ready = self.running.iter_mut().filter(|job| !job.fetching);
        let (rows, drafts): (Vec<u64>, Vec<Draft>) =
            ready.filter_map(|job| Some((job.stay, job.sequence.draft(least)?))).unzip();
        if drafts.is_empty() {
            return None;
        }
        let answer = self.compute.draft(drafts);
        Some(Begun { rows, since: Instant::now(), work: Work::Draft { answer } })
    }

    /// Takes what the draft model said. Where it failed, answers go on without it.
    pub(super) fn drafted(&mut self, rows: Vec<u64>, since: Instant, guesses: Result<Vec<Vec<u32>>, String>) {
        let took = since.elapsed();
        let guesses = guesses.unwrap_or_else(|error| {
            tracing::error!(error, "the draft model is of no use any more; answers go on without it");
            self.draft_failed = true;
            Vec::new()
        });
        let count: usize = guesses.iter().map(Vec::len).sum();
        self.costs.learn_draft(count as u32, took);
        let mut guesses = guesses.into_iter();
        for stay in rows {
            let guesses = guesses.next().unwrap_or_default();
            let job: Option<&mut Job> = self.running.iter_mut().find(|job| job.stay == stay);
            if let Some(job) = job {
                job.sequence.drafted(guesses);
            }
        }
    }
}
