//! Tests of every client's set-up: the URL, the key, the model and its context, where the client reads them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]

use serde_json::{Value, json};

use super::*;
use crate::client_setup::endpoint::{GatewayEndpoint, parse_models};
use crate::client_setup::merge::{parse, render, with_defaults};
use crate::client_setup::setup::ClientSetup;
use crate::client_setup::text;

const LOCAL: &str = "http://127.0.0.1:52415";
const REMOTE: &str = "https://studio.local:8443";

fn endpoint(url: &str, key: Option<&str>, context: u64) -> GatewayEndpoint {
    let list = json!({"data": [
        {"id": "qwen3-30b", "context_length": context,
         "russet": {"ready": true, "message": "", "deployments": ["default/qwen3-30b"]}},
        {"id": "tiny", "context_length": 4096,
         "russet": {"ready": true, "message": "", "deployments": ["default/tiny"]}},
    ]});
    GatewayEndpoint::new(url.into(), key.map(str::to_owned), parse_models(&list), Some("qwen3-30b")).unwrap()
}

fn setup(client: &str, url: &str, key: Option<&str>) -> ClientSetup {
    (find(client).unwrap().setup)(&endpoint(url, key, 65_536))
}

/// The settings of the first file, with its path.
fn settings(client: &str, url: &str, key: Option<&str>) -> (&'static str, Value) {
    let setup = setup(client, url, key);
    (setup.files[0].paths[0], with_defaults(&setup.files[0].defaults, &setup.files[0].setting))
}

#[test]
fn claude_code_has_its_variables_in_its_settings() {
    let (path, settings) = settings("claude-code", REMOTE, Some("rk-1"));
    assert_eq!(path, ".claude/settings.json");
    assert_eq!(
        settings,
        json!({"env": {
            "ANTHROPIC_BASE_URL": "https://studio.local:8443",
            "ANTHROPIC_AUTH_TOKEN": "rk-1",
            "ANTHROPIC_MODEL": "qwen3-30b",
            "ANTHROPIC_DEFAULT_OPUS_MODEL": "qwen3-30b",
            "ANTHROPIC_DEFAULT_SONNET_MODEL": "qwen3-30b",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "qwen3-30b",
            "CLAUDE_CODE_ENABLE_GATEWAY_MODEL_DISCOVERY": "1",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "65536",
        }})
    );
}

#[test]
fn codex_has_a_provider_and_reads_the_key_from_a_variable() {
    let with_key = setup("codex", REMOTE, Some("rk-1"));
    assert_eq!(
        render(with_key.files[0].format, &with_key.files[0].setting),
        "model = \"qwen3-30b\"\nmodel_provider = \"russet\"\nmodel_context_window = 65536\n\n\
         [model_providers.russet]\nname = \"Russet\"\nbase_url = \"https://studio.local:8443/v1\"\n\
         wire_api = \"responses\"\nenv_key = \"RUSSET_KEY\"\n"
    );
    assert_eq!(with_key.variables, [("RUSSET_KEY", "rk-1".to_owned())]);
    let without = setup("codex", LOCAL, None);
    assert_eq!(without.files[0].setting["model_providers"]["russet"].get("env_key"), None);
    assert_eq!(without.variables, []);
}

#[test]
fn opencode_has_all_models_with_their_limits() {
    let (path, settings) = settings("opencode", LOCAL, Some("rk-1"));
    assert_eq!(path, ".config/opencode/opencode.json");
    assert_eq!(
        settings,
        json!({
            "$schema": "https://opencode.ai/config.json",
            "model": "russet/qwen3-30b",
            "provider": {"russet": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Russet",
                "options": {"baseURL": "http://127.0.0.1:52415/v1", "apiKey": "rk-1"},
                "models": {
                    "qwen3-30b": {"name": "qwen3-30b", "limit": {"context": 65536, "output": 16384}},
                    "tiny": {"name": "tiny", "limit": {"context": 4096, "output": 1024}},
                },
            }},
        })
    );
}

#[test]
fn qwen_code_has_a_model_of_its_provider_openai() {
    let (path, settings) = settings("qwen-code", LOCAL, None);
    assert_eq!(path, ".qwen/settings.json");
    assert_eq!(
        settings,
        json!({
            "env": {"RUSSET_API_KEY": "any"},
            "modelProviders": {"openai": [{
                "id": "qwen3-30b", "name": "qwen3-30b (Russet)", "envKey": "RUSSET_API_KEY",
                "baseUrl": "http://127.0.0.1:52415/v1", "generationConfig": {"contextWindowSize": 65536},
            }]},
            "security": {"auth": {"selectedType": "openai"}},
            "model": {"name": "qwen3-30b"},
        })
    );
}

