//! A pipeline of real engines over tunnels and over plain TCP: the outputs are equal. `cargo xtask bench
//! tunnel` measures the speed.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

#[path = "support/engines.rs"]
mod engines;
#[path = "support/identities.rs"]
mod identities;

use std::path::Path;

use russet_wire::engine_config::Transport;
use russet_wire::request::GenerationRequest;

use engines::{EngineHarness, ask, collect, say};

const TOKENS: u32 = 200;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipeline_answers_are_equal_through_tunnels_and_directly() {
    let smoke = Path::new(env!("CARGO_MANIFEST_DIR")).join("smoke/model");
    let mut lab = EngineHarness::new();
    let mut answers = Vec::new();
    for transport in [Transport::Tunnel, Transport::Direct] {
        lab.config.transport = transport;
        let engines = lab.start(&smoke, &[2, 2]);
        let mut client = lab.client(&engines[0]).await;
        let request =
            GenerationRequest { max_tokens: Some(TOKENS), ignore_eos: true, ..say("What is Russet?") };
        let (ids, text, _) = collect(&mut ask(&mut client, request).await).await;
        assert_eq!(ids.len(), TOKENS as usize, "{transport:?}: {text}");
        answers.push(ids);
    }
    assert_eq!(answers[0], answers[1]);
}
