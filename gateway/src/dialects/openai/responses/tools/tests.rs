//! Tests of `tools`.

use super::*;
use crate::json_body::JsonScan;

fn parsed(text: &str) -> Result<(ParsedTools, Vec<String>), GatewayError> {
    let body = JsonScan::new(text.as_bytes()).unwrap().decode(text.as_bytes()).unwrap();
    let mut fields = body.value.as_object().unwrap().clone();
    fields.retain(|_, value| !value.is_null());
    let mut ignored = BTreeSet::new();
    let tools = parse(&fields, &body, &mut ignored)?;
    Ok((tools, ignored.into_iter().collect()))
}

#[test]
fn functions_and_custom_tools_arrive_and_others_are_listed() {
    const SCHEMA: &str = r#"{"type": "object", "properties": {"z": {}, "a": {"enum": [1.0]}}}"#;
    let body = format!(
        r#"{{"tools": [
            {{"type": "web_search", "parameters": 7}}, {{"type": "local_shell"}},
            {{"type": "function", "name": "f", "description": "F.", "parameters": {SCHEMA}, "strict": true}},
            {{"type": "custom", "name": "patch", "description": "Edits.",
              "format": {{"type": "grammar", "syntax": "lark", "definition": "start: \"a\""}}}},
            {{"type": "function", "name": "h"}}]}}"#
    );
    let (tools, ignored) = parsed(&body).unwrap();
    let ParsedTools { tools, choice, client_tools, repeated, repeated_choice } = tools;
    assert_eq!(ignored, ["tools.format", "tools.local_shell", "tools.web_search"]);
    let described = "Edits.\n\nThe input follows this lark grammar:\nstart: \"a\"";
    let expected = [
        Tool {
            name: "f".into(),
            description: Some("F.".into()),
            parameters: Some(SCHEMA.into()),
            strict: true,
        },
        Tool {
            name: "patch".into(),
            description: Some(described.into()),
            parameters: Some(CUSTOM_PARAMETERS.into()),
            strict: false,
        },
        Tool { name: "h".into(), ..Tool::default() },
    ];
    assert_eq!((tools.as_slice(), choice), (expected.as_slice(), ToolChoice::Auto));
    assert_eq!((client_tools.called("patch").is_custom, repeated_choice), (true, json!("auto")));
    assert!(repeated.get().contains(SCHEMA), "{repeated}");
    assert_eq!(
        serde_json::from_str::<Value>(repeated.get()).unwrap()[1],
        json!({
            "type": "custom", "name": "patch", "description": "Edits.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: \"a\""},
        })
    );
}

#[test]
fn tools_of_a_namespace_have_it_in_their_names() {
    const SCHEMA: &str = r#"{"type": "object", "properties": {"z": {}, "a": {}}}"#;
    let body = format!(
        r#"{{"tools": [{{"type": "web_search", "tools": 7}},
            {{"type": "namespace", "name": "mcp__fs__", "description": "Files.", "tools": [
                {{"type": "function", "name": "read", "description": "Reads.", "parameters": {SCHEMA},
                  "defer_loading": true}},
                {{"type": "web_search"}}, {{"type": "custom", "name": "patch"}}]}},
            {{"type": "namespace", "name": "crm", "tools": []}}, {{"type": "function", "name": "read"}}],
            "tool_choice": {{"type": "function", "namespace": "mcp__fs__", "name": "read"}}}}"#
    );
    let (parsed, ignored) = parsed(&body).unwrap();
    assert_eq!(ignored, ["tools.web_search"]);
    let named: Vec<(&str, Option<&str>)> =
        parsed.tools.iter().map(|tool| (tool.name.as_str(), tool.description.as_deref())).collect();
    let about = Some("Files.\n\nReads.");
    assert_eq!(named, [("mcp__fs__read", about), ("mcp__fs__patch", None), ("read", None)]);
    assert_eq!(parsed.tools[0].parameters.as_deref(), Some(SCHEMA));
    assert_eq!(parsed.choice, ToolChoice::Named("mcp__fs__read".into()));
    let namespaced = |is_custom, name: &str| ClientTool {
        is_custom,
        namespace: Some("mcp__fs__".into()),
        name: name.into(),
    };
    assert_eq!(parsed.client_tools.called("mcp__fs__read"), namespaced(false, "read"));
    assert_eq!(parsed.client_tools.called("mcp__fs__patch"), namespaced(true, "patch"));
    let repeated: Value = serde_json::from_str(parsed.repeated.get()).unwrap();
    assert_eq!(
        (&repeated[0]["name"], &repeated[0]["tools"][0]["name"]),
        (&json!("mcp__fs__"), &json!("read"))
    );
    assert_eq!((&repeated[1]["tools"], &repeated[2]["name"]), (&json!([]), &json!("read")));
}

