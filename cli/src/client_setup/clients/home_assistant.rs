//! Home Assistant: Ollama's dialect, by its Ollama integration. It is set up in its window alone.

use serde_json::json;

use crate::client_setup::endpoint::GatewayEndpoint;
use crate::client_setup::requests::{self, MAX_TOKENS, PROMPT, get};
use crate::client_setup::setup::{ClientProgram, ClientSetup, ExpectedReply};

/// Home Assistant.
pub const CLIENT: ClientProgram = ClientProgram {
    name: "home-assistant",
    title: "Home Assistant",
    evidence: "never run against Russet; from the sources of its Ollama integration",
    wants_claude_names: false,
    setup,
};

fn setup(endpoint: &GatewayEndpoint) -> ClientSetup {
    // Ollama's lists have models with a tag.
    let model = format!("{}:latest", endpoint.model.name);
    let key = endpoint.key.as_deref().unwrap_or("empty");
    let mut steps = vec![
        "Settings → Devices & services → Add integration → Ollama.".to_owned(),
        format!("URL: {}; API key: {key}.", endpoint.url),
        format!("Add a conversation agent: model {model}{}.", context_words(endpoint)),
        "To control the house, let the agent use Assist; models that call tools well answer best.".to_owned(),
    ];
    if endpoint.is_loopback() {
        steps.push(
            "127.0.0.1 is Home Assistant's own machine. If it runs elsewhere, open the gateway with --gateway-listen, \
             create a key, and give this command that URL and key. Home Assistant has to trust the certificate: use \
             one of your own, or a reverse proxy (docs/reverse-proxies.md)."
                .to_owned(),
        );
    }
    let tool = json!([{"type": "function", "function": requests::tool()}]);
    ClientSetup {
        steps,
        requests: vec![
            get("/api/tags", ExpectedReply::ModelList("models", "name")),
            requests::stream(
                "/api/chat",
                &[],
                json!({
                    "model": model, "stream": true, "keep_alive": "-1s", "tools": tool,
                    "options": {"num_ctx": endpoint.model.context_tokens.unwrap_or(8192), "num_predict": MAX_TOKENS},
                    "messages": [
                        {"role": "system", "content": "You are a voice assistant."},
                        {"role": "user", "content": PROMPT},
                    ],
                }),
            ),
        ],
        ..ClientSetup::default()
    }
}

fn context_words(endpoint: &GatewayEndpoint) -> String {
    let words = |tokens| format!("; context window size {tokens} (Russet's own is that of the deployment)");
    endpoint.model.context_tokens.map_or_else(String::new, words)
}
