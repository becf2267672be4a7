//! The suites: build, demo, tests, lints. Each gets its inputs by environment variables, so that `cargo test`
//! alone finds the same tests.

use std::process::Command;
use std::time::Instant;

use anyhow::{Result, ensure};

use crate::slice::{self, MACOS, POLICY, ScenarioRun, Slice};
use crate::{cargo, charts, exactness, fuzz, mlx, real_weights, sdk_tests, setup, test_binaries, tidy};

/// Everything, so that programs and tests share one set of dependencies; with `--tests` the tests too.
pub fn build(arguments: &[String]) -> Result<()> {
    let tests = arguments == ["--tests"];
    ensure!(tests || arguments.is_empty(), "cargo xtask build takes --tests alone");
    let prepared = setup::all()?;
    build_with(&prepared)?;
    if tests {
        test_binaries::build(&prepared)?;
    }
    Ok(())
}

/// Every program and library.
pub fn build_with(prepared: &mlx::Prepared) -> Result<()> {
    cargo::run(&mut cargo::command(prepared, &["build", "--workspace"]))
}

/// Two nodes on this computer answer a prompt.
pub fn demo(arguments: &[String]) -> Result<()> {
    let started = Instant::now();
    println!("▸ looking for what this machine lacks");
    let prepared = setup::all()?;
    println!("▸ building (the first time takes minutes)");
    build_with(&prepared)?;
    println!("▸ built after {:.0} s", started.elapsed().as_secs_f64());
    let mut demo = Command::new(cargo::programs().join("russet-demo"));
    if arguments.iter().any(|argument| argument.ends_with("smollm2")) {
        demo.envs([real_weights::smollm2()?]);
    }
    let status = demo.args(arguments).status()?;
    ensure!(status.success(), "the demo ended with {status}");
    println!("▸ the whole took {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}

/// Every test that needs no Go oracle; ends with `N passed, N failed`.
pub fn test() -> Result<()> {
    let started = Instant::now();
    let (prepared, python) = setup::with_python()?;
    build_with(&prepared)?;
    println!("▸ built after {:.0} s", started.elapsed().as_secs_f64());
    let exactness = exactness::of_this_run(&python)?;
    println!("▸ the oracle's tokens are there after {:.0} s", started.elapsed().as_secs_f64());
    let weights = [
        real_weights::smollm2()?,
        real_weights::gemma()?,
        real_weights::minilm()?,
        real_weights::vocabularies()?,
        real_weights::json_schema_suite()?,
    ];
    let openai_tests = sdk_tests::openai()?;
    let number = slice::number()?;
    let (tally, clean) = test_binaries::run(&prepared, &|tests| {
        tests.env("RUSSET_PYTHON", python.interpreter()).envs(exactness.clone()).envs(weights.clone());
        tests.envs(openai_tests.clone());
        tests.env("RUSSET_SLICE", number.map_or("all".to_owned(), |number| number.to_string()));
        tests.envs(slice::scenarios(ScenarioRun::Embedded, number));
    })?;
    println!("▸ tests took {:.0} s in all", started.elapsed().as_secs_f64());
    println!("{tally}");
    ensure!(clean && tally.failed == 0, "tests failed");
    ensure!(tally.passed > 0, "no test ran");
    exactness::passed()
}

/// Formatting, clippy with warnings denied, the invariants.
pub fn lint() -> Result<()> {
    let prepared = setup::all()?;
    cargo::run(&mut cargo::command(&prepared, &["fmt", "--all", "--check"]))?;
    cargo::run(&mut cargo::command(
        &prepared,
        &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"],
    ))?;
    // In CI the rest belongs to the slices that compile for Macs and run the fuzz targets.
    let slice = Slice::of_this_run()?;
    // The engine's serving half compiles without MLX, as `cargo xtask macos` builds it for Macs. No other package has
    // default features, and with the whole workspace the dependencies are those that were just checked.
    if slice.runs(MACOS) {
        cargo::run(&mut cargo::command(
            &prepared,
            &["clippy", "--workspace", "--no-default-features", "--all-targets", "--", "-D", "warnings"],
        ))?;
    }
    // Workspaces of their own, which a change of the crates they test may break.
    if slice.runs(POLICY) {
        fuzz::check()?;
    }
    tidy::run(&[])
}

/// Generates files from the Rust types, and the charts' copies of them; golden tests and tidy check them.
pub fn codegen() -> Result<()> {
    let prepared = setup::all()?;
    cargo::run(
        cargo::command(&prepared, &["test", "--quiet", "-p", "russet-crds", "--test", "golden"])
            .env("RUSSET_UPDATE_GOLDENS", "1"),
    )?;
    charts::write()?;
    tidy::write()
}