#[test]
fn hermes_has_a_custom_endpoint_and_is_warned_of_short_contexts() {
    let (path, settings) = settings("hermes", LOCAL, Some("rk-1"));
    assert_eq!(path, ".hermes/config.yaml");
    assert_eq!(
        settings,
        json!({"model": {
            "default": "qwen3-30b", "provider": "custom", "base_url": "http://127.0.0.1:52415/v1",
            "api_key": "rk-1", "context_length": 65536,
        }})
    );
    assert_eq!(setup("hermes", LOCAL, None).steps, Vec::<String>::new());
    let short = (find("hermes").unwrap().setup)(&endpoint(LOCAL, None, 32_768));
    assert!(short.steps[0].contains("64000") && short.steps[0].contains("32768"), "{:?}", short.steps);
}

#[test]
fn aider_has_the_endpoint_and_the_context_in_two_files() {
    let setup = setup("aider", LOCAL, None);
    assert_eq!(
        render(setup.files[0].format, &setup.files[0].setting),
        "model: openai/qwen3-30b\nopenai-api-base: http://127.0.0.1:52415/v1\nopenai-api-key: any\n"
    );
    assert_eq!(setup.files[1].paths, [".aider.model.metadata.json"]);
    assert_eq!(setup.files[1].setting["openai/qwen3-30b"]["max_input_tokens"], 65_536);
}

#[test]
fn continue_has_a_model_beside_those_of_its_owner() {
    let (path, settings) = settings("continue", REMOTE, Some("rk-1"));
    assert_eq!(path, ".continue/config.yaml");
    assert_eq!(
        settings["models"],
        json!([{
            "name": "qwen3-30b (Russet)", "provider": "openai", "model": "qwen3-30b",
            "apiBase": "https://studio.local:8443/v1", "apiKey": "rk-1", "roles": ["chat", "edit", "apply"],
            "defaultCompletionOptions": {"contextLength": 65536},
        }])
    );
    assert_eq!((&settings["schema"], &settings["version"]), (&json!("v1"), &json!("0.0.1")));
}

#[test]
fn zed_has_a_provider_and_no_key_in_its_settings() {
    let zed = setup("zed", LOCAL, Some("rk-1"));
    let setting = &zed.files[0].setting;
    let provider = &setting["language_models"]["openai_compatible"]["russet"];
    assert_eq!(provider["api_url"], "http://127.0.0.1:52415/v1");
    assert_eq!(provider["available_models"][0]["name"], "qwen3-30b");
    assert_eq!(provider["available_models"][0]["max_tokens"], 65_536);
    assert_eq!(setting["agent"]["default_model"], json!({"provider": "russet", "model": "qwen3-30b"}));
    assert!(!setting.to_string().contains("rk-1"));
    assert_eq!(zed.variables, [("RUSSET_API_KEY", "rk-1".to_owned())]);
}

#[test]
fn xcode_gets_the_port_or_the_url_and_the_key() {
    let local = setup("xcode", LOCAL, None).steps.join("\n");
    assert!(local.contains("Locally Hosted. Port: 52415"), "{local}");
    let remote = setup("xcode", REMOTE, Some("rk-1")).steps.join("\n");
    assert!(remote.contains("URL: https://studio.local:8443; API key: Bearer rk-1;"), "{remote}");
}

#[test]
fn open_webui_and_home_assistant_have_url_key_and_model() {
    let web = setup("open-webui", REMOTE, Some("rk-1"));
    assert_eq!(web.variables[0], ("OPENAI_API_BASE_URL", "https://studio.local:8443/v1".to_owned()));
    assert_eq!(web.variables[1], ("OPENAI_API_KEY", "rk-1".to_owned()));
    let home = setup("home-assistant", REMOTE, Some("rk-1")).steps.join("\n");
    for part in ["URL: https://studio.local:8443; API key: rk-1.", "qwen3-30b:latest", "size 65536"] {
        assert!(home.contains(part), "{home}");
    }
}

#[test]
fn every_client_is_named_once_and_prints_what_it_needs() {
    let mut names: Vec<&str> = ALL.iter().map(|client| client.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), ALL.len());
    let (with_key, unknown) = (endpoint(REMOTE, Some("rk-1"), 65_536), endpoint(LOCAL, None, 0));
    for client in ALL {
        let setup = (client.setup)(&with_key);
        let guide = text::guide(client, &with_key, &setup);
        for part in [client.title, "studio.local:8443", "rk-1", "qwen3-30b", "65536", "--check"] {
            assert!(guide.contains(part), "{}: {part} is missing in\n{guide}", client.name);
        }
        assert_eq!(guide.contains("--apply"), !setup.files.is_empty(), "{guide}");
        assert_eq!(guide.contains("kind: ModelRoute"), client.wants_claude_names, "{guide}");
        assert!(!setup.requests.is_empty(), "{}", client.name);
        // A context that is not known is left out, and what is printed is of its format.
        for patch in (client.setup)(&unknown).files {
            let shown = render(patch.format, &with_defaults(&patch.defaults, &patch.setting));
            assert!(!shown.contains("null"), "{shown}");
            assert_eq!(
                parse(patch.format, &shown).unwrap(),
                with_defaults(&patch.defaults, &patch.setting),
                "{shown}"
            );
        }
    }
}
