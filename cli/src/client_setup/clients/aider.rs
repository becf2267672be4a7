//! Aider: OpenAI's dialect through LiteLLM, which takes the context of a model from a file.

use serde_json::{Map, json};

use crate::client_setup::endpoint::GatewayEndpoint;
use crate::client_setup::merge::FileFormat;
use crate::client_setup::requests;
use crate::client_setup::setup::{ClientProgram, ClientSetup, ConfigPatch};

/// Aider.
pub const CLIENT: ClientProgram = ClientProgram {
    name: "aider",
    title: "Aider",
    evidence: "Aider 0.86.2 was run against Russet with these files",
    wants_claude_names: false,
    setup,
};

fn setup(endpoint: &GatewayEndpoint) -> ClientSetup {
    // The prefix is LiteLLM's name of the dialect.
    let name = format!("openai/{}", endpoint.model.name);
    let mut files = vec![ConfigPatch {
        paths: &[".aider.conf.yml"],
        format: FileFormat::Yaml,
        defaults: json!({}),
        setting: json!({
            "model": name,
            "openai-api-base": endpoint.openai_url(),
            "openai-api-key": endpoint.key_or_placeholder(),
        }),
        foreign_key: None,
    }];
    if let Some(tokens) = endpoint.model.context_tokens {
        let mut metadata = Map::new();
        metadata.insert(
            name,
            json!({
                "max_input_tokens": tokens, "input_cost_per_token": 0, "output_cost_per_token": 0,
                "litellm_provider": "openai", "mode": "chat",
            }),
        );
        files.push(ConfigPatch {
            paths: &[".aider.model.metadata.json"],
            format: FileFormat::Json,
            defaults: json!({}),
            setting: metadata.into(),
            foreign_key: None,
        });
    }
    ClientSetup {
        files,
        steps: vec![
            "Files of the same names in a repository come after those of the home folder, and win."
                .to_owned(),
        ],
        requests: vec![requests::chat(&endpoint.model.name)],
        ..ClientSetup::default()
    }
}
