//! The two service managers: paths of their files, commands that start and stop a service, and parsers of
//! their state output. Commands are data; only the state query is executed.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};

use super::files::ServiceFile;
use super::spec::{ServiceSpec, Verb};
use super::{launchd, systemd};

/// A service manager.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manager {
    /// Linux.
    Systemd,
    /// macOS.
    Launchd,
}

/// State of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceState {
    /// Whether the service is loaded or enabled.
    pub loaded: bool,
    /// Whether it is running.
    pub runs: bool,
    /// The state as text.
    pub words: String,
}

/// A manual step.
pub struct ManualStep {
    why: &'static str,
    command: String,
}

impl fmt::Display for Manager {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Systemd => "systemd",
            Self::Launchd => "launchd",
        })
    }
}

impl Manager {
    /// The manager of the system that this program was built for.
    pub const OF_THIS_SYSTEM: Self = if cfg!(target_os = "macos") { Self::Launchd } else { Self::Systemd };

    /// Default user of services. Names of macOS's own service users begin with `_`.
    pub const fn user(self) -> &'static str {
        match self {
            Self::Systemd => "russet",
            Self::Launchd => "_russet",
        }
    }

    /// Data folder of a service; short, because socket paths in it are limited.
    pub fn data_dir(self) -> &'static str {
        match self {
            Self::Systemd => "/var/lib/russet",
            Self::Launchd => "/var/db/russet",
        }
    }

    /// Folder of the root helper's journal; separate from the agent's.
    pub fn helper_dir(self) -> &'static str {
        match self {
            Self::Systemd => "/var/lib/russet-helper",
            Self::Launchd => "/var/db/russet-helper",
        }
    }

    /// The manager's name for a service.
    pub fn name(self, verb: Verb) -> String {
        match self {
            Self::Systemd => systemd::name(verb),
            Self::Launchd => launchd::label(verb),
        }
    }

    /// Path of a service's file.
    pub fn path(self, verb: Verb) -> PathBuf {
        match self {
            Self::Systemd => Path::new("/etc/systemd/system").join(systemd::name(verb)),
            Self::Launchd => {
                Path::new("/Library/LaunchDaemons").join(format!("{}.plist", launchd::label(verb)))
            }
        }
    }

    /// A file that all services of a machine share.
    pub fn shared(self) -> Option<PathBuf> {
        (self == Self::Systemd).then(|| "/etc/sysusers.d/russet.conf".into())
    }

    /// All files to write for a service.
    pub fn files(self, service: &ServiceSpec) -> Result<Vec<ServiceFile>> {
        let path = self.path(service.verb);
        let verb = service.verb;
        let own = move |text: &str| self.is_ours(verb, text);
        Ok(match self {
            Self::Systemd => {
                let unit = ServiceFile::new(path, systemd::unit(service), own);
                // A user that the caller names is not created here.
                let shared = self.shared().filter(|_| service.user == self.user());
                let user =
                    shared.map(|at| ServiceFile::new(at, systemd::sysusers(&service.user), systemd::is_ours));
                [Some(unit), user].into_iter().flatten().collect()
            }
            Self::Launchd => vec![ServiceFile::new(path, launchd::property_list(service)?, own)],
        })
    }

    /// Whether this program wrote the file of a service.
    pub fn is_ours(self, verb: Verb, text: &str) -> bool {
        match self {
            Self::Systemd => systemd::is_ours(text),
            Self::Launchd => launchd::is_ours(verb, text),
        }
    }

    /// The command in the file of a service.
    pub fn command(self, text: &str) -> Option<String> {
        match self {
            Self::Systemd => systemd::exec_command(text),
            Self::Launchd => launchd::exec_command(text),
        }
    }

    /// The manual steps that remain after the files are written, in order.
    pub fn steps(self, service: &ServiceSpec) -> Vec<ManualStep> {
        let ServiceSpec { verb, user, data_dir, .. } = service;
        let step = |why, command: String| ManualStep { why, command };
        let folder = data_dir.display();
        let program = service.argv.first().map_or("russet", String::as_str);
        let mut steps = Vec::new();
        match self {
            Self::Systemd => {
                if user == self.user() {
                    steps.push(step("make the user", "sudo systemd-sysusers russet.conf".into()));
                }
                let make = format!("sudo install -d -m 700 -o {user} -g {user} {folder}");
                steps.push(step("create its folder, if there is none", make));
            }
            Self::Launchd => {
                if user == self.user() {
                    let free = "sudo sysadminctl -addUser _russet -roleAccount -UID 399 -fullName Russet";
                    steps
                        .push(step("make the user, with a number from 200 to 400 that is free", free.into()));
                }
                let logs = launchd::log_folder(data_dir);
                let make = format!("sudo install -d -m 700 -o {user} {folder} {}", logs.display());
                steps.push(step("create its folders, if there are none", make));
            }
        }
        if *verb == Verb::Agent {
            let join = format!("sudo -u {user} {program} join URL --token T --no-agent --data-dir {folder}");
            steps.push(step(
                "join, if this machine has not; with the same --node-name, if one is given",
                join,
            ));
        }
        let name = self.name(*verb);
        match self {
            Self::Systemd => {
                steps.push(step("start it, now and at every boot", "sudo systemctl daemon-reload".into()));
                steps.push(step("", format!("sudo systemctl enable {name}")));
                steps.push(step("", format!("sudo systemctl restart {name}")));
            }
            Self::Launchd => {
                let path = self.path(*verb);
                steps.push(step(
                    "stop the previous one, if there is one",
                    format!("sudo launchctl bootout system/{name}"),
                ));
                let start = format!("sudo launchctl bootstrap system {}", path.display());
                steps.push(step("start it, now and at every boot", start));
            }
        }
        if *verb == Verb::Up {
            // As the service's user, not as root: a kubeconfig may contain commands that are executed.
            let ask = format!("sudo -u {user} {program} get inferencenodes --data-dir {folder}");
            steps.push(step("ask it", ask));
        }
        steps
    }

    /// The command that stops a service permanently.
    pub fn stop_command(self, verb: Verb) -> String {
        let name = self.name(verb);
        match self {
            Self::Systemd => format!("sudo systemctl disable --now {name}"),
            Self::Launchd => format!("sudo launchctl bootout system/{name}"),
        }
    }

    /// Whether the manager runs on this machine.
    pub fn runs_here(self) -> bool {
        match self {
            // The same check as systemd's own sd_booted.
            Self::Systemd => Path::new("/run/systemd/system").is_dir(),
            Self::Launchd => cfg!(target_os = "macos"),
        }
    }

    /// Queries the state of a service; `None` if the manager does not know it.
    pub fn query(self, verb: Verb) -> Result<Option<ServiceState>> {
        let name = self.name(verb);
        let mut command = match self {
            Self::Systemd => {
                let mut command = Command::new("systemctl");
                command.args(["show", "-p", "LoadState,ActiveState,SubState,UnitFileState,NRestarts", &name]);
                command
            }
            Self::Launchd => {
                let mut command = Command::new("launchctl");
                command.args(["print", &format!("system/{name}")]);
                command
            }
        };
        let output = command
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("{self} could not be queried for {name}"))?;
        let said = String::from_utf8_lossy(&output.stdout);
        Ok(match self {
            Self::Systemd => parse_systemd(&said),
            Self::Launchd if output.status.success() => parse_launchd(&said),
            Self::Launchd => None,
        })
    }
}

