//! What a model writes, in any format of calls: nothing panics, and how the text is cut changes nothing.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use russet_chat::parser::{OutputFormat, OutputParser, Part};
use russet_wire::conversation::Tool;

const TOOLS: [&str; 36] = [
    "hermes", "longcat", "internlm", "granite", "jamba", "nemotron_nano_v2", "cohere", "phi4_mini_json", "functools",
    "gigachat3", "qwen3_coder", "seed_oss", "llama3_json", "pythonic", "lfm2", "mistral", "glm45", "kimi_k2",
    "deepseek_v3", "deepseek_v31", "deepseek_v32", "minimax_m2", "gemma4", "solar_open", "openai",
    "gemma3", "functionary_v3_2", "step3", "functiongemma", "kimi_k3", "minimax_m3", "olmo3", "atem", "minicpm5", "hy_v3",
    "apertus",
];
const REASONING: [&str; 4] = ["", "think", "mistral", "gemma4"];

fuzz_target!(|input: &[u8]| {
    let [format, reasoning, cut, text @ ..] = input else { return };
    let text = String::from_utf8_lossy(text);
    let name = TOOLS[usize::from(*format) % TOOLS.len()];
    let format = OutputFormat::default().tools_by_name(name).unwrap_or_else(|| panic!("no format {name}"));
    let thinks = REASONING[usize::from(*reasoning) % REASONING.len()];
    let format = format.clone().reasoning_by_name(thinks).unwrap_or(format);
    let tool = |name: &str, parameters: Option<&str>| Tool {
        name: name.to_owned(),
        description: None,
        parameters: parameters.map(str::to_owned),
        strict: false,
    };
    let schema = r#"{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":["string","null"]},"c":{"anyOf":[{"type":"object"},{"type":"array"}]}}}"#;
    let tools: Arc<[Tool]> = Arc::from([tool("f", Some(schema)), tool("get", None)]);
    let read = |pieces: &mut dyn Iterator<Item = &str>| {
        let mut parser = OutputParser::new(&format, tools.clone(), reasoning & 4 != 0);
        let mut parts = Vec::new();
        pieces.for_each(|piece| parts.extend(parser.push(piece)));
        parts.extend(parser.finish());
        let (mut text, mut thought, mut calls) = (String::new(), String::new(), Vec::new());
        for part in parts {
            match part {
                Part::Text(more) => text.push_str(&more),
                Part::Reasoning(more) => thought.push_str(&more),
                Part::ToolCall(call) => calls.push(call),
            }
        }
        (text, thought, calls)
    };
    let whole = read(&mut std::iter::once(text.as_ref()));
    let length = usize::from(*cut % 16) + 1;
    let mut at = 0;
    let mut pieces = std::iter::from_fn(|| {
        let rest = text.get(at..).filter(|rest| !rest.is_empty())?;
        let end = rest.char_indices().nth(length).map_or(rest.len(), |(end, _)| end);
        at += end;
        rest.get(..end)
    });
    assert_eq!(read(&mut pieces), whole);
    for call in &whole.2 {
        assert!(["f", "get"].contains(&call.name.as_str()));
        let arguments: serde_json::Value = serde_json::from_str(&call.arguments).unwrap_or_default();
        assert!(arguments.is_object(), "{} is no object", call.arguments);
    }
});
