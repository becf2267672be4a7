//! Calls in tags with attributes: `<invoke name="…"><parameter name="…">…</parameter></invoke>`. MiniMax M2,
//! DeepSeek V3.2 and V4 (DSML), Kimi K3, Muse Glimmer and MiniCPM 5 differ in the tags alone. Step-3 has them in
//! tokens of its own (`step3`).

use super::finder::{BlockEnd, Shield};
use super::json::{self, ObjectText};
use super::schema::Schema;
use super::syntax::CallSyntax;
use super::{BASE, BlockStart, ToolFormat, offered};
use russet_wire::conversation::{Tool, ToolCall};

/// The tags of one format; a tag that opens is without the attributes and the `tag_end` behind them.
pub(super) struct InvokeTags {
    /// Around a block; none when the call is the block.
    pub blocks: &'static [(&'static str, &'static str)],
    pub call: &'static str,
    pub call_end: &'static str,
    pub parameter: &'static str,
    pub parameter_end: &'static str,
    pub tag_end: &'static str,
    /// The attributes that name the tool and the parameter.
    pub name: &'static str,
    pub key: &'static str,
}

pub(super) const XML_TAGS: InvokeTags = InvokeTags {
    blocks: &[],
    call: "<invoke",
    call_end: "</invoke>",
    parameter: "<parameter",
    parameter_end: "</parameter>",
    tag_end: ">",
    name: "name",
    key: "name",
};

const MINIMAX_TAGS: InvokeTags =
    InvokeTags { blocks: &[("<minimax:tool_call>", "</minimax:tool_call>")], ..XML_TAGS };

pub(super) static MINIMAX_M2: ToolFormat = ToolFormat {
    names: &["minimax_m2"],
    begins: &[BlockStart::new(
        "<minimax:tool_call>",
        BlockEnd::Marker(
            "</minimax:tool_call>",
            Shield::Tags { pairs: &[("<parameter", "</parameter>")], closer: "</invoke>" },
        ),
    )],
    parse: |block, tools| calls(block, &MINIMAX_TAGS, tools),
    syntaxes: &[CallSyntax::calls("<invoke name=\"$NAME\">\n$PARAMETERS</invoke>\n", "")
        .with("<parameter name=\"$KEY\">$VALUE</parameter>\n")
        .within("<minimax:tool_call>\n", "</minimax:tool_call>")],
    ..BASE
};

const DSML_TAGS: InvokeTags = InvokeTags {
    blocks: &[
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    ],
    call: "<｜DSML｜invoke",
    call_end: "</｜DSML｜invoke>",
    parameter: "<｜DSML｜parameter",
    parameter_end: "</｜DSML｜parameter>",
    ..XML_TAGS
};

const DSML_CALLS: CallSyntax =
    CallSyntax::calls("<｜DSML｜invoke name=\"$NAME\">\n$PARAMETERS</｜DSML｜invoke>\n", "")
        .with("<｜DSML｜parameter name=\"$KEY\" string=\"$STRING\">$VALUE</｜DSML｜parameter>\n");

const DSML_SHIELD: Shield = Shield::Tags {
    pairs: &[("<｜DSML｜parameter", "</｜DSML｜parameter>")],
    closer: "</｜DSML｜invoke>",
};

pub(super) static DEEPSEEK_V32: ToolFormat = ToolFormat {
    names: &["deepseek_v32"],
    syntaxes: &[DSML_CALLS.within("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>")],
    ..DSML
};
pub(super) static DEEPSEEK_V4: ToolFormat = ToolFormat {
    names: &["deepseek_v4"],
    syntaxes: &[DSML_CALLS.within("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>")],
    ..DSML
};

