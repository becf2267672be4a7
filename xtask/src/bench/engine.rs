//! Engines against mlx-lm on the same weights, and two ranks against one.

use anyhow::{Context, Result};
use serde_json::Value;

use super::{BenchRow, Goal, figures};
use crate::{cargo, mlx, python, real_weights};

pub const ABOUT: &str = "A random float32 Llama of 100 million parameters; both sides use the same libmlx with OpenBLAS. One \
    rank: an engine over gRPC and mutual TLS against mlx-lm's `generate_step`, each with every core, in \
    turns, medians of 7 pairs after a warm-up; prefill is the prompt length divided by the time to the first \
    token. Tensor: an engine of 2 ranks with a core each against one rank with one core, beside the same \
    ratio of mlx-lm's bare layers (no sampling, no control path, plain TCP), in turns; once over plain TCP \
    (`transport: Direct`), once through the tunnel of mutual TLS, which is the default and where the rank, \
    MLX's waiting threads and the encryption share one core. Many requests at once: an engine over gRPC \
    against mlx-lm's `BatchGenerator`, the core of its server, in the process of the client; throughput and \
    goodput are tokens divided by the time from the first request to the last token. A stall is the 99th \
    percentile of the time between two tokens of two running responses while the engine prefills a third \
    request's prompt of 8,000 tokens, on a model of 8 million parameters. Pipeline: an engine of 2 ranks \
    with a core each against one rank with one core, both Russet's, 8 responses at once.";

pub const FAMILIES: &str = "Random float32 models, an engine over gRPC and mutual TLS against mlx-lm's `generate_step`, each \
    with every core and the same libmlx with OpenBLAS, in turns, medians of 5 pairs after a warm-up. Experts: 150 \
    million parameters, of which a token passes 35 (`qwen3_moe`), and many requests at once against mlx-lm's \
    `BatchGenerator`; gated delta nets: 80 million (`qwen3_next`); latents: 60 million (`deepseek_v3`, dense). Loading: a \
    Llama of 2 GB, read in a process that runs already, against `load_model` and an evaluation in one that does; from \
    the start of an engine until its weights are in memory, beside that loading alone; and until it serves, its smoke \
    prompt included, against loading and as many tokens.";

pub const STRUCTURED: &str = "A random float32 Llama of 13 million parameters in its layers, with Qwen's vocabulary of 151,936 \
    tokens (78 million), whose decode step takes 15 to 50 ms by the machine. One engine over gRPC and mutual TLS, with the masks of a JSON Schema and without, in turns, \
    medians of 7 rounds after a warm-up; `overlapScheduling` off for both, then on, where responses without a grammar do \
    not wait for the last token and those with one do.";

/// What masks of grammars cost.
pub fn structured(prepared: &mlx::Prepared) -> Result<Vec<BenchRow>> {
    benches(prepared, "structured", &["structured"])
}

/// Builds the engine with optimisation and runs the benches of its pace.
pub fn run(prepared: &mlx::Prepared) -> Result<Vec<BenchRow>> {
    benches(prepared, "engine", &["pace", "load"])
}

/// The same of models of other families, and of loading.
pub fn families(prepared: &mlx::Prepared) -> Result<Vec<BenchRow>> {
    benches(prepared, "families", &["families"])
}

fn benches(prepared: &mlx::Prepared, area: &'static str, names: &[&str]) -> Result<Vec<BenchRow>> {
    let python = python::prepare()?;
    let environment: serde_json::Map<String, Value> = python
        .command()
        .get_envs()
        .filter_map(|(name, value)| Some((name.to_str()?.to_owned(), value?.to_str()?.into())))
        .collect();
    let mut arguments = vec!["bench", "-p", "russet-engine"];
    arguments.extend(names.iter().flat_map(|name| ["--bench", name]));
    let mut bench = cargo::command(prepared, &arguments);
    bench
        .env("RUSSET_PYTHON", python.interpreter())
        .envs([real_weights::vocabularies()?])
        .env("RUSSET_PYTHON_ENV", Value::from(environment).to_string());
    figures(&mut bench, "the bench of the engine")?.iter().map(|figure| row(area, figure)).collect()
}

fn row(area: &'static str, figure: &Value) -> Result<BenchRow> {
    let number = |name: &str| figure[name].as_f64().with_context(|| format!("no {name} in {figure}"));
    let (ours, peer) = (number("ours")?, number("peer")?);
    let what = figure["what"].as_str().context("a figure without a name")?.to_owned();
    let (unit, ratio) = match figure["unit"].as_str() {
        Some("×") => ("×", ours / peer),
        Some("ms") => ("ms", peer / ours),
        _ => ("tokens/s", ours / peer),
    };
    let goal = match number("least")? {
        0.0 => Goal::None,
        least => Goal::AtLeast(least),
    };
    Ok(BenchRow { area, what, ours, peer: Some(peer), unit, ratio: Some(ratio), goal })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    #[test]
    fn a_figure_is_held_to_its_goal_and_less_time_is_better() {
        for (line, ratio, goal) in [
            (json!({"what":"decode","unit":"tokens/s","least":0.97,"ours":98,"peer":100}), 0.98, "≥ 0.97"),
            (json!({"what":"tensor","unit":"×","least":0.9,"ours":1.2,"peer":1.5}), 0.8, "≥ 0.9"),
            (json!({"what":"gap","unit":"ms","least":5,"ours":20,"peer":200}), 10.0, "≥ 5"),
            (json!({"what":"start","unit":"ms","least":0,"ours":20,"peer":10}), 0.5, "none"),
        ] {
            let row = super::row("engine", &line).unwrap_or_else(|error| panic!("{error}"));
            assert!((row.ratio.unwrap_or_default() - ratio).abs() < 1e-9, "{line}");
            assert_eq!(row.goal.to_string(), goal);
        }
        assert!(super::row("engine", &json!({})).is_err());
    }
}
