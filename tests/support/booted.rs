//! A machine booted by a real systemd: a container of `systemd-nspawn` that sees this computer's programs and
//! writes to memory, without this computer's services and network. It restarts like a machine, and keeps its
//! disk then.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::cluster::WAIT_TIMEOUT;
use crate::processes::{processes, program};

/// Variable that names `systemd-nspawn`.
pub const PROGRAM: &str = "RUSSET_NSPAWN";
/// Poll interval.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The machine's PATH.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Path of MLX's libraries on the machine; its services cannot read home folders.
pub const LIBRARIES: &str = "/usr/local/lib/russet";

/// The folder to work in, then everything for nspawn. This shell is the first process of a namespace, so that
/// all processes and files end with it: once its input is closed, as when the process that started it has
/// ended, or once the machine is off. Units, scripts and the machine id of this computer are hidden from the
/// machine. With 133 nspawn reports that the machine wants to reboot.
const SCRIPT: &str = r#"
set -e
folder=$1
shift
mount -t tmpfs -o size=8g tmpfs "$folder"
root=$folder/root
mkdir "$folder/upper" "$folder/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/upper,workdir=$folder/work" "$root"
rm -rf "$root/etc/systemd/system" "$root"/etc/rc?.d "$root/etc/machine-id"
mkdir -p "$root/etc/systemd/system"
# Not removed: others write into that of this computer meanwhile.
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
: > "$root/etc/machine-id"
# At every start: no connection takes a port that Russet has by default.
echo 'net.ipv4.ip_local_port_range = 32768 49151' > "$root/etc/sysctl.d/russet.conf"
exec 3<&0
cat <&3 >/dev/null &
input=$!
(
    status=133
    while [ "$status" = 133 ]; do
        status=0
        "$@" --directory="$root" </dev/null || status=$?
    done
    kill "$input"
) &
wait "$input" || exit 1
"#;

/// The machine; when dropped, it is switched off and its files are deleted.
pub struct BootedMachine {
    folder: tempfile::TempDir,
    child: Child,
}