/// V4 renamed the outer tag; each reads both.
const DSML: ToolFormat = ToolFormat {
    begins: &[
        BlockStart::new(
            "<｜DSML｜function_calls>",
            BlockEnd::Marker("</｜DSML｜function_calls>", DSML_SHIELD),
        ),
        BlockStart::new("<｜DSML｜tool_calls>", BlockEnd::Marker("</｜DSML｜tool_calls>", DSML_SHIELD)),
    ],
    // The token of the vocabulary is this part of each tag.
    inner: &["｜DSML｜"],
    parse: |block, tools| calls(block, &DSML_TAGS, tools),
    ..BASE
};

const ATEM_TAGS: InvokeTags = InvokeTags {
    blocks: &[("<atem:function_calls>", "</atem:function_calls>")],
    call: "<atem:invoke",
    call_end: "</atem:invoke>",
    parameter: "<atem:parameter",
    parameter_end: "</atem:parameter>",
    ..XML_TAGS
};

pub(super) static ATEM: ToolFormat = ToolFormat {
    names: &["atem"],
    begins: &[BlockStart::new(
        "<atem:function_calls>",
        BlockEnd::Marker(
            "</atem:function_calls>",
            Shield::Tags { pairs: &[("<atem:parameter", "</atem:parameter>")], closer: "</atem:invoke>" },
        ),
    )],
    parse: |block, tools| calls(block, &ATEM_TAGS, tools),
    syntaxes: &[CallSyntax::calls("<atem:invoke name=\"$NAME\">\n$PARAMETERS</atem:invoke>\n", "")
        .with("<atem:parameter name=\"$KEY\">$VALUE</atem:parameter>\n")
        .within("<atem:function_calls>\n", "</atem:function_calls>")],
    ..BASE
};

const MINICPM5_TAGS: InvokeTags = InvokeTags {
    call: "<function",
    call_end: "</function>",
    parameter: "<param",
    parameter_end: "</param>",
    ..XML_TAGS
};

pub(super) static MINICPM5: ToolFormat = ToolFormat {
    names: &["minicpm5"],
    begins: &[BlockStart::new(
        "<function name=",
        BlockEnd::Marker("</function>", Shield::Tags { pairs: &[("<param", "</param>")], closer: "" }),
    )],
    parse: |block, tools| calls(block, &MINICPM5_TAGS, tools),
    syntaxes: &[CallSyntax::calls("<function name=\"$NAME\">$PARAMETERS</function>", "")
        .with("<param name=\"$KEY\">$VALUE</param>")],
    ..BASE
};

const KIMI_K3_TAGS: InvokeTags = InvokeTags {
    blocks: &[("<|open|>tools<|sep|>", "<|close|>tools<|sep|>")],
    call: "<|open|>call",
    call_end: "<|close|>call<|sep|>",
    parameter: "<|open|>argument",
    parameter_end: "<|close|>argument<|sep|>",
    tag_end: "<|sep|>",
    name: "tool",
    key: "key",
};

pub(super) static KIMI_K3: ToolFormat = ToolFormat {
    names: &["kimi_k3"],
    begins: &[BlockStart::new(
        "<|open|>tools<|sep|>",
        BlockEnd::Marker("<|close|>tools<|sep|>", Shield::Nothing),
    )],
    closers: &["<|close|>message<|sep|>"],
    inner: &["<|open|>", "<|close|>", "<|sep|>"],
    parse: |block, tools| calls(block, &KIMI_K3_TAGS, tools),
    syntaxes: &[CallSyntax::calls(
        "<|open|>call tool=\"$NAME\" index=\"$INDEX\"<|sep|>$PARAMETERS<|close|>call<|sep|>",
        "",
    )
    .with("<|open|>argument key=\"$KEY\" type=\"$TYPE\"<|sep|>$VALUE<|close|>argument<|sep|>")
    .within("<|open|>tools<|sep|>", "<|close|>tools<|sep|>")],
    ..BASE
};

fn calls(block: &str, tags: &InvokeTags, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let body = tags.blocks.iter().find_map(|(begin, end)| super::inside(block, begin, end)).unwrap_or(block);
    let mut rest = body.trim();
    let mut calls = Vec::new();
    while !rest.is_empty() {
        let (call, after) = call(rest, tags, tools)?;
        calls.push(call);
        rest = after.trim_start();
    }
    Some(calls)
}

