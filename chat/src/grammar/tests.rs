//! Grammars of a vocabulary of bytes, and what a model that knows nothing writes under them.

use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};

use russet_wire::conversation::{Tool, ToolCall, ToolChoice};
use russet_wire::request::StructuredOutput;
use serde_json::Value;

mod notations;

use super::*;
use crate::parser::{OutputFormat, OutputParser, Part, reasoning, tools};

/// The end token of these vocabularies.
const END: u32 = Vocabulary::END_OF_BYTES;

/// A token for each byte, an end, and special tokens.
fn vocabulary(special: &[&str]) -> Arc<Vocabulary> {
    Arc::new(Vocabulary::of_bytes_and(special))
}

static BYTES: LazyLock<Arc<Vocabulary>> = LazyLock::new(|| vocabulary(&[]));

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

fn structured(output: &StructuredOutput) -> Result<GrammarMatcher, GrammarError> {
    let format = OutputFormat::default();
    let rules = OutputRules { structured_output: Some(output), ..OutputRules::free(&format) };
    rules.matcher(|| Ok(BYTES.clone())).map(Option::unwrap)
}

fn schema(text: &str) -> StructuredOutput {
    StructuredOutput::JsonSchema(text.to_owned())
}

/// What a model that knows nothing writes: any token of the mask, and the end as soon as it may come. `None` if it does
/// not end.
fn written(matcher: &mut GrammarMatcher, vocabulary: &Vocabulary, random: &mut Random) -> Option<String> {
    let names: Vec<(&String, &u32)> = vocabulary.special.iter().collect();
    let mut bytes = Vec::new();
    for _ in 0..2_000 {
        if matcher.is_complete() {
            return Some(String::from_utf8(bytes).unwrap());
        }
        let mask = matcher.mask().unwrap();
        let allowed: Vec<u32> = (0..mask.words().len() as u32 * 32).filter(|id| mask.allows(*id)).collect();
        assert!(!allowed.is_empty(), "no token after {:?}", String::from_utf8_lossy(&bytes));
        if allowed.contains(&END) && random.below(4) == 0 {
            return Some(String::from_utf8(bytes).unwrap());
        }
        let texts: Vec<u32> = allowed.into_iter().filter(|id| *id != END).collect();
        let Some(token) = texts.get(random.below(texts.len().max(1))) else {
            return Some(String::from_utf8(bytes).unwrap());
        };
        match u8::try_from(*token) {
            Ok(byte) => bytes.push(byte),
            Err(_) => {
                bytes.extend(names.iter().find(|(_, id)| *id == token).unwrap().0.as_bytes());
            }
        }
        matcher.accept(*token).unwrap();
    }
    None
}

/// What such a model writes when it thinks for a while at most: most thoughts of random bytes never end.
fn written_soon(rules: &OutputRules<'_>, vocabulary: &Arc<Vocabulary>, random: &mut Random) -> String {
    let mut attempt = || {
        let mut matcher = rules.matcher(|| Ok(vocabulary.clone())).unwrap().unwrap();
        written(&mut matcher, vocabulary, random)
    };
    (0..50).find_map(|_| attempt()).unwrap_or_else(|| panic!("{:?} does not end", rules.format.tools_name()))
}

/// Whether a text is one of the grammar.
fn accepts(matcher: &mut GrammarMatcher, text: &str) -> bool {
    let taken = text.bytes().all(|byte| {
        let mask = matcher.mask().unwrap();
        mask.allows(u32::from(byte)) && matcher.accept(u32::from(byte)).is_ok()
    });
    taken && matcher.may_end()
}

