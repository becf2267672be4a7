//! The search for an engine: tries those that may answer until one gives text, and holds the request while there
//! is none. For an answer that was begun it is the same search among those that can go on with it.

use std::collections::HashMap;
use std::sync::Arc;

use russet_rpc::engine::GenerateRequest;
use russet_wire::event::Event;
use russet_wire::request::GenerationRequest;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::choose::{Begun, Choice, choose, go_on};
use super::line::{Line, Setback, bound, changed, closing, setback, silent};
use super::setbacks::{Setbacks, cut_short, differs, overloaded};
use super::{Core, Deadline, Piece};
use crate::bodies::Held;
use crate::demand::Waiting;
use crate::keys::Caller;
use crate::metrics::Tracker;
use crate::refusal::{Kind, Refusal};
use crate::routes::{Deployment, Endpoint, Table};

/// What came and from whom, and what was told of its answer.
pub(super) struct Asked {
    model: String,
    request: GenerationRequest,
    deadline: Option<Deadline>,
    caller: Caller,
    /// Since when it waits for an engine.
    since: Instant,
    setbacks: Setbacks,
    begun: Option<Begun>,
    /// Who was lost last, which rests before it is tried again.
    left: Option<Endpoint>,
    held: Held,
}

impl Asked {
    /// A request of which nobody has heard yet.
    pub(super) fn new(
        model: &str,
        request: GenerationRequest,
        deadline: Option<Deadline>,
        held: Held,
        caller: &Caller,
        since: Instant,
    ) -> Self {
        Self {
            model: model.to_owned(),
            request,
            deadline,
            caller: caller.clone(),
            since,
            setbacks: Setbacks::default(),
            begun: None,
            left: None,
            held,
        }
    }
}

impl Core {
    /// Has another engine go on with an answer, some text of which was told when its engine was lost.
    pub(super) async fn go_on(
        &self,
        asked: &mut Asked,
        line: Line,
        message: String,
        tracker: &mut Tracker,
    ) -> Result<(Piece, Line), Refusal> {
        let Line { endpoint, told, .. } = line;
        asked.request.emitted.extend(told);
        let told = asked.request.emitted.len();
        tracing::warn!(
            model = asked.model,
            node = endpoint.node,
            epoch = endpoint.epoch,
            told,
            "an answer broke off: {message}"
        );
        asked.since = Instant::now();
        asked.left = Some(endpoint);
        let found = match asked.setbacks.lost(true, message.clone(), self.limits.losses) {
            Ok(()) => self.search(asked, tracker).await,
            Err(refusal) => Err(refusal),
        };
        tracker.continued(found.is_ok());
        found.map_err(|refusal| cut_short(&message, refusal))
    }

    /// Tries endpoints until one gives text; while there is none, the request is held.
    pub(super) async fn search(
        &self,
        asked: &mut Asked,
        tracker: &mut Tracker,
    ) -> Result<(Piece, Line), Refusal> {
        let Asked { model, request, deadline, caller, since, setbacks, begun, left, held: body } = asked;
        let scope = caller.scope();
        let mut changes = self.table.clone();
        let mut resting: HashMap<Endpoint, Instant> = HashMap::new();
        resting.extend(left.take().map(|left| (left, Instant::now() + self.limits.rest)));
        let mut place: Option<Waiting> = None;
        let mut held = false;
        let mut state = format!("no engine of model `{model}` began to answer");
        loop {
            if let Some(deadline) = deadline {
                // Every engine is given what is left by then.
                let left = deadline.left().ok_or_else(|| deadline.missed(&state))?;
                request.deadline_milliseconds = Some(u64::try_from(left.as_millis()).unwrap_or(u64::MAX));
            }
            let table = changes.borrow_and_update().clone();
            self.backends.prune(&table);
            let now = Instant::now();
            resting.retain(|_, until| *until > now);
            let pick = |endpoints: Vec<_>| {
                let rested = endpoints.into_iter().filter(|endpoint| !resting.contains_key(*endpoint));
                self.backends.least_busy(rested)
            };
            let choice = match begun {
                None => choose(&table, model, scope, pick),
                Some(begun) => go_on(&table, begun, pick),
            };
            let (deployment, waiting_for) = match choice {
                Choice::Refuse(refusal) => return Err(refusal),
                Choice::Try(deployment, endpoint) => {
                    place = None;
                    match self.try_endpoint(deployment, endpoint, request, *deadline, begun, tracker).await {
                        Ok(opened) => return Ok(opened),
                        Err(Setback::Refused(refusal)) => return Err(refusal),
                        Err(Setback::Busy(message)) => setbacks.busy = Some(message),
                        Err(Setback::Lost { accepted, message }) => {
                            tracing::warn!(model, node = endpoint.node, epoch = endpoint.epoch, "{message}");
                            setbacks.lost(accepted, message, self.limits.losses)?;
                        }
                    }
                    resting.insert(endpoint.clone(), Instant::now() + self.limits.rest);
                    tracker.retried();
                    continue;
                }
                Choice::Wait(deployment, message) => (deployment, message),
            };
            // Those that were held when a replica woke are more than it takes at once, and stay held.
            if let (Some(message), None, false) = (&setbacks.busy, &setbacks.lost, held) {
                return Err(overloaded(message.clone()));
            }
            let hold = match table.route(model, scope) {
                Some(name) => name.hold.unwrap_or_default(),
                None => self.limits.hold,
            };
            let held_until = *since + hold;
            if now >= held_until {
                return Err(setbacks.too_late(model, hold, &waiting_for));
            }
            let until = deadline.map_or(held_until, |deadline| deadline.until.min(held_until));
            if place.as_ref().is_none_or(|place| !place.is_for(deployment)) {
                drop(place.take());
                place = Some(self.demand.wait(deployment, body.bytes())?);
                held = true;
            }
            state = format!("model `{model}`: {waiting_for}");
            let wake = resting.values().min().copied().unwrap_or(until).min(until);
            tokio::select! {
                () = changed(&mut changes) => {}
                () = sleep_until(wake) => {}
                () = self.closing.cancelled() => return Err(closing()),
            }
        }
    }

