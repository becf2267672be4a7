//! Continue: OpenAI's dialect, as a model of its `config.yaml`. (`continue` is a word of Rust.)

use serde_json::json;

use crate::client_setup::endpoint::GatewayEndpoint;
use crate::client_setup::merge::FileFormat;
use crate::client_setup::requests;
use crate::client_setup::setup::{ClientProgram, ClientSetup, ConfigPatch};

/// Continue.
pub const CLIENT: ClientProgram = ClientProgram {
    name: "continue",
    title: "Continue",
    evidence: "never run against Russet; its command line 1.5.47 was run with these settings against a stand-in",
    wants_claude_names: false,
    setup,
};

fn setup(endpoint: &GatewayEndpoint) -> ClientSetup {
    let name = &endpoint.model.name;
    let mut model = json!({
        "name": format!("{name} (Russet)"), "provider": "openai", "model": name,
        "apiBase": endpoint.openai_url(), "apiKey": endpoint.key_or_placeholder(),
        "roles": ["chat", "edit", "apply"],
    });
    if let Some(tokens) = endpoint.model.context_tokens {
        model["defaultCompletionOptions"] = json!({"contextLength": tokens});
    }
    ClientSetup {
        files: vec![ConfigPatch {
            paths: &[".continue/config.yaml"],
            format: FileFormat::Yaml,
            defaults: json!({"name": "Local", "version": "0.0.1", "schema": "v1"}),
            setting: json!({"models": [model]}),
            foreign_key: None,
        }],
        steps: vec![
            "A config.yaml takes the place of an older config.json in the same folder; Continue then reads that no \
             more."
                .to_owned(),
        ],
        requests: vec![requests::agent_chat(name)],
        ..ClientSetup::default()
    }
}
