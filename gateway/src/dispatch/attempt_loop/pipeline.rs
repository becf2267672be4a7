//! A request that is answered by a run of a Pipeline.

use std::cell::Cell;

use russet_wire::event::{Delta, FinishReason, GenerationEvent};
use russet_wire::request::GenerationRequest;

use super::{AnswerStream, AttemptLoop, Opened, RequestKind};
use crate::dispatch::deadline::Deadline;
use crate::dispatch::engine_stream::shutdown_error;
use crate::dispatch::route_decision::PipelineRoute;
use crate::error::{ErrorKind, GatewayError};
use crate::pipelines::{RunAnswer, unfit_text};
use crate::providers::Closed;
use crate::routes::PipelineTarget;

impl AttemptLoop<'_> {
    /// Why this Pipeline is not run with the request, if so. `early` gets why that is not known yet, where the request may have a
    /// run of before a crash: another target would answer, and the run would have gone on for nothing.
    pub(super) fn not_run(
        &self,
        target: PipelineTarget<'_>,
        early: &Cell<Option<&'static str>>,
    ) -> Option<Closed> {
        let invalid = |why: String| Some(Closed::of(why, ErrorKind::InvalidRequest));
        if !matches!(self.request.kind, RequestKind::Text) {
            return invalid("it is asked for text alone".to_owned());
        }
        if self.request.recorder.is_of_step() {
            let why = "a step of a Pipeline starts no run of another one";
            return Some(Closed::of(why, ErrorKind::ModelForbidden));
        }
        if self.request.recorder.is_one_of_several() {
            return invalid("a run makes one answer, and the request asks for several".to_owned());
        }
        if let Some(requirement) = requirement(&self.request.request) {
            return invalid(format!("a run has no place for what the request asks for: {requirement}"));
        }
        let Some(text) = last_text(&self.request.request) else {
            return invalid("the last message is no text of the user".to_owned());
        };
        if let Some(why) = unfit_text(text) {
            return invalid(why);
        }
        if let Some((namespace, name)) = self.request.caller.key_names()
            && namespace != target.namespace
        {
            let why = format!(
                "its runs ask models as the holder of a key of the namespace {}, and the key {name} is of {namespace}",
                target.namespace
            );
            return Some(Closed::of(why, ErrorKind::ModelForbidden));
        }
        let Some(runs) = &self.dispatcher.pipelines else {
            let why = "this gateway runs no Pipelines, because it has no store (--responses-store)";
            return Some(Closed::of(why, ErrorKind::ModelNotReady));
        };
        let repeat = self.request.recorder.repeat();
        if let Some(why) = runs.not_yet() {
            early.set(repeat.is_some().then_some(why));
            return Some(Closed::of(why, ErrorKind::ModelNotReady));
        }
        runs.refusal(target, repeat.as_deref())
    }

    /// Starts a run and waits for its answer. There is no other target after that: what a run did may have had effects.
    pub(super) async fn run_pipeline(mut self, route: PipelineRoute<'_>) -> Result<Opened, GatewayError> {
        let PipelineRoute { target, limit } = route;
        let (Some(runs), Some(text)) = (&self.dispatcher.pipelines, last_text(&self.request.request)) else {
            return Err(GatewayError::new(ErrorKind::Internal, "a request without text starts no run"));
        };
        // Its steps are requests of their own, whose tokens Budgets count.
        if let Some(reservation) = self.request.reservation.take() {
            reservation.settle_request();
        }
        let key = self.request.caller.key_names().map(|(_, name)| name);
        let repeat = self.request.recorder.repeat();
        let mut run = runs.start(target, text, key, limit.zone(), repeat.as_deref()).await?;
        let (namespace, name) = &run.name;
        self.request.recorder.ran(&target.subject(), &format!("{namespace}/{name}"));
        self.held = None;
        self.request.is_not_prepared();
        let waiting = format!("run {namespace}/{name} of {} is not at its end", target.subject());
        let answer = tokio::select! {
            answer = run.answer() => answer,
            error = Deadline::expired(self.request.deadline, &waiting) => return Err(self.rejected(error)),
            () = self.dispatcher.closing.cancelled() => {
                run.leave();
                return Err(self.rejected(shutdown_error()));
            }
        };
        let RunAnswer { text, usage } = answer.map_err(|why| {
            let (namespace, name) = &run.name;
            let message = format!("run {namespace}/{name} of {} failed: {why}", target.subject());
            self.rejected(GatewayError::new(ErrorKind::PipelineFailed, message))
        })?;
        self.tracker.dispatched();
        self.tracker.token();
        self.request.recorder.first_token();
        let first = GenerationEvent::Token { id: 0, delta: Delta::text(text) };
        let rest = GenerationEvent::Finished { reason: FinishReason::Stop, usage };
        Ok(Opened::Stream((first, AnswerStream::Pipeline(Box::new(rest)))))
    }

    fn rejected(&self, error: GatewayError) -> GatewayError {
        self.request.recorder.rejected(&error);
        error
    }
}

/// The text of the user that a run gets.
fn last_text(request: &GenerationRequest) -> Option<&str> {
    let last = request.messages.last().filter(|last| last.role == "user" && last.tool_calls.is_empty())?;
    (!last.content.is_empty()).then_some(last.content.as_str())
}

/// What of a request would change the answer, and a run knows nothing of. Sampling, and how long an answer may be, its steps say.
fn requirement(request: &GenerationRequest) -> Option<&'static str> {
    let requirements = [
        (request.raw_prompt.is_some(), "a prompt without messages"),
        (request.continue_final_message, "an answer that is begun"),
        (!request.tools.is_empty(), "tools"),
        (request.structured_output.is_some(), "a schema of the answer"),
        (request.logprobs.is_some(), "log-probabilities"),
        (request.tells_prompt(), "the tokens of the prompt"),
        (!request.stop.is_empty() || !request.stop_token_ids.is_empty(), "texts that end the answer"),
        (request.ignore_eos, "an answer that does not end"),
        (request.truncate_prompt_tokens.is_some(), "a prompt that is cut"),
        (request.thinking_budget.is_some(), "a budget of thinking"),
    ];
    requirements.into_iter().find(|(wanted, _)| *wanted).map(|(_, requirement)| requirement)
}

#[cfg(test)]
mod tests {
    use russet_wire::conversation::Message;

    use super::*;

    #[test]
    fn a_run_gets_the_last_message_and_no_requirement() {
        let message = |role: &str, content: &str| Message {
            role: role.to_owned(),
            content: content.to_owned(),
            ..Message::default()
        };
        let request = |messages| GenerationRequest { messages, ..GenerationRequest::default() };
        let asked = request(vec![message("system", "be brief"), message("user", "tea")]);
        assert_eq!((last_text(&asked), requirement(&asked)), (Some("tea"), None));
        for none in [
            request(Vec::new()),
            request(vec![message("user", "")]),
            request(vec![message("assistant", "tea")]),
            request(vec![message("user", "tea"), message("tool", "4")]),
        ] {
            assert_eq!(last_text(&none), None, "{none:?}");
        }
        let stops = GenerationRequest { stop: vec!["x".into()], ..asked };
        assert_eq!(requirement(&stops), Some("texts that end the answer"));
    }
}
