//! Llama 3's JSON: `{"name": …, "parameters": {…}}` as the whole answer, or after `<|python_tag|>`. Not the
//! built-in tools' `name.call(…)`.

use super::finder::BlockEnd;
use super::syntax::CallSyntax;
use super::{BASE, BlockStart, ToolFormat, json};

const TAG: &str = "<|python_tag|>";

pub(super) static FORMAT: ToolFormat = ToolFormat {
    names: &["llama3_json", "llama4_json", "llama"],
    begins: &[
        BlockStart::bare("{", BlockEnd::JsonCall),
        BlockStart::bare("[", BlockEnd::JsonCall),
        BlockStart::new(TAG, BlockEnd::Json),
    ],
    separators: &[';', ','],
    parse: |block, tools| json::calls(block.strip_prefix(TAG).unwrap_or(block), tools),
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
