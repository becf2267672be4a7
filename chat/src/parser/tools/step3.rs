//! Step-3: a section of calls between tokens like DeepSeek's, each in tags with attributes as `invoke` reads them. Step
//! 3.5 writes as Qwen3-Coder does.

use super::finder::{BlockEnd, Shield};
use super::invoke::{self, InvokeTags, XML_TAGS};
use super::syntax::CallSyntax;
use super::{BASE, BlockStart, ToolFormat, inside};
use russet_wire::conversation::{Tool, ToolCall};

const CALLS: &str = "<｜tool_calls_begin｜>";
const CALLS_END: &str = "<｜tool_calls_end｜>";
const CALL: &str = "<｜tool_call_begin｜>";
const CALL_END: &str = "<｜tool_call_end｜>";
const SEPARATOR: &str = "<｜tool_sep｜>";

const TAGS: InvokeTags = InvokeTags {
    call: "<steptml:invoke",
    call_end: "</steptml:invoke>",
    parameter: "<steptml:parameter",
    parameter_end: "</steptml:parameter>",
    ..XML_TAGS
};

const fn shield(closer: &'static str) -> Shield {
    Shield::Tags { pairs: &[("<steptml:parameter", "</steptml:parameter>")], closer }
}

pub(super) static FORMAT: ToolFormat = ToolFormat {
    names: &["step3"],
    begins: &[
        BlockStart::new(CALLS, BlockEnd::Marker(CALLS_END, shield(CALL_END))),
        BlockStart::new(CALL, BlockEnd::Marker(CALL_END, shield(TAGS.call_end))),
    ],
    closers: &[CALLS_END],
    inner: &[SEPARATOR],
    parse,
    syntaxes: &[CallSyntax::calls(
        "<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"$NAME\">\n$PARAMETERS</steptml:invoke><｜tool_call_end｜>",
        "\n",
    )
    .with("<steptml:parameter name=\"$KEY\">$VALUE</steptml:parameter>\n")
    .within("<｜tool_calls_begin｜>\n", "\n<｜tool_calls_end｜>")],
    ..BASE
};

fn parse(block: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let mut rest = inside(block, CALLS, CALLS_END).unwrap_or(block).trim();
    let mut calls = Vec::new();
    while !rest.is_empty() {
        // What stands before the separator is the kind of the tool, of which there is but one.
        let (_, text) = rest.strip_prefix(CALL)?.split_once(SEPARATOR)?;
        let (call, after) = invoke::call(text.trim_start(), &TAGS, tools)?;
        calls.push(call);
        let after = after.trim_start();
        // The end of a lone call may be missing where the output ends.
        rest = if after.is_empty() { after } else { after.strip_prefix(CALL_END)?.trim_start() };
    }
    Some(calls)
}

#[cfg(test)]
mod tests {
    use crate::parser::tests::{call, check, check_cut_offs};

    fn one(invoke: &str) -> String {
        format!("<｜tool_call_begin｜>function<｜tool_sep｜>{invoke}<｜tool_call_end｜>")
    }

    #[test]
    fn step3_values_are_typed_by_the_schema() {
        let typed = one(
            "<steptml:invoke name=\"typed\">\n<steptml:parameter name=\"s\">日本語\n<b> <｜tool_call_end｜> 🙂</steptml:parameter>\n\
             <steptml:parameter name=\"i\">5</steptml:parameter><steptml:parameter name=\"o\">{\"x\": [1.0]}</steptml:parameter>\n\
             <steptml:parameter name=\"free\">7</steptml:parameter>\n</steptml:invoke>",
        );
        let ping = one("<steptml:invoke name=\"ping\"></steptml:invoke>");
        let arguments =
            r#"{"s": "日本語\n<b> <｜tool_call_end｜> 🙂", "i": 5, "o": {"x": [1.0]}, "free": "7"}"#;
        let calls = [call("typed", arguments), call("ping", "{}")];
        for input in [
            format!("<｜tool_calls_begin｜>{typed}{ping}<｜tool_calls_end｜>"),
            format!("<｜tool_calls_begin｜>\n{typed}\n{ping}\n<｜tool_calls_end｜>"),
            format!("<｜tool_calls_begin｜>{typed}\n{ping}"),
            format!("{typed}{ping}<｜tool_calls_end｜>"),
        ] {
            check("step3", &input, "", &calls);
            check_cut_offs("step3", &input);
            check("step3", &format!("Go.\n{input}"), "Go.", &calls);
        }
    }

    #[test]
    fn step3_rejects_what_is_no_call() {
        for text in [
            "<｜tool_calls_begin｜><｜tool_calls_end｜>".to_owned(),
            one("<steptml:invoke name=\"unknown\"></steptml:invoke>"),
            one("<steptml:invoke name=\"ping\">text</steptml:invoke>"),
            one("<steptml:invoke name=\"ping\"><steptml:parameter name=\"a\">1</steptml:invoke>"),
            one("{\"name\": \"ping\"}"),
            "<｜tool_call_begin｜><steptml:invoke name=\"ping\"></steptml:invoke><｜tool_call_end｜>"
                .to_owned(),
            "<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"ping\">".to_owned(),
        ] {
            check("step3", &text, &text, &[]);
        }
    }
}
