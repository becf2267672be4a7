//! Codex: OpenAI's Responses API, set up as a provider of its `config.toml`.

use serde_json::{Value, json};

use crate::client_setup::endpoint::GatewayEndpoint;
use crate::client_setup::merge::FileFormat;
use crate::client_setup::requests::{self, MAX_TOKENS, PROMPT};
use crate::client_setup::setup::{ClientProgram, ClientSetup, ConfigPatch};

/// Codex.
pub const CLIENT: ClientProgram = ClientProgram {
    name: "codex",
    title: "Codex",
    evidence: "Codex 0.171.0 was run against Russet with this file",
    wants_claude_names: false,
    setup,
};

/// The variable that Codex reads the key from; the name that `russet` has for it.
const KEY_VARIABLE: &str = "RUSSET_KEY";

fn setup(endpoint: &GatewayEndpoint) -> ClientSetup {
    let model = &endpoint.model.name;
    let mut provider = json!({"name": "Russet", "base_url": endpoint.openai_url(), "wire_api": "responses"});
    let mut variables = Vec::new();
    if let Some(key) = &endpoint.key {
        provider["env_key"] = KEY_VARIABLE.into();
        variables.push((KEY_VARIABLE, key.clone()));
    }
    let mut setting = json!({"model": model, "model_provider": "russet"});
    if let Some(tokens) = endpoint.model.context_tokens {
        setting["model_context_window"] = tokens.into();
    }
    setting["model_providers"] = json!({"russet": provider});
    ClientSetup {
        files: vec![ConfigPatch {
            paths: &[".codex/config.toml"],
            format: FileFormat::Toml,
            defaults: json!({}),
            setting,
            foreign_key: None,
        }],
        variables,
        steps: vec![
            "Codex warns that it does not know the model, and takes its own instructions.".to_owned(),
        ],
        requests: vec![requests::stream("/v1/responses", &[], response(model))],
    }
}

fn response(model: &str) -> Value {
    let mut function = requests::tool();
    function["type"] = "function".into();
    json!({
        "model": model, "stream": true, "store": false, "max_output_tokens": MAX_TOKENS,
        "instructions": "You are a coding agent.",
        "input": [{
            "type": "message", "role": "user", "content": [{"type": "input_text", "text": PROMPT}],
        }],
        // Of the types that it sends some reach no model; the gateway leaves them out.
        "tools": [
            function,
            {"type": "custom", "name": "apply_patch", "description": "Edits files."},
            {"type": "web_search"},
        ],
        "tool_choice": "auto", "parallel_tool_calls": true,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "russet-check",
    })
}
