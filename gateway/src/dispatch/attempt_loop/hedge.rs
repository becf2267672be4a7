//! Hedging, as gRPC has it: where the ModelRoute of a request says so, a second replica of the same deployment gets it too when
//! the first has no first token in time. Only what no client has seen a part of is hedged, and no request that may have ended an
//! engine.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

use super::first_text::{EngineProgress, FirstText, HedgeFailure, HedgeOutcome, StreamAttempt, hedged};
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
        let slow = &self.dispatcher.overtaken;
        others.find_map(|scored| {
            // Where it would not be quicker, it is not asked: hedges fill no queue.
            let is_quick = scored.score.first_token() <= after;
            let mut own = deployment.endpoints_with(adapter);
            let endpoint =
                own.find(|other| other.group == scored.group && is_quick && !slow.has(other))?.clone();
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
        // Sent to two, it is one request of the deployment.
        let active = self.dispatcher.demand.start(deployment);
        let (attempt, mut notes) = self.split();
        let (recorder, unread_here) = (notes.recorder, notes.unread_tokens);
        let mut second_recorder = None;
        let (mut not_isolated, mut nor_the_other) = (None, None);
        let here = (endpoint, unread_here);
        let first = attempt.first_text(here, meter, None, &mut not_isolated, |at| notes.note(at));
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
            // It has less time than the first one had.
            let mut request = attempt.request.clone();
            if let Some(left) = attempt.deadline.and_then(|deadline| deadline.remaining_milliseconds()) {
                request.deadline_milliseconds = Some(left);
            }
            let attempt = StreamAttempt { request: &request, ..attempt };
            attempt.first_text((&other, unread_tokens), other_meter, None, &mut nor_the_other, note).await
        };
        let ended = hedged(first, sleep(after), second).await;
        let answering = |text: FirstText| FirstText { stream: text.stream.answering(active), ..text };
        match (ended, second_recorder) {
            // The first one answered, or failed, alone.
            (Ok((text, _)), None) => Ok(answering(text)),
            (Ok((text, HedgeOutcome { is_second: true, loser })), Some(second_recorder)) => {
                self.tracker.hedged("second");
                self.dispatcher.overtaken.add(endpoint.clone());
                record_loser(&self.request.recorder, loser);
                self.request.recorder = second_recorder;
                // What the first one did not come to.
                self.split().1.accepted_elsewhere(text.prompt_tokens);
                Ok(answering(text))
            }
            (Ok((text, HedgeOutcome { loser, .. })), Some(second_recorder)) => {
                self.tracker.hedged("first");
                record_loser(&second_recorder, loser);
                Ok(answering(text))
            }
            (Err(HedgeFailure { first: Some(first), second }), second_recorder) => {
                if let Some(second_recorder) = second_recorder {
                    self.tracker.hedged("none");
                    match second {
                        None => second_recorder.taken_back(),
                        Some(error) => {
                            if let AttemptError::Unsupported(message) = &error {
                                self.unsupported.insert(other.clone(), message.clone());
                            } else {
                                self.back_off(other);
                            }
                            record_loser(&second_recorder, Some(error));
                        }
                    }
                }
                Err(first)
            }
            // What the second one failed with, the loop takes for what the attempt has come to.
            (Err(HedgeFailure { first: None, second }), second_recorder) => {
                self.tracker.hedged("none");
                if let Some(second_recorder) = second_recorder {
                    self.request.recorder.taken_back();
                    self.request.recorder = second_recorder;
                }
                self.back_off(other);
                Err(second.unwrap_or_else(|| AttemptError::Busy("no engine has said anything".to_owned())))
            }
        }
    }
}

/// Endpoints that were overtaken by a second one lately: others are asked first, so that one that stands still, whose requests
/// are all taken back, does not look idle.
#[derive(Debug, Default)]
pub(crate) struct Overtaken(Mutex<HashMap<Endpoint, Instant>>);

/// How long.
const OVERTAKEN_FOR: Duration = Duration::from_secs(10);

impl Overtaken {
    /// It was, now.
    fn add(&self, endpoint: Endpoint) {
        let now = Instant::now();
        let mut overtaken = self.0.lock();
        overtaken.retain(|_, until| *until > now);
        overtaken.insert(endpoint, now + OVERTAKEN_FOR);
    }

    /// Whether it was, lately.
    pub(super) fn has(&self, endpoint: &Endpoint) -> bool {
        self.0.lock().get(endpoint).is_some_and(|until| *until > Instant::now())
    }
}

/// Records what came of the attempt that did not answer.
fn record_loser(recorder: &Recorder, error: Option<AttemptError>) {
    match error {
        None => recorder.overtaken(),
        Some(AttemptError::Busy(message)) => recorder.busy(&message),
        Some(AttemptError::Lost { message, .. } | AttemptError::Unsupported(message)) => {
            recorder.lost(&message)
        }
        Some(AttemptError::Rejected(error)) => recorder.rejected(&error),
    }
}
