//! DeepSeek R1, V3 and V3.1. V3 writes the call's type before the name and fences the arguments; V3.1 writes
//! name and arguments. V3.2 and V4 are in `invoke`.

use super::finder::{BlockEnd, Shield};
use super::syntax::CallSyntax;
use super::{BASE, BlockStart, ToolFormat, inside, is_name, json, offered};
use russet_wire::conversation::{Tool, ToolCall};

const CALLS: &str = "<｜tool▁calls▁begin｜>";
const CALLS_END: &str = "<｜tool▁calls▁end｜>";
const CALL: &str = "<｜tool▁call▁begin｜>";
const CALL_END: &str = "<｜tool▁call▁end｜>";
const SEPARATOR: &str = "<｜tool▁sep｜>";
const FENCE: &str = "```json";

pub(super) static V3: ToolFormat = ToolFormat {
    names: &["deepseek_v3", "deepseek_r1"],
    syntaxes: &[CallSyntax::calls(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$NAME\n```json\n$ARGUMENTS\n```<｜tool▁call▁end｜>",
        "\n",
    )
    .within(CALLS, CALLS_END)],
    ..EITHER
};
pub(super) static V31: ToolFormat = ToolFormat {
    names: &["deepseek_v31"],
    syntaxes: &[CallSyntax::calls(
        "<｜tool▁call▁begin｜>$NAME<｜tool▁sep｜>$ARGUMENTS<｜tool▁call▁end｜>",
        "",
    )
    .within(CALLS, CALLS_END)],
    ..EITHER
};

/// Both versions read the other's calls too, since models between them write either.
const EITHER: ToolFormat = ToolFormat {
    begins: &[
        BlockStart::new(CALLS, BlockEnd::Marker(CALLS_END, Shield::Nothing)),
        BlockStart::new(CALL, BlockEnd::Marker(CALL_END, Shield::Nothing)),
    ],
    closers: &[CALLS_END],
    inner: &[SEPARATOR],
    parse,
    ..BASE
};

fn parse(block: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let mut rest = inside(block, CALLS, CALLS_END).unwrap_or(block).trim();
    let mut calls = Vec::new();
    while !rest.is_empty() {
        let (call, after) = rest.strip_prefix(CALL)?.split_once(CALL_END)?;
        let (name, arguments) = name_and_arguments(call)?;
        let name = offered(tools, name.trim())?.name.clone();
        calls.push(ToolCall { id: String::new(), name, arguments: json::object(arguments)? });
        rest = after.trim_start();
    }
    Some(calls)
}

fn name_and_arguments(call: &str) -> Option<(&str, &str)> {
    let (first, second) = call.split_once(SEPARATOR)?;
    match second.split_once(FENCE) {
        // V3: `function`, the separator, then the name in a line of its own.
        Some((name, fenced)) if is_name(name.trim()) => Some((name, fenced.trim_end().strip_suffix("```")?)),
        _ => Some((first, second)),
    }
}

#[cfg(test)]
mod tests {
    use crate::parser::tests::{call, check, check_cut_offs};

    const ARGS: &str = r#"{"a": "日本語 ``` \" 🙂\n```json", "n": {"x": [1.0]}}"#;

    #[test]
    fn deepseek_versions_give_their_calls() {
        let v3 = format!(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n{ARGS}\n```<｜tool▁call▁end｜>"
        );
        let v31 = format!("<｜tool▁call▁begin｜>ping<｜tool▁sep｜>{ARGS}<｜tool▁call▁end｜>");
        for one in [v3, v31] {
            let ping = || call("ping", ARGS);
            let two = format!("<｜tool▁calls▁begin｜>{one}\n{one}<｜tool▁calls▁end｜>");
            check("deepseek_v3", &two, "", &[ping(), ping()]);
            check("deepseek_v31", &format!("So.\n\n{two}"), "So.", &[ping(), ping()]);
            check("deepseek_v31", &format!("<｜tool▁calls▁begin｜>{one}"), "", &[ping()]);
            check("deepseek_v3", &format!("{one}<｜tool▁calls▁end｜>"), "", &[ping()]);
            check_cut_offs("deepseek_v3", &two);
        }
    }

    #[test]
    fn deepseek_rejects_what_is_no_call() {
        for text in [
            "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>nothing<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>ping<｜tool▁sep｜>x<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n{}<｜tool▁call▁end｜>",
        ] {
            check("deepseek_v3", text, text, &[]);
        }
    }
}
