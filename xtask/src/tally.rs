//! Passed, failed and skipped tests, counted from what test binaries print.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

/// Runs tests, shows their output, sums the results of all test binaries; returns whether they succeeded.
pub fn run_counting(command: &mut Command) -> Result<(Tally, bool)> {
    run_reading(command, &mut |_| ())
}

/// The same, and hands each line on.
pub fn run_reading(command: &mut Command, read: &mut dyn FnMut(&str)) -> Result<(Tally, bool)> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {command:?}"))?;
    let output = child.stdout.take().context("the output of the tests is not to be had")?;
    let mut tally = Tally::default();
    for line in BufReader::new(output).lines() {
        let line = line?;
        println!("{line}");
        tally.read(&line);
        read(&line);
    }
    let status = child.wait()?;
    Ok((tally, status.success()))
}

/// The same for tests that run beside others: their output is returned and not shown.
pub fn run_collecting(command: &mut Command) -> Result<(String, (Tally, bool))> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {command:?}"))?;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut tally = Tally::default();
    text.lines().for_each(|line| tally.read(line));
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    Ok((text, (tally, output.status.success())))
}

/// Tests by outcome. Tests that print `skipped: WHY` while they run count as passed for cargo; they are
/// counted separately here.
#[derive(Default)]
pub struct Tally {
    pub passed: u64,
    pub failed: u64,
    pub skipped: BTreeSet<String>,
    /// The test that runs.
    current: String,
    /// The skipped tests of its binary.
    unjudged: BTreeSet<String>,
    /// The last lines of its binary.
    newest: VecDeque<String>,
    /// The last lines of binaries with failures.
    faults: Vec<String>,
}

/// Number of lines before a failure that are repeated at the end, where a long log may have been cut.
const SHOWN: usize = 60;

impl Tally {
    fn read(&mut self, line: &str) {
        let mut said = line;
        if let Some((name, rest)) = line.strip_prefix("test ").and_then(|rest| rest.split_once(" ...")) {
            (self.current, said) = (name.to_owned(), rest);
        }
        if said.trim_start().starts_with("skipped: ") {
            self.unjudged.insert(self.current.clone());
        }
        if self.newest.len() == SHOWN {
            self.newest.pop_front();
        }
        self.newest.push_back(line.to_owned());
        if let Some((passed, failed)) = result(line) {
            let newest = self.newest.drain(..);
            if failed > 0 {
                self.faults.extend(newest);
            }
            self.passed += passed.saturating_sub(self.unjudged.len() as u64);
            self.failed += failed;
            self.skipped.append(&mut self.unjudged);
        }
    }

    pub fn merge(&mut self, other: Self) {
        let Self { passed, failed, skipped, current: _, unjudged: _, newest: _, faults } = other;
        self.faults.extend(faults);
        self.passed += passed;
        self.failed += failed;
        self.skipped.extend(skipped);
    }

    pub fn add(&mut self, mut other: Self, suite: &str) {
        other.skipped = other.skipped.into_iter().map(|name| format!("{suite}: {name}")).collect();
        self.merge(other);
    }
}

/// Scripts look for the last line; lines with a bar before it repeat the failures.
impl fmt::Display for Tally {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.skipped.is_empty() {
            let names: Vec<&str> = self.skipped.iter().map(String::as_str).collect();
            writeln!(out, "{} skipped: {}", names.len(), names.join(", "))?;
        }
        for line in &self.faults {
            writeln!(out, "  | {line}")?;
        }
        write!(out, "{} passed, {} failed", self.passed, self.failed)
    }
}

/// `test result: ok. 3 passed; 0 failed; …` → (3, 0).
fn result(line: &str) -> Option<(u64, u64)> {
    let rest = line.strip_prefix("test result: ")?;
    let number = |word: &str| -> Option<u64> {
        rest.split([';', '.']).find_map(|part| part.trim().strip_suffix(word)?.trim().parse().ok())
    };
    Some((number("passed")?, number("failed")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_results_are_summed_and_skips_counted_apart() {
        let sum = |lines: &[&str]| {
            let mut tally = Tally::default();
            lines.iter().for_each(|line| tally.read(line));
            tally.to_string()
        };
        let ok =
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.1s";
        let bad = "test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out";
        let again = format!("  | test b ... FAILED\n  | {bad}\n6 passed, 2 failed");
        let skipped = ["test b ...   skipped: no cable", "  b passed after 1 of 2: 0.0 s"];
        for (lines, expected) in [
            (vec!["test some::name ... ok"], "0 passed, 0 failed"),
            (vec![ok], "3 passed, 0 failed"),
            (vec![ok, "test b ... FAILED", bad], &again),
            (vec!["test a ... ok", skipped[0], skipped[1], "ok", ok], "1 skipped: b\n2 passed, 0 failed"),
            // Twice by the same test, once in its middle, and one more of another binary.
            (
                vec![
                    "test b ... one",
                    "  skipped: x",
                    "  skipped: x",
                    "ok",
                    ok,
                    "test c ...   skipped: y",
                    "ok",
                    ok,
                ],
                "2 skipped: b, c\n4 passed, 0 failed",
            ),
        ] {
            assert_eq!(sum(&lines), expected);
        }
        let mut all = Tally::default();
        for suite in ["etcd", "kubernetes"] {
            let mut tally = Tally::default();
            [skipped[0], ok].iter().for_each(|line| tally.read(line));
            all.add(tally, suite);
        }
        assert_eq!(all.to_string(), "2 skipped: etcd: b, kubernetes: b\n4 passed, 0 failed");
    }
}
