//! Structured output and log-probabilities between the protos and [`russet_wire`]. Destructured whole, so that no field is
//! lost.

use russet_wire::event::{Logprobs, TokenLogprob};
use russet_wire::request::StructuredOutput;

use super::conversation::all;
use crate::engine as pb;

impl From<StructuredOutput> for pb::StructuredOutput {
    fn from(output: StructuredOutput) -> Self {
        use pb::structured_output::Output;
        let output = match output {
            StructuredOutput::JsonObject => Output::JsonObject(true),
            StructuredOutput::JsonSchema(schema) => Output::JsonSchema(schema),
            StructuredOutput::Regex(regex) => Output::Regex(regex),
            StructuredOutput::Choice(texts) => Output::Choice(pb::Choices { texts }),
            StructuredOutput::Grammar(grammar) => Output::Grammar(grammar),
        };
        Self { output: Some(output) }
    }
}

/// `None` for free text.
pub(super) fn structured_output(output: pb::StructuredOutput) -> Option<StructuredOutput> {
    use pb::structured_output::Output;
    match output.output? {
        Output::JsonObject(asked) => asked.then_some(StructuredOutput::JsonObject),
        Output::JsonSchema(schema) => Some(StructuredOutput::JsonSchema(schema)),
        Output::Regex(regex) => Some(StructuredOutput::Regex(regex)),
        Output::Choice(pb::Choices { texts }) => Some(StructuredOutput::Choice(texts)),
        Output::Grammar(grammar) => Some(StructuredOutput::Grammar(grammar)),
    }
}

impl From<Logprobs> for pb::Logprobs {
    fn from(logprobs: Logprobs) -> Self {
        let Logprobs { sampled, top } = logprobs;
        Self { sampled: Some(sampled.into()), top: all(top) }
    }
}

impl From<pb::Logprobs> for Logprobs {
    fn from(logprobs: pb::Logprobs) -> Self {
        let pb::Logprobs { sampled, top } = logprobs;
        Self { sampled: sampled.map(TokenLogprob::from).unwrap_or_default(), top: all(top) }
    }
}

impl From<TokenLogprob> for pb::TokenLogprob {
    fn from(token: TokenLogprob) -> Self {
        let TokenLogprob { id, bytes, logprob } = token;
        Self { id, bytes, logprob }
    }
}

impl From<pb::TokenLogprob> for TokenLogprob {
    fn from(token: pb::TokenLogprob) -> Self {
        let pb::TokenLogprob { id, bytes, logprob } = token;
        Self { id, bytes, logprob }
    }
}
