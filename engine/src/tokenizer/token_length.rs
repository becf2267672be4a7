//! Token length: how much text one token can stand for, and so the least number of tokens of a text. Where the
//! tokenizer may drop text, or fuse any amount of it into one token, there is no bound.

use serde_json::Value;
use tokenizers::Tokenizer;
use tokenizers::models::ModelWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::steps;

/// Unicode normalisation makes a text shorter by at most this: U+1FBE with two marks, 7 bytes, becomes U+0390, 2
/// bytes; a mathematical letter of 4 bytes becomes an ASCII letter.
const UNICODE_SHRINK: u64 = 4;

/// Bytes that a normalizer puts before an added token that is normalized too.
const PREPENDED: usize = '▁'.len_utf8();

/// Most text per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TokenLength {
    /// Bytes of text of the longest token.
    max_bytes: u64,
    /// An added token takes any amount of whitespace with it.
    strips_whitespace: bool,
}

impl TokenLength {
    /// The longest token of a tokenizer; `None` where nothing bounds it.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let shrink = steps::normalizers(tokenizer)
            .iter()
            .map(shrink)
            .try_fold(1u64, |all, one| all.checked_mul(one?))?;
        let pre_tokenizers = steps::pre_tokenizers(tokenizer);
        if !pre_tokenizers.iter().all(keeps_all_text) {
            return None;
        }
        let byte_level = |steps: &[Value]| steps.iter().any(|step| steps::kind(step) == "ByteLevel");
        let byte_level = byte_level(&pre_tokenizers) || byte_level(&steps::normalizers(tokenizer));
        let known = |token: &str| tokenizer.token_to_id(token).is_some();
        let ModelWrapper::BPE(model) = tokenizer.get_model() else { return None };
        // A byte without a token of its own is dropped, or fused with its neighbours into one unknown token.
        let bytes_known = if byte_level {
            ByteLevel::alphabet().iter().all(|character| known(&character.to_string()))
        } else {
            model.byte_fallback && (0..=u8::MAX).all(|byte| known(&format!("<{byte:#04X}>")))
        };
        if !bytes_known {
            return None;
        }
        let added = tokenizer.get_added_tokens_decoder();
        // In a byte-level vocabulary every character stands for one byte.
        let vocabulary = tokenizer.get_vocab(false);
        let vocabulary =
            vocabulary.keys().map(|token| if byte_level { token.chars().count() } else { token.len() });
        let longest = vocabulary
            .chain(
                added
                    .values()
                    .map(|token| token.content.len() + if token.normalized { PREPENDED } else { 0 }),
            )
            .max()?;
        Some(Self {
            max_bytes: (longest as u64).checked_mul(shrink).filter(|&bytes| bytes > 0)?,
            strips_whitespace: added.values().any(|token| token.lstrip || token.rstrip),
        })
    }

    /// No tokenisation of `text` has fewer tokens.
    pub(super) fn min_tokens(&self, text: &str) -> u64 {
        let bytes =
            if self.strips_whitespace { text.split_whitespace().map(str::len).sum() } else { text.len() };
        (bytes as u64).div_ceil(self.max_bytes)
    }
}

/// By how much a normalizer may shorten text; `None` where it may drop any amount.
fn shrink(normalizer: &Value) -> Option<u64> {
    match steps::kind(normalizer) {
        "NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase" => Some(UNICODE_SHRINK),
        "Prepend" | "ByteLevel" => Some(1),
        "Replace" => {
            let pattern = normalizer["pattern"]["String"].as_str()?.len() as u64;
            let content = normalizer["content"].as_str()?.len() as u64;
            (content > 0).then(|| pattern.div_ceil(content).max(1))
        }
        _ => None,
    }
}

/// Whether all text reaches the model.
fn keeps_all_text(pre_tokenizer: &Value) -> bool {
    match steps::kind(pre_tokenizer) {
        "ByteLevel" | "Digits" | "Metaspace" => true,
        "Split" => pre_tokenizer["behavior"] != "Removed" || steps::splits_into_words(pre_tokenizer),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::encoder::tests::tokenizer;
    use serde_json::json;

    #[test]
    fn token_length_is_bounded_only_where_no_text_is_lost() {
        let added = |lstrip| {
            json!({"id": 1024, "content": "<|long|>".repeat(5), "single_word": false,
            "lstrip": lstrip, "rstrip": false, "normalized": false, "special": true})
        };
        let bytes = |max_bytes| Some(TokenLength { max_bytes, strips_whitespace: false });
        for (change, expected) in [
            // " ModelDeployment"
            (json!({}), bytes(16)),
            (json!({"normalizer": {"type": "NFC"}}), bytes(64)),
            (json!({"added_tokens": [added(false)]}), bytes(40)),
            (
                json!({"added_tokens": [added(true)]}),
                Some(TokenLength { max_bytes: 40, strips_whitespace: true }),
            ),
            (
                json!({"normalizer": {"type": "Replace", "pattern": {"String": "abcd"}, "content": "x"}}),
                bytes(64),
            ),
            (json!({"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": ""}}), None),
            (json!({"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}}), None),
            (
                json!({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "StripAccents"}]}}),
                None,
            ),
            (json!({"pre_tokenizer": {"type": "WhitespaceSplit"}}), None),
            // Without a step to bytes, characters that the vocabulary lacks are dropped.
            (json!({"pre_tokenizer": null}), None),
        ] {
            assert_eq!(TokenLength::of(&tokenizer(&change)), expected, "{change}");
        }
    }

    #[test]
    fn whitespace_is_not_counted_where_a_token_strips_it() {
        for (strips_whitespace, expected) in [(false, 4), (true, 2)] {
            assert_eq!(TokenLength { max_bytes: 3, strips_whitespace }.min_tokens("abc \n  def"), expected);
        }
    }
}
