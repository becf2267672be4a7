//! Stores that are killed, as by `kill -9`, at every step that changes what is on the disk, and whose disk is full in the
//! middle. What is published is whole and right at every moment, and whoever begins again goes on with what was found
//! right.
//!
//! `RUSSET_FAULT_ROUNDS` rounds; one where it is not said. Each prints what it found.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, whichever function of it does")]

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use russet_agent::store::chunks::CHUNK;
use russet_agent::store::{Context, Store};

/// Of the model, in MiB: four chunks and a half.
const SIZE: u64 = 72;

fn rounds() -> u64 {
    std::env::var("RUSSET_FAULT_ROUNDS").map_or(1, |rounds| rounds.parse().unwrap())
}

/// A figure, for `cargo xtask proof store`.
fn tell(point: &str, meanwhile: &str) {
    let what = format!("killed at {point} while it {meanwhile}, went on");
    println!("{}", serde_json::json!({"what": what, "ours": rounds(), "unit": "kills"}));
}

fn program(words: &[&str]) -> Command {
    let own = std::env::current_exe().unwrap();
    let program = own.parent().unwrap().parent().unwrap().join("examples/spread");
    assert!(program.exists(), "{} is missing; run the tests with cargo test", program.display());
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

/// A folder with a model that the node `seed` has, and its agent.
struct Lab {
    /// Ends before its folder goes.
    _seed: Running,
    folder: tempfile::TempDir,
    address: String,
}

/// A program that ends with this, also where a signal has stopped it.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

impl Lab {
    fn new() -> Self {
        rustls::crypto::ring::default_provider().install_default().ok();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        let made = program(&["make", path, &SIZE.to_string(), "seed", "one"]).output().unwrap();
        assert!(made.status.success());
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let address = format!("127.0.0.1:{port}");
        let mut seed = Running(program(&["serve", path, "seed", &address]).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(seed.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "ready");
        Self { _seed: seed, folder, address }
    }

    fn path(&self) -> &str {
        self.folder.path().to_str().unwrap()
    }

    fn way(&self) -> String {
        format!("seed=127.0.0.1>{}", self.address)
    }

    fn models(&self) -> PathBuf {
        self.folder.path().join("models-one")
    }

    /// Runs a program until it is done, or was killed at `point` for the `count`th time; whether it was.
    fn killed(&self, words: &[&str], point: &str, count: u64) -> bool {
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

    fn done(&self, words: &[&str]) {
        let output = program(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Every folder that engines could be given is whole and right; how many there are.
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

    /// Bytes that a journal names, of chunks that were found right.
    fn journalled(&self) -> u64 {
        let partial = std::fs::read_dir(self.models().join(".partial")).unwrap().flatten().next();
        let journal = partial.map(|it| std::fs::read(it.path().join("JOURNAL")).unwrap_or_default());
        journal.unwrap_or_default().len() as u64 / 16
    }

    fn forget(&self) {
        std::fs::remove_dir_all(self.models()).ok();
    }
}

fn same(one: &Path, other: &Path) -> bool {
    std::fs::read(one).unwrap() == std::fs::read(other).unwrap()
}

/// Bytes of `one`'s chunks that another try finds there.
fn found(lab: &Lab) -> u64 {
    let context = Context::new("https://huggingface.co", Vec::new()).unwrap();
    let seed = Store::open(lab.folder.path().join("models-seed"), context.clone()).unwrap();
    let id = std::fs::read_to_string(lab.folder.path().join("id")).unwrap();
    let manifest = seed.held(&id).unwrap().manifest().as_ref().clone();
    let store = Store::open(lab.models(), context).unwrap();
    store.receive(&Default::default(), manifest).unwrap().done()
}

#[test]
fn a_store_that_is_killed_while_it_receives_goes_on_with_what_was_right() {
    let lab = Lab::new();
    let way = lab.way();
    let pull = ["pull", lab.path(), "one", &way];
    for (point, most) in [
        ("data-write", SIZE),
        ("chunk-checked", 5),
        ("journal-appended", 5),
        ("name-rename", 1),
        ("manifest-write", 1),
        ("publish-rename", 1),
        ("published", 1),
    ] {
        for round in 0..rounds() {
            lab.forget();
            let count = 1 + round * 7 % most;
            assert!(lab.killed(&pull, point, count), "{point} is never come to for the {count}th time");
            let published = lab.published();
            assert_eq!(published, usize::from(point == "published"), "{point}");
            if matches!(point, "data-write" | "chunk-checked" | "journal-appended") {
                let (chunks, bytes) = (lab.journalled(), found(&lab));
                // The small file and the last chunk are short.
                assert!(bytes >= chunks.saturating_sub(2) * CHUNK, "{chunks} chunks, {bytes} bytes");
                let least = if point == "journal-appended" { count } else { count.min(5) - count.min(1) };
                assert!(point == "data-write" || chunks >= least, "{point} {count}: {chunks}");
            }
            lab.done(&pull);
            assert_eq!(lab.published(), 1, "{point}");
        }
        tell(point, "receives");
    }
}

#[test]
fn a_store_that_is_killed_while_it_fetches_goes_on() {
    let lab = Lab::new();
    let fetch = ["fetch", lab.path(), "one"];
    for point in ["name-rename", "manifest-write", "publish-rename", "published"] {
        for _ in 0..rounds() {
            lab.forget();
            assert!(lab.killed(&fetch, point, 1), "{point} is never come to");
            assert_eq!(lab.published(), usize::from(point == "published"), "{point}");
            lab.done(&fetch);
            assert_eq!(lab.published(), 1, "{point}");
        }
        tell(point, "fetches");
    }
}

#[test]
fn a_store_that_is_killed_while_it_removes_leaves_nothing_that_looks_whole() {
    let lab = Lab::new();
    let (fetch, collect) = (["fetch", lab.path(), "one"], ["collect", lab.path(), "one"]);
    for (point, left) in [("going-rename", 1), ("going-unlink", 0)] {
        for _ in 0..rounds() {
            lab.done(&fetch);
            assert!(lab.killed(&collect, point, 1), "{point} is never come to");
            assert_eq!(lab.published(), left, "{point}");
            lab.done(&collect);
            assert_eq!(lab.published(), 0, "{point}");
            let going = std::fs::read_dir(lab.models().join(".going")).unwrap().count();
            assert_eq!(going, 0, "{point}");
        }
        tell(point, "removes");
    }
}

/// Has the disk be full in the middle as `fill` does it in each round, and free again as `free` does: nothing is published,
/// and the next try goes on. Where `fill` cannot, that was said.
fn full_in_the_middle<D>(
    what: &str,
    fill: impl Fn(&Lab, &[&str], &str, u64) -> Option<D>,
    free: impl Fn(&D),
) {
    let lab = Lab::new();
    let way = lab.way();
    let (pull, fetch) = (["pull", lab.path(), "one", &way], ["fetch", lab.path(), "one"]);
    for (words, point, meanwhile) in
        [(&pull[..], "data-write", "receives"), (&fetch[..], "part-write", "fetches")]
    {
        for round in 0..rounds() {
            lab.forget();
            let Some(disk) = fill(&lab, words, point, round) else { return };
            assert_eq!(lab.published(), 0, "{meanwhile} in round {round}");
            free(&disk);
            lab.done(words);
            assert_eq!(lab.published(), 1, "{meanwhile} in round {round}");
        }
        let what = format!("{what} full while it {meanwhile}, went on");
        println!("{}", serde_json::json!({"what": what, "ours": rounds(), "unit": "times"}));
    }
}

#[test]
fn a_disk_that_is_full_in_the_middle_publishes_nothing_and_goes_on_when_there_is_room() {
    let fill = |_: &Lab, words: &[&str], point: &str, round| {
        let count = round * 7 % SIZE;
        let mut command = program(words);
        let output = command.env("RUSSET_FULL", format!("{point}:{count}")).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && told.contains("StorageFull"), "{count}: {told}");
        Some(())
    };
    full_in_the_middle("disk", fill, |()| {});
}

/// A file system in memory, of so many bytes.
struct Mounted(PathBuf);

impl Mounted {
    /// Where this user may make one.
    fn new(at: PathBuf) -> Option<Self> {
        std::fs::create_dir_all(&at).unwrap();
        let made = mount(&["-t", "tmpfs", "-o", &format!("size={ROOMY}"), "tmpfs", at.to_str().unwrap()]);
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

impl Drop for Mounted {
    fn drop(&mut self) {
        Command::new("umount").arg("--lazy").arg(&self.0).status().unwrap();
    }
}

fn mount(words: &[&str]) -> bool {
    let output = Command::new("mount").args(words).output().unwrap();
    print!("{}", String::from_utf8_lossy(&output.stderr));
    output.status.success()
}

/// The model, and what a store leaves free.
const ROOMY: u64 = (1 << 30) + ((2 * SIZE) << 20);

/// Waits until a signal has stopped a process.
fn stopped(child: &mut Child) {
    let stat = format!("/proc/{}/stat", child.id());
    for _ in 0..6000 {
        let state = std::fs::read_to_string(&stat).unwrap();
        if state.rsplit_once(')').unwrap().1.trim().starts_with('T') {
            return;
        }
        assert!(child.try_wait().unwrap().is_none(), "it ended before it came there");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("it does not come there");
}

#[test]
fn a_disk_that_is_full_in_the_middle_by_the_kernels_own_word_is_no_other() {
    let fill = |lab: &Lab, words: &[&str], point: &str, round| {
        let Some(disk) = Mounted::new(lab.models()) else {
            println!("skipped: no file system can be mounted here");
            return None;
        };
        // Enough is to come after it that does not fit any more.
        let count = 1 + round * 7 % (SIZE / 2);
        let mut command = program(words);
        command.env("RUSSET_STOP", format!("{point}:{count}")).stderr(Stdio::piped());
        let mut running = Running(command.spawn().unwrap());
        stopped(&mut running.0);
        disk.resize(disk.used() + (64 << 10));
        let pid = rustix::process::Pid::from_child(&running.0);
        rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
        let mut told = String::new();
        running.0.stderr.take().unwrap().read_to_string(&mut told).unwrap();
        assert!(!running.0.wait().unwrap().success() && told.contains("code: 28"), "{count}: {told}");
        Some(disk)
    };
    full_in_the_middle("file system", fill, |disk| disk.resize(ROOMY));
}
