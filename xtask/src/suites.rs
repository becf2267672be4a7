//! The suites: build, demo, tests, lints. Each gets its inputs by environment variables, so that `cargo test`
//! alone finds the same tests.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::slice::{ETCD, Half, KUBERNETES, POLICY, Slice, commit};
use crate::{cargo, charts, exactness, mlx, oracles, setup, tidy};

/// Everything, so that programs and tests share one set of dependencies; with `--tests` the tests too.
pub fn build(arguments: &[String]) -> Result<()> {
    let tests = arguments == ["--tests"];
    ensure!(tests || arguments.is_empty(), "cargo xtask build takes --tests alone");
    let prepared = setup::all()?;
    build_with(&prepared)?;
    if tests { build_tests(&prepared) } else { Ok(()) }
}

fn build_tests(prepared: &mlx::Prepared) -> Result<()> {
    cargo::run(&mut cargo::command(prepared, &["test", "--workspace", "--no-run"]))
}

fn build_with(prepared: &mlx::Prepared) -> Result<()> {
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
    let status = Command::new(cargo::programs().join("russet-demo")).args(arguments).status()?;
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
    build_tests(&prepared)?;
    println!("▸ tests built after {:.0} s", started.elapsed().as_secs_f64());
    let mut tests = cargo::command(&prepared, &["test", "--workspace", "--no-fail-fast"]);
    tests.env("RUSSET_PYTHON", python.interpreter()).envs(exactness);
    if std::env::var_os("RUSSET_SLICE").is_none() {
        tests.env("RUSSET_SLICE", commit()?.to_string());
    }
    tests.envs(Slice::of_this_run()?.scenarios(Half::One));
    let (tally, clean) = run_counting(&mut tests)?;
    println!("▸ tests took {:.0} s in all", started.elapsed().as_secs_f64());
    println!("{tally}");
    ensure!(clean && tally.failed == 0, "tests failed");
    ensure!(tally.passed > 0, "no test ran");
    exactness::passed()
}

/// A suite that needs programs built from Go modules: its name, its test binary, its environment, and its
/// filter.
struct OracleSuite {
    name: &'static str,
    test: &'static str,
    /// The programs it needs, by the variables that name them.
    programs: &'static [&'static str],
    /// The slice of CI that runs it; `None` for every one.
    slice: Option<u32>,
    environment: &'static [(&'static str, &'static str)],
    arguments: &'static [&'static str],
}

/// Ordered by how soon they give a result.
const ORACLE_SUITES: &[OracleSuite] = &[
    OracleSuite {
        name: "kubectl",
        test: "conformance",
        programs: &[oracles::KUBECTL],
        slice: Some(ETCD),
        environment: &[],
        arguments: &["--skip", "charts::"],
    },
    OracleSuite {
        name: "documents",
        test: "documents",
        programs: &[oracles::KUBECTL, oracles::JQ],
        slice: None,
        environment: &[],
        arguments: &[],
    },
    OracleSuite {
        name: "seen",
        test: "e2e",
        programs: &[oracles::PROMETHEUS, oracles::PROMTOOL],
        slice: None,
        environment: &[("RUSSET_SEEN", "1")],
        arguments: &[],
    },
    OracleSuite {
        name: "presence",
        test: "cluster",
        programs: &[oracles::MOSQUITTO],
        slice: None,
        environment: &[],
        arguments: &["mosquitto"],
    },
    OracleSuite {
        name: "services",
        test: "services",
        programs: &[oracles::NSPAWN],
        slice: Some(POLICY),
        environment: &[],
        arguments: &["--test-threads=1"],
    },
    OracleSuite {
        name: "sources",
        test: "sources",
        programs: &[
            oracles::SOURCES_PYTHON,
            oracles::REGISTRY,
            oracles::ORAS,
            oracles::FAKE_GCS,
            oracles::AZURITE,
        ],
        slice: Some(ETCD),
        environment: &[],
        arguments: &[],
    },
    OracleSuite {
        name: "charts",
        test: "conformance",
        programs: REAL,
        slice: Some(KUBERNETES),
        environment: &[],
        arguments: &["charts::"],
    },
    OracleSuite {
        name: "store",
        test: "etcd",
        programs: &[oracles::ETCD],
        slice: Some(ETCD),
        environment: &[],
        arguments: &[],
    },
    OracleSuite {
        name: "attempts",
        test: "attempts",
        programs: REAL,
        slice: Some(KUBERNETES),
        environment: &[("RUSSET_CONTROL_PLANE", "kubernetes")],
        arguments: &[],
    },
    OracleSuite {
        name: "kubernetes",
        test: "e2e",
        programs: REAL,
        slice: Some(KUBERNETES),
        environment: &[("RUSSET_CONTROL_PLANE", "kubernetes")],
        arguments: &[],
    },
    OracleSuite {
        name: "clocks",
        test: "e2e",
        programs: &[oracles::LIBFAKETIME],
        slice: Some(ETCD),
        environment: &[("RUSSET_CLOCKS", "1")],
        arguments: &[],
    },
    OracleSuite {
        name: "etcd",
        test: "e2e",
        programs: &[oracles::ETCD, oracles::KUBECTL, oracles::FLUX],
        slice: Some(ETCD),
        environment: &[("RUSSET_CONTROL_PLANE", "etcd")],
        arguments: &[],
    },
];

/// The programs of the real Kubernetes, with its users' tools.
const REAL: &[&str] = &[
    oracles::KUBE_APISERVER,
    oracles::KUBE_CONTROLLER_MANAGER,
    oracles::ETCD,
    oracles::HELM,
    oracles::KUBECTL,
    oracles::FLUX,
];

