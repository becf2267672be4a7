//! Latency added by the gateway, and by nginx in front of the same engine.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{BenchRow, Goal, figures};
use crate::{cargo, mlx};

pub const ABOUT: &str = "An engine that returns 16 tokens at once over gRPC and mutual TLS, the gateway in front of it (loopback, \
    no TLS to the client, one key with a list of models and a quota), and 32 client connections. For \
    comparison nginx (Debian's, unbuffered, persistent upstream connections) in front of a plain HTTP server \
    with the same response. Added latency is the latency through the proxy minus the direct latency: direct \
    to the gateway's engine is gRPC over mutual TLS on one connection, direct to nginx's upstream is HTTP. \
    Both at half the rate at which the gateway saturates, in turns, 7 rounds of 3 s, medians of the rounds; \
    streams at half their own saturation rate. Engine, proxies and load generator share the cores of the \
    machine.";

/// Added by the gateway at the 99th percentile at half load, milliseconds (the goal of issue 4).
const GOAL_MS: f64 = 1.0;

/// Builds the bench with optimisation and runs it.
pub fn run(prepared: &mlx::Prepared) -> Result<Vec<BenchRow>> {
    let nginx = nginx()?;
    example(prepared, nginx.as_os_str())?.iter().map(row).collect()
}

/// The figures of the gateway's example `bench`, built with optimisation.
pub(super) fn example(prepared: &mlx::Prepared, argument: &OsStr) -> Result<Vec<Value>> {
    cargo::run(&mut cargo::command(
        prepared,
        &["build", "--release", "-p", "russet-gateway", "--example", "bench"],
    ))?;
    let mut bench = Command::new(cargo::root().join("target/release/examples/bench"));
    figures(bench.arg(argument), "the bench of the gateway")
}

fn row(figure: &Value) -> Result<BenchRow> {
    let number = |name: &str| figure[name].as_f64().with_context(|| format!("no {name} in {figure}"));
    let judged = figure["judged"] == true;
    Ok(BenchRow {
        area: "gateway",
        what: figure["what"].as_str().context("a figure without a name")?.to_owned(),
        ours: number("ours")?,
        peer: Some(number("peer")?),
        unit: if figure["unit"] == "ms" { "ms" } else { "1/s" },
        ratio: None,
        goal: if judged { Goal::AtMost(GOAL_MS) } else { Goal::None },
    })
}

/// nginx, installed if missing and possible.
fn nginx() -> Result<PathBuf> {
    let known = PathBuf::from("/usr/sbin/nginx");
    if known.exists() {
        return Ok(known);
    }
    println!("▸ installing nginx");
    let installed = Command::new("apt-get")
        .args(["install", "--yes", "--no-install-recommends", "nginx-light"])
        // Its service would listen on port 80.
        .env("RUNLEVEL", "1")
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status();
    if !known.exists() {
        bail!(
            "nginx is not here and could not be installed ({installed:?}); install it, or run this on Debian as root"
        );
    }
    Ok(known)
}
