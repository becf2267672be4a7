//! Harmony, the format of gpt-oss: an answer is a row of messages, each with a header that says its channel
//! and to whom it goes. The prompt ends with `<|start|>assistant`, so that the output begins in a header.
//!
//! ```text
//!  Header --<|message|>--> Body --<|end|>, <|call|>, <|return|> or <|start|>--> Header
//! ```

use std::sync::Arc;

use super::PartList;
use super::tools::arguments_object;
use russet_wire::conversation::{Tool, ToolCall};

/// The names of the format; the first is the one that is shown.
pub(super) const NAMES: &[&str] = &["openai", "openai_gptoss", "gpt_oss", "harmony"];

/// The tokens that the parser must see.
pub(super) const MARKERS: &[&str] =
    &["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"];

/// Ends a message of thinking, and begins the answer.
pub(super) const THINKING_END: &str = "<|end|><|start|>assistant<|channel|>final<|message|>";

const MESSAGE: &str = "<|message|>";
const CHANNEL: &str = "<|channel|>";
const START: &str = "<|start|>";

/// A longer header is none: it is text.
const MAX_HEADER: usize = 1024;

/// Reads the messages of one answer.
#[derive(Clone, Debug)]
pub(super) struct HarmonyScanner {
    tools: Arc<[Tool]>,
    state: State,
    /// What may still become a marker.
    candidate: String,
    /// What kind of text the answer's last message had, to put a line between two of one kind.
    last: Option<Kind>,
}

#[derive(Clone, Debug)]
enum State {
    Header(String),
    /// `started`: some of its text was emitted.
    Body {
        kind: Kind,
        started: bool,
    },
    /// A message to a tool: its text is kept until its end.
    Call(Message),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Text,
    Reasoning,
}

#[derive(Clone, Debug)]
struct Message {
    recipient: String,
    /// The whole message as it was written; the body begins at `body_start`.
    text: String,
    body_start: usize,
}

impl HarmonyScanner {
    pub(super) fn new(tools: Arc<[Tool]>) -> Self {
        Self { tools, state: State::Header(String::new()), candidate: String::new(), last: None }
    }

    pub(super) fn in_reasoning(&self) -> bool {
        matches!(self.state, State::Body { kind: Kind::Reasoning, .. })
    }

    pub(super) fn step(&mut self, c: char, parts: &mut PartList) {
        self.candidate.push(c);
        while !self.candidate.is_empty() {
            if let Some(marker) = MARKERS.iter().find(|marker| **marker == self.candidate) {
                self.candidate.clear();
                self.marker(marker, parts);
            } else if MARKERS.iter().any(|marker| marker.starts_with(self.candidate.as_str())) {
                return;
            } else {
                self.reject_candidate(parts);
            }
        }
    }

    pub(super) fn finish(&mut self, parts: &mut PartList) {
        while !self.candidate.is_empty() {
            self.reject_candidate(parts);
        }
        match std::mem::replace(&mut self.state, State::Header(String::new())) {
            // A header that was cut off is no text of the answer.
            State::Header(header) if is_header(&header) => {}
            State::Header(header) => self.emit_whole(&header, parts),
            State::Body { .. } => {}
            State::Call(message) => self.end_call(message, "", parts),
        }
    }

    fn reject_candidate(&mut self, parts: &mut PartList) {
        let candidate = std::mem::take(&mut self.candidate);
        let first = candidate.chars().next().map_or(0, char::len_utf8);
        let (plain, rest) = candidate.split_at(first);
        self.candidate.push_str(rest);
        self.plain(plain, parts);
    }

    fn plain(&mut self, text: &str, parts: &mut PartList) {
        match &mut self.state {
            State::Header(header) => {
                header.push_str(text);
                if header.len() > MAX_HEADER {
                    let header = std::mem::take(header);
                    self.state = State::Body { kind: Kind::Text, started: false };
                    self.plain(&header, parts);
                }
            }
            State::Body { kind, started } => {
                let kind = *kind;
                if !std::mem::replace(started, true) {
                    self.separate(kind, parts);
                }
                emit(kind, text, parts);
            }
            State::Call(message) => message.text.push_str(text),
        }
    }

    fn marker(&mut self, marker: &'static str, parts: &mut PartList) {
        let ends = !matches!(marker, CHANNEL | "<|constrain|>" | MESSAGE);
        match &mut self.state {
            State::Header(header) if marker == MESSAGE => {
                let header = std::mem::take(header);
                self.state = begin_body(&header);
            }
            State::Header(header) if marker == START => {
                let before = std::mem::replace(header, START.to_owned());
                self.emit_whole(before.trim(), parts);
            }
            // After the last message nothing but its end follows.
            State::Header(header) if ends && header.trim().is_empty() => header.clear(),
            State::Header(header) => header.push_str(marker),
            State::Body { .. } | State::Call(_) if ends => {
                let next = if marker == START { START.to_owned() } else { String::new() };
                match std::mem::replace(&mut self.state, State::Header(next)) {
                    State::Call(message) => {
                        let end = if marker == START { "" } else { marker };
                        self.end_call(message, end, parts);
                    }
                    State::Body { .. } | State::Header(_) => {}
                }
            }
            // No marker stands in a body; it is content.
            State::Body { .. } | State::Call(_) => self.plain(marker, parts),
        }
    }

