//! Rotary embeddings and their scalings.

use crate::{config::RopeFields, error::Unsupported};

/// A rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Elements of a head that are rotated, the first ones.
    pub width: u32,
    /// The base.
    pub base: f32,
    /// Whether neighbours are rotated, not halves.
    pub traditional: bool,
    /// The scaling.
    pub scaling: RopeScaling,
}

/// How a rotary embedding is stretched over longer contexts.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    #[default]
    None,
    /// Positions are divided by the factor.
    Linear {
        /// The factor.
        factor: f32,
    },
    /// Long wavelengths are stretched, short ones kept, those between blended.
    Llama3 {
        /// The factor of long ones.
        factor: f32,
        /// The original context over this is the shortest that is stretched whole.
        low: f32,
        /// The original context over this is the longest that is kept.
        high: f32,
        /// The original context, tokens.
        original: f32,
    },
    /// The same by how often a pair turns within the original context, and what is rotated is scaled.
    Yarn(Yarn),
    /// The first pairs are rotated as if all were, by wavelengths that are stretched; the others are not.
    Proportional {
        /// Elements of a head that are rotated.
        rotated: u32,
        /// The factor.
        factor: f32,
    },
    /// A factor of its own for each wavelength, and what is rotated is scaled.
    Factors {
        /// One for each pair.
        factors: Vec<f32>,
        /// What the rotated part is multiplied by.
        scale: f32,
    },
}

/// YaRN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// The factor of wavelengths that are stretched whole.
    pub factor: f32,
    /// The original context, tokens.
    pub original: f32,
    /// Pairs that turn more often than this within the original context are kept.
    pub beta_fast: f32,
    /// Pairs that turn less often are stretched whole.
    pub beta_slow: f32,
    /// What the rotated part is multiplied by.
    pub scale: f32,
}

/// YaRN's growth of attention with the factor: `0.1 · mscale · ln(factor) + 1`.
pub(crate) fn yarn_scale(factor: f32, mscale: f32) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * f64::from(mscale) * f64::from(factor).ln() + 1.0 }
}

impl RopeScaling {
    /// The scaling of this name, with its numbers checked. `context` is the longest context of the model.
    pub fn read(fields: &RopeFields, context: u32) -> Result<Self, Unsupported> {
        let kind = fields.rope_type.as_deref().unwrap_or("default");
        let positive = |field: &str, value: Option<f32>| match value {
            Some(value) if value > 0.0 => Ok(value),
            value => {
                let shown = value.map_or("absent".to_owned(), |value| value.to_string());
                let reason = format!("rope scaling {kind:?} needs a positive {field}, which is {shown}");
                Err(Unsupported::field(
                    &format!("rope_scaling.{field}"),
                    reason,
                    "take the config.json that belongs to the weights",
                ))
            }
        };
        let original = |default| {
            positive("original_max_position_embeddings", fields.original_max_position_embeddings.or(default))
        };
        match kind {
            // What is rotated by place in a picture is rotated by position in a text.
            "default" | "mrope" => Ok(Self::None),
            "linear" => Ok(Self::Linear { factor: positive("factor", fields.factor)? }),
            "llama3" => Ok(Self::Llama3 {
                factor: positive("factor", fields.factor)?,
                low: positive("low_freq_factor", fields.low_freq_factor.or(Some(1.0)))?,
                high: positive("high_freq_factor", fields.high_freq_factor.or(Some(4.0)))?,
                original: original(Some(8192.0))?,
            }),
            "yarn" | "deepseek_yarn" => {
                let factor = positive("factor", fields.factor)?;
                let all = fields.mscale_all_dim.unwrap_or(0.0);
                let scale = match fields.attention_factor {
                    Some(scale) => scale,
                    None => {
                        (yarn_scale(factor, fields.mscale.unwrap_or(1.0)) / yarn_scale(factor, all)) as f32
                    }
                };
                Ok(Self::Yarn(Yarn {
                    factor,
                    original: original(Some(4096.0))?,
                    beta_fast: positive("beta_fast", fields.beta_fast.or(Some(32.0)))?,
                    beta_slow: positive("beta_slow", fields.beta_slow.or(Some(1.0)))?,
                    scale,
                }))
            }
            "longrope" => {
                let original = original(None)?;
                let factor = context as f32 / original;
                let grown = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() };
                let factors = fields.long_factor.clone();
                Ok(Self::Factors { factors, scale: fields.attention_factor.unwrap_or(grown) })
            }
            other => Err(Unsupported::field(
                "rope_scaling.rope_type",
                format!(
                    "rope scaling {other:?} is not supported; supported are default, linear, llama3, yarn and longrope"
                ),
                "leave it out and use the model's original context, or use a model without it",
            )),
        }
    }
}
