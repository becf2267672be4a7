//! Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, and the formats that
//! differ from it in their markers or in a list around the calls.

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::finder::{BlockEnd, Shield};
use super::syntax::{CallSyntax, JSON_CALL};
use super::{BASE, BlockStart, ToolFormat, inside, json, offered};
use russet_wire::conversation::{Tool, ToolCall};

const fn until(marker: &'static str) -> BlockEnd {
    BlockEnd::Marker(marker, Shield::JsonString)
}

/// `<tool_call>` around each call.
pub(super) static HERMES: ToolFormat = ToolFormat {
    names: &["hermes", "qwen", "qwen2_5", "qwen3", "granite4", "ernie45", "mimo", "reka"],
    begins: &[BlockStart::new("<tool_call>", until("</tool_call>"))],
    parse: |block, tools| json::calls(inside(block, "<tool_call>", "</tool_call>")?, tools),
    syntaxes: &[CallSyntax::calls(
        "<tool_call>\n{\"name\": \"$NAME\", \"arguments\": $ARGUMENTS}\n</tool_call>",
        "\n",
    )],
    ..BASE
};

/// LongCat: the same with its own tag.
pub(super) static LONGCAT: ToolFormat = ToolFormat {
    names: &["longcat"],
    begins: &[BlockStart::new("<longcat_tool_call>", until("</longcat_tool_call>"))],
    parse: |block, tools| json::calls(inside(block, "<longcat_tool_call>", "</longcat_tool_call>")?, tools),
    syntaxes: &[CallSyntax::calls(
        r#"<longcat_tool_call>{"name": "$NAME", "arguments": $ARGUMENTS}</longcat_tool_call>"#,
        "\n",
    )],
    ..BASE
};

/// InternLM 2.
pub(super) static INTERNLM: ToolFormat = ToolFormat {
    names: &["internlm"],
    begins: &[BlockStart::new("<|action_start|><|plugin|>", until("<|action_end|>"))],
    inner: &["<|action_start|>", "<|plugin|>"],
    parse: |block, tools| json::calls(inside(block, "<|action_start|><|plugin|>", "<|action_end|>")?, tools),
    syntaxes: &[CallSyntax::single(
        "<|action_start|><|plugin|>\n{\"name\": \"$NAME\", \"parameters\": $ARGUMENTS}<|action_end|>",
    )],
    ..BASE
};

/// Granite 3: a list after a marker, without an end.
pub(super) static GRANITE: ToolFormat = ToolFormat {
    names: &["granite", "granite-20b-fc"],
    begins: &[
        BlockStart::new("<|tool_call|>", BlockEnd::Json),
        BlockStart::new("<tool_call>", BlockEnd::Json),
        BlockStart::new("<function_call>", BlockEnd::Json),
    ],
    closers: &["</tool_call>"],
    parse: |block, tools| {
        json::calls(behind(block, &["<|tool_call|>", "<tool_call>", "<function_call>"])?, tools)
    },
    syntaxes: &[CallSyntax::calls(JSON_CALL, ", ").within("<|tool_call|>[", "]")],
    ..BASE
};

/// Apriel, Jamba and MiniMax M1: a list, or one call a line, in one pair of tags.
pub(super) static TOOL_CALLS: ToolFormat = ToolFormat {
    names: &["jamba", "apriel", "minimax", "minimax_m1", "hunyuan_a13b"],
    begins: &[BlockStart::new("<tool_calls>", until("</tool_calls>"))],
    parse: |block, tools| lines_or_list(inside(block, "<tool_calls>", "</tool_calls>")?, tools),
    syntaxes: &[CallSyntax::calls(JSON_CALL, ", ").within("<tool_calls>[", "]</tool_calls>")],
    ..BASE
};

/// Nemotron Nano v2.
pub(super) static NEMOTRON: ToolFormat = ToolFormat {
    names: &["nemotron_nano_v2", "nemotron_json"],
    begins: &[BlockStart::new("<TOOLCALL>", until("</TOOLCALL>"))],
    parse: |block, tools| json::calls(inside(block, "<TOOLCALL>", "</TOOLCALL>")?, tools),
    syntaxes: &[CallSyntax::calls(JSON_CALL, ", ").within("<TOOLCALL>[", "]</TOOLCALL>")],
    ..BASE
};

