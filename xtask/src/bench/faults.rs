//! Kills in the middle of streaming answers, as the end-to-end suite tells them.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};

use super::{Goal, Row};
use crate::{cargo, mlx};

pub const ABOUT: &str = "Two machines, the smoke model, end-of-sequence banned, one token read and more than \
    100 due at every kill, freeze, cut or edit; a round that hangs, loses or doubles a token fails instead of being written. \
    Seconds from the kill until a question is answered again.";

/// Seconds after a kill within which the small model must answer again (the goal of the issue that
/// defined the path).
const GOAL_SECONDS: f64 = 10.0;

/// Kills every process of a running cluster; how long until a question is answered again.
pub fn run(prepared: &mlx::Prepared) -> Result<Vec<Row>> {
    many(prepared, 1)
}

/// The same so many times on one cluster, every scenario by turns with itself.
pub fn many(prepared: &mlx::Prepared, rounds: usize) -> Result<Vec<Row>> {
    let output = cargo::command(prepared, &["test", "--workspace", "--test", "e2e", "--", "losing"])
        .env("RUSSET_FAULT_ROUNDS", rounds.to_string())
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run the fault scenarios")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "the fault scenarios failed:\n{text}");
    // The first one stands behind the name of its test.
    text.lines().filter_map(|line| line.split_once("fault: ")).map(|(_, told)| row(told)).collect()
}

/// `WHAT = SECONDS`, or `WHAT = SECONDS of GOAL` where noticing takes longer than a closed connection.
fn row(told: &str) -> Result<Row> {
    let (what, seconds) = told.split_once('=').context("a fault line without a figure")?;
    let (seconds, goal) = match seconds.split_once(" of ") {
        Some((seconds, goal)) => (seconds, goal.trim().parse()?),
        None => (seconds, GOAL_SECONDS),
    };
    Ok(Row {
        area: "faults",
        what: what.trim().to_owned(),
        ours: seconds.trim().parse()?,
        peer: None,
        unit: "s",
        ratio: None,
        goal: Goal::AtMost(goal),
    })
}
