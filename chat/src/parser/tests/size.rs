//! Long and deep outputs: they arrive whole, at a cost that is linear, and overflow nothing. No test judges a
//! time: a cost that is not linear would not end.

use super::{format, read_all, read_new, tool_names};

/// One call with a long argument, in each format's own syntax.
fn long_call(tools: &str, value: &str) -> String {
    let json = format!(r#"{{"q": "{value}"}}"#);
    let named = format!(r#"{{"name": "search", "arguments": {json}}}"#);
    match tools {
        "hermes" => format!("<tool_call>\n{named}\n</tool_call>"),
        "qwen3_coder" => format!(
            "<tool_call>\n<function=search>\n<parameter=q>\n{value}\n</parameter>\n</function>\n</tool_call>"
        ),
        "llama3_json" => named,
        "pythonic" => format!("[search(q=\"{value}\")]"),
        "mistral" => format!("[TOOL_CALLS]search[ARGS]{json}"),
        "glm45" => {
            format!("<tool_call>search\n<arg_key>q</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>")
        }
        "kimi_k2" => format!(
            "<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{json}<|tool_call_end|>"
        ),
        "deepseek_v3" => format!("<｜tool▁call▁begin｜>search<｜tool▁sep｜>{json}<｜tool▁call▁end｜>"),
        "minimax_m2" => format!(
            "<minimax:tool_call><invoke name=\"search\"><parameter name=\"q\">{value}</parameter></invoke></minimax:tool_call>"
        ),
        "gemma3" => format!("```tool_code\nsearch(q=\"{value}\")\n```"),
        "functionary_v3_2" => format!("search\n{json}"),
        "step3" => format!(
            "<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"search\"><steptml:parameter name=\"q\">{value}</steptml:parameter></steptml:invoke><｜tool_call_end｜>"
        ),
        "gemma4" => format!("<|tool_call>call:search{{q:<|\"|>{value}<|\"|>}}<tool_call|>"),
        "openai" => format!("<|channel|>commentary to=functions.search<|message|>{json}<|call|>"),
        other => panic!("{other} has no long call"),
    }
}

const LONG_CALLS: &[&str] = &[
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "pythonic",
    "mistral",
    "glm45",
    "kimi_k2",
    "deepseek_v3",
    "minimax_m2",
    "gemma3",
    "functionary_v3_2",
    "step3",
    "gemma4",
    "openai",
];

#[test]
fn long_arguments_arrive_whole() {
    let value = "ab < c 日本語 🙂 ".repeat(800);
    for tools in LONG_CALLS {
        let arguments = format!("{{\"q\": \"{value}\"}}");
        let outcome = read_all(&format("", tools), false, &long_call(tools, &value));
        assert_eq!(outcome.text, "", "{tools}");
        let [call] = outcome.calls.as_slice() else { panic!("{tools}: {} calls", outcome.calls.len()) };
        assert_eq!(call.arguments, arguments, "{tools}");
    }
}

#[test]
fn a_megabyte_arrives_char_by_char() {
    let value = "x <y".repeat(250_000);
    for tools in LONG_CALLS {
        let input = long_call(tools, &value);
        let pieces = (0..input.len()).filter(|at| input.is_char_boundary(*at));
        let pieces = pieces.map(|at| &input[at..at + input[at..].chars().next().unwrap().len_utf8()]);
        assert_eq!(read_new(&format("", tools), false, pieces).calls.len(), 1, "{tools}");
    }
    // What looks like the beginning of calls without end costs no more.
    for name in tool_names() {
        let format = format("", name);
        for marker in format.markers(true).iter().chain(&[
            "{\"name\":",
            "[f(",
            "[TOOL_CALLS]{\"\\\"",
            "<tool_call>{\"\\\"",
        ]) {
            let input = marker.repeat(200_000 / marker.len());
            let outcome = read_new(&format, false, [input.as_str()]);
            assert!(name == "openai" || outcome.text.len() == input.len(), "{name}: {marker}");
        }
    }
}

#[test]
fn deep_nesting_is_no_call_and_no_overflow() {
    let deep = format!("{}1{}", "[".repeat(200_000), "]".repeat(200_000));
    for input in [
        format!("<tool_call>{{\"name\": \"ping\", \"arguments\": {{\"a\": {deep}}}}}</tool_call>"),
        format!("<tool_call>{deep}</tool_call>"),
    ] {
        let outcome = read_new(&format("", "hermes"), false, [input.as_str()]);
        assert_eq!((outcome.text.len(), outcome.calls.len()), (input.len(), 0));
    }
    for tools in ["pythonic", "lfm2", "gemma3", "gemma4", "mistral", "llama3_json"] {
        let format = format("", tools);
        let input = match tools {
            "pythonic" => format!("[ping(a={deep})]"),
            "gemma3" => format!("```tool_code\nping(a={deep})\n```"),
            "lfm2" => format!("<|tool_call_start|>[ping(a={deep})]<|tool_call_end|>"),
            "gemma4" => format!("<|tool_call>call:ping{{a:{deep}}}<tool_call|>"),
            "mistral" => format!("[TOOL_CALLS]ping[ARGS]{{\"a\": {deep}}}"),
            _ => format!("{{\"name\": \"ping\", \"parameters\": {{\"a\": {deep}}}}}"),
        };
        assert_eq!(read_new(&format, false, [input.as_str()]).text.len(), input.len(), "{tools}");
    }
}
