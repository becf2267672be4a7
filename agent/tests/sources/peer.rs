//! Programs of others on loopback: finds one, and runs it for the duration of a test.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Path of the program that a variable names; prints a message if there is none.
pub fn program(variable: &str) -> Option<PathBuf> {
    let program = std::env::var_os(variable).map(PathBuf::from);
    if program.is_none() {
        assert!(std::env::var_os("RUSSET_ORACLES").is_none(), "{variable} names no program");
        println!("skipped: {variable} names no program; `cargo xtask oracle sources` fetches one");
    }
    program
}

/// A running server program.
pub struct SourceServer {
    /// Its URL.
    pub url: String,
    child: Child,
}

impl SourceServer {
    /// Starts it at a free port, and returns once it answers requests.
    pub async fn start(command: impl FnOnce(u16) -> Command) -> Self {
        rustls::crypto::ring::default_provider().install_default().ok();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = command(port);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let mut peer = Self { url: format!("http://127.0.0.1:{port}"), child };
        let answers = async {
            while reqwest::get(&peer.url).await.is_err() {
                assert!(peer.child.try_wait().unwrap().is_none(), "{command:?} ended at once");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let answered = tokio::time::timeout(Duration::from_secs(120), answers).await;
        assert!(answered.is_ok(), "{command:?} does not answer");
        peer
    }
}

impl Drop for SourceServer {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// A command that runs a script.
pub fn script(interpreter: &Path, script: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(interpreter);
    command.args(["-c", script]).args(arguments).env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// Output of a script.
pub fn python(interpreter: &Path, text: &str, arguments: &[&str]) -> String {
    run(&mut script(interpreter, text, arguments))
}

/// Output of a program that succeeds.
pub fn run(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{} ended with {}: {said}{}",
        command.get_program().display(),
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    said
}
