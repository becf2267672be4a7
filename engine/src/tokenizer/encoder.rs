//! Encoder: text to tokens, with work and memory bounded by the context instead of by the text. A text that is certainly
//! too long is refused before it is tokenised. Others are tokenised in pieces, and no further than to where the context
//! is full or the caller has left. Not here: templates.

use std::sync::Arc;

use tokenizers::Tokenizer;

use super::token_length::TokenLength;
use super::word_cuts::WordCuts;
use super::{PromptLimits, TokenizerError};

/// Bytes of a piece, where the text can be divided there. Small enough that a caller who leaves is noticed within
/// some ten milliseconds, large enough that a piece more costs nothing.
const PIECE_BYTES: usize = 32 << 10;
/// Bytes of the longest piece: what the tokenizer keeps of a piece is up to 200 times as large. Only text without
/// words, or a tokenizer whose words are not known, has pieces as long as this; at the usual four bytes a token it is a
/// context of 256k tokens.
pub(super) const MAX_PIECE_BYTES: usize = 1 << 20;

/// How many times longer than its prompt a conversation may be: templates leave out former reasoning.
const DROPPED_BY_TEMPLATES: u64 = 4;

/// A tokenizer with what is known about its tokens and words.
pub(super) struct Encoder {
    tokenizer: Arc<Tokenizer>,
    length: Option<TokenLength>,
    cuts: WordCuts,
}

impl Encoder {
    /// Looks at the vocabulary and the steps of a tokenizer.
    pub(super) fn new(tokenizer: Arc<Tokenizer>) -> Self {
        let (length, cuts) = (TokenLength::of(&tokenizer), WordCuts::of(&tokenizer));
        Self { tokenizer, length, cuts }
    }

