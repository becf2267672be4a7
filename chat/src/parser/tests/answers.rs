//! Answers with reasoning, text and calls together, and the door's own functions.

use std::sync::Arc;

use super::super::{OutputFormat, OutputParser, Part, harmony, opens_reasoning, reasoning, tools};
use super::{Outcome, call, call_with_id, check_reasoning, format, offered, read, read_all};

#[test]
fn thinking_blocks_are_reasoning_in_every_cut() {
    for (input, in_reasoning, thought, text) in [
        ("<think>\nI see.\n</think>\n\nHi.", false, "I see.", "Hi."),
        ("I see.\n</think>\n\nHi.", true, "I see.", "Hi."),
        ("\n\nI see. </think>Hi.", true, "I see.", "Hi."),
        ("<think>\nI see.</think>Hi.", true, "I see.", "Hi."),
        ("\n<think>I see.</think>Hi.", false, "I see.", "Hi."),
        // Not closed, or cut off in the marker.
        ("<think>I see.\n", false, "I see.\n", ""),
        ("I see.\n</thi", true, "I see.\n</thi", ""),
        ("<think", false, "", "<think"),
        // A stray end is text.
        ("I see.</think>Hi.", false, "", "I see.</think>Hi."),
        // Empty, and twice.
        ("<think>\n\n</think>\n\nHi.", false, "", "Hi."),
        ("<think>a</think>b\n<think>c</think>d", false, "ac", "b\nd"),
        ("<think>a <think> b</think>c", false, "a <think> b", "c"),
        ("", true, "", ""),
        (" \n", false, "", " \n"),
        ("a  \n", false, "", "a  \n"),
        ("a < b <th ink>", false, "", "a < b <th ink>"),
        // A call in a thinking block is a thought.
        (
            "<think><tool_call>{\"name\": \"ping\"}</tool_call></think>a",
            false,
            "<tool_call>{\"name\": \"ping\"}</tool_call>",
            "a",
        ),
    ] {
        let outcome = read_all(&format("qwen3", "hermes"), in_reasoning, input);
        let expected = Outcome { text: text.to_owned(), reasoning: thought.to_owned(), calls: vec![] };
        assert_eq!(outcome, expected, "{input:?}");
    }
}

#[test]
fn every_reasoning_format_reads_its_markers() {
    for reasoning in reasoning::all() {
        let input = format!("{}\nI see.\n{}\n\nHi.", reasoning.begin, reasoning.end);
        for name in reasoning.names {
            check_reasoning(name, "hermes", &input, "I see.", "Hi.", &[]);
        }
        let format = format(reasoning.names[0], "hermes");
        assert!(opens_reasoning(&format, &format!("<user>Hi<assistant>{}\n", reasoning.begin)));
        assert!(!opens_reasoning(
            &format,
            &format!("<assistant>{}\n\n{}\n\n", reasoning.begin, reasoning.end)
        ));
        assert!(!opens_reasoning(&format, "<assistant>"));
        assert!(format.markers(true).contains(&reasoning.begin));
    }
}

#[test]
fn reasoning_comes_before_calls() {
    let ping = r#"{"name": "ping", "arguments": {}}"#;
    let input = format!("<think>\nWhy.\n</think>\n\n<tool_call>\n{ping}\n</tool_call>");
    check_reasoning("qwen3", "hermes", &input, "Why.", "", &[call("ping", "{}")]);
    let input = format!("<think>\nWhy.\n</think>\n\n{ping}");
    check_reasoning("qwen3", "llama3_json", &input, "Why.", "", &[call("ping", "{}")]);
    let input = format!("<tool_call>{ping}</tool_call>\n<think>Why.</think>\n<tool_call>{ping}</tool_call>");
    check_reasoning("qwen3", "hermes", &input, "Why.", "", &[call("ping", "{}"), call("ping", "{}")]);
    check_reasoning(
        "mistral",
        "mistral",
        "[THINK]Why.[/THINK][TOOL_CALLS]ping[ARGS]{}",
        "Why.",
        "",
        &[call("ping", "{}")],
    );
    check_reasoning(
        "solar_open",
        "solar_open",
        "<|think|>Why.<|end|><|begin|>assistant<|tool_call:begin|>1<|tool_call:name|>ping<|tool_call:args|>{}<|tool_call:end|>",
        "Why.",
        "",
        &[call_with_id("1", "ping", "{}")],
    );
}

#[test]
fn without_offered_tools_calls_stay_text() {
    let input = "<tool_call>{\"name\": \"ping\", \"arguments\": {}}</tool_call>";
    let mut parser = OutputParser::new(&format("qwen3", "hermes"), Arc::new([]), true);
    let outcome = read(&mut parser, ["Why.</think>", input]);
    assert_eq!(outcome, Outcome { text: input.to_owned(), reasoning: "Why.".to_owned(), calls: vec![] });
    let mut parser = OutputParser::new(&OutputFormat::default(), offered(), true);
    assert_eq!(read(&mut parser, ["a</think>", input]).text, format!("a</think>{input}"));
}

#[test]
fn text_is_emitted_as_soon_as_it_is_certain() {
    let mut parser = OutputParser::new(&format("qwen3", "hermes"), offered(), false);
    assert_eq!(parser.push("Hello <"), [Part::Text("Hello".to_owned())]);
    assert_eq!(parser.push("b> "), [Part::Text(" <b>".to_owned())]);
    assert_eq!(parser.push("<tool_"), []);
    assert_eq!(parser.push("x"), [Part::Text(" <tool_x".to_owned())]);
    // An answer in JSON is no call and does not wait for its end.
    let mut parser = OutputParser::new(&format("", "llama3_json"), offered(), false);
    assert_eq!(parser.push("{\"an"), [Part::Text("{\"an".to_owned())]);
    let mut parser = OutputParser::new(&format("", "pythonic"), offered(), false);
    assert_eq!(parser.push("[link]"), [Part::Text("[link]".to_owned())]);
}

#[test]
fn names_find_their_formats_once() {
    let mut names: Vec<&str> = tools::all().iter().flat_map(|format| format.names.iter().copied()).collect();
    names.extend(harmony::NAMES);
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
    for name in names {
        assert!(OutputFormat::default().tools_by_name(name).is_some(), "{name}");
    }
    assert_eq!(OutputFormat::default().tools_by_name("none"), None);
    assert_eq!(OutputFormat::default().reasoning_by_name("none"), None);
    let format = format("qwen3", "hermes");
    assert_eq!((format.tools_name(), format.reasoning_name()), (Some("hermes"), Some("think")));
    assert_eq!(format.markers(true), ["<think>", "</think>", "</tool_call>", "<tool_call>"]);
}
