//! Finds where a block ends, character by character. It validates only as much as it needs for that; the
//! format's `parse` decides whether the block is a call.

use super::{BlockStart, MAX_NESTING};

/// The longest text between a begin marker and the arguments: a name and an id.
const MAX_HEAD: usize = 256;

/// The first keys of a JSON call. An answer that is another JSON object streams as text.
const FIRST_KEYS: &[&str] =
    &["\"name\"", "\"parameters\"", "\"arguments\"", "\"type\"", "\"id\"", "\"function\""];

/// How the end of a block is found.
#[derive(Clone, Copy, Debug)]
pub(crate) enum BlockEnd {
    /// At a marker, unless a shield covers it.
    Marker(&'static str, Shield),
    /// At the end of a JSON array or object.
    Json,
    /// The same, and the first key must be one of a call.
    JsonCall,
    /// At the end of a Python list of calls.
    PythonList,
    /// At the end of JSON, or of one Python call.
    JsonOrPython,
    /// At the end of the JSON after a head: `name[ARGS]{}`.
    HeadedJson,
}

impl BlockEnd {
    pub(in crate::parser) fn marker(&self) -> Option<&'static str> {
        match self {
            Self::Marker(marker, _) => Some(marker),
            Self::Json | Self::JsonCall | Self::PythonList | Self::JsonOrPython | Self::HeadedJson => None,
        }
    }
}

/// Where an end marker is content.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Shield {
    Nothing,
    /// In a JSON string.
    JsonString,
    /// In a Python string, except at the beginning of a line: a quote that was none would hide every end.
    PythonString,
    /// Between the first and the second marker, until `closer` stands before the end marker: then the second
    /// was forgotten. An empty `closer` is never there.
    Tags {
        pairs: &'static [(&'static str, &'static str)],
        closer: &'static str,
    },
}

/// What the last character means for the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::parser) enum Verdict {
    More,
    /// The block is complete.
    End,
    /// It cannot become a call.
    Broken,
    /// The text ends with the begin marker of another block.
    Restart,
}

/// The search for one block's end.
#[derive(Clone, Debug)]
pub(in crate::parser) struct Finder {
    begin: &'static BlockStart,
    json: JsonBrackets,
    python: PythonBrackets,
    /// The marker that closes the tag that the text is in.
    tag_close: Option<&'static str>,
    /// The head is read, or the body's first character.
    settled: bool,
    /// The body is JSON (for `Shield::JsonString`).
    is_json: bool,
}

impl Finder {
    pub(in crate::parser) fn new(begin: &'static BlockStart) -> Self {
        Self {
            begin,
            json: JsonBrackets::default(),
            python: PythonBrackets::default(),
            tag_close: None,
            settled: false,
            is_json: false,
        }
    }

    /// Takes the next character `c`, the last of `text`, which is the block from its begin marker on.
    pub(in crate::parser) fn step(&mut self, text: &str, c: char) -> Verdict {
        match self.begin.end {
            BlockEnd::Marker(marker, shield) => self.step_marker(text, c, marker, shield),
            BlockEnd::Json => self.json.step(c),
            BlockEnd::JsonCall => match self.json.step(c) {
                Verdict::More if !self.settled => self.first_key(text),
                verdict => verdict,
            },
            BlockEnd::PythonList => self.step_python(text, c, ']'),
            BlockEnd::JsonOrPython => {
                if !self.settled {
                    let body = text[self.begin.marker.len()..].trim_start();
                    self.is_json = body.is_empty() || body.starts_with(['{', '[']);
                }
                if self.is_json { self.json.step(c) } else { self.step_python(text, c, ')') }
            }
            BlockEnd::HeadedJson => self.step_headed(text, c),
        }
    }

    fn step_marker(&mut self, text: &str, c: char, marker: &str, shield: Shield) -> Verdict {
        let shielded = match shield {
            Shield::Nothing => false,
            Shield::JsonString => {
                if !self.settled && !c.is_whitespace() {
                    self.settled = true;
                    self.is_json = matches!(c, '{' | '[');
                }
                if self.is_json && self.json.step(c) == Verdict::Broken {
                    self.is_json = false;
                }
                self.is_json && self.json.in_string
            }
            Shield::PythonString => {
                self.python.step(c);
                let in_line = !text.strip_suffix(marker).is_some_and(|before| before.ends_with('\n'));
                self.python.quote.is_some() && in_line
            }
            Shield::Tags { pairs, .. } => {
                match self.tag_close {
                    Some(close) if text.ends_with(close) => self.tag_close = None,
                    Some(_) => {}
                    None => {
                        let opened = pairs.iter().find(|(open, _)| text.ends_with(open));
                        self.tag_close = opened.map(|(_, close)| *close);
                    }
                }
                self.tag_close.is_some()
            }
        };
        let body = &text[self.begin.marker.len()..];
        if let Some(before) = body.strip_suffix(marker) {
            let forgotten = match shield {
                Shield::Tags { closer, .. } => !closer.is_empty() && before.trim_end().ends_with(closer),
                Shield::Nothing | Shield::JsonString | Shield::PythonString => false,
            };
            if !shielded || forgotten {
                return Verdict::End;
            }
        }
        if !shielded && body.ends_with(self.begin.marker) { Verdict::Restart } else { Verdict::More }
    }

