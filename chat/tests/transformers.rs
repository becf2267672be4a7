//! Real chat templates, rendered here and by Python's Transformers: the same text, or the same refusal. The templates are
//! those that llama.cpp carries; `cargo xtask test` fetches them and names their folder in `RUSSET_VOCABULARIES`, and a
//! Python that has Transformers in `RUSSET_PYTHON`.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use jiff::Zoned;
use russet_chat::template::{CallForm, Prompt, SpecialTokens, Template, TemplateArguments, TemplateError};
use russet_tests::provided;
use russet_wire::conversation::{Message, Tool, ToolCall};
use serde_json::{Value, json};

/// Escapes its tools for HTML by accident, adding them to a text that it calls safe: Python does, minijinja does not.
const ESCAPED: &str = "meetkai-functionary-medium-v3.1.jinja";

/// A conversation of the table.
struct Conversation {
    name: &'static str,
    messages: Vec<Message>,
    tools: Vec<Tool>,
    arguments: &'static str,
    continues: bool,
}

fn tool(name: &str, description: &str, parameters: &str) -> Tool {
    Tool {
        name: name.into(),
        description: Some(description.into()),
        parameters: Some(parameters.into()),
        strict: false,
    }
}

fn tools() -> Vec<Tool> {
    vec![
        tool(
            "get_weather",
            "The weather of a city — now, \"as is\".",
            r#"{"type": "object", "properties": {"city": {"type": "string", "description": "Name, e.g. Zürich"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}, "days": {"type": "integer", "minimum": 1}}, "required": ["city"], "additionalProperties": false}"#,
        ),
        tool(
            "add",
            "Adds numbers.\nAll of them.",
            r#"{"type": "object", "properties": {"numbers": {"type": "array", "items": {"type": "number"}}, "deep": {"anyOf": [{"type": "object", "properties": {"a": {"type": ["string", "null"]}}}, {"type": "null"}]}}, "required": []}"#,
        ),
    ]
}

fn call(id: &str, name: &str, arguments: &str) -> ToolCall {
    ToolCall { id: id.into(), name: name.into(), arguments: arguments.into() }
}

fn calls(content: &str, reasoning: &str, tool_calls: Vec<ToolCall>) -> Message {
    Message {
        role: "assistant".into(),
        content: content.into(),
        reasoning: reasoning.into(),
        tool_calls,
        ..Message::default()
    }
}

fn result(id: &str, name: &str, content: &str) -> Message {
    Message {
        role: "tool".into(),
        content: content.into(),
        tool_call_id: id.into(),
        name: name.into(),
        ..Message::default()
    }
}

fn thinking(content: &str, reasoning: &str) -> Message {
    calls(content, reasoning, Vec::new())
}

