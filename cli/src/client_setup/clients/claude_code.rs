//! Claude Code: Anthropic's dialect, set up by variables in its settings.

use http::Method;
use serde_json::{Value, json};

use crate::client_setup::endpoint::GatewayEndpoint;
use crate::client_setup::merge::FileFormat;
use crate::client_setup::requests::{self, MAX_TOKENS, PROMPT};
use crate::client_setup::setup::{ClientProgram, ClientSetup, ConfigPatch, ExpectedReply, FirstRequest};

/// Claude Code.
pub const CLIENT: ClientProgram = ClientProgram {
    name: "claude-code",
    title: "Claude Code",
    evidence: "Claude Code 2.1.332 was run against Russet with this file",
    wants_claude_names: true,
    setup,
};

/// The header that makes a list of models Anthropic's.
const VERSION: (&str, &str) = ("anthropic-version", "2023-06-01");

fn setup(endpoint: &GatewayEndpoint) -> ClientSetup {
    let model = &endpoint.model.name;
    let mut variables = json!({
        "ANTHROPIC_BASE_URL": endpoint.url,
        "ANTHROPIC_AUTH_TOKEN": endpoint.key_or_placeholder(),
        "ANTHROPIC_MODEL": model,
        // Its background tasks and the names `opus`, `sonnet` and `haiku`.
        "ANTHROPIC_DEFAULT_OPUS_MODEL": model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
        // Names of models that begin with `claude` then appear in its list.
        "CLAUDE_CODE_ENABLE_GATEWAY_MODEL_DISCOVERY": "1",
    });
    if let Some(tokens) = endpoint.model.context_tokens {
        // It takes a model that it does not know for one of 200,000 tokens, and compacts too late.
        variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = tokens.to_string().into();
    }
    let mut steps = vec![
        "Unset ANTHROPIC_API_KEY where it is set: Claude Code sends it beside the key above. `/status` in Claude \
         Code shows the URL and the key in use."
            .to_owned(),
    ];
    if endpoint.model.context_tokens.is_some_and(|tokens| tokens < 32_768) {
        steps.push(
            "Its own instructions and tools take some 20,000 tokens: a context below 32,768 leaves little room."
                .to_owned(),
        );
    }
    ClientSetup {
        files: vec![ConfigPatch {
            paths: &[".claude/settings.json"],
            format: FileFormat::Json,
            defaults: json!({}),
            setting: json!({"env": variables}),
            foreign_key: None,
        }],
        variables: Vec::new(),
        steps,
        requests: vec![
            FirstRequest {
                method: Method::HEAD,
                path: "/",
                headers: &[],
                body: None,
                expected: ExpectedReply::Status(200),
            },
            FirstRequest {
                method: Method::GET,
                path: "/v1/models?limit=1000",
                headers: &[VERSION],
                body: None,
                expected: ExpectedReply::ModelList("data", "id"),
            },
            requests::stream(
                "/v1/messages?beta=true",
                &[VERSION, ("anthropic-beta", "claude-code-20250219,interleaved-thinking-2025-05-14")],
                message(model),
            ),
        ],
    }
}

fn message(model: &str) -> Value {
    let tool = requests::tool();
    json!({
        "model": model, "stream": true, "max_tokens": MAX_TOKENS,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197; cch=00000;"},
            {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
        "tools": [{
            "name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"],
        }],
        "metadata": {"user_id": "russet"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    })
}
