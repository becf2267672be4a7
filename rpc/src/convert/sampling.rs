//! Sampling parameters between the protos and [`russet_wire::request`]. Destructured whole, so that none is lost.

use russet_wire::request::Sampling;

use crate::engine as pb;

impl From<Sampling> for pb::Sampling {
    fn from(sampling: Sampling) -> Self {
        let Sampling {
            temperature,
            top_p,
            top_k,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias,
            min_tokens,
            seed,
        } = sampling;
        Self {
            temperature,
            top_p,
            top_k,
            min_p,
            repetition_penalty: Some(repetition_penalty),
            presence_penalty,
            frequency_penalty,
            logit_bias: logit_bias.into_iter().collect(),
            min_tokens,
            seed,
        }
    }
}

impl From<pb::Sampling> for Sampling {
    fn from(sampling: pb::Sampling) -> Self {
        let pb::Sampling {
            temperature,
            top_p,
            top_k,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias,
            min_tokens,
            seed,
        } = sampling;
        Self {
            temperature,
            top_p,
            top_k,
            min_p,
            // Gateways of a release without it ask for none.
            repetition_penalty: repetition_penalty.unwrap_or(1.0),
            presence_penalty,
            frequency_penalty,
            logit_bias: logit_bias.into_iter().collect(),
            min_tokens,
            seed,
        }
    }
}