/// Command R7B and later: `tool_name` and `parameters`.
pub(super) static COHERE: ToolFormat = ToolFormat {
    names: &["cohere", "cohere_command3"],
    begins: &[BlockStart::new("<|START_ACTION|>", until("<|END_ACTION|>"))],
    parse: |block, tools| json::calls(inside(block, "<|START_ACTION|>", "<|END_ACTION|>")?, tools),
    syntaxes: &[CallSyntax::calls(
        r#"{"tool_call_id": "$INDEX", "tool_name": "$NAME", "parameters": $ARGUMENTS}"#,
        ",\n",
    )
    .within("<|START_ACTION|>[\n", "\n]<|END_ACTION|>")],
    ..BASE
};

/// Command R and R+: a fenced list.
pub(super) static COMMAND_R: ToolFormat = ToolFormat {
    names: &["command_r"],
    begins: &[
        BlockStart::new("Action:\n```json", until("```")),
        BlockStart::new("Action: ```json", until("```")),
    ],
    parse: |block, tools| {
        json::calls(behind(block, &["Action:\n```json", "Action: ```json"])?.trim_end_matches('`'), tools)
    },
    syntaxes: &[CallSyntax::calls(r#"{"tool_name": "$NAME", "parameters": $ARGUMENTS}"#, ",\n")
        .within("Action:\n```json\n[\n", "\n]\n```")],
    ..BASE
};

/// Phi 4 mini.
pub(super) static PHI4: ToolFormat = ToolFormat {
    names: &["phi4_mini_json"],
    begins: &[BlockStart::new("<|tool_call|>", BlockEnd::Json), BlockStart::new("functools", BlockEnd::Json)],
    closers: &["<|/tool_call|>"],
    parse: |block, tools| json::calls(behind(block, &["<|tool_call|>", "functools"])?, tools),
    syntaxes: &[
        CallSyntax::calls(JSON_CALL, ", ").within("<|tool_call|>[", "]<|/tool_call|>").of("<|tool_call|>"),
        CallSyntax::calls(JSON_CALL, ", ").within("functools[", "]"),
    ],
    ..BASE
};

/// FireFunction: `functools[…]`.
pub(super) static FUNCTOOLS: ToolFormat = ToolFormat {
    names: &["functools", "firefunction"],
    begins: &[BlockStart::new("functools", BlockEnd::Json)],
    parse: |block, tools| json::calls(behind(block, &["functools"])?, tools),
    syntaxes: &[CallSyntax::calls(JSON_CALL, ", ").within("functools[", "]")],
    ..BASE
};

/// GigaChat 3: both generations.
pub(super) static GIGACHAT: ToolFormat = ToolFormat {
    names: &["gigachat3"],
    begins: &[
        BlockStart::new("<|function_call|>", BlockEnd::Json),
        BlockStart::new("function call<|role_sep|>", BlockEnd::Json),
    ],
    inner: &["<|role_sep|>", "<|message_sep|>"],
    closers: &["<|message_sep|>"],
    parse: |block, tools| {
        json::calls(behind(block, &["<|function_call|>", "function call<|role_sep|>"])?, tools)
    },
    syntaxes: &[CallSyntax::single(r#"<|function_call|>{"name": "$NAME", "arguments": $ARGUMENTS}"#)],
    ..BASE
};

/// Apertus: a list of objects whose one key is the name.
pub(super) static APERTUS: ToolFormat = ToolFormat {
    names: &["apertus"],
    begins: &[BlockStart::new("<|tools_prefix|>", until("<|tools_suffix|>"))],
    parse: apertus_calls,
    syntaxes: &[
        CallSyntax::calls(r#"{"$NAME": $ARGUMENTS}"#, ", ").within("<|tools_prefix|>[", "]<|tools_suffix|>")
    ],
    ..BASE
};

/// Functionary 3.1: the name is in the tag.
pub(super) static FUNCTIONARY: ToolFormat = ToolFormat {
    names: &["functionary", "functionary_v3_1"],
    // The body is JSON only behind the name, so strings shield nothing here.
    begins: &[BlockStart::new("<function=", BlockEnd::Marker("</function>", Shield::Nothing))],
    parse: functionary_calls,
    syntaxes: &[CallSyntax::calls("<function=$NAME>$ARGUMENTS</function>", "")],
    ..BASE
};

fn behind<'a>(block: &'a str, markers: &[&str]) -> Option<&'a str> {
    markers.iter().find_map(|marker| block.strip_prefix(marker))
}

fn lines_or_list(body: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    if body.trim_start().starts_with('[') { json::calls(body, tools) } else { json::call_lines(body, tools) }
}

fn functionary_calls(block: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let (name, arguments) = inside(block, "<function=", "</function>")?.split_once('>')?;
    let name = offered(tools, name.trim())?.name.clone();
    Some(vec![ToolCall { id: String::new(), name, arguments: json::object(arguments)? }])
}

fn apertus_calls(block: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let body = inside(block, "<|tools_prefix|>", "<|tools_suffix|>")?;
    let items: Vec<NamedArguments> = serde_json::from_str(body.trim()).ok()?;
    let mut calls = Vec::new();
    for NamedArguments(name, arguments) in items {
        let name = offered(tools, &name)?.name.clone();
        calls.push(ToolCall { id: String::new(), name, arguments: json::object(arguments.get())? });
    }
    Some(calls)
}

/// `{NAME: ARGUMENTS}`.
struct NamedArguments<'a>(String, &'a RawValue);

impl<'de> Deserialize<'de> for NamedArguments<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneMember;
        impl<'de> Visitor<'de> for OneMember {
            type Value = NamedArguments<'de>;

            fn expecting(&self, formatter: &mut std::fmt::Formatter) -> std::fmt::Result {
                formatter.write_str("an object with one member")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let member = map.next_entry()?.ok_or_else(|| serde::de::Error::invalid_length(0, &self))?;
                if map.next_key::<String>()?.is_some() {
                    return Err(serde::de::Error::invalid_length(2, &self));
                }
                Ok(NamedArguments(member.0, member.1))
            }
        }
        deserializer.deserialize_map(OneMember)
    }
}

