//! Points of a prompt that gateways know again. A gateway has no tokenizer and an engine caches tokens: the gateway sends the
//! marks of a prompt's text with it, and the engine tells which of its blocks end there.

use serde::{Deserialize, Serialize};

/// A point of a prompt, for gateways, which have no tokenizer: prompts with the same key are equal up to there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PrefixMark {
    /// Hash of all texts before it and of what else a prompt begins with.
    pub key: u64,
    /// Bytes of the texts before it.
    pub bytes: u64,
}

impl PrefixMark {
    /// The tokens before each mark of a prompt of this many, as far as bytes tell.
    pub fn tokens(marks: &[Self], prompt_tokens: u32) -> impl Iterator<Item = (u64, u32)> {
        let whole = u128::from(marks.last().map_or(1, |last| last.bytes.max(1)));
        marks.iter().map(move |mark| {
            let tokens = u128::from(mark.bytes) * u128::from(prompt_tokens) / whole;
            (mark.key, u32::try_from(tokens).map_or(prompt_tokens, |tokens| tokens.min(prompt_tokens)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_before_a_mark_are_in_proportion_to_its_bytes() {
        let marks = [0, 100, 1000].map(|bytes| PrefixMark { key: bytes + 1, bytes });
        let tokens = |marks: &[PrefixMark], all| PrefixMark::tokens(marks, all).collect::<Vec<_>>();
        assert_eq!(tokens(&marks, 250), [(1, 0), (101, 25), (1001, 250)]);
        assert_eq!(tokens(&marks[..1], 7), [(1, 0)], "a prompt without texts");
        let huge = [u64::MAX, 1].map(|bytes| PrefixMark { key: 0, bytes });
        assert_eq!(
            tokens(&huge, u32::MAX),
            [(0, u32::MAX), (0, u32::MAX)],
            "marks that are no marks of a prompt"
        );
    }
}