    /// Whether a bare JSON object begins as a call does.
    fn first_key(&mut self, text: &str) -> Verdict {
        let key = text.trim_start_matches(|c: char| c.is_whitespace() || matches!(c, '[' | '{'));
        if FIRST_KEYS.iter().any(|first| key.starts_with(first)) {
            self.settled = true;
            Verdict::More
        } else if text.len() <= MAX_HEAD && FIRST_KEYS.iter().any(|first| first.starts_with(key)) {
            Verdict::More
        } else {
            Verdict::Broken
        }
    }

    /// A list of calls, or one call, which the bracket `close` ends.
    fn step_python(&mut self, text: &str, c: char, close: char) -> Verdict {
        if self.settled {
            return match self.python.step(c) {
                Verdict::End if c != close => Verdict::Broken,
                verdict => verdict,
            };
        }
        let name = text[self.begin.marker.len()..].trim_start();
        let named = name.strip_suffix('(');
        let is_name = |name: &str| name.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '.' | '-'));
        if named.is_some_and(|name| !name.is_empty() && is_name(name)) {
            self.settled = true;
            // This parenthesis, and the bracket of a list.
            self.python.depth = if close == ')' { 1 } else { 2 };
            Verdict::More
        } else if text.len() <= MAX_HEAD && is_name(name) {
            Verdict::More
        } else {
            Verdict::Broken
        }
    }

    fn step_headed(&mut self, text: &str, c: char) -> Verdict {
        if !self.settled {
            let first = text[self.begin.marker.len()..].trim_start().len() == c.len_utf8();
            self.settled = c == '{' || (first && c == '[');
        }
        if self.settled {
            return self.json.step(c);
        }
        let of_head =
            c.is_alphanumeric() || c.is_whitespace() || matches!(c, '_' | '-' | '.' | '[' | ']' | '/');
        if of_head && text.len() <= MAX_HEAD { Verdict::More } else { Verdict::Broken }
    }
}

/// Follows JSON text as far as brackets and strings.
#[derive(Clone, Debug, Default)]
struct JsonBrackets {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl JsonBrackets {
    fn step(&mut self, c: char) -> Verdict {
        if self.in_string {
            match c {
                // JSON has no raw control characters in strings: the quote before was none.
                _ if c < ' ' => return Verdict::Broken,
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => self.in_string = false,
                _ => {}
            }
            return Verdict::More;
        }
        match c {
            '{' | '[' if self.depth < MAX_NESTING => self.depth += 1,
            '}' | ']' if self.depth > 0 => {
                self.depth -= 1;
                if self.depth == 0 {
                    return Verdict::End;
                }
            }
            '"' if self.depth > 0 => self.in_string = true,
            _ if c.is_ascii_whitespace() => {}
            ',' | ':' | '+' | '-' | '.' if self.depth > 0 => {}
            _ if c.is_ascii_alphanumeric() && self.depth > 0 => {}
            _ => return Verdict::Broken,
        }
        Verdict::More
    }
}

/// Follows Python literals as far as brackets and strings.
#[derive(Clone, Debug, Default)]
struct PythonBrackets {
    depth: usize,
    quote: Option<char>,
    escaped: bool,
    /// A quote was read that closes the string if a delimiter follows: models forget to escape apostrophes.
    closing: bool,
}

impl PythonBrackets {
    fn step(&mut self, c: char) -> Verdict {
        if let Some(quote) = self.quote {
            if self.closing && matches!(c, ',' | ')' | ']' | '}' | ':') {
                self.quote = None;
                self.closing = false;
            } else {
                self.closing = (c == quote && !self.escaped) || (self.closing && c.is_whitespace());
                self.escaped = c == '\\' && !self.escaped;
                return Verdict::More;
            }
        }
        match c {
            '(' | '[' | '{' if self.depth < MAX_NESTING => self.depth += 1,
            '(' | '[' | '{' => return Verdict::Broken,
            ')' | ']' | '}' => {
                self.depth = self.depth.saturating_sub(1);
                if self.depth == 0 {
                    return Verdict::End;
                }
            }
            '"' | '\'' => self.quote = Some(c),
            _ => {}
        }
        Verdict::More
    }
}
