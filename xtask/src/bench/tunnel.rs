//! Cost of the encryption between ranks: the tunnel beside plain TCP on loopback, and a pipeline of two ranks
//! over each.

use anyhow::{Context, Result};
use serde_json::Value;

use super::{BenchRow, Goal, figures};
use crate::{cargo, mlx};

pub const ABOUT: &str = "`ours` is the mutual TLS tunnel between ranks (`transport: Tunnel`, the default), `peer` MLX's plain \
    TCP ring (`transport: Direct`). Both ends share the cores of this machine, so the encryption of both \
    ends counts. Medians of interleaved rounds, optimised builds. The smoke model is so small that a step is \
    little more than its transfers: a worst case.";

/// Figures are reported without goals.
pub fn run(prepared: &mlx::Prepared) -> Result<Vec<BenchRow>> {
    let mut bench = cargo::command(prepared, &["bench", "-p", "russet-engine", "--bench", "tunnel"]);
    figures(&mut bench, "the bench of the tunnel")?.iter().map(row).collect()
}

fn row(figure: &Value) -> Result<BenchRow> {
    let number = |name: &str| figure[name].as_f64().with_context(|| format!("no {name} in {figure}"));
    let (ours, peer) = (number("ours")?, number("peer")?);
    let what = figure["what"].as_str().context("a figure without a name")?.to_owned();
    let unit = match figure["unit"].as_str() {
        Some("µs") => "µs",
        Some("MB/s") => "MB/s",
        _ => "tokens/s",
    };
    let ratio = Some(ours / peer);
    Ok(BenchRow { area: "tunnel", what, ours, peer: Some(peer), unit, ratio, goal: Goal::None })
}
