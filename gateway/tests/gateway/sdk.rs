//! The real OpenAI SDK against the listener for other machines.

use russet_gateway::routes::DeploymentState;

use crate::harness::{GatewayLab, access_key, hello, limits};

#[tokio::test]
async fn the_openai_sdk_raises_its_own_errors_over_tls() {
    let Some(python) = std::env::var_os("RUSSET_PYTHON") else {
        assert!(std::env::var_os("CI").is_none(), "CI must set RUSSET_PYTHON; `cargo xtask test` does");
        println!("RUSSET_PYTHON is not set: the SDK was not run; `cargo xtask test` sets it");
        return;
    };
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.engine("a", |_| hello());
    lab.publish(&[("m", DeploymentState::Ready, &[&engine]), ("large", DeploymentState::Ready, &[&engine])]);
    lab.keys(&[
        access_key("some", "s-some", |spec| spec.models = vec!["m".into()]),
        access_key("all", "s-all", |_| {}),
        access_key("once", "s-once", |spec| spec.requests_per_minute = Some(1)),
    ]);
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/openai_keys.py");
    let mut command = tokio::process::Command::new(python);
    command.arg(script).arg(lab.network_url("/v1")).env("SSL_CERT_FILE", lab.certificates.ca_path());
    let output = command.kill_on_drop(true).output().await.unwrap();
    assert!(
        output.status.success() && output.stdout.ends_with(b"passed\n"),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}
