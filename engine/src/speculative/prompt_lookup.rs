//! Prompt lookup (n-gram proposer): the tokens that followed the most recent occurrence of the current
//! n-gram. Pure; memory grows with the text, and a lookup compares a constant number of positions.

use std::collections::HashMap;

/// Minimum n-gram length: shorter matches say little about the next token.
const MIN_NGRAM: usize = 3;
/// Maximum n-gram length: longer matches say no more about the next token.
const MAX_MATCH_TOKENS: usize = 32;
/// Matching positions that are compared, most recent first.
const MAX_CANDIDATES: usize = 8;
/// Sentinel: no position.
const NO_POSITION: u32 = u32::MAX;

/// Index of the positions of a text by the n-gram before them.
#[derive(Clone, Debug, Default)]
pub struct PromptLookup {
    /// The last position after an n-gram.
    latest_position: HashMap<[u32; MIN_NGRAM], u32>,
    /// For each position, the previous position after the same n-gram.
    previous_position: Vec<u32>,
}

impl PromptLookup {
    /// Draft tokens for `text`, up to a maximum; empty where it does not repeat itself. `text` must extend
    /// the text of the previous call.
    pub fn propose(&mut self, text: &[u32], most: usize) -> Vec<u32> {
        self.index(text);
        let place = ngram_before(text, text.len()).and_then(|last| self.longest_match(text, &last));
        // The continuation may reach the end of the text; then it repeats itself.
        place.map_or(Vec::new(), |place| {
            let period = text.len() - place;
            (0..most).map(|token| text[place + token % period]).collect()
        })
    }

    /// Indexes the positions before the end.
    fn index(&mut self, text: &[u32]) {
        for place in self.previous_position.len()..text.len() {
            let earlier =
                ngram_before(text, place).and_then(|last| self.latest_position.insert(last, place as u32));
            self.previous_position.push(earlier.unwrap_or(NO_POSITION));
        }
    }

    /// The position with the longest match with the end of `text`, at least `last`; the most recent one of
    /// equal matches.
    fn longest_match(&self, text: &[u32], last: &[u32; MIN_NGRAM]) -> Option<usize> {
        let latest = self.latest_position.get(last).copied();
        let places = std::iter::successors(latest, |place| {
            self.previous_position.get(*place as usize).copied().filter(|place| *place != NO_POSITION)
        });
        let common = |place: usize| {
            let pairs = text[..place].iter().rev().zip(text.iter().rev());
            pairs.take(MAX_MATCH_TOKENS).take_while(|(one, other)| one == other).count()
        };
        // The most recent of equal matches has to win, and `max_by_key` returns the last maximum.
        let places: Vec<usize> = places.take(MAX_CANDIDATES).map(|place| place as usize).collect();
        places.into_iter().rev().max_by_key(|place| common(*place))
    }
}

/// The n-gram right before a position.
fn ngram_before(text: &[u32], place: usize) -> Option<[u32; MIN_NGRAM]> {
    text.get(place.checked_sub(MIN_NGRAM)?..place)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    #[test]
    fn prompt_lookup_proposes_the_latest_continuation() {
        for (story, text, most, expected) in [
            ("nothing repeats", "abcdefgh", 4, ""),
            ("too short for anything", "ab", 4, ""),
            ("nothing at all", "", 4, ""),
            ("two tokens in common are not enough", "xab-yab", 4, ""),
            ("three are", "abc-def abc", 4, "-def"),
            ("no more than asked", "abc-def abc", 2, "-d"),
            ("none, if none are asked", "abc-def abc", 0, ""),
            ("of several the one with more in common", "1abcX 2abcY 3abcZ 2abc", 1, "Y"),
            ("of equal ones the latest", "abcX abcY abc", 2, "Y "),
            ("a text that goes round and round goes on so", "ababab", 5, "ababa"),
            ("also within one token", "aaaa", 3, "aaa"),
        ] {
            assert_eq!(PromptLookup::default().propose(&tokens(text), most), tokens(expected), "{story}");
        }
    }

    #[test]
    fn prompt_lookup_is_the_same_for_grown_and_whole_texts() {
        let text: Vec<u32> = (0..2000_u32).map(|place| place * place % 7 + place / 300).collect();
        let mut growing = PromptLookup::default();
        let mut found = 0;
        for length in 0..text.len() {
            let next = growing.propose(&text[..length], 4);
            assert_eq!(next, PromptLookup::default().propose(&text[..length], 4), "{length}");
            found += usize::from(!next.is_empty());
        }
        assert!(found > 1000, "{found}");
    }
}
