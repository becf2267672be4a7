//! Random texts of markers and fragments, for every format: no panic, no lost character, the same in pieces.

use super::super::OutputFormat;
use super::{OFFERED, Random, format, read_new, tool_names};

/// Pieces that formats are made of; a format's own markers come besides.
const FRAGMENTS: &[&str] = &[
    "ping",
    "search",
    "typed",
    "unknown",
    "{",
    "}",
    "{}",
    "[",
    "]",
    "(",
    ")",
    "\"",
    "'",
    "\\",
    ",",
    ":",
    ";",
    " ",
    "\n",
    "a",
    "日本語",
    "🙂",
    "q",
    "s",
    "i",
    "1",
    "=",
    ">",
    "</",
    "<",
    "|",
    "name=\"ping\"",
    "\"name\": \"ping\"",
    "\"arguments\": {}",
    "{\"name\": \"ping\", \"arguments\": {\"a\": 1}}",
    "{\"name\": \"unknown\", \"arguments\": {}}",
    "<function=ping>",
    "<parameter=a>",
    "</parameter>",
    "</function>",
    "<tool_call>",
    "</tool_call>",
    "ping(a=1)",
    "call:ping",
    "{a:1}",
    "functions.ping:0",
    " to=functions.ping",
    "analysis",
    "assistant",
    "<think>",
    "</think>",
    "```json",
    "<invoke name=\"ping\">",
    "</invoke>",
    "<parameter name=\"a\">",
    "<｜DSML｜invoke name=\"ping\">",
    "</｜DSML｜invoke>",
    "<param name=\"a\">",
    "</param>",
    "true",
    "[ARGS]",
    "[ping()]",
    "{\"ping\": {\"a\": 1}}",
    "{\"a\": \"x\"}",
    "[{\"ping\": {}}]",
    " to=functions.ping<|message|>{}<|call|>",
    "call:ping{a:1}",
    "]<]minimax[>[<invoke name=\"ping\">]<]minimax[>[</invoke>",
    "<｜DSML｜invoke name=\"ping\"></｜DSML｜invoke>",
    "<invoke name=\"ping\"></invoke>",
    "<atem:invoke name=\"ping\"></atem:invoke>",
    "\"ping\"><param name=\"a\">1</param>",
    "\"ping\">",
    "<|open|>call tool=\"ping\"<|sep|><|close|>call<|sep|>",
    "<tool_call:opensource>ping<tool_sep:opensource></tool_call:opensource>",
    "x<|tool_call:name|>ping<|tool_call:args|>{}",
    "functions.ping:0<|tool_call_argument_begin|>{}",
    "ping<｜tool▁sep｜>{}",
    "ping\n{}",
    "all\n",
    "\nping()\n",
    "print(default_api.ping(a='x'))",
    "search.call(q=\"x\")",
    "function<｜tool_sep｜><steptml:invoke name=\"ping\"></steptml:invoke>",
    "<steptml:parameter name=\"a\">",
];

/// A text of markers and fragments, at times in the order of a call.
fn random_text(random: &mut Random, format: &OutputFormat) -> String {
    let mut text = String::new();
    for _ in 0..random.below(14) {
        match (format.tools, random.below(6)) {
            (Some(tools), 0) => {
                let begin = &tools.begins[random.below(tools.begins.len())];
                text.push_str(begin.marker);
                text.push_str(FRAGMENTS[random.below(FRAGMENTS.len())]);
                text.push_str(begin.end.marker().unwrap_or(""));
            }
            (_, 1 | 2) => text.push_str(format.markers(true).get(random.below(12)).unwrap_or(&"")),
            _ => text.push_str(FRAGMENTS[random.below(FRAGMENTS.len())]),
        }
    }
    text
}

#[test]
fn random_text_loses_nothing_and_never_panics() {
    for name in tool_names() {
        let plain = format("", name);
        let reasoned = format("think", name);
        let mut random = Random(7);
        let mut calls = 0;
        for round in 0..20_000 {
            let input = random_text(&mut random, &plain);
            let (format, in_reasoning) =
                if round % 2 == 0 { (&plain, false) } else { (&reasoned, round % 4 == 1) };
            let whole = read_new(format, in_reasoning, [input.as_str()]);
            assert_eq!(read_new(format, in_reasoning, random.pieces(&input)), whole, "{name}: {input:?}");
            calls += whole.calls.len();
            for call in &whole.calls {
                assert!(OFFERED.iter().any(|tool| tool.name == call.name), "{name}: {input:?}");
                let arguments: serde_json::Value = serde_json::from_str(&call.arguments).unwrap();
                assert!(arguments.is_object(), "{name}: {input:?}");
            }
            // A header that is no text begins in this way.
            let has_header = format.harmony
                || format.tools.is_some_and(|tools| tools.text_header.is_some()) && input.contains("all\n");
            if whole.calls.is_empty() && format.reasoning.is_none() && !has_header {
                assert_eq!(whole.text, input, "{name}");
            }
        }
        assert!(calls > 0, "{name}: no random text was a call");
    }
}
