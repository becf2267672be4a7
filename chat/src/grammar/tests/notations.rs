//! Arguments of many kinds, in every format's own notation: what a grammar writes is read as a value of the schema.

use super::*;

/// Every kind of value that notations tell apart, and some that they leave to JSON.
const KINDS: &str = r##"{"type": "object", "additionalProperties": false, "required": ["text", "maybe", "point", "list"],
    "properties": {
        "text": {"type": "string", "minLength": 1, "maxLength": 4},
        "maybe": {"anyOf": [{"type": "string", "enum": ["a b", "it's \"q\"", "é"]}, {"type": "null"}], "default": null},
        "colour": {"$ref": "#/$defs/Colour"},
        "loose": {"type": ["integer", "null"], "description": "A number, or none."},
        "ratio": {"type": "number", "minimum": 0, "maximum": 1},
        "flag": {"const": true},
        "mixed": {"enum": ["x", 7, false]},
        "point": {"$ref": "#/$defs/Point"},
        "list": {"type": "array", "items": {"type": "string", "maxLength": 2}, "minItems": 1, "maxItems": 3},
        "pairs": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/Point"}},
        "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 1}},
    "$defs": {
        "Colour": {"type": "string", "enum": ["red", "blue"]},
        "Point": {"type": "object", "additionalProperties": false, "required": ["x"], "properties": {
            "label": {"type": "string", "maxLength": 2}, "x": {"type": "integer", "minimum": 0, "maximum": 9},
            "next": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}}}}}"##;

fn check_point(point: &Value) {
    assert!((0..=9).contains(&point["x"].as_i64().unwrap()), "{point}");
    let fields = point.as_object().unwrap();
    assert!(fields.keys().all(|key| ["label", "x", "next"].contains(&key.as_str())), "{point}");
    assert!(fields.get("label").is_none_or(|label| label.as_str().unwrap().chars().count() <= 2), "{point}");
    fields.get("next").filter(|next| !next.is_null()).into_iter().for_each(check_point);
}

fn check_kinds(call: &ToolCall) {
    let value: Value = serde_json::from_str(&call.arguments).unwrap();
    let is = |key: &str, right: &dyn Fn(&Value) -> bool| {
        let found = value.get(key);
        assert!(found.is_none_or(right), "{key}: {found:?}");
    };
    assert!((1..=4).contains(&value["text"].as_str().unwrap().chars().count()), "{value}");
    is("maybe", &|value| matches!(value.as_str(), None | Some("a b" | "it's \"q\"" | "é")));
    is("maybe", &|value| value.is_string() || value.is_null());
    is("colour", &|value| matches!(value.as_str(), Some("red" | "blue")));
    is("loose", &|value| value.is_i64() || value.is_u64() || value.is_null() || value.is_number());
    is("ratio", &|value| value.as_f64().is_some_and(|ratio| (0.0..=1.0).contains(&ratio)));
    is("flag", &|value| *value == Value::Bool(true));
    is("mixed", &|value| [Value::from("x"), 7.into(), false.into()].contains(value));
    check_point(&value["point"]);
    let list = value["list"].as_array().unwrap();
    assert!((1..=3).contains(&list.len()), "{value}");
    assert!(list.iter().all(|item| item.as_str().unwrap().chars().count() <= 2), "{value}");
    is("pairs", &|value| value.as_array().unwrap().iter().map(check_point).count() <= 2);
    is("map", &|value| value.as_object().unwrap().values().all(Value::is_number));
    assert!(value.get("maybe").is_some(), "{value}");
}

