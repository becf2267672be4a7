//! The test binaries of the workspace: which there are, and a run of all of them with the threads that each needs. The
//! tests themselves are found by `cargo test` alone as well.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::tally::{Tally, run_counting};
use crate::{cargo, mlx};

/// Binaries whose tests wait for heartbeats, leases and other processes instead of computing. They get
/// `THREADS_PER_CORE` threads a core; all others one, since an engine's ranks wait for each other actively.
const WAITING: &[&str] = &["russet-agent cluster", "russet-operator cluster"];
/// Enough that the longest test and not their sum is what such a binary takes.
const THREADS_PER_CORE: usize = 4;
/// Binaries that took less have no line in the table at the end.
const MIN_SHOWN: Duration = Duration::from_secs(5);

/// One test binary of one package.
#[derive(Debug, PartialEq, Eq)]
struct TestBinary {
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

    fn threads(&self, cores: usize) -> usize {
        if WAITING.contains(&self.name.as_str()) { cores * THREADS_PER_CORE } else { cores }
    }
}

/// Builds the tests and lists their binaries, in cargo's order.
fn build(prepared: &mlx::Prepared) -> Result<Vec<TestBinary>> {
    let mut build = cargo::command(
        prepared,
        &["test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"],
    );
    let output = build.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "{build:?} ended with {}", output.status);
    let mut binaries: Vec<TestBinary> =
        String::from_utf8(output.stdout)?.lines().filter_map(TestBinary::read).collect();
    binaries.sort_by(|one, other| one.name.cmp(&other.name));
    for name in WAITING {
        ensure!(binaries.iter().any(|binary| binary.name == *name), "no test binary is called {name:?}");
    }
    Ok(binaries)
}

/// Builds all test binaries and runs them one after the other, then the examples in doc comments; returns the
/// sum, and whether all succeeded. `environment` reaches each of them.
pub fn run(prepared: &mlx::Prepared, environment: &dyn Fn(&mut Command)) -> Result<(Tally, bool)> {
    let binaries = build(prepared)?;
    let cores = std::thread::available_parallelism()?.get();
    let (mut all, mut clean) = (Tally::default(), true);
    let mut times = Vec::new();
    let mut count = |name: String, command: &mut Command| -> Result<()> {
        environment(command);
        let started = Instant::now();
        let (tally, well) = run_counting(command)?;
        if !well && tally.failed == 0 {
            println!("▸ {name} ended with an error outside its tests");
        }
        all.merge(tally);
        clean &= well;
        times.push((started.elapsed(), name));
        Ok(())
    };
    for binary in &binaries {
        println!("▸ {}", binary.name);
        let mut command = Command::new(&binary.executable);
        command.current_dir(&binary.folder).env("CARGO_MANIFEST_DIR", &binary.folder);
        command.env("RUST_TEST_THREADS", binary.threads(cores).to_string());
        count(binary.name.clone(), &mut command)?;
    }
    count(
        "doc tests".to_owned(),
        &mut cargo::command(prepared, &["test", "--workspace", "--doc", "--quiet"]),
    )?;
    times.sort_by(|one, other| other.cmp(one));
    for (time, name) in times.iter().take_while(|(time, _)| *time >= MIN_SHOWN) {
        println!("▸ {:>4.0} s  {name}", time.as_secs_f64());
    }
    Ok((all, clean))
}
