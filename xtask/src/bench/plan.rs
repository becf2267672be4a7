//! How long the planner takes as clusters grow.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};

use super::{Goal, Row};
use crate::{cargo, mlx};

pub const ABOUT: &str = "Described clusters in racks of four cabled Macs, half as many deployments as nodes, of four sizes of \
    models; the planner alone, on one core. Planned again: every deployment of a full cluster is looked at, and nothing \
    changes. One more: everything runs but one, which is placed together with what else waits. Empty: all deployments \
    are placed at once.";

/// Milliseconds in which everything that runs is planned again on 1,000 nodes.
const REPLAN: f64 = 100.0;
/// Milliseconds for one change there.
const CHANGE: f64 = 10.0;
/// The size the goals are about.
const NODES: u64 = 1000;

/// Builds the planner with optimisation and runs the bench.
pub fn run(prepared: &mlx::Prepared) -> Result<Vec<Row>> {
    let output = cargo::command(prepared, &["bench", "-p", "russet-plan", "--bench", "scale"])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run the bench of the planner")?;
    ensure!(output.status.success(), "the bench of the planner ended with {}", output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().filter(|line| line.starts_with('{')).map(row).collect()
}

fn row(line: &str) -> Result<Row> {
    let told: serde_json::Value =
        serde_json::from_str(line).with_context(|| format!("not a figure: {line}"))?;
    let what = told["what"].as_str().context("a figure without a name")?.to_owned();
    let ours = told["ours"].as_f64().with_context(|| format!("no figure in {line}"))?;
    let goal = match told["nodes"].as_u64() {
        Some(NODES) if what.starts_with("everything") => Goal::AtMost(REPLAN),
        Some(NODES) if what.starts_with("one more") => Goal::AtMost(CHANGE),
        _ => Goal::None,
    };
    Ok(Row { area: "plan", what, ours, peer: None, unit: "ms", ratio: None, goal })
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_goals_are_those_of_a_thousand_nodes() {
        for (line, goal) in [
            (r#"{"what":"everything that runs planned again, 1000 nodes","nodes":1000,"ours":3}"#, "≤ 100"),
            (r#"{"what":"one more deployment placed, 1000 nodes","nodes":1000,"ours":3}"#, "≤ 10"),
            (r#"{"what":"one more deployment placed, 10 nodes","nodes":10,"ours":3}"#, "none"),
        ] {
            let row = super::row(line).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!((row.goal.to_string().as_str(), row.ours), (goal, 3.0), "{line}");
        }
        assert!(super::row("{}").is_err());
    }
}
