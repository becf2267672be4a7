//! A separate disk that fills up under the API server's store, under a model's copy, or under a whole machine.

mod copy;
mod machine;
mod store;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use russet_tests::processes::program;
use rustix::process::{Pid, Signal, kill_process};

pub use self::copy::copy;
pub use self::machine::machine;
pub use self::store::store;

/// `russet` retries while a server is temporarily unavailable; here that would be for ever.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(20);

/// A disk in its own mount namespace, held by a process that does nothing else.
struct MountedDisk {
    holder: Child,
    folder: PathBuf,
}

impl MountedDisk {
    /// A disk of this size at `folder`; `None`, with a message, if this user may not mount one.
    fn mount(folder: &Path, bytes: u64) -> Result<Option<Self>> {
        match Self::try_mount(folder, bytes) {
            Ok(disk) => Ok(Some(disk)),
            Err(error) if std::env::var_os("CI").is_none() => {
                println!("  skipped: {error:#}");
                Ok(None)
            }
            Err(error) => Err(error.context("CI wants disks of its own")),
        }
    }

    fn try_mount(folder: &Path, bytes: u64) -> Result<Self> {
        let script = format!("mount -t tmpfs -o size={bytes} russet \"$0\" && echo mounted && exec cat");
        let mut holder = Command::new("unshare")
            .args(["--mount", "sh", "-c", &script])
            .arg(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot run `unshare`; install util-linux")?;
        let mut buffer = [0; 8];
        let output = holder.stdout.as_mut().context("no output")?;
        let mounted = std::io::Read::read_exact(output, &mut buffer);
        let disk = Self { holder, folder: folder.to_owned() };
        mounted.context("this user may not mount a disk of its own")?;
        Ok(disk)
    }

    /// Path of its files from outside the namespace.
    fn path(&self) -> PathBuf {
        let inside = self.folder.strip_prefix("/").unwrap_or(&self.folder);
        Path::new(&format!("/proc/{}/root", self.holder.id())).join(inside)
    }

    /// A program in the namespace.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--mount", "--target", &self.holder.id().to_string()]).arg(program);
        command
    }

    /// Fills it except for this many bytes; deleting the file frees them.
    fn fill_but(&self, left: u64) -> Result<PathBuf> {
        let path = self.path().join("ballast");
        let seen = rustix::fs::statvfs(self.path())?;
        let free = seen.f_bavail * seen.f_frsize;
        let file = std::fs::File::create(&path)?;
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, free.saturating_sub(left))?;
        Ok(path)
    }
}

impl Drop for MountedDisk {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// `russet` with its processes on this disk.
struct DiskServer {
    child: Child,
}

impl DiskServer {
    fn start(disk: &MountedDisk, arguments: &[&str], environment: &[(&str, &str)]) -> Result<Self> {
        let child = disk
            .command(&program("russet")?)
            .args(arguments)
            .arg("--exit-with-parent")
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self { child })
    }
}

impl Drop for DiskServer {
    /// Like Ctrl-C, so that engines exit too and the disk is released; killed if that takes too long.
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process(pid, Signal::INT);
        }
        for _ in 0..600 {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs `russet` with this kubeconfig.
async fn russet(kubeconfig: &Path, arguments: &[&str]) -> Result<String> {
    let mut command = tokio::process::Command::new(program("russet")?);
    command.args(arguments).env("KUBECONFIG", kubeconfig).kill_on_drop(true);
    let output =
        tokio::time::timeout(CLIENT_TIMEOUT, command.output()).await.context("no answer in time")??;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8(output.stdout)?)
}

async fn apply(kubeconfig: &Path, text: &str) -> Result<()> {
    let file = tempfile::Builder::new().suffix(".yaml").tempfile()?;
    std::fs::write(file.path(), text)?;
    russet(kubeconfig, &["apply", "-f", &file.path().display().to_string()]).await.map(|_| ())
}

fn free_port() -> Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
