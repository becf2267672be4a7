//! A full disk under the API server's store: writes are refused in words, reads go on, and nothing
//! that was acknowledged is lost, also when the server is killed in that state.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use russet_tests::cluster::{Cluster, kill};
use russet_tests::processes::program;

/// Bytes of the disk; a fresh store takes a few of them.
const DISK: &str = "32m";
/// Objects of 60 kB until the disk must be full.
const ATTEMPTS: usize = 2_000;

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

fn russet(disk: &Disk, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program("russet")?)
        .args(arguments)
        .env("KUBECONFIG", disk.path().join("kubeconfig"))
        .output()?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8(output.stdout)?)
}

fn write(disk: &Disk, name: &str) -> Result<()> {
    let file = tempfile::Builder::new().suffix(".yaml").tempfile()?;
    let padding = "x".repeat(60_000);
    let text = format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}, namespace: default}}\ndata: {{padding: {padding}}}\n"
    );
    std::fs::write(file.path(), text)?;
    russet(disk, &["apply", "-f", &file.path().display().to_string()]).map(|_| ())
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
    let mut server = Server::start(&disk, port)?;
    let answers = async |_: &mut Cluster| Ok(russet(&disk, &["get", "configmaps"]).is_ok());
    cluster.until("the server on the small disk answers", answers).await?;

    let mut kept = Vec::new();
    let mut refusal = None;
    for number in 0..ATTEMPTS {
        let name = format!("kept-{number}");
        match write(&disk, &name) {
            Ok(()) => kept.push(name),
            Err(error) => {
                refusal = Some(format!("{error:#}"));
                break;
            }
        }
    }
    let refusal = refusal.with_context(|| format!("{ATTEMPTS} objects fit on a disk of {DISK}"))?;
    ensure!(kept.len() > 10, "only {} objects were kept: {refusal}", kept.len());
    ensure!(!refusal.contains("onnect"), "a full disk ended the server: {refusal}");
    println!("  {} objects were kept, then: {refusal}", kept.len());
    all_there(&disk, &kept).context("with the disk full")?;
    ensure!(server.child.try_wait()?.is_none(), "a full disk ended the server");

    // Killed in that state, it comes back with everything.
    kill(server.child.id() as i32);
    drop(server);
    let struck = Instant::now();
    let _server = Server::start(&disk, port)?;
    let answers = async |_: &mut Cluster| Ok(russet(&disk, &["get", "configmaps"]).is_ok());
    cluster.until("the server answers after the kill", answers).await?;
    println!("fault: serve killed on a full disk, API back = {:.2}", struck.elapsed().as_secs_f64());
    all_there(&disk, &kept).context("after the kill")?;
    // Deleting makes room, and then there is room for more.
    for name in kept.iter().take(kept.len() / 2) {
        russet(&disk, &["delete", &format!("configmaps/{name}")]).context("deleting on a full disk")?;
    }
    let writable = async |_: &mut Cluster| Ok(write(&disk, "again").is_ok());
    cluster.until("there is room again", writable).await?;
    all_there(&disk, &kept[kept.len() / 2..])
}

fn all_there(disk: &Disk, kept: &[String]) -> Result<()> {
    let list: serde_json::Value = serde_json::from_str(&russet(disk, &["get", "configmaps", "-o", "json"])?)?;
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