#[test]
fn texts_are_what_the_request_asks_for_and_nothing_else() {
    let choice =
        StructuredOutput::Choice(vec!["yes".into(), "no\"\n".into(), "yesterday".into(), "é".into()]);
    let object = schema(r#"{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}"#);
    let lark = "start: greeting \" \" NAME\ngreeting: \"hi\" | \"hello\"\nNAME: /[a-z]+/";
    for (output, good, bad) in [
        (&choice, vec!["yes", "no\"\n", "yesterday", "é"], vec!["", "ye", "maybe", "no"]),
        (&object, vec!["{\"a\":1}", "{ \"a\" : -3 ,\"b\":[{}]}"], vec!["{}", "[]", "{\"a\":\"x\"}", "x"]),
        (&StructuredOutput::JsonObject, vec!["{}", "{\"x\": [1, null]}"], vec!["[]", "1", ""]),
        (&StructuredOutput::Regex("[a-z]{2}/\\d+".into()), vec!["ab/12"], vec!["ab", "ab/", "abc/1"]),
        (&StructuredOutput::Grammar(lark.into()), vec!["hi bob", "hello eve"], vec!["hi", "hey bob"]),
    ] {
        for text in good {
            assert!(accepts(&mut structured(output).unwrap(), text), "{output:?}: {text:?}");
        }
        for text in bad {
            assert!(!accepts(&mut structured(output).unwrap(), text), "{output:?}: {text:?}");
        }
    }
}

#[test]
fn random_outputs_of_schemas_are_valid_json_of_them() {
    let person = r##"{"type": "object", "additionalProperties": false, "required": ["name", "tags", "next"],
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", null, 3]}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]}},
        "$defs": {"leaf": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
                  "additionalProperties": false}}}"##;
    let mut random = Random(7);
    for _ in 0..40 {
        let mut matcher = structured(&schema(person)).unwrap();
        let text = written(&mut matcher, &BYTES, &mut random).expect("it does not end");
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        assert!(value["name"].as_str().unwrap().chars().count() <= 8, "{text}");
        assert!(value["age"].is_null() || (0..=150).contains(&value["age"].as_i64().unwrap()), "{text}");
        assert!(value["tags"].as_array().unwrap().len() <= 3, "{text}");
        assert!(value["next"].is_null() || value["next"]["x"].is_boolean(), "{text}");
    }
}

