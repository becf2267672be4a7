//! Sampling parameters between the protos and [`russet_wire::request`]. Destructured whole, so that none is lost.

use russet_wire::request::{DrySampling, Sampling};

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
            typical_p,
            xtc_probability,
            xtc_threshold,
            dry,
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
            typical_p: Some(typical_p),
            xtc_probability,
            xtc_threshold: Some(xtc_threshold),
            dry: dry.map(pb::Dry::from),
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
            typical_p,
            xtc_probability,
            xtc_threshold,
            dry,
            min_tokens,
            seed,
        } = sampling;
        // Gateways of a release without a parameter ask for what changes nothing.
        let usual = Self::default();
        Self {
            temperature,
            top_p,
            top_k,
            min_p,
            repetition_penalty: repetition_penalty.unwrap_or(usual.repetition_penalty),
            presence_penalty,
            frequency_penalty,
            logit_bias: logit_bias.into_iter().collect(),
            typical_p: typical_p.unwrap_or(usual.typical_p),
            xtc_probability,
            xtc_threshold: xtc_threshold.unwrap_or(usual.xtc_threshold),
            // Those of an older release send what penalises none too.
            dry: dry.filter(|dry| dry.multiplier > 0.0).map(DrySampling::from),
            min_tokens,
            seed,
        }
    }
}

impl From<DrySampling> for pb::Dry {
    fn from(dry: DrySampling) -> Self {
        let DrySampling { multiplier, base, allowed_length, last_tokens, sequence_breakers } = dry;
        Self { multiplier, base, allowed_length, last_tokens, sequence_breakers }
    }
}

impl From<pb::Dry> for DrySampling {
    fn from(dry: pb::Dry) -> Self {
        let pb::Dry { multiplier, base, allowed_length, last_tokens, sequence_breakers } = dry;
        Self { multiplier, base, allowed_length, last_tokens, sequence_breakers }
    }
}
