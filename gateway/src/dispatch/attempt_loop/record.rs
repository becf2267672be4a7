//! What the request log gets of a choice: the engine and the candidates beside it. Not here: the choice, see
//! `route_decision`.

use super::AttemptLoop;
use crate::backends::ReplicaScore;
use crate::request_log::{EndpointScore, NewAttempt, Score, ScorePart};
use crate::routes::{Deployment, Endpoint, RoutingTable};

impl AttemptLoop<'_> {
    /// Records that the request is sent to this endpoint, and among which it was chosen.
    pub(super) fn record_attempt(
        &mut self,
        table: &RoutingTable,
        deployment: &Deployment,
        endpoint: &Endpoint,
        adapter: &str,
    ) {
        self.record_route(table);
        let Self { request, backoffs, scores, .. } = self;
        // Where the fastest target is picked, those of the others were compared as well.
        let was_compared = |other: &&Endpoint| scores.iter().any(|(group, ..)| *group == other.group);
        let elsewhere = table.deployments.iter().filter(|other| !std::ptr::eq(*other, deployment));
        let elsewhere = elsewhere.flat_map(|other| &other.endpoints).filter(was_compared);
        let others = deployment.endpoints_with(adapter).filter(|other| *other != endpoint);
        let candidates: Vec<&Endpoint> = std::iter::once(endpoint).chain(others).chain(elsewhere).collect();
        let candidates = candidates.into_iter().map(|candidate| {
            let scored = scores.iter().find(|(group, ..)| *group == candidate.group);
            let (cached_tokens, score) = scored.map(|(_, cached, score)| (*cached, logged(score))).unzip();
            EndpointScore {
                node: candidate.node.clone(),
                group: candidate.group.clone(),
                chosen: candidate == endpoint,
                backed_off: backoffs.contains_key(candidate),
                cached_tokens,
                score,
            }
        });
        let resumed_after_tokens = request.request.emitted.len();
        let new = NewAttempt { deployment, endpoint, adapter, resumed_after_tokens };
        request.recorder.attempt(new, candidates);
    }

    /// Records the ModelRoute that has the model's name, if one has.
    pub(super) fn record_route(&self, table: &RoutingTable) {
        if !table.aliases.is_empty()
            && let Some(alias) = table.matching_alias(&self.request.model, self.request.scope())
        {
            self.request.recorder.route(alias, self.request.facts());
        }
    }
}

/// A score as the log has it.
fn logged(score: &ReplicaScore) -> Score {
    let ReplicaScore { queue, prompt, answer, load } = *score;
    let parts = [("queue", queue), ("prompt", prompt), ("answer", answer), ("load", load)];
    let part = |(name, value): (&'static str, f64)| ScorePart { name: name.into(), value };
    Score { unit: "ms".into(), total: score.total(), parts: parts.into_iter().map(part).collect() }
}
