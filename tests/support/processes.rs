//! Processes of a cluster under test: found in /proc, killed, and restarted where a kubelet or a service
//! manager would.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use tokio::process::{Child, Command};

/// Delay before a process is restarted.
const RESTART_DELAY: Duration = Duration::from_millis(200);

/// Raises the limit of open files as far as it goes without privileges; the files that this process may open then.
pub fn raise_file_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// A process that is restarted whenever it exits, until it is stopped.
pub struct SupervisedProcess {
    name: String,
    pid: Arc<AtomicI32>,
    stopping: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<()>,
}

impl SupervisedProcess {
    /// Starts the process of `command`; its output goes to `log`.
    pub fn start(name: &str, log: &Path, command: impl Fn() -> Command + Send + 'static) -> Result<Self> {
        let (pid, stopping) = (Arc::new(AtomicI32::new(0)), Arc::new(AtomicBool::new(false)));
        let (log, current) = (log.to_owned(), pid.clone());
        let spawn = move || -> Result<Child> {
            let output = std::fs::OpenOptions::new().create(true).append(true).open(&log)?;
            let mut command = command();
            command.stdin(Stdio::piped()).stdout(output.try_clone()?).stderr(output).kill_on_drop(true);
            let child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
            current.store(child.id().map_or(0, |pid| pid as i32), Ordering::SeqCst);
            Ok(child)
        };
        let mut child = spawn()?;
        let (current, stopped) = (pid.clone(), stopping.clone());
        let task = tokio::spawn(async move {
            loop {
                // Held open: a closed pipe tells a child that its parent is gone.
                let input = child.stdin.take();
                let _ = child.wait().await;
                drop(input);
                current.store(0, Ordering::SeqCst);
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                tokio::time::sleep(RESTART_DELAY).await;
                let Ok(next) = spawn() else { return };
                child = next;
            }
        });
        Ok(Self { name: name.to_owned(), pid, stopping, task })
    }

    /// Its process id, while it runs.
    pub fn pid(&self) -> Result<i32> {
        match self.pid.load(Ordering::SeqCst) {
            0 => bail!("{} is not running", self.name),
            pid => Ok(pid),
        }
    }

    /// Stops it permanently.
    pub async fn stop(mut self, signal: Signal) -> Result<()> {
        self.stopping.store(true, Ordering::SeqCst);
        if let Some(pid) = self.pid().ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, signal);
        }
        let ended = tokio::time::timeout(Duration::from_secs(60), &mut self.task).await;
        ended.with_context(|| format!("{} did not end within 60 s of {signal:?}", self.name))??;
        Ok(())
    }
}

impl Drop for SupervisedProcess {
    fn drop(&mut self) {
        // The child is killed with the task that owns it.
        self.task.abort();
    }
}

/// Sends SIGKILL.
pub fn kill(pid: i32) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// A process of this computer.
pub struct OsProcess {
    /// Its id.
    pub pid: i32,
    /// Its parent's id.
    pub parent: i32,
    /// The program and its arguments.
    pub arguments: Vec<String>,
}

/// Every process that is not a zombie.
pub fn processes() -> Vec<OsProcess> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        let Some((_, rest)) = stat.rsplit_once(')') else { continue };
        let mut fields = rest.split_whitespace();
        let state = fields.next().unwrap_or("");
        let parent = fields.next().and_then(|field| field.parse().ok()).unwrap_or(0);
        if state == "Z" {
            continue;
        }
        let arguments = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let arguments = arguments
            .split(|byte| *byte == 0)
            .map(|word| String::from_utf8_lossy(word).into_owned())
            .collect();
        found.push(OsProcess { pid, parent, arguments });
    }
    found
}

/// A program of ours, beside the running one.
pub fn program(name: &str) -> Result<PathBuf> {
    let mut folder = std::env::current_exe()?;
    folder.pop();
    if folder.ends_with("deps") {
        folder.pop();
    }
    let path = folder.join(name);
    if !path.exists() {
        bail!("{} is not built; `cargo xtask build` builds it", path.display());
    }
    Ok(path)
}

/// An external program, named by a variable that `cargo xtask oracle` sets.
pub fn oracle(variable: &str) -> Result<PathBuf> {
    std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from).with_context(|| {
        format!("{variable} is not set; `cargo xtask oracle build` builds the program and says the variable")
    })
}

/// The end of a file.
pub fn tail(path: &Path, lines: usize) -> String {
    let text = std::fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].iter().map(|line| format!("{line}\n")).collect()
}
