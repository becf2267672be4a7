//! Gemma 4: `call:NAME{key:<|"|>text<|"|>,n:1}` between two markers. Keys have no quotes and strings have a
//! token as theirs. Not Gemma 3, which has no syntax of its own for calls.

use super::finder::{BlockEnd, Shield};
use super::json::{self, ObjectText, quoted};
use super::syntax::{ArgumentNotation, CallSyntax, LiteralNotation};
use super::{BASE, BlockStart, MAX_NESTING, ToolFormat, inside, offered};
use russet_wire::conversation::{Tool, ToolCall};

const QUOTE: &str = "<|\"|>";
const ESCAPE: &str = "<escape>";

pub(super) static GEMMA4: ToolFormat = ToolFormat {
    names: &["gemma4"],
    begins: &[BlockStart::new(
        "<|tool_call>",
        BlockEnd::Marker("<tool_call|>", Shield::Tags { pairs: &[(QUOTE, QUOTE)], closer: "" }),
    )],
    inner: &[QUOTE],
    parse: |block, tools| call(inside(block, "<|tool_call>", "<tool_call|>")?, QUOTE, tools),
    syntaxes: &[CallSyntax::calls("<|tool_call>call:$NAME{$PARAMETERS}<tool_call|>", "")
        .in_notation(ArgumentNotation::Literals(&notation(QUOTE)))],
    ..BASE
};

/// FunctionGemma: the same with its own tokens.
pub(super) static FUNCTIONGEMMA: ToolFormat = ToolFormat {
    names: &["functiongemma"],
    begins: &[BlockStart::new(
        "<start_function_call>",
        BlockEnd::Marker("<end_function_call>", Shield::Tags { pairs: &[(ESCAPE, ESCAPE)], closer: "" }),
    )],
    inner: &[ESCAPE],
    parse: |block, tools| call(inside(block, "<start_function_call>", "<end_function_call>")?, ESCAPE, tools),
    syntaxes: &[CallSyntax::calls("<start_function_call>call:$NAME{$PARAMETERS}<end_function_call>", "")
        .in_notation(ArgumentNotation::Literals(&notation(ESCAPE)))],
    ..BASE
};

const fn notation(quote: &'static str) -> LiteralNotation {
    LiteralNotation {
        quote: Some(quote),
        words: ["true", "false", "null"],
        between: ",",
        assign: ":",
        key_end: ":",
    }
}

fn call(body: &str, quote: &'static str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let body = body.trim().strip_prefix("call:")?;
    let (name, arguments) = body.split_at(body.find('{')?);
    let name = offered(tools, name.trim())?.name.clone();
    let mut cursor = GemmaCursor { rest: arguments, quote };
    let arguments = cursor.object(0)?;
    cursor.rest.is_empty().then(|| vec![ToolCall { id: String::new(), name, arguments }])
}

struct GemmaCursor<'a> {
    rest: &'a str,
    /// The token around a string.
    quote: &'static str,
}

impl<'a> GemmaCursor<'a> {
    fn take(&mut self, text: &str) -> bool {
        let rest = self.rest.trim_start().strip_prefix(text);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// After a member: whether the collection is at its end. `None` when neither an end nor a comma follows.
    fn ends(&mut self, close: &str) -> Option<bool> {
        if self.take(close) {
            return Some(true);
        }
        self.take(",").then_some(false)
    }

    fn until(&mut self, end: &str) -> Option<&'a str> {
        let (text, rest) = self.rest.split_once(end)?;
        self.rest = rest;
        Some(text)
    }

    fn object(&mut self, depth: usize) -> Option<String> {
        if depth >= MAX_NESTING || !self.take("{") {
            return None;
        }
        let mut members = ObjectText::default();
        let mut done = self.take("}");
        while !done {
            let key = if self.take(self.quote) {
                let key = self.until(self.quote)?;
                self.take(":").then(|| key.to_owned())?
            } else if let Some(key) = self.json_text() {
                self.take(":").then_some(key)?
            } else {
                let key = self.until(":")?.trim();
                super::is_name(key).then(|| key.to_owned())?
            };
            let value = self.value(depth)?;
            members.insert(&key, value);
            done = self.ends("}")?;
        }
        Some(members.into_text())
    }

