//! The real SDKs of OpenAI, Anthropic and Ollama, most of them against the listener for other machines.

use russet_gateway::response_store::ResponseStoreConfig;
use russet_gateway::routes::DeploymentState;
use russet_wire::conversation::ToolCall;
use russet_wire::event::{
    Delta, FailureKind, FinishReason, GenerationEvent, GenerationFailure, Logprobs, TokenLogprob,
};

use crate::harness::{
    Certificates, GatewayLab, ScriptStep, access_key, finished, hello, limits, started, token,
};
use crate::ollama_models::publish_details;
use crate::ollama_pull::scales_to_zero;
use crate::openai_responses::agent;

/// Runs a script beside this folder with this URL of the gateway; passes where there is no Python for it.
async fn check(lab: &GatewayLab, script: &str, url: String) {
    run_script(script, url, &lab.certificates).await;
}

/// The same of any gateway with these certificates.
pub async fn run_script(script: &str, url: String, certificates: &Certificates) {
    let Some(python) = std::env::var_os("RUSSET_PYTHON") else {
        assert!(std::env::var_os("CI").is_none(), "CI must set RUSSET_PYTHON; `cargo xtask test` does");
        println!("RUSSET_PYTHON is not set: the SDK was not run; `cargo xtask test` sets it");
        return;
    };
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(script);
    let mut command = tokio::process::Command::new(python);
    command.arg(script).arg(url).env("SSL_CERT_FILE", certificates.ca_path());
    let output = command.kill_on_drop(true).output().await.unwrap();
    assert!(
        output.status.success() && output.stdout.ends_with(b"passed\n"),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

#[tokio::test]
async fn the_openai_sdk_raises_its_own_errors_over_tls() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.engine("a", |_| hello());
    lab.publish(&[("m", DeploymentState::Ready, &[&engine]), ("large", DeploymentState::Ready, &[&engine])]);
    lab.keys(&[
        access_key("some", "s-some", |spec| spec.models = vec!["m".into()]),
        access_key("all", "s-all", |_| {}),
        access_key("once", "s-once", |spec| spec.requests_per_minute = Some(1)),
    ]);
    check(&lab, "openai_keys.py", lab.network_url("/v1")).await;
}

#[tokio::test]
async fn the_anthropic_sdk_reads_messages_streams_and_errors() {
    let lab = GatewayLab::start(limits()).await;
    let add = |delta: Delta| ScriptStep::Say(GenerationEvent::Token { id: 1, delta });
    let call = |id: &str, arguments: &str| ToolCall {
        id: id.into(),
        name: "weather".into(),
        arguments: arguments.into(),
    };
    let calls = vec![call("c1", r#"{"city": "Zürich"}"#), call("c2", "{}")];
    let turn = vec![
        started(),
        add(Delta { reasoning: "Look.".into(), ..Delta::default() }),
        token("I look."),
        add(Delta { tool_calls: calls, ..Delta::default() }),
        finished(FinishReason::Stop),
    ];
    let failure = GenerationFailure { kind: FailureKind::Internal, message: "a rank diverged".into() };
    let broken = vec![started(), token("Hel"), ScriptStep::Say(GenerationEvent::Failed(failure))];
    let [plain, agent, broken] = [hello(), turn, broken].map(|steps| lab.engine("a", move |_| steps.clone()));
    lab.publish(&[
        ("m", DeploymentState::Ready, &[&plain]),
        ("agent", DeploymentState::Ready, &[&agent]),
        ("broken", DeploymentState::Ready, &[&broken]),
    ]);
    lab.keys(&[
        access_key("some", "s-some", |_| {}),
        access_key("one", "s-one", |spec| spec.models = vec!["m".into()]),
        access_key("once", "s-once", |spec| spec.requests_per_minute = Some(1)),
    ]);
    check(&lab, "anthropic_sdk.py", lab.network_url("")).await;
}

#[tokio::test]
async fn the_openai_sdk_validates_responses_and_events() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.engine("a", |request| match request.messages.last().unwrap().content.as_str() {
        "agent" => agent(),
        "long" => vec![started(), token("x"), finished(FinishReason::Length)],
        "empty" => vec![started(), finished(FinishReason::Stop)],
        "logprobs" => {
            let one = TokenLogprob { id: 1, bytes: b"x".to_vec(), logprob: -0.5 };
            let logprobs = vec![Logprobs { sampled: one.clone(), top: vec![one] }];
            let delta = Delta { logprobs, ..Delta::text("x") };
            let token = ScriptStep::Say(GenerationEvent::Token { id: 1, delta });
            vec![started(), token, finished(FinishReason::Stop)]
        }
        "fail" => {
            let failure = GenerationFailure { kind: FailureKind::Internal, message: "because".into() };
            vec![started(), token("x"), ScriptStep::Say(GenerationEvent::Failed(failure))]
        }
        _ => hello(),
    });
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    check(&lab, "openai_responses.py", lab.url("/v1")).await;
}

#[tokio::test]
async fn the_openai_sdk_keeps_and_resumes_responses() {
    let folder = tempfile::tempdir().unwrap();
    let config = ResponseStoreConfig::new(folder.path().join("responses.db"));
    let lab = GatewayLab::start_keeping(limits(), config).await;
    let engine = lab.engine("a", |request| match request.messages.last().unwrap().content.as_str() {
        "hang" => vec![started(), token("x"), ScriptStep::Hang],
        "count" => {
            let count = request.messages.len().to_string();
            vec![started(), token(&count), finished(FinishReason::Stop)]
        }
        _ => hello(),
    });
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    check(&lab, "openai_kept_responses.py", lab.url("/v1")).await;
}

#[tokio::test]
async fn the_ollama_client_reads_models_pulls_and_unloads() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.engine("a", |_| hello());
    let working = DeploymentState::Working("copying 3 of 9 GiB".into());
    lab.publish(&[("m", DeploymentState::Ready, &[&engine]), ("waiting", working, &[])]);
    publish_details(&lab);
    scales_to_zero(&lab);
    check(&lab, "ollama_models.py", lab.url("")).await;
}

/// A gateway that keeps batches, and its engine, which answers what does not say `hang`.
async fn keeping(folder: &std::path::Path) -> (GatewayLab, crate::harness::ScriptedEngine) {
    let config = ResponseStoreConfig::new(folder.join("responses.db"));
    let lab = GatewayLab::start_keeping(limits(), config).await;
    let engine = lab.engine("a", |request| match request.messages[0].content.as_str() {
        "hang" => vec![started(), token("x"), ScriptStep::Hang],
        _ => hello(),
    });
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    (lab, engine)
}

#[tokio::test]
async fn the_openai_sdk_runs_batches_of_files() {
    let folder = tempfile::tempdir().unwrap();
    let (lab, _engine) = keeping(folder.path()).await;
    check(&lab, "openai_batches.py", lab.url("/v1")).await;
}

#[tokio::test]
async fn the_anthropic_sdk_runs_batches_of_messages() {
    let folder = tempfile::tempdir().unwrap();
    let (lab, _engine) = keeping(folder.path()).await;
    check(&lab, "anthropic_batches.py", lab.url("")).await;
}
