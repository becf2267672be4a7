//! Qwen 3 Coder, Qwen 3.5, Nemotron 3, Step 3.5 and Seed OSS: `<function=NAME>` with a `<parameter=KEY>` for
//! each argument. Values are plain text, which the tool's schema types. The syntax does not escape, so that a
//! value with the very end of a call in it cannot be told from that end.

use super::finder::{BlockEnd, Shield};
use super::json::ObjectText;
use super::schema::Schema;
use super::syntax::CallSyntax;
use super::{BASE, BlockStart, ToolFormat, offered};
use russet_wire::conversation::{Tool, ToolCall};

const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";

const SHIELD: Shield = Shield::Tags { pairs: &[(PARAMETER, PARAMETER_END)], closer: FUNCTION_END };
/// Some models forget `<tool_call>`; the block then is the function itself.
const LONE_FUNCTION: BlockStart = BlockStart::new(
    FUNCTION,
    BlockEnd::Marker(FUNCTION_END, Shield::Tags { pairs: &[(PARAMETER, PARAMETER_END)], closer: "" }),
);

pub(super) static QWEN3_CODER: ToolFormat = ToolFormat {
    names: &["qwen3_coder", "qwen3_xml", "qwen3_5", "nemotron_v3", "step3p5", "nemotron3"],
    begins: &[BlockStart::new("<tool_call>", BlockEnd::Marker("</tool_call>", SHIELD)), LONE_FUNCTION],
    closers: &["</tool_call>"],
    parse: |block, tools| functions(block, "<tool_call>", "</tool_call>", tools),
    syntaxes: &[CallSyntax::calls(
        "<tool_call>\n<function=$NAME>\n$PARAMETERS</function>\n</tool_call>",
        "\n",
    )
    .with("<parameter=$KEY>\n$VALUE\n</parameter>\n")],
    ..BASE
};

pub(super) static SEED_OSS: ToolFormat = ToolFormat {
    names: &["seed_oss"],
    begins: &[
        BlockStart::new("<seed:tool_call>", BlockEnd::Marker("</seed:tool_call>", SHIELD)),
        LONE_FUNCTION,
    ],
    closers: &["</seed:tool_call>"],
    parse: |block, tools| functions(block, "<seed:tool_call>", "</seed:tool_call>", tools),
    syntaxes: &[CallSyntax::calls(
        "<seed:tool_call>\n<function=$NAME>\n$PARAMETERS</function>\n</seed:tool_call>",
        "\n",
    )
    .with("<parameter=$KEY>$VALUE</parameter>\n")],
    ..BASE
};

fn functions(block: &str, begin: &str, end: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let body = block.strip_prefix(begin).unwrap_or(block);
    let mut rest = body.strip_suffix(end).unwrap_or(body).trim();
    let mut calls = Vec::new();
    while !rest.is_empty() {
        let (call, after) = function(rest, tools)?;
        calls.push(call);
        rest = after.trim_start();
    }
    Some(calls)
}

fn function<'a>(text: &'a str, tools: &[Tool]) -> Option<(ToolCall, &'a str)> {
    let (name, mut rest) = text.strip_prefix(FUNCTION)?.split_once('>')?;
    let tool = offered(tools, name.trim())?;
    let schema = Schema::of(tool);
    let mut arguments = ObjectText::default();
    loop {
        rest = rest.trim_start();
        if let Some(after) = rest.strip_prefix(FUNCTION_END) {
            let call =
                ToolCall { id: String::new(), name: tool.name.clone(), arguments: arguments.into_text() };
            return Some((call, after));
        }
        let (key, text) = rest.strip_prefix(PARAMETER)?.split_once('>')?;
        let (value, after) =
            value(text, |other| other != key && schema.has(other) && !arguments.contains(other))?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        arguments.insert(key, schema.value(key, value));
        rest = after;
    }
}

/// The value at the beginning of `text`, and what follows it. Its end marker is one that another tag follows;
/// models forget it, and then the next parameter of the tool (`is_next`) at the beginning of a line ends the
/// value.
fn value(text: &str, is_next: impl Fn(&str) -> bool) -> Option<(&str, &str)> {
    let marked = text.match_indices(PARAMETER_END).find_map(|(at, end)| {
        let after = &text[at + end.len()..];
        let next = after.trim_start();
        (next.starts_with(PARAMETER) || next.starts_with(FUNCTION_END)).then_some((at, after))
    });
    let (end, after) = match marked {
        Some(found) => found,
        None => text.find(FUNCTION_END).map(|at| (at, &text[at..]))?,
    };
    let forgotten = text[..end].match_indices("\n<parameter=").find_map(|(at, marker)| {
        let (key, _) = text[at + marker.len()..end].split_once('>')?;
        is_next(key).then_some(at)
    });
    Some(match forgotten {
        // The newline before the next parameter is the value's own last one.
        Some(at) => (&text[..=at], &text[at + 1..]),
        None => (&text[..end], after),
    })
}

