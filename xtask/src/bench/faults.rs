//! Kills, freezes, partitions and the other faults of the end-to-end suite, in the middle of streams.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;

use anyhow::{Context, Result, ensure};

use super::{BenchRow, Goal};
use crate::{cargo, mlx, oracles};

pub const ABOUT: &str = "Two machines, the smoke model, end-of-sequence banned, one token read and more than \
    100 due at every kill, freeze, cut or edit; a round that hangs, loses or doubles a token, loses what was acknowledged or \
    gives memory twice fails instead of being written. Seconds from the fault, or from its end, until what the line says. \
    Of *any rank* (as it starts, loads, joins, in prompts, in answers) rank, fault, step and the streams beside it are drawn \
    (RUSSET_FAULT_SEED), each stream is compared with the same one undisturbed, and what is noticed is noticed by an agent.";

/// Seconds after a kill within which the small model must answer again (the goal of the issue that defined
/// the path).
const GOAL_SECONDS: f64 = 10.0;

/// A setting for scenarios: its name, its environment, and parts of their names.
struct Setting {
    name: &'static str,
    environment: &'static [(&'static str, &'static str)],
    /// The variable of the program it needs.
    program: Option<&'static str>,
    /// Parts of the names of its scenarios, each run on a cluster of its own.
    scenarios: &'static [&'static str],
}

/// Scenarios that run once on a cluster, as the suite itself says (tests/e2e/faults.rs).
const ONCE: [&str; 1] = ["losing_the_leader_restarts_no_group"];

/// A bench runs the first one only; a proof runs each.
const SETTINGS: &[Setting] = &[
    Setting { name: "two machines", environment: &[], program: None, scenarios: &["losing"] },
    Setting {
        name: "machines with clocks of their own",
        environment: &[("RUSSET_CLOCKS", "1")],
        program: Some(oracles::LIBFAKETIME),
        scenarios: &["losing_the_time"],
    },
    Setting {
        name: "two servers on etcd",
        environment: &[("RUSSET_CONTROL_PLANE", "etcd")],
        program: Some(oracles::ETCD),
        scenarios: &[
            "losing_a_member_of_etcd_stops_no_write",
            "losing_the_network_of_etcd_disturbs_no_stream",
            "losing_the_leader_restarts_no_group",
        ],
    },
];

/// Former lines of the evidence that a renamed measurement replaces, because it measures another thing: they
/// are removed when that is measured.
pub fn former(what: &str) -> &'static [&'static str] {
    match what {
        "rank 0 killed, streams stood still" => {
            &["rank 0 killed, stream ended", "rank 0 killed, group answers again"]
        }
        "rank 1 killed, streams stood still" => {
            &["rank 1 killed, stream ended", "rank 1 killed, group answers again"]
        }
        "rank 0 frozen, stream stood still" => {
            &["rank 0 frozen, stream ended", "rank 0 frozen, group answers again"]
        }
        "rank 1 frozen, stream stood still" => {
            &["rank 1 frozen, stream ended", "rank 1 frozen, group answers again"]
        }
        "cable pulled, group begins anew" => &["cable pulled, stream ended"],
        "cable back, stream went on" => &["cable back, group answers again"],
        _ => &[],
    }
}

/// Results of a proof.
pub struct Proof {
    /// Figures of scenarios that passed every round.
    pub rows: Vec<BenchRow>,
    /// Scenarios that failed, each with its setting.
    pub failed: Vec<String>,
}

/// Every fault once on a running cluster; the time until a prompt is answered again.
pub fn run(prepared: &mlx::Prepared) -> Result<Vec<BenchRow>> {
    let mut proof = Proof { rows: Vec::new(), failed: Vec::new() };
    one(prepared, &SETTINGS[0], 1, SETTINGS[0].scenarios[0], &mut proof)?;
    ensure!(proof.failed.is_empty(), "fault scenarios failed: {}", proof.failed.join(", "));
    Ok(proof.rows)
}

/// Every fault `rounds` times in every setting, in turn on one cluster; `only` selects scenarios by a part of
/// their names. A failure is reported and stops nothing else.
pub fn many(prepared: &mlx::Prepared, rounds: usize, only: Option<&str>) -> Proof {
    let mut proof = Proof { rows: Vec::new(), failed: Vec::new() };
    for setting in SETTINGS {
        for scenario in setting.scenarios {
            let filter = match only {
                // The first setting has them all, and selects the part by itself.
                Some(only) if setting.environment.is_empty() => only,
                Some(only) if !scenario.contains(only) && !only.contains(scenario) => continue,
                Some(only) if only.len() > scenario.len() => only,
                _ => scenario,
            };
            // A process that is not restarted is lost once on each of many clusters.
            let (clusters, each) = if ONCE.contains(scenario) { (rounds, 1) } else { (1, rounds) };
            for cluster in 1..=clusters {
                println!("▸ {}: {filter}, cluster {cluster} of {clusters}", setting.name);
                if let Err(error) = one(prepared, setting, each, filter, &mut proof) {
                    proof.failed.push(format!("{filter} ({}): {error:#}", setting.name));
                    break;
                }
            }
        }
    }
    proof
}

fn one(
    prepared: &mlx::Prepared,
    Setting { name, environment, program, .. }: &Setting,
    rounds: usize,
    filter: &str,
    proof: &mut Proof,
) -> Result<()> {
    let mut tests = cargo::command(prepared, &["test", "--workspace", "--test", "e2e", "--", filter]);
    tests.envs(environment.iter().copied());
    if let Some(variable) = program {
        tests.env(variable, oracles::program(variable)?);
    }
    let mut child = tests
        .env("RUSSET_FAULT_ROUNDS", rounds.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run the fault scenarios")?;
    let output = child.stdout.take().context("the output of the scenarios is not to be had")?;
    let (mut rows, failed) = (Vec::new(), proof.failed.len());
    for line in BufReader::new(output).lines() {
        let line = line?;
        println!("{line}");
        // A scenario's first output is after its name.
        let figure = line.split_once(" ... ").map_or(line.as_str(), |(_, figure)| figure).trim_start();
        if let Some(figure) = figure.strip_prefix("fault: ") {
            rows.push(row(figure)?);
        } else if figure.starts_with("losing_") && figure.contains(" passed after ") {
            proof.rows.append(&mut rows);
        } else if figure.starts_with("losing_") && figure.contains(" failed after ") {
            rows.clear();
            proof.failed.push(format!("{figure} ({name})"));
        }
    }
    let status = child.wait()?;
    // If a cluster did not start or stop, no scenario has failed.
    ensure!(status.success() || proof.failed.len() > failed, "the end-to-end suite ended with {status}");
    Ok(())
}

/// `WHAT = SECONDS`, or `WHAT = SECONDS of GOAL` if detection takes longer than a closed connection.
fn row(figure: &str) -> Result<BenchRow> {
    let (what, seconds) = figure.split_once('=').context("a fault line without a figure")?;
    let (seconds, goal) = match seconds.split_once(" of ") {
        Some((seconds, goal)) => (seconds, goal.trim().parse()?),
        None => (seconds, GOAL_SECONDS),
    };
    Ok(BenchRow {
        area: "faults",
        what: what.trim().to_owned(),
        ours: seconds.trim().parse()?,
        peer: None,
        unit: "s",
        ratio: None,
        goal: Goal::AtMost(goal),
    })
}
