//! What clients read of models: `/api/tags`, `/api/ps` and `/api/show`. Answered from memory, because user interfaces wait
//! for it, with the models alone that the caller may ask. What an agent has not read yet is 0 or empty, as clients take it.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::{Extension, Json};
use jiff::Timestamp;
use russet_crds::{GenerationConfig, Task};
use serde_json::{Map, Value, json};

use crate::dialects::values::{self, JsonObject};
use crate::error::GatewayError;
use crate::json_body::JsonBody;
use crate::keys::Caller;
use crate::serving::{ApiState, ModelSummary, ServedFiles};

/// When a loaded model is unloaded that stays. Clients want a time: one that is far away, and near enough for dates in
/// every time zone and language.
const EXPIRES_AT: &str = "2200-01-01T00:00:00Z";
/// The architecture of a model whose headers are not read yet. Clients look up the context length by this word.
const UNKNOWN_ARCHITECTURE: &str = "unknown";

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
    let models = api.models(&caller);
    let models: Vec<Value> = models.iter().filter(|model| model.ready).map(loaded).collect();
    Json(json!({"models": models}))
}

/// A model in memory: what its groups have reserved, all of it where the engines compute.
fn loaded(model: &ModelSummary) -> Value {
    let mut entry = entry(model);
    let expires = model.expires.map(|expires| expires.to_string());
    entry["expires_at"] = expires.unwrap_or_else(|| EXPIRES_AT.to_owned()).into();
    entry["size"] = model.files.memory_bytes.into();
    entry["size_vram"] = model.files.memory_bytes.into();
    entry["context_length"] = model.context_tokens.into();
    entry
}

/// One model.
pub(super) fn show(
    mut body: JsonBody<'_>,
    api: &ApiState,
    caller: &Caller,
) -> Result<Response, GatewayError> {
    let model = api.model(&name(&mut body)?, caller)?;
    Ok(Json(shown(&model)).into_response())
}

fn shown(model: &ModelSummary) -> Value {
    json!({
        "license": "",
        "modelfile": "",
        "parameters": parameters(model.files.sampling),
        "template": "",
        "details": details(&model.files),
        "model_info": model_info(model),
        "capabilities": capabilities(&model.files),
        "modified_at": modified_at(model),
    })
}

/// The model that a request is about: `model`, or `name`, its older form.
pub(super) fn name(body: &mut JsonBody<'_>) -> Result<String, GatewayError> {
    name_in(values::fields(body)?)
}

/// The same of the fields of a request.
pub(super) fn name_in(mut fields: JsonObject) -> Result<String, GatewayError> {
    if let Some(name) = fields.remove("name")
        && !fields.contains_key("model")
    {
        fields.insert("model".into(), name);
    }
    values::model(&fields)
}

fn entry(model: &ModelSummary) -> Value {
    json!({
        "name": model.id,
        "model": model.id,
        "modified_at": modified_at(model),
        "size": model.files.headers.as_ref().map_or(0, |headers| headers.bytes),
        "digest": model.files.digest,
        "details": details(&model.files),
    })
}

fn details(files: &ServedFiles) -> Value {
    let headers = files.headers.as_ref();
    let family = headers.map_or("", |headers| headers.architecture.as_str());
    json!({
        "parent_model": "",
        "format": files.format,
        "family": family,
        "families": headers.map(|_| family).into_iter().collect::<Vec<_>>(),
        "parameter_size": headers.map_or_else(String::new, |headers| parameter_size(headers.parameters)),
        "quantization_level": files.quantization,
    })
}

/// The metadata of a GGUF file, of which clients read the context length by the name of the architecture. It is what the
/// deployment serves, not what the model was made for: a conversation of that length fits.
fn model_info(model: &ModelSummary) -> Value {
    let headers = model.files.headers.as_ref();
    let architecture = headers.map_or(UNKNOWN_ARCHITECTURE, |headers| headers.architecture.as_str());
    let mut info = Map::new();
    info.insert("general.architecture".into(), architecture.into());
    if let Some(headers) = headers {
        info.insert("general.parameter_count".into(), headers.parameters.into());
    }
    let mut number = |name: &str, number: u32| info.insert(format!("{architecture}.{name}"), number.into());
    number("context_length", model.context_tokens);
    if let Some(headers) = headers {
        number("block_count", headers.layers);
        number("embedding_length", headers.hidden_size);
        number("attention.head_count", headers.attention_heads);
        number("attention.head_count_kv", headers.key_value_heads);
        number("attention.key_length", headers.head_dim);
        number("vocab_size", headers.vocabulary);
    }
    info.into()
}

/// Whether a model thinks or calls tools is in its chat template, which engines have and gateways do not. A switch that a
/// template does not ask for has no effect, and tools that it does not tell of are a 400 that says so.
fn capabilities(files: &ServedFiles) -> &'static [&'static str] {
    match files.headers.as_ref().map(|headers| headers.task).unwrap_or_default() {
        Task::Generate | Task::Unknown => &["completion", "tools", "thinking"],
        Task::Embed => &["embedding"],
        Task::Rerank => &[],
    }
}

