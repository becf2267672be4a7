//! Stores killed with SIGKILL at every step that changes the disk, and stores whose disk fills up. Published
//! models are complete and valid at every moment, and a restarted store resumes with the verified data.
//!
//! `RUSSET_FAULT_ROUNDS` rounds, by default one. Each prints its result.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, whichever function of it does")]

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use russet_agent::store::chunks::CHUNK_BYTES;
use russet_agent::store::{Context, Store};

/// Size of the model, in MiB: four and a half chunks.
const MODEL_MIB: u64 = 72;

fn iterations() -> u64 {
    std::env::var("RUSSET_FAULT_ROUNDS").map_or(1, |rounds| rounds.parse().unwrap())
}

/// Prints a figure for `cargo xtask proof store`.
fn log(point: &str, meanwhile: &str) {
    let what = format!("killed at {point} while it {meanwhile}, went on");
    println!("{}", serde_json::json!({"what": what, "ours": iterations(), "unit": "kills"}));
}

fn program(words: &[&str]) -> Command {
    let own = std::env::current_exe().unwrap();
    let program = own.parent().unwrap().parent().unwrap().join("examples/spread");
    assert!(program.exists(), "{} is missing; run the tests with cargo test", program.display());
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

/// A directory with a model on the node `seed`, and its agent.
struct KillLab {
    /// Dropped before its directory.
    _seed: ChildGuard,
    folder: tempfile::TempDir,
    address: String,
}

/// A program that is killed when this is dropped, even if a signal has stopped it.
struct ChildGuard(Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

impl KillLab {
    fn new() -> Self {
        rustls::crypto::ring::default_provider().install_default().ok();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        let made = program(&["make", path, &MODEL_MIB.to_string(), "seed", "one"]).output().unwrap();
        assert!(made.status.success());
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let address = format!("127.0.0.1:{port}");
        let mut seed = ChildGuard(program(&["serve", path, "seed", &address]).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(seed.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "ready");
        Self { _seed: seed, folder, address }
    }

    fn path(&self) -> &str {
        self.folder.path().to_str().unwrap()
    }

    fn path_argument(&self) -> String {
        format!("seed=127.0.0.1>{}", self.address)
    }

    fn models(&self) -> PathBuf {
        self.folder.path().join("models-one")
    }

    /// Runs a program until it exits or is killed at `point` for the `count`th time; returns whether it was
    /// killed.
    fn run_with_kill(&self, words: &[&str], point: &str, count: u64) -> bool {
        let mut command = program(words);
        let output = command.env("RUSSET_KILL", format!("{point}:{count}")).output().unwrap();
        match output.status.signal() {
            Some(9) => true,
            _ => {
                assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
                false
            }
        }
    }

    fn run(&self, words: &[&str]) {
        let output = program(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Verifies every published directory; returns their number.
    fn published(&self) -> usize {
        let is_id = |name: &str| name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        let Ok(entries) = std::fs::read_dir(self.models()) else { return 0 };
        let folders = entries.flatten().filter(|entry| is_id(entry.file_name().to_str().unwrap()));
        let folders: Vec<PathBuf> = folders.map(|entry| entry.path()).collect();
        for folder in &folders {
            for name in ["config.json", "model.safetensors"] {
                assert!(same(&folder.join(name), &self.folder.path().join("source").join(name)), "{name}");
            }
            assert!(folder.join("MANIFEST.json").exists());
        }
        folders.len()
    }

    /// Bytes of verified chunks in a journal.
    fn journalled(&self) -> u64 {
        let partial = std::fs::read_dir(self.models().join(".partial")).unwrap().flatten().next();
        let journal = partial.map(|it| std::fs::read(it.path().join("JOURNAL")).unwrap_or_default());
        journal.unwrap_or_default().len() as u64 / 16
    }

    fn clear(&self) {
        std::fs::remove_dir_all(self.models()).ok();
    }
}

fn same(one: &Path, other: &Path) -> bool {
    std::fs::read(one).unwrap() == std::fs::read(other).unwrap()
}

/// Bytes of `one`'s chunks that another attempt finds.
fn largest_found(lab: &KillLab) -> u64 {
    let context = Context::new("https://huggingface.co", Vec::new()).unwrap();
    let seed = Store::open(lab.folder.path().join("models-seed"), context.clone()).unwrap();
    let id = std::fs::read_to_string(lab.folder.path().join("id")).unwrap();
    let manifest = seed.local_chunks(&id).unwrap().manifest().as_ref().clone();
    let store = Store::open(lab.models(), context).unwrap();
    store.receive(&Default::default(), manifest).unwrap().bytes_done()
}

#[test]
fn store_killed_while_receiving_resumes_verified_chunks() {
    let lab = KillLab::new();
    let path = lab.path_argument();
    let pull = ["pull", lab.path(), "one", &path];
    for (point, most) in [
        ("data-write", MODEL_MIB),
        ("chunk-checked", 5),
        ("journal-appended", 5),
        ("name-rename", 1),
        ("manifest-write", 1),
        ("publish-rename", 1),
        ("published", 1),
    ] {
        for round in 0..iterations() {
            lab.clear();
            let count = 1 + round * 7 % most;
            assert!(
                lab.run_with_kill(&pull, point, count),
                "{point} is never come to for the {count}th time"
            );
            let published = lab.published();
            assert_eq!(published, usize::from(point == "published"), "{point}");
            if matches!(point, "data-write" | "chunk-checked" | "journal-appended") {
                let (chunks, bytes) = (lab.journalled(), largest_found(&lab));
                // The small file and the last chunk are short.
                assert!(bytes >= chunks.saturating_sub(2) * CHUNK_BYTES, "{chunks} chunks, {bytes} bytes");
                let least = if point == "journal-appended" { count } else { count.min(5) - count.min(1) };
                assert!(point == "data-write" || chunks >= least, "{point} {count}: {chunks}");
            }
            lab.run(&pull);
            assert_eq!(lab.published(), 1, "{point}");
        }
        log(point, "receives");
    }
}

#[test]
fn store_killed_while_fetching_resumes() {
    let lab = KillLab::new();
    let fetch = ["fetch", lab.path(), "one"];
    for point in ["name-rename", "manifest-write", "publish-rename", "published"] {
        for _ in 0..iterations() {
            lab.clear();
            assert!(lab.run_with_kill(&fetch, point, 1), "{point} is never come to");
            assert_eq!(lab.published(), usize::from(point == "published"), "{point}");
            lab.run(&fetch);
            assert_eq!(lab.published(), 1, "{point}");
        }
        log(point, "fetches");
    }
}

#[test]
fn store_killed_while_removing_leaves_no_complete_model() {
    let lab = KillLab::new();
    let (fetch, collect) = (["fetch", lab.path(), "one"], ["collect", lab.path(), "one"]);
    for (point, left) in [("going-rename", 1), ("going-unlink", 0)] {
        for _ in 0..iterations() {
            lab.run(&fetch);
            assert!(lab.run_with_kill(&collect, point, 1), "{point} is never come to");
            assert_eq!(lab.published(), left, "{point}");
            lab.run(&collect);
            assert_eq!(lab.published(), 0, "{point}");
            let going = std::fs::read_dir(lab.models().join(".going")).unwrap().count();
            assert_eq!(going, 0, "{point}");
        }
        log(point, "removes");
    }
}

/// In each round fills the disk in the middle with `fill`, and frees it with `free`: nothing is published,
/// and the next attempt resumes. `fill` returns `None` where it is not possible, after printing the reason.
fn full_in_the_middle<D>(
    what: &str,
    fill: impl Fn(&KillLab, &[&str], &str, u64) -> Option<D>,
    free: impl Fn(&D),
) {
    let lab = KillLab::new();
    let path = lab.path_argument();
    let (pull, fetch) = (["pull", lab.path(), "one", &path], ["fetch", lab.path(), "one"]);
    for (words, point, meanwhile) in
        [(&pull[..], "data-write", "receives"), (&fetch[..], "part-write", "fetches")]
    {
        for round in 0..iterations() {
            lab.clear();
            let Some(disk) = fill(&lab, words, point, round) else { return };
            assert_eq!(lab.published(), 0, "{meanwhile} in round {round}");
            free(&disk);
            lab.run(words);
            assert_eq!(lab.published(), 1, "{meanwhile} in round {round}");
        }
        let what = format!("{what} full while it {meanwhile}, went on");
        println!("{}", serde_json::json!({"what": what, "ours": iterations(), "unit": "times"}));
    }
}

#[test]
fn full_disk_publishes_nothing_and_resumes_with_space() {
    let fill = |_: &KillLab, words: &[&str], point: &str, round| {
        let count = round * 7 % MODEL_MIB;
        let mut command = program(words);
        let output = command.env("RUSSET_FULL", format!("{point}:{count}")).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains("StorageFull"), "{count}: {stderr}");
        Some(())
    };
    full_in_the_middle("disk", fill, |()| {});
}

/// A tmpfs of this many bytes.
struct TmpfsMount(PathBuf);

impl TmpfsMount {
    /// `None` where this user cannot mount one.
    fn new(at: PathBuf) -> Option<Self> {
        std::fs::create_dir_all(&at).unwrap();
        let made =
            mount(&["-t", "tmpfs", "-o", &format!("size={ENOUGH_BYTES}"), "tmpfs", at.to_str().unwrap()]);
        made.then_some(Self(at))
    }

    fn resize(&self, bytes: u64) {
        assert!(mount(&["-o", &format!("remount,size={bytes}"), self.0.to_str().unwrap()]));
    }

    fn used(&self) -> u64 {
        let disk = rustix::fs::statvfs(&self.0).unwrap();
        (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    }
}

impl Drop for TmpfsMount {
    fn drop(&mut self) {
        Command::new("umount").arg("--lazy").arg(&self.0).status().unwrap();
    }
}

fn mount(words: &[&str]) -> bool {
    let output = Command::new("mount").args(words).output().unwrap();
    print!("{}", String::from_utf8_lossy(&output.stderr));
    output.status.success()
}

/// Space for the model and the store's reserve.
const ENOUGH_BYTES: u64 = (1 << 30) + ((2 * MODEL_MIB) << 20);

/// Waits until a signal has stopped every thread of a process: one that writes ends its write before.
fn stopped(child: &mut Child) {
    let tasks = format!("/proc/{}/task", child.id());
    let is_stopped = |task: std::io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(task.unwrap().path().join("stat"));
        // A thread that has ended meanwhile writes no more.
        stat.map_or(true, |stat| stat.rsplit_once(')').unwrap().1.trim().starts_with('T'))
    };
    for _ in 0..6000 {
        if std::fs::read_dir(&tasks).unwrap().all(is_stopped) {
            return;
        }
        assert!(child.try_wait().unwrap().is_none(), "it ended before it came there");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("it does not come there");
}

#[test]
fn full_file_system_behaves_like_an_injected_full_disk() {
    let fill = |lab: &KillLab, words: &[&str], point: &str, round| {
        let Some(disk) = TmpfsMount::new(lab.models()) else {
            println!("skipped: no file system can be mounted here");
            return None;
        };
        // Enough must follow that no longer fits.
        let count = 1 + round * 7 % (MODEL_MIB / 2);
        let mut command = program(words);
        command.env("RUSSET_STOP", format!("{point}:{count}")).stderr(Stdio::piped());
        let mut running = ChildGuard(command.spawn().unwrap());
        stopped(&mut running.0);
        disk.resize(disk.used() + (64 << 10));
        let pid = rustix::process::Pid::from_child(&running.0);
        rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
        let mut stderr = String::new();
        running.0.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert!(!running.0.wait().unwrap().success() && stderr.contains("code: 28"), "{count}: {stderr}");
        Some(disk)
    };
    full_in_the_middle("file system", fill, |disk| disk.resize(ENOUGH_BYTES));
}
