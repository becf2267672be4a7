//! What holds for every format: the same result for every cut of the stream, no lost character, no half call.
//! The formats' own corpora are in their files and come through `check` too.

use std::sync::{Arc, LazyLock};

mod answers;
mod random;
mod size;
mod templates;

use super::{OutputFormat, OutputParser, Part, harmony, tools};
use russet_wire::conversation::{Tool, ToolCall};

/// Inputs longer than this are cut at some borders only.
const MAX_CUTS: usize = 400;

#[derive(Debug, Default, PartialEq, Eq, Clone)]
struct Outcome {
    text: String,
    reasoning: String,
    calls: Vec<ToolCall>,
}

pub(super) fn call(name: &str, arguments: &str) -> ToolCall {
    call_with_id("", name, arguments)
}

pub(super) fn call_with_id(id: &str, name: &str, arguments: &str) -> ToolCall {
    ToolCall { id: id.to_owned(), name: name.to_owned(), arguments: arguments.to_owned() }
}

static OFFERED: LazyLock<Arc<[Tool]>> = LazyLock::new(|| {
    let typed = r#"{"type": "object", "properties": {"s": {"type": "string"}, "i": {"type": "integer"},
        "n": {"type": "number"}, "b": {"type": "boolean"}, "o": {"type": "object"}, "a": {"type": "array"}}}"#;
    let search = r#"{"type": "object", "properties": {"q": {"type": "string"}}}"#;
    [("ping", None), ("search", Some(search)), ("web.search", Some(search)), ("typed", Some(typed))]
        .map(|(name, parameters)| Tool {
            name: name.to_owned(),
            description: None,
            parameters: parameters.map(str::to_owned),
            strict: false,
        })
        .into()
});

fn offered() -> Arc<[Tool]> {
    Arc::clone(&OFFERED)
}

fn format(reasoning: &str, tools: &str) -> OutputFormat {
    let format = OutputFormat::default().tools_by_name(tools).unwrap();
    if reasoning.is_empty() { format } else { format.reasoning_by_name(reasoning).unwrap() }
}

fn read<'a>(parser: &mut OutputParser, pieces: impl IntoIterator<Item = &'a str>) -> Outcome {
    let mut outcome = Outcome::default();
    let mut parts: Vec<Part> = pieces.into_iter().flat_map(|piece| parser.push(piece)).collect();
    parts.extend(parser.finish());
    assert_eq!(parser.finish(), []);
    for part in parts {
        match part {
            Part::Text(text) => outcome.text.push_str(&text),
            Part::Reasoning(text) => outcome.reasoning.push_str(&text),
            Part::ToolCall(call) => outcome.calls.push(call),
        }
    }
    outcome
}

fn read_new<'a>(
    format: &OutputFormat,
    in_reasoning: bool,
    pieces: impl IntoIterator<Item = &'a str>,
) -> Outcome {
    read(&mut OutputParser::new(format, offered(), in_reasoning), pieces)
}

/// Reads `input` whole and in every kind of pieces, which gives one outcome.
fn read_all(format: &OutputFormat, in_reasoning: bool, input: &str) -> Outcome {
    let whole = read_new(format, in_reasoning, [input]);
    let borders: Vec<usize> = input.char_indices().map(|(at, _)| at).chain([input.len()]).collect();
    // A number without common factors with most lengths, so that all kinds of places are cut.
    let stride = if borders.len() > MAX_CUTS { borders.len() / 97 } else { 1 };
    let new = || OutputParser::new(format, offered(), in_reasoning);
    for at in borders.iter().step_by(stride) {
        let (first, second) = input.split_at(*at);
        assert_eq!(read(&mut new(), [first, second]), whole, "cut at {at} of {input:?}");
    }
    let chars = borders.windows(2).map(|pair| &input[pair[0]..pair[1]]);
    assert_eq!(read(&mut new(), chars), whole, "char by char: {input:?}");
    let mut random = Random(input.len() as u64);
    for _ in 0..5 {
        assert_eq!(read(&mut new(), random.pieces(input)), whole, "in random pieces: {input:?}");
    }
    whole
}

/// The outcome of an answer without reasoning.
pub(super) fn check(tools: &str, input: &str, text: &str, calls: &[ToolCall]) {
    check_reasoning("", tools, input, "", text, calls);
}

/// The outcome of an answer.
pub(super) fn check_reasoning(
    reasoning: &str,
    tools: &str,
    input: &str,
    thought: &str,
    text: &str,
    calls: &[ToolCall],
) {
    let outcome = read_all(&format(reasoning, tools), false, input);
    let expected = Outcome { text: text.to_owned(), reasoning: thought.to_owned(), calls: calls.to_vec() };
    assert_eq!(outcome, expected, "{tools}: {input:?}");
}

/// Cut off anywhere, an answer gives some of its calls, whole, or its own text.
pub(super) fn check_cut_offs(tools: &str, input: &str) {
    let format = format("", tools);
    let complete = read_new(&format, false, [input]);
    assert!(!complete.calls.is_empty(), "{tools}: {input}");
    for (at, _) in input.char_indices() {
        let outcome = read_new(&format, false, [&input[..at]]);
        assert!(complete.calls.starts_with(&outcome.calls), "{tools}: {:?} gives {outcome:?}", &input[..at]);
        let cut_header = format.harmony && !input[..at].contains("<|message|>");
        if outcome.calls.is_empty() && !cut_header {
            assert_eq!(outcome.text, input[..at], "{tools}");
        }
    }
}

/// A linear congruential generator: the same numbers in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }

    fn pieces<'a>(&mut self, mut text: &'a str) -> Vec<&'a str> {
        let mut pieces = Vec::new();
        while !text.is_empty() {
            let mut at = (1 + self.below(9)).min(text.len());
            while !text.is_char_boundary(at) {
                at += 1;
            }
            let (piece, rest) = text.split_at(at);
            pieces.push(piece);
            text = rest;
        }
        pieces
    }
}

fn tool_names() -> impl Iterator<Item = &'static str> {
    tools::all().iter().map(|format| format.names[0]).chain([harmony::NAMES[0]])
}
