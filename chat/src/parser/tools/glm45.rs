//! GLM 4.5 to 4.7, and those that follow it (Ling, Spark, Laguna): a name, then `<arg_key>` and `<arg_value>`
//! pairs. Hunyuan 3 has the same with its own tags. Values are plain text, which the tool's schema types.

use super::finder::{BlockEnd, Shield};
use super::json::ObjectText;
use super::schema::Schema;
use super::syntax::CallSyntax;
use super::{BASE, BlockStart, ToolFormat, offered};
use russet_wire::conversation::{Tool, ToolCall};

/// The tags inside a call.
struct GlmTags {
    key: (&'static str, &'static str),
    value: (&'static str, &'static str),
}

const GLM_TAGS: GlmTags =
    GlmTags { key: ("<arg_key>", "</arg_key>"), value: ("<arg_value>", "</arg_value>") };
const HUNYUAN_TAGS: GlmTags = GlmTags {
    key: ("<arg_key:opensource>", "</arg_key:opensource>"),
    value: ("<arg_value:opensource>", "</arg_value:opensource>"),
};

/// A block needs its end: nothing in it says that no argument follows.
const fn begin(
    marker: &'static str,
    end: &'static str,
    values: &'static [(&'static str, &'static str)],
) -> BlockStart {
    BlockStart {
        marker,
        bare: false,
        end: BlockEnd::Marker(end, Shield::Tags { pairs: values, closer: "" }),
        open_end: false,
    }
}

pub(super) static GLM45: ToolFormat = ToolFormat {
    names: &["glm45", "glm47", "glm", "ling3", "poolside_v1"],
    begins: &[begin("<tool_call>", "</tool_call>", &[GLM_TAGS.value])],
    inner: &["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    parse: |block, tools| {
        let body = block.strip_prefix("<tool_call>")?.strip_suffix("</tool_call>")?;
        let name_end = body.find(GLM_TAGS.key.0).unwrap_or(body.len());
        let (name, pairs) = body.split_at(name_end);
        Some(vec![call(name, pairs, &GLM_TAGS, tools)?])
    },
    syntaxes: &[CallSyntax::calls("<tool_call>$NAME$LINE$PARAMETERS</tool_call>", "$LINE")
        .with("<arg_key>$KEY</arg_key>$LINE<arg_value>$VALUE</arg_value>$LINE")],
    ..BASE
};

pub(super) static HUNYUAN: ToolFormat = ToolFormat {
    names: &["hy_v3"],
    begins: &[begin("<tool_calls:opensource>", "</tool_calls:opensource>", &[HUNYUAN_TAGS.value])],
    inner: &[
        "<tool_call:opensource>",
        "</tool_call:opensource>",
        "<tool_sep:opensource>",
        "<arg_key:opensource>",
        "</arg_key:opensource>",
        "<arg_value:opensource>",
        "</arg_value:opensource>",
    ],
    parse: hunyuan_calls,
    syntaxes: &[CallSyntax::calls("<tool_call:opensource>$NAME<tool_sep:opensource>\n$PARAMETERS</tool_call:opensource>", "\n").with("<arg_key:opensource>$KEY</arg_key:opensource>\n<arg_value:opensource>$VALUE</arg_value:opensource>\n").within("<tool_calls:opensource>\n", "\n</tool_calls:opensource>")],
    ..BASE
};

fn hunyuan_calls(block: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let body = block.strip_prefix("<tool_calls:opensource>")?.strip_suffix("</tool_calls:opensource>")?;
    let mut rest = body.trim();
    let mut calls = Vec::new();
    while !rest.is_empty() {
        let (name, after) =
            rest.strip_prefix("<tool_call:opensource>")?.split_once("<tool_sep:opensource>")?;
        // The end of the call is the first one outside a value.
        let end = "</tool_call:opensource>";
        let found = after.match_indices(end).find(|(at, _)| {
            let pairs = after[..*at].trim_end();
            pairs.is_empty() || pairs.ends_with(HUNYUAN_TAGS.value.1)
        });
        let (at, _) = found?;
        calls.push(call(name, &after[..at], &HUNYUAN_TAGS, tools)?);
        rest = after[at + end.len()..].trim_start();
    }
    Some(calls)
}

