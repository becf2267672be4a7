//! Zed: OpenAI's dialect, as a compatible provider of its settings. It keeps keys in the system's keychain.

use serde_json::{Value, json};

use crate::client_setup::endpoint::{GatewayEndpoint, ListedModel};
use crate::client_setup::merge::FileFormat;
use crate::client_setup::requests;
use crate::client_setup::setup::{ClientProgram, ClientSetup, ConfigPatch};

/// Zed.
pub const CLIENT: ClientProgram = ClientProgram {
    name: "zed",
    title: "Zed",
    evidence: "never run against Russet; from its documentation",
    wants_claude_names: false,
    setup,
};

/// The context of a model that does not say its own: the setting has to be there.
const DEFAULT_CONTEXT_TOKENS: u64 = 8_192;

fn setup(endpoint: &GatewayEndpoint) -> ClientSetup {
    let models: Vec<Value> = endpoint.models.iter().map(entry).collect();
    ClientSetup {
        files: vec![ConfigPatch {
            paths: &[".config/zed/settings.json"],
            format: FileFormat::Json,
            defaults: json!({}),
            setting: json!({
                "language_models": {"openai_compatible": {"russet": {
                    "api_url": endpoint.openai_url(), "available_models": models,
                }}},
                "agent": {"default_model": {"provider": "russet", "model": endpoint.model.name}},
            }),
            foreign_key: None,
        }],
        // Its name is that of the provider; Zed takes a provider without a key for one that is not set up.
        variables: vec![("RUSSET_API_KEY", endpoint.key_or_placeholder())],
        steps: vec![
            "A Zed that is not started from this shell does not see the variable: type the key in Settings → AI → LLM \
             Providers → russet, and Zed stores it in the keychain."
                .to_owned(),
        ],
        requests: vec![requests::agent_chat(&endpoint.model.name)],
    }
}

fn entry(model: &ListedModel) -> Value {
    json!({
        "name": model.name,
        "max_tokens": model.context_tokens.unwrap_or(DEFAULT_CONTEXT_TOKENS),
        "capabilities": {"tools": true, "images": false, "interleaved_reasoning": true},
    })
}