/// The call at the beginning of `text`, and what follows it.
pub(super) fn call<'a>(text: &'a str, tags: &InvokeTags, tools: &[Tool]) -> Option<(ToolCall, &'a str)> {
    let (attributes, mut rest) = text.strip_prefix(tags.call)?.split_once(tags.tag_end)?;
    let tool = offered(tools, &attribute(attributes, tags.name)?)?;
    let schema = Schema::of(tool);
    let mut arguments = ObjectText::default();
    loop {
        rest = rest.trim_start();
        if let Some(after) = rest.strip_prefix(tags.call_end) {
            let call =
                ToolCall { id: String::new(), name: tool.name.clone(), arguments: arguments.into_text() };
            return Some((call, after));
        }
        let (attributes, text) = rest.strip_prefix(tags.parameter)?.split_once(tags.tag_end)?;
        let key = attribute(attributes, tags.key)?;
        // A value's end is one that another tag follows, so that a value may hold the marker itself.
        let (value, after) = text.match_indices(tags.parameter_end).find_map(|(at, end)| {
            let after = &text[at + end.len()..];
            let next = after.trim_start();
            (next.starts_with(tags.parameter) || next.starts_with(tags.call_end))
                .then_some((&text[..at], after))
        })?;
        let value =
            value.strip_prefix("<![CDATA[").and_then(|data| data.strip_suffix("]]>")).unwrap_or(value);
        let value = match is_string(attributes) {
            Some(true) => json::quoted(value),
            Some(false) if json::is_json(value) => value.trim().to_owned(),
            _ => schema.value(&key, value),
        };
        arguments.insert(&key, value);
        rest = after;
    }
}

/// What the attributes say: DSML has `string="true"`, Kimi K3 `type="string"`, the others nothing.
fn is_string(attributes: &str) -> Option<bool> {
    match attribute(attributes, "string") {
        Some(string) => Some(string == "true"),
        None => attribute(attributes, "type").map(|name| name == "string"),
    }
}

/// The value of the attribute `name`, with or without quotes.
fn attribute(attributes: &str, name: &str) -> Option<String> {
    let found = attributes.match_indices(name).find_map(|(at, _)| {
        let apart = attributes[..at].is_empty() || attributes[..at].ends_with(char::is_whitespace);
        attributes[at + name.len()..].strip_prefix('=').filter(|_| apart)
    })?;
    let value = match found.chars().next()? {
        quote @ ('"' | '\'') => found[1..].split_once(quote)?.0,
        _ => found.split_whitespace().next()?,
    };
    Some(value.replace("&quot;", "\"").replace("&amp;", "&"))
}

#[cfg(test)]
mod tests {
    use crate::parser::tests::{call, check, check_cut_offs, check_reasoning};

    #[test]
    fn minimax_values_are_typed_by_the_schema() {
        let arguments = r#"{"s": "日本語\n<b> 🙂 </parameter>", "i": 5, "o": {"x": [1.0]}, "free": "7"}"#;
        let one = "<invoke name=\"typed\">\n<parameter name=\"s\">日本語\n<b> 🙂 </parameter></parameter>\n\
            <parameter name=\"i\">5</parameter>\n<parameter name=\"o\">{\"x\": [1.0]}</parameter>\n\
            <parameter name=\"free\">7</parameter>\n</invoke>\n";
        let input = format!("<minimax:tool_call>\n{one}{one}</minimax:tool_call>");
        let typed = || call("typed", arguments);
        check("minimax_m2", &input, "", &[typed(), typed()]);
        check_cut_offs("minimax_m2", &input);
        check("minimax_m2", &format!("Go.\n{input}\n"), "Go.", &[typed(), typed()]);
        check("minimax_m2", &format!("<minimax:tool_call>\n{one}"), "", &[typed()]);
        let atem = input.replace("invoke", "atem:invoke").replace("parameter", "atem:parameter");
        let atem = atem.replace("minimax:tool_call", "atem:function_calls");
        let arguments = arguments.replace("parameter", "atem:parameter");
        check("atem", &atem, "", &[call("typed", &arguments), call("typed", &arguments)]);
    }

