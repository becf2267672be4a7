//! Where a text repeats itself: what came after the tokens it ends with, the last time they were there. Pure; it grows
//! with its text and looks at a handful of places, however long that is.

use std::collections::HashMap;

/// Fewer tokens in common say little about the next one.
const SHORTEST: usize = 3;
/// More tokens in common say no more about the next one.
const LONGEST: usize = 32;
/// Places with the same last tokens that are compared, the latest first.
const PLACES: usize = 8;
/// No place.
const NONE: u32 = u32::MAX;

/// Every place of a text, found by the tokens before it.
#[derive(Clone, Debug, Default)]
pub struct Lookup {
    /// The last place behind these tokens.
    latest: HashMap<[u32; SHORTEST], u32>,
    /// For each place the one before it behind the same tokens.
    earlier: Vec<u32>,
}

impl Lookup {
    /// What may come after `text`, at most so many tokens; none where it does not repeat itself. `text` is the one of
    /// the call before, with more tokens behind it or none.
    pub fn next(&mut self, text: &[u32], most: usize) -> Vec<u32> {
        self.learn(text);
        let place = ends(text, text.len()).and_then(|last| self.longest(text, &last));
        // What follows may reach the end of the text, and then goes on with itself.
        place.map_or(Vec::new(), |place| {
            let period = text.len() - place;
            (0..most).map(|token| text[place + token % period]).collect()
        })
    }

    /// Remembers the places before the end.
    fn learn(&mut self, text: &[u32]) {
        for place in self.earlier.len()..text.len() {
            let earlier = ends(text, place).and_then(|last| self.latest.insert(last, place as u32));
            self.earlier.push(earlier.unwrap_or(NONE));
        }
    }

    /// The place before which most is as at the end of `text`, which is `last` at least; of equal ones the latest.
    fn longest(&self, text: &[u32], last: &[u32; SHORTEST]) -> Option<usize> {
        let latest = self.latest.get(last).copied();
        let places = std::iter::successors(latest, |place| {
            self.earlier.get(*place as usize).copied().filter(|place| *place != NONE)
        });
        let common = |place: usize| {
            let pairs = text[..place].iter().rev().zip(text.iter().rev());
            pairs.take(LONGEST).take_while(|(one, other)| one == other).count()
        };
        // The first of equal ones is wanted, and the last one is what `max_by_key` gives.
        let places: Vec<usize> = places.take(PLACES).map(|place| place as usize).collect();
        places.into_iter().rev().max_by_key(|place| common(*place))
    }
}

/// The tokens right before a place.
fn ends(text: &[u32], place: usize) -> Option<[u32; SHORTEST]> {
    text.get(place.checked_sub(SHORTEST)?..place)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    #[test]
    fn what_followed_the_last_time_is_what_is_told() {
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
            assert_eq!(Lookup::default().next(&tokens(text), most), tokens(expected), "{story}");
        }
    }

    #[test]
    fn a_text_that_grows_is_looked_up_as_if_it_had_come_at_once() {
        let text: Vec<u32> = (0..2000_u32).map(|place| place * place % 7 + place / 300).collect();
        let mut growing = Lookup::default();
        let mut found = 0;
        for length in 0..text.len() {
            let next = growing.next(&text[..length], 4);
            assert_eq!(next, Lookup::default().next(&text[..length], 4), "{length}");
            found += usize::from(!next.is_empty());
        }
        assert!(found > 1000, "{found}");
    }
}
