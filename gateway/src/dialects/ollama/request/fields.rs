//! Every field of Ollama's requests, and what becomes of it. docs/gateway.md has these tables; a field that is in none is
//! left out and listed in a header.

use serde_json::Value;

use crate::dialects::field_table::Treatment::{Honoured, Ignored, Refused};
use crate::dialects::field_table::{FieldGroup, find, group, is_nothing, is_off, is_one, is_true};
use crate::dialects::values::whole;

/// In every request for an answer or vectors.
const KEEP_ALIVE: FieldGroup = group(
    "how long the model stays loaded, where its deployment scales to zero; elsewhere listed",
    Honoured,
    &["keep_alive"],
);

/// In every request that generates.
const SHARED: &[FieldGroup] = &[
    group(
        "Ollama's",
        Honoured,
        &["model", "stream", "format", "options", "think", "logprobs", "top_logprobs", "truncate"],
    ),
    KEEP_ALIVE,
    group("a response ends where the context does", Ignored, &["shift"]),
];

/// In a chat besides.
const CHAT: &[FieldGroup] =
    &[group("Ollama's", Honoured, &["messages", "tools"]), group("OpenAI's", Honoured, &["tool_choice"])];

/// In a request for a text besides.
const GENERATE: &[FieldGroup] = &[
    group("Ollama's", Honoured, &["prompt", "system", "raw"]),
    group("a text after the answer", Refused(is_nothing), &["suffix"]),
    group("the model has its own", Refused(is_nothing), &["template"]),
    group("models see no images yet", Refused(is_nothing), &["images"]),
    group("tokens of an earlier answer: send a chat with its messages", Refused(is_nothing), &["context"]),
    group("generated images", Refused(is_off), &["width", "height", "steps"]),
];

/// In a request for vectors.
const EMBED: &[FieldGroup] = &[
    group("Ollama's", Honoured, &["model", "input", "truncate", "dimensions"]),
    KEEP_ALIVE,
    group("about sampling and hardware", Ignored, &["options"]),
];

/// In a request for one vector.
const EMBEDDINGS: &[FieldGroup] = &[
    group("Ollama's", Honoured, &["model", "prompt"]),
    KEEP_ALIVE,
    group("about sampling and hardware", Ignored, &["options"]),
];

/// In `options`.
const OPTIONS: &[FieldGroup] = &[
    group(
        "sampling and length",
        Honoured,
        &[
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "typical_p",
            "repeat_penalty",
            "presence_penalty",
            "frequency_penalty",
            "seed",
            "stop",
            "num_predict",
        ],
    ),
    group(
        "sampling, as in an OpenAI request",
        Honoured,
        &[
            "repetition_penalty",
            "logit_bias",
            "min_tokens",
            "xtc_probability",
            "xtc_threshold",
            "dry_multiplier",
            "dry_base",
            "dry_allowed_length",
            "dry_penalty_last_n",
            "dry_sequence_breakers",
        ],
    ),
    group(
        "the tokens that penalties count: -1, which is all of them; another number is a 400 beside a penalty",
        Honoured,
        &["repeat_last_n"],
    ),
    group("other sampling: 0 changes nothing", Refused(is_off), &["mirostat"]),
    group("other sampling: 1 changes nothing", Refused(is_one), &["tfs_z"]),
    group("penalties count line breaks: `true` changes nothing", Refused(is_true), &["penalize_newline"]),
    group(
        "the first tokens of a prompt that is cut: up to 4, Ollama's number, change nothing",
        Refused(is_usual_keep),
        &["num_keep"],
    ),
    group(
        "positions, which the model's configuration says: 0 changes nothing",
        Refused(is_off),
        &["rope_frequency_base", "rope_frequency_scale"],
    ),
    group("of mirostat, which is off", Ignored, &["mirostat_tau", "mirostat_eta"]),
    group(
        "about memory and hardware, which the deployment says",
        Ignored,
        &[
            "num_ctx",
            "num_batch",
            "num_gpu",
            "main_gpu",
            "num_thread",
            "num_gqa",
            "low_vram",
            "f16_kv",
            "use_mmap",
            "use_mlock",
            "numa",
            "vocab_only",
            "logits_all",
            "embedding_only",
        ],
    ),
];

/// Turns are left out whole, so the first tokens of a prompt stay anyway.
fn is_usual_keep(value: &Value) -> bool {
    whole(value).is_some_and(|tokens| (0..=4).contains(&tokens))
}

/// The group of a field of a chat.
pub(super) fn chat_group_of(name: &str) -> Option<&'static FieldGroup> {
    find(CHAT, name).or_else(|| find(SHARED, name))
}

/// The group of a field of a request for a text.
pub(super) fn generate_group_of(name: &str) -> Option<&'static FieldGroup> {
    find(GENERATE, name).or_else(|| find(SHARED, name))
}

/// The group of a field of a request for vectors.
pub(in crate::dialects::ollama) fn embed_group_of(name: &str) -> Option<&'static FieldGroup> {
    find(EMBED, name)
}

/// The group of a field of a request for one vector.
pub(in crate::dialects::ollama) fn embeddings_group_of(name: &str) -> Option<&'static FieldGroup> {
    find(EMBEDDINGS, name)
}

/// The group of an option.
pub(super) fn option_group_of(name: &str) -> Option<&'static FieldGroup> {
    find(OPTIONS, name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialects::field_table::tests::{check_groups, check_page, rows};

    #[test]
    fn the_page_of_the_gateway_has_the_fields_of_ollama() {
        let tables = [
            ("In a request to `/api/chat` or `/api/generate`:", SHARED),
            ("To `/api/chat` alone:", CHAT),
            ("To `/api/generate` alone:", GENERATE),
            ("To `/api/embed`:", EMBED),
            ("To `/api/embeddings`:", EMBEDDINGS),
            ("In `options`:", OPTIONS),
        ];
        let table = |(sentence, fields)| {
            check_groups(fields);
            format!("{sentence}\n\n{}", rows(fields))
        };
        check_page("ollama/request", &tables.map(table).join("\n"));
    }
}
