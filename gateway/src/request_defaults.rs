//! What a deployment sets where a request says nothing: sampling parameters, from the model's generation_config.json or
//! its own spec, and variables of the chat template. The gateway fills them in, so an edit acts at once and restarts no
//! engine. Of a response that has begun they stay as they are, whichever engine resumes it.

use russet_crds::GenerationConfig;
use russet_wire::request::{GenerationRequest, Sampling};
use serde_json::{Map, Value};

use crate::strip_patterns::StripPatterns;

/// Sampling parameters that a request leaves to the deployment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LeftOut {
    pub(crate) temperature: bool,
    pub(crate) top_p: bool,
    pub(crate) top_k: bool,
    pub(crate) min_p: bool,
    pub(crate) repetition_penalty: bool,
}

impl LeftOut {
    /// A request that names none of them.
    #[cfg(test)]
    pub(crate) const ALL: Self =
        Self { temperature: true, top_p: true, top_k: true, min_p: true, repetition_penalty: true };
}

/// What a deployment sets.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestDefaults {
    /// Sampling parameters.
    pub sampling: GenerationConfig,
    /// Variables of the chat template.
    pub template_arguments: Map<String, Value>,
    /// What is taken out of prompts.
    pub strip_patterns: StripPatterns,
}

/// What a request asks for, of that which a deployment may set.
#[derive(Clone, Debug)]
pub(crate) struct AskedParameters {
    left_out: LeftOut,
    sampling: Sampling,
    template_arguments: String,
}

impl AskedParameters {
    /// Those of a request as its client sent it.
    pub(crate) fn of(request: &GenerationRequest, left_out: LeftOut) -> Self {
        let GenerationRequest { sampling, template_arguments, .. } = request;
        Self { left_out, sampling: sampling.clone(), template_arguments: template_arguments.clone() }
    }

    /// The sampling as its client sent it, and what it left out of that.
    pub(crate) fn sampling(&self) -> (&Sampling, LeftOut) {
        (&self.sampling, self.left_out)
    }
}

impl RequestDefaults {
    /// Completes a request for this deployment, whichever completed it before.
    pub(crate) fn complete(&self, request: &mut GenerationRequest, asked: &AskedParameters) {
        let AskedParameters { left_out, sampling, template_arguments } = asked;
        let GenerationConfig { temperature, top_p, top_k, min_p, repetition_penalty } = self.sampling;
        let mut sampling = sampling.clone();
        for (value, default, is_left_out) in [
            (&mut sampling.temperature, temperature, left_out.temperature),
            (&mut sampling.top_p, top_p, left_out.top_p),
            (&mut sampling.min_p, min_p, left_out.min_p),
            (&mut sampling.repetition_penalty, repetition_penalty, left_out.repetition_penalty),
        ] {
            if let Some(default) = default.filter(|_| is_left_out) {
                *value = default as f32;
            }
        }
        if let Some(top_k) = top_k.filter(|_| left_out.top_k) {
            sampling.top_k = u32::try_from(top_k).unwrap_or(0);
        }
        request.sampling = sampling;
        request.template_arguments.clone_from(template_arguments);
        if request.raw_prompt.is_none() && !self.template_arguments.is_empty() {
            let mut arguments = self.template_arguments.clone();
            // What the client says comes before what the deployment says.
            if let Ok(Value::Object(own)) = serde_json::from_str(template_arguments) {
                arguments.extend(own);
            }
            request.template_arguments = Value::Object(arguments).to_string();
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn defaults(sampling: GenerationConfig, arguments: Value) -> RequestDefaults {
        let Value::Object(template_arguments) = arguments else { panic!("{arguments} is no object") };
        RequestDefaults { sampling, template_arguments, ..RequestDefaults::default() }
    }

    #[test]
    fn what_a_request_names_comes_before_its_deployment() {
        let sampling = GenerationConfig {
            temperature: Some(0.6),
            top_p: Some(0.95),
            top_k: Some(20),
            min_p: Some(0.1),
            repetition_penalty: Some(1.1),
        };
        let thinks = defaults(sampling, json!({"enable_thinking": false, "depth": 1}));
        let plain = defaults(GenerationConfig::default(), json!({}));
        let mut request = GenerationRequest {
            sampling: Sampling { temperature: 1.0, top_p: 0.5, seed: Some(1), ..Sampling::default() },
            template_arguments: r#"{"enable_thinking":true}"#.into(),
            ..GenerationRequest::default()
        };
        let sent = request.clone();
        let asked = AskedParameters::of(&request, LeftOut { top_p: false, ..LeftOut::ALL });
        thinks.complete(&mut request, &asked);
        let expected = Sampling {
            temperature: 0.6,
            top_p: 0.5,
            top_k: 20,
            min_p: 0.1,
            repetition_penalty: 1.1,
            seed: Some(1),
            ..Sampling::default()
        };
        assert_eq!(request.sampling, expected);
        assert_eq!(request.template_arguments, r#"{"enable_thinking":true,"depth":1}"#);
        // Another deployment, which sets nothing, completes what the client sent.
        plain.complete(&mut request, &asked);
        assert_eq!(request, sent);
        // Greedy is a value like any other, and a prompt without a template has no variables.
        let mut raw = GenerationRequest {
            raw_prompt: Some(russet_wire::request::RawPrompt::Text("x".into())),
            ..GenerationRequest::default()
        };
        let asked = AskedParameters::of(&raw, LeftOut { temperature: false, ..LeftOut::default() });
        thinks.complete(&mut raw, &asked);
        assert_eq!((raw.sampling, raw.template_arguments.as_str()), (Sampling::default(), ""));
    }
}
