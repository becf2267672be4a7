//! `russet serve` against kube-apiserver with etcd and its controller manager.

use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use super::{BenchRow, Goal, figures};
use crate::{cargo, mlx, oracles};

pub const ABOUT: &str = "`russet serve` (API server and operator, objects in a file, release build) against kube-apiserver \
    1.36.3, etcd 3.6.6 and kube-controller-manager, on loopback. Both are durable and start in turns, 3 \
    rounds, medians. Ready is `/readyz`. Memory is the resident memory, of the peer the sum of its three \
    processes, 5 s after ready and again with 10,000 ConfigMaps of 1 KiB. Client and servers share the cores \
    of the machine. Ratios are how many times better ours is; for memory, ours divided by the peer's.";

/// Goal: how many times sooner it must be ready.
const READY: f64 = 15.0;
/// Goal: maximum share of the peer's memory.
const MEMORY: f64 = 0.1;

/// Builds both with optimisation and runs the bench.
pub fn run(prepared: &mlx::Prepared) -> Result<Vec<BenchRow>> {
    let (etcd, kubernetes) = (oracles::etcd()?, oracles::kubernetes()?);
    cargo::run(&mut cargo::command(prepared, &["build", "--release", "-p", "russet-cli"]))?;
    let example = ["build", "--release", "-p", "russet-apiserver", "--example", "control_plane"];
    cargo::run(&mut cargo::command(prepared, &example))?;
    let built = cargo::root().join("target/release");
    let mut bench = Command::new(built.join("examples/control_plane"));
    bench.arg(built.join("russet")).args([etcd, kubernetes.apiserver, kubernetes.controller_manager]);
    figures(&mut bench, "the bench of the control plane")?.iter().map(row).collect()
}

fn row(figure: &Value) -> Result<BenchRow> {
    let number = |name: &str| figure[name].as_f64().with_context(|| format!("no {name} in {figure}"));
    let (ours, peer) = (number("ours")?, number("peer")?);
    let what = figure["what"].as_str().context("a figure without a name")?.to_owned();
    let (unit, ratio) = match figure["unit"].as_str() {
        Some("s") => ("s", peer / ours),
        Some("ms") => ("ms", peer / ours),
        Some("MB") => ("MB", ours / peer),
        _ => ("1/s", ours / peer),
    };
    let goal = match (unit, what.as_str()) {
        ("s", _) => Goal::AtLeast(READY),
        ("MB", _) => Goal::AtMost(MEMORY),
        _ => Goal::None,
    };
    Ok(BenchRow { area: "control-plane", what, ours, peer: Some(peer), unit, ratio: Some(ratio), goal })
}

#[cfg(test)]
mod tests {
    #[test]
    fn ratios_say_how_many_times_better_and_memory_which_part() {
        let row = |what: &str, ours: f64, peer: f64, unit: &str| {
            let line = serde_json::json!({"what": what, "ours": ours, "peer": peer, "unit": unit});
            super::row(&line).unwrap_or_else(|error| panic!("{error}"))
        };
        assert_eq!(row("from start to ready", 0.1, 2.0, "s").ratio, Some(20.0));
        assert_eq!(row("resident memory, idle", 40.0, 400.0, "MB").ratio, Some(0.1));
        assert_eq!(row("creates, 1 client", 1200.0, 600.0, "1/s").ratio, Some(2.0));
        assert_eq!(row("list of 10,000", 50.0, 100.0, "ms").ratio, Some(2.0));
    }
}
