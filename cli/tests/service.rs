//! `russet service` as a program, under temporary folders: it touches nothing of the machine and queries no
//! service manager. The files in `tests/service` are its output; `RUSSET_UPDATE_GOLDENS=1` rewrites them.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use plist::Value;

const PROGRAM: &str = "/usr/local/bin/russet";

fn russet(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_russet"))
        .args(arguments)
        .env_clear()
        .envs(environment.iter().copied())
        .output()
        .unwrap()
}

fn output_text(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8(both).unwrap()
}

/// Exit status and all output.
fn service(arguments: &[&str]) -> (bool, String) {
    let output = russet(&[&["service"], arguments].concat(), &[]);
    (output.status.success(), output_text(&output))
}

/// All options of a machine with a broker and models of its own.
const AGENT: &[&str] = &[
    "agent",
    "--node-name",
    "studio-1",
    "--memory",
    "64Gi",
    "--address",
    "10.0.0.2",
    "--allow-file-root",
    "/srv/models",
    "--engine-binary",
    "/opt/russet/russet-engine",
    "--metrics-listen",
    "10.0.0.2:9100",
    "--json-logs",
    "--mqtt",
    "mqtts://me@homeassistant.local",
    "--mqtt-password-file",
    "/etc/russet/mqtt 100%",
    "--mqtt-ca-file",
    "/etc/ssl/certs/ca-certificates.crt",
    "--mqtt-prefix",
    "home/russet",
];
const UP: &[&str] = &["up", "--data-dir", "/home/me/.russet", "--gateway-listen", "0.0.0.0:443"];
const GATEWAY: &[&str] =
    &["gateway", "--kubeconfig", "/etc/russet/kubeconfig", "--listen", "127.0.0.1:52415"];
const OPERATOR: &[&str] = &["operator", "--kubeconfig", "/etc/russet/kubeconfig", "--identity", "rack $1"];

const HELPER: &[&str] = &["helper", "--allow-wired-limit", "80"];

const ALL: [&[&str]; 5] = [AGENT, UP, GATEWAY, OPERATOR, HELPER];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Installs under `folder`; returns the output.
fn install(folder: &Path, system: &str, command: &[&str]) -> String {
    let folder = folder.to_str().unwrap();
    let before =
        ["install", "--root", folder, "--system", system, "--program", PROGRAM, "--env", "RUSSET_LOG=info"];
    let (well, said) = service(&[&before, command].concat());
    assert!(well, "{said}");
    said
}

fn path(system: &str, command: &[&str]) -> String {
    match system {
        "systemd" => format!("etc/systemd/system/russet-{}.service", command[0]),
        _ => format!("Library/LaunchDaemons/dev.russet.{}.plist", command[0]),
    }
}

/// Compares with the golden file of that name, or writes it.
fn golden(name: &str, text: &str) {
    let file = root().join("tests/service").join(name);
    if std::env::var_os("RUSSET_UPDATE_GOLDENS").is_some() {
        std::fs::write(&file, text).unwrap();
    }
    let written = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        written == text,
        "cli/tests/service/{name} is not what `russet service install` writes:\n{text}\nRUSSET_UPDATE_GOLDENS=1 cargo test -p russet-cli --test service writes it anew"
    );
}

#[test]
fn service_files_equal_the_golden_files() {
    for system in ["systemd", "launchd"] {
        let folder = tempfile::tempdir().unwrap();
        for command in ALL {
            let said = install(folder.path(), system, command);
            let path = path(system, command);
            let text = std::fs::read_to_string(folder.path().join(&path)).unwrap();
            golden(path.rsplit('/').next().unwrap(), &text);
            if command[0] == "agent" {
                let shown = said.replace(folder.path().to_str().unwrap(), "");
                golden(&format!("{system}.txt"), &shown);
            }
        }
    }
}

#[test]
fn printed_files_equal_written_ones_and_install_is_idempotent() {
    for system in ["systemd", "launchd"] {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().to_str().unwrap();
        let print = ["install", "--dry-run", "--root", at, "--system", system, "--program", PROGRAM, "agent"];
        let (well, printed) = service(&print);
        assert!(well, "{printed}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is written");
        let before = ["install", "--root", at, "--system", system, "--program", PROGRAM, "agent"];
        let first = service(&before).1;
        assert!(first.contains(" was written\n"), "{first}");
        let text = std::fs::read_to_string(folder.path().join(path(system, AGENT))).unwrap();
        assert!(printed.contains(&text), "{printed}");
        let again = service(&before).1;
        assert!(again.contains(" is up to date\n") && !again.contains("was written\n"), "{again}");
    }
}