    /// Refuses a conversation that certainly is far too long, before a template copies it.
    pub(super) fn check_conversation<'a>(
        &self,
        contents: impl Iterator<Item = &'a str>,
        limits: &PromptLimits<'_>,
    ) -> Result<(), TokenizerError> {
        let Some(length) = self.length else { return Ok(()) };
        let tokens: u64 = contents.map(|content| length.min_tokens(content)).sum();
        if tokens / DROPPED_BY_TEMPLATES < u64::from(limits.context_tokens) {
            return Ok(());
        }
        Err(TokenizerError::ContextLength { tokens, context_tokens: limits.context_tokens })
    }

    /// The tokens of `text`, the same as of the whole at once. A text that goes beyond the context by itself is refused
    /// unless it was tokenised at once, when the caller counts.
    pub(super) fn encode(&self, text: &str, limits: &PromptLimits<'_>) -> Result<Vec<u32>, TokenizerError> {
        self.encode_pieces(text, limits, PIECE_BYTES)
    }

    fn encode_pieces(
        &self,
        text: &str,
        limits: &PromptLimits<'_>,
        piece_bytes: usize,
    ) -> Result<Vec<u32>, TokenizerError> {
        let context = u64::from(limits.context_tokens);
        let too_long =
            |tokens| Err(TokenizerError::ContextLength { tokens, context_tokens: limits.context_tokens });
        let min_tokens = |text: &str| self.length.map_or(0, |length| length.min_tokens(text));
        let tokens = min_tokens(text);
        if tokens > context {
            return too_long(tokens);
        }
        let mut ids = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            if (limits.is_abandoned)() {
                return Err(TokenizerError::Abandoned);
            }
            let (piece, after) = self.cuts.divide(rest, piece_bytes);
            if piece.len() > MAX_PIECE_BYTES {
                let bytes = piece.len();
                return Err(match self.cuts {
                    WordCuts::Words => TokenizerError::LongWord { bytes },
                    WordCuts::Never => TokenizerError::Undivided { bytes },
                });
            }
            let encoding = self.tokenizer.encode_fast(piece, false);
            let encoding = encoding.map_err(|error| TokenizerError::Encode(error.to_string()))?;
            ids.extend_from_slice(encoding.get_ids());
            rest = after;
            if ids.len() as u64 >= context && !rest.is_empty() {
                return too_long(ids.len() as u64 + min_tokens(rest));
            }
        }
        Ok(ids)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::cell::Cell;

    use rand::rngs::StdRng;
    use rand::{Rng as _, SeedableRng as _};
    use serde_json::{Value, json};

    use super::*;
    use crate::tokenizer::steps;

    /// The smoke model's tokenizer, a real byte-level vocabulary with merges, with other steps.
    pub fn tokenizer(change: &Value) -> Tokenizer {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/smoke/model/tokenizer.json");
        let mut json: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        json.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        json.to_string().parse().unwrap()
    }

    fn encoder(change: &Value) -> Encoder {
        Encoder::new(Arc::new(tokenizer(change)))
    }

    fn limits(context_tokens: u32) -> PromptLimits<'static> {
        PromptLimits { context_tokens, is_abandoned: &|| false }
    }

    fn split(regex: &str) -> Value {
        json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]})
    }

    /// Steps of the families that are served, and whether their texts can be divided.
    fn families() -> Vec<(Value, WordCuts)> {
        let regex = |index: usize| steps::WORDS[index];
        let byte_level = |prefix, regex| json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": regex});
        let added = |content: &str, single_word| {
            json!([{"id": 1024, "content": content, "single_word": single_word, "lstrip": true, "rstrip": false,
                "normalized": false, "special": true}])
        };
        vec![
            (json!({}), WordCuts::Words),
            (json!({"pre_tokenizer": byte_level(false, true)}), WordCuts::Words),
            (json!({"pre_tokenizer": split(regex(0))}), WordCuts::Words),
            (json!({"pre_tokenizer": split(regex(1))}), WordCuts::Words),
            (json!({"pre_tokenizer": split(regex(2)), "normalizer": {"type": "NFC"}}), WordCuts::Words),
            (json!({"pre_tokenizer": split(regex(3))}), WordCuts::Words),
            (
                json!({"pre_tokenizer": split(regex(1)), "added_tokens": added("<|user|>", false)}),
                WordCuts::Words,
            ),
            (
                json!({"pre_tokenizer": split(regex(1)), "added_tokens": added("<|a b|>", false)}),
                WordCuts::Never,
            ),
            (
                json!({"pre_tokenizer": split(regex(1)), "added_tokens": added(" word", true)}),
                WordCuts::Never,
            ),
            (json!({"pre_tokenizer": split(r"\w+ \w+|.")}), WordCuts::Never),
            (json!({"pre_tokenizer": byte_level(false, false)}), WordCuts::Never),
            (json!({"pre_tokenizer": byte_level(true, true)}), WordCuts::Never),
            (json!({"normalizer": {"type": "Lowercase"}}), WordCuts::Never),
        ]
    }

    /// Texts from what words, cuts and Unicode make hard.
    fn random_text(rng: &mut StdRng) -> String {
        const PARTS: [&str; 56] = [
            "a",
            "the",
            "Kubernetes",
            "x1",
            "12345",
            "7",
            " ",
            " ",
            " ",
            "  ",
            "   ",
            "\n",
            "\n\n",
            "\r\n",
            " \n",
            "\t",
            "\u{a0}",
            "\u{3000}",
            "'s",
            "'ll",
            "'",
            "’",
            ".",
            ",",
            "...",
            "!?",
            "/",
            "//\n",
            "-",
            "_",
            "(",
            "\"",
            "<|user|>",
            "<|end|>",
            "<|",
            "é",
            "e\u{301}",
            "\u{301}",
            "\u{308}",
            "ß",
            "Å",
            "\u{212a}",
            "日本",
            "語",
            "。",
            "、",
            "！",
            "かな",
            "カ",
            "한국",
            "\u{1112}\u{1161}",
            "🙂",
            "👩\u{200d}💻",
            "क\u{94d}",
            "\u{200b}",
            "Ⅷ",
        ];
        (0..rng.random_range(1..60)).map(|_| PARTS[rng.random_range(0..PARTS.len())]).collect()
    }

    #[test]
    fn pieces_have_the_tokens_of_the_whole_text() {
        let mut rng = StdRng::seed_from_u64(7);
        for (change, cuts) in families() {
            let encoder = encoder(&change);
            assert_eq!(encoder.cuts, cuts, "{change}");
            let mut divided = 0;
            for _ in 0..400 {
                let text = random_text(&mut rng);
                let whole = encoder.tokenizer.encode_fast(text.as_str(), false).unwrap();
                let piece_bytes = rng.random_range(1..24);
                let pieces = encoder.encode_pieces(&text, &limits(u32::MAX), piece_bytes).unwrap();
                assert_eq!(pieces, whole.get_ids(), "{change} {text:?} {piece_bytes}");
                let least = encoder.length.map_or(0, |length| length.min_tokens(&text));
                assert!(least <= pieces.len() as u64, "{change} {text:?}");
                divided += usize::from(!encoder.cuts.divide(&text, piece_bytes).1.is_empty());
            }
            assert_eq!(divided > 100, cuts == WordCuts::Words, "{divided} texts were divided: {change}");
        }
    }

    #[test]
    fn text_that_may_just_fill_the_context_is_left_to_the_caller() {
        let encoder = encoder(&json!({}));
        let text = "word ".repeat(32);
        let least = encoder.length.unwrap().min_tokens(&text) as u32;
        assert!(encoder.encode(&text, &limits(least)).is_ok());
        let too_long = encoder.encode(&text, &limits(least - 1));
        assert!(matches!(too_long, Err(TokenizerError::ContextLength { .. })), "{too_long:?}");
    }

    #[test]
    fn long_text_is_refused_before_it_is_tokenised() {
        let looks = Cell::new(0);
        let is_abandoned = || {
            looks.set(looks.get() + 1);
            false
        };
        let words = "word ".repeat(3_000_000);
        let limits = |context_tokens| PromptLimits { context_tokens, is_abandoned: &is_abandoned };
        let encoder = encoder(&json!({}));
        // Certain by its bytes alone: no piece is tokenised.
        let Err(TokenizerError::ContextLength { tokens, context_tokens: 2048 }) =
            encoder.encode(&words, &limits(2048))
        else {
            panic!("15 MB are not too long")
        };
        assert_eq!((tokens, looks.get()), (15_000_000_u64.div_ceil(16), 0));
        // Certain after a few pieces, and the text after them is not touched.
        let words = &words[..600_000];
        let Err(TokenizerError::ContextLength { tokens, .. }) = encoder.encode(words, &limits(40_000)) else {
            panic!("600 kB are not too long")
        };
        let pieces = looks.get();
        assert!(tokens >= 40_000 && (1..19).contains(&pieces), "{tokens} tokens, {pieces} pieces");
    }

    #[test]
    fn tokenising_ends_when_the_caller_has_left() {
        let left = Cell::new(3);
        let is_abandoned = || {
            left.set(left.get() - 1);
            left.get() == 0
        };
        let result = encoder(&json!({})).encode(
            &"word ".repeat(100_000),
            &PromptLimits { context_tokens: u32::MAX, is_abandoned: &is_abandoned },
        );
        assert!(matches!(result, Err(TokenizerError::Abandoned)), "{result:?}");
        assert_eq!(left.get(), 0);
    }

    #[test]
    fn text_without_words_is_tokenised_up_to_a_bound() {
        let words = "a b ".repeat(MAX_PIECE_BYTES / 4 + 1);
        let word = "a".repeat(MAX_PIECE_BYTES + 1);
        let error = encoder(&json!({})).encode(&word, &limits(u32::MAX)).unwrap_err();
        assert!(matches!(error, TokenizerError::LongWord { bytes } if bytes == word.len()), "{error}");
        let undivided = encoder(&json!({"normalizer": {"type": "Lowercase"}}));
        let error = undivided.encode(&words, &limits(u32::MAX)).unwrap_err();
        assert!(matches!(error, TokenizerError::Undivided { bytes } if bytes == words.len()), "{error}");
        assert_eq!(encoder(&json!({})).cuts.divide(&words, PIECE_BYTES).0.len(), PIECE_BYTES - 1);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn memory_of_tokenising_does_not_grow_with_the_text() {
        let encoder = encoder(&json!({}));
        let words = "word ".repeat(100_000);
        let test = "tokenizer::encoder::tests::memory_of_tokenising_does_not_grow_with_the_text";
        let grown = russet_tests::peak_memory::growth(test, || {
            assert!(encoder.encode(&words, &limits(u32::MAX)).unwrap().len() >= 100_000);
        });
        assert!(grown < 32 << 20, "{grown} bytes more for {} bytes", words.len());
    }
}
