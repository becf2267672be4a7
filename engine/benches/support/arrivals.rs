//! Requests that arrive at given times, at an engine and at mlx-lm, and when their tokens came.

use std::time::{Duration, Instant};

use futures::future::join_all;
use russet_rpc::engine::engine_client::EngineClient;
use russet_wire::event::GenerationEvent;
use russet_wire::request::GenerationRequest;
use tonic::transport::Channel;

use crate::engines::{ask, next, say};
use crate::peer::{MlxLmProcess, median, tell};

/// Odd, so that a median is one of them.
pub const ROUNDS: usize = 7;
/// Tokens that these models' template adds to a prompt.
const TEMPLATE_TOKENS: usize = 4;

/// A request, and its arrival time.
#[derive(Clone, Copy)]
pub struct Arrival {
    /// Seconds after the first one.
    pub at: f64,
    pub prompt: usize,
    pub answer: u32,
}

/// Arrival time of each token of each request, in seconds.
pub type Times = Vec<Vec<f64>>;

/// Both sides in turn.
pub async fn beside(
    what: &str,
    unit: &str,
    least: f64,
    client: &EngineClient<Channel>,
    peer: &mut MlxLmProcess,
    arrivals: &[Arrival],
    figure: fn(&Times) -> f64,
) {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let (own, other) = (figure(&serve(client, arrivals).await), figure(&serve_peer(peer, arrivals)));
        // The first round is a warm-up.
        if round > 0 {
            ours.push(own);
            theirs.push(other);
        }
    }
    tell(what, unit, least, median(ours.into_iter()), median(theirs.into_iter()));
}

/// Sends the requests to an engine.
pub async fn serve(client: &EngineClient<Channel>, arrivals: &[Arrival]) -> Times {
    let started = Instant::now();
    join_all(arrivals.iter().map(|Arrival { at, prompt, answer }| async move {
        tokio::time::sleep(Duration::from_secs_f64(*at)).await;
        let question: String =
            (TEMPLATE_TOKENS..*prompt).map(|place| char::from(b'a' + (place % 26) as u8)).collect();
        let request = GenerationRequest { max_tokens: Some(*answer), ignore_eos: true, ..say(&question) };
        let mut events = ask(&mut client.clone(), request).await;
        let mut times = Vec::new();
        loop {
            match next(&mut events).await {
                Some(GenerationEvent::Started { prompt_tokens, .. }) => {
                    assert_eq!(prompt_tokens as usize, *prompt)
                }
                Some(GenerationEvent::Token { .. }) => times.push(started.elapsed().as_secs_f64()),
                Some(GenerationEvent::Finished { .. }) => break,
                other => panic!("{other:?} in the middle of an answer"),
            }
        }
        assert_eq!(times.len(), *answer as usize);
        times
    }))
    .await
}

/// Sends the requests to mlx-lm.
pub fn serve_peer(peer: &mut MlxLmProcess, arrivals: &[Arrival]) -> Times {
    let requests = arrivals.iter().map(|Arrival { at, prompt, answer }| format!("{at}:{prompt}:{answer}"));
    peer.ask(&format!("serve {}", requests.collect::<Vec<_>>().join(" ")));
    let times: Times = serde_json::from_str(&peer.answer()).unwrap();
    assert!(times.iter().zip(arrivals).all(|(times, arrival)| times.len() == arrival.answer as usize));
    times
}

/// Tokens per second until the last one.
pub fn throughput(times: &Times) -> f64 {
    let last = times.iter().flatten().copied().fold(0.0, f64::max);
    times.iter().map(Vec::len).sum::<usize>() as f64 / last
}
