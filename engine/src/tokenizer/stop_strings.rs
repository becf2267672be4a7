//! Stop strings: holds back text that may be the beginning of a stop string. Pure; works on characters, not
//! on tokens.

/// Searches a growing text for the first of several stop strings.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    /// Searched in the text, as if there were no special tokens between its characters.
    plain: Vec<StopString>,
    /// Those that hold special tokens; searched in the text with the special tokens written out.
    special: Vec<StopString>,
    /// Text held back because it may be the beginning of a stop string.
    pending: String,
    /// Special tokens after the first bytes of the held-back text.
    tokens: Vec<(usize, String)>,
}

/// A stop string.
#[derive(Clone, Debug)]
struct StopString {
    /// Its index among those of the request.
    index: u32,
    text: String,
}

/// Result of adding text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopCheck {
    /// Text that can no longer be part of a stop string.
    pub text: String,
    /// The index of the stop string that is complete; the text after it is dropped.
    pub stopped: Option<u32>,
}

impl StopStrings {
    /// Searches for these stop strings; empty ones are ignored. Those of which `is_special` holds are searched with
    /// special tokens written out.
    pub fn new(stops: impl IntoIterator<Item = String>, is_special: impl Fn(&str) -> bool) -> Self {
        let stops = stops.into_iter().zip(0..).map(|(text, index)| StopString { index, text });
        let stops = stops.filter(|stop| !stop.text.is_empty());
        let (special, plain) = stops.partition(|stop| is_special(&stop.text));
        Self { plain, special, ..Self::default() }
    }

    /// Whether special tokens are part of a stop string.
    pub fn hold_special_tokens(&self) -> bool {
        !self.special.is_empty()
    }

    /// Adds text; returns the text that can be emitted.
    pub fn push(&mut self, text: &str) -> StopCheck {
        self.pending.push_str(text);
        self.check()
    }

    /// Adds a special token, which is never emitted itself.
    pub fn push_special(&mut self, token: &str) -> StopCheck {
        if self.special.is_empty() {
            return StopCheck::default();
        }
        self.tokens.push((self.pending.len(), token.to_owned()));
        self.check()
    }

    /// The output has ended: returns the held-back text, which is no stop string.
    pub fn flush(&mut self) -> String {
        self.tokens.clear();
        std::mem::take(&mut self.pending)
    }

    fn check(&mut self) -> StopCheck {
        // The one that begins first; of those that begin there the shortest, which was complete first.
        let first = |stops: &[StopString], text: &str| {
            stops.iter().filter_map(|stop| Some((text.find(&stop.text)?, stop.text.len(), stop.index))).min()
        };
        let written = self.written();
        let plain = first(&self.plain, &self.pending);
        let special =
            first(&self.special, &written).map(|(at, bytes, index)| (self.text_offset(at), bytes, index));
        if let Some((start, _, index)) = plain.into_iter().chain(special).min() {
            let mut text = self.flush();
            text.truncate(start);
            return StopCheck { text, stopped: Some(index) };
        }
        let plain = longest_partial_match(&self.plain, &self.pending);
        if self.special.is_empty() {
            return self.emit(plain);
        }
        let special = self.text_offset(longest_partial_match(&self.special, &written));
        let keep = plain.min(special);
        // Where no text is held before them, tokens matter only as the beginning of a stop string.
        let partial = written.len() - longest_partial_match(&self.special, &written);
        let mut following: usize = self.tokens.iter().map(|(_, token)| token.len()).sum();
        let text_bytes = self.pending.len();
        self.tokens.retain_mut(|(at, token)| {
            let ends_before = text_bytes - *at + following - token.len();
            following -= token.len();
            let held = *at > keep || ends_before < partial;
            *at = at.saturating_sub(keep);
            held
        });
        self.emit(keep)
    }

    /// Emits the first bytes of the held-back text.
    fn emit(&mut self, bytes: usize) -> StopCheck {
        let held = self.pending.split_off(bytes);
        StopCheck { text: std::mem::replace(&mut self.pending, held), stopped: None }
    }

    /// The held-back text with the special tokens written out.
    fn written(&self) -> String {
        let mut written = String::new();
        if self.special.is_empty() {
            return written;
        }
        let mut from = 0;
        for (at, token) in &self.tokens {
            written.push_str(&self.pending[from..*at]);
            written.push_str(token);
            from = *at;
        }
        written.push_str(&self.pending[from..]);
        written
    }

