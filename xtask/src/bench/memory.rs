//! The planner's reservation for a rank, against MLX's peak memory in real engines.

use anyhow::{Context, Result};
use serde_json::Value;

use super::{BenchRow, Goal, figures};
use crate::{mlx, test_binaries};

pub const ABOUT: &str = "Models with random weights of more than a gigabyte each, on one rank, on a pipeline of 2 and on a tensor \
    group of 2: real engines, started as agents start them and asked over mutual TLS until every sequence they were planned for is as \
    long as it may be, all at the same time. `ours` is what the planner reserves for the rank, from the headers as the agent \
    reads them and with the default headroom of 5 %; `peer` is MLX's own peak there. *never below* is the first over the \
    second; *never far above* is the first over what is allowed at most, the second and 10 % and 256 MiB. What the whole process held at \
    its most, which counts pages of the program and of files too, is shown and not judged.";

const MIB: f64 = 1048576.0;

/// Runs the large half of the engine's memory tests.
pub fn run(prepared: &mlx::Prepared) -> Result<Vec<BenchRow>> {
    some(prepared, "")
}

/// The same of groups in whose names `only` is.
pub fn some(prepared: &mlx::Prepared, only: &str) -> Result<Vec<BenchRow>> {
    let mut memory = test_binaries::command(prepared, "memory")?;
    // What the test runs have a share of, and what only this proof runs; never two at once.
    memory.args(["--include-ignored", "--nocapture", "--test-threads=1"]).env("RUSSET_ONLY", only);
    let ranks = figures(&mut memory, "the memory test of the engine")?;
    Ok(ranks.iter().map(rows).collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}

/// The figures of one rank.
fn rows(figure: &Value) -> Result<Vec<BenchRow>> {
    let number = |name: &str| {
        figure[name].as_f64().map(|bytes| bytes / MIB).with_context(|| format!("no {name} in {figure}"))
    };
    let what = figure["what"].as_str().context("a rank without a name")?;
    let (planned, peak) = (number("weights")? + number("kv")? + number("overhead")?, number("peak")?);
    let row = |said: &str, ours, ratio, goal| BenchRow {
        area: "memory",
        what: format!("{what}: {said}"),
        ours,
        peer: Some(peak),
        unit: "MiB",
        ratio,
        goal,
    };
    let mut rows = vec![
        row("never below", planned, Some(planned / peak), Goal::AtLeast(1.0)),
        row("never far above", planned, Some(planned / (1.1 * peak + 256.0)), Goal::AtMost(1.0)),
    ];
    if figure["process"].is_number() {
        rows.push(row("the process", number("process")?, None, Goal::None));
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_rank_is_held_to_both_bounds() {
        let mib = |count: f64| count * super::MIB;
        for (planned, below, above) in [(999.0, "NO", "yes"), (1000.0, "yes", "yes"), (1400.0, "yes", "NO")] {
            let line = serde_json::json!({
                "what": "rank", "weights": mib(planned - 50.0), "kv": mib(40.0), "overhead": mib(10.0),
                "peak": mib(1000.0), "process": mib(1200.0),
            });
            let rows = super::rows(&line).unwrap_or_else(|error| panic!("{error}"));
            let verdicts: Vec<&str> = rows.iter().map(super::BenchRow::verdict).collect();
            assert_eq!(verdicts, [below, above, ""], "{planned}");
        }
        assert!(super::rows(&serde_json::json!({})).is_err());
    }
}
