//! What the request log gets of a choice: the engine and the candidates beside it. Not here: the choice, see
//! `route_decision`.

use super::{AttemptLoop, ScoredReplica};
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
        let Self { request, backoffs, unsupported, scores, .. } = self;
        let score_of = |group: &str| scores.iter().find(|scored| *scored.group == *group);
        let others = deployment.endpoints_with(adapter).filter(|other| *other != endpoint);
        let candidates = std::iter::once(endpoint).chain(others).map(|candidate| {
            let scored = score_of(&candidate.group);
            EndpointScore {
                node: candidate.node.clone(),
                group: candidate.group.clone(),
                chosen: candidate == endpoint,
                backed_off: backoffs.contains_key(candidate) || unsupported.contains_key(candidate),
                cached_tokens: scored.map(|scored| scored.cached_tokens),
                score: scored.map(|scored| logged(&scored.score)),
            }
        });
        // Where the fastest target is picked, those of the others were compared as well.
        let is_elsewhere =
            |scored: &&ScoredReplica| deployment.endpoints.iter().all(|own| own.group != scored.group);
        let elsewhere = scores.iter().filter(is_elsewhere).map(|scored| EndpointScore {
            node: scored.node.clone(),
            group: scored.group.clone(),
            cached_tokens: Some(scored.cached_tokens),
            score: Some(logged(&scored.score)),
            ..EndpointScore::default()
        });
        // The log keeps them: a list that grows by itself would have room for more.
        let mut all = Vec::with_capacity(deployment.endpoints.len() + elsewhere.clone().count());
        all.extend(candidates.chain(elsewhere));
        let resumed_after_tokens = request.request.emitted.len();
        let new = NewAttempt { deployment, endpoint, adapter, resumed_after_tokens };
        request.recorder.attempt(new, all.into_iter());
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
