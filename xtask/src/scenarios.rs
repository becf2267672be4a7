//! `cargo xtask proof scenarios`: every end-to-end scenario on Russet's own control plane, and the table of them in
//! docs/evidence. A run of `cargo xtask test` has a part of them (`slice.rs`).

use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result, ensure};

use crate::tally::run_reading;
use crate::{bench, cargo, real_weights, sdk_tests, setup, suites, test_binaries};

const PAGE: &str = "docs/evidence/scenarios.md";
const ABOUT: &str = "\
Every end-to-end scenario of `tests/e2e` on one cluster of real processes and Russet's own control plane, one after the \
other. Rounds: how often it was repeated. Seconds are those of a machine with 2 cores.";

/// One scenario's line: what it is called, how it ended.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    name: String,
    verdict: String,
    rounds: String,
    seconds: String,
}

impl Outcome {
    /// Of `  NAME passed after 1 of 1: 5.2 s`, which the suite prints beside its verdicts.
    fn read(line: &str) -> Option<Self> {
        let (before, seconds) = line.trim().rsplit_once(": ")?;
        let (before, rounds) = before.rsplit_once(" after ")?;
        let (before, verdict) = before.rsplit_once(' ')?;
        if !["passed", "failed"].contains(&verdict) || !rounds.contains(" of ") {
            return None;
        }
        Some(Self {
            name: before.rsplit(' ').next()?.to_owned(),
            verdict: verdict.to_owned(),
            rounds: rounds.to_owned(),
            seconds: seconds.strip_suffix(" s")?.to_owned(),
        })
    }
}

/// The outcomes of a suite's output so far.
#[derive(Default)]
struct Outcomes {
    all: Vec<Outcome>,
    /// Why the scenario that runs does not check what it is called.
    skipped: Option<String>,
}

impl Outcomes {
    fn read(&mut self, line: &str) {
        if let Some((_, why)) = line.split_once("  skipped: ") {
            self.skipped = Some(format!("skipped: {why}"));
        }
        if let Some(mut outcome) = Outcome::read(line) {
            outcome.verdict = self.skipped.take().unwrap_or(outcome.verdict);
            self.all.push(outcome);
        }
    }
}

/// Runs all of them; the page is written whatever they found, and a failure is an error.
pub fn proof(arguments: &[String]) -> Result<()> {
    ensure!(
        arguments.is_empty(),
        "cargo xtask proof scenarios takes nothing more: its table is of one cluster"
    );
    let commit = bench::commit()?;
    let (prepared, python) = setup::with_python()?;
    suites::build_with(&prepared)?;
    let mut tests = test_binaries::command(&prepared, "e2e")?;
    tests.env("RUSSET_PYTHON", python.interpreter()).env_remove("RUSSET_PART").env_remove("RUSSET_SLICE");
    tests.envs([real_weights::vocabularies()?, real_weights::minilm()?]).envs(sdk_tests::openai()?);
    let mut outcomes = Outcomes::default();
    let (tally, clean) = run_reading(&mut tests, &mut |line| outcomes.read(line))?;
    let page = page(&outcomes.all, &commit);
    fs::write(cargo::root().join(PAGE), &page).with_context(|| format!("write {PAGE}"))?;
    println!("{page}\n{tally}");
    ensure!(clean && tally.failed == 0, "scenarios failed");
    ensure!(
        outcomes.all.len() as u64 == tally.passed + tally.skipped.len() as u64,
        "{} lines are of {} scenarios that passed and {} that were skipped",
        outcomes.all.len(),
        tally.passed,
        tally.skipped.len()
    );
    Ok(())
}

fn page(outcomes: &[Outcome], commit: &str) -> String {
    let mut text = format!(
        "# End-to-end scenarios\n\n`cargo xtask proof scenarios`, at {commit}. {ABOUT}\n\n\
         | scenario | outcome | rounds | seconds |\n|---|---|---|---|\n"
    );
    for Outcome { name, verdict, rounds, seconds } in outcomes {
        let _ = writeln!(text, "| {} | {verdict} | {rounds} | {seconds} |", name.replace('_', " "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcome_is_read_from_the_lines_of_the_suite_alone() {
        for (line, expected) in [
            ("  losing_serve passed after 2 of 2: 5.2 s", Some(("losing_serve", "passed", "2 of 2", "5.2"))),
            (
                "test losing_serve ...   losing_serve failed after 1 of 2: 0.1 s",
                Some(("losing_serve", "failed", "1 of 2", "0.1")),
            ),
            ("▸ two machines started after 4 of 5: 1 s", None),
            ("agent-one INFO rank 1 answered after 3 ms: 5 s", None),
            ("test losing_serve ... ok", None),
        ] {
            let read = Outcome::read(line);
            let parts = read.as_ref().map(|it| (&*it.name, &*it.verdict, &*it.rounds, &*it.seconds));
            assert_eq!(parts, expected, "{line}");
        }
    }

    #[test]
    fn skipped_scenario_says_why_and_the_next_one_does_not() {
        let mut outcomes = Outcomes::default();
        for line in [
            "test cable_pulled ...   skipped: there is no cable",
            "  cable_pulled passed after 1 of 1: 0.0 s",
            "  losing_serve passed after 1 of 1: 5.2 s",
        ] {
            outcomes.read(line);
        }
        let page = page(&outcomes.all, "abc");
        assert!(page.contains("| cable pulled | skipped: there is no cable | 1 of 1 | 0.0 |\n"), "{page}");
        assert!(page.ends_with("| losing serve | passed | 1 of 1 | 5.2 |\n"), "{page}");
    }
}
