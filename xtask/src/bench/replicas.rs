//! The choice of a replica by what each has cached, and by the number of requests.

use anyhow::Result;

use super::{BenchRow, gateway};
use crate::mlx;

pub const ABOUT: &str = "8 agents over 3 replicas, 24 turns each: 32 kB that all of them begin with, 8 kB of their own, and 0.5 to 3 kB \
    that are added every turn, with pauses of 0.5 to 4 s. The replicas are programs that take the time of an engine (1,000 tokens \
    of prompts a second, one prompt after the other, answers of 64 tokens at 40 a second) at 20 times its speed, keep 64,000 tokens \
    in blocks of 64, evict the least recently used and tell gateways of them; the gateway is the real one, over gRPC and mutual \
    TLS. Ours sends a request where it is expected to take the least time, the peer is the same gateway that sends it where the \
    fewest requests are. In turns on the same traces, 3 rounds, medians of the rounds; seconds are those of the engine.";

/// Builds the bench with optimisation and runs it.
pub fn run(prepared: &mlx::Prepared) -> Result<Vec<BenchRow>> {
    let figures = gateway::example(prepared, &["replicas".as_ref()])?;
    figures.iter().map(|figure| gateway::row("replicas", figure)).collect()
}
