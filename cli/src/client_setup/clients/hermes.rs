//! Hermes Agent: OpenAI's dialect, as its custom endpoint. It looks first which server there is.

use serde_json::json;

use crate::client_setup::endpoint::GatewayEndpoint;
use crate::client_setup::merge::FileFormat;
use crate::client_setup::requests::{self, get};
use crate::client_setup::setup::{ClientProgram, ClientSetup, ConfigPatch, ExpectedReply};

/// Hermes Agent.
pub const CLIENT: ClientProgram = ClientProgram {
    name: "hermes",
    title: "Hermes Agent",
    evidence: "Hermes Agent 0.19.0 was run against Russet with this file",
    wants_claude_names: false,
    setup,
};

/// The smallest context that it accepts.
const MIN_CONTEXT_TOKENS: u64 = 64_000;

fn setup(endpoint: &GatewayEndpoint) -> ClientSetup {
    let mut model = json!({
        "default": endpoint.model.name, "provider": "custom", "base_url": endpoint.openai_url(),
    });
    let mut steps = Vec::new();
    if let Some(key) = &endpoint.key {
        model["api_key"] = key.as_str().into();
    }
    if let Some(tokens) = endpoint.model.context_tokens {
        model["context_length"] = tokens.into();
        if tokens < MIN_CONTEXT_TOKENS {
            steps.push(format!(
                "Hermes refuses models with a context below {MIN_CONTEXT_TOKENS} tokens, and {} has {tokens}: raise \
                 contextTokens of its deployment, or choose another with --model.",
                endpoint.model.name
            ));
        }
    }
    ClientSetup {
        files: vec![ConfigPatch {
            paths: &[".hermes/config.yaml"],
            format: FileFormat::Yaml,
            defaults: json!({}),
            setting: json!({"model": model}),
            foreign_key: None,
        }],
        variables: Vec::new(),
        steps,
        requests: vec![
            // Any 200 would make it take the gateway for LM Studio.
            get("/api/v1/models", ExpectedReply::Status(404)),
            get("/api/tags", ExpectedReply::ModelList("models", "name")),
            requests::agent_chat(&endpoint.model.name),
        ],
    }
}
