//! OpenCode: OpenAI's dialect by its own package for compatible servers.

use serde_json::{Map, Value, json};

use crate::client_setup::endpoint::{GatewayEndpoint, ListedModel};
use crate::client_setup::merge::FileFormat;
use crate::client_setup::requests;
use crate::client_setup::setup::{ClientProgram, ClientSetup, ConfigPatch};

/// OpenCode.
pub const CLIENT: ClientProgram = ClientProgram {
    name: "opencode",
    title: "OpenCode",
    evidence: "OpenCode 1.18.33 was run against Russet with this file, and by its documentation version 2 reads it too",
    wants_claude_names: false,
    setup,
};

/// Most tokens that it asks for in one answer.
const MAX_OUTPUT_TOKENS: u64 = 32_000;

fn setup(endpoint: &GatewayEndpoint) -> ClientSetup {
    let models: Map<String, Value> =
        endpoint.models.iter().map(|model| (model.name.clone(), entry(model))).collect();
    let mut options = json!({"baseURL": endpoint.openai_url()});
    if let Some(key) = &endpoint.key {
        options["apiKey"] = key.as_str().into();
    }
    ClientSetup {
        files: vec![ConfigPatch {
            paths: &[".config/opencode/opencode.json", ".config/opencode/opencode.jsonc"],
            format: FileFormat::Json,
            defaults: json!({"$schema": "https://opencode.ai/config.json"}),
            setting: json!({
                "model": format!("russet/{}", endpoint.model.name),
                "provider": {"russet": {
                    "npm": "@ai-sdk/openai-compatible", "name": "Russet", "options": options, "models": models,
                }},
            }),
            foreign_key: Some((
                "providers",
                "it has the form of OpenCode 2 (`providers`), which is not to be mixed with the form above; add the \
                 provider by hand",
            )),
        }],
        requests: vec![requests::agent_chat(&endpoint.model.name)],
        ..ClientSetup::default()
    }
}

fn entry(model: &ListedModel) -> Value {
    let mut entry = json!({"name": model.name});
    if let Some(tokens) = model.context_tokens {
        // Without a limit it never compacts. The answer is part of the context.
        entry["limit"] = json!({"context": tokens, "output": MAX_OUTPUT_TOKENS.min(tokens / 4)});
    }
    entry
}
