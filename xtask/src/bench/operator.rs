//! Memory and writes of the operator by cluster size.

use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use super::{BenchRow, Goal, figures};
use crate::{cargo, mlx};

pub const ABOUT: &str = "`russet operator` beside `russet serve` (release builds), with 10, 100 and 1,000 machines, half as many \
    deployments of models of four sizes, and ten copies of models per machine, all created through the API; \
    the agents are simulated. Memory is the resident memory once the cluster has settled and the metrics \
    were read. Writes are the operator's requests to the API server after the edit of one deployment, until \
    it writes nothing more; the peer is the smallest cluster.";

/// Maximum memory, MB.
const MEMORY: f64 = 200.0;
/// Maximum writes of a change, relative to the smallest cluster. An intermediate status that is observed in
/// one run and skipped in another is one more write.
const WRITES: f64 = 1.25;

/// Builds both with optimisation and runs the bench.
pub fn run(prepared: &mlx::Prepared) -> Result<Vec<BenchRow>> {
    cargo::run(&mut cargo::command(prepared, &["build", "--release", "-p", "russet-cli"]))?;
    let example = ["build", "--release", "-p", "russet-operator", "--example", "scale"];
    cargo::run(&mut cargo::command(prepared, &example))?;
    let built = cargo::root().join("target/release");
    let mut bench = Command::new(built.join("examples/scale"));
    bench.arg(built.join("russet"));
    figures(&mut bench, "the bench of the operator")?.iter().map(row).collect()
}

fn row(figure: &Value) -> Result<BenchRow> {
    let what = figure["what"].as_str().context("a figure without a name")?.to_owned();
    let ours = figure["ours"].as_f64().with_context(|| format!("no figure in {figure}"))?;
    let peer = figure["peer"].as_f64();
    let ratio = peer.map(|peer| ours / peer);
    let (unit, goal) = match figure["unit"].as_str() {
        Some("MB") if what.contains("of the operator") => ("MB", Goal::AtMost(MEMORY)),
        Some("MB") => ("MB", Goal::None),
        Some("writes") if peer.is_some() => ("writes", Goal::AtMost(WRITES)),
        Some("writes") => ("writes", Goal::None),
        _ => ("s", Goal::None),
    };
    Ok(BenchRow { area: "operator", what, ours, peer, unit, ratio, goal })
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_change_is_compared_with_the_smallest_cluster() {
        for (what, unit, ours, peer, met) in [
            ("resident memory of the operator", "MB", 150.0, None, true),
            ("resident memory of the operator", "MB", 250.0, None, false),
            ("resident memory of the API server", "MB", 250.0, None, true),
            ("writes", "writes", 20.0, None, true),
            ("writes", "writes", 20.0, Some(20.0), true),
            ("writes", "writes", 200.0, Some(20.0), false),
            ("ready", "s", 500.0, None, true),
        ] {
            let line = serde_json::json!({"what": what, "ours": ours, "peer": peer, "unit": unit});
            let row = super::row(&line).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(row.met(), met, "{line}");
        }
    }
}
