//! The speed of one answer of an engine, and of the same work of mlx-lm.

#![allow(dead_code, reason = "each of its users needs another part")]

use std::time::Instant;

use russet_rpc::engine::engine_client::EngineClient;
use russet_wire::event::GenerationEvent;
use russet_wire::request::GenerationRequest;
use tonic::transport::Channel;

use crate::engines::{ask, next, say};
use crate::peer::{MlxLmProcess, median};

/// Tokens of an output.
pub const ANSWER: u32 = 48;

/// Seconds to the first token, and tokens per second after it.
#[derive(Clone, Copy)]
pub struct GenerationSpeed {
    pub first: f64,
    pub rate: f64,
}

/// The median of tokens per second after the first.
pub fn decode(speeds: &[GenerationSpeed]) -> f64 {
    median(speeds.iter().map(|speed| speed.rate))
}

/// The median of tokens per second of a prompt of this many.
pub fn prefill(speeds: &[GenerationSpeed], tokens: usize) -> f64 {
    median(speeds.iter().map(|speed| tokens as f64 / speed.first))
}

/// Sends a prompt of `bytes` bytes; returns its token count and the speed.
pub async fn measure(client: &mut EngineClient<Channel>, bytes: usize) -> (u32, GenerationSpeed) {
    let question: String = (0..bytes).map(|place| char::from(b'a' + (place % 26) as u8)).collect();
    measure_request(client, say(&question)).await
}

/// Sends a request for an output of the usual length; returns the prompt's token count and the speed.
pub async fn measure_request(
    client: &mut EngineClient<Channel>,
    request: GenerationRequest,
) -> (u32, GenerationSpeed) {
    let request = GenerationRequest { max_tokens: Some(ANSWER), ignore_eos: true, ..request };
    let started = Instant::now();
    let mut events = ask(client, request).await;
    let (mut prompt, mut times) = (0, Vec::new());
    loop {
        match next(&mut events).await {
            Some(GenerationEvent::Started { prompt_tokens, .. }) => prompt = prompt_tokens,
            Some(GenerationEvent::Token { .. }) => times.push(started.elapsed().as_secs_f64()),
            Some(GenerationEvent::Finished { .. }) => break,
            other => panic!("{other:?} in the middle of an answer"),
        }
    }
    assert_eq!(times.len(), ANSWER as usize);
    let rate = f64::from(ANSWER - 1) / (times[times.len() - 1] - times[0]);
    (prompt, GenerationSpeed { first: times[0], rate })
}

/// Runs the same work on all peers; returns the result of the first.
pub fn ask_peers(peers: &mut [MlxLmProcess], work: &str, prompt: u32) -> GenerationSpeed {
    for peer in peers.iter_mut() {
        peer.ask(&format!("{work} {prompt} {ANSWER}"));
    }
    let mut answers = peers.iter_mut().map(|peer| {
        let numbers: Vec<f64> = peer.answer().split(' ').map(|number| number.parse().unwrap()).collect();
        GenerationSpeed { first: numbers[0], rate: f64::from(ANSWER - 1) / numbers[1] }
    });
    let first = answers.next().unwrap();
    answers.for_each(drop);
    first
}