#[cfg(test)]
mod tests {
    use crate::parser::tests::{call, check, check_cut_offs};

    const ARGS: &str = r#"{"z": 1.50, "a": {"q": "say \"hi\"\n", "u": "\u00e9 日本語 🙂"}, "n": [1, 1e5]}"#;

    #[test]
    fn hermes_calls_keep_the_models_own_text() {
        let one = format!("<tool_call>\n{{\"name\": \"search\", \"arguments\": {ARGS}}}\n</tool_call>");
        check("hermes", &one, "", &[call("search", ARGS)]);
        check_cut_offs("hermes", &one);
        let two = format!("Let me see.\n{one}\n{one}\n");
        check("hermes", &two, "Let me see.", &[call("search", ARGS), call("search", ARGS)]);
        check("hermes", &format!("{one}\n\nDone."), "Done.", &[call("search", ARGS)]);
        check("hermes", &format!("A.\n{one}\nB."), "A.\nB.", &[call("search", ARGS)]);
    }

    #[test]
    fn hermes_accepts_what_models_vary() {
        let cases = [
            (r#"<tool_call>{"name": "ping"}</tool_call>"#, call("ping", "{}")),
            (r#"<tool_call>{"name": "ping", "parameters": {}}</tool_call>"#, call("ping", "{}")),
            (r#"<tool_call>{"arguments": {"a":1}, "name": "ping"}</tool_call>"#, call("ping", r#"{"a":1}"#)),
            (
                r#"<tool_call>{"name": "ping", "arguments": "{\"a\": \"b\"}"}</tool_call>"#,
                call("ping", r#"{"a": "b"}"#),
            ),
            (r#"<tool_call>[{"name": "ping", "arguments": {}}]</tool_call>"#, call("ping", "{}")),
            // The end marker is content in a string, and may be missing at the end.
            (
                r#"<tool_call>{"name": "ping", "arguments": {"a": "</tool_call>"}}</tool_call>"#,
                call("ping", r#"{"a": "</tool_call>"}"#),
            ),
            (r#"<tool_call>{"name": "ping", "arguments": {}}"#, call("ping", "{}")),
        ];
        for (input, expected) in cases {
            check("hermes", input, "", &[expected]);
        }
    }

    #[test]
    fn hermes_finds_a_call_behind_a_broken_one() {
        let good = r#"<tool_call>{"name": "ping", "arguments": {}}</tool_call>"#;
        for broken in ["<tool_call>", "<tool_call>{\"name\": \"pi\n</tool_call>", "<tool_call>{}</tool_call>"]
        {
            check("hermes", &format!("{broken}\n{good}"), broken, &[call("ping", "{}")]);
        }
        // The first call lacks its end.
        let open = r#"<tool_call>{"name": "ping", "arguments": {}}"#;
        check("hermes", &format!("{open}\n{good}"), "", &[call("ping", "{}"), call("ping", "{}")]);
    }

    #[test]
    fn hermes_rejects_what_is_no_call() {
        for broken in [
            r#"<tool_call>{"name": "unknown", "arguments": {}}</tool_call>"#,
            r#"<tool_call>{"name": "ping", "arguments": [1]}</tool_call>"#,
            r#"<tool_call>{"name": "ping", "arguments": "text"}</tool_call>"#,
            r#"<tool_call>{"name": "ping", "arguments": null}</tool_call>"#,
            r#"<tool_call>{"name": "ping", "arguments": {}} and</tool_call>"#,
            r#"<tool_call>{"name": "ping", "arguments": {"a": 1</tool_call>"#,
            "<tool_call></tool_call>",
            "<tool_call>[]</tool_call>",
            "<tool_call>",
            "a < b <tool_cal",
        ] {
            check("hermes", broken, broken, &[]);
        }
    }

    #[test]
    fn relatives_of_hermes_give_their_calls() {
        let ping = r#"{"name": "ping", "arguments": {"a": "]}"}}"#;
        let args = r#"{"a": "]}"}"#;
        let list = format!("[{ping}, {ping}]");
        let two = [call("ping", args), call("ping", args)];
        for (format, input) in [
            ("granite", format!("<|tool_call|>{list}")),
            ("granite", format!("<tool_call>{list}</tool_call>\n")),
            ("granite", format!("<function_call> {ping}\n<function_call> {ping}")),
            ("apriel", format!("<tool_calls>{list}</tool_calls>")),
            ("apriel", format!("<tool_calls>\n{ping}\n{ping}\n</tool_calls>")),
            ("longcat", format!("<longcat_tool_call>\n{list}\n</longcat_tool_call>")),
            ("internlm", format!("<|action_start|><|plugin|>\n{list}<|action_end|>\n")),
            ("nemotron_json", format!("<TOOLCALL>{list}</TOOLCALL>")),
            ("phi4_mini_json", format!("functools{list}")),
            ("phi4_mini_json", format!("<|tool_call|>{list}<|/tool_call|>")),
            ("functools", format!(" functools{list}")),
            (
                "gigachat3",
                format!("<|function_call|>{ping}<|message_sep|>\n\nfunction call<|role_sep|>\n{ping}"),
            ),
            (
                "apertus",
                format!("<|tools_prefix|>[{{\"ping\": {args}}}, {{\"ping\":{args}}}]<|tools_suffix|>"),
            ),
            ("functionary", format!("<function=ping>{args}</function><function=ping>{args}</function>")),
        ] {
            check(format, &input, "", &two);
            check_cut_offs(format, &input);
        }
        let cohere = r#"<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "ping", "parameters": {"a": "]}"}}
]<|END_ACTION|>"#;
        check("cohere", cohere, "", &[call("ping", args)]);
        let action = format!(
            "I ping.\nAction:\n```json\n[\n    {{\"tool_name\": \"ping\", \"parameters\": {args}}}\n]\n```"
        );
        check("command_r", &action, "I ping.", &[call("ping", args)]);
    }

    #[test]
    fn functools_in_prose_stays_text() {
        check("functools", "Use functools in Python.", "Use functools in Python.", &[]);
        check("phi4_mini_json", "functools[0] and", "functools[0] and", &[]);
        check("apertus", "<|tools_prefix|>[{}]<|tools_suffix|>", "<|tools_prefix|>[{}]<|tools_suffix|>", &[]);
    }
}