/// Sampling parameters of requests that name none, a line each, as in a Modelfile.
fn parameters(sampling: GenerationConfig) -> String {
    let GenerationConfig { temperature, top_p, top_k, min_p, repetition_penalty } = sampling;
    let lines = [
        ("temperature", temperature),
        ("top_p", top_p),
        ("top_k", top_k.map(|count| count as f64)),
        ("min_p", min_p),
        ("repeat_penalty", repetition_penalty),
    ];
    let lines = lines.into_iter().filter_map(|(name, value)| Some(format!("{name:<30} {}", value?)));
    lines.collect::<Vec<_>>().join("\n")
}

/// As Ollama writes it: `8B`, `7.2B`, `494.03M`.
fn parameter_size(parameters: u64) -> String {
    const UNITS: [(u64, usize, &str); 3] = [(1_000_000_000, 1, "B"), (1_000_000, 2, "M"), (1000, 2, "K")];
    match UNITS.into_iter().find(|(unit, ..)| parameters >= *unit) {
        Some((unit, _, name)) if parameters.is_multiple_of(unit) => format!("{}{name}", parameters / unit),
        Some((unit, digits, name)) => format!("{:.digits$}{name}", parameters as f64 / unit as f64),
        None => parameters.to_string(),
    }
}

/// In RFC 3339.
fn modified_at(model: &ModelSummary) -> String {
    Timestamp::from_second(model.created).unwrap_or_default().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json_body::JsonScan;
    use crate::routes::ModelHeaders;

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

    fn model(headers: Option<ModelHeaders>) -> ModelSummary {
        let sampling =
            GenerationConfig { temperature: Some(0.6), top_k: Some(20), ..GenerationConfig::default() };
        ModelSummary {
            id: "m".into(),
            created: 1_700_000_000,
            context_tokens: 8,
            ready: true,
            message: String::new(),
            deployments: vec!["default/m".into()],
            expires: None,
            files: ServedFiles {
                digest: "ab".repeat(32),
                format: "safetensors",
                quantization: "4bit".into(),
                headers,
                memory_bytes: 5_000,
                sampling,
            },
        }
    }

    fn headers(task: Task) -> ModelHeaders {
        ModelHeaders {
            architecture: "llama".into(),
            task,
            parameters: 494_032_768,
            bytes: 4_000,
            layers: 24,
            hidden_size: 896,
            attention_heads: 14,
            key_value_heads: 2,
            head_dim: 64,
            vocabulary: 151_936,
        }
    }

    #[test]
    fn sizes_and_details_are_those_of_the_files() {
        let model = model(Some(headers(Task::Generate)));
        let details = json!({
            "parent_model": "", "format": "safetensors", "family": "llama", "families": ["llama"],
            "parameter_size": "494.03M", "quantization_level": "4bit",
        });
        let expected = json!({
            "name": "m", "model": "m", "modified_at": "2023-11-14T22:13:20Z", "size": 4000,
            "digest": "ab".repeat(32), "details": details,
        });
        assert_eq!(entry(&model), expected);
        let loaded = loaded(&model);
        assert_eq!((&loaded["size"], &loaded["size_vram"]), (&json!(5000), &json!(5000)));
        assert!(EXPIRES_AT.parse::<Timestamp>().is_ok() && loaded["context_length"] == 8);
        let shown = shown(&model);
        assert_eq!(
            shown["parameters"],
            "temperature                    0.6\ntop_k                          20"
        );
        let info = json!({
            "general.architecture": "llama", "general.parameter_count": 494_032_768, "llama.context_length": 8,
            "llama.block_count": 24, "llama.embedding_length": 896, "llama.attention.head_count": 14,
            "llama.attention.head_count_kv": 2, "llama.attention.key_length": 64, "llama.vocab_size": 151_936,
        });
        assert_eq!((&shown["model_info"], &shown["details"]), (&info, &details));
    }

    #[test]
    fn what_no_agent_has_read_is_empty() {
        let mut model = model(None);
        model.files = ServedFiles::default();
        let (entry, shown) = (entry(&model), shown(&model));
        assert_eq!((&entry["size"], &shown["parameters"]), (&json!(0), &json!("")));
        let empty = json!({
            "parent_model": "", "format": "", "family": "", "families": [], "parameter_size": "",
            "quantization_level": "",
        });
        assert_eq!(entry["details"], empty);
        assert_eq!(
            shown["model_info"],
            json!({"general.architecture": "unknown", "unknown.context_length": 8})
        );
        model.created = i64::MAX;
        assert_eq!(modified_at(&model), "1970-01-01T00:00:00Z");
    }

    #[test]
    fn a_model_can_do_what_its_task_is() {
        for (task, expected) in [
            (Task::Generate, json!(["completion", "tools", "thinking"])),
            (Task::Embed, json!(["embedding"])),
            (Task::Rerank, json!([])),
        ] {
            assert_eq!(shown(&model(Some(headers(task))))["capabilities"], expected);
        }
    }

    #[test]
    fn parameters_are_counted_as_ollama_writes_them() {
        for (parameters, expected) in [
            (8_000_000_000, "8B"),
            (7_248_023_552, "7.2B"),
            (134_515_008, "134.52M"),
            (1_500, "1.50K"),
            (7, "7"),
        ] {
            assert_eq!(parameter_size(parameters), expected);
        }
    }
}
