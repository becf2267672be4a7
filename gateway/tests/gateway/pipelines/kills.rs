//! A gateway that is killed at every step of a run, and a next one that goes on where it was.

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use super::*;

/// Makes the test below the gateway that it kills: API server, address, certificates and folder.
const GATEWAY: &str = "RUSSET_PIPELINE_GATEWAY_THAT_IS_KILLED";
/// Runs that are killed at every step.
const RUNS: usize = 3;

/// A gateway in a process of its own, which is killed when this is dropped.
pub(super) struct KilledGateway(Child);

impl KilledGateway {
    pub(super) fn start(lab: &PipelineLab) -> Self {
        let tls = lab.certificates.gateway();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "pipelines::kills::runs_go_on_after_a_kill_at_every_step", "--nocapture"])
            .env(
                GATEWAY,
                json!([lab.api, lab.listen, lab.folder.path(), [tls.cert, tls.key, tls.ca]]).to_string(),
            )
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self(child)
    }
}

impl Drop for KilledGateway {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

pub(super) async fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let waited = tokio::time::timeout(TEST_TIMEOUT, async {
        while !reached() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    assert!(waited.await.is_ok(), "{what}");
}

#[test]
fn runs_go_on_after_a_kill_at_every_step() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    if let Some(arguments) = std::env::var_os(GATEWAY) {
        type Arguments = (SocketAddr, SocketAddr, PathBuf, [PathBuf; 3]);
        let (api, listen, folder, [cert, key, ca]): Arguments =
            serde_json::from_str(arguments.to_str().unwrap()).unwrap();
        let _ = rustls::crypto::ring::default_provider().install_default();
        let tls = russet_rpc::tls::TlsFiles { cert, key, ca };
        runtime.block_on(gateway(api, listen, tls, folder, CancellationToken::new()));
        return;
    }
    for number in 0..RUNS {
        runtime.block_on(kill_at_every_step(number));
    }
}

async fn kill_at_every_step(number: usize) {
    // The first answer to each question, and the first call, never come to their ends.
    let held = Arc::new(std::sync::Mutex::new(std::collections::BTreeSet::new()));
    let is_first = {
        let held = held.clone();
        move |what: &str| held.lock().unwrap().insert(what.to_owned())
    };
    let first_answer = is_first.clone();
    let lab = PipelineLab::start(
        move |request| {
            let prompt = request.messages.last().unwrap().content.clone();
            if first_answer(prompt.split(' ').next().unwrap()) {
                vec![started(), ScriptStep::Hang]
            } else {
                answer(request)
            }
        },
        move |call| {
            if is_first("call") { Reply::Stall(Vec::new()) } else { accept(call) }
        },
    )
    .await;
    lab.object("Pipeline", "brief", chain());
    let topic = format!("topic {number}");
    lab.run(
        "r",
        json!({"pipelineRef": {"name": "brief"}, "parameters": [{"name": "topic", "value": topic}]}),
    );
    let mut kills = 0;
    for question in ["facts", "text", "review"] {
        let gateway = KilledGateway::start(&lab);
        until(question, || held.lock().unwrap().contains(question)).await;
        drop(gateway);
        kills += 1;
    }
    // While it waits for a person: what it asks for is there after the kill.
    let gateway = KilledGateway::start(&lab);
    let (approval, actions) = lab.asked("r").await;
    drop(gateway);
    kills += 1;
    lab.decide(&approval, "Approved");
    // While the call is on its way: the endpoint has it, and nobody knows.
    let gateway = KilledGateway::start(&lab);
    until("call", || lab.endpoint.asked().len() == 1).await;
    drop(gateway);
    kills += 1;
    let _gateway = KilledGateway::start(&lab);
    let status = lab.ended("r", "Finished").await;
    assert_eq!(lab.output(&status, "draft").await, format!("<text from <facts on {topic}>>"));
    // Each answer that was there was not asked for again, and the call had one key and one body.
    assert_eq!(lab.engine.requests(), 6, "three answers, each once cut");
    let calls = lab.endpoint.asked();
    assert_eq!(calls.len(), 2);
    assert_eq!((lab.keys(), &calls[0].body), (vec!["uid-of-r/deliver/0/0".to_owned(); 2], &calls[1].body));
    let approved: Value = serde_json::from_slice(&actions).unwrap();
    let body: Value = serde_json::from_str(approved[0]["http"]["body"].as_str().unwrap()).unwrap();
    assert_eq!(body, calls[1].body, "what was sent is what was approved");
    println!(
        "run {number}: {kills} kills, {} requests to the engine, {} calls",
        lab.engine.requests(),
        calls.len()
    );
}
