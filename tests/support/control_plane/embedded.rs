//! `russet up`: API server, operator, gateway and the near machine's agent, as a user starts them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};

use super::PlaneProcess;
use crate::processes::processes;

/// Process id of a child of the `russet up` with this id.
pub fn child_pid(up: u32, role: PlaneProcess) -> Result<i32> {
    let verb = match role {
        PlaneProcess::Serve => "serve",
        PlaneProcess::Gateway => "gateway",
        PlaneProcess::Agent => "agent",
    };
    processes()
        .into_iter()
        .find(|process| {
            process.parent == up as i32 && process.arguments.get(1).is_some_and(|word| word == verb)
        })
        .map(|process| process.pid)
        .with_context(|| format!("russet up has no child `{verb}`"))
}

/// A running `russet up`.
pub struct Embedded {
    data_dir: PathBuf,
    up: Child,
}

impl Embedded {
    /// Starts `command`, which is `russet` prepared for the near machine.
    pub fn start(
        mut command: Command,
        data_dir: &Path,
        log: std::fs::File,
        arguments: &[String],
    ) -> Result<Self> {
        command
            .args(["up", "--exit-with-parent", "--data-dir"])
            .arg(data_dir)
            .args(arguments)
            .stdout(log.try_clone()?)
            .stderr(log);
        let up = command.spawn().context("cannot start russet up")?;
        Ok(Self { data_dir: data_dir.to_owned(), up })
    }

    /// Returns an error if it has exited unexpectedly.
    pub fn check(&mut self) -> Result<()> {
        match self.up.try_wait()? {
            Some(status) => bail!("russet up ended ({status})"),
            None => Ok(()),
        }
    }

    pub(super) fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// Administrator's kubeconfig, which is there when the server is ready.
    pub fn kubeconfig(&self) -> PathBuf {
        self.data_dir.join("kubeconfig")
    }

    pub(super) fn metrics(&self) -> Result<String> {
        let path = self.data_dir.join("serve/metrics-address");
        let address = std::fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
        Ok(format!("http://{address}"))
    }

    /// Process id of a child of `russet up`.
    pub fn pid(&self, role: PlaneProcess) -> Result<i32> {
        child_pid(self.up.id().context("russet up is not running")?, role)
    }

    /// Stops it as Ctrl-C would.
    pub async fn stop(mut self) -> Result<()> {
        // Held open until the end: a closed pipe means something else than Ctrl-C.
        let _input = self.up.stdin.take();
        if let Some(pid) = self.up.id().and_then(|pid| Pid::from_raw(pid as i32)) {
            let _ = kill_process(pid, Signal::INT);
        }
        let ended = tokio::time::timeout(Duration::from_secs(60), self.up.wait()).await;
        ended.context("russet up did not end within 60 s of Ctrl-C")??;
        Ok(())
    }
}