/// Parses the `NAME=VALUE` lines of `systemctl show`.
fn parse_systemd(said: &str) -> Option<ServiceState> {
    let value = |name: &str| said.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    if value("LoadState") == Some("not-found") {
        return None;
    }
    let (active, detail) = (value("ActiveState")?, value("SubState").unwrap_or("unknown"));
    let enabled = value("UnitFileState").filter(|state| !state.is_empty()).unwrap_or("not enabled");
    let restarts = value("NRestarts").unwrap_or("0");
    Some(ServiceState {
        loaded: active != "inactive" && active != "failed" || enabled == "enabled",
        runs: active == "active",
        words: format!("{active} ({detail}), {enabled}, {restarts} restarts"),
    })
}

/// Parses the first `name = value` of each name in the output of `launchctl print`.
fn parse_launchd(said: &str) -> Option<ServiceState> {
    let value = |name: &str| {
        said.lines().find_map(|line| line.trim().strip_prefix(name)?.trim_start().strip_prefix("= "))
    };
    let state = value("state")?;
    let process = value("pid").map(|pid| format!(", process {pid}")).unwrap_or_default();
    let exit = value("last exit code").map(|code| format!(", last exit {code}")).unwrap_or_default();
    Some(ServiceState { loaded: true, runs: state == "running", words: format!("{state}{process}{exit}") })
}

/// The steps as text.
pub fn format_steps(steps: &[ManualStep]) -> String {
    let mut text = String::from("Nothing was started. What is left to do:\n");
    for ManualStep { why, command } in steps {
        if !why.is_empty() {
            text.push_str(&format!("  # {why}\n"));
        }
        text.push_str(&indented(command));
        text.push('\n');
    }
    text
}

/// A command to type.
pub fn indented(command: &str) -> String {
    format!("  {command}")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]
    use super::*;

    #[test]
    fn systemctl_output_is_parsed_into_a_state() {
        for (said, expected) in [
            (
                "LoadState=loaded\nActiveState=active\nSubState=running\nUnitFileState=enabled\nNRestarts=2\n",
                Some((true, true, "active (running), enabled, 2 restarts")),
            ),
            (
                "LoadState=loaded\nActiveState=failed\nSubState=failed\nUnitFileState=\nNRestarts=0\n",
                Some((false, false, "failed (failed), not enabled, 0 restarts")),
            ),
            (
                "LoadState=loaded\nActiveState=inactive\nSubState=dead\nUnitFileState=enabled\nNRestarts=0\n",
                Some((true, false, "inactive (dead), enabled, 0 restarts")),
            ),
            ("LoadState=not-found\nActiveState=inactive\nSubState=dead\nUnitFileState=\n", None),
            ("", None),
        ] {
            let state = parse_systemd(said);
            let state_seen = state.as_ref().map(|state| (state.loaded, state.runs, state.words.as_str()));
            assert_eq!(state_seen, expected, "{said:?}");
        }
    }

    /// Written after the manual, not recorded on a Mac.
    #[test]
    fn launchctl_output_is_parsed_into_a_state() {
        let said = "system/dev.russet.agent = {\n\tactive count = 1\n\tpath = /Library/x.plist\n\tstate = running\n\n\tpid = 411\n\tlast exit code = (never exited)\n\tspawn type = interactive\n}\n";
        let state = parse_launchd(said).unwrap();
        assert_eq!(
            state,
            ServiceState {
                loaded: true,
                runs: true,
                words: "running, process 411, last exit (never exited)".into()
            }
        );
        let waits = parse_launchd("system/x = {\n\tstate = not running\n\tlast exit code = 1\n}\n").unwrap();
        assert_eq!((waits.runs, waits.words.as_str()), (false, "not running, last exit 1"));
        assert_eq!(parse_launchd("Could not find service"), None);
    }
}
