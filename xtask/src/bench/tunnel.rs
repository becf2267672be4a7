//! What the encryption between ranks costs: the tunnel beside plain TCP on loopback, and a pipeline
//! of two ranks over each.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};

use super::{Goal, Row};
use crate::{cargo, mlx};

pub const ABOUT: &str = "`ours` goes through the mutual TLS tunnel between ranks (`--transport tunnel`, the default), \
    `peer` is MLX's plain TCP ring (`--transport direct`). Both ends share this machine's cores, so both \
    ends' encryption counts against one; medians of interleaved rounds, optimised builds. The smoke model \
    is so small that a step is little more than what travels: a worst case.";

/// Figures are told, not judged: nobody promised a bound.
pub fn run(prepared: &mlx::Prepared) -> Result<Vec<Row>> {
    let output = cargo::command(prepared, &["bench", "-p", "russet-engine", "--bench", "tunnel"])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run the bench of the tunnel")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "the bench of the tunnel failed:\n{text}");
    text.lines().filter_map(|line| line.strip_prefix("tunnel: ")).map(row).collect()
}

/// `WHAT = OURS PEER UNIT`.
fn row(told: &str) -> Result<Row> {
    let (what, figures) = told.split_once(" = ").context("a line without figures")?;
    let mut words = figures.split_whitespace();
    let mut next = || words.next().with_context(|| format!("{told:?} is incomplete"));
    let (ours, peer): (f64, f64) = (next()?.parse()?, next()?.parse()?);
    let unit = match next()? {
        "µs" => "µs",
        "MB/s" => "MB/s",
        _ => "tokens/s",
    };
    let ratio = Some(ours / peer);
    Ok(Row { area: "tunnel", what: what.to_owned(), ours, peer: Some(peer), unit, ratio, goal: Goal::None })
}
