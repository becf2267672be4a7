//! Every field of a request that clients are known to send: honoured, refused because it would change the response, or
//! without effect. docs/gateway.md has this table; a field that is not in it is left out and listed in a header.

use crate::dialects::field_table::Treatment::{Honoured, Ignored, Refused};
use crate::dialects::field_table::{
    FieldGroup, find, group, is_free, is_nothing, is_num_ctx_alone, is_off, is_one, is_refuse, is_text_alone,
    is_true, never,
};

/// The fields.
const FIELDS: &[FieldGroup] = &[
    group(
        "OpenAI's",
        Honoured,
        &[
            "model",
            "messages",
            "stream",
            "stream_options",
            "max_tokens",
            "max_completion_tokens",
            "temperature",
            "top_p",
            "seed",
            "stop",
            "n",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "reasoning_effort",
            "response_format",
            "logprobs",
            "top_logprobs",
            "service_tier",
        ],
    ),
    group("OpenRouter's: models that take the request where `model` cannot", Honoured, &["models"]),
    group(
        "sampling of vLLM, llama.cpp and LM Studio",
        Honoured,
        &[
            "top_k",
            "min_p",
            "repetition_penalty",
            "repeat_penalty",
            "typical_p",
            "xtc_probability",
            "xtc_threshold",
            "dry_multiplier",
            "dry_base",
            "dry_allowed_length",
            "dry_penalty_last_n",
            "dry_sequence_breakers",
            "min_tokens",
            "stop_token_ids",
            "ignore_eos",
        ],
    ),
    group(
        "templates and thinking",
        Honoured,
        &[
            "chat_template_kwargs",
            "enable_thinking",
            "thinking",
            "think",
            "reasoning",
            "thinking_budget",
            "thinking_budget_tokens",
            "thinking_token_budget",
            "add_generation_prompt",
            "continue_final_message",
        ],
    ),
    group(
        "conversations that are too long: tokens of vLLM, turns of ours",
        Honoured,
        &["truncate_prompt_tokens", "context_overflow"],
    ),
    group("log-probabilities of the prompt, as vLLM has them", Honoured, &["prompt_logprobs"]),
    group("scheduling of vLLM", Honoured, &["priority", "cache_salt"]),
    group("calls in OpenAI's older form", Refused(is_nothing), &["functions"]),
    group("the same: `none` and `auto` change nothing", Refused(is_free), &["function_call"]),
    group(
        "structured output of vLLM, llama.cpp and SGLang",
        Honoured,
        &[
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "json_schema",
            "regex",
        ],
    ),
    group(
        "structured output: GBNF of llama.cpp, EBNF of SGLang, Ollama's",
        Refused(is_nothing),
        &["grammar", "ebnf", "format", "structural_tag", "guided_whitespace_pattern"],
    ),
    group(
        "token ids and the like: `false` and 0 change nothing",
        Refused(is_off),
        &[
            "return_token_ids",
            "return_tokens_as_token_ids",
            "n_probs",
            "echo",
            "include_stop_str_in_output",
            "use_beam_search",
        ],
    ),
    group("special tokens in the text: `true` changes nothing", Refused(is_true), &["skip_special_tokens"]),
    group(
        "other names of `max_tokens`",
        Refused(never),
        &["max_new_tokens", "max_length", "min_length", "n_predict", "num_predict"],
    ),
    group(
        "other sampling: 0 changes nothing",
        Refused(is_off),
        &["mirostat", "no_repeat_ngram_size", "top_n_sigma", "dynatemp_range"],
    ),
    group(
        "other sampling: 1 changes nothing",
        Refused(is_one),
        &["length_penalty", "best_of", "top_a", "tfs_z"],
    ),
    group(
        "other sampling",
        Refused(is_nothing),
        &["temp", "bad_words", "allowed_token_ids", "logits_processors", "samplers"],
    ),
    group(
        "prompts in other forms",
        Refused(is_nothing),
        &["prompt", "system", "suffix", "documents", "chat_template", "images"],
    ),
    group("Ollama's options: `num_ctx` changes nothing", Refused(is_num_ctx_alone), &["options"]),
    group("models beside the model", Refused(is_nothing), &["adapters", "draft_model", "lora"]),
    group("sound: text alone changes nothing", Refused(is_text_alone), &["modalities"]),
    group("sound and search", Refused(is_nothing), &["audio", "web_search_options"]),
    group(
        "OpenAI's, about storage, caches and users",
        Ignored,
        &[
            "store",
            "metadata",
            "user",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prediction",
            "verbosity",
            "text_verbosity",
            "reasoning_summary",
            "include_reasoning",
        ],
    ),
    group(
        "llama.cpp's, LM Studio's and Ollama's, about slots and timing",
        Ignored,
        &[
            "cache_prompt",
            "id_slot",
            "slot_id",
            "timings_per_token",
            "return_progress",
            "post_sampling_probs",
            "ttl",
            "keep_alive",
            "num_ctx",
            "n_keep",
            "t_max_predict_ms",
            "reasoning_format",
            "parse_tool_calls",
            "repeat_last_n",
            "repetition_context_size",
        ],
    ),
    group(
        "vLLM's and LiteLLM's, about bookkeeping",
        Ignored,
        &[
            "request_id",
            "stream_include_usage",
            "spaces_between_special_tokens",
            "add_special_tokens",
            "kv_transfer_params",
            "vllm_xargs",
            "mm_processor_kwargs",
            "timeout",
            "drop_params",
            "caching",
            "litellm_call_id",
            "guided_decoding_backend",
        ],
    ),
    group(
        "Open WebUI's and Hermes Agent's, about conversations",
        Ignored,
        &[
            "chat_id",
            "session_id",
            "id",
            "background_tasks",
            "features",
            "variables",
            "model_item",
            "params",
            "tool_ids",
            "files",
            "extra_body",
            "tags",
            "title",
        ],
    ),
];

