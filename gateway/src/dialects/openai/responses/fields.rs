//! What is otherwise in a request for a response than in one of a chat. docs/gateway.md has this table.

use crate::dialects::field_table::Treatment::{Honoured, Ignored, Refused};
use crate::dialects::field_table::{FieldGroup, find, group, is_nothing, is_off, is_one, never};
use crate::dialects::openai::request::fields as chat;

/// The fields; the others are those of a chat.
pub(super) const FIELDS: &[FieldGroup] = &[
    group(
        "OpenAI's",
        Honoured,
        &[
            "input",
            "instructions",
            "max_output_tokens",
            "reasoning",
            "text",
            "include",
            "truncation",
            "metadata",
            "store",
        ],
    ),
    group(
        "of responses that are kept; without a store of responses refused by name",
        Honoured,
        &["previous_response_id", "background"],
    ),
    group("neither is kept here", Refused(is_nothing), &["conversation", "prompt"]),
    group("the conversation is the `input`", Refused(is_nothing), &["messages"]),
    group("`text.format` says what the text has to be", Refused(never), &["response_format"]),
    group("`include` asks for log-probabilities", Refused(is_off), &["logprobs"]),
    group("other names of `max_output_tokens`", Refused(never), &["max_tokens", "max_completion_tokens"]),
    group("a request has one response: 1 changes nothing", Refused(is_one), &["n"]),
    group(
        "tools that OpenAI runs itself, caches, moderation, Codex's bookkeeping",
        Ignored,
        &[
            "max_tool_calls",
            "stream_options",
            "prompt_cache_options",
            "context_management",
            "moderation",
            "client_metadata",
        ],
    ),
];

/// The group of a field; `None` for one that is in no table.
pub(super) fn group_of(name: &str) -> Option<&'static FieldGroup> {
    find(FIELDS, name).or_else(|| chat::group_of(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialects::field_table::tests::{check_page, rows};

    #[test]
    fn the_page_of_the_gateway_has_the_fields_of_responses() {
        check_page("openai/responses", &rows(FIELDS));
    }
}
