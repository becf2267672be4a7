//! MiniMax M3: arguments as elements, objects and arrays too. A special token stands before every tag, so that
//! no text of a value is a tag. The schema says which leaf is a string.

use serde_json::Value;

use super::finder::{BlockEnd, Shield};
use super::json::ObjectText;
use super::schema::Schema;
use super::syntax::{ArgumentNotation, CallSyntax};
use super::{BASE, BlockStart, MAX_NESTING, ToolFormat, offered};
use russet_wire::conversation::{Tool, ToolCall};

const TOKEN: &str = "]<]minimax[>[";
const BEGIN: &str = "]<]minimax[>[<tool_call>";
const END: &str = "]<]minimax[>[</tool_call>";
const INVOKE: &str = "<invoke name=\"";

pub(super) static FORMAT: ToolFormat = ToolFormat {
    names: &["minimax_m3"],
    begins: &[BlockStart::new(BEGIN, BlockEnd::Marker(END, Shield::Nothing))],
    inner: &[TOKEN],
    parse,
    syntaxes: &[CallSyntax::calls(
        "]<]minimax[>[<invoke name=\"$NAME\">$PARAMETERS]<]minimax[>[</invoke>\n",
        "",
    )
    .in_notation(ArgumentNotation::Elements(TOKEN))
    .within("]<]minimax[>[<tool_call>\n", END)],
    ..BASE
};

fn parse(block: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let mut rest = super::inside(block, BEGIN, END)?.trim();
    let mut calls = Vec::new();
    while !rest.is_empty() {
        let (name, body) = rest.strip_prefix(TOKEN)?.strip_prefix(INVOKE)?.split_once("\">")?;
        let tool = offered(tools, name)?;
        let schema = Schema::of(tool);
        let mut reader = Reader { schema: &schema, rest: body };
        let content = reader.content("invoke", Some(schema.root()), 0)?;
        let arguments = match content {
            Content::Members(members) => members.into_text(),
            Content::Text(text) if text.trim().is_empty() => "{}".to_owned(),
            Content::Text(_) | Content::Items(_) => return None,
        };
        calls.push(ToolCall { id: String::new(), name: tool.name.clone(), arguments });
        rest = reader.rest.trim_start();
    }
    Some(calls)
}

/// What stands in an element.
enum Content<'a> {
    Text(&'a str),
    Items(Vec<String>),
    Members(ObjectText),
}

struct Reader<'s, 'a> {
    schema: &'s Schema,
    rest: &'a str,
}

impl<'s, 'a> Reader<'s, 'a> {
    /// The content of the element `name` up to behind its end.
    fn content(&mut self, name: &str, schema: Option<&'s Value>, depth: usize) -> Option<Content<'a>> {
        if depth > MAX_NESTING {
            return None;
        }
        let (text, mut rest) = self.rest.split_once(TOKEN)?;
        let (mut items, mut members) = (Vec::new(), ObjectText::default());
        let mut is_list = self.schema.is_array(schema);
        let mut children = false;
        loop {
            if let Some(after) = rest.strip_prefix("</") {
                self.rest = after.strip_prefix(name)?.strip_prefix('>')?;
                return Some(match (children, is_list) {
                    (false, _) => Content::Text(text),
                    (true, Some(true)) => Content::Items(items),
                    (true, _) => Content::Members(members),
                });
            }
            let (child, after) = rest.strip_prefix('<')?.split_once('>')?;
            self.rest = after;
            children = true;
            text.trim().is_empty().then_some(())?;
            // Without a schema, a first child `item` makes it a list.
            if *is_list.get_or_insert(child == "item") {
                (child == "item").then_some(())?;
                let part = schema.and_then(|schema| self.schema.items(schema));
                items.push(self.value(child, part, depth + 1)?);
            } else {
                let part = schema.and_then(|schema| self.schema.property(schema, child));
                let value = self.value(child, part, depth + 1)?;
                members.insert(child, value);
            }
            let (between, next) = self.rest.split_once(TOKEN)?;
            between.trim().is_empty().then_some(())?;
            rest = next;
        }
    }

    fn value(&mut self, name: &str, schema: Option<&'s Value>, depth: usize) -> Option<String> {
        Some(match self.content(name, schema, depth)? {
            Content::Items(items) => format!("[{}]", items.join(", ")),
            Content::Members(members) => members.into_text(),
            Content::Text(text) => match self.schema.is_array(schema) {
                Some(true) if text.trim().is_empty() => "[]".to_owned(),
                Some(false) if text.trim().is_empty() => "{}".to_owned(),
                _ => self.schema.value_as(schema, text),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::parser::tests::{call, check, check_cut_offs};

    #[test]
    fn minimax_m3_elements_become_json() {
        let body = "<s>a < b </s>\n日本語 🙂~</s>~<i>5~</i>~<o>~<x>1~</x>~<l>~<item>y~</item>~<item>z~</item>~</l>~</o>\
            ~<a>~<item>~<k>v~</k>~</item>~</a>~<b>true~</b>";
        let one = format!("~<invoke name=\"typed\">~{body}~</invoke>\n");
        let input = format!("~<tool_call>\n{one}~<invoke name=\"ping\">~</invoke>\n~</tool_call>")
            .replace('~', "]<]minimax[>[");
        let arguments = r#"{"s": "a < b </s>\n日本語 🙂", "i": 5, "o": {"x": "1", "l": ["y", "z"]}, "a": [{"k": "v"}], "b": true}"#;
        check("minimax_m3", &input, "", &[call("typed", arguments), call("ping", "{}")]);
        check_cut_offs("minimax_m3", &input);
        let empty = "~<tool_call>~<invoke name=\"typed\">~<o>~</o>~<a>~</a>~<s>~</s>~</invoke>~</tool_call>";
        let expected = call("typed", r#"{"o": {}, "a": [], "s": ""}"#);
        check("minimax_m3", &empty.replace('~', "]<]minimax[>["), "", &[expected]);
    }

    #[test]
    fn minimax_m3_rejects_what_is_no_call() {
        for text in [
            "~<tool_call>~</tool_call>",
            "~<tool_call>~<invoke name=\"unknown\">~</invoke>~</tool_call>",
            "~<tool_call>~<invoke name=\"ping\">text~</invoke>~</tool_call>",
            "~<tool_call>~<invoke name=\"ping\">~<a>1~</b>~</invoke>~</tool_call>",
            "~<tool_call>~<invoke name=\"ping\">~<a>text~<b>1~</b>~</a>~</invoke>~</tool_call>",
            "~<tool_call>~<invoke name=\"ping\">~<a>1",
        ] {
            let text = text.replace('~', "]<]minimax[>[");
            check("minimax_m3", &text, &text, &[]);
        }
    }
}
