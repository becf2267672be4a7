//! Mistral: `[TOOL_CALLS]` before a JSON list (v3), or before each `name[ARGS]{…}` (v11 and later), with
//! `[CALL_ID]` between name and arguments in some.

use super::finder::BlockEnd;
use super::syntax::{CallSyntax, JSON_CALL};
use super::{BASE, BlockStart, ToolFormat, json, offered};
use russet_wire::conversation::{Tool, ToolCall};

const BEGIN: &str = "[TOOL_CALLS]";
const CALL_ID: &str = "[CALL_ID]";
const ARGS: &str = "[ARGS]";

pub(super) static FORMAT: ToolFormat = ToolFormat {
    names: &["mistral"],
    begins: &[BlockStart::new(BEGIN, BlockEnd::HeadedJson)],
    separators: &[','],
    inner: &[CALL_ID, ARGS],
    parse,
    syntaxes: &[
        CallSyntax::calls("[TOOL_CALLS]$NAME[ARGS]$ARGUMENTS", "").of(ARGS),
        CallSyntax::calls(JSON_CALL, ", ").within("[TOOL_CALLS][", "]"),
    ],
    ..BASE
};

fn parse(block: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let body = block.strip_prefix(BEGIN)?.trim();
    if body.starts_with(['[', '{']) {
        return json::calls(body, tools);
    }
    let (head, arguments) = body.split_at(body.find('{')?);
    let head = head.trim_end();
    let head = head.strip_suffix(ARGS).unwrap_or(head);
    let (name, id) = head.split_once(CALL_ID).unwrap_or((head, ""));
    let name = offered(tools, name.trim())?.name.clone();
    Some(vec![ToolCall { id: id.trim().to_owned(), name, arguments: json::object(arguments)? }])
}

#[cfg(test)]
mod tests {
    use crate::parser::tests::{call, call_with_id, check, check_cut_offs};

    #[test]
    fn mistral_versions_give_their_calls() {
        let args = r#"{"a": "[TOOL_CALLS] } \" ]\n\u00e9 日本語 🙂", "n": [1.0, {}]}"#;
        let plain = || call("ping", args);
        let marked = || call_with_id("abcdefghi", "ping", args);
        for (input, text, calls) in [
            (format!(r#"[TOOL_CALLS][{{"name": "ping", "arguments": {args}}}]"#), "", vec![plain()]),
            (
                format!(
                    r#"[TOOL_CALLS] [{{"name":"ping","arguments":{args}}}, {{"name":"ping","arguments":{args},"id":"abcdefghi"}}]"#
                ),
                "",
                vec![plain(), marked()],
            ),
            (format!("[TOOL_CALLS]ping[ARGS]{args}"), "", vec![plain()]),
            (format!("[TOOL_CALLS]ping[ARGS]{args}[TOOL_CALLS]ping[ARGS]{args}"), "", vec![plain(), plain()]),
            (format!("[TOOL_CALLS]ping[CALL_ID]abcdefghi[ARGS]{args}"), "", vec![marked()]),
            // A detokenizer dropped the inner marker.
            (format!("I look.\n[TOOL_CALLS]ping{args}"), "I look.", vec![plain()]),
            (format!("[TOOL_CALLS]ping[ARGS]{args}\nDone"), "Done", vec![plain()]),
        ] {
            check("mistral", &input, text, &calls);
            if text.is_empty() {
                check_cut_offs("mistral", &input);
            }
        }
    }

    #[test]
    fn mistral_rejects_what_is_no_call() {
        for text in [
            "[TOOL_CALLS]",
            "[TOOL_CALLS]unknown[ARGS]{}",
            "[TOOL_CALLS]ping[ARGS]",
            "[TOOL_CALLS]ping[ARGS][1]",
            "[TOOL_CALLS]ping[ARGS]{\"a\": }",
            "[TOOL_CALLS][{\"name\": \"ping\"",
            "[TOOL_CALLS]ping: {}",
            "[TOOL_CALLS][]",
            "[TOOL_CAL",
        ] {
            check("mistral", text, text, &[]);
        }
        check("mistral", "[TOOL_CALLS]![TOOL_CALLS]ping[ARGS]{}", "[TOOL_CALLS]!", &[call("ping", "{}")]);
    }
}