#[test]
fn choices_of_tools_say_which_may_be_called() {
    let tools = json!([
        {"type": "function", "name": "f"}, {"type": "custom", "name": "c"}, {"type": "web_search"},
    ]);
    let of = |choice: &Value| parsed(&json!({"tools": tools, "tool_choice": choice}).to_string());
    let function = |name: &str| json!({"type": "function", "name": name});
    let allowed = |mode: &str, tools: Value| json!({"type": "allowed_tools", "mode": mode, "tools": tools});
    for (choice, names, expected) in [
        (json!("auto"), vec!["f", "c"], ToolChoice::Auto),
        (json!(null), vec!["f", "c"], ToolChoice::Auto),
        (json!("none"), vec![], ToolChoice::Auto),
        (json!("required"), vec!["f", "c"], ToolChoice::Required),
        (function("f"), vec!["f", "c"], ToolChoice::Named("f".into())),
        (json!({"type": "custom", "name": "c"}), vec!["f", "c"], ToolChoice::Named("c".into())),
        (
            json!({"type": "function", "function": {"name": "f"}}),
            vec!["f", "c"],
            ToolChoice::Named("f".into()),
        ),
        (
            allowed("required", json!([function("f"), {"type": "web_search"}])),
            vec!["f"],
            ToolChoice::Required,
        ),
        (allowed("auto", json!([{"type": "custom", "name": "c"}])), vec!["c"], ToolChoice::Auto),
    ] {
        let (parsed, _) = of(&choice).unwrap();
        let got: Vec<&str> = parsed.tools.iter().map(|tool| tool.name.as_str()).collect();
        assert_eq!((got, parsed.choice), (names, expected), "{choice}");
    }
    for choice in [
        json!("any"),
        json!(7),
        json!({"type": "web_search"}),
        json!({"type": "function"}),
        function("g"),
        allowed("auto", json!([function("g")])),
        allowed("auto", json!([{"type": "function"}])),
        allowed("some", json!([])),
        allowed("required", json!([])),
    ] {
        assert_eq!(of(&choice).unwrap_err().param.as_deref(), Some("tool_choice"), "{choice}");
    }
}

#[test]
fn invalid_tools_are_refused_by_name() {
    let function = |more: Value| {
        let mut tool = json!({"type": "function", "name": "f"});
        tool.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"tools": [tool]})
    };
    for (body, param) in [
        (json!({"tools": "all"}), "tools"),
        (json!({"tools": vec![json!({"type": "x"}); 129]}), "tools"),
        (json!({"tools": [7]}), "tools[0]"),
        (json!({"tools": [{"name": "f"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "namespace", "tools": []}]}), "tools[0].name"),
        (json!({"tools": [{"type": "namespace", "name": "n"}]}), "tools[0].tools"),
        (json!({"tools": [{"type": "namespace", "name": "n", "tools": [7]}]}), "tools[0].tools[0]"),
        (
            json!({"tools": [{"type": "namespace", "name": "n", "tools": [{"name": "f"}]}]}),
            "tools[0].tools[0].type",
        ),
        (
            json!({"tools": [{"type": "namespace", "name": "n", "tools": vec![json!({"type": "function", "name": "f"}); 129]}]}),
            "tools",
        ),
        (json!({"tools": [{"type": "custom"}]}), "tools[0].name"),
        (function(json!({"name": ""})), "tools[0].name"),
        (function(json!({"parameters": 7})), "tools[0].parameters"),
        (function(json!({"description": 7})), "tools[0].description"),
        (function(json!({"strict": 7})), "tools[0].strict"),
        (json!({"tools": [{"type": "web_search"}], "tool_choice": "required"}), "tool_choice"),
    ] {
        let error = parsed(&body.to_string()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(param), "{body}");
        assert!(error.message.contains(param), "{error}");
    }
}

#[test]
fn large_tools_are_not_repeated() {
    let description = "x".repeat(MAX_REPEATED_BYTES);
    let body = json!({"tools": [{"type": "function", "name": "f", "description": description}]});
    let (parsed, _) = parsed(&body.to_string()).unwrap();
    assert_eq!((parsed.tools.len(), parsed.repeated.get()), (1, "[]"));
    let allowed = vec![json!({"type": "function", "name": "f"}); 10_000];
    let body = json!({
        "tools": [{"type": "function", "name": "f"}],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": allowed},
    });
    let (parsed, _) = self::parsed(&body.to_string()).unwrap();
    assert_eq!((parsed.choice, parsed.repeated_choice), (ToolChoice::Required, json!("auto")));
}
