//! The test binaries of the workspace: which there are, and a run of all of them with the threads that each needs. The
//! tests themselves are found by `cargo test` alone as well.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::tally::{Tally, run_collecting, run_counting};
use crate::{cargo, mlx, tidy};

/// Binaries whose tests wait for heartbeats, leases and other processes instead of computing. They get
/// `THREADS_PER_CORE` threads a core; all others one, since an engine's ranks wait for each other actively.
const WAITING: &[&str] = &["russet-agent cluster", "russet-engine russet_engine", "russet-operator cluster"];
/// Enough that the longest test and not their sum is what such a binary takes.
const THREADS_PER_CORE: usize = 4;
/// The end-to-end scenarios: they wait too, and have one cluster.
const SCENARIOS: &str = "russet-tests e2e";
/// Binaries that only compute and expect nothing of the time that takes. They run beside those that wait, one after the
/// other, at the lowest priority: heartbeats come in time all the same.
const COMPUTING: &[&str] = &[
    "russet-agent flips",
    "russet-engine exactness",
    "russet-plan optimality",
    "russet-plan russet_plan",
    "russet-plan sim",
];
/// Binaries that took less have no line in the table at the end.
const MIN_SHOWN: Duration = Duration::from_secs(5);

/// One test binary of one package.
#[derive(Debug, PartialEq, Eq)]
pub struct TestBinary {
    /// Package and target, as in `russet-agent cluster`.
    name: String,
    executable: PathBuf,
    /// The package's folder, where its tests run.
    folder: PathBuf,
}

impl TestBinary {
    /// Of a line that cargo prints with `--message-format=json`; `None` for what is no test binary.
    fn read(line: &str) -> Option<Self> {
        let message: Value = serde_json::from_str(line).ok()?;
        if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
            return None;
        }
        let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
        let package = message["package_id"].as_str()?;
        // `path+file:///work/agent#russet-agent@0.1.0`, or without a name where the folder has it.
        let package = package.rsplit_once('#').map_or(package, |(_, name)| name);
        let package = match package.split_once('@') {
            Some((name, _)) => name.to_owned(),
            None => folder.file_name()?.to_string_lossy().into_owned(),
        };
        let target = message["target"]["name"].as_str()?;
        let executable = message["executable"].as_str()?.into();
        Some(Self { name: format!("{package} {target}"), executable, folder })
    }

    /// Its command, which runs where cargo would run it.
    fn command(&self) -> Command {
        self.run_by(Command::new(&self.executable))
    }

    /// The same at the lowest priority.
    fn nice_command(&self) -> Command {
        let mut command = Command::new("nice");
        command.args(["-n", "19"]).arg(&self.executable);
        self.run_by(command)
    }

    fn run_by(&self, mut command: Command) -> Command {
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        command
    }

    /// Whether its tests leave most of the machine idle.
    fn waits(&self) -> bool {
        self.name == SCENARIOS || WAITING.contains(&self.name.as_str())
    }

    fn threads(&self, cores: usize) -> usize {
        if WAITING.contains(&self.name.as_str()) { cores * THREADS_PER_CORE } else { cores }
    }
}

/// Builds the tests and lists their binaries, by name.
pub fn build(prepared: &mlx::Prepared) -> Result<Vec<TestBinary>> {
    let mut build = cargo::command(
        prepared,
        &["test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"],
    );
    let output = build.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "{build:?} ended with {}", output.status);
    let mut binaries: Vec<TestBinary> =
        String::from_utf8(output.stdout)?.lines().filter_map(TestBinary::read).collect();
    binaries.sort_by(|one, other| one.name.cmp(&other.name));
    for name in WAITING.iter().chain(COMPUTING).chain([&SCENARIOS]) {
        ensure!(binaries.iter().any(|binary| binary.name == *name), "no test binary is called {name:?}");
    }
    Ok(binaries)
}

/// Builds all test binaries; the command of the only one of a target.
pub fn command(prepared: &mlx::Prepared, target: &str) -> Result<Command> {
    let [command] = <[Command; 1]>::try_from(commands(&build(prepared)?, target)?)
        .map_err(|all| anyhow::anyhow!("{} test binaries are called {target:?}", all.len()))?;
    Ok(command)
}

/// The commands of the binaries of a target, which several packages may have. Cargo would build dependencies again for
/// `--test NAME`, with the features of fewer packages.
pub fn commands(binaries: &[TestBinary], target: &str) -> Result<Vec<Command>> {
    let of = |binary: &&TestBinary| binary.name.split_once(' ').is_some_and(|(_, name)| name == target);
    let commands: Vec<Command> = binaries.iter().filter(of).map(TestBinary::command).collect();
    ensure!(!commands.is_empty(), "no test binary is called {target:?}");
    Ok(commands)
}

/// What a run found and how long each of its parts took.
#[derive(Default)]
struct Results {
    tally: Tally,
    failed: bool,
    times: Vec<(Duration, String)>,
}

impl Results {
    fn add(&mut self, name: &str, time: Duration, (tally, success): (Tally, bool)) {
        if !success && tally.failed == 0 {
            println!("▸ {name} ended with an error outside its tests");
        }
        self.tally.merge(tally);
        self.failed |= !success;
        self.times.push((time, name.to_owned()));
    }

    fn merge(&mut self, other: Self) {
        self.tally.merge(other.tally);
        self.failed |= other.failed;
        self.times.extend(other.times);
    }
}

