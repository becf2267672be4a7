//! Every field of a request that clients are known to send: honoured, refused because it would change the response, or
//! without effect. docs/gateway.md has this table; a field that is not in it is left out and listed in a header.

use crate::dialects::field_table::Treatment::{Honoured, Ignored, Refused};
use crate::dialects::field_table::{FieldGroup, find, group, is_nothing, is_one};

/// The fields.
const FIELDS: &[FieldGroup] = &[
    group(
        "Anthropic's",
        Honoured,
        &[
            "model",
            "messages",
            "system",
            "max_tokens",
            "stop_sequences",
            "stream",
            "temperature",
            "top_p",
            "top_k",
            "tools",
            "tool_choice",
            "thinking",
            "output_config",
            "output_format",
            "service_tier",
        ],
    ),
    group("prefixes are cached without it, wherever it stands", Honoured, &["cache_control"]),
    group("what runs on Anthropic's servers", Refused(is_nothing), &["container", "mcp_servers"]),
    group(
        "names of OpenAI's API",
        Refused(is_nothing),
        &["stop", "max_completion_tokens", "response_format", "functions", "reasoning_effort"],
    ),
    group("the same: 1 changes nothing", Refused(is_one), &["n"]),
    group("Anthropic's older API", Refused(is_nothing), &["prompt", "max_tokens_to_sample"]),
    group(
        "about users, places, versions and history that is cut on servers",
        Ignored,
        &[
            "metadata",
            "context_management",
            "inference_geo",
            "speed",
            "betas",
            "anthropic_beta",
            "anthropic_version",
        ],
    ),
];

/// The group of a field; `None` for one that is not in the table.
pub(super) fn group_of(name: &str) -> Option<&'static FieldGroup> {
    find(FIELDS, name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialects::field_table::tests::{check_groups, check_page, rows};

    #[test]
    fn a_field_of_messages_is_in_one_group() {
        check_groups(FIELDS);
    }

    #[test]
    fn the_page_of_the_gateway_has_the_fields_of_messages() {
        check_page("anthropic/request", &rows(FIELDS));
    }
}
