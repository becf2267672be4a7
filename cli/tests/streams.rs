//! What the program does when its output goes nowhere: verbs whose standard output is a full disk or a pipe that
//! nobody reads, and a daemon that logs to a full disk. `/dev/full` is the full disk. Left out are the verbs
//! that need an agent (`drain`, `leave`, `run`); they print through the same writer.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Time for a control plane to start, and for anything to be answered.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Exit code of a verb whose reader is gone: 128 and SIGPIPE.
const CLOSED_PIPE: i32 = 141;

const MODEL: &str = "apiVersion: russet.dev/v1alpha1\n\
    kind: Model\n\
    metadata: {name: smoke}\n\
    spec: {source: {uri: \"builtin://smoke\"}}\n\
    ---\n\
    apiVersion: russet.dev/v1alpha1\n\
    kind: ModelDeployment\n\
    metadata: {name: smoke}\n\
    spec: {modelRef: {name: smoke}}\n";
const SECRET: &str = "apiVersion: v1\nkind: Secret\nmetadata: {name: ghost}\nstringData: {token: x}\n";
const NODE: &str = "apiVersion: russet.dev/v1alpha1\n\
    kind: InferenceNode\n\
    metadata: {name: studio}\n\
    spec: {}\n";

fn russet(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_russet"));
    // A proxy of the environment is for other networks.
    command
        .args(arguments)
        .env_clear()
        .env("HTTPS_PROXY", "http://127.0.0.1:9")
        .env("https_proxy", "not a URL");
    command
}

/// A control plane whose log is on a full disk.
struct Server(Child);

impl Server {
    fn start(folder: &Path) -> Self {
        let arguments =
            ["serve", "--exit-with-parent", "--api-port", "0", "--data-dir", folder.to_str().unwrap()];
        let mut command = russet(&arguments);
        command.env("RUSSET_LOG", "debug").stdin(Stdio::piped()).stdout(full_disk()).stderr(full_disk());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn full_disk() -> Stdio {
    File::options().write(true).open("/dev/full").unwrap().into()
}

fn closed_pipe() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

fn run(command: &mut Command, input: &str) -> Output {
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A verb that fails before it reads closes the pipe.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

/// Standard output of a verb that must succeed.
fn answer(arguments: &[&str], input: &str) -> String {
    let output = run(russet(arguments).stdout(Stdio::piped()), input);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {message}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn verbs_and_daemons_survive_output_that_goes_nowhere() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().to_str().unwrap();
    let mut server = Server::start(folder.path());
    let since = Instant::now();
    while !run(russet(&["get", "models", "--data-dir", at]).stdout(Stdio::null()), "").status.success() {
        assert_eq!(server.0.try_wait().unwrap(), None, "the control plane ended");
        assert!(since.elapsed() < TIMEOUT, "the control plane does not answer");
        std::thread::sleep(Duration::from_millis(50));
    }
    answer(&["apply", "--data-dir", at, "-f", "-"], &format!("{MODEL}---\n{NODE}---\n{SECRET}"));
    std::fs::create_dir_all(folder.path().join("logs")).unwrap();
    std::fs::write(folder.path().join("logs/serve.log"), "a line\n").unwrap();

    let verbs = [
        "--help",
        "--version",
        "get --help",
        "catalog search",
        "catalog show codestral-22b-4bit",
        "get russet -A",
        "get nodes",
        "get models -o json",
        "get models -o yaml",
        "describe model smoke",
        "describe node/studio",
        "explain smoke",
        "doctor",
        "key list",
        "approve",
        "credentials allow ghost",
        "fabric show",
        "plan -f -",
        "plan -f - -o json",
        "plan -f - -o yaml",
        "apply -f -",
        "cordon studio",
        "uncordon studio",
        "logs",
        "logs serve",
        "service install --print agent",
        "key create hidden",
        "token create",
        "token create --quiet",
    ];
    let local = ["--help", "--version", "catalog search", "catalog show", "service install", "get --help"];
    let waiting = Mutex::new(verbs.to_vec());
    let check_all = || {
        loop {
            let Some(verb) = waiting.lock().unwrap().pop() else { return };
            let mut arguments: Vec<&str> = verb.split(' ').collect();
            if !local.iter().any(|name| verb.starts_with(name)) {
                arguments.extend(["--data-dir", at]);
            }
            let input = if verb.contains("-f -") { MODEL } else { "" };
            let full = run(russet(&arguments).stdout(full_disk()), input);
            let message = String::from_utf8_lossy(&full.stderr).into_owned();
            assert_eq!(full.status.code(), Some(1), "{verb} on a full disk: {message}");
            assert!(
                message.contains("standard output cannot be written"),
                "{verb} on a full disk: {message}"
            );
            assert!(!message.contains("panicked"), "{verb}: {message}");

            let closed = run(russet(&arguments).stdout(closed_pipe()), input);
            let message = String::from_utf8_lossy(&closed.stderr).into_owned();
            if verb.starts_with("key create") {
                assert_eq!(closed.status.code(), Some(1), "{message}");
                assert!(message.contains("was deleted again"), "{message}");
            } else {
                assert_eq!(closed.status.code(), Some(CLOSED_PIPE), "{verb} in a closed pipe: {message}");
                assert!(!message.contains("error") && !message.contains("panicked"), "{verb}: {message}");
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(check_all);
        }
    });

    // What nobody saw is taken back.
    assert_eq!(answer(&["get", "accesskeys", "--data-dir", at], ""), "No resources found.\n");
    let secrets = answer(&["get", "secrets", "-n", "kube-system", "--data-dir", at], "");
    assert!(!secrets.contains("bootstrap-token"), "{secrets}");
    // Several resources in one word, and an object in two, as with kubectl.
    answer(&["key", "create", "laptop", "--data-dir", at], "");
    let both = answer(&["get", "accesskeys,models", "--data-dir", at], "");
    assert!(both.contains("accesskeys\n") && both.contains("laptop"), "{both}");
    assert_eq!(
        answer(&["delete", "accesskey", "laptop", "--data-dir", at], ""),
        "accesskey/laptop deleted\n"
    );
    // Its log went nowhere all the while.
    assert_eq!(server.0.try_wait().unwrap(), None, "the control plane ended");
}

#[test]
fn unusable_proxy_of_a_kubeconfig_is_named_without_login() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kubeconfig");
    let proxy = "apiVersion: v1\nkind: Config\ncurrent-context: a\n\
        contexts: [{name: a, context: {cluster: a, user: a}}]\nusers: [{name: a, user: {}}]\n\
        clusters: [{name: a, cluster: {server: \"http://127.0.0.1:9\", proxy-url: \"https://me:secret@proxy:1\"}}]\n";
    std::fs::write(&path, proxy).unwrap();
    let output =
        run(russet(&["get", "models", "--kubeconfig", path.to_str().unwrap()]).stdout(Stdio::null()), "");
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(
        message.contains("the proxy https://proxy:1") && message.contains("change it, or remove it"),
        "{message}"
    );
    assert!(!message.contains("secret"), "{message}");
}
