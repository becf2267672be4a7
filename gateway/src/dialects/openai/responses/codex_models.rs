//! The list of models as Codex asks for it, `GET /v1/models?client_version=…`: it reads `models` and not `data`.

use serde_json::{Value, json};

use crate::serving::ModelSummary;

/// Bytes of a tool's output that Codex keeps, its own default.
const MAX_TOOL_OUTPUT_BYTES: u32 = 10_000;

/// What Codex tells a model that it finds in this list. A list without it is no list for Codex (0.169), and an empty text
/// would leave the model without any.
const BASE_INSTRUCTIONS: &str = "You are a coding agent on the user's own machine. Work until the task is done. Read a file before you change it, keep changes small and in the style of the project, and run the checks that the project has. Use the tools that you are given, and never guess what a command would print. Leave changes that are not yours as they are, and ask before you delete or publish anything. At the end say in a few sentences what you did and what is left.";

/// Whether a query is Codex's.
pub(in crate::dialects::openai) fn is_asked_for(query: Option<&str>) -> bool {
    let names = query.unwrap_or_default().split('&').map(|pair| pair.split('=').next().unwrap_or_default());
    names.into_iter().any(|name| name == "client_version")
}

/// A model, with every field that Codex wants.
pub(in crate::dialects::openai) fn body((priority, model): (usize, &ModelSummary)) -> Value {
    let ModelSummary {
        id,
        created: _,
        context_tokens,
        ready: _,
        message,
        deployments: _,
        expires: _,
        files: _,
    } = model;
    json!({
        "slug": id,
        "display_name": id,
        "description": (!message.is_empty()).then_some(message),
        "base_instructions": BASE_INSTRUCTIONS,
        "supported_reasoning_levels": [],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": true,
        "priority": priority,
        "availability_nux": null,
        "upgrade": null,
        "supports_reasoning_summaries": true,
        "support_verbosity": false,
        "default_verbosity": null,
        "apply_patch_tool_type": null,
        "truncation_policy": {"mode": "bytes", "limit": MAX_TOOL_OUTPUT_BYTES},
        "supports_parallel_tool_calls": true,
        "context_window": context_tokens,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codex_is_known_by_its_version() {
        for (query, expected) in [
            (None, false),
            (Some(""), false),
            (Some("limit=3&version=client_version"), false),
            (Some("client_version=0.169.0"), true),
            (Some("limit=3&client_version"), true),
        ] {
            assert_eq!(is_asked_for(query), expected, "{query:?}");
        }
    }
}
