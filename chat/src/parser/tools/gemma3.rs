//! Gemma 3: a block of code, fenced as `tool_code`, with calls in Python's syntax. The model has no tokens of its own for
//! calls: it writes so where its template or its system message asks for it, and at times prints what a call gives.

use super::finder::{BlockEnd, Shield};
use super::syntax::{CallSyntax, PYTHON};
use super::{BASE, BlockStart, ToolFormat, inside, python};

const FENCE: &str = "```tool_code";
const FENCE_END: &str = "```";

pub(super) static FORMAT: ToolFormat = ToolFormat {
    names: &["gemma3", "tool_code"],
    begins: &[BlockStart::new(FENCE, BlockEnd::Marker(FENCE_END, Shield::PythonString))],
    parse: |block, tools| {
        let body = inside(block, FENCE, FENCE_END)?.trim();
        // Code that was cut off behind a call may go on.
        body.ends_with([')', ']']).then(|| python::printed_calls(body, tools))?
    },
    syntaxes: &[CallSyntax::calls("$NAME($PARAMETERS)", "\n")
        .in_notation(PYTHON)
        .within("```tool_code\n", "\n```")],
    ..BASE
};

#[cfg(test)]
mod tests {
    use crate::parser::tests::{call, check, check_cut_offs};

    #[test]
    fn gemma3_code_of_calls_is_calls() {
        let search = || call("search", r#"{"q": "a ``` b 日本 🙂"}"#);
        for (code, calls) in [
            ("search(q=\"a ``` b 日本 🙂\")", vec![search()]),
            ("print(default_api.search(q='a ``` b 日本 🙂'))", vec![search()]),
            ("print( search(\n  q='''a ``` b 日本 🙂''',\n) )", vec![search()]),
            ("[ping(), search(q=\"a ``` b 日本 🙂\")]", vec![call("ping", "{}"), search()]),
            ("default_api.ping(a=[1, None], b=True)\nprint(web.search(q=\"x\"))", {
                vec![call("ping", r#"{"a": [1, null], "b": true}"#), call("web.search", r#"{"q": "x"}"#)]
            }),
        ] {
            for input in [format!("```tool_code\n{code}\n```"), format!("```tool_code {code}```")] {
                check("gemma3", &input, "", &calls);
                check("gemma3", &format!("I look.\n{input}\nSo."), "I look.\nSo.", &calls);
                check_cut_offs("gemma3", &input);
            }
        }
        let two = "```tool_code\nping()\n```\n\n```tool_code\nping()\n```";
        check("gemma3", two, "", &[call("ping", "{}"), call("ping", "{}")]);
    }

    #[test]
    fn gemma3_rejects_what_is_no_call() {
        for text in [
            "```tool_code\n```",
            "```tool_code\nunknown()\n```",
            "```tool_code\nx = ping()\n```",
            "```tool_code\nping(1)\n```",
            "```tool_code\nprint(ping()\n```",
            "```tool_code\nprint(1)\n```",
            "```tool_code\nping() # it's",
            "```tool_code\nping(a='x\n```",
            "```python\nping()\n```",
            "```tool_co",
        ] {
            check("gemma3", text, text, &[]);
        }
        // A quote that none closes ends with the block all the same.
        let input = "```tool_code\n# it's\n```\n```tool_code\nping()\n```";
        check("gemma3", input, "```tool_code\n# it's\n```", &[call("ping", "{}")]);
    }
}
