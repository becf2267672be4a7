//! Engines against mlx-lm on the same weights, and two ranks against one.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};

use super::{Goal, Row};
use crate::{cargo, mlx, python};

pub const ABOUT: &str = "A random float32 Llama of 100 million parameters, both sides on the same libmlx with OpenBLAS in \
    front. One rank: an engine asked over gRPC and mutual TLS, and mlx-lm's `generate_step`, each with every core, in \
    turns, medians of 7 pairs after one to warm up; prefill is the prompt over the time to the first token. Tensor: an engine \
    of 2 ranks with a core each against one rank with one core, beside the same ratio of mlx-lm's bare layers (no \
    sampling, no control path, plain TCP), in turns; once over plain TCP as those (`transport: Direct`), once through the \
    tunnel of mutual TLS, which is the default. There the rank, MLX's waiting threads and the encryption share one core.";

/// Of mlx-lm's pace.
const PACE: f64 = 0.97;
/// Of the ratio that bare layers reach.
const SHARDED: f64 = 0.9;

/// Builds the engine with optimisation and runs the bench.
pub fn run(prepared: &mlx::Prepared) -> Result<Vec<Row>> {
    let python = python::prepare()?;
    let environment: serde_json::Map<String, serde_json::Value> = python
        .command()
        .get_envs()
        .filter_map(|(name, value)| Some((name.to_str()?.to_owned(), value?.to_str()?.into())))
        .collect();
    let output = cargo::command(prepared, &["bench", "-p", "russet-engine", "--bench", "pace"])
        .env("RUSSET_PYTHON", python.interpreter())
        .env("RUSSET_PYTHON_ENV", serde_json::Value::from(environment).to_string())
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run the bench of the engine")?;
    ensure!(output.status.success(), "the bench of the engine ended with {}", output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().filter(|line| line.starts_with('{')).map(row).collect()
}

fn row(line: &str) -> Result<Row> {
    let told: serde_json::Value =
        serde_json::from_str(line).with_context(|| format!("not a figure: {line}"))?;
    let number = |name: &str| told[name].as_f64().with_context(|| format!("no {name} in {line}"));
    let (ours, peer) = (number("ours")?, number("peer")?);
    let what = told["what"].as_str().context("a figure without a name")?.to_owned();
    let (unit, goal) = if told["unit"] == "×" { ("×", SHARDED) } else { ("tokens/s", PACE) };
    let goal = Goal::AtLeast(goal);
    Ok(Row { area: "engine", what, ours, peer: Some(peer), unit, ratio: Some(ours / peer), goal })
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_pace_is_held_to_mlx_lm_and_a_gain_to_bare_layers() {
        for (line, ratio, goal) in [
            (r#"{"what":"decode","unit":"tokens/s","ours":98,"peer":100}"#, 0.98, "≥ 0.97"),
            (r#"{"what":"tensor","unit":"×","ours":1.2,"peer":1.5}"#, 0.8, "≥ 0.9"),
        ] {
            let row = super::row(line).unwrap_or_else(|error| panic!("{error}"));
            assert!((row.ratio.unwrap_or_default() - ratio).abs() < 1e-9, "{line}");
            assert_eq!(row.goal.to_string(), goal);
        }
        assert!(super::row("{}").is_err());
    }
}
