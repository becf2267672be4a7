//! Many clients for a long time: the engines' memory, and the outcomes of requests.

use anyhow::{Context, Result};
use serde_json::Value;

use super::{BenchRow, Goal, figures};
use crate::{mlx, test_binaries};

pub const ABOUT: &str = "200 clients at once send requests to one engine, each one request after the other. The engine has the \
    smoke model in float32, 160 slots, KV cache for a quarter of what these may hold, and 16 MiB of disk for \
    shared prefixes. Half of the requests are questions whose answers are compared with the answers of the \
    idle engine; the others are long, sampled, or abandoned by the client in the middle or before the first \
    token. An answer that differs must have, at every token, a token within 0.0005 of the best one by the \
    log-probabilities of the model alone. At the end no request runs or waits, no part of the KV cache is in \
    use, every slot is free, and caches are within their limits; otherwise the run fails. Memory is sampled \
    once a second; its mean over the last tenth of the run is compared with the mean over the second tenth.";

/// Half an hour.
const SECONDS: usize = 1800;

/// Runs for half an hour.
pub fn run(prepared: &mlx::Prepared) -> Result<Vec<BenchRow>> {
    for_seconds(prepared, SECONDS)
}

/// Runs for `seconds`.
pub fn for_seconds(prepared: &mlx::Prepared, seconds: usize) -> Result<Vec<BenchRow>> {
    let mut soak = test_binaries::command(prepared, "soak")?;
    // What the test runs have a share of, and what only this proof runs; never two at once.
    soak.args(["--include-ignored", "--nocapture", "--test-threads=1"]);
    soak.env("RUSSET_SOAK_SECONDS", seconds.to_string());
    figures(&mut soak, "the soak of the engine")?.iter().map(row).collect()
}

fn row(figure: &Value) -> Result<BenchRow> {
    let what = figure["what"].as_str().context("a figure without a name")?.to_owned();
    let value = figure["value"].as_f64().with_context(|| format!("no value in {figure}"))?;
    let unit = match figure["unit"].as_str() {
        Some("min") => "min",
        Some("MiB") => "MiB",
        _ => "",
    };
    let (ratio, goal) = match figure["most"].as_f64() {
        Some(most) => (Some(value), Goal::AtMost(most)),
        None => (None, Goal::None),
    };
    Ok(BenchRow { area: "soak", what, ours: value, peer: None, unit, ratio, goal })
}