#[test]
fn services_are_listed_and_removed_and_foreign_files_stay() {
    for system in ["systemd", "launchd"] {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().to_str().unwrap();
        let place = ["--root", at, "--system", system];
        let (well, none) = service(&[&["status"], &place[..]].concat());
        assert!(!well && none.contains("russet service install agent"), "{none}");
        for command in ALL {
            install(folder.path(), system, command);
        }
        let (well, all) = service(&[&["status"], &place[..]].concat());
        assert!(well, "{all}");
        for command in ALL {
            assert!(all.contains(&format!("  runs  {PROGRAM} {}", command[0])), "{all}");
        }
        let foreign = folder.path().join(path(system, UP));
        std::fs::write(&foreign, "[Service]\nExecStart=/bin/true\n").unwrap();
        let (_, noted) = service(&[&["status"], &place[..]].concat());
        assert!(noted.contains("russet did not write this file"), "{noted}");
        let (well, refused) = service(&[&["uninstall", "up"], &place[..]].concat());
        assert!(!well && refused.contains("left alone") && foreign.exists(), "{refused}");
        let said =
            russet(&[&["service", "install"], &place[..], &["--program", PROGRAM, "up"]].concat(), &[]);
        assert!(!said.status.success() && foreign.exists());

        assert!(service(&[&["uninstall", "up", "--force"], &place[..]].concat()).0);
        for verb in ["agent", "gateway", "operator", "helper"] {
            let (well, said) = service(&[&["uninstall", verb], &place[..]].concat());
            assert!(well, "{said}");
        }
        let files = Command::new("find").arg(at).args(["-type", "f"]).output().unwrap();
        assert_eq!(String::from_utf8(files.stdout).unwrap(), "", "nothing is left");
        let (well, absent) = service(&[&["uninstall", "agent"], &place[..]].concat());
        assert!(!well && absent.contains("is not installed"), "{absent}");
    }
}

#[test]
fn values_of_variables_become_environment_lines() {
    let line = ["service", "install", "--print", "--system", "systemd", "--program", PROGRAM, "agent"];
    let environment =
        [("RUSSET_ENGINE", "/opt/e"), ("HF_ENDPOINT", "https://hub.example/a b"), ("HOME", "/root")];
    let printed = output_text(&russet(&line, &environment));
    assert!(printed.contains("Environment=RUSSET_ENGINE=/opt/e\n"), "{printed}");
    assert!(printed.contains("Environment=\"HF_ENDPOINT=https://hub.example/a b\"\n"), "{printed}");
    assert!(!printed.contains("HOME"), "{printed}");
}

/// The property list of a service, parsed.
fn list(folder: &Path, command: &[&str]) -> plist::Dictionary {
    let file = folder.join(path("launchd", command));
    Value::from_file(file).unwrap().into_dictionary().unwrap()
}

#[test]
fn a_property_list_says_what_launchd_needs() {
    let folder = tempfile::tempdir().unwrap();
    install(folder.path(), "launchd", AGENT);
    let agent = list(folder.path(), AGENT);
    let words = agent["ProgramArguments"].as_array().unwrap().iter().map(|word| word.as_string().unwrap());
    let expected = [&[PROGRAM], AGENT, &["--data-dir", "/var/db/russet"]].concat();
    assert_eq!(words.collect::<Vec<_>>(), expected);
    assert_eq!(agent["Label"].as_string(), Some("dev.russet.agent"));
    for (key, value) in [("RunAtLoad", true), ("KeepAlive", true), ("AbandonProcessGroup", true)] {
        assert_eq!(agent[key].as_boolean(), Some(value), "{key}");
    }
    assert_eq!(agent["UserName"].as_string(), Some("_russet"));
    assert_eq!(agent["Umask"].as_unsigned_integer(), Some(0o077));
    // Where `russet logs` looks; also passed to the process, which rotates it.
    let log = agent["StandardErrorPath"].as_string().unwrap();
    let variables = agent["EnvironmentVariables"].as_dictionary().unwrap();
    assert_eq!((log, variables["RUSSET_LOG_FILE"].as_string()), ("/var/db/russet/logs/agent.log", Some(log)));
    assert!(!agent.contains_key("LimitLoadToSessionType"), "it waits for nobody's login");
}

