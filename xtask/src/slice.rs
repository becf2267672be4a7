//! The part of the long suites that a CI run executes. The core always runs; the rest is distributed by the
//! commit's hash, so that several commits cover all of it and none takes long. `RUSSET_SLICE`, a number or
//! `all`, overrides it.

use std::process::Command;

use anyhow::{Context, Result};

/// The real control plane: charts, attempts, scenarios.
pub const KUBERNETES: u32 = 0;
/// etcd: the store, scenarios, clocks that jump; kubectl's conformance; where models come from.
pub const ETCD: u32 = 1;
/// Other long builds: the dependency policy, Macs, the previous release; services under systemd.
pub const POLICY: u32 = 2;

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

/// Half of a run's end-to-end scenarios, for one of two control planes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Half {
    One,
    Other,
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
            Self::Of(number) => number % 3 == slice,
        }
    }

    /// The variable that selects the end-to-end suite's scenarios, if not all run.
    pub fn scenarios(self, half: Half) -> Option<(&'static str, String)> {
        let Self::Of(number) = self else { return None };
        let part = (number / 3 + u32::from(half == Half::Other)) % 2;
        Some(("RUSSET_PART", format!("{part}/2")))
    }
}

/// Prints the steps of `.ci/run` that this run has besides the core.
pub fn print() -> Result<()> {
    let slice = Slice::of_this_run()?;
    let parts = [("kubernetes", KUBERNETES), ("etcd", ETCD), ("policy", POLICY)];
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
        for number in 0..6 {
            let slice = Slice::Of(number);
            let run: Vec<u32> = (0..3).filter(|part| slice.runs(*part)).collect();
            let halves = [Half::One, Half::Other].map(|half| slice.scenarios(half).unwrap().1);
            assert_eq!(run.len(), 1, "{number}");
            assert_ne!(halves[0], halves[1], "{number}");
            seen.insert((run[0], halves[0].clone()));
        }
        assert_eq!(seen.len(), 6);
        assert!((0..3).all(|part| Slice::Everything.runs(part)));
        assert_eq!(Slice::Everything.scenarios(Half::One), None);
    }
}
