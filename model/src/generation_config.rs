//! Sampling parameters that whoever made a model recommends, in generation_config.json: temperature and filters. What is
//! out of range, or no number, counts as not there, as the model answers without it too.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The parameters; one that is absent is the API's own default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GenerationConfig {
    /// Temperature; 0 is greedy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 2))]
    pub temperature: Option<f64>,
    /// Nucleus mass; 1 disables it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.000001, max = 1))]
    pub top_p: Option<f64>,
    /// Number of most probable tokens to sample from; 0 disables it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1000000))]
    pub top_k: Option<i64>,
    /// Tokens less probable than this share of the best one are dropped; 0 disables it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1))]
    pub min_p: Option<f64>,
    /// Divides the logits of tokens that were there before; 1 changes nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.01, max = 10))]
    pub repetition_penalty: Option<f64>,
}

/// All of its numbers are finite: those of JSON are.
impl Eq for GenerationConfig {}

impl GenerationConfig {
    /// What stands in generation_config.json; `None` where it recommends nothing.
    pub fn read(fields: &Value) -> Option<Self> {
        let number = |name: &str, min: f64, max: f64| {
            fields.get(name).and_then(Value::as_f64).filter(|value| (min..=max).contains(value))
        };
        let config = Self {
            temperature: number("temperature", 0.0, 2.0),
            top_p: number("top_p", 1e-6, 1.0),
            top_k: number("top_k", 0.0, 1e6).filter(|count| count.fract() == 0.0).map(|count| count as i64),
            min_p: number("min_p", 0.0, 1.0),
            repetition_penalty: number("repetition_penalty", 0.01, 10.0),
        };
        (config != Self::default()).then_some(config)
    }

    /// These values where they are there, else those of `other`.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            temperature: self.temperature.or(other.temperature),
            top_p: self.top_p.or(other.top_p),
            top_k: self.top_k.or(other.top_k),
            min_p: self.min_p.or(other.min_p),
            repetition_penalty: self.repetition_penalty.or(other.repetition_penalty),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn recommended_values_are_read_and_others_are_not_there() {
        // Qwen3's.
        let qwen = json!({"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]});
        let expected = GenerationConfig {
            temperature: Some(0.6),
            top_k: Some(20),
            top_p: Some(0.95),
            ..GenerationConfig::default()
        };
        assert_eq!(GenerationConfig::read(&qwen), Some(expected));
        let odd =
            json!({"temperature": null, "top_k": 20.5, "top_p": 0, "min_p": "0.1", "repetition_penalty": -1});
        assert_eq!(GenerationConfig::read(&odd), None);
        let own = GenerationConfig { temperature: Some(0.0), ..GenerationConfig::default() };
        assert_eq!(own.or(expected), GenerationConfig { temperature: Some(0.0), ..expected });
    }
}
