//! kubectl and Helm as a user runs them: with an administrator's kubeconfig and a home of their own.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

/// A program that reads a kubeconfig.
#[derive(Clone, Debug)]
pub struct Tool {
    program: PathBuf,
    kubeconfig: PathBuf,
    home: PathBuf,
}

impl Tool {
    /// The program under that kubeconfig; `home` takes its caches.
    pub fn new(program: PathBuf, kubeconfig: &Path, home: &Path) -> Self {
        Self { program, kubeconfig: kubeconfig.to_owned(), home: home.to_owned() }
    }

    /// Runs it; it must succeed. Returns its output.
    pub async fn run(&self, arguments: &[&str]) -> Result<String> {
        self.with_input(arguments, "").await
    }

    /// For kubectl: waits until every CustomResourceDefinition is served.
    pub async fn until_established(&self) -> Result<()> {
        let wait = ["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"];
        for _ in 0..600 {
            match self.run(&wait).await {
                // kubectl gives up on a definition that has no conditions at all yet.
                Err(error) if format!("{error:#}").contains(".status.conditions accessor error") => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                done => return done.map(|_| ()),
            }
        }
        bail!("a CustomResourceDefinition has no conditions after a minute")
    }

    /// The same with this standard input.
    pub async fn with_input(&self, arguments: &[&str], input: &str) -> Result<String> {
        let mut child = Command::new(&self.program)
            .args(arguments)
            .env("KUBECONFIG", &self.kubeconfig)
            .env("HOME", &self.home)
            .env("KUBECACHEDIR", self.home.join("kubecache"))
            .env("KUBECTL_APPLYSET", "true")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot run {}", self.program.display()))?;
        child.stdin.take().context("no standard input")?.write_all(input.as_bytes()).await?;
        let output = child.wait_with_output().await?;
        if !output.status.success() {
            bail!(
                "{} {} failed:\n{}{}",
                self.program.display(),
                arguments.join(" "),
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(String::from_utf8(output.stdout)?)
    }
}
