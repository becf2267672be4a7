//! The real kubectl against the embedded API server, as users run it, and Helm with both charts against it
//! and the real one. `RUSSET_KUBECTL` and `RUSSET_HELM` name the programs; `cargo xtask oracle` builds and
//! sets them. Without them nothing runs, which the oracle suite itself does not accept.

mod charts;
mod steps;

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::{Arguments, Trial};
use russet_tests::cluster::program;

/// A control plane without nodes, and kubectl.
pub struct ConformanceBench {
    kubectl: PathBuf,
    folder: tempfile::TempDir,
    server: std::process::Child,
}

/// Output of a kubectl call.
pub struct CommandOutput {
    /// Whether it exited with 0.
    pub ok: bool,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

impl ConformanceBench {
    fn start(kubectl: PathBuf) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
        let server = std::process::Command::new(program("russet")?)
            .args([
                "up",
                "--no-agent",
                "--exit-with-parent",
                "--api-port",
                &port,
                "--gateway-port",
                "0",
                "--data-dir",
            ])
            .arg(folder.path())
            // Ends with this process, however it ends: the pipe closes.
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()?;
        let bench = Self { kubectl, folder, server };
        let begin = Instant::now();
        while !bench.folder.path().join("kubeconfig").exists()
            || !bench.try_run(&["get", "modeldeployments"], "")?.ok
        {
            ensure!(begin.elapsed() < Duration::from_secs(60), "the control plane did not come up");
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(bench)
    }

    fn command(&self, arguments: &[&str]) -> std::process::Command {
        let mut command = std::process::Command::new(&self.kubectl);
        command
            .args(arguments)
            .env("KUBECONFIG", self.folder.path().join("kubeconfig"))
            .env("HOME", self.folder.path())
            .env("KUBECACHEDIR", self.folder.path().join("kubecache"));
        command
    }

    /// Runs kubectl with this standard input.
    pub fn try_run(&self, arguments: &[&str], input: &str) -> Result<CommandOutput> {
        use std::io::Write as _;
        let mut child = self
            .command(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        child.stdin.take().context("no standard input")?.write_all(input.as_bytes())?;
        let output = child.wait_with_output()?;
        Ok(CommandOutput {
            ok: output.status.success(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    /// Runs kubectl, which must succeed; returns its output.
    pub fn run(&self, arguments: &[&str], input: &str) -> Result<String> {
        let said = self.try_run(arguments, input)?;
        if !said.ok {
            bail!("kubectl {} failed:\n{}{}", arguments.join(" "), said.out, said.err);
        }
        Ok(said.out)
    }

    /// Runs kubectl, which must fail and name every word.
    pub fn refused(&self, arguments: &[&str], input: &str, words: &[&str]) -> Result<()> {
        let said = self.try_run(arguments, input)?;
        ensure!(!said.ok, "kubectl {} succeeded:\n{}", arguments.join(" "), said.out);
        for word in words {
            ensure!(
                said.err.contains(word),
                "kubectl {} does not name {word}:\n{}",
                arguments.join(" "),
                said.err
            );
        }
        Ok(())
    }

    /// Starts kubectl with its output piped.
    pub fn start_kubectl(&self, arguments: &[&str]) -> Result<std::process::Child> {
        Ok(self
            .command(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?)
    }

    /// A folder for files of a step.
    pub fn folder(&self) -> &std::path::Path {
        self.folder.path()
    }
}

impl Drop for ConformanceBench {
    /// The control plane ends with its pipe, and its folder is deleted only after that.
    fn drop(&mut self) {
        drop(self.server.stdin.take());
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(60) && matches!(self.server.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

fn main() {
    let mut arguments = Arguments::from_args();
    let Some(kubectl) = std::env::var_os("RUSSET_KUBECTL") else {
        println!("RUSSET_KUBECTL is not set: nothing was run; `cargo xtask oracle kubectl` runs this suite");
        libtest_mimic::run(&arguments, Vec::new()).exit();
    };
    let bench = match ConformanceBench::start(kubectl.into()) {
        Ok(bench) => Arc::new(Mutex::new(bench)),
        Err(error) => {
            println!(
                "{error:#}\n\ntest result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out"
            );
            std::process::exit(1);
        }
    };
    let mut trials: Vec<Trial> = steps::ALL
        .iter()
        .map(|(name, step)| {
            let bench = bench.clone();
            Trial::test(*name, move || {
                let bench = bench.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                step(&bench).map_err(|error| format!("{error:#}").into())
            })
        })
        .collect();
    if std::env::var_os("RUSSET_HELM").is_some() && !arguments.list {
        match charts::trials(&bench) {
            Ok(more) => trials.extend(more),
            Err(error) => {
                trials.push(Trial::test("charts", move || Err(format!("{error:#}").into())));
            }
        }
    } else {
        println!("RUSSET_HELM is not set: the charts were skipped; `cargo xtask oracle charts` runs them");
    }
    // Trials of one server run one after another anyway, and those of the charts build on each other.
    arguments.test_threads = Some(1);
    let conclusion = libtest_mimic::run(&arguments, trials);
    drop(bench);
    conclusion.exit();
}