/// Builds all test binaries and runs them one after the other, those that wait at last and [`COMPUTING`] beside them,
/// then the examples in doc comments; returns the sum, and whether all succeeded. `environment` reaches each of them.
pub fn run(prepared: &mlx::Prepared, environment: &(dyn Fn(&mut Command) + Sync)) -> Result<(Tally, bool)> {
    let binaries = build(prepared)?;
    let cores = std::thread::available_parallelism()?.get();
    let (computing, mut others): (Vec<TestBinary>, Vec<TestBinary>) =
        binaries.into_iter().partition(|binary| COMPUTING.contains(&binary.name.as_str()));
    others.sort_by_key(TestBinary::waits);
    let mut all = Results::default();
    let mut doc_tests = cargo::command(prepared, &["test", "--workspace", "--doc", "--quiet"]);
    std::thread::scope(|scope| -> Result<()> {
        let mut beside = None;
        for binary in &others {
            if binary.waits() && beside.is_none() {
                beside = Some(scope.spawn(|| run_beside(&computing, cores, environment)));
            }
            println!("▸ {}", binary.name);
            let mut command = binary.command();
            command.env("RUST_TEST_THREADS", binary.threads(cores).to_string());
            environment(&mut command);
            let started = Instant::now();
            let outcome = run_counting(&mut command)?;
            all.add(&binary.name, started.elapsed(), outcome);
        }
        if let Some(beside) = beside {
            all.merge(beside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        // Cargo takes minutes to find that there are none.
        if tidy::sources()?.iter().any(|source| has_doc_test(&source.text)) {
            environment(&mut doc_tests);
            let started = Instant::now();
            let outcome = run_counting(&mut doc_tests)?;
            all.add("doc tests", started.elapsed(), outcome);
        }
        Ok(())
    })?;
    all.times.sort_by(|one, other| other.cmp(one));
    for (time, name) in all.times.iter().take_while(|(time, _)| *time >= MIN_SHOWN) {
        println!("▸ {:>4.0} s  {name}", time.as_secs_f64());
    }
    Ok((all.tally, !all.failed))
}

/// Whether a doc comment of a source has an example: a block that is not marked as `text`.
fn has_doc_test(source: &str) -> bool {
    let comments = source
        .lines()
        .map(str::trim_start)
        .filter_map(|line| line.strip_prefix("///").or_else(|| line.strip_prefix("//!")).map(str::trim));
    let fences = comments.filter_map(|comment| comment.strip_prefix("```"));
    // Every other fence opens a block.
    fences.step_by(2).any(|language| language != "text")
}

/// Runs the binaries one after the other at the lowest priority. The output of each is shown when it has ended, because
/// others write theirs meanwhile.
fn run_beside(
    binaries: &[TestBinary],
    cores: usize,
    environment: &(dyn Fn(&mut Command) + Sync),
) -> Result<Results> {
    let mut results = Results::default();
    for binary in binaries {
        let mut command = binary.nice_command();
        command.env("RUST_TEST_THREADS", binary.threads(cores).to_string());
        environment(&mut command);
        let started = Instant::now();
        let (output, outcome) = run_collecting(&mut command)?;
        let time = started.elapsed();
        println!("▸ {} (beside)\n{output}", binary.name);
        results.add(&binary.name, time, outcome);
    }
    Ok(results)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_doc_comments_are_examples_unless_they_are_text() {
        for (source, expected) in [
            ("fn a() {}", false),
            ("//! ```text\n//! a\n//! ```\nfn a() {}", false),
            ("    /// ```\n    /// a();\n    /// ```\n", true),
            ("/// ```text\n/// ```\n/// ```no_run\n/// ```\n", true),
            ("// ```\n", false),
        ] {
            assert_eq!(has_doc_test(source), expected, "{source:?}");
        }
    }

    #[test]
    fn only_test_binaries_are_read_from_what_cargo_prints() {
        let line = |reason: &str, package: &str, test: bool| {
            format!(
                r#"{{"reason":"{reason}","package_id":"{package}","manifest_path":"/work/agent/Cargo.toml",
                "target":{{"name":"cluster"}},"profile":{{"test":{test}}},"executable":"/work/target/cluster-1"}}"#
            )
            .replace('\n', "")
        };
        let named = |name: &str| {
            Some(TestBinary {
                name: name.to_owned(),
                executable: "/work/target/cluster-1".into(),
                folder: "/work/agent".into(),
            })
        };
        let artifact = "compiler-artifact";
        for (line, expected) in [
            (
                line(artifact, "path+file:///work/agent#russet-agent@0.1.0", true),
                named("russet-agent cluster"),
            ),
            (line(artifact, "path+file:///work/agent#0.1.0", true), named("agent cluster")),
            (line(artifact, "path+file:///work/agent#russet-agent@0.1.0", false), None),
            (line("build-script-executed", "path+file:///work/agent#0.1.0", true), None),
            ("   Compiling russet-agent".to_owned(), None),
        ] {
            assert_eq!(TestBinary::read(&line), expected, "{line}");
        }
    }

    #[test]
    fn waiting_binaries_get_more_threads_than_cores() {
        let threads = |name: &str| {
            let binary = TestBinary { name: name.to_owned(), executable: "x".into(), folder: "/".into() };
            binary.threads(2)
        };
        assert_eq!(WAITING.iter().map(|name| threads(name)).min(), Some(8));
        assert_eq!(threads("russet-engine smoke"), 2);
    }

    #[test]
    fn what_computes_does_not_wait() {
        let binary =
            |name: &str| TestBinary { name: name.to_owned(), executable: "x".into(), folder: "/".into() };
        for name in COMPUTING {
            assert!(!binary(name).waits(), "{name}");
        }
        for name in WAITING.iter().chain([&SCENARIOS]) {
            assert!(binary(name).waits(), "{name}");
        }
    }
}
