//! The part of the long suites that a CI run executes. The core always runs; the rest is distributed by the
//! commit's hash, so that several commits cover all of it and none takes long. `RUSSET_SLICE`, a number or
//! `all`, overrides it.

use std::process::Command;

use anyhow::{Context, Result};

/// The real control plane: charts, attempts, scenarios.
pub const KUBERNETES: u32 = 0;
/// etcd: the store, scenarios, clocks that jump; kubectl's conformance; where models come from.
pub const ETCD: u32 = 1;
/// The dependency policy, strangers' bytes, the previous release; services under systemd.
pub const POLICY: u32 = 2;
/// What compiles for Macs.
pub const MACOS: u32 = 3;
/// How many there are.
const SLICES: u32 = 4;

/// A number derived from the commit's hash.
pub fn commit() -> Result<u32> {
    let output = Command::new("git").args(["rev-parse", "--short=7", "HEAD"]).output()?;
    let hash = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    u32::from_str_radix(hash.get(..7).unwrap_or("0"), 16).with_context(|| format!("commit {hash:?}"))
}

/// The number that deals what rotates: the commit's, or the one of `RUSSET_SLICE`; `None` for all of it.
pub fn number() -> Result<Option<u32>> {
    match std::env::var("RUSSET_SLICE").ok().as_deref() {
        Some("all") => Ok(None),
        Some(number) => number.parse().map(Some).context("RUSSET_SLICE is a number or all"),
        None => commit().map(Some),
    }
}

/// Parts into which the end-to-end scenarios are divided; a run has one of them.
const SCENARIO_PARTS: u32 = 8;

/// The control plane that end-to-end scenarios run on: where a run has two, each gets another part.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ScenarioRun {
    Embedded,
    Other,
}

/// The variable that selects the end-to-end suite's scenarios; `None` for all of them.
pub fn scenarios(run: ScenarioRun, number: Option<u32>) -> Option<(&'static str, String)> {
    let part = (number? / SLICES + u32::from(run == ScenarioRun::Other)) % SCENARIO_PARTS;
    Some(("RUSSET_PART", format!("{part}/{SCENARIO_PARTS}")))
}

/// The selection of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slice {
    Everything,
    Of(u32),
}

impl Slice {
    /// Everything for a person, a slice in CI.
    pub fn of_this_run() -> Result<Self> {
        if std::env::var_os("RUSSET_SLICE").is_none() && std::env::var_os("CI").is_none() {
            return Ok(Self::Everything);
        }
        Ok(number()?.map_or(Self::Everything, Self::Of))
    }

    /// Whether a suite of this slice runs.
    pub fn runs(self, slice: u32) -> bool {
        match self {
            Self::Everything => true,
            Self::Of(number) => number % SLICES == slice,
        }
    }
}

/// Prints the steps of `.ci/run` that this run has besides the core.
pub fn print() -> Result<()> {
    let slice = Slice::of_this_run()?;
    let parts = [("kubernetes", KUBERNETES), ("etcd", ETCD), ("policy", POLICY), ("macos", MACOS)];
    let names: Vec<&str> =
        parts.iter().filter(|(_, number)| slice.runs(*number)).map(|(name, _)| *name).collect();
    println!("{}", names.join(" "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_runs_one_slice_and_together_they_run_all() {
        let mut seen = std::collections::BTreeSet::new();
        for number in 0..SLICES * SCENARIO_PARTS {
            let slice = Slice::Of(number);
            let run: Vec<u32> = (0..SLICES).filter(|part| slice.runs(*part)).collect();
            let parts = [ScenarioRun::Embedded, ScenarioRun::Other]
                .map(|run| scenarios(run, Some(number)).unwrap().1);
            assert_eq!(run.len(), 1, "{number}");
            assert_ne!(parts[0], parts[1], "{number}");
            seen.insert((run[0], parts[0].clone()));
        }
        assert_eq!(seen.len() as u32, SLICES * SCENARIO_PARTS);
        assert!((0..SLICES).all(|part| Slice::Everything.runs(part)));
        assert_eq!(scenarios(ScenarioRun::Embedded, None), None);
    }
}
