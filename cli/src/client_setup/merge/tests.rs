//! Tests of merges. What a file had before is there afterwards, byte by byte where nothing is set.

use serde_json::json;

use super::*;

fn check(format: FileFormat, text: &str, setting: &Value, expected: &str) {
    let once = merge(format, text, &json!({}), setting).unwrap();
    assert_eq!(once, expected);
    assert_eq!(merge(format, &once, &json!({}), setting).unwrap(), expected, "twice is once");
}

#[test]
fn json_keeps_comments_other_keys_and_their_order() {
    let text = "// Zed settings\n{\n  \"theme\": \"One Dark\", // mine\n  \"language_models\": {\n    \"ollama\": { \"api_url\": \"http://x\" },\n  },\n  /* last */\n  \"tab_size\": 2,\n}\n";
    let setting = json!({
        "language_models": {"openai_compatible": {"russet": {"api_url": "http://y/v1"}}},
        "tab_size": 4,
    });
    let expected = "// Zed settings\n{\n  \"theme\": \"One Dark\", // mine\n  \"language_models\": {\n    \"ollama\": { \"api_url\": \"http://x\" },\n    \"openai_compatible\": {\n      \"russet\": {\n        \"api_url\": \"http://y/v1\",\n      },\n    },\n  },\n  /* last */\n  \"tab_size\": 4,\n}\n";
    check(FileFormat::Json, text, &setting, expected);
}

#[test]
fn toml_keeps_comments_and_puts_keys_before_tables() {
    let text =
        "# mine\nmodel = \"gpt-6\" # the default\n\n[model_providers.other]\nname = \"Other\" # theirs\n";
    let setting = json!({
        "model": "smoke",
        "model_provider": "russet",
        "model_context_window": 32768,
        "model_providers": {"russet": {"name": "Russet", "base_url": "http://y/v1"}},
    });
    let expected = "# mine\nmodel = \"smoke\" # the default\nmodel_provider = \"russet\"\nmodel_context_window = 32768\n\n[model_providers.other]\nname = \"Other\" # theirs\n\n[model_providers.russet]\nname = \"Russet\"\nbase_url = \"http://y/v1\"\n";
    check(FileFormat::Toml, text, &setting, expected);
}

#[test]
fn yaml_keeps_comments_and_other_keys() {
    let text = "# Hermes\nmodel:\n  default: other/model # before\n  provider: openrouter\n\nterminal:\n  # keep\n  backend: local\n";
    let setting = json!({"model": {
        "default": "smoke", "provider": "custom", "base_url": "http://y/v1", "context_length": 65536,
    }});
    let expected = "# Hermes\nmodel:\n  default: smoke # before\n  provider: custom\n  base_url: http://y/v1\n  context_length: 65536\n\nterminal:\n  # keep\n  backend: local\n";
    check(FileFormat::Yaml, text, &setting, expected);
}

#[test]
fn members_of_lists_are_known_by_their_name() {
    let text = "name: Mine\nmodels:\n  - name: Other # theirs\n    model: x\n  - name: Russet\n    model: old\n    roles: [chat]\n";
    let setting = json!({"models": [
        {"name": "Russet", "model": "smoke"},
        {"name": "Russet 2", "model": "tiny"},
    ]});
    let expected = "name: Mine\nmodels:\n  - name: Other # theirs\n    model: x\n  - name: Russet\n    model: smoke\n    roles: [chat]\n  - name: Russet 2\n    model: tiny\n";
    check(FileFormat::Yaml, text, &setting, expected);
    let json = "{\"list\": [{\"name\": \"a\", \"n\": 1}]}\n";
    let read = |text: &str| parse(FileFormat::Json, text).unwrap();
    let once = merge(
        FileFormat::Json,
        json,
        &json!({}),
        &json!({"list": [{"name": "a", "n": 2}, {"name": "b", "n": 3}]}),
    );
    assert_eq!(read(&once.unwrap()), json!({"list": [{"name": "a", "n": 2}, {"name": "b", "n": 3}]}));
}

#[test]
fn defaults_are_only_for_what_a_file_lacks() {
    let (defaults, setting) = (json!({"name": "Russet", "schema": "v1"}), json!({"models": [{"name": "a"}]}));
    let merged = merge(FileFormat::Yaml, "name: Mine # mine\n", &defaults, &setting).unwrap();
    assert_eq!(merged, "name: Mine # mine\nschema: v1\nmodels:\n- name: a\n");
}

#[test]
fn empty_files_and_files_of_comments_get_the_setting() {
    let setting = json!({"model": "openai/smoke", "openai-api-base": "http://y/v1"});
    for (format, text, expected) in [
        (FileFormat::Yaml, "", "model: openai/smoke\nopenai-api-base: http://y/v1\n"),
        (FileFormat::Yaml, "# model: x", "# model: x\nmodel: openai/smoke\nopenai-api-base: http://y/v1\n"),
        (FileFormat::Toml, "# x\n", "model = \"openai/smoke\"\nopenai-api-base = \"http://y/v1\"\n# x\n"),
        (
            FileFormat::Json,
            "",
            "{\n  \"model\": \"openai/smoke\",\n  \"openai-api-base\": \"http://y/v1\"\n}\n",
        ),
    ] {
        check(format, text, &setting, expected);
    }
}

#[test]
fn what_cannot_be_parsed_or_is_no_map_is_an_error() {
    for (format, text) in [
        (FileFormat::Json, "{\"a\": 1"),
        (FileFormat::Json, "{'a': 1}"),
        (FileFormat::Toml, "a = \nb = 1"),
        (FileFormat::Yaml, "a: [1\nb: 2"),
        (FileFormat::Yaml, "a: 1\n---\nb: 2\n"),
    ] {
        let error = merge(format, text, &json!({}), &json!({"c": 1})).unwrap_err();
        assert!(matches!(error, MergeError::Invalid { .. }), "{text}: {error}");
        assert!(error.to_string().contains(&format.to_string()), "{error}");
    }
    for (format, text) in [(FileFormat::Json, "[1]"), (FileFormat::Yaml, "- a\n"), (FileFormat::Json, "3")] {
        assert_eq!(merge(format, text, &json!({}), &json!({"c": 1})), Err(MergeError::NotMap), "{text}");
    }
}

#[test]
fn a_scalar_is_replaced_by_a_map() {
    let setting = json!({"model": {"default": "smoke", "provider": "custom"}});
    let expected = "model:\n  default: smoke\n  provider: custom\nother: 1 # x\n";
    check(FileFormat::Yaml, "model: anthropic/claude\nother: 1 # x\n", &setting, expected);
}

#[test]
fn rendered_settings_parse_to_the_same() {
    let setting = json!({
        "text": "a: \"b\" # c", "number": 32768, "truth": true, "list": ["x", "y"],
        "map": {"inner": {"key": "value"}}, "items": [{"name": "n", "n": 1}],
    });
    for format in [FileFormat::Json, FileFormat::Toml, FileFormat::Yaml] {
        assert_eq!(parse(format, &render(format, &setting)).unwrap(), setting, "{format:?}");
    }
}
