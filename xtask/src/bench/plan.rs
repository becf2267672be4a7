//! Planning time by cluster size.

use anyhow::{Context, Result};
use serde_json::Value;

use super::{BenchRow, Goal, figures};
use crate::{cargo, mlx};

pub const ABOUT: &str = "Described clusters in racks of four cabled Macs, half as many deployments as nodes, models of four \
    sizes; the planner alone, on one core. Planned again: the planner plans every deployment of a full \
    cluster, and nothing changes. One more: all deployments but one run; that one is placed together with \
    all waiting ones, on a new view. Empty: all deployments are placed at once. A view is what the operator \
    builds from the objects in its caches.";

/// Maximum milliseconds to replan all groups on 1,000 nodes.
const REPLAN: f64 = 100.0;
/// Maximum milliseconds for one change there.
const CHANGE: f64 = 10.0;
/// The cluster size that the goals apply to.
const NODES: u64 = 1000;
/// Random clusters whose plans are compared with exhaustive search.
const COMPARED: &str = "1000";
/// Random clusters whose plans are checked.
const CHECKED: &str = "10000";

/// Builds the planner with optimisation and runs the bench.
pub fn run(prepared: &mlx::Prepared) -> Result<Vec<BenchRow>> {
    let mut bench = cargo::command(prepared, &["bench", "-p", "russet-plan", "--bench", "scale"]);
    figures(&mut bench, "the bench of the planner")?.iter().map(row).collect()
}

/// Quality of plans on random clusters, and whether any violates an invariant.
pub fn proof(prepared: &mlx::Prepared) -> Result<Vec<BenchRow>> {
    let mut rows = Vec::new();
    for (seeds, target, test) in [
        (COMPARED, ["--test", "optimality"].as_slice(), "plans_are_within_two_percent_of_the_best_there_is"),
        (CHECKED, &["--lib"], "random_clusters_never_break_a_rule_and_always_settle"),
    ] {
        let arguments = [&["test", "-p", "russet-plan"], target, &["--", "--nocapture", test]].concat();
        let mut test = cargo::command(prepared, &arguments);
        test.env("RUSSET_PLAN_SEEDS", seeds);
        for figure in figures(&mut test, &format!("the test of plans over {seeds} clusters"))? {
            rows.push(judged(&figure)?);
        }
    }
    Ok(rows)
}

fn named(figure: &Value) -> Result<(String, f64)> {
    let what = figure["what"].as_str().context("a figure without a name")?.to_owned();
    let ours = figure["ours"].as_f64().with_context(|| format!("no figure in {figure}"))?;
    Ok((what, ours))
}

fn judged(figure: &Value) -> Result<BenchRow> {
    let (what, ours) = named(figure)?;
    let (unit, goal) = if what.starts_with("plans that break") {
        ("plans", Goal::AtMost(0.0))
    } else if what.starts_with("plans of first fit") {
        // If first fit is as good, the clusters are too easy.
        ("%", Goal::AtLeast(20.0))
    } else {
        ("%", Goal::AtMost(2.0))
    };
    Ok(BenchRow { area: "plan", what, ours, peer: None, unit, ratio: None, goal })
}

fn row(figure: &Value) -> Result<BenchRow> {
    let (what, ours) = named(figure)?;
    let goal = match figure["nodes"].as_u64() {
        Some(NODES) if what.starts_with("everything") => Goal::AtMost(REPLAN),
        Some(NODES) if what.starts_with("one more") => Goal::AtMost(CHANGE),
        _ => Goal::None,
    };
    Ok(BenchRow { area: "plan", what, ours, peer: None, unit: "ms", ratio: None, goal })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    #[test]
    fn the_goals_are_those_of_a_thousand_nodes() {
        for (line, goal) in [
            (
                json!({"what": "everything that runs planned again, 1000 nodes", "nodes": 1000, "ours": 3}),
                "≤ 100",
            ),
            (json!({"what": "one more deployment placed, 1000 nodes", "nodes": 1000, "ours": 3}), "≤ 10"),
            (json!({"what": "one more deployment placed, 10 nodes", "nodes": 10, "ours": 3}), "none"),
        ] {
            let row = super::row(&line).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!((row.goal.to_string().as_str(), row.ours), (goal, 3.0), "{line}");
        }
        assert!(super::row(&json!({})).is_err());
    }

    #[test]
    fn a_proof_is_judged_by_what_it_says() {
        for (what, ours, met) in [
            ("the worst plan, below the best by exhaustive search, 1000 clusters", 1.4, true),
            ("the worst plan, below the best by exhaustive search, 1000 clusters", 2.1, false),
            ("plans of first fit that are more than 2 % below it, 1000 clusters", 30.0, true),
            ("plans of first fit that are more than 2 % below it, 1000 clusters", 19.0, false),
            ("plans that break a rule, 10000 clusters", 0.0, true),
        ] {
            let line = json!({"what": what, "ours": ours});
            let row = super::judged(&line).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(row.met(), met, "{what}: {ours}");
        }
    }
}
