//! The responses to one request: one, or several where it asks for several choices. Each is a request of its own for the
//! engines, with a seed of its own, so each may have another engine and outlives that one by itself.

use std::pin::Pin;
use std::sync::Arc;

use futures::stream::{SelectAll, select_all};
use futures::{Stream, StreamExt as _, future::try_join_all};
use russet_wire::event::{GenerationEvent, Usage};
use russet_wire::request::GenerationRequest;

use crate::dispatch::{Dispatcher, PendingRequest};
use crate::error::GatewayError;

/// An event, and of which choice it is.
pub(super) type ChoiceEvent = (usize, Result<GenerationEvent, GatewayError>);

/// Running responses. Dropping it cancels them in their engines.
pub(super) struct Choices(SelectAll<Pin<Box<dyn Stream<Item = ChoiceEvent> + Send>>>);

impl Choices {
    /// The responses, each from its first text on; an error where one of them has none.
    pub(super) async fn open(
        dispatcher: Arc<Dispatcher>,
        requests: Vec<PendingRequest>,
    ) -> Result<Self, GatewayError> {
        let opened = try_join_all(requests.into_iter().map(|request| dispatcher.respond(request))).await?;
        let streams = opened.into_iter().enumerate().map(|(choice, response)| {
            Box::pin(response.into_stream().map(move |event| (choice, event)))
                as Pin<Box<dyn Stream<Item = _> + Send>>
        });
        Ok(Self(select_all(streams)))
    }

    /// The next event of any of them; `None` when all have ended.
    pub(super) async fn next(&mut self) -> Option<ChoiceEvent> {
        self.0.next().await
    }
}

/// The request of each choice. The first is the request itself; each has a seed of its own, which follows that of the
/// request, or one that is drawn here: engines do not draw it, so that another can resume the response.
pub(super) fn requests(request: GenerationRequest, choices: usize) -> Vec<GenerationRequest> {
    let seed = request.sampling.seed.unwrap_or_else(rand::random);
    let mut all = vec![request; choices.max(1)];
    for (choice, request) in all.iter_mut().enumerate() {
        request.sampling.seed = Some(seed.wrapping_add(choice as u64));
        if choice > 0 {
            request.id = format!("{}-{choice}", request.id);
        }
    }
    all
}

/// Tokens of all choices, which have one prompt.
#[derive(Debug, Default)]
pub(super) struct TotalUsage(Option<Usage>);

impl TotalUsage {
    /// Adds those of a choice.
    pub(super) fn add(&mut self, usage: Usage) {
        let total = self.0.get_or_insert(Usage { completion_tokens: 0, ..usage });
        total.completion_tokens = total.completion_tokens.saturating_add(usage.completion_tokens);
        // The later ones find the prompt that the first has prefilled.
        total.cached_tokens = total.cached_tokens.min(usage.cached_tokens);
    }

    /// The sum.
    pub(super) fn total(&self) -> Usage {
        self.0.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use russet_wire::request::Sampling;

    use super::*;

    #[test]
    fn each_choice_has_an_id_and_a_seed_of_its_own() {
        let request = GenerationRequest {
            id: "r".into(),
            sampling: Sampling { seed: Some(u64::MAX), ..Sampling::default() },
            ..GenerationRequest::default()
        };
        let of = |all: Vec<GenerationRequest>| -> Vec<(String, u64)> {
            all.into_iter().map(|one| (one.id, one.sampling.seed.unwrap())).collect()
        };
        assert_eq!(of(requests(request.clone(), 1)), [("r".to_owned(), u64::MAX)]);
        let three = [("r".to_owned(), u64::MAX), ("r-1".to_owned(), 0), ("r-2".to_owned(), 1)];
        assert_eq!(of(requests(request.clone(), 3)), three);
        let unseeded = GenerationRequest { sampling: Sampling::default(), ..request };
        let seeds: std::collections::BTreeSet<u64> =
            of(requests(unseeded, 4)).into_iter().map(|(_, seed)| seed).collect();
        assert_eq!(seeds.len(), 4);
    }

    #[test]
    fn usage_of_choices_has_one_prompt() {
        let mut total = TotalUsage::default();
        assert_eq!(total.total(), Usage::default());
        for (completion_tokens, cached_tokens) in [(5, 0), (7, 16)] {
            total.add(Usage { prompt_tokens: 20, completion_tokens, cached_tokens });
        }
        assert_eq!(total.total(), Usage { prompt_tokens: 20, completion_tokens: 12, cached_tokens: 0 });
    }
}
