//! A full disk under the API server's store: writes are refused in words, reads go on, and nothing
//! that was acknowledged is lost, also when the server is killed in that state.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use russet_tests::cluster::{Cluster, kill};
use russet_tests::processes::program;

/// Bytes of the disk.
const DISK: u64 = 64 << 20;
/// Bytes that are left once the ballast is on it.
const LEFT: u64 = 6 << 20;
/// Objects of 100 kB until the disk must be full.
const ATTEMPTS: usize = 1_000;
/// `russet` tries again while a server says that it cannot just now; here that would be for ever.
const PERSON: Duration = Duration::from_secs(20);

/// A disk of its own in a mount namespace of its own, held by a process that does nothing else.
struct Disk {
    holder: Child,
    folder: tempfile::TempDir,
}

impl Disk {
    fn mount() -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("russet-disk-").tempdir()?;
        let script = format!("mount -t tmpfs -o size={DISK} russet \"$0\" && echo mounted && exec cat");
        let mut holder = Command::new("unshare")
            .args(["--mount", "sh", "-c", &script])
            .arg(folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot run `unshare`; install util-linux")?;
        let mut told = [0; 8];
        let output = holder.stdout.as_mut().context("no output")?;
        let mounted = std::io::Read::read_exact(output, &mut told);
        let disk = Self { holder, folder };
        mounted.context("this user may not mount a disk of its own")?;
        Ok(disk)
    }

    /// Its files as they are seen from outside of the namespace.
    fn path(&self) -> PathBuf {
        let inside = self.folder.path().strip_prefix("/").unwrap_or(self.folder.path());
        Path::new(&format!("/proc/{}/root", self.holder.id())).join(inside)
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--mount", "--target", &self.holder.id().to_string()]).arg(program);
        command
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// `russet serve` on that disk.
struct Server {
    child: Child,
}

impl Server {
    fn start(disk: &Disk, port: u16) -> Result<Self> {
        let child = disk
            .command(&program("russet")?)
            .args(["serve", "--exit-with-parent", "--api-port", &port.to_string(), "--data-dir"])
            .arg(disk.folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self { child })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn russet(disk: &Disk, arguments: &[&str]) -> Result<String> {
    let mut command = tokio::process::Command::new(program("russet")?);
    command.args(arguments).env("KUBECONFIG", disk.path().join("kubeconfig")).kill_on_drop(true);
    let output = tokio::time::timeout(PERSON, command.output()).await.context("no answer in time")??;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8(output.stdout)?)
}

async fn write(disk: &Disk, name: &str) -> Result<()> {
    let file = tempfile::Builder::new().suffix(".yaml").tempfile()?;
    let padding = "x".repeat(100_000);
    let text = format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}, namespace: default}}\ndata: {{padding: {padding}}}\n"
    );
    std::fs::write(file.path(), text)?;
    russet(disk, &["apply", "-f", &file.path().display().to_string()]).await.map(|_| ())
}

/// What the server says of itself.
async fn readiness(port: u16) -> Result<String> {
    let client = reqwest::Client::builder().no_proxy().danger_accept_invalid_certs(true).build()?;
    Ok(client.get(format!("https://127.0.0.1:{port}/readyz")).send().await?.text().await?)
}

/// Fills the disk but for [`LEFT`].
fn ballast(disk: &Disk) -> Result<PathBuf> {
    let path = disk.path().join("ballast");
    let seen = rustix::fs::statvfs(disk.path())?;
    let free = seen.f_bavail * seen.f_frsize;
    std::fs::write(&path, vec![1; free.saturating_sub(LEFT) as usize])?;
    Ok(path)
}

/// The store's disk fills up, is emptied, and the server is killed.
pub async fn store(cluster: &mut Cluster) -> Result<()> {
    let disk = match Disk::mount() {
        Ok(disk) => disk,
        Err(error) if std::env::var_os("CI").is_none() => {
            println!("  skipped: {error:#}");
            return Ok(());
        }
        Err(error) => return Err(error.context("CI wants disks of its own")),
    };
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let server = Server::start(&disk, port)?;
    let answers = async |_: &mut Cluster| Ok(russet(&disk, &["get", "configmaps"]).await.is_ok());
    cluster.until("the server on the small disk answers", answers).await?;
    let ballast = ballast(&disk)?;

    let mut kept = Vec::new();
    for number in 0..ATTEMPTS {
        let name = format!("kept-{number}");
        if write(&disk, &name).await.is_err() {
            break;
        }
        kept.push(name);
    }
    ensure!(kept.len() > 2 && kept.len() < ATTEMPTS, "{} objects were kept", kept.len());
    let told = readiness(port).await?;
    ensure!(told.contains("No space left on device"), "the server does not say what is wrong: {told}");
    all_there(&disk, &kept).await.context("with the disk full")?;

    // Killed in that state and given room, it comes back with everything and takes more.
    kill(server.child.id() as i32);
    drop(server);
    std::fs::remove_file(ballast)?;
    let struck = Instant::now();
    let _server = Server::start(&disk, port)?;
    let answers = async |_: &mut Cluster| Ok(russet(&disk, &["get", "configmaps"]).await.is_ok());
    cluster.until("the server answers after the kill", answers).await?;
    println!("fault: serve killed on a full disk, API back = {:.2}", struck.elapsed().as_secs_f64());
    all_there(&disk, &kept).await.context("after the kill")?;
    write(&disk, "again").await.context("with room again")?;
    all_there(&disk, &["again".to_owned()]).await
}

async fn all_there(disk: &Disk, kept: &[String]) -> Result<()> {
    let list = russet(disk, &["get", "configmaps", "-o", "json"]).await?;
    let list: serde_json::Value = serde_json::from_str(&list)?;
    let names: Vec<&str> = list["items"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|item| item["metadata"]["name"].as_str())
        .collect();
    for name in kept {
        ensure!(names.contains(&name.as_str()), "{name} was acknowledged and is not there");
    }
    Ok(())
}