    async fn try_endpoint(
        &self,
        deployment: &Deployment,
        endpoint: &Endpoint,
        request: &GenerationRequest,
        deadline: Option<Deadline>,
        begun: &mut Option<Begun>,
        tracker: &mut Tracker,
    ) -> Result<(Piece, Line), Setback> {
        let silence = self.limits.silence;
        let (mut client, lease) = self.backends.lease(endpoint).map_err(|error| {
            tracing::error!("{}", crate::causes(&error));
            Setback::Refused(Refusal::new(
                Kind::Internal,
                "the gateway cannot use its certificate; its log says why",
            ))
        })?;
        let active = self.demand.begin(deployment);
        let mut table = self.table.clone();
        let bound = bound(Instant::now(), silence, deadline);
        let opened = tokio::select! {
            opened = timeout_at(bound, client.generate(GenerateRequest::from(request.clone()))) => opened,
            // A machine that froze takes connections and says nothing; its group may answer elsewhere by now.
            () = left(&mut table, endpoint) => {
                let Endpoint { address, node, .. } = endpoint;
                let message = format!("the engine on node {node} at {address} does not answer and is being replaced");
                return Err(Setback::Lost { accepted: false, message });
            }
            () = self.closing.cancelled() => return Err(Setback::Refused(closing())),
        };
        let events = match opened {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(status)) => return Err(setback(endpoint, &status, false)),
            Err(_) => return Err(Setback::Refused(silent(endpoint, silence, deadline))),
        };
        let mut line = Line::new(self, endpoint, events, deadline, active, lease);
        let mut prompt = 0;
        loop {
            let event = line.event().await?;
            if line.accepted {
                tracker.dispatched();
            }
            if let Event::Started { prompt_tokens, emitted_tokens } = event {
                prompt = prompt_tokens;
                let here = (prompt_tokens, emitted_tokens as usize);
                if let Some(begun) = begun.as_ref()
                    && here != (begun.prompt_tokens, request.emitted.len())
                {
                    return Err(Setback::Refused(differs(endpoint, here, begun, request.emitted.len())));
                }
            }
            if let Some(piece) = line.judge(event) {
                let first = piece?;
                tracker.token();
                begun.get_or_insert_with(|| Begun {
                    deployment: deployment.full_name(),
                    model: endpoint.model.clone(),
                    prompt_tokens: prompt,
                });
                return Ok((first, line));
            }
        }
    }
}

/// Until nobody is told to ask this endpoint any more.
async fn left(table: &mut watch::Receiver<Arc<Table>>, endpoint: &Endpoint) {
    let known = |table: &Arc<Table>| table.deployments.iter().any(|one| one.endpoints.contains(endpoint));
    if table.wait_for(|table| !known(table)).await.is_err() {
        std::future::pending().await
    }
}
