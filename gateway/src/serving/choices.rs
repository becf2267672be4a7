//! The responses to one request: one, or several where it asks for several choices. Each is a request of its own for the
//! engines, with a seed of its own, so each may have another engine and outlives that one by itself.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;

use futures::stream::{SelectAll, select_all};
use futures::{Stream, StreamExt as _, future::try_join_all};
use russet_wire::event::{GenerationEvent, Usage};
use russet_wire::request::GenerationRequest;

use crate::dispatch::{Dispatcher, PendingRequest, ResponseStream};
use crate::error::GatewayError;

/// An event, and of which choice it is.
pub(super) type ChoiceEvent = (usize, Result<GenerationEvent, GatewayError>);

/// Running responses. Dropping it cancels them in their engines.
pub(super) enum Choices {
    /// Of nearly every request.
    One(ResponseStream),
    /// As they come.
    Several(SelectAll<Pin<Box<dyn Stream<Item = ChoiceEvent> + Send>>>),
}

impl Choices {
    /// The responses, each from its first text on; an error where one of them has none.
    pub(super) async fn open(
        dispatcher: Arc<Dispatcher>,
        requests: Vec<PendingRequest>,
    ) -> Result<Self, GatewayError> {
        let requests = match <[PendingRequest; 1]>::try_from(requests) {
            Ok([request]) => return Ok(Self::One(Box::pin(dispatcher.respond(Box::new(request))).await?)),
            Err(requests) => requests,
        };
        let opened = try_join_all(requests.into_iter().map(|request| dispatcher.respond(Box::new(request))));
        let streams = Box::pin(opened).await?.into_iter().enumerate().map(|(choice, response)| {
            Box::pin(response.map(move |event| (choice, event))) as Pin<Box<dyn Stream<Item = _> + Send>>
        });
        Ok(Self::Several(select_all(streams)))
    }

    /// The next event of any of them; `None` when all have ended.
    pub(super) async fn next(&mut self) -> Option<ChoiceEvent> {
        match self {
            Self::One(response) => Some((0, response.next().await?)),
            Self::Several(responses) => responses.next().await,
        }
    }
}

/// The request of each choice, those of the first prompt first. The very first is the request itself; each has a seed of
/// its own, which follows that of the request, or one that is drawn here: engines do not draw it, so that another can
/// resume the response.
pub(super) fn requests(prompts: Vec<GenerationRequest>, choices: usize) -> Vec<GenerationRequest> {
    let seed = prompts.first().and_then(|request| request.sampling.seed).unwrap_or_else(rand::random);
    let repeated = prompts.into_iter().flat_map(|request| std::iter::repeat_n(request, choices));
    let mut all: Vec<GenerationRequest> = repeated.collect();
    for (choice, request) in all.iter_mut().enumerate() {
        request.sampling.seed = Some(seed.wrapping_add(choice as u64));
        if choice > 0 {
            request.id = format!("{}-{choice}", request.id);
        }
    }
    all
}

/// Tokens of all choices, of which so many have one prompt.
#[derive(Debug)]
pub(super) struct TotalUsage {
    choices: usize,
    /// By prompt.
    prompts: BTreeMap<usize, Usage>,
}

impl TotalUsage {
    /// No tokens so far, of so many choices for each prompt.
    pub(super) fn new(choices: usize) -> Self {
        Self { choices: choices.max(1), prompts: BTreeMap::new() }
    }

    /// The tokens of all prompts, given those of the prompt of each choice; `None` where one of them is not counted.
    pub(super) fn of_prompts(&self, choices: impl Iterator<Item = Option<u32>>) -> Option<u32> {
        choices.step_by(self.choices).try_fold(0u32, |sum, tokens| Some(sum.saturating_add(tokens?)))
    }

    /// Adds those of a choice.
    pub(super) fn add(&mut self, choice: usize, usage: Usage) {
        let prompt = self.prompts.entry(choice / self.choices);
        let total = prompt.or_insert(Usage { completion_tokens: 0, ..usage });
        total.completion_tokens = total.completion_tokens.saturating_add(usage.completion_tokens);
        // The later ones find the prompt that the first has prefilled.
        total.cached_tokens = total.cached_tokens.min(usage.cached_tokens);
    }

    /// The sum.
    pub(super) fn total(&self) -> Usage {
        self.prompts.values().fold(Usage::default(), |sum, usage| Usage {
            prompt_tokens: sum.prompt_tokens.saturating_add(usage.prompt_tokens),
            completion_tokens: sum.completion_tokens.saturating_add(usage.completion_tokens),
            cached_tokens: sum.cached_tokens.saturating_add(usage.cached_tokens),
        })
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
        assert_eq!(of(requests(vec![request.clone()], 1)), [("r".to_owned(), u64::MAX)]);
        let three = [("r".to_owned(), u64::MAX), ("r-1".to_owned(), 0), ("r-2".to_owned(), 1)];
        assert_eq!(of(requests(vec![request.clone()], 3)), three);
        assert_eq!(of(requests(vec![request.clone(), request.clone(), request.clone()], 1)), three);
        let unseeded = GenerationRequest { sampling: Sampling::default(), ..request };
        let seeds: std::collections::BTreeSet<u64> =
            of(requests(vec![unseeded.clone(), unseeded], 2)).into_iter().map(|(_, seed)| seed).collect();
        assert_eq!(seeds.len(), 4);
    }

    #[test]
    fn usage_of_choices_has_one_prompt() {
        let mut total = TotalUsage::new(2);
        assert_eq!(total.total(), Usage::default());
        let of_prompts = |choices: &[Option<u32>]| total.of_prompts(choices.iter().copied());
        assert_eq!(of_prompts(&[Some(20), None, Some(8), Some(8)]), Some(28));
        assert_eq!(of_prompts(&[Some(20), Some(20), None, Some(8)]), None);
        for (choice, prompt_tokens, completion_tokens, cached_tokens) in
            [(0, 20, 5, 0), (3, 8, 2, 4), (1, 20, 7, 16), (2, 8, 1, 4)]
        {
            total.add(choice, Usage { prompt_tokens, completion_tokens, cached_tokens });
        }
        assert_eq!(total.total(), Usage { prompt_tokens: 28, completion_tokens: 15, cached_tokens: 4 });
    }
}
