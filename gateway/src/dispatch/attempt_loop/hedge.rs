//! Hedging, as gRPC has it: where the ModelRoute of a request says so, a second replica of the same deployment gets it too when
//! the first has no first token in time. Only what no client has seen a part of is hedged, and no request that may have ended an
//! engine.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::first_text::{EngineProgress, FirstText, HedgeFailure, HedgeOutcome, hedged};
use super::{AttemptLoop, RequestKind};
use crate::dispatch::engine_meter::EngineMeter;
use crate::dispatch::engine_stream::AttemptError;
use crate::request_log::{EndpointScore, NewAttempt, Recorder};
use crate::routes::{Deployment, Endpoint, RoutingTable};

/// The second replica.
pub(super) struct Hedge {
    /// When it gets the request, from when the first has it.
    after: Duration,
    endpoint: Endpoint,
    /// Tokens of the prompt that it has not cached.
    unread_tokens: u64,
}

impl AttemptLoop<'_> {
    /// The replica that gets the request too, beside the chosen one: the best of the others.
    pub(super) fn hedge(
        &self,
        table: &RoutingTable,
        deployment: &Deployment,
        endpoint: &Endpoint,
        adapter: &str,
    ) -> Option<Hedge> {
        let after = self.terms(table)?.hedge_after?;
        let request = &*self.request;
        let is_new = request.resume_point.is_none() && !request.attempts.is_suspect();
        let others = self.scores.iter().filter(|_| is_new && matches!(request.kind, RequestKind::Text));
        let mut others = others.filter(|scored| scored.group != endpoint.group);
        others.find_map(|scored| {
            let mut own = deployment.endpoints_with(adapter);
            let endpoint = own.find(|other| other.group == scored.group)?.clone();
            Some(Hedge { after, endpoint, unread_tokens: scored.unread_tokens })
        })
    }

    /// The first text of the chosen engine, or of the second one.
    pub(super) async fn open_hedged(
        &mut self,
        deployment: &Deployment,
        (endpoint, adapter): (&Endpoint, &str),
        meter: EngineMeter,
        hedge: Hedge,
    ) -> Result<FirstText, AttemptError> {
        let Hedge { after, endpoint: other, unread_tokens } = hedge;
        let other_meter = self.meter(&other);
        let (attempt, mut notes) = self.split(deployment);
        let (recorder, unread_here) = (notes.recorder, notes.unread_tokens);
        let mut second_recorder = None;
        let (mut not_isolated, mut nor_the_other) = (None, None);
        let first =
            attempt.first_text((endpoint, unread_here), meter, &mut not_isolated, |at| notes.note(at));
        let second = async {
            let new = NewAttempt { deployment, endpoint: &other, adapter, resumed_after_tokens: 0 };
            let candidate = EndpointScore {
                node: other.node.clone(),
                group: other.group.clone(),
                chosen: true,
                ..EndpointScore::default()
            };
            let recorder: &Recorder = second_recorder.insert(recorder.hedge(new, std::iter::once(candidate)));
            let note = |at| match at {
                EngineProgress::Prepared => recorder.prepared(),
                EngineProgress::Started(prompt_tokens) => recorder.started(prompt_tokens),
                EngineProgress::Preparing | EngineProgress::PreparingEnded | EngineProgress::Accepted => {}
            };
            attempt.first_text((&other, unread_tokens), other_meter, &mut nor_the_other, note).await
        };
        let ended = hedged(first, sleep(after), second).await;
        let Some(second_recorder) = second_recorder else {
            // The first one answered, or failed, alone.
            return match ended {
                Ok((text, _)) => Ok(text),
                Err(failure) => Err(failure.first),
            };
        };
        let backoff_end = Instant::now() + self.dispatcher.limits.endpoint_backoff;
        match ended {
            Ok((text, HedgeOutcome { is_second, loser })) => {
                self.tracker.hedged(if is_second { "second" } else { "first" });
                if loser.is_some() {
                    let lost = if is_second { endpoint } else { &other };
                    self.backoffs.insert(lost.clone(), backoff_end);
                }
                if is_second {
                    record_loser(&self.request.recorder, loser);
                    self.request.recorder = second_recorder;
                    // What the first one did not come to.
                    let (_, mut notes) = self.split(deployment);
                    notes.accepted_elsewhere(text.prompt_tokens);
                } else {
                    record_loser(&second_recorder, loser);
                }
                Ok(text)
            }
            Err(HedgeFailure { first, second }) => {
                self.tracker.hedged("none");
                self.backoffs.insert(other, backoff_end);
                if let Some(AttemptError::Lost { work, message }) = &second {
                    // It counts against the request like any engine that was lost with it.
                    let counted = self.record_lost(*work, false, message.clone());
                    counted.map_err(AttemptError::Rejected)?;
                }
                record_loser(&second_recorder, second);
                Err(first)
            }
        }
    }
}

/// Records what came of the attempt that did not answer.
fn record_loser(recorder: &Recorder, error: Option<AttemptError>) {
    match error {
        None => recorder.overtaken(),
        Some(AttemptError::Busy(message)) => recorder.busy(&message),
        Some(AttemptError::Lost { message, .. }) => recorder.lost(&message),
        Some(AttemptError::Rejected(error)) => recorder.rejected(&error),
    }
}
