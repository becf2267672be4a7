//! `cargo xtask bench AREA`: figures with their goals, as a table or as JSON lines.

use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};

use crate::{cargo, setup, suites};

/// Seconds after a kill within which the small model must answer again (the goal of the issue that
/// defined the path).
const FAULT_GOAL_SECONDS: f64 = 10.0;

/// Runs one area.
pub fn run(arguments: &[String]) -> Result<()> {
    let json = arguments.iter().any(|argument| argument == "--json");
    match arguments.first().map(String::as_str) {
        Some("faults") => faults(json),
        other => bail!("bench area {other:?} is not known; use faults"),
    }
}

/// Kills every process of a running cluster and prints how long until a question is answered again.
fn faults(json: bool) -> Result<()> {
    let prepared = setup::all()?;
    suites::build()?;
    let output = cargo::command(
        &prepared,
        &["test", "--workspace", "--test", "e2e", "--", "quickstart", "losing", "--nocapture"],
    )
    .stdin(Stdio::null())
    .stderr(Stdio::inherit())
    .output()
    .context("cannot run the fault scenarios")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let mut rows = Vec::new();
    for line in text.lines() {
        if let Some(row) = line.trim().strip_prefix("fault: ") {
            let (what, seconds) = row.split_once('=').context("a fault line without a figure")?;
            rows.push((what.trim().to_owned(), seconds.trim().parse::<f64>()?));
        }
    }
    ensure!(output.status.success(), "the fault scenarios failed:\n{text}");
    ensure!(!rows.is_empty(), "no figure was measured");
    if !json {
        println!("{:<56} {:>8} {:>6}  met", "what", "seconds", "goal");
    }
    for (what, seconds) in &rows {
        let met = *seconds <= FAULT_GOAL_SECONDS;
        if json {
            println!(
                "{}",
                serde_json::json!({"area": "faults", "what": what, "ours": seconds, "peer": null, "ratio": null, "goal": FAULT_GOAL_SECONDS, "met": met})
            );
        } else {
            println!(
                "{what:<56} {seconds:>8.2} {FAULT_GOAL_SECONDS:>6.0}  {}",
                if met { "yes" } else { "NO" }
            );
        }
    }
    ensure!(rows.iter().all(|(_, seconds)| *seconds <= FAULT_GOAL_SECONDS), "a goal was missed");
    Ok(())
}
