//! The real OpenAI SDK against the listener for other machines.

use russet_gateway::routes::DeploymentState;
use russet_wire::event::{
    Delta, FailureKind, FinishReason, GenerationEvent, GenerationFailure, Logprobs, TokenLogprob,
};

use crate::harness::{GatewayLab, ScriptStep, access_key, finished, hello, limits, started, token};
use crate::openai_responses::agent;

/// Runs a script of this folder against the gateway; says so where there is no SDK.
async fn run(lab: &GatewayLab, script: &str, url: String) {
    let Some(python) = std::env::var_os("RUSSET_PYTHON") else {
        assert!(std::env::var_os("CI").is_none(), "CI must set RUSSET_PYTHON; `cargo xtask test` does");
        println!("RUSSET_PYTHON is not set: the SDK was not run; `cargo xtask test` sets it");
        return;
    };
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(script);
    let mut command = tokio::process::Command::new(python);
    command.arg(script).arg(url).env("SSL_CERT_FILE", lab.certificates.ca_path());
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
    run(&lab, "openai_keys.py", lab.network_url("/v1")).await;
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
    run(&lab, "openai_responses.py", lab.url("/v1")).await;
}
