//! A try of a provider. It is sent only what [`ZoneLimit::clear`](crate::zones::ZoneLimit) has cleared.

use super::{AnswerStream, AttemptLoop, Opened, RequestKind};
use crate::budgets::Reservation;
use crate::dispatch::answer_stream::ProviderAnswer;
use crate::dispatch::engine_stream::AttemptError;
use crate::dispatch::route_decision::Departure;
use crate::error::{ErrorKind, GatewayError};
use crate::providers::{Closed, ProviderRequest, Trials, untranslatable};
use crate::request_log::SkippedTarget;
use crate::routes::{BYTES_PER_TOKEN, Provider};

/// A model that is not asked, for the log.
pub(super) fn skipped(provider: &Provider, model: &str, closed: &Closed) -> SkippedTarget {
    SkippedTarget { provider: provider.full_name(), model: model.to_owned(), reason: closed.why.clone() }
}

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
        if let Some(closed) = self.beyond_known(provider, model) {
            return Some(closed);
        }
        // What it said last it may have said of another caller's request.
        let closed = self.dispatcher.providers.closed(provider, model)?;
        Some(Closed { said: None, ..closed })
    }

    /// Why the request is more than what is known of the model, if it is: longer, or of a price that nobody knows.
    fn beyond_known(&self, provider: &Provider, model: &str) -> Option<Closed> {
        let counts_money = self.request.reservation.as_ref().is_some_and(Reservation::counts_money);
        if counts_money && provider.price(model).is_none() {
            let kind = ErrorKind::BudgetExceeded;
            let why = "a Budget counts money, and nobody knows what this model costs; spec.models of the provider has no pricePerMillionTokens for it";
            return Some(Closed::of(why, kind));
        }
        let context = provider.known(model)?.context_tokens?;
        let needed = self.prompt_estimate().saturating_add(self.request.request.max_tokens.unwrap_or(0));
        (needed > context).then(|| {
            Closed::for_good(format!(
                "the request needs about {needed} tokens, and the model's context has {context}"
            ))
        })
    }

    /// Tokens of the prompt, estimated.
    fn prompt_estimate(&self) -> u32 {
        let texts = self.request.request.messages.iter().flat_map(|message| message.texts());
        let bytes: usize = texts.map(str::len).sum();
        u32::try_from(bytes / BYTES_PER_TOKEN).unwrap_or(u32::MAX)
    }

    /// Reserves what the answer may cost, where a Budget counts that.
    async fn reserve_money(&mut self, provider: &Provider, model: &str) -> Result<(), Closed> {
        let (Some(reservation), Some(price)) = (&mut self.request.reservation, provider.price(model)) else {
            return Ok(());
        };
        reservation.begin_attempt(price).await.map_err(|error| Closed::of(error.message, error.kind))
    }

    /// Sends the request to a model of a provider. `None` when that does not answer; the request does not come back to it.
    pub(super) async fn try_provider(
        &mut self,
        departure: Departure<'_>,
    ) -> Result<Option<Opened>, GatewayError> {
        let Departure { provider, model, limit, awaited, is_tried } = departure;
        let trials = match self.dispatcher.providers.trials(provider, model) {
            Ok(trials) => trials,
            // Nothing else answers it.
            Err(_) if is_tried => Trials::of_another(),
            // Another request was a moment earlier.
            Err(closed) => {
                self.refusals.insert((provider.full_name(), model.to_owned()), closed);
                return Ok(None);
            }
        };
        if let Err(closed) = self.reserve_money(provider, model).await {
            self.request.recorder.skipped(vec![skipped(provider, model, &closed)]);
            self.refusals.insert((provider.full_name(), model.to_owned()), closed);
            return Ok(None);
        }
        let (sampling, left_out) = self.request.asked.sampling();
        let wanted = ProviderRequest {
            provider: provider.clone(),
            model: model.to_owned(),
            request: self.request.request.clone(),
            sampling: sampling.clone(),
            left_out,
            key: self.request.caller.key_name().map(str::to_owned),
        };
        let cleared = limit.clear(wanted, provider.spec.zone, &provider.subject())?;
        let prompt = u64::from(self.prompt_estimate());
        self.request.recorder.left(provider, model, &limit, prompt);
        // What should have answered is wanted all the same: it wakes, or gets another replica.
        self.held = awaited.and_then(|deployment| self.dispatcher.demand.hold(deployment, 0).ok());
        self.request.is_not_prepared();
        let mut answer =
            match ProviderAnswer::open(self.dispatcher, (cleared, trials), self.request.deadline).await {
                Ok(answer) => answer,
                Err(error) => return self.refused(provider, model, error),
            };
        match answer.output().await {
            Ok(first) => {
                self.tracker.dispatched();
                self.tracker.token();
                self.request.recorder.first_token();
                Ok(Some(Opened::Stream((first, AnswerStream::Provider(Box::new(answer))))))
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
        if let Some(reservation) = &mut self.request.reservation {
            reservation.end_attempt();
        }
        let closed = match error {
            AttemptError::Rejected(error) => {
                self.request.recorder.rejected(&error);
                return Err(error);
            }
            AttemptError::Busy(why) => {
                self.request.recorder.busy(&why);
                Closed::busy(why)
            }
            AttemptError::Unsupported(message) | AttemptError::Lost { message, .. } => {
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
