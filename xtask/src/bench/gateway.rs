//! Latency added by the gateway, and by nginx in front of the same engine.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{BenchRow, Goal, figures};
use crate::{cargo, mlx, python};

pub const ABOUT: &str = "An engine that returns 16 tokens at once over gRPC and mutual TLS, the gateway in front of it (loopback, \
    no TLS to the client, one key with a list of models and a quota, metrics, a line of the log and a record for `russet why` of \
    each request), and 32 client connections. For comparison nginx (Debian's, unbuffered, persistent upstream connections) in \
    front of a plain HTTP server with the same response, and LiteLLM's proxy (PyPI, a worker for each core) in front of the same. \
    Requests a second are those of the saturated proxy: medians of 3 rounds of 3 s, in turns. Added latency is the latency \
    through the proxy minus the direct latency: direct to the gateway's engine is gRPC over mutual TLS on one connection, direct \
    to nginx's upstream is HTTP; at half the rate at which the gateway saturates, streams at half of theirs, each request due at \
    the same distance from the one before, in turns, 7 rounds of 3 s, medians of the rounds; nginx's figures, at the same rate, \
    are beside ours. Added to a chunk: 32 streams of 200 tokens, one every 10 ms, each with the time it was made, which the \
    client compares with its clock. Time of a request: that of the saturated gateway. Processor time: what the proxy's process \
    has of the cores, in user and kernel mode, for a request under full load. With policy: a second gateway with a Budget of \
    requests, tokens, money and joules, whose journal is written before an answer begins and before it ends, and with an audit \
    log; both at half the rate at which it saturates. Engine, proxies and load generator share the cores of the machine; engine, \
    HTTP server and load generator have one thread each.";

/// LiteLLM's proxy.
const LITELLM: &str = "litellm[proxy]==1.108.3\n";

/// Builds the bench with optimisation and runs it.
pub fn run(prepared: &mlx::Prepared) -> Result<Vec<BenchRow>> {
    let nginx = nginx()?;
    let litellm = python::environment("LiteLLM's proxy", LITELLM)?.programs().join("litellm");
    let figures = example(prepared, &["all".as_ref(), nginx.as_os_str(), litellm.as_os_str()])?;
    figures.iter().map(|figure| row("gateway", figure)).collect()
}

/// The figures of the gateway's example `bench`, built with optimisation.
pub(super) fn example(prepared: &mlx::Prepared, arguments: &[&OsStr]) -> Result<Vec<Value>> {
    cargo::run(&mut cargo::command(
        prepared,
        &["build", "--release", "-p", "russet-gateway", "--example", "bench"],
    ))?;
    let mut bench = Command::new(cargo::root().join("target/release/examples/bench"));
    figures(bench.args(arguments), "the bench of the gateway")
}

/// The row of a figure, whose goal it says.
pub(super) fn row(area: &'static str, figure: &Value) -> Result<BenchRow> {
    let number = |name: &str| figure[name].as_f64().with_context(|| format!("no {name} in {figure}"));
    let (ours, peer) = (number("ours")?, number("peer")?);
    let units = ["1/s", "s", "ms", "µs", "MB", "%"];
    Ok(BenchRow {
        area,
        what: figure["what"].as_str().context("a figure without a name")?.to_owned(),
        ours,
        peer: Some(peer),
        unit: units.into_iter().find(|unit| figure["unit"] == *unit).context("a figure without a unit")?,
        ratio: (figure["by_ratio"] == true).then_some(ours / peer),
        goal: match (figure["at_least"].as_f64(), figure["at_most"].as_f64()) {
            (Some(bound), _) => Goal::AtLeast(bound),
            (_, Some(bound)) => Goal::AtMost(bound),
            _ => Goal::None,
        },
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