/// What is otherwise in a request for completions.
const COMPLETION_FIELDS: &[FieldGroup] = &[
    group("OpenAI's", Honoured, &["prompt", "echo", "best_of"]),
    group("a text after the answer", Refused(is_nothing), &["suffix"]),
    group("of conversations", Refused(is_nothing), &["messages", "tools"]),
    group("the same: `none` and `auto` change nothing", Refused(is_free), &["tool_choice"]),
    group("`logprobs` alone says how many are told", Refused(is_off), &["top_logprobs"]),
    group("turns that are left out: `refuse` changes nothing", Refused(is_refuse), &["context_overflow"]),
    group("tokens at the beginning: `true` changes nothing", Refused(is_true), &["add_special_tokens"]),
    group(
        "about a template, which there is none of",
        Ignored,
        &[
            "chat_template_kwargs",
            "enable_thinking",
            "thinking",
            "think",
            "reasoning",
            "reasoning_effort",
            "thinking_budget",
            "thinking_budget_tokens",
            "thinking_token_budget",
            "add_generation_prompt",
            "continue_final_message",
            "parallel_tool_calls",
        ],
    ),
];

/// The group of a field; `None` for one that is not in the table.
pub(in crate::dialects::openai) fn group_of(name: &str) -> Option<&'static FieldGroup> {
    find(FIELDS, name)
}

/// The group of a field in a request for completions.
pub(super) fn completion_group_of(name: &str) -> Option<&'static FieldGroup> {
    find(COMPLETION_FIELDS, name).or_else(|| group_of(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialects::field_table::tests::{check_groups, check_page, rows};

    #[test]
    fn a_field_is_in_one_group() {
        check_groups(FIELDS);
        check_groups(COMPLETION_FIELDS);
    }

    #[test]
    fn the_page_of_the_gateway_has_the_fields() {
        let completions = rows(COMPLETION_FIELDS);
        check_page(
            "openai/request",
            &format!("{}\nIn a request to `/v1/completions`:\n\n{completions}", rows(FIELDS)),
        );
    }
}
