//! Stop strings: holds back text that may be the beginning of a stop string. Pure; works on characters, not
//! on tokens.

/// Searches a growing text for the first of several stop strings.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    strings: Vec<String>,
    /// Text held back because it may be the beginning of a stop string.
    pending: String,
}

/// Result of adding text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopCheck {
    /// Text that can no longer be part of a stop string.
    pub text: String,
    /// A stop string is complete; the text after it is dropped.
    pub stopped: bool,
}

impl StopStrings {
    /// Searches for these stop strings; empty ones are ignored.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Self {
        Self { strings: stops.into_iter().filter(|stop| !stop.is_empty()).collect(), pending: String::new() }
    }

    /// Adds text; returns the text that can be emitted.
    pub fn push(&mut self, text: &str) -> StopCheck {
        self.pending.push_str(text);
        let first = self.strings.iter().filter_map(|stop| self.pending.find(stop.as_str())).min();
        if let Some(start) = first {
            let mut text = std::mem::take(&mut self.pending);
            text.truncate(start);
            return StopCheck { text, stopped: true };
        }
        let keep = self.pending.len() - self.longest_partial_match();
        let held = self.pending.split_off(keep);
        StopCheck { text: std::mem::replace(&mut self.pending, held), stopped: false }
    }

    /// The output has ended: returns the held-back text, which is no stop string.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.pending)
    }

    /// Length of the longest suffix of the held-back text that is a prefix of a stop string.
    fn longest_partial_match(&self) -> usize {
        let longest_stop = self.strings.iter().map(String::len).max().unwrap_or(0);
        let from = self.pending.len().saturating_sub(longest_stop.saturating_sub(1));
        (from..self.pending.len())
            .filter(|&start| self.pending.is_char_boundary(start))
            .find(|&start| self.strings.iter().any(|stop| stop.starts_with(&self.pending[start..])))
            .map_or(0, |start| self.pending.len() - start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool, String) {
        let mut watch = StopStrings::new(stops.iter().map(|stop| (*stop).to_owned()));
        let mut emitted = Vec::new();
        for piece in pieces {
            let pushed = watch.push(piece);
            emitted.push(pushed.text);
            if pushed.stopped {
                return (emitted, true, watch.flush());
            }
        }
        (emitted, false, watch.flush())
    }

    #[test]
    fn text_is_withheld_while_it_may_begin_a_stop_string() {
        for (stops, pieces, emitted, stopped, rest) in [
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
            let emitted: Vec<String> = emitted.iter().map(|text| (*text).to_owned()).collect();
            assert_eq!(run(stops, pieces), (emitted, stopped, rest.to_owned()), "{stops:?} {pieces:?}");
        }
    }

    #[test]
    fn stop_strings_emit_the_same_text_for_any_chunking() {
        let text = "ab日c日本d日本語 after";
        let cuts: Vec<usize> = text.char_indices().map(|(at, _)| at).skip(1).collect();
        for &first in &cuts {
            for &second in cuts.iter().filter(|&&cut| cut > first) {
                let (emitted, stopped, _) =
                    run(&["日本語"], &[&text[..first], &text[first..second], &text[second..]]);
                assert!(stopped);
                assert_eq!(emitted.concat(), "ab日c日本d", "cut at {first} and {second}");
            }
        }
    }
}
