//! The workspace's own commands: `cargo xtask <verb>`. It is not shipped, and it stays light: every newcomer
//! builds it first.

mod bench;
mod cargo;
mod catalog;
mod charts;
mod deny;
mod dependencies;
mod exactness;
mod fuzz;
mod invariants;
mod macos;
mod mlx;
mod oracles;
mod proof_table;
mod python;
mod real_weights;
mod scenarios;
mod sdk_tests;
mod setup;
mod skew;
mod slice;
mod step;
mod suites;
mod tally;
mod test_binaries;
mod tidy;
mod wheel;

use anyhow::{Result, ensure};

const USAGE: &str = "\
cargo xtask VERB

  demo [--once] [--model smollm2]
                    install what is missing, build, run two nodes and ask a question
  test              every test that needs no Go oracle
  setup             install what is missing, prepare MLX and Python
  build [--tests]   build everything; what tests it too
  lint              fmt, clippy, tidy
  tidy [--write]    the invariants of ARCHITECTURE.md; writes docs/invariants.md before
  macos             whether all but MLX's half of the engine compiles for Macs
  deny              what may come into the dependency tree
  codegen           CRD YAML and API reference from the Rust types, docs/invariants.md
  catalog [--check] what the hub says of the catalogue's models, into cli/src/catalog/models.csv
  oracle [SUITE]    suites that need programs of others: kubectl, seen, presence, inbox, services, sources, clients, charts,
                    store, attempts, kubernetes, clocks, etcd; `build [SUITE]` only builds the programs
  dependencies VERB compiled dependencies beside the checkout: `take` them into target, or `keep` those that are there
  slice             what of the long suites CI runs on this commit
  skew [REVISION]   scenarios with the previous release's agent and engine on the far machine
  bench AREA        measure: faults   [--json] [--write]
  proof AREA [N] [ONLY]
                    the same over N rounds, written to docs/evidence; ONLY is a part of the names of faults, or of
                    memory's groups
  proof exactness [--missing] [PART...]
                    every group compared with mlx-lm, written to docs/evidence; or those it lacks and those of a PART
  proof fuzz [EXECUTIONS] [FOLDER|TARGET...]
                    the fuzz targets of model, chat and gateway, 10 million executions each, written to docs/evidence
  proof scenarios   every end-to-end scenario, written to docs/evidence
  proof hostile     hostile inputs against a running machine, written to docs/evidence
  proof attempts    what each identity tries and may not, written to docs/evidence
  python ARGS       the prepared Python, as the smoke model's scripts use it
";

fn main() -> std::process::ExitCode {
    match run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let rest = arguments.get(1..).unwrap_or_default();
    match arguments.first().map(String::as_str) {
        Some("demo") => suites::demo(rest),
        Some("test") => suites::test(),
        Some("oracle") => oracles::suites::run(rest),
        Some("setup") => setup::all().map(|_| ()),
        Some("build") => suites::build(rest),
        Some("lint") => suites::lint(),
        Some("deny") => deny::run(),
        Some("tidy") => tidy::run(rest),
        Some("codegen") => suites::codegen(),
        Some("catalog") => catalog::run(rest),
        Some("macos") => macos::run(),
        Some("dependencies") => dependencies::run(rest),
        Some("slice") => slice::print(),
        Some("skew") => skew::run(rest),
        Some("bench") => bench::bench(rest),
        Some("proof") => bench::proof(rest),
        Some("python") => {
            let status = python::prepare()?.command().args(rest).status()?;
            ensure!(status.success(), "python ended with {status}");
            Ok(())
        }
        Some("help" | "--help" | "-h") => {
            print!("{USAGE}");
            Ok(())
        }
        _ => {
            eprint!("{USAGE}");
            anyhow::bail!("no such verb")
        }
    }
}