#[test]
fn random_arguments_of_all_kinds_are_read_back() {
    let tools = [
        tool("kinds-of.values", KINDS),
        tool("2nd", r#"{"type": "object", "properties": {}, "additionalProperties": false}"#),
    ];
    let mut random = Random(11);
    for format in formats() {
        let name = format.tools_name().unwrap();
        for vocabulary in vocabularies(&format) {
            let rules = OutputRules {
                tools: &tools,
                tool_choice: &ToolChoice::Required,
                ..OutputRules::free(&format)
            };
            let mut seen = 0;
            for _ in 0..6 {
                let text = written_soon(&rules, &vocabulary, &mut random);
                let (rest, calls) = parts(&format, &tools, false, &text);
                assert!(!calls.is_empty() && rest.trim().is_empty(), "{name}: {text:?} gives {rest:?}");
                let kinds = calls.iter().filter(|call| call.name == "kinds-of.values");
                seen += kinds.inspect(|call| check_kinds(call)).count();
                let second = calls.iter().filter(|call| call.name == "2nd");
                second.for_each(|call| {
                    assert_eq!(
                        call.arguments.split_whitespace().collect::<String>(),
                        "{}",
                        "{name}: {text:?}"
                    )
                });
            }
            assert!(seen > 0, "{name}");
        }
    }
}

#[test]
fn calls_are_written_as_the_families_write_them() {
    let place = r#"{"type": "object", "required": ["city"], "additionalProperties": false, "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"},
        "at": {"type": "array", "items": {"type": "object", "properties": {"x y": {"type": "null"}, "z": {}}}}}}"#;
    let tools = [tool("weather", place)];
    let m3 = |text: &str| text.replace('~', "]<]minimax[>[");
    for (name, text) in [
        ("pythonic", r#"[weather(city="a\"b", exact=True, at=[{"x y": None, "z": [1, {"k": False}]}, {}]), weather(city="")]"#.to_owned()),
        ("lfm2", r#"<|tool_call_start|>[weather(city="é", days=2)]<|tool_call_end|>"#.to_owned()),
        ("olmo3", "<function_calls>weather(city=\"x\")\nweather(city=\"y\", days=-1)</function_calls>".to_owned()),
        ("gemma3", "```tool_code\nweather(city=\"a ``` b\")\n```".to_owned()),
        ("gemma4", r#"<|tool_call>call:weather{city:<|"|>a, "b"}<|"|>,exact:false,at:[{<|"|>x y<|"|>:null,z:{k:<|"|><|"|>}}]}<tool_call|>"#.to_owned()),
        ("functiongemma", "<start_function_call>call:weather{city:<escape>x<escape>,days:3}<end_function_call>".to_owned()),
        ("minimax_m3", m3("~<tool_call>\n~<invoke name=\"weather\">~<city>a < b~</city>~<exact>true~</exact>~<at>~<item>~<x y>null~</x y>~<z>1~</z>~</item>~<item>~</item>~</at>~</invoke>\n~</tool_call>")),
        ("kimi_k3", "<|open|>tools<|sep|><|open|>call tool=\"weather\" index=\"1\"<|sep|><|open|>argument key=\"city\" type=\"string\"<|sep|>x<|close|>argument<|sep|><|open|>argument key=\"days\" type=\"number\"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>".to_owned()),
        ("minicpm5", "<function name=\"weather\"><param name=\"city\"><![CDATA[a\n<b>]]></param><param name=\"days\">1</param></function>".to_owned()),
        ("atem", "<atem:function_calls>\n<atem:invoke name=\"weather\">\n<atem:parameter name=\"city\">x</atem:parameter>\n</atem:invoke>\n</atem:function_calls>".to_owned()),
        ("functionary_v3_2", "weather\n{\"city\": \"x\"}>>>weather\n{\"city\": \"y\"}".to_owned()),
        ("step3", "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"weather\">\n<steptml:parameter name=\"city\">x</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>".to_owned()),
    ] {
        let format = OutputFormat::default().tools_by_name(name).unwrap();
        let rules = OutputRules { tools: &tools, tool_choice: &ToolChoice::Required, ..OutputRules::free(&format) };
        for vocabulary in vocabularies(&format) {
            let mut matcher = rules.matcher(|| Ok(vocabulary.clone())).unwrap().unwrap();
            for token in tokens(&vocabulary, &text) {
                assert!(matcher.mask().unwrap().allows(token), "{name}: {text:?} at token {token}");
                matcher.accept(token).unwrap();
            }
            assert!(matcher.may_end(), "{name}: {text:?}");
        }
        let (rest, calls) = parts(&format, &tools, false, &text);
        assert!(!calls.is_empty() && rest.trim().is_empty(), "{name}: {text:?} gives {rest:?}");
    }
}

#[test]
fn kimi_k3_may_close_its_response_before_calls() {
    let tools = offered();
    let format =
        OutputFormat::default().tools_by_name("kimi_k3").unwrap().reasoning_by_name("kimi_k3").unwrap();
    let call = "<|open|>tools<|sep|><|open|>call tool=\"stop\" index=\"1\"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>";
    for (choice, before) in [
        (ToolChoice::Auto, "<|open|>response<|sep|>I look.<|close|>response<|sep|>"),
        (ToolChoice::Auto, "<|open|>think<|sep|>So.<|close|>think<|sep|>"),
        (ToolChoice::Required, "<|open|>response<|sep|><|close|>response<|sep|>"),
        (
            ToolChoice::Required,
            "<|open|>think<|sep|>So.<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>",
        ),
    ] {
        let vocabulary = vocabulary(&["<|open|>", "<|close|>", "<|sep|>"]);
        let rules = OutputRules { tools: &tools, tool_choice: &choice, ..OutputRules::free(&format) };
        let mut matcher = rules.matcher(|| Ok(vocabulary.clone())).unwrap().unwrap();
        for token in tokens(&vocabulary, &format!("{before}{call}")) {
            assert!(matcher.mask().unwrap().allows(token), "{before:?} at token {token}");
            matcher.accept(token).unwrap();
        }
        assert!(matcher.may_end(), "{before:?}");
        assert_eq!(parts(&format, &tools, false, &format!("{before}{call}")).1.len(), 1, "{before}");
    }
}

#[test]
fn functionary_writes_its_header_before_text() {
    let tools = offered();
    let format = OutputFormat::default().tools_by_name("functionary_v3_2").unwrap();
    let output = schema(r#"{"type": "boolean"}"#);
    let free = OutputRules::free(&format);
    let strict = OutputRules { tools: &tools, ..free };
    for (rules, text, is_allowed) in [
        (OutputRules { structured_output: Some(&output), ..free }, "all\ntrue", true),
        (OutputRules { structured_output: Some(&output), ..free }, "true", false),
        (strict, "all\nIn Python: >>> 1 + 1", true),
        (strict, "all\nSo.>>>stop\n{}", true),
        (strict, "all\nSo.>>>stop\n{\"a\": 1}", false),
        (strict, "stop\n{}", true),
        (strict, "other\n{}", false),
    ] {
        let mut matcher = rules.matcher(|| Ok(BYTES.clone())).unwrap().unwrap();
        assert_eq!(accepts(&mut matcher, text), is_allowed, "{text:?}");
    }
}

#[test]
fn strict_tools_need_a_format_of_calls() {
    let tools = offered();
    let unknown = OutputFormat::default();
    let rules = OutputRules { tools: &tools, ..OutputRules::free(&unknown) };
    let error = rules.matcher(|| Ok(BYTES.clone())).unwrap_err();
    assert_eq!(error, GrammarError::NoCallSyntax { format: "plain text", field: "strict" });
    assert!(unknown.with_enforced_calls().tools().is_some());
}

#[test]
fn keys_that_a_notation_cannot_write_are_refused() {
    let spaced = r#"{"type": "object", "properties": {"a b": {"type": "integer"}}}"#;
    let nested = r#"{"type": "object", "properties": {"o": {"type": "object", "properties": {"s": {"type": "string", "pattern": "x"}}}}}"#;
    for (name, schema, expected) in [
        ("pythonic", spaced, Some("\"a b\" is no name")),
        ("gemma4", spaced, None),
        ("gemma4", nested, None),
        ("pythonic", nested, None),
        ("minimax_m3", nested, Some("pattern of \"s\"")),
        ("kimi_k3", nested, None),
    ] {
        let format = OutputFormat::default().tools_by_name(name).unwrap();
        let tools = [tool("f", schema)];
        let rules =
            OutputRules { tools: &tools, tool_choice: &ToolChoice::Required, ..OutputRules::free(&format) };
        let error = rules.matcher(|| Ok(BYTES.clone())).err().map(|error| error.to_string());
        match expected {
            Some(expected) => {
                assert!(error.as_ref().is_some_and(|error| error.contains(expected)), "{name}: {error:?}")
            }
            None => assert_eq!(error, None, "{name}"),
        }
        // One that is not strict is called all the same.
        let loose = [Tool { strict: false, ..tool("f", schema) }];
        assert!(OutputRules { tools: &loose, ..rules }.matcher(|| Ok(BYTES.clone())).is_ok(), "{name}");
    }
}

/// Unions of references to unions, eight deep, each of sixteen: four thousand million values, if all were looked at.
#[test]
fn unions_of_unions_are_looked_at_only_so_far() {
    let union = |next: usize| {
        format!("{{\"anyOf\": [{}]}}", vec![format!("{{\"$ref\": \"#/$defs/u{next}\"}}"); 16].join(","))
    };
    let last = r#""u8": {"anyOf": []}"#.to_owned();
    for last in [last, r#""u8": {"type": "string"}"#.to_owned()] {
        let unions: Vec<String> =
            (0..8).map(|number| format!("\"u{number}\": {}", union(number + 1))).chain([last]).collect();
        let schema = format!("{{\"$ref\": \"#/$defs/u0\", \"$defs\": {{{}}}}}", unions.join(","));
        let schema: Value = serde_json::from_str(&schema).unwrap();
        let forms = super::super::forms::forms(&schema["$defs"]["u0"], &schema);
        assert!(matches!(
            forms[..],
            [super::super::forms::Form { kind: super::super::forms::Kind::Other, .. }]
        ));
    }
}

#[test]
fn definitions_that_are_repeated_too_often_are_refused() {
    // Each argument is JSON with all definitions.
    let definition = format!(
        "{{\"type\": \"object\", \"additionalProperties\": {{\"description\": \"{}\"}}}}",
        "x".repeat(100_000)
    );
    let arguments: Vec<String> = (0..2000)
        .map(|number| {
            let values = "{\"$ref\": \"#/$defs/d\"}";
            format!("\"a{number}\": {{\"type\": \"object\", \"maxProperties\": {number}, \"additionalProperties\": {values}}}")
        })
        .collect();
    let schema = format!(
        "{{\"type\": \"object\", \"properties\": {{{}}}, \"$defs\": {{\"d\": {definition}}}}}",
        arguments.join(",")
    );
    let tools = [tool("f", &schema)];
    for name in ["pythonic", "qwen3_coder", "minimax_m3"] {
        let format = OutputFormat::default().tools_by_name(name).unwrap();
        let rules =
            OutputRules { tools: &tools, tool_choice: &ToolChoice::Required, ..OutputRules::free(&format) };
        let begin = std::time::Instant::now();
        let outcome = rules.matcher(|| Ok(BYTES.clone()));
        println!("{name}: {:?} after {:?}", outcome.as_ref().err().map(ToString::to_string), begin.elapsed());
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("its grammar has more than"), "{name}: {error}");
    }
}
