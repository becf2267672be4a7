//! Word cuts: where a text may be divided so that its parts have exactly the tokens of the whole. That is known for
//! pre-tokenizers that split at words ([`super::steps`]); others are never divided.
//!
//! A cut lies between two characters that no word, no added token and no Unicode composition spans, whatever comes
//! before and after. What is left of it ends as it would at the end of a text, and what is right of it is split as from
//! there on, because the expressions do not look back.

use tokenizers::Tokenizer;

use super::steps;

/// Whether and where texts of a tokenizer can be divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WordCuts {
    /// At words.
    Words,
    /// Nowhere.
    Never,
}

impl WordCuts {
    /// The cuts that a tokenizer allows.
    pub(super) fn of(tokenizer: &Tokenizer) -> Self {
        let normalizers = steps::normalizers(tokenizer).iter().all(|step| steps::kind(step) == "NFC");
        let pre_tokenizers = steps::pre_tokenizers(tokenizer);
        let known = pre_tokenizers.iter().all(|step| match steps::kind(step) {
            "Digits" => true,
            // A space before the first word would be put before every part.
            "ByteLevel" => step["add_prefix_space"] == false,
            "Split" => steps::splits_into_words(step),
            _ => false,
        });
        let words =
            pre_tokenizers.iter().any(|step| steps::kind(step) == "Split" || step["use_regex"] == true);
        let added = tokenizer.get_added_tokens_decoder().values().all(|token| {
            let spans = token.content.chars().zip(token.content.chars().skip(1)).any(|(a, b)| is_cut(a, b));
            // These look at what is around them.
            !spans && !token.rstrip && !token.single_word
        });
        if normalizers && known && words && added { Self::Words } else { Self::Never }
    }

    /// Divides `text` at the last cut within its first `bytes`, or the first one after them; the second part is empty if
    /// there is none.
    pub(super) fn divide(self, text: &str, bytes: usize) -> (&str, &str) {
        if self == Self::Never || text.len() <= bytes {
            return (text, "");
        }
        let near = (0..=bytes).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        let cut_at = |at: usize| {
            let before = text[..at].chars().next_back();
            before.zip(text[at..].chars().next()).is_some_and(|(before, after)| is_cut(before, after))
        };
        let within = || text[..near].char_indices().rev().map(|(at, _)| at).find(|&at| cut_at(at));
        let after = || text[near..].char_indices().map(|(at, _)| near + at).find(|&at| cut_at(at));
        let at = if cut_at(near) { Some(near) } else { within().or_else(after) };
        text.split_at(at.unwrap_or(text.len()))
    }
}

/// Whether a text may be divided between these characters.
fn is_cut(before: char, after: char) -> bool {
    match after {
        // A space begins a word, or belongs to the whitespace before the next one.
        ' ' => !before.is_whitespace(),
        // Punctuation takes line breaks with it; letters and digits do not.
        '\n' => before.is_ascii_alphanumeric(),
        // Chinese and Japanese have no spaces.
        '。' | '，' | '、' | '！' | '？' | '；' | '：' => {
            before.is_ascii_alphanumeric() || is_ideograph(before)
        }
        _ => false,
    }
}

/// Ideographs and kana, all of them letters.
fn is_ideograph(character: char) -> bool {
    matches!(character, '\u{4E00}'..='\u{9FFF}' | '\u{3041}'..='\u{3096}' | '\u{30A1}'..='\u{30FA}')
}