    fn end_call(&mut self, mut message: Message, end: &str, parts: &mut PartList) {
        let name = message.recipient.strip_prefix("functions.").unwrap_or(&message.recipient);
        let tool = self.tools.iter().find(|tool| tool.name == name);
        if let Some((tool, arguments)) = tool.zip(arguments_object(&message.text[message.body_start..])) {
            parts.calls(vec![ToolCall { id: String::new(), name: tool.name.clone(), arguments }]);
            self.last = None;
        } else {
            message.text.push_str(end);
            self.emit_whole(&message.text, parts);
        }
    }

    fn emit_whole(&mut self, text: &str, parts: &mut PartList) {
        if !text.is_empty() {
            self.separate(Kind::Text, parts);
            parts.text(text);
        }
    }

    /// Messages have no space between them; two of one kind would run together.
    fn separate(&mut self, kind: Kind, parts: &mut PartList) {
        if self.last.replace(kind) == Some(kind) {
            emit(kind, "\n", parts);
        }
    }
}

fn emit(kind: Kind, text: &str, parts: &mut PartList) {
    match kind {
        Kind::Text => parts.text(text),
        Kind::Reasoning => parts.reasoning(text),
    }
}

fn begin_body(header: &str) -> State {
    if let Some(recipient) = recipient(header) {
        let text = format!("{header}{MESSAGE}");
        let body_start = text.len();
        return State::Call(Message { recipient: recipient.to_owned(), text, body_start });
    }
    let channel = header.split_once(CHANNEL).map_or("", |(_, channel)| channel);
    let kind = if word(channel.trim_start()) == "analysis" { Kind::Reasoning } else { Kind::Text };
    State::Body { kind, started: false }
}

fn is_header(text: &str) -> bool {
    text.contains("<|") || recipient(text).is_some() || text.trim() == "assistant"
}

/// The recipient stands in the role or in the channel: ` to=functions.NAME`.
fn recipient(header: &str) -> Option<&str> {
    let (before, after) = header.split_once("to=")?;
    let apart = before.is_empty() || before.ends_with([' ', '>']);
    Some(word(after)).filter(|recipient| apart && !recipient.is_empty())
}

fn word(text: &str) -> &str {
    let end = text.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(text.len());
    &text[..end]
}

#[cfg(test)]
mod tests {
    use crate::parser::tests::{call, check_cut_offs, check_reasoning};

    fn check(input: &str, reasoning: &str, text: &str, calls: &[russet_wire::conversation::ToolCall]) {
        check_reasoning("openai", "openai", input, reasoning, text, calls);
    }

    #[test]
    fn channels_are_reasoning_and_text() {
        let thought = "<|channel|>analysis<|message|>I think 日本語.<|end|>";
        check(
            &format!("{thought}<|start|>assistant<|channel|>final<|message|>Hi 🙂\n<|return|>"),
            "I think 日本語.",
            "Hi 🙂\n",
            &[],
        );
        check(&format!("{thought}<|start|>assistant{thought}"), "I think 日本語.\nI think 日本語.", "", &[]);
        check("<|channel|>commentary<|message|>I look.<|end|>", "", "I look.", &[]);
        check("<|channel|>final<|message|>cut <|en", "", "cut <|en", &[]);
        check("<|message|>no channel", "", "no channel", &[]);
        check("no header", "", "no header", &[]);
        check("<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b", "a", "b", &[]);
        check(&"x".repeat(3000), "", &"x".repeat(3000), &[]);
        check("", "", "", &[]);
        for header in ["<|channel|>ana", "<|channel|>commentary to=functions.ping<|const", " to=functions.p"]
        {
            check(header, "", "", &[]);
        }
    }

    #[test]
    fn calls_have_their_recipient_in_either_place() {
        let args = r#"{"a": "日本語 \" 🙂\n <x>", "n": {"x": [1.0]}}"#;
        for header in [
            "<|channel|>commentary to=functions.ping <|constrain|>json<|message|>",
            "<|channel|>commentary to=functions.ping<|constrain|>json<|message|>",
            "<|channel|>commentary to=functions.ping json<|message|>",
            "<|channel|>analysis to=functions.ping<|message|>",
            " to=functions.ping<|channel|>commentary json<|message|>",
            " to=functions.ping<|channel|>commentary <|constrain|>json<|message|>",
        ] {
            for end in ["<|call|>", "", "<|end|>"] {
                check(&format!("{header}{args}{end}"), "", "", &[call("ping", args)]);
            }
            check_cut_offs("openai", &format!("{header}{args}<|call|>"));
        }
        let input = format!(
            "<|channel|>analysis<|message|>Why.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>\
             <|start|>assistant to=functions.ping<|channel|>commentary json<|message|>{args}<|call|>\
             <|start|>assistant<|channel|>commentary to=functions.ping<|message|>{{}}<|call|>"
        );
        check(&input, "Why.", "I look.", &[call("ping", args), call("ping", "{}")]);
    }

    #[test]
    fn a_message_that_is_no_call_is_text_unchanged() {
        for text in [
            "<|channel|>commentary to=functions.unknown<|message|>{}<|call|>",
            "<|channel|>commentary to=functions.ping<|message|>[]<|call|>",
            "<|channel|>analysis to=python<|message|>print(1)<|call|>",
            "<|channel|>commentary to=functions.ping<|message|>{\"a\":",
        ] {
            check(text, "", text, &[]);
        }
    }
}
