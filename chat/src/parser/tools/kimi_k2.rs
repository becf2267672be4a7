//! Kimi K2: a section of calls, each with an id `functions.NAME:IDX` of the model's own. The section's tokens
//! are special, and one in a thinking block ends it.

use super::finder::{BlockEnd, Shield};
use super::syntax::CallSyntax;
use super::{BASE, BlockStart, ToolFormat, json, offered};
use russet_wire::conversation::{Tool, ToolCall};

const SECTION: &str = "<|tool_calls_section_begin|>";
const SECTION_END: &str = "<|tool_calls_section_end|>";
/// Kimi K2's first release wrote the word without its s at times.
const SECTION_SINGULAR: &str = "<|tool_call_section_begin|>";
const SECTION_SINGULAR_END: &str = "<|tool_call_section_end|>";
const CALL: &str = "<|tool_call_begin|>";
const ARGUMENTS: &str = "<|tool_call_argument_begin|>";
const CALL_END: &str = "<|tool_call_end|>";

pub(super) static FORMAT: ToolFormat = ToolFormat {
    names: &["kimi_k2"],
    begins: &[
        BlockStart::new(SECTION, BlockEnd::Marker(SECTION_END, Shield::Nothing)),
        BlockStart::new(SECTION_SINGULAR, BlockEnd::Marker(SECTION_SINGULAR_END, Shield::Nothing)),
        BlockStart::new(CALL, BlockEnd::Marker(CALL_END, Shield::Nothing)),
    ],
    closers: &[SECTION_END, SECTION_SINGULAR_END],
    inner: &[ARGUMENTS],
    ends_reasoning: true,
    parse,
    syntaxes: &[CallSyntax::calls(
        "<|tool_call_begin|>functions.$NAME:$INDEX<|tool_call_argument_begin|>$ARGUMENTS<|tool_call_end|>",
        "",
    )
    .within(SECTION, SECTION_END)],
    ..BASE
};

fn parse(block: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let sections = [(SECTION, SECTION_END), (SECTION_SINGULAR, SECTION_SINGULAR_END)];
    let body = sections.iter().find_map(|(begin, end)| super::inside(block, begin, end)).unwrap_or(block);
    let mut rest = body.trim();
    let mut calls = Vec::new();
    while !rest.is_empty() {
        let (call, after) = rest.strip_prefix(CALL)?.split_once(CALL_END)?;
        let (id, arguments) = call.split_once(ARGUMENTS)?;
        let id = id.trim();
        let name = id.strip_prefix("functions.").unwrap_or(id);
        let name = match name.rsplit_once(':') {
            Some((name, index)) if index.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => name,
        };
        let name = offered(tools, name)?.name.clone();
        calls.push(ToolCall { id: id.to_owned(), name, arguments: json::object(arguments)? });
        rest = after.trim_start();
    }
    Some(calls)
}

#[cfg(test)]
mod tests {
    use crate::parser::tests::{call_with_id, check, check_cut_offs, check_reasoning};

    fn one(index: usize, arguments: &str) -> String {
        format!(
            "<|tool_call_begin|>functions.ping:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        )
    }

    #[test]
    fn kimi_calls_keep_their_ids() {
        let args = r#"{"a": "日本語 \" 🙂\n", "n": {"x": [1.0]}}"#;
        let calls =
            [call_with_id("functions.ping:0", "ping", args), call_with_id("functions.ping:1", "ping", "{}")];
        let both = format!("{}{}", one(0, args), one(1, "{}"));
        let section = format!("<|tool_calls_section_begin|>{both}<|tool_calls_section_end|>");
        check("kimi_k2", &section, "", &calls);
        check_cut_offs("kimi_k2", &section);
        check("kimi_k2", &format!("I look. {section}"), "I look.", &calls);
        check("kimi_k2", &format!("<|tool_calls_section_begin|>{both}"), "", &calls);
        check("kimi_k2", &section.replace("tool_calls_s", "tool_call_s"), "", &calls);
        check("kimi_k2", &format!("{both}<|tool_calls_section_end|>"), "", &calls);
        let bare = "<|tool_call_begin|>ping<|tool_call_argument_begin|>{}<|tool_call_end|>";
        check("kimi_k2", bare, "", &[call_with_id("ping", "ping", "{}")]);
    }

    #[test]
    fn kimi_calls_end_a_thinking_block() {
        let section = format!("<|tool_calls_section_begin|>{}<|tool_calls_section_end|>", one(0, "{}"));
        let call = call_with_id("functions.ping:0", "ping", "{}");
        check_reasoning("kimi_k2", "kimi_k2", &format!("<think>I call. {section}"), "I call.", "", &[call]);
        let broken = "<think>I <|tool_call_begin|> x<|tool_call_end|> y</think> z";
        check_reasoning("kimi_k2", "kimi_k2", broken, "I <|tool_call_begin|> x<|tool_call_end|> y", "z", &[]);
    }

    #[test]
    fn kimi_rejects_what_is_no_call() {
        for text in [
            "<|tool_calls_section_begin|><|tool_calls_section_end|>",
            "<|tool_calls_section_begin|>text<|tool_calls_section_end|>",
            "<|tool_call_begin|>functions.nothing:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "<|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>[]<|tool_call_end|>",
            "<|tool_call_begin|>functions.ping:0<|tool_call_end|>",
        ] {
            check("kimi_k2", text, text, &[]);
        }
    }
}
