//! `options` of a request: sampling, length, and what Ollama's runner is told about memory and hardware.

use std::collections::BTreeSet;

use russet_wire::request::Sampling;
use serde_json::Value;

use super::fields::option_group_of;
use crate::dialects::field_table::{Treatment, refuse_unsupported};
use crate::dialects::sampling;
use crate::dialects::stop_strings::stop_strings;
use crate::dialects::values::{JsonObject, integer, whole};
use crate::error::GatewayError;
use crate::request_defaults::LeftOut;
use crate::request_limits::RequestLimits;

/// The options that are set.
#[derive(Debug)]
pub(super) struct OllamaOptions(JsonObject);

impl OllamaOptions {
    /// Reads them; adds the names of those that are left out to `ignored`.
    pub(super) fn read(value: Option<Value>, ignored: &mut BTreeSet<String>) -> Result<Self, GatewayError> {
        let mut fields = match value {
            None => JsonObject::new(),
            Some(Value::Object(fields)) => fields,
            Some(_) => return Err(GatewayError::field("options", "`options` must be an object")),
        };
        fields.retain(|_, value| !value.is_null());
        refuse_unsupported(&fields, option_group_of)?;
        check_penalty_window(&fields)?;
        let is_honoured = |name: &str| {
            option_group_of(name).is_some_and(|group| matches!(group.treatment, Treatment::Honoured))
        };
        ignored.extend(fields.keys().filter(|name| !is_honoured(name)).map(|name| format!("options.{name}")));
        // Any seed, where OpenAI's -1 is one like another.
        if fields.get("seed").and_then(whole) == Some(-1) {
            fields.remove("seed");
        }
        Ok(Self(fields))
    }

    /// How tokens are sampled.
    pub(super) fn sampling(&self) -> Result<Sampling, GatewayError> {
        sampling::parse(&self.0)
    }

    /// What is left to the deployment.
    pub(super) fn left_out(&self) -> LeftOut {
        sampling::left_out(&self.0)
    }

    /// Texts that end the response.
    pub(super) fn stop(&self) -> Result<Vec<String>, GatewayError> {
        stop_strings(&self.0, "stop")
    }

    /// Maximum tokens of the response within the caller's limits; `None` for the rest of the context.
    pub(super) fn max_tokens(&self, limits: &RequestLimits) -> Result<Option<u32>, GatewayError> {
        // -1 is no limit, -2 the rest of the context, and Ollama's runner takes 0 for none as well.
        let asked = integer(&self.0, "num_predict", -2, i64::from(u32::MAX))?.filter(|tokens| *tokens > 0);
        limits.max_tokens(asked.and_then(|tokens| u32::try_from(tokens).ok()), "num_predict")
    }
}

/// Penalties count all tokens; a smaller window would change the response where one is asked for.
fn check_penalty_window(fields: &JsonObject) -> Result<(), GatewayError> {
    const PENALTIES: [(&str, f64); 4] = [
        ("repeat_penalty", 1.0),
        ("repetition_penalty", 1.0),
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
    ];
    let Some(window) = integer(fields, "repeat_last_n", -1, i64::from(i32::MAX))? else { return Ok(()) };
    let changes = |(name, neutral): &&(&str, f64)| {
        fields.get(*name).and_then(Value::as_f64).is_some_and(|penalty| penalty != *neutral)
    };
    match PENALTIES.iter().find(changes) {
        Some((penalty, _)) if window != -1 => {
            let message = format!(
                "`repeat_last_n` is {window}, and `{penalty}` counts all tokens here; send -1, or leave it out"
            );
            Err(GatewayError::field("repeat_last_n", message))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(options: Value) -> Result<(OllamaOptions, Vec<String>), Option<String>> {
        let mut ignored = BTreeSet::new();
        let read = OllamaOptions::read(Some(options), &mut ignored).map_err(|error| error.param)?;
        Ok((read, ignored.into_iter().collect()))
    }

    #[test]
    fn options_of_sampling_and_length_arrive() {
        let (options, ignored) = read(json!({
            "temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "typical_p": 0.75, "repeat_penalty": 1.5,
            "presence_penalty": 1, "frequency_penalty": 0.5, "seed": 3, "stop": ["END"], "num_predict": 9,
            "repeat_last_n": -1, "num_ctx": 4096, "num_thread": 8, "use_mmap": null, "mirostat": 0, "odd": 1,
        }))
        .unwrap();
        let expected = Sampling {
            temperature: 0.5,
            top_k: 7,
            top_p: 0.5,
            min_p: 0.25,
            typical_p: 0.75,
            repetition_penalty: 1.5,
            presence_penalty: 1.0,
            frequency_penalty: 0.5,
            seed: Some(3),
            ..Sampling::default()
        };
        assert_eq!(options.sampling(), Ok(expected));
        assert_eq!((options.left_out(), options.stop()), (LeftOut::default(), Ok(vec!["END".to_owned()])));
        assert_eq!(options.max_tokens(&RequestLimits::default()), Ok(Some(9)));
        let listed = ["mirostat", "num_ctx", "num_thread", "odd"].map(|name| format!("options.{name}"));
        assert_eq!(ignored, listed);
        let (nothing, ignored) = read(json!({})).unwrap();
        assert_eq!((nothing.left_out(), ignored.len()), (LeftOut::ALL, 0));
    }

    #[test]
    fn no_limit_and_any_seed_have_ollamas_numbers() {
        for (num_predict, expected) in [(-2, None), (-1, None), (0, None), (1, Some(1))] {
            let (options, _) = read(json!({"num_predict": num_predict, "seed": -1})).unwrap();
            assert_eq!(options.max_tokens(&RequestLimits::default()), Ok(expected), "{num_predict}");
            assert_eq!(options.sampling().unwrap().seed, None);
        }
        let (options, _) = read(json!({"num_predict": -3})).unwrap();
        assert!(options.max_tokens(&RequestLimits::default()).is_err());
    }

    #[test]
    fn what_would_change_the_answer_is_refused_by_name() {
        for (options, param) in [
            (json!([]), "options"),
            (json!({"mirostat": 1}), "mirostat"),
            (json!({"tfs_z": 0.5}), "tfs_z"),
            (json!({"penalize_newline": false}), "penalize_newline"),
            (json!({"num_keep": 24}), "num_keep"),
            (json!({"rope_frequency_base": 10000}), "rope_frequency_base"),
            (json!({"repeat_last_n": 64, "repeat_penalty": 1.1}), "repeat_last_n"),
            (json!({"repeat_last_n": 0, "presence_penalty": 1}), "repeat_last_n"),
            (json!({"repeat_last_n": "all"}), "repeat_last_n"),
        ] {
            assert_eq!(read(options.clone()).map(|_| ()), Err(Some(param.to_owned())), "{options}");
        }
        let harmless = json!({
            "mirostat": 0, "tfs_z": 1.0, "penalize_newline": true, "num_keep": 4, "repeat_last_n": 64,
            "repeat_penalty": 1.0,
        });
        assert!(read(harmless).is_ok());
    }
}
