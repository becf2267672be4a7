//! What a provider is asked, before its own API is spoken. Not here: which fields the APIs have (`openai`, `anthropic`).

use russet_crds::ProviderApi;
use russet_wire::request::{ContextOverflow, GenerationRequest, Sampling, StructuredOutput};

use crate::request_defaults::LeftOut;
use crate::routes::{BYTES_PER_TOKEN, Provider};

/// A request for text to a model of a provider.
pub(crate) struct ProviderRequest {
    /// The provider.
    pub(crate) provider: Provider,
    /// The model, as the provider names it.
    pub(crate) model: String,
    /// The conversation and what is wanted of it.
    pub(crate) request: GenerationRequest,
    /// The sampling that its client asks for.
    pub(crate) sampling: Sampling,
    /// The parameters that its client leaves to whoever answers.
    pub(crate) left_out: LeftOut,
    /// `namespace/name` of its client's key, for the audit log; no provider is told.
    pub(crate) key: Option<String>,
}

impl ProviderRequest {
    /// Tokens of its prompt and its answer, estimated.
    pub(super) fn token_estimate(&self) -> u64 {
        let answer = u64::from(self.request.max_tokens.unwrap_or(0));
        u64::from(self.prompt_estimate()).saturating_add(answer)
    }

    /// Tokens of its prompt, estimated.
    pub(super) fn prompt_estimate(&self) -> u32 {
        let texts = self.request.messages.iter().flat_map(|message| message.texts());
        let bytes: usize = texts.map(str::len).sum();
        u32::try_from(bytes.div_ceil(BYTES_PER_TOKEN)).unwrap_or(u32::MAX)
    }
}

/// What this API has no words for, of what a request wants; a provider that speaks it would answer something else.
pub(crate) fn untranslatable(request: &GenerationRequest, api: ProviderApi) -> Option<&'static str> {
    let Sampling { logit_bias, typical_p, xtc_probability, dry, min_tokens, temperature, .. } =
        &request.sampling;
    let anthropic = api == ProviderApi::Anthropic;
    let requirements = [
        (api == ProviderApi::Unknown, "an API of a newer release"),
        (request.raw_prompt.is_some(), "a prompt without messages"),
        (request.continue_final_message, "an answer that is begun"),
        (request.logprobs.is_some(), "log-probabilities"),
        (request.tells_prompt(), "the tokens of the prompt"),
        (!request.stop_token_ids.is_empty(), "tokens that end the answer"),
        (request.ignore_eos, "an answer that does not end"),
        (request.truncate_prompt_tokens.is_some(), "a prompt that is cut"),
        (request.context_overflow != ContextOverflow::Refuse, "a prompt that is cut"),
        (!logit_bias.is_empty(), "a bias on tokens"),
        (*min_tokens > 0, "a least number of tokens"),
        (*typical_p < 1.0 || *xtc_probability > 0.0 || dry.is_some(), "this sampler"),
        (
            matches!(
                request.structured_output,
                Some(StructuredOutput::Regex(_) | StructuredOutput::Choice(_) | StructuredOutput::Grammar(_))
            ),
            "a grammar",
        ),
        (anthropic && request.structured_output.is_some(), "a schema of the answer"),
        (anthropic && *temperature > 1.0, "a temperature above 1"),
        (
            anthropic
                && (request.sampling.presence_penalty != 0.0 || request.sampling.frequency_penalty != 0.0),
            "penalties",
        ),
    ];
    requirements.into_iter().find(|(wanted, _)| *wanted).map(|(_, requirement)| requirement)
}

#[cfg(test)]
mod tests {
    use russet_wire::request::RawPrompt;

    use super::*;

    #[test]
    fn requirements_beyond_an_api_are_named() {
        let plain = GenerationRequest::default;
        let hot =
            GenerationRequest { sampling: Sampling { temperature: 1.2, ..Sampling::default() }, ..plain() };
        let json = GenerationRequest { structured_output: Some(StructuredOutput::JsonObject), ..plain() };
        let with_prompt = GenerationRequest { prompt_logprobs: Some(0), ..plain() };
        let raw = GenerationRequest { raw_prompt: Some(RawPrompt::Text("x".into())), ..plain() };
        let choice = GenerationRequest {
            structured_output: Some(StructuredOutput::Choice(vec!["a".into()])),
            ..plain()
        };
        for (request, openai, anthropic) in [
            (plain(), None, None),
            (hot, None, Some("a temperature above 1")),
            (json, None, Some("a schema of the answer")),
            (raw, Some("a prompt without messages"), Some("a prompt without messages")),
            (with_prompt, Some("the tokens of the prompt"), Some("the tokens of the prompt")),
            (choice, Some("a grammar"), Some("a grammar")),
        ] {
            assert_eq!(untranslatable(&request, ProviderApi::OpenAI), openai);
            assert_eq!(untranslatable(&request, ProviderApi::Anthropic), anthropic);
            assert!(untranslatable(&request, ProviderApi::Unknown).is_some());
        }
    }
}
