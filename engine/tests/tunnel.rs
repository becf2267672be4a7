//! A pipeline of real engines over tunnels beside the same one over plain TCP: the same tokens, and
//! how quickly. The times are only told; `cargo xtask bench tunnel` collects them.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

#[path = "support/engines.rs"]
mod engines;
#[path = "support/identities.rs"]
mod identities;

use std::path::Path;
use std::time::Instant;

use russet_rpc::engine::engine_client::EngineClient;
use russet_wire::event::Event;
use russet_wire::request::GenerationRequest;
use tonic::transport::Channel;

use engines::{Engine, Lab, ask, next, say};

const TOKENS: u32 = 200;

/// An answer's tokens, and how many came per second after the first.
async fn answer(client: &mut EngineClient<Channel>) -> (Vec<u32>, f64) {
    let request = GenerationRequest { max_tokens: Some(TOKENS), ignore_eos: true, ..say("What is Russet?") };
    let mut events = ask(client, request).await;
    let (mut ids, mut first) = (Vec::new(), None);
    loop {
        match next(&mut events).await {
            Some(Event::Token { id, .. }) => {
                ids.push(id);
                first.get_or_insert_with(Instant::now);
            }
            Some(Event::Started { .. }) => {}
            Some(Event::Finished { .. }) => break,
            other => panic!("{other:?} after {} tokens", ids.len()),
        }
    }
    let seconds = first.unwrap().elapsed().as_secs_f64();
    (ids, f64::from(TOKENS - 1) / seconds)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pipeline_says_the_same_through_tunnels_and_directly_and_how_quickly() {
    let smoke = Path::new(env!("CARGO_MANIFEST_DIR")).join("smoke/model");
    let mut lab = Lab::new();
    let mut groups: Vec<(Vec<Engine>, EngineClient<Channel>)> = Vec::new();
    for transport in ["tunnel", "direct"] {
        lab.flags = vec!["--transport", transport, "--orphan-seconds", "3600"];
        let engines = lab.start(&smoke, &[2, 2]);
        let client = lab.client(&engines[0]).await;
        groups.push((engines, client));
    }
    let mut rates = [Vec::new(), Vec::new()];
    let mut answers = Vec::new();
    // By turns, so that whatever else this machine does meets both.
    for _ in 0..5 {
        for (group, rates) in groups.iter_mut().zip(&mut rates) {
            let (ids, rate) = answer(&mut group.1).await;
            assert_eq!(ids.len(), TOKENS as usize);
            answers.push(ids);
            rates.push(rate);
        }
    }
    assert!(answers.iter().all(|ids| *ids == answers[0]), "the tokens differ");
    let [tunnel, direct] = rates.map(median);
    println!("tunnel: decode of the smoke model on 2 ranks = {tunnel:.2} {direct:.2} tokens/s");
}
