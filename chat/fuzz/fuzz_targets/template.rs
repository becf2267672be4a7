//! A stranger's chat template with a conversation: it ends within its limits, and no panic gets out.
#![no_main]

use jiff::Zoned;
use libfuzzer_sys::fuzz_target;
use russet_chat::template::{Prompt, SpecialTokens, Template, TemplateArguments};
use russet_wire::conversation::{Message, Tool, ToolCall};

fuzz_target!(init: {
    // Panics of the template engine are caught and are an error; libFuzzer's hook would end the program before.
    std::panic::set_hook(Box::new(|_| {}));
}, |input: &[u8]| {
    let (source, text) = match input.iter().position(|byte| *byte == 0) {
        Some(at) => input.split_at(at),
        None => (input, &[][..]),
    };
    let (source, text) = (String::from_utf8_lossy(source), String::from_utf8_lossy(text));
    let special: SpecialTokens = [("bos_token".to_owned(), "<s>".to_owned())].into();
    let Ok(template) = Template::new(&source, special) else { return };
    let call = ToolCall { id: "abcdef123".into(), name: "f".into(), arguments: r#"{"a": [1, {"b": null}]}"#.into() };
    let messages = [
        Message::new("system", text.as_ref()),
        Message::new("user", "Hi"),
        Message { tool_calls: vec![call], reasoning: "hm".into(), ..Message::new("assistant", "") },
        Message { tool_call_id: "abcdef123".into(), name: "f".into(), ..Message::new("tool", "42") },
    ];
    let tools = [Tool { name: "f".into(), parameters: Some(r#"{"type":"object"}"#.into()), ..Tool::default() }];
    let arguments = TemplateArguments::new(&text).unwrap_or_default();
    let now = Zoned::default();
    let prompt = Prompt { tools: &tools, arguments: &[&arguments], ..Prompt::new(&messages, &now) };
    let _ = template.render(&prompt);
    let _ = template.render(&Prompt { continue_final_message: true, ..Prompt::new(&messages, &now) });
});
