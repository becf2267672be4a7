//! Functionary 3.2: messages, each with a header that says to whom it goes: `>>>NAME` and a line break before a call's
//! JSON, `>>>all` before answer text. The prompt ends with the first `>>>`. Code for its `python` is text; version 3.1 is
//! in `hermes`.

use super::finder::BlockEnd;
use super::syntax::CallSyntax;
use super::{BASE, BlockStart, ToolFormat, json, offered};
use russet_wire::conversation::{Tool, ToolCall};

const MESSAGE: &str = ">>>";

pub(super) static FORMAT: ToolFormat = ToolFormat {
    names: &["functionary_v3_2"],
    begins: &[BlockStart::new(MESSAGE, BlockEnd::HeadedJson)],
    text_header: Some(">>>all\n"),
    parse,
    syntaxes: &[CallSyntax::calls("$NAME\n$ARGUMENTS", MESSAGE)],
    ..BASE
};

fn parse(block: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let (name, arguments) = block.strip_prefix(MESSAGE)?.split_once('\n')?;
    let name = offered(tools, name.trim())?.name.clone();
    Some(vec![ToolCall { id: String::new(), name, arguments: json::object(arguments)? }])
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::parser::tests::{call, check, check_cut_offs};
    use crate::parser::{OutputFormat, OutputParser, Part};

    #[test]
    fn functionary_headers_are_no_text() {
        let args = r#"{"a": "日本語 \" 🙂 >>>all", "n": {"x": [1.0]}}"#;
        let ping = || call("ping", args);
        for (input, text, calls) in [
            (format!("ping\n{args}"), "", vec![ping()]),
            (format!("ping\n{args}>>>web.search\n{{}}"), "", vec![ping(), call("web.search", "{}")]),
            (format!("all\nI look.\n>>>ping\n{args}"), "I look.", vec![ping()]),
            (format!("all\nI look.>>>ping\n{args}>>>all\nSo."), "I look.So.", vec![ping()]),
            ("all\nHello, all\n >>> 1 + 1\n2 >>>x".to_owned(), "Hello, all\n >>> 1 + 1\n2 >>>x", vec![]),
            // The model repeats the marker, or writes no header at all.
            (format!(">>>ping\n{args}"), "", vec![ping()]),
            (">>>all\nHi".to_owned(), "Hi", vec![]),
            ("Hello, all\nof you".to_owned(), "Hello, all\nof you", vec![]),
            (format!("Hello.>>>ping\n{args}"), "Hello.", vec![ping()]),
            ("all\n".to_owned(), "", vec![]),
            (String::new(), "", vec![]),
        ] {
            check("functionary_v3_2", &input, text, &calls);
            if text.is_empty() && !calls.is_empty() {
                check_cut_offs("functionary_v3_2", &input);
            }
        }
    }

    #[test]
    fn functionary_rejects_what_is_no_call() {
        for text in [
            "unknown\n{}",
            "ping\n[]",
            "ping\n{\"a\": 1",
            "ping {}",
            "python\nprint(1)",
            "pi",
            "all",
            "{\"a\": 1}",
            " ",
        ] {
            check("functionary_v3_2", text, text, &[]);
        }
    }

    #[test]
    fn functionary_has_its_header_without_tools_too() {
        let format = OutputFormat::default().tools_by_name("functionary_v3_2").unwrap();
        let mut parser = OutputParser::new(&format, Arc::new([]), false);
        assert_eq!(parser.push("al"), []);
        assert_eq!(parser.push("l\nHi."), [Part::Text("Hi.".to_owned())]);
        assert_eq!(parser.push(">>>ping\n{}"), [Part::Text(">>>ping\n{}".to_owned())]);
        assert_eq!(parser.finish(), []);
    }
}
