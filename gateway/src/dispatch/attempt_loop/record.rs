//! What the request log gets of a choice: the engine and the candidates beside it. Not here: the choice, see
//! `route_decision`.

use super::AttemptLoop;
use crate::request_log::{EndpointScore, NewAttempt};
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
        let Self { request, backoffs, .. } = self;
        let others = deployment.endpoints_with(adapter).filter(|other| *other != endpoint);
        let candidates: Vec<&Endpoint> = std::iter::once(endpoint).chain(others).collect();
        let candidates = candidates.into_iter().map(|candidate| EndpointScore {
            node: candidate.node.clone(),
            group: candidate.group.clone(),
            chosen: candidate == endpoint,
            backed_off: backoffs.contains_key(candidate),
            score: None,
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
            self.request.recorder.route(alias);
        }
    }
}