    #[test]
    fn dsml_says_which_values_are_strings() {
        let one = "<｜DSML｜invoke name=\"typed\">\n<｜DSML｜parameter name=\"s\" string=\"true\">5\n\"</｜DSML｜parameter>\n\
            <｜DSML｜parameter name=\"n\" string=\"false\">1.50</｜DSML｜parameter>\n\
            <｜DSML｜parameter name=\"free\" string=\"false\">[1, {\"x\": null}]</｜DSML｜parameter>\n\
            <｜DSML｜parameter name=\"bad\" string=\"false\">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n";
        let none = "<｜DSML｜invoke name=\"ping\">\n\n</｜DSML｜invoke>\n";
        let typed = call("typed", r#"{"s": "5\n\"", "n": 1.50, "free": [1, {"x": null}], "bad": "x"}"#);
        for tag in ["function_calls", "tool_calls"] {
            let input = format!("\n\n<｜DSML｜{tag}>\n{one}{none}</｜DSML｜{tag}>");
            check("deepseek_v32", &input, "", &[typed.clone(), call("ping", "{}")]);
            check_cut_offs("deepseek_v32", &input);
        }
    }

    #[test]
    fn minicpm_values_may_be_cdata() {
        let input = "<function name=\"typed\"><param name=\"s\"><![CDATA[a < b\n]]></param><param name=\"i\">5</param></function>";
        check("minicpm5", input, "", &[call("typed", r#"{"s": "a < b\n", "i": 5}"#)]);
        check_cut_offs("minicpm5", input);
    }

    #[test]
    fn kimi_k3_writes_each_values_type() {
        let argument = |key: &str, name: &str, value: &str| {
            format!("<|open|>argument key=\"{key}\" type=\"{name}\"<|sep|>{value}<|close|>argument<|sep|>")
        };
        let one = format!(
            "<|open|>call tool=\"typed\" index=\"1\"<|sep|>{}{}{}<|close|>call<|sep|>",
            argument("s", "string", "5\n<b>"),
            argument("free", "number", "1.50"),
            argument("q&quot;", "object", "{\"x\": 1}"),
        );
        let none = "<|open|>call tool=\"ping\" index=\"2\"<|sep|><|close|>call<|sep|>";
        let input = format!("<|open|>tools<|sep|>{one}{none}<|close|>tools<|sep|>");
        let calls = [call("typed", r#"{"s": "5\n<b>", "free": 1.50, "q\"": {"x": 1}}"#), call("ping", "{}")];
        check("kimi_k3", &input, "", &calls);
        check_cut_offs("kimi_k3", &input);
        let answer = format!(
            "<|open|>think<|sep|>Why.<|close|>think<|sep|><|open|>response<|sep|>So.<|close|>response<|sep|>{input}<|close|>message<|sep|>"
        );
        check_reasoning("kimi_k3", "kimi_k3", &answer, "Why.", "So.", &calls);
    }

    #[test]
    fn invoke_rejects_what_is_no_call() {
        for text in [
            "<minimax:tool_call></minimax:tool_call>",
            "<minimax:tool_call><invoke name=\"unknown\"></invoke></minimax:tool_call>",
            "<minimax:tool_call><invoke></invoke></minimax:tool_call>",
            "<minimax:tool_call><invoke name=\"ping\">text</invoke></minimax:tool_call>",
            "<minimax:tool_call><invoke name=\"ping\"><parameter name=\"a\">1</invoke></minimax:tool_call>",
            "<minimax:tool_call><invoke name=\"ping\">",
        ] {
            check("minimax_m2", text, text, &[]);
        }
        check("minimax_m2", "<minimax:tool_call><invoke name=ping></invoke>", "", &[call("ping", "{}")]);
    }
}
