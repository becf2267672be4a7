//! Llama 3's JSON: `{"name": …, "parameters": {…}}` as the whole answer, or after `<|python_tag|>`; there also
//! `name.call(key="value")`, as it writes calls of tools that it calls built in. Code after the tag is text.

use super::finder::BlockEnd;
use super::syntax::CallSyntax;
use super::{BASE, BlockStart, ToolFormat, json, python};

const TAG: &str = "<|python_tag|>";

pub(super) static FORMAT: ToolFormat = ToolFormat {
    names: &["llama3_json", "llama4_json", "llama"],
    begins: &[
        BlockStart::bare("{", BlockEnd::JsonCall),
        BlockStart::bare("[", BlockEnd::JsonCall),
        BlockStart::new(TAG, BlockEnd::JsonOrPython),
    ],
    separators: &[';', ','],
    parse: |block, tools| match block.strip_prefix(TAG) {
        Some(body) if !body.trim_start().starts_with(['{', '[']) => {
            Some(vec![python::call_of_method(body, tools)?])
        }
        body => json::calls(body.unwrap_or(block), tools),
    },
    syntaxes: &[CallSyntax::calls(r#"{"name": "$NAME", "parameters": $ARGUMENTS}"#, "; ")],
    ..BASE
};

#[cfg(test)]
mod tests {
    use crate::parser::tests::{call, check, check_cut_offs};

    #[test]
    fn llama_json_is_a_call_at_the_beginning() {
        let args = r#"{"q": "a } \" ]\n\u00e9 日本語 🙂", "n": {"x": [1.0]}}"#;
        let one = format!(r#"{{"name": "search", "parameters": {args}}}"#);
        let search = || call("search", args);
        for (input, text, calls) in [
            (one.clone(), "", vec![search()]),
            (format!("\n{one}"), "", vec![search()]),
            (format!("{one}; {one}"), "", vec![search(), search()]),
            (format!("[{one}, {one}]"), "", vec![search(), search()]),
            (format!("<|python_tag|>{one};{one}"), "", vec![search(), search()]),
            (format!("See: <|python_tag|> {one}\n"), "See:", vec![search()]),
            (format!("{one}\nDone."), "Done.", vec![search()]),
            (format!("{one};\n"), "", vec![search()]),
            (format!("{one}; done."), "; done.", vec![search()]),
        ] {
            check("llama3_json", &input, text, &calls);
            if text.is_empty() {
                check_cut_offs("llama3_json", &input);
            }
        }
        check(
            "llama3_json",
            r#"{"type": "function", "name": "ping", "parameters": {}}"#,
            "",
            &[call("ping", "{}")],
        );
    }

    #[test]
    fn llama_calls_built_in_tools_as_methods() {
        let search = |name: &str, q: &str| call(name, &format!(r#"{{"q": {}}}"#, serde_json::Value::from(q)));
        let quoted = "it's \"x\" (日本) 🙂";
        for (input, text, calls) in [
            ("<|python_tag|>search.call(q=\"a b\")", "", vec![search("search", "a b")]),
            (&format!("<|python_tag|>search.call(q=\"{quoted}\")"), "", vec![search("search", quoted)]),
            ("<|python_tag|>web.search.call(q=\"x\")", "", vec![search("web.search", "x")]),
            ("<|python_tag|>web.search( q='x' )", "", vec![search("web.search", "x")]),
            ("<|python_tag|> ping.call()\nDone.", "Done.", vec![call("ping", "{}")]),
            (
                "See: <|python_tag|>ping.call(); <|python_tag|>search.call(q=\"x\")",
                "See:",
                vec![call("ping", "{}"), search("search", "x")],
            ),
        ] {
            check("llama3_json", input, text, &calls);
            if text.is_empty() {
                check_cut_offs("llama3_json", input);
            }
        }
        for text in [
            "<|python_tag|>unknown.call(q=\"x\")",
            "<|python_tag|>search.call(\"x\")",
            "<|python_tag|>search.call(q=\"x\"",
            "<|python_tag|>search.call(q=x)",
            "<|python_tag|>search.call(q=\"x\"]",
            "<|python_tag|>import math\nprint(math.pi)",
        ] {
            check("llama3_json", text, text, &[]);
        }
    }

    #[test]
    fn llama_leaves_other_json_alone() {
        for text in [
            r#"{"answer": {"name": "ping", "parameters": {}}}"#,
            r#"{"name": "unknown", "parameters": {}}"#,
            r#"Text {"name": "ping", "parameters": {}}"#,
            r#"{"name": "ping", "parameters": 5}"#,
            r#"{"name": "ping", "parameters": {"#,
            "{} and text",
            "[1, 2]",
            "{",
            "<|python_tag|>print(1)",
            "<|python_tag|>",
        ] {
            check("llama3_json", text, text, &[]);
        }
        let call_in_broken = r#"<|python_tag|>x <|python_tag|>{"name": "ping", "parameters": {}}"#;
        check("llama3_json", call_in_broken, "<|python_tag|>x", &[call("ping", "{}")]);
    }
}