#[cfg(test)]
mod tests {
    use crate::parser::tests::{call, check, check_cut_offs};

    #[test]
    fn qwen_values_are_typed_by_the_schema() {
        let input = "<tool_call>\n<function=typed>\n<parameter=s>\n5\n</parameter>\n<parameter=i>\n5\n</parameter>\n\
            <parameter=b>\nTrue\n</parameter>\n<parameter=o>\n{\"x\": [1.0, \"\\u00e9\"]}\n</parameter>\n\
            <parameter=a>\nno list\n</parameter>\n<parameter=free>\n7\n</parameter>\n</function>\n</tool_call>";
        let arguments =
            r#"{"s": "5", "i": 5, "b": true, "o": {"x": [1.0, "\u00e9"]}, "a": "no list", "free": "7"}"#;
        check("qwen3_coder", input, "", &[call("typed", arguments)]);
        check("seed_oss", &input.replace("tool_call>", "seed:tool_call>"), "", &[call("typed", arguments)]);
        check_cut_offs("qwen3_coder", input);
    }

    #[test]
    fn qwen_keeps_text_as_it_is_written() {
        let value = "  fn main() {\n    \"日本語 🙂\";\n}\n\n</parameter> and </tool_call> & <b>";
        let input = format!(
            "I write.\n<tool_call>\n<function=search>\n<parameter=q>\n{value}\n</parameter>\n</function>\n</tool_call>"
        );
        // The inner `</parameter>` opens the shield too early: here the call still has its end.
        let value_shown = value.replace(" and </tool_call>", "");
        let input = input.replace(" and </tool_call>", "");
        let arguments = format!(r#"{{"q": {}}}"#, serde_json::Value::from(value_shown));
        check("qwen3_coder", &input, "I write.", &[call("search", &arguments)]);
        let input =
            "<tool_call><function=search><parameter=q></tool_call></parameter></function></tool_call>";
        check("qwen3_coder", input, "", &[call("search", r#"{"q": "</tool_call>"}"#)]);
    }

    #[test]
    fn qwen_accepts_what_models_vary() {
        let ping = || call("ping", "{}");
        let typed = || call("typed", r#"{"s": "a", "i": 1}"#);
        for (input, text, calls) in [
            ("<tool_call><function=ping></function></tool_call>", "", vec![ping()]),
            (
                "<tool_call>\n<function=ping>\n</function>\n<function=ping>\n</function>\n</tool_call>",
                "",
                vec![ping(), ping()],
            ),
            ("<tool_call>\n<function=ping>\n</function>", "", vec![ping()]),
            // Without the outer tag.
            ("Now.\n<function=ping>\n</function>\n</tool_call>", "Now.", vec![ping()]),
            ("<function=ping></function><function=ping></function>", "", vec![ping(), ping()]),
            // Without the end of a parameter.
            (
                "<tool_call><function=typed>\n<parameter=s>\na\n<parameter=i>\n1\n</parameter>\n</function></tool_call>",
                "",
                vec![typed()],
            ),
            (
                "<tool_call><function=typed>\n<parameter=s>\na\n</parameter>\n<parameter=i>\n1\n</function></tool_call>",
                "",
                vec![typed()],
            ),
            (
                "<tool_call><function=ping></function></tool_call>\n<tool_call><function=ping></function></tool_call>",
                "",
                vec![ping(), ping()],
            ),
            ("<tool_call>?<tool_call><function=ping></function></tool_call>", "<tool_call>?", vec![ping()]),
        ] {
            check("qwen3_coder", input, text, &calls);
        }
    }

    #[test]
    fn qwen_rejects_what_is_no_call() {
        for text in [
            "<tool_call><function=unknown></function></tool_call>",
            "<tool_call><function=ping><parameter=a>1</parameter></tool_call>",
            "<tool_call><function=ping><parameter=a>1</parameter>",
            "<tool_call><function=ping>text</function></tool_call>",
            "<tool_call>{\"name\": \"ping\"}</tool_call>",
            "<function=ping",
            "<tool_call><function=ping><parameter=a>1</tool_call> more",
        ] {
            check("qwen3_coder", text, text, &[]);
        }
    }
}