impl BootedMachine {
    /// Boots a machine with our programs in `/usr/local/bin`, and waits until all its services run.
    ///
    /// # Errors
    ///
    /// If this user may not, or this kernel cannot.
    pub fn start(nspawn: &Path, name: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let machine = folder.path().join("machine");
        fs::create_dir(&machine)?;
        let engine = program("russet-engine")?;
        let mut binds = vec![(libraries(&engine)?, LIBRARIES.to_owned())];
        for own in ["russet", "russet-engine"] {
            binds.push((program(own)?, format!("/usr/local/bin/{own}")));
        }
        let log = fs::File::create(folder.path().join("log"))?;
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation=private", "--pid", "--fork", "--mount-proc", "--kill-child"]);
        command.args(["sh", "-c", SCRIPT, "sh"]).arg(&machine).arg(nspawn);
        command.args(["--quiet", "--boot", "--private-network", "--register=no", "--keep-unit"]);
        command.args(["--console=pipe", &format!("--machine=russet-{name}")]);
        command.args(binds.iter().map(|(from, to)| format!("--bind-ro={}:{to}", from.display())));
        command.stdin(Stdio::piped()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().context("unshare cannot be run")?;
        let mut booted = Self { folder, child };
        booted.runs()?;
        Ok(booted)
    }

    /// Waits until systemd has started everything; a failed service is an error.
    fn runs(&mut self) -> Result<()> {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                let log = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
                bail!("the machine did not start, {status}: {log}");
            }
            let state = self.run("systemctl is-system-running").unwrap_or_else(|error| format!("{error:#}"));
            match state.lines().next() {
                Some("running") => return Ok(()),
                Some("degraded") => bail!("a service failed: {}", self.run("systemctl --failed --no-pager")?),
                _ => {}
            }
            ensure!(began.elapsed() < WAIT_TIMEOUT, "the machine does not come up: {state}");
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// The machine's first process, by its id on this computer.
    fn init_pid(&self) -> Result<i32> {
        let all = processes();
        let mut above = vec![self.child.id() as i32];
        // Below two shells and nspawn.
        for _ in 0..4 {
            let below = all.iter().filter(|process| above.contains(&process.parent));
            let is_init = |path: &String| path.ends_with("/systemd") || path.ends_with("/init");
            if let Some(init) = below.clone().find(|process| process.arguments.first().is_some_and(is_init)) {
                return Ok(init.pid);
            }
            above = below.map(|process| process.pid).collect();
        }
        bail!("nothing runs on the machine")
    }

    /// Runs a line in a root shell on the machine, which must succeed; returns its output.
    ///
    /// # Errors
    ///
    /// With all output, if it fails or the machine is off.
    pub fn run(&self, line: &str) -> Result<String> {
        let mut command = Command::new("nsenter");
        command.args(["--all", "--target", &self.init_pid()?.to_string(), "sh", "-c", line]);
        command.env_clear().env("PATH", PATH).env("HOME", "/root").stdin(Stdio::null());
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(
            output.status.success(),
            "{said}{}`{line}` ended with {}",
            String::from_utf8_lossy(&output.stderr),
            output.status
        );
        Ok(said)
    }

    /// Waits until the output of a line is as wanted; returns the output and the time. A line that fails
    /// counts as without output.
    ///
    /// # Errors
    ///
    /// After two minutes, with the machine's last output.
    pub fn until(&self, line: &str, expected: impl Fn(&str) -> bool) -> Result<(String, Duration)> {
        let began = Instant::now();
        loop {
            let said = self.run(line);
            if let Ok(said) = &said
                && expected(said)
            {
                return Ok((said.clone(), began.elapsed()));
            }
            if began.elapsed() > WAIT_TIMEOUT {
                let journal = self.run("journalctl --boot --no-pager --lines=60").unwrap_or_default();
                bail!("`{line}` does not come to what is wanted: {said:?}\n{journal}");
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Reboots the machine, and waits until everything runs again.
    ///
    /// # Errors
    ///
    /// If it does not.
    pub fn restart(&mut self) -> Result<Duration> {
        let before = self.init_pid()?;
        self.run("systemctl reboot")?;
        self.started_anew(before)
    }

    /// Reboots the machine without a word to what runs on it, and waits until everything runs again.
    ///
    /// # Errors
    ///
    /// If it does not.
    pub fn crash(&mut self) -> Result<Duration> {
        let before = self.init_pid()?;
        // It may end before it has said that it does.
        let _ = self.run("systemctl reboot --force --force");
        self.started_anew(before)
    }

    /// Waits until the machine has another first process, and everything runs.
    fn started_anew(&mut self, before: i32) -> Result<Duration> {
        let began = Instant::now();
        while self.init_pid().is_ok_and(|now| now == before) {
            ensure!(began.elapsed() < WAIT_TIMEOUT, "the machine does not go down");
            std::thread::sleep(POLL_INTERVAL);
        }
        self.runs()?;
        Ok(began.elapsed())
    }
}

impl Drop for BootedMachine {
    fn drop(&mut self) {
        // Its input is closed before the wait, which ends everything.
        self.child.wait().ok();
    }
}

/// The folder with the libraries that an engine needs, as its loader finds them: MLX's wheel.
fn libraries(engine: &Path) -> Result<PathBuf> {
    let output = Command::new("ldd").arg(engine).output().context("ldd cannot be run")?;
    let said = String::from_utf8_lossy(&output.stdout);
    let line = said.lines().find_map(|line| line.trim().strip_prefix("libmlx.so => "));
    let path = line.and_then(|line| line.split_whitespace().next());
    let path = path.with_context(|| format!("{} is not linked with MLX: {said}", engine.display()))?;
    // wheel/mlx/lib/libmlx.so
    let wheel = Path::new(path).ancestors().nth(3);
    Ok(wheel.with_context(|| format!("{path} is not in a wheel"))?.to_owned())
}