fn conversations() -> Vec<Conversation> {
    let say = Message::new;
    let plain = |name, messages| Conversation {
        name,
        messages,
        tools: Vec::new(),
        arguments: "{}",
        continues: false,
    };
    let with_tools = |name, messages| Conversation { tools: tools(), ..plain(name, messages) };
    let talk = || {
        vec![
            say("system", "Be brief."),
            say("user", "Hi"),
            say("assistant", "Hello!"),
            say("user", "How are you?\n"),
        ]
    };
    let weather = || call("abcdef123", "get_weather", r#"{"city": "Zürich", "days": 2}"#);
    let one_call = |reasoning: &str, content: &str| {
        vec![
            say("user", "Weather in Zürich?"),
            calls(content, reasoning, vec![weather()]),
            result("abcdef123", "get_weather", r#"{"sky": "clear", "°C": 21.5}"#),
        ]
    };
    let parallel = || {
        vec![
            say("system", "Use tools."),
            say("user", "Weather and sum?"),
            calls(
                "",
                "",
                vec![
                    weather(),
                    call(
                        "bcdefg234",
                        "add",
                        r#"{"numbers": [1, 2.5, -3e2], "deep": {"a": null, "b": "q\"\n日本"}}"#,
                    ),
                ],
            ),
            result("abcdef123", "get_weather", "clear"),
            result("bcdefg234", "add", "-296.5"),
            say("assistant", "Clear, and -296.5."),
            say("user", "Thanks"),
        ]
    };
    let mut all = vec![
        plain("one message", vec![say("user", "Hi")]),
        plain("system", vec![say("system", "Be brief."), say("user", "Hi")]),
        plain("turns", talk()),
        plain("turns without system", talk()[1..].to_vec()),
        plain("empty content", vec![say("user", ""), say("assistant", ""), say("user", "")]),
        plain("empty system", vec![say("system", ""), say("user", "Hi")]),
        plain(
            "not ASCII",
            vec![
                say("system", "Sei höflich 🙂"),
                say("user", " 日本語\t\"quotes\" <b>&amp; \\n {{ x }} \u{2028} "),
            ],
        ),
        plain("two users", vec![say("user", "Hi"), say("user", "there")]),
        plain("assistant first", vec![say("assistant", "Hello!"), say("user", "Hi")]),
        plain(
            "system in the middle",
            vec![say("user", "Hi"), say("system", "Be brief."), say("user", "there")],
        ),
        plain("ends with assistant", talk()[..3].to_vec()),
        plain("unknown role", vec![say("wizard", "Hi")]),
        plain("no message", vec![]),
        plain(
            "old thinking",
            vec![say("user", "17 + 25?"), thinking("42", "17 + 25 = 42."), say("user", "And 1 more?")],
        ),
        plain(
            "thinking in the text",
            vec![
                say("user", "17 + 25?"),
                say("assistant", "<think>\n17 + 25 = 42.\n</think>\n\n42"),
                say("user", "And 1 more?"),
            ],
        ),
        plain("last turn thought", vec![say("user", "17 + 25?"), thinking("42", "17 + 25 = 42.")]),
        with_tools("tools", vec![say("user", "Weather in Zürich?")]),
        with_tools("tools and system", vec![say("system", "Be brief."), say("user", "Weather in Zürich?")]),
        with_tools("tool result", one_call("", "")),
        with_tools("tool result after text", one_call("", "I look.")),
        with_tools("tool result after thinking", one_call("I have to look.", "")),
        with_tools("thinking and text before a call", one_call("I have to look.", "I look.")),
        with_tools("parallel calls", parallel()),
        with_tools(
            "call without arguments",
            vec![
                say("user", "Add nothing"),
                calls("", "", vec![call("abcdef123", "add", "{}")]),
                result("abcdef123", "add", "0"),
            ],
        ),
        plain("calls without tools", parallel()),
        with_tools("call last", one_call("", "")[..2].to_vec()),
    ];
    for (name, arguments) in [
        ("thinking on", r#"{"enable_thinking": true}"#),
        ("thinking off", r#"{"enable_thinking": false}"#),
        ("thinking as DeepSeek", r#"{"thinking": true}"#),
        ("effort low", r#"{"reasoning_effort": "low"}"#),
        ("effort high", r#"{"reasoning_effort": "high"}"#),
        ("no generation prompt", r#"{"add_generation_prompt": false}"#),
        ("unknown argument", r#"{"anything": {"b": [1, 2.0, null], "a": "x"}}"#),
    ] {
        all.push(Conversation { arguments, ..plain(name, talk()) });
        all.push(Conversation { arguments, ..with_tools(name, one_call("Look.", "")) });
    }
    all.push(Conversation {
        continues: true,
        ..plain("continued", vec![say("user", "Count"), say("assistant", "1, 2, ")])
    });
    all.push(Conversation {
        continues: true,
        ..plain("continued trimmed", vec![say("user", "Count"), say("assistant", " 1, 2,\n")])
    });
    all
}

/// What Python gets: calls in the form that the template is given here.
fn python_message(message: &Message, form: CallForm) -> Value {
    let Message { role, content, reasoning, tool_calls, tool_call_id, name } = message;
    let mut fields = serde_json::Map::new();
    fields.insert("role".into(), json!(role));
    let is_none = form.content_as_none && content.is_empty() && !tool_calls.is_empty();
    fields.insert("content".into(), if is_none { Value::Null } else { json!(content) });
    for (key, text) in [("name", name), ("tool_call_id", tool_call_id), ("reasoning_content", reasoning)] {
        if !text.is_empty() {
            fields.insert(key.into(), json!(text));
        }
    }
    if !tool_calls.is_empty() {
        // As a list, because a map here would sort its keys.
        let call = |ToolCall { id, name, arguments }: &ToolCall| json!([id, name, arguments]);
        fields.insert("tool_calls".into(), tool_calls.iter().map(call).collect());
    }
    fields.into()
}

fn template(path: &Path, form: Option<CallForm>) -> Result<Template, TemplateError> {
    let special: SpecialTokens = BTreeMap::from(
        [("bos_token", "<s>"), ("eos_token", "</s>")].map(|(k, v)| (k.to_owned(), v.to_owned())),
    );
    let template = Template::new(&std::fs::read_to_string(path).unwrap(), special)?;
    Ok(match form {
        Some(form) => template.with_call_form(form),
        None => template,
    })
}

fn rendered(template: &Template, conversation: &Conversation) -> Result<String, TemplateError> {
    let now: Zoned = "2026-11-21T08:00:00+00:00[UTC]".parse().unwrap();
    let arguments = TemplateArguments::new(conversation.arguments)?;
    template.render(&Prompt {
        messages: &conversation.messages,
        tools: &conversation.tools,
        arguments: &[&arguments],
        continue_final_message: conversation.continues,
        now: &now,
    })
}

fn ask(python: &Path, cases: &str) -> Vec<Value> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle.py");
    let mut child =
        Command::new(python).arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let cases = cases.to_owned();
    let writer = std::thread::spawn(move || std::io::Write::write_all(&mut input, cases.as_bytes()).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success(), "Python ended with {}", output.status);
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Where two answers part.
fn difference(ours: &Result<String, TemplateError>, theirs: &Value) -> String {
    const SHOWN: usize = 60;
    let (Ok(ours), Some(theirs)) = (ours, theirs["text"].as_str()) else {
        return format!("  ours   {ours:?}\n  theirs {theirs}");
    };
    let same = ours.chars().zip(theirs.chars()).take_while(|(one, other)| one == other).count();
    let from = same.saturating_sub(SHOWN);
    let shown = |text: &str| text.chars().skip(from).take(2 * SHOWN).collect::<String>();
    format!("  ours   …{:?}\n  theirs …{:?}", shown(ours), shown(theirs))
}

/// Real templates, whichever form of calls they read: all forms are compared.
#[test]
fn real_templates_render_as_by_transformers() {
    let (Some(folder), Some(python)) =
        (provided::path("RUSSET_VOCABULARIES"), provided::path("RUSSET_PYTHON"))
    else {
        return;
    };
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(folder.join("templates")).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "jinja"));
    paths.sort();
    assert!(paths.len() > 50, "{} templates", paths.len());
    let conversations = conversations();
    let (mut cases, mut ours) = (Vec::new(), Vec::new());
    for path in &paths {
        for form in CallForm::ALL {
            let template = template(path, Some(form));
            for conversation in &conversations {
                // The other forms differ in calls alone.
                if form != CallForm::default()
                    && conversation.messages.iter().all(|message| message.tool_calls.is_empty())
                {
                    continue;
                }
                let messages: Vec<Value> =
                    conversation.messages.iter().map(|message| python_message(message, form)).collect();
                // As text, to keep the order of its keys.
                let tools = conversation.tools.iter().map(|tool| {
                    format!(
                        r#"{{"type": "function", "function": {{"name": {}, "description": {}, "parameters": {}}}}}"#,
                        json!(tool.name), json!(tool.description), tool.parameters.as_deref().unwrap()
                    )
                });
                let tools = match conversation.tools.is_empty() {
                    true => "null".to_owned(),
                    false => format!("[{}]", tools.collect::<Vec<_>>().join(", ")),
                };
                cases.push(format!(
                    r#"{{"template": {}, "messages": {}, "as_object": {}, "tools": {tools}, "arguments": {}, "continue": {}}}"#,
                    json!(path), json!(messages), !form.arguments_as_text, conversation.arguments, conversation.continues
                ));
                let text =
                    template.as_ref().map_err(Clone::clone).and_then(|one| rendered(one, conversation));
                ours.push((path, form, conversation.name, text));
            }
        }
    }
    let theirs = ask(&python, &format!("[{}]", cases.join(",\n")));
    assert_eq!(theirs.len(), ours.len());
    let mut differing = Vec::new();
    let (mut texts, mut refusals, mut failures, mut lenient) = (0, 0, 0, 0);
    for ((path, form, name, ours), theirs) in ours.iter().zip(&theirs) {
        let same = match (ours, theirs["text"].as_str(), theirs["refused"].as_str()) {
            (Ok(ours), Some(theirs), _) => {
                texts += 1;
                ours == theirs
            }
            (Err(TemplateError::Refused(ours)), _, Some(theirs)) => {
                refusals += 1;
                ours == theirs
            }
            (Err(TemplateError::Failed(_) | TemplateError::NoContinuation(_)), None, None) => {
                failures += 1;
                true
            }
            // Python's own errors, of templates that take what is not there for something.
            (Ok(_), None, None) => {
                lenient += 1;
                true
            }
            _ => false,
        };
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let is_escaped =
            file == ESCAPED && theirs["text"].as_str().is_some_and(|text| text.contains("&#34;"));
        if !same && !is_escaped {
            differing.push(format!("{file}: {name}, {form:?}\n{}", difference(ours, theirs)));
        }
    }
    let blind = paths.iter().filter(|path| template(path, None).is_ok_and(|one| !one.shows_tools()));
    let blind: Vec<_> = blind.filter_map(|path| path.file_stem()?.to_str()).collect();
    println!("without a place for tools: {}", blind.join(", "));
    println!(
        "{} templates: {texts} texts, {refusals} refusals, {failures} failures, {lenient} that only Python fails",
        paths.len()
    );
    assert!(differing.is_empty(), "{} of {} differ:\n{}", differing.len(), ours.len(), differing.join("\n"));
    assert!(texts > 1000 && refusals > 50, "{texts} texts, {refusals} refusals");
}