fn call(name: &str, pairs: &str, tags: &GlmTags, tools: &[Tool]) -> Option<ToolCall> {
    let tool = offered(tools, name.trim())?;
    let schema = Schema::of(tool);
    let mut arguments = ObjectText::default();
    let mut rest = pairs.trim();
    while !rest.is_empty() {
        let (key, after) = rest.strip_prefix(tags.key.0)?.split_once(tags.key.1)?;
        let text = after.trim_start().strip_prefix(tags.value.0)?;
        let (at, next) = text.match_indices(tags.value.1).find_map(|(at, end)| {
            let next = text[at + end.len()..].trim_start();
            (next.is_empty() || next.starts_with(tags.key.0)).then_some((at, next))
        })?;
        let key = key.trim();
        arguments.insert(key, schema.value(key, &text[..at]));
        rest = next;
    }
    Some(ToolCall { id: String::new(), name: tool.name.clone(), arguments: arguments.into_text() })
}

#[cfg(test)]
mod tests {
    use crate::parser::tests::{call, check, check_cut_offs};

    #[test]
    fn glm_calls_are_typed_by_the_schema() {
        let arguments = r#"{"s": "日本語\n\"x\" 🙂", "i": 5, "b": true, "o": {"x": [1.0]}, "free": "7"}"#;
        let glm45 = "<tool_call>typed\n<arg_key>s</arg_key>\n<arg_value>日本語\n\"x\" 🙂</arg_value>\n<arg_key>i</arg_key>\n\
            <arg_value>5</arg_value>\n<arg_key>b</arg_key>\n<arg_value>true</arg_value>\n<arg_key>o</arg_key>\n\
            <arg_value>{\"x\": [1.0]}</arg_value>\n<arg_key>free</arg_key>\n<arg_value>7</arg_value>\n</tool_call>";
        let glm47 = glm45.replace(">\n", ">").replace("typed\n", "typed");
        let typed = || call("typed", arguments);
        check("glm45", glm45, "", &[typed()]);
        check_cut_offs("glm45", glm45);
        check("glm47", &format!("Go.\n{glm47}{glm47}"), "Go.", &[typed(), typed()]);
        check_cut_offs("glm47", &glm47);
    }

    #[test]
    fn glm_end_marker_is_content_in_a_value() {
        let input = "<tool_call>search<arg_key>q</arg_key><arg_value></tool_call></arg_value></tool_call>";
        check("glm45", input, "", &[call("search", r#"{"q": "</tool_call>"}"#)]);
        check("glm45", "<tool_call>ping</tool_call> after", "after", &[call("ping", "{}")]);
        check("glm45", "<tool_call>ping\n</tool_call>", "", &[call("ping", "{}")]);
    }

    #[test]
    fn glm_rejects_what_is_no_call() {
        for text in [
            "<tool_call>unknown</tool_call>",
            "<tool_call>ping",
            "<tool_call>ping<arg_key>a</arg_key></tool_call>",
            "<tool_call>ping<arg_key>a</arg_key><arg_value>1</tool_call>",
            "<tool_call></tool_call>",
        ] {
            check("glm45", text, text, &[]);
        }
    }

    #[test]
    fn hunyuan_blocks_hold_several_calls() {
        let o = ":opensource>";
        let one = format!(
            "<tool_call{o}typed<tool_sep{o}\n<arg_key{o}i</arg_key{o}\n<arg_value{o}5</arg_value{o}\n</tool_call{o}\n"
        );
        let none = format!("<tool_call{o}ping<tool_sep{o}\n</tool_call{o}\n");
        let input = format!("<tool_calls{o}\n{one}{none}</tool_calls{o}");
        check("hy_v3", &input, "", &[call("typed", r#"{"i": 5}"#), call("ping", "{}")]);
        check_cut_offs("hy_v3", &input);
    }
}
