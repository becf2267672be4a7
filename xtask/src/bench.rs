//! `cargo xtask bench AREA`: figures with their goals, as a table or as JSON lines; and `cargo xtask
//! proof AREA`: the same over many rounds, written to docs/evidence with the commit.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::{cargo, mlx, setup, suites};

/// Seconds after a kill within which the small model must answer again (the goal of the issue that
/// defined the path).
const FAULT_GOAL_SECONDS: f64 = 10.0;

/// A figure and what it is.
type Row = (String, f64);

/// Runs one area once.
pub fn bench(arguments: &[String]) -> Result<()> {
    let json = arguments.iter().any(|argument| argument == "--json");
    let prepared = prepare(arguments)?;
    let rows = faults(&prepared)?;
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

/// Runs one area many times and writes the table.
pub fn proof(arguments: &[String]) -> Result<()> {
    let rounds: usize = arguments
        .get(1)
        .map_or(Ok(5), |text| text.parse())
        .context("the second word is a number of rounds")?;
    ensure!(rounds > 0, "a proof needs at least one round");
    let prepared = prepare(arguments)?;
    let mut figures: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for round in 1..=rounds {
        println!("▸ round {round} of {rounds}");
        for (what, seconds) in faults(&prepared)? {
            figures.entry(what).or_default().push(seconds);
        }
    }
    let commit =
        Command::new("git").args(["describe", "--always", "--dirty"]).current_dir(cargo::root()).output()?;
    let mut text = format!(
        "# Kills in the middle of a streaming answer\n\n`cargo xtask proof faults {rounds}` at commit {}. \
         Two machines, the smoke model, end-of-sequence banned, one token read and more than 100 due at every kill; \
         a round that hangs, loses or doubles a token fails instead of being written. Seconds:\n\n\
         | what | rounds | median | longest | goal |\n|---|---|---|---|---|\n",
        String::from_utf8_lossy(&commit.stdout).trim()
    );
    for (what, mut seconds) in figures {
        seconds.sort_by(f64::total_cmp);
        let (median, longest) = (seconds[seconds.len() / 2], seconds[seconds.len() - 1]);
        let _ = writeln!(
            text,
            "| {what} | {} | {median:.2} | {longest:.2} | {FAULT_GOAL_SECONDS:.0} |",
            seconds.len()
        );
    }
    let folder = cargo::root().join("docs/evidence");
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join("faults.md"), &text)?;
    println!("{text}");
    Ok(())
}

fn prepare(arguments: &[String]) -> Result<mlx::Prepared> {
    match arguments.first().map(String::as_str) {
        Some("faults") => {}
        other => bail!("area {other:?} is not known; there is: faults"),
    }
    let prepared = setup::all()?;
    suites::build()?;
    Ok(prepared)
}

/// Kills every process of a running cluster; how long until a question is answered again.
fn faults(prepared: &mlx::Prepared) -> Result<Vec<Row>> {
    let output = cargo::command(prepared, &["test", "--workspace", "--test", "e2e", "--", "losing"])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run the fault scenarios")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "the fault scenarios failed:\n{text}");
    let mut rows = Vec::new();
    for line in text.lines() {
        // The first one stands behind the name of its test.
        if let Some((_, row)) = line.split_once("fault: ") {
            let (what, seconds) = row.split_once('=').context("a fault line without a figure")?;
            rows.push((what.trim().to_owned(), seconds.trim().parse()?));
        }
    }
    ensure!(!rows.is_empty(), "no figure was measured");
    Ok(rows)
}
