//! Calls in Python's syntax: Llama 3.2 and 4 as the whole answer, LFM2 between two markers. The literals are
//! read by `python`.

use super::finder::{BlockEnd, Shield};
use super::syntax::{CallSyntax, PYTHON};
use super::{BASE, BlockStart, ToolFormat, inside, python};

/// `[f(a=1), g()]` at the beginning of the answer.
pub(super) static PYTHONIC: ToolFormat = ToolFormat {
    names: &["pythonic", "llama4_pythonic", "llama4"],
    begins: &[
        BlockStart::bare("[", BlockEnd::PythonList),
        BlockStart::new("<|python_start|>", BlockEnd::Marker("<|python_end|>", Shield::Nothing)),
    ],
    parse: |block, tools| match inside(block, "<|python_start|>", "<|python_end|>") {
        Some(body) => python::calls(body, tools),
        None => python::calls(block, tools),
    },
    syntaxes: &[CallSyntax::calls("$NAME($PARAMETERS)", ", ").in_notation(PYTHON).within("[", "]")],
    ..BASE
};

/// `<|tool_call_start|>[f(a=1)]<|tool_call_end|>`.
pub(super) static LFM2: ToolFormat = ToolFormat {
    names: &["lfm2"],
    begins: &[BlockStart::new("<|tool_call_start|>", BlockEnd::Marker("<|tool_call_end|>", Shield::Nothing))],
    parse: |block, tools| {
        let body = inside(block, "<|tool_call_start|>", "<|tool_call_end|>")?.trim();
        // A list that was cut off behind a call is not complete.
        if body.starts_with('[') != body.ends_with(']') || !body.ends_with([']', ')']) {
            return None;
        }
        python::calls(body, tools)
    },
    syntaxes: &[CallSyntax::calls("$NAME($PARAMETERS)", ", ")
        .in_notation(PYTHON)
        .within("<|tool_call_start|>[", "]<|tool_call_end|>")],
    ..BASE
};

/// Olmo 3: a call a line, without a list.
pub(super) static OLMO3: ToolFormat = ToolFormat {
    names: &["olmo3"],
    begins: &[BlockStart::new("<function_calls>", BlockEnd::Marker("</function_calls>", Shield::Nothing))],
    parse: |block, tools| python::calls(inside(block, "<function_calls>", "</function_calls>")?, tools),
    syntaxes: &[CallSyntax::calls("$NAME($PARAMETERS)", "\n")
        .in_notation(PYTHON)
        .within("<function_calls>", "</function_calls>")],
    ..BASE
};

#[cfg(test)]
mod tests {
    use crate::parser::tests::{call, check, check_cut_offs};

    #[test]
    fn pythonic_lists_are_calls() {
        let ping = |arguments: &str| call("ping", arguments);
        let cases = [
            ("[ping()]", vec![ping("{}")]),
            (
                r#"[ping(a="x\"y", b='z'), ping(n=-1.5)]"#,
                vec![ping(r#"{"a": "x\"y", "b": "z"}"#), ping(r#"{"n": -1.5}"#)],
            ),
            (
                "[ping(\n  m=[[1, [2]]], d={\"k\": [True, None]},\n)]",
                vec![ping(r#"{"m": [[1, [2]]], "d": {"k": [true, null]}}"#)],
            ),
            (r#"[ping(a="]) 日本語 🙂 \u00e9")]"#, vec![ping(r#"{"a": "]) 日本語 🙂 é"}"#)]),
            ("[ping(a='it's')]", vec![ping(r#"{"a": "it's"}"#)]),
            ("[web.search(q='x')]", vec![call("web.search", r#"{"q": "x"}"#)]),
        ];
        for (input, calls) in cases {
            check("pythonic", input, "", &calls);
            check("pythonic", &format!("  {input}\n"), "", &calls);
            check("pythonic", &format!("<|python_start|>{input}<|python_end|>"), "", &calls);
            check("lfm2", &format!("<|tool_call_start|>{input}<|tool_call_end|>"), "", &calls);
            check("lfm2", &format!("So: <|tool_call_start|>{input}<|tool_call_end|>\nok"), "So:\nok", &calls);
            check_cut_offs("pythonic", input);
            check_cut_offs("lfm2", &format!("<|tool_call_start|>{input}<|tool_call_end|>"));
        }
    }

    #[test]
    fn olmo_calls_stand_in_lines() {
        let input = "<function_calls>\nping(a=\"x\\ny\")\nping()\n</function_calls>";
        check("olmo3", input, "", &[call("ping", r#"{"a": "x\ny"}"#), call("ping", "{}")]);
        check_cut_offs("olmo3", input);
    }

    #[test]
    fn pythonic_rejects_what_is_no_call() {
        for text in [
            "[link](http://x) and [ping()]",
            "[1, 2, 3]",
            "[]",
            "[ping(1)]",
            "[ping(a=1, a=2)]",
            "[ping(a=b)]",
            "[unknown()]",
            "[ping() ping()]",
            "[ping()",
            "[ping(]",
            "[ping(a=1)}",
            "Text first [ping()]",
            "[",
        ] {
            check("pythonic", text, text, &[]);
        }
        for text in ["<|tool_call_start|>[ping()", "<|tool_call_start|>ping() x<|tool_call_end|>"] {
            check("lfm2", text, text, &[]);
        }
    }
}