#[test]
fn what_is_not_supported_is_refused_by_its_name() {
    let long = format!(r#"{{"enum": "{}"}}"#, "é".repeat(200));
    for (output, expected) in [
        (schema(r#"{"type": "array", "uniqueItems": true}"#), "uniqueItems"),
        (schema(r#"{"type": "object", "properties": {"a": {"not": {}}}}"#), "not"),
        (schema(r#"{"type": "sting"}"#), "sting"),
        (schema("{"), "no JSON"),
        (schema("3"), "the JSON Schema is not supported"),
        (schema("false"), "the JSON Schema is not supported"),
        (schema(&long), "the JSON Schema is not supported"),
        (schema(r##"{"$ref": "#/$defs/none"}"##), "the JSON Schema is not supported"),
        (schema(r#"{"$ref": "http://example.com/x"}"#), "the JSON Schema is not supported"),
        (schema(r#"{"type": "string", "pattern": "(?<a>x)\\k<a>"}"#), "the JSON Schema is not supported"),
        (StructuredOutput::Regex("(".into()), "the regular expression is not supported"),
        (StructuredOutput::Grammar("start: missing".into()), "the grammar is not supported"),
        (StructuredOutput::Choice(Vec::new()), "it needs texts"),
        (StructuredOutput::Choice(vec![String::new()]), "it needs texts"),
    ] {
        let error = structured(&output).expect_err(&format!("{output:?}")).to_string();
        assert!(error.contains(expected) && error.len() < 600, "{error}");
    }
}

#[test]
fn drafts_have_a_mask_each_and_change_nothing() {
    let mut matcher = structured(&schema(r#"{"type": "boolean"}"#)).unwrap();
    let ids = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    assert_eq!(matcher.allowed(&ids("trap")), 2);
    let masks = matcher.masks(&ids("tr")).unwrap();
    assert_eq!(masks.len(), 3);
    let expected = [vec![b'f', b't'], vec![b'r'], vec![b'u']];
    for (mask, expected) in masks.iter().zip(expected) {
        let texts: Vec<u8> = (0..=255).filter(|byte| mask.allows(u32::from(*byte))).collect();
        assert_eq!(texts, expected);
    }
    assert!(masks.iter().all(|mask| !mask.allows(END)));
    assert!(accepts(&mut matcher, "true"));
    assert!(matcher.mask().unwrap().allows(END) && matcher.allowed(&[END]) == 0);
    assert!(matcher.accept(u32::from(b'x')).is_err());
}

/// Every special token of every format, and none of them: then all markers are text.
fn vocabularies(format: &OutputFormat) -> Vec<Arc<Vocabulary>> {
    let markers: BTreeSet<&str> = format.markers(true).into_iter().collect();
    let markers: Vec<&str> =
        markers.into_iter().filter(|marker| marker.starts_with(['<', '[', ']'])).collect();
    vec![BYTES.clone(), vocabulary(&markers)]
}

fn tool(name: &str, parameters: &str) -> Tool {
    Tool { name: name.into(), parameters: Some(parameters.into()), strict: true, ..Tool::default() }
}

fn offered() -> [Tool; 2] {
    [
        tool(
            "weather",
            r#"{"type": "object", "additionalProperties": false, "required": ["city", "days"], "properties": {
                "city": {"type": "string", "maxLength": 5}, "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["c", "f"]}, "exact": {"type": "boolean"}}}"#,
        ),
        tool("stop", r#"{"type": "object", "additionalProperties": false, "properties": {}}"#),
    ]
}

/// The parts of a text, character by character.
fn parts(format: &OutputFormat, tools: &[Tool], in_reasoning: bool, text: &str) -> (String, Vec<ToolCall>) {
    let mut parser = OutputParser::new(format, tools.to_vec().into(), in_reasoning);
    let mut parts: Vec<Part> = text.chars().flat_map(|c| parser.push(c.encode_utf8(&mut [0; 4]))).collect();
    parts.extend(parser.finish());
    let (mut text, mut calls) = (String::new(), Vec::new());
    for part in parts {
        match part {
            Part::Text(part) => text.push_str(&part),
            Part::ToolCall(call) => calls.push(call),
            Part::Reasoning(_) => {}
        }
    }
    (text, calls)
}

fn check_call(call: &ToolCall, written: &str) {
    let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
    let keys: BTreeSet<&str> = arguments.as_object().unwrap().keys().map(String::as_str).collect();
    if call.name == "stop" {
        assert!(keys.is_empty(), "{written}");
        return;
    }
    assert!(keys.is_subset(&["city", "days", "unit", "exact"].into()), "{written}");
    assert!(arguments["city"].is_string(), "{written}: {arguments}");
    assert!((1..=9).contains(&arguments["days"].as_i64().unwrap_or_default()), "{written}: {arguments}");
    assert!(matches!(arguments["unit"].as_str(), None | Some("c" | "f")), "{written}");
    assert!(arguments["exact"].is_null() || arguments["exact"].is_boolean(), "{written}");
}

/// Formats by name; harmony is none of the table.
fn formats() -> Vec<OutputFormat> {
    let names = tools::all().iter().map(|format| format.names[0]).chain(["openai"]);
    names.map(|name| OutputFormat::default().tools_by_name(name).unwrap()).collect()
}

#[test]
fn required_calls_are_read_by_every_format() {
    let tools = offered();
    let mut random = Random(3);
    for format in formats() {
        let name = format.tools_name().unwrap();
        for vocabulary in vocabularies(&format) {
            for (choice, single) in [
                (ToolChoice::Required, false),
                (ToolChoice::Required, true),
                (ToolChoice::Named("weather".into()), true),
            ] {
                let rules = OutputRules {
                    tools: &tools,
                    tool_choice: &choice,
                    single_tool_call: single,
                    ..OutputRules::free(&format)
                };
                for _ in 0..4 {
                    let text = written_soon(&rules, &vocabulary, &mut random);
                    let (rest, calls) = parts(&format, &tools, false, &text);
                    assert!(!calls.is_empty() && rest.trim().is_empty(), "{name}: {text:?} gives {rest:?}");
                    assert!(!single || calls.len() == 1, "{name}: {text:?}");
                    calls.iter().for_each(|call| check_call(call, &text));
                    assert!(
                        choice == ToolChoice::Required || calls.iter().all(|call| call.name == "weather"),
                        "{name}: {text:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn strict_calls_may_follow_text_or_not_come_at_all() {
    let tools = offered();
    let mut random = Random(5);
    for format in formats() {
        let name = format.tools_name().unwrap();
        let rules = OutputRules { tools: &tools, ..OutputRules::free(&format) };
        for vocabulary in vocabularies(&format) {
            // Text alone, then a call as a grammar made it before, after text where the format allows that.
            let called = {
                let rules =
                    OutputRules { tool_choice: &ToolChoice::Required, single_tool_call: true, ..rules };
                written_soon(&rules, &vocabulary, &mut random)
            };
            let harmony = format.is_harmony();
            let plain = if harmony { "<|channel|>final<|message|>A <b> text" } else { "A <b> text [1]" };
            let header = format.tools().and_then(tools::ToolFormat::text_name).unwrap_or_default();
            let bare = matches!(name, "llama3_json" | "pythonic");
            let lead = if bare || harmony { "" } else { "I look.\n" };
            let marker = if header.is_empty() { "" } else { ">>>" };
            for text in
                [format!("{header}{plain}"), called.clone(), format!("{header}{lead}{marker}{called}")]
            {
                let mut matcher = rules.matcher(|| Ok(vocabulary.clone())).unwrap().unwrap();
                for token in tokens(&vocabulary, &text) {
                    let mask = matcher.mask().unwrap();
                    assert!(mask.allows(token), "{name}: {text:?} at token {token}");
                    matcher.accept(token).unwrap();
                }
                assert!(matcher.may_end(), "{name}: {text:?}");
            }
        }
    }
}

/// The tokens of a text, special ones by their names.
fn tokens(vocabulary: &Vocabulary, text: &str) -> Vec<u32> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.bytes().next() {
        let names = vocabulary.special.iter().filter(|(name, _)| rest.starts_with(name.as_str()));
        if let Some((name, id)) = names.max_by_key(|(name, _)| name.len()) {
            tokens.push(*id);
            rest = &rest[name.len()..];
        } else {
            let length = rest.chars().next().map_or(1, char::len_utf8);
            tokens.extend(rest.as_bytes()[..length].iter().map(|byte| u32::from(*byte)));
            rest = &rest[length..];
        }
        let _ = first;
    }
    tokens
}

#[test]
fn thinking_comes_before_structured_output() {
    let output = schema(r#"{"type": "boolean"}"#);
    for reasoning in reasoning::all() {
        let name = reasoning.names[0];
        let format = OutputFormat::default().reasoning_by_name(name).unwrap();
        for vocabulary in vocabularies(&format) {
            for in_reasoning in [false, true] {
                let rules = OutputRules {
                    in_reasoning,
                    structured_output: Some(&output),
                    ..OutputRules::free(&format)
                };
                let begin = if in_reasoning { "" } else { reasoning.begin };
                let text = format!("{begin}\nIs it <so>?\n{}\n\ntrue", reasoning.end);
                let mut matcher = rules.matcher(|| Ok(vocabulary.clone())).unwrap().unwrap();
                for token in tokens(&vocabulary, &text) {
                    assert!(matcher.mask().unwrap().allows(token), "{name}: {text:?} at token {token}");
                    matcher.accept(token).unwrap();
                }
                assert!(matcher.may_end(), "{name}: {text:?}");
                assert_eq!(parts(&format, &[], in_reasoning, &text).0, "true", "{name}: {text:?}");
                // Who does not think answers at once, unless the prompt began a thought.
                let mut matcher = rules.matcher(|| Ok(vocabulary.clone())).unwrap().unwrap();
                let answers = tokens(&vocabulary, "true").iter().all(|token| matcher.accept(*token).is_ok());
                assert_eq!(answers && matcher.may_end(), !in_reasoning, "{name}");
            }
        }
    }
    let harmony = OutputFormat::default().tools_by_name("openai").unwrap();
    for vocabulary in vocabularies(&harmony) {
        let rules = OutputRules { structured_output: Some(&output), ..OutputRules::free(&harmony) };
        let text =
            "<|channel|>analysis<|message|>So?<|end|><|start|>assistant<|channel|>final<|message|>true";
        let mut matcher = rules.matcher(|| Ok(vocabulary.clone())).unwrap().unwrap();
        for token in tokens(&vocabulary, text) {
            assert!(matcher.mask().unwrap().allows(token), "{text:?} at token {token}");
            matcher.accept(token).unwrap();
        }
        assert!(matcher.may_end());
    }
}

#[test]
fn choices_of_tools_that_cannot_be_are_refused() {
    let hermes = OutputFormat::default().tools_by_name("hermes").unwrap();
    let tools = offered();
    let named = ToolChoice::Named("other".into());
    for (tools, choice, expected) in [
        (
            &tools[..],
            &named,
            "names \"other\", but the request has no such tool; its tools are weather, stop",
        ),
        (&[], &ToolChoice::Required, "no tools"),
        (&[tool("f", r#"{"type": "array"}"#)], &ToolChoice::Auto, "arguments are an object, not \"array\""),
        (
            &[tool("f", r#"{"properties": {"a": {"not": {}}}}"#)],
            &ToolChoice::Auto,
            "the schema of tool \"f\"",
        ),
    ] {
        let rules = OutputRules { tools, tool_choice: choice, ..OutputRules::free(&hermes) };
        let error = rules.matcher(|| Ok(BYTES.clone())).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    }
    // What need not be enforced is any object.
    let loose = [Tool { strict: false, ..tool("f", r#"{"properties": {"a": {"not": {}}}}"#) }];
    let rules =
        OutputRules { tools: &loose, tool_choice: &ToolChoice::Required, ..OutputRules::free(&hermes) };
    let mut matcher = rules.matcher(|| Ok(BYTES.clone())).unwrap().unwrap();
    assert!(accepts(&mut matcher, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"b\": 1}}\n</tool_call>"));
    // And without anything to enforce there is no grammar.
    let rules = OutputRules { tool_choice: &ToolChoice::Auto, ..rules };
    assert!(rules.matcher(|| Ok(BYTES.clone())).unwrap().is_none());
}
