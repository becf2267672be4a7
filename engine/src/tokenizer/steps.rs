//! The steps of a tokenizer before its model, as tokenizer.json describes them. What depends on them knows a few
//! kinds and treats every other one as unknown. Not here: running them.

use serde_json::Value;
use tokenizers::Tokenizer;

/// Regular expressions by which the families that are served split text into words: GPT-2, Llama 3, Qwen 2 and 3, and
/// Mistral's Tekken. None of them looks behind a match, and all of them match every character.
pub(super) const WORDS: [&str; 4] = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// The normalizers, in order.
pub(super) fn normalizers(tokenizer: &Tokenizer) -> Vec<Value> {
    flatten(serde_json::to_value(tokenizer.get_normalizer()).unwrap_or_default(), "normalizers")
}

/// The pre-tokenizers, in order.
pub(super) fn pre_tokenizers(tokenizer: &Tokenizer) -> Vec<Value> {
    flatten(serde_json::to_value(tokenizer.get_pre_tokenizer()).unwrap_or_default(), "pretokenizers")
}

/// The kind of a step.
pub(super) fn kind(step: &Value) -> &str {
    step["type"].as_str().unwrap_or_default()
}

/// Whether a `Split` divides text into the words of [`WORDS`] and drops nothing.
pub(super) fn splits_into_words(split: &Value) -> bool {
    let isolated = split["behavior"] == "Isolated" && split["invert"] == false;
    // What remains between matches is removed: nothing, as every character is part of a match.
    let matches = split["behavior"] == "Removed" && split["invert"] == true;
    (isolated || matches) && split["pattern"]["Regex"].as_str().is_some_and(|regex| WORDS.contains(&regex))
}

fn flatten(step: Value, field: &str) -> Vec<Value> {
    match step {
        Value::Null => Vec::new(),
        Value::Object(mut fields) if fields.get("type").is_some_and(|kind| kind == "Sequence") => {
            match fields.remove(field) {
                Some(Value::Array(steps)) => {
                    steps.into_iter().flat_map(|step| flatten(step, field)).collect()
                }
                other => vec![other.unwrap_or_default()],
            }
        }
        step => vec![step],
    }
}