    fn list(&mut self, depth: usize) -> Option<String> {
        if depth >= MAX_NESTING || !self.take("[") {
            return None;
        }
        let mut items = Vec::new();
        let mut done = self.take("]");
        while !done {
            items.push(self.value(depth)?);
            done = self.ends("]")?;
        }
        Some(format!("[{}]", items.join(", ")))
    }

    fn value(&mut self, depth: usize) -> Option<String> {
        if self.take(self.quote) {
            return self.until(self.quote).map(quoted);
        }
        match self.rest.trim_start().chars().next()? {
            '{' => self.object(depth + 1),
            '[' => self.list(depth + 1),
            '"' => self.json_text().map(|text| quoted(&text)),
            _ => {
                // Text without quotes is what a model writes that forgot them.
                let end = self.rest.find([',', '}', ']'])?;
                let (text, rest) = self.rest.split_at(end);
                self.rest = rest;
                let text = text.trim();
                match text {
                    "" => None,
                    "None" => Some("null".to_owned()),
                    "True" => Some("true".to_owned()),
                    "False" => Some("false".to_owned()),
                    _ if json::is_json(text) => Some(text.to_owned()),
                    _ => Some(quoted(text)),
                }
            }
        }
    }

    /// The text of a JSON string.
    fn json_text(&mut self) -> Option<String> {
        let text = self.rest.trim_start();
        if !text.starts_with('"') {
            return None;
        }
        let mut strings = serde_json::Deserializer::from_str(text).into_iter::<String>();
        let value = strings.next()?.ok()?;
        let end = strings.byte_offset();
        self.rest = &text[end..];
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use crate::parser::tests::{call, check, check_cut_offs, check_reasoning};

    #[test]
    fn gemma_arguments_become_json() {
        for (arguments, json) in [
            ("{}", "{}"),
            (
                r#"{q:<|"|>a, "b": {c} <tool_call|> 日本語 🙂
<|"|>}"#,
                r#"{"q": "a, \"b\": {c} <tool_call|> 日本語 🙂\n"}"#,
            ),
            (
                r#"{n:-1.50,b:true,z:null,l:[1,<|"|>x<|"|>,[]],o:{<|"|>k 1<|"|>:{x:2}}}"#,
                r#"{"n": -1.50, "b": true, "z": null, "l": [1, "x", []], "o": {"k 1": {"x": 2}}}"#,
            ),
            (r#"{ q : New York , "s": "a \"x\"" }"#, r#"{"q": "New York", "s": "a \"x\""}"#),
        ] {
            let one = format!("<|tool_call>call:ping{arguments}<tool_call|>");
            check("gemma4", &one, "", &[call("ping", json)]);
            check("gemma4", &format!("So\n{one}{one}"), "So", &[call("ping", json), call("ping", json)]);
            check_cut_offs("gemma4", &one);
            let one = one.replace("<|tool_call>", "<start_function_call>").replace("<|\"|>", "<escape>");
            let one = format!("{}<end_function_call>", one.strip_suffix("<tool_call|>").unwrap());
            check("functiongemma", &one, "", &[call("ping", json)]);
        }
    }

    #[test]
    fn gemma_thoughts_are_reasoning() {
        let input = "<|channel>thought\nI ping.\n<channel|><|tool_call>call:ping{}<tool_call|>";
        check_reasoning("gemma4", "gemma4", input, "I ping.", "", &[call("ping", "{}")]);
        check_reasoning("gemma4", "gemma4", "<|channel>thought\n<channel|>Hi", "", "Hi", &[]);
    }

    #[test]
    fn gemma_rejects_what_is_no_call() {
        for text in [
            "<|tool_call>call:unknown{}<tool_call|>",
            "<|tool_call>call:ping<tool_call|>",
            "<|tool_call>call:ping{a}<tool_call|>",
            "<|tool_call>call:ping{a:}<tool_call|>",
            "<|tool_call>call:ping{a:1}}<tool_call|>",
            "<|tool_call>call:ping{a:<|\"|>x}<tool_call",
        ] {
            check("gemma4", text, text, &[]);
        }
    }
}