#[test]
fn process_rotates_its_own_log_file() {
    let folder = tempfile::tempdir().unwrap();
    let (log, older) = (folder.path().join("agent.log"), folder.path().join("agent.log.1"));
    let long = std::fs::File::create(&log).unwrap();
    long.set_len((10 << 20) + 1).unwrap();
    let at = folder.path().to_str().unwrap();
    russet(&["service", "status", "--root", at], &[("RUSSET_LOG_FILE", log.to_str().unwrap())]);
    assert_eq!(std::fs::metadata(&log).unwrap().len(), 0);
    assert_eq!(std::fs::metadata(&older).unwrap().len(), (10 << 20) + 1);
}

/// A command line split as systemd does, for the syntax of our units: words, double quotes, `\`, `%%` and
/// `$$`.
fn split(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quoted, mut started) = (Vec::new(), String::new(), false, false);
    let mut letters = line.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '"' => (quoted, started) = (!quoted, true),
            ' ' if !quoted => {
                if std::mem::take(&mut started) {
                    words.push(std::mem::take(&mut word));
                }
            }
            other => {
                started = true;
                word.push(match other {
                    '\\' | '%' | '$' => letters.next().unwrap(),
                    other => other,
                });
            }
        }
    }
    words.push(word);
    words
}

#[test]
fn the_command_of_a_unit_is_one_this_program_takes() {
    let folder = tempfile::tempdir().unwrap();
    for command in ALL {
        install(folder.path(), "systemd", command);
        let text = std::fs::read_to_string(folder.path().join(path("systemd", command))).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
        let words = split(line);
        assert_eq!(words[..=command.len()], [&[PROGRAM], command].concat());
    }
    // The agent's unit really starts, as far as that works without a join.
    let data = folder.path().join("state 1%");
    let data_dir = data.to_str().unwrap();
    install(folder.path(), "systemd", &["agent", "--data-dir", data_dir]);
    let text = std::fs::read_to_string(folder.path().join(path("systemd", AGENT))).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
    let words = split(line);
    let arguments: Vec<&str> = words[1..].iter().map(String::as_str).collect();
    let ended = russet(&arguments, &[]);
    assert!(
        !ended.status.success() && output_text(&ended).contains("holds no identity of a node"),
        "{}",
        output_text(&ended)
    );
    assert!(data.is_dir(), "it looked where its configuration says");
}

/// Checks units without loading or starting them, and without privileges: as root, systemd-analyze runs as
/// the user nobody.
fn systemd_analyze(arguments: &[&str]) -> Option<Output> {
    let mut command = Command::new("systemd-analyze");
    command.args(arguments).env_clear().env("PATH", "/usr/bin:/bin").env("SYSTEMD_PAGER", "");
    if rustix::process::geteuid().is_root() {
        command.uid(65_534).gid(65_534);
    }
    match command.output() {
        Ok(output) => Some(output),
        Err(error) => {
            println!("skipped: systemd-analyze cannot be run: {error}");
            None
        }
    }
}

#[test]
fn systemd_itself_finds_nothing_wrong_with_a_unit() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    for command in ALL {
        let at = folder.path().to_str().unwrap();
        // systemd-analyze checks that the program exists.
        let before = ["install", "--root", at, "--system", "systemd", "--program", "/bin/true"];
        let (well, said_here) = service(&[&before, command].concat());
        assert!(well, "{said_here}");
        let unit = folder.path().join(path("systemd", command));
        let unit = unit.to_str().unwrap();
        let Some(judged) =
            systemd_analyze(&["verify", "--man=no", "--generators=no", "--recursive-errors=no", unit])
        else {
            return;
        };
        assert!(
            judged.status.success() && output_text(&judged).is_empty(),
            "{unit}: {}",
            output_text(&judged)
        );
        // On a scale to ten, where ten is fully exposed; less than most units of distributions.
        let threshold = if matches!(command[0], "agent" | "up") { "30" } else { "20" };
        let Some(judged) =
            systemd_analyze(&["security", "--no-pager", "--offline=yes", "--threshold", threshold, unit])
        else {
            return;
        };
        assert!(judged.status.success(), "{unit}: {}", output_text(&judged));
    }
}
