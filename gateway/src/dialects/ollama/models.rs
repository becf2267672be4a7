//! What clients read of models: `/api/tags`, `/api/ps` and `/api/show`. Answered from memory, because user interfaces wait
//! for it, with the models alone that the caller may ask. The gateway knows no sizes and no architectures, so these are 0
//! and empty.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::{Extension, Json};
use jiff::Timestamp;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::dialects::values;
use crate::error::GatewayError;
use crate::json_body::JsonBody;
use crate::keys::Caller;
use crate::serving::{ApiState, ModelSummary};

/// When a loaded model is unloaded. Deployments stay until their autoscaling says otherwise, and clients want a time: one
/// that is far away, and near enough for dates in every time zone and language.
const EXPIRES_AT: &str = "2200-01-01T00:00:00Z";
/// The architecture under which `/api/show` tells the context length: clients look it up by this word.
const ARCHITECTURE: &str = "unknown";

/// All models.
pub(super) async fn tags(
    State(api): State<Arc<ApiState>>,
    Extension(caller): Extension<Caller>,
) -> Json<Value> {
    let models: Vec<Value> = api.models(&caller).iter().map(entry).collect();
    Json(json!({"models": models}))
}

/// Models that serve requests now.
pub(super) async fn ps(
    State(api): State<Arc<ApiState>>,
    Extension(caller): Extension<Caller>,
) -> Json<Value> {
    let loaded = |model: &ModelSummary| {
        let mut entry = entry(model);
        entry["expires_at"] = EXPIRES_AT.into();
        entry["size_vram"] = 0.into();
        entry["context_length"] = model.context_tokens.into();
        entry
    };
    let models = api.models(&caller);
    let models: Vec<Value> = models.iter().filter(|model| model.ready).map(loaded).collect();
    Json(json!({"models": models}))
}

/// One model.
pub(super) fn show(
    mut body: JsonBody<'_>,
    api: &ApiState,
    caller: &Caller,
) -> Result<Response, GatewayError> {
    let model = api.model(&name(&mut body)?, caller)?;
    let ModelSummary { context_tokens, .. } = &model;
    let context_length = format!("{ARCHITECTURE}.context_length");
    let shown = json!({
        "license": "",
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": details(),
        "model_info": {"general.architecture": ARCHITECTURE, context_length: context_tokens},
        // Whether a model thinks or calls tools is in its chat template, which engines have and gateways do not. A switch
        // that a template does not ask for has no effect, and tools that it does not tell of are a 400 that says so.
        "capabilities": ["completion", "tools", "thinking"],
        "modified_at": modified_at(&model),
    });
    Ok(Json(shown).into_response())
}

/// The model that a request is about: `model`, or `name`, its older form.
pub(super) fn name(body: &mut JsonBody<'_>) -> Result<String, GatewayError> {
    let mut fields = values::fields(body)?;
    if let Some(name) = fields.remove("name")
        && !fields.contains_key("model")
    {
        fields.insert("model".into(), name);
    }
    values::model(&fields)
}

fn entry(model: &ModelSummary) -> Value {
    let ModelSummary { id, created: _, context_tokens: _, ready: _, message: _, deployments } = model;
    // The same for the same name and deployments: clients tell by it whether a model has changed.
    let digest = Sha256::digest(json!([id, deployments]).to_string());
    json!({
        "name": id,
        "model": id,
        "modified_at": modified_at(model),
        "size": 0,
        "digest": hex::encode(digest),
        "details": details(),
    })
}

fn details() -> Value {
    json!({
        "parent_model": "",
        "format": "safetensors",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    })
}

/// In RFC 3339.
fn modified_at(model: &ModelSummary) -> String {
    Timestamp::from_second(model.created).unwrap_or_default().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json_body::JsonScan;

    #[test]
    fn a_model_is_named_by_either_field() {
        for (body, expected) in [
            (r#"{"model": "m"}"#, Ok("m")),
            (r#"{"name": "m"}"#, Ok("m")),
            (r#"{"name": "old", "model": "m", "verbose": true}"#, Ok("m")),
            (r#"{"model": null, "name": "m"}"#, Ok("m")),
            (r#"{"name": 7}"#, Err(Some("model"))),
            ("{}", Err(Some("model"))),
            ("[]", Err(None)),
        ] {
            let mut decoded = JsonScan::new(body.as_bytes()).unwrap().decode(body.as_bytes()).unwrap();
            let found = name(&mut decoded).map_err(|error| error.param);
            assert_eq!(
                found,
                expected.map(str::to_owned).map_err(|param| param.map(str::to_owned)),
                "{body}"
            );
        }
    }

    #[test]
    fn an_entry_is_stable_and_has_a_time() {
        let model = |id: &str, created| ModelSummary {
            id: id.into(),
            created,
            context_tokens: 8,
            ready: true,
            message: String::new(),
            deployments: vec!["default/m".into()],
        };
        let first = entry(&model("m", 1_700_000_000));
        assert_eq!(first["modified_at"], "2023-11-14T22:13:20Z");
        assert_eq!(first["digest"].as_str().map(str::len), Some(64));
        assert_eq!(first["digest"], entry(&model("m", 0))["digest"]);
        assert_ne!(first["digest"], entry(&model("n", 0))["digest"]);
        assert_eq!(entry(&model("m", i64::MAX))["modified_at"], "1970-01-01T00:00:00Z");
        assert!(EXPIRES_AT.parse::<Timestamp>().is_ok());
    }
}