/// The named suites; without names all of them, in CI those of this commit.
fn chosen(arguments: &[String]) -> Result<Vec<&'static OracleSuite>> {
    for name in arguments {
        let known: Vec<&str> = ORACLE_SUITES.iter().map(|suite| suite.name).collect();
        ensure!(
            known.contains(&name.as_str()),
            "oracle suite {name} is not known; there is: build, {}",
            known.join(", ")
        );
    }
    let slice = Slice::of_this_run()?;
    let wanted = |suite: &&OracleSuite| match arguments.is_empty() {
        true => suite.slice.is_none_or(|number| slice.runs(number)),
        false => arguments.iter().any(|argument| argument == suite.name),
    };
    Ok(ORACLE_SUITES.iter().filter(wanted).collect())
}

/// The programs of suites, by the variables that tests read; built if missing. One that cannot be had keeps no other
/// from being built: the error names all of them.
fn programs(suites: &[&OracleSuite]) -> Result<BTreeMap<&'static str, PathBuf>> {
    let names: BTreeSet<&'static str> = suites.iter().flat_map(|suite| suite.programs).copied().collect();
    // Downloads need no core, compilers need all of them.
    let (fetched, built): (Vec<&'static str>, _) =
        names.into_iter().partition(|name| oracles::is_fetched(name));
    let found = |names: Vec<&'static str>| -> Vec<(&str, Result<PathBuf>)> {
        names.into_iter().map(|name| (name, oracles::program(name))).collect()
    };
    let results = std::thread::scope(|scope| {
        let fetched = scope.spawn(|| found(fetched));
        let mut results = found(built);
        results.extend(fetched.join().map_err(|_| anyhow::anyhow!("a download panicked"))?);
        anyhow::Ok(results)
    })?;
    let (mut programs, mut missing) = (BTreeMap::new(), Vec::new());
    for (name, result) in results {
        match result {
            Ok(program) => drop(programs.insert(name, program)),
            Err(error) => missing.push(format!("{name}: {error:#}")),
        }
    }
    ensure!(missing.is_empty(), "programs of the oracles are missing\n{}", missing.join("\n"));
    Ok(programs)
}

/// The named suites, or all of them; ends with `N passed, N failed`. After `build` only their programs are built.
pub fn oracle(arguments: &[String]) -> Result<()> {
    if let Some((_, suites)) = arguments.split_first().filter(|(verb, _)| *verb == "build") {
        for (name, program) in programs(&chosen(suites)?)? {
            println!("export {name}={}", program.display());
        }
        return Ok(());
    }
    let suites = chosen(arguments)?;
    let half = if arguments.is_empty() { Slice::of_this_run()?.scenarios(Half::Other) } else { None };
    let (prepared, python) = setup::with_python()?;
    let programs = programs(&suites)?;
    build_with(&prepared)?;
    let (mut all, mut clean) = (Tally::default(), true);
    for suite in suites {
        let started = Instant::now();
        println!("▸ {}", suite.name);
        let mut command = vec!["test", "--workspace", "--test", suite.test, "--"];
        command.extend(suite.arguments);
        let mut tests = cargo::command(&prepared, &command);
        // With this variable these suites fail if a program is missing; otherwise their tests print
        // `skipped`.
        tests.env("RUSSET_ORACLES", "1").env("RUSSET_PYTHON", python.interpreter());
        tests.envs(&programs);
        tests.envs(suite.environment.iter().copied()).env_remove("KUBECONFIG");
        tests.envs(half.clone());
        let (tally, well) = run_counting(&mut tests)?;
        println!(
            "▸ {}: {} passed, {} failed, {} skipped, {:.0} s",
            suite.name,
            tally.passed,
            tally.failed,
            tally.skipped.len(),
            started.elapsed().as_secs_f64()
        );
        ensure!(tally.passed + tally.failed > 0, "no test of {} ran", suite.name);
        all.add(tally, suite.name);
        clean &= well;
    }
    println!("{all}");
    ensure!(clean && all.failed == 0, "an oracle suite failed");
    Ok(())
}

/// Formatting, clippy with warnings denied, the invariants.
pub fn lint() -> Result<()> {
    let prepared = setup::all()?;
    cargo::run(&mut cargo::command(&prepared, &["fmt", "--all", "--check"]))?;
    cargo::run(&mut cargo::command(
        &prepared,
        &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"],
    ))?;
    // The engine's serving half compiles without MLX, as `cargo xtask macos` builds it for Macs. No other package has
    // default features, and with the whole workspace the dependencies are those that were just checked.
    cargo::run(&mut cargo::command(
        &prepared,
        &["clippy", "--workspace", "--no-default-features", "--all-targets", "--", "-D", "warnings"],
    ))?;
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

/// Runs tests, shows their output, sums the results of all test binaries; returns whether they succeeded.
fn run_counting(command: &mut Command) -> Result<(Tally, bool)> {
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
    }
    let status = child.wait()?;
    Ok((tally, status.success()))
}

/// Tests by outcome. Tests that print `skipped: WHY` while they run count as passed for cargo; they are
/// counted separately here.
#[derive(Default)]
struct Tally {
    passed: u64,
    failed: u64,
    skipped: BTreeSet<String>,
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

    fn merge(&mut self, other: Self) {
        let Self { passed, failed, skipped, current: _, unjudged: _, newest: _, faults } = other;
        self.faults.extend(faults);
        self.passed += passed;
        self.failed += failed;
        self.skipped.extend(skipped);
    }

    fn add(&mut self, mut other: Self, suite: &str) {
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
        for (lines, wanted) in [
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
            assert_eq!(sum(&lines), wanted);
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
