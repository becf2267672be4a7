//! Stop texts: what may be told the caller while a stop text could still be forming. Pure; it
//! knows characters, not tokens.

/// Watches a growing text for the first of several stop texts.
#[derive(Clone, Debug, Default)]
pub struct Stops {
    stops: Vec<String>,
    /// Text not yet told, because it may be the beginning of a stop text.
    held: String,
}

/// What came of a piece of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pushed {
    /// Text that can no longer become part of a stop text.
    pub text: String,
    /// A stop text is complete; what follows it is dropped.
    pub stopped: bool,
}

impl Stops {
    /// Watches for any of these texts; empty ones are never met.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Self {
        Self { stops: stops.into_iter().filter(|stop| !stop.is_empty()).collect(), held: String::new() }
    }

    /// Adds text and says what of all text so far is certain.
    pub fn push(&mut self, text: &str) -> Pushed {
        self.held.push_str(text);
        let first = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        if let Some(start) = first {
            let mut text = std::mem::take(&mut self.held);
            text.truncate(start);
            return Pushed { text, stopped: true };
        }
        let keep = self.held.len() - self.longest_beginning();
        let held = self.held.split_off(keep);
        Pushed { text: std::mem::replace(&mut self.held, held), stopped: false }
    }

    /// The answer is over: what was held back was no stop text after all.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Length of the longest end of the held text with which some stop text begins.
    fn longest_beginning(&self) -> usize {
        let longest_stop = self.stops.iter().map(String::len).max().unwrap_or(0);
        let from = self.held.len().saturating_sub(longest_stop.saturating_sub(1));
        (from..self.held.len())
            .filter(|&start| self.held.is_char_boundary(start))
            .find(|&start| self.stops.iter().any(|stop| stop.starts_with(&self.held[start..])))
            .map_or(0, |start| self.held.len() - start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool, String) {
        let mut watch = Stops::new(stops.iter().map(|stop| (*stop).to_owned()));
        let mut told = Vec::new();
        for piece in pieces {
            let pushed = watch.push(piece);
            told.push(pushed.text);
            if pushed.stopped {
                return (told, true, watch.flush());
            }
        }
        (told, false, watch.flush())
    }

    #[test]
    fn text_is_held_back_until_it_can_no_longer_be_a_stop() {
        for (stops, pieces, told, stopped, rest) in [
            (&["\n\n"][..], &["a", "\n", "b"][..], &["a", "", "\nb"][..], false, ""),
            (&["\n\n"], &["a\n", "\n", "b"], &["a", ""], true, ""),
            (&["STOP"], &["xS", "TO", "P tail"], &["x", "", ""], true, ""),
            (&["STOP"], &["xSTO"], &["x"], false, "STO"),
            (&["abc", "b"], &["ab"], &["a"], true, ""),
            (&["bcd", "abc"], &["a", "b", "c"], &["", "", ""], true, ""),
            (&["aab"], &["aa", "a", "b"], &["", "a", ""], true, ""),
            (&["é!"], &["é", "è"], &["", "éè"], false, ""),
            (&["日本語"], &["日本", "人"], &["", "日本人"], false, ""),
            (&[""], &["a"], &["a"], false, ""),
            (&[], &["a", "b"], &["a", "b"], false, ""),
        ] {
            let told: Vec<String> = told.iter().map(|text| (*text).to_owned()).collect();
            assert_eq!(run(stops, pieces), (told, stopped, rest.to_owned()), "{stops:?} {pieces:?}");
        }
    }

    #[test]
    fn however_a_text_is_cut_the_same_text_is_told() {
        let text = "ab日c日本d日本語 after";
        let cuts: Vec<usize> = text.char_indices().map(|(at, _)| at).skip(1).collect();
        for &first in &cuts {
            for &second in cuts.iter().filter(|&&cut| cut > first) {
                let (told, stopped, _) =
                    run(&["日本語"], &[&text[..first], &text[first..second], &text[second..]]);
                assert!(stopped);
                assert_eq!(told.concat(), "ab日c日本d", "cut at {first} and {second}");
            }
        }
    }
}
