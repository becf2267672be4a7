//! A try of a provider. It is sent only what [`ZoneLimit::clear`](crate::zones::ZoneLimit) has cleared.

use super::{AnswerStream, AttemptLoop, Opened, RequestKind};
use crate::dispatch::answer_stream::ProviderAnswer;
use crate::dispatch::engine_stream::AttemptError;
use crate::dispatch::route_decision::Departure;
use crate::error::GatewayError;
use crate::providers::{Closed, ProviderRequest, untranslatable};
use crate::routes::Provider;

impl AttemptLoop<'_> {
    /// Why this provider is not asked for the request, if so.
    pub(super) fn closed(&self, provider: &Provider, model: &str) -> Option<Closed> {
        if !matches!(self.request.kind, RequestKind::Text) {
            return Some(Closed::for_good("it is asked for text alone"));
        }
        if let Some(closed) = self.refusals.get(&(provider.full_name(), model.to_owned())) {
            return Some(closed.clone());
        }
        if let Some(requirement) = untranslatable(&self.request.request, provider.spec.api) {
            return Some(Closed::for_good(format!(
                "its API has no words for what the request asks for: {requirement}"
            )));
        }
        self.dispatcher.providers.closed(provider, model)
    }

    /// Sends the request to a model of a provider. `None` when that does not answer; the request does not come back to it.
    pub(super) async fn try_provider(
        &mut self,
        departure: Departure<'_>,
    ) -> Result<Option<Opened>, GatewayError> {
        let Departure { provider, model, limit, awaited } = departure;
        let (sampling, left_out) = self.request.asked.sampling();
        let wanted = ProviderRequest {
            provider: provider.clone(),
            model: model.to_owned(),
            request: self.request.request.clone(),
            sampling: sampling.clone(),
            left_out,
            key: self.request.caller.key_name(),
        };
        let cleared = limit.clear(wanted, provider.spec.zone, &provider.full_name())?;
        self.request.recorder.left(provider, model, &limit);
        // What should have answered is wanted all the same: it wakes, or gets another replica.
        self.held = awaited.and_then(|deployment| self.dispatcher.demand.hold(deployment, 0).ok());
        self.request.is_not_prepared();
        let mut answer = match ProviderAnswer::open(self.dispatcher, cleared, self.request.deadline).await {
            Ok(answer) => answer,
            Err(error) => return self.refused(provider, model, error),
        };
        match answer.output().await {
            Ok(first) => {
                self.tracker.dispatched();
                self.tracker.token();
                self.request.recorder.first_token();
                Ok(Some(Opened::Stream(Box::new((first, AnswerStream::Provider(answer))))))
            }
            Err(error) => self.refused(provider, model, error),
        }
    }

    /// Goes on to the next target, unless the request itself is wrong.
    fn refused(
        &mut self,
        provider: &Provider,
        model: &str,
        error: AttemptError,
    ) -> Result<Option<Opened>, GatewayError> {
        let closed = match error {
            AttemptError::Rejected(error) => {
                self.request.recorder.rejected(&error);
                return Err(error);
            }
            AttemptError::Busy(why) => {
                self.request.recorder.busy(&why);
                Closed { why, is_busy: true }
            }
            AttemptError::Lost { message, .. } => {
                self.request.recorder.lost(&message);
                Closed::for_good(message)
            }
        };
        let (model_name, why) = (&self.request.model, &closed.why);
        tracing::warn!(model = model_name, provider = provider.full_name(), "{why}");
        self.refusals.insert((provider.full_name(), model.to_owned()), closed);
        self.tracker.retried();
        Ok(None)
    }
}
