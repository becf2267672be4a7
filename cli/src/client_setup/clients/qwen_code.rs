//! Qwen Code: OpenAI's dialect, as a model of its provider `openai`.

use serde_json::json;

use crate::client_setup::endpoint::GatewayEndpoint;
use crate::client_setup::merge::FileFormat;
use crate::client_setup::requests;
use crate::client_setup::setup::{ClientProgram, ClientSetup, ConfigPatch};

/// Qwen Code.
pub const CLIENT: ClientProgram = ClientProgram {
    name: "qwen-code",
    title: "Qwen Code",
    evidence: "Qwen Code 0.24.4 was run against Russet with this file",
    wants_claude_names: false,
    setup,
};

/// The variable that the settings take the key from.
const KEY_VARIABLE: &str = "RUSSET_API_KEY";

fn setup(endpoint: &GatewayEndpoint) -> ClientSetup {
    let name = &endpoint.model.name;
    let mut model = json!({
        // By its name the entry is found again; models of other servers may have the same id.
        "id": name, "name": format!("{name} (Russet)"),
        "envKey": KEY_VARIABLE, "baseUrl": endpoint.openai_url(),
    });
    if let Some(tokens) = endpoint.model.context_tokens {
        model["generationConfig"] = json!({"contextWindowSize": tokens});
    }
    let mut env = serde_json::Map::new();
    env.insert(KEY_VARIABLE.to_owned(), endpoint.key_or_placeholder().into());
    ClientSetup {
        files: vec![ConfigPatch {
            paths: &[".qwen/settings.json"],
            format: FileFormat::Json,
            defaults: json!({}),
            setting: json!({
                "env": env,
                "modelProviders": {"openai": [model]},
                "security": {"auth": {"selectedType": "openai"}},
                "model": {"name": name},
            }),
            foreign_key: None,
        }],
        requests: vec![requests::agent_chat(name)],
        ..ClientSetup::default()
    }
}
