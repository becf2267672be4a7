//! Speculation in the scheduler: draft tokens before the next batch, and their cost.

use tokio::time::Instant;

use super::engine_time::BatchPart;
use super::in_flight::{InFlight, WorkKind};
use super::request::ScheduledRequest;
use crate::executor::{DraftRequest, Executor};
use crate::speculative::{AcceptanceThreshold, CostModel};

/// What drafts cost, and whether the draft model still works.
#[derive(Default)]
pub(super) struct SpeculationState {
    pub(super) cost_model: CostModel,
    draft_failed: bool,
}

impl SpeculationState {
    /// Acceptance threshold at the current number of decoding sequences.
    pub(super) fn acceptance_threshold(&self, running: &[ScheduledRequest]) -> AcceptanceThreshold {
        let decoding = running.iter().filter(|request| !request.is_prefilling()).count();
        let threshold = self.cost_model.acceptance_threshold(decoding as u32);
        if self.draft_failed {
            AcceptanceThreshold { draft_model: f64::INFINITY, ..threshold }
        } else {
            threshold
        }
    }

    /// Takes the draft model's reply. If it failed, decoding continues without it.
    pub(super) fn receive_drafts(
        &mut self,
        running: &mut [ScheduledRequest],
        admissions: Vec<u64>,
        started: Instant,
        drafts: Result<Vec<Vec<u32>>, String>,
    ) {
        let elapsed = started.elapsed();
        let drafts = drafts.unwrap_or_else(|error| {
            tracing::error!(
                error,
                "the draft model failed and is not used any more; answers go on without it"
            );
            self.draft_failed = true;
            Vec::new()
        });
        let count: usize = drafts.iter().map(Vec::len).sum();
        self.cost_model.record_draft(count as u32, elapsed);
        let mut drafts = drafts.into_iter();
        for admission_id in admissions {
            let drafts = drafts.next().unwrap_or_default();
            let request = running.iter_mut().find(|request| request.admission_id == admission_id);
            if let Some(request) = request {
                request.sequence.receive_draft(drafts);
            }
        }
    }
}

/// Runs prompt lookup for all sequences; returns whether any has draft tokens, or may have once its pending token is
/// known. If so, all sequences of a single stage go into the same batch: a separate batch for the others would read the
/// weights once more and delay the draft tokens.
pub(super) fn propose(running: &mut [ScheduledRequest], threshold: AcceptanceThreshold) -> bool {
    let mut proposed = false;
    for request in running {
        proposed |= request.sequence.propose(threshold);
    }
    proposed
}

/// Asks the draft model about sequences for which prompt lookup found nothing, where that pays.
pub(super) fn request_drafts(
    running: &mut [ScheduledRequest],
    threshold: AcceptanceThreshold,
    compute: &dyn Executor,
) -> Option<InFlight> {
    let ready = running.iter_mut().filter(|request| !request.fetching);
    let (admissions, drafts): (Vec<u64>, Vec<DraftRequest>) = ready
        .filter_map(|request| Some((request.admission_id, request.sequence.request_draft(threshold)?)))
        .unzip();
    if drafts.is_empty() {
        return None;
    }
    let tokens = |draft: &DraftRequest| draft.draft_tokens.saturating_add(draft.tokens.len() as u32);
    let parts = drafts.iter().map(|draft| BatchPart::Tokens(tokens(draft))).collect();
    let reply = compute.draft(drafts);
    Some(InFlight { admissions, parts, started: Instant::now(), work: WorkKind::Draft { reply } })
}