    /// Where a byte of [`Self::written`] is in the held-back text.
    fn text_offset(&self, written: usize) -> usize {
        let mut tokens = 0;
        for (at, token) in &self.tokens {
            let start = at + tokens;
            if written <= start {
                break;
            }
            if written < start + token.len() {
                return *at;
            }
            tokens += token.len();
        }
        written - tokens
    }
}

/// Where the longest suffix of `text` begins that is a prefix of a stop string; the end of the text if there is none.
fn longest_partial_match(stops: &[StopString], text: &str) -> usize {
    let longest_stop = stops.iter().map(|stop| stop.text.len()).max().unwrap_or(0);
    let from = text.len().saturating_sub(longest_stop.saturating_sub(1));
    (from..text.len())
        .filter(|&start| text.is_char_boundary(start))
        .find(|&start| stops.iter().any(|stop| stop.text.starts_with(&text[start..])))
        .unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, Option<u32>, String) {
        let mut watch =
            StopStrings::new(stops.iter().map(|stop| (*stop).to_owned()), |stop| stop.contains("<|"));
        let mut emitted = Vec::new();
        for piece in pieces {
            let special = piece.starts_with("<|");
            let pushed = if special { watch.push_special(piece) } else { watch.push(piece) };
            emitted.push(pushed.text);
            if pushed.stopped.is_some() {
                return (emitted, pushed.stopped, watch.flush());
            }
        }
        (emitted, None, watch.flush())
    }

    #[test]
    fn text_is_withheld_while_it_may_begin_a_stop_string() {
        for (stops, pieces, emitted, stopped, rest) in [
            (&["\n\n"][..], &["a", "\n", "b"][..], &["a", "", "\nb"][..], None, ""),
            (&["\n\n"], &["a\n", "\n", "b"], &["a", ""], Some(0), ""),
            (&["STOP"], &["xS", "TO", "P tail"], &["x", "", ""], Some(0), ""),
            (&["STOP"], &["xSTO"], &["x"], None, "STO"),
            (&["abc", "b"], &["ab"], &["a"], Some(1), ""),
            (&["bcd", "abc"], &["a", "b", "c"], &["", "", ""], Some(1), ""),
            (&["aab"], &["aa", "a", "b"], &["", "a", ""], Some(0), ""),
            (&["é!"], &["é", "è"], &["", "éè"], None, ""),
            (&["日本語"], &["日本", "人"], &["", "日本人"], None, ""),
            (&["<|e|>"], &["a", "<|e|>"], &["a", ""], Some(0), ""),
            (&["<|e|>"], &["a", "<|f|>", "b"], &["a", "", "b"], None, ""),
            (&["42.<|e|>"], &["4", "2.", "<|e|>"], &["", "", ""], Some(0), ""),
            (&["42.<|e|>"], &["42", ".", "<|f|>", "!"], &["", "", "42.", "!"], None, ""),
            (&["<|u|>What"], &["a", "<|u|>", "Wh", "at?"], &["a", "", "", ""], Some(0), ""),
            (&["<|u|>What"], &["a", "<|u|>", "Wh", "o"], &["a", "", "", "Who"], None, ""),
            (&["<|u|>b", "ab"], &["xa", "<|u|>", "b"], &["x", "", ""], Some(1), ""),
            // A special token is no part of the text, so it does not keep a plain stop string from matching.
            (&["lo w", "<|e|>"], &["hello", "<|f|>", " w"], &["hel", "", ""], Some(0), ""),
            // Tokens between text and its continuation are not forgotten while the text is held back.
            (&["a<|x|>b", "az"], &["a", "<|y|>", "<|x|>", "b"], &["", "", "", "ab"], None, ""),
            (&[""], &["a"], &["a"], None, ""),
            (&[], &["a", "b"], &["a", "b"], None, ""),
            // Of two that begin at one place the shorter one; empty ones have an index too.
            (&["", "ab", "abc"], &["xabc"], &["x"], Some(1), ""),
            (&["", "abc", "ab"], &["xabc"], &["x"], Some(2), ""),
            (&["ab", "ab"], &["ab"], &[""], Some(0), ""),
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
                assert_eq!(stopped, Some(0));
                assert_eq!(emitted.concat(), "ab日c日本d", "cut at {first} and {second}");
            }
        }
    }
}
