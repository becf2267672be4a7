//! A reader of pages: a home, a checkout and a shell of their own, and the programs that keep running, which end with
//! the reader.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use russet_tests::SMOKE;
use russet_tests::cluster::{program, repository};
use russet_tests::processes::tail;
use rustix::process::{Pid, Signal, kill_process};

use crate::blocks::Step;
use crate::rules::{self, Given};
use crate::shape;

/// Seconds that a command may take.
const MAX_SECONDS: &str = "120";
/// Time for a program that keeps running to be ready, and to end.
const MAX_SERVER_TIME: Duration = Duration::from_secs(60);

/// A reader in the middle of a page.
pub struct Reader {
    folder: tempfile::TempDir,
    servers: Vec<Server>,
    /// Number of executed commands and programs.
    pub executed: usize,
}

/// A program that keeps running.
struct Server {
    /// Its first two words.
    verb: String,
    process: Child,
}

/// How a command ended.
struct Outcome {
    code: i32,
    output: String,
}

impl Reader {
    /// A reader who opens a page.
    pub fn new(given: Given, kubectl: &Path, jq: &Path) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut reader = Self { folder, servers: Vec::new(), executed: 0 };
        for name in ["home", "tmp", "bin", "checkout/target", "gateway"] {
            std::fs::create_dir_all(reader.path(name))?;
        }
        // Commands of pages see an HTTP error as a failure, and hang no longer than a minute.
        std::fs::write(reader.path("home/.curlrc"), "silent\nshow-error\nfail-with-body\nmax-time = 60\n")?;
        symlink(kubectl, reader.path("bin/kubectl"))?;
        symlink(jq, reader.path("bin/jq"))?;
        for entry in std::fs::read_dir(repository())? {
            let name = entry?.file_name();
            if name != "target" {
                symlink(repository().join(&name), reader.path("checkout").join(&name))?;
            }
        }
        let programs = program("russet")?.parent().context("programs are in no folder")?.to_owned();
        symlink(&programs, reader.path("checkout/target/debug"))?;
        let pair = rcgen::generate_simple_self_signed(["localhost".to_owned()])?;
        std::fs::write(reader.path("cert.pem"), pair.cert.pem())?;
        std::fs::write(reader.path("key.pem"), pair.signing_key.serialize_pem())?;
        // In a folder that `russet up` may read.
        let model = reader.path("home/models/tiny-llama");
        std::fs::create_dir_all(&model)?;
        for entry in std::fs::read_dir(repository().join("engine/smoke/model"))? {
            let entry = entry?;
            std::fs::copy(entry.path(), model.join(entry.file_name()))?;
        }
        // The reader's own YAML, for `russet plan -f models/`.
        std::fs::create_dir(reader.path("checkout/models"))?;
        std::fs::write(reader.path("checkout/models/smoke.yaml"), SMOKE)?;
        std::fs::write(reader.path("checkout/nodes.yaml"), described_nodes()?)?;
        if given == Given::Cluster {
            // Not by its own path, which has a substitute where the checkout is below /tmp.
            reader.own("export PATH=$PWD/target/debug:$PATH")?;
            reader.own("russet up")?;
            reader.own("export KUBECONFIG=~/.russet/kubeconfig")?;
        }
        Ok(reader)
    }

    /// A command of the reader's own, not of a page.
    pub fn own(&mut self, text: &str) -> Result<()> {
        let executed = self.executed;
        self.command(&format!("{text}\n"), None).with_context(|| text.to_owned())?;
        self.executed = executed;
        Ok(())
    }

    /// A path of this reader.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Does one step, which must come out as the page says.
    pub fn execute(&mut self, step: &Step, next: Option<&Step>) -> Result<()> {
        match step {
            Step::Command { text, shown, .. } => self.command(text, shown.as_deref()),
            Step::Yaml { text, .. } => self.yaml(text, next),
            Step::Python { text, .. } => self.python(text),
        }
    }

    fn command(&mut self, text: &str, shown: Option<&str>) -> Result<()> {
        let written = rules::substitute(text, self);
        if let Some(arguments) = rules::server_arguments(text) {
            self.start(&written, arguments)?;
            self.executed += 1;
            return Ok(());
        }
        let outcome = self.shell_command(&written)?;
        let expected = rules::exit_code(text, shown.unwrap_or_default());
        ensure!(
            outcome.code == expected,
            "exit code {}, not {expected}, and this output:\n{}",
            outcome.code,
            outcome.output
        );
        if let Some(difference) = shown.and_then(|shown| shape::difference(shown, &outcome.output)) {
            bail!("{difference}; all of its output:\n{}", outcome.output);
        }
        answered(text, &outcome.output)?;
        self.executed += 1;
        Ok(())
    }

    /// Executes a text in the reader's shell: variables that it exports stay.
    fn shell_command(&self, text: &str) -> Result<Outcome> {
        let script = format!("{}{text}\nexport -p > {}\n", self.prologue(), self.path("state").display());
        self.run(Command::new("timeout").args(["--kill-after=5", MAX_SECONDS, "bash", "-c", &script]))
    }

    fn prologue(&self) -> String {
        let state = self.path("state");
        format!("set -eo pipefail\nif [ -f {0} ]; then . {0}; fi\n", state.display())
    }

    /// Runs with the reader's environment; standard output and standard error are one text, as on a terminal.
    fn run(&self, command: &mut Command) -> Result<Outcome> {
        let path = self.path("output");
        let file = std::fs::File::create(&path)?;
        self.environment(command).stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let status = command.status().with_context(|| format!("cannot run {command:?}"))?;
        let output = String::from_utf8_lossy(&std::fs::read(&path)?).into_owned();
        let code = status.code().with_context(|| format!("{status}:\n{output}"))?;
        ensure!(code != 124, "it did not end within {MAX_SECONDS} s, and printed:\n{output}");
        Ok(Outcome { code, output })
    }

    fn environment<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        let path = format!("{}:/usr/local/bin:/usr/bin:/bin", self.path("bin").display());
        command
            .current_dir(self.path("checkout"))
            .env_clear()
            .env("PATH", path)
            .env("HOME", self.path("home"))
            .env("TMPDIR", self.path("tmp"))
    }

    /// Starts a program that keeps running, instead of the one of its kind, and waits until it serves.
    fn start(&mut self, text: &str, arguments: &str) -> Result<()> {
        let command = text.split(" #").next().unwrap_or(text).trim();
        let verb: String = command.split_whitespace().take(2).collect::<Vec<_>>().join(" ");
        if let Some(at) = self.servers.iter().position(|server| server.verb == verb) {
            self.servers.remove(at).stop()?;
        }
        let log = self.path("tmp").join(format!("{}.log", verb.replace(' ', "-")));
        let errors = std::fs::File::create(&log)?;
        let script = format!("{}exec {command} {arguments}\n", self.prologue());
        let mut bash = Command::new("bash");
        self.environment(bash.args(["-c", &script]))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors);
        let mut process = bash.spawn().with_context(|| format!("cannot run {bash:?}"))?;
        let printed = lines_of(process.stdout.take().context("no standard output")?);
        self.servers.push(Server { verb: verb.clone(), process });
        let begin = Instant::now();
        let ready = match verb.as_str() {
            "russet up" => announced(&printed, begin),
            _ => Ok(()),
        };
        ready.and_then(|()| self.listens(command, begin)).with_context(|| {
            format!(
                "`{command}` does not serve after {:.0} s:\n{}",
                begin.elapsed().as_secs_f64(),
                tail(&log, 40)
            )
        })
    }

    /// Waits until every address of the command answers: on loopback that it is ready, elsewhere that it wants a key.
    fn listens(&self, command: &str, begin: Instant) -> Result<()> {
        for address in rules::server_addresses(command) {
            let (url, status) = match address.ip().is_loopback() {
                true => (format!("http://{address}/readyz"), "200"),
                false => (format!("https://127.0.0.1:{}/v1/models", address.port()), "401"),
            };
            loop {
                let mut curl = Command::new("curl");
                curl.args([
                    "-q",
                    "-s",
                    "-k",
                    "-o",
                    "/dev/null",
                    "-w",
                    "%{http_code}",
                    "--max-time",
                    "5",
                    &url,
                ]);
                let got = self.run(&mut curl)?.output;
                if got == status {
                    break;
                }
                ensure!(begin.elapsed() < MAX_SERVER_TIME, "{url} answers {got}, not {status}");
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        Ok(())
    }

    /// YAML documents: the file that the next command names and that is not there, and objects that the API server
    /// would accept. A fragment without `apiVersion` is neither.
    fn yaml(&mut self, text: &str, next: Option<&Step>) -> Result<()> {
        let text = rules::substitute(text, self);
        if !text.contains("apiVersion: ") {
            return Ok(());
        }
        let file = match next {
            Some(Step::Command { text, .. }) => missing_file(text, &self.path("checkout")),
            _ => None,
        };
        let file = file.unwrap_or_else(|| self.path("tmp/page.yaml"));
        std::fs::write(&file, &text)?;
        if text.contains("\nstatus:") {
            return self.described_cluster(&file);
        }
        let check = format!(
            "kubectl --kubeconfig ~/.russet/kubeconfig apply --dry-run=server -f {}\n",
            file.display()
        );
        let outcome = self.shell_command(&check)?;
        ensure!(outcome.code == 0, "the API server refuses these objects:\n{}", outcome.output);
        self.executed += 1;
        Ok(())
    }

    /// Objects with a status describe a cluster for `russet plan`: it reads them, and may place nothing there.
    fn described_cluster(&mut self, file: &Path) -> Result<()> {
        let outcome =
            self.shell_command(&format!("russet plan -f models/ --cluster {}\n", file.display()))?;
        ensure!(
            matches!(outcome.code, 0 | 3),
            "`russet plan` does not read these objects:\n{}",
            outcome.output
        );
        self.executed += 1;
        Ok(())
    }

    /// A program for the OpenAI SDK.
    fn python(&mut self, text: &str) -> Result<()> {
        let Some(python) = std::env::var_os("RUSSET_PYTHON") else {
            ensure!(std::env::var_os("CI").is_none(), "CI must set RUSSET_PYTHON; `cargo xtask oracle` does");
            println!(
                "  RUSSET_PYTHON is not set: a Python program was not run; `cargo xtask oracle` sets it"
            );
            return Ok(());
        };
        let outcome = self.run(
            Command::new("timeout")
                .args(["--kill-after=5", MAX_SECONDS])
                .arg(python)
                .args(["-c", &rules::substitute(text, self)]),
        )?;
        ensure!(outcome.code == 0, "exit code {}, and this output:\n{}", outcome.code, outcome.output);
        answered(text, &outcome.output)?;
        self.executed += 1;
        Ok(())
    }
}

/// InferenceNodes with the names of docs/plan/cluster.yaml, as they were before any agent reported.
fn described_nodes() -> Result<String> {
    let text = std::fs::read_to_string(repository().join("docs/plan/cluster.yaml"))?;
    let described = text.split("\n---\n").filter(|one| one.contains("kind: InferenceNode\n"));
    let names = described.filter_map(|one| one.lines().find_map(|line| line.strip_prefix("  name: ")));
    let header = "apiVersion: russet.dev/v1alpha1\nkind: InferenceNode\nspec: {}\n";
    let nodes: Vec<String> = names.map(|name| format!("{header}metadata: {{name: {name}}}\n")).collect();
    ensure!(!nodes.is_empty(), "docs/plan/cluster.yaml describes no InferenceNode");
    Ok(nodes.join("---\n"))
}

/// The text of a response: of a stream its deltas one after the other.
fn response(output: &str) -> String {
    let events: Vec<serde_json::Value> = output
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .filter_map(|event| serde_json::from_str(event).ok())
        .collect();
    let deltas = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
    match events.is_empty() {
        true => output.to_owned(),
        false => deltas.collect(),
    }
}

/// Checks the answer to a question whose answer is known.
fn answered(text: &str, output: &str) -> Result<()> {
    let output = response(output);
    if text.contains("json_schema") {
        // A schema makes the smoke model write what it never learnt: what holds is the schema.
        let content =
            serde_json::from_str::<serde_json::Value>(&output)?["choices"][0]["message"]["content"].take();
        let content: serde_json::Value =
            serde_json::from_str(content.as_str().context("the answer has no content")?)?;
        ensure!(content["answer"].is_number(), "the answer is not what its schema says: {content}");
        return Ok(());
    }
    for (question, answer) in rules::ANSWERS {
        if !text.contains(question) {
            continue;
        }
        // A sampled answer is another one now and then.
        ensure!(text.contains("temperature"), "{question} is not asked at temperature 0");
        ensure!(output.contains(answer), "the answer to {question} has no {answer}:\n{output}");
    }
    Ok(())
}

/// The argument of `-f` that names no file yet.
fn missing_file(command: &str, folder: &Path) -> Option<PathBuf> {
    let words: Vec<&str> = command.split_whitespace().collect();
    let at = words.iter().position(|word| *word == "-f")?;
    let path = folder.join(words.get(at + 1)?);
    (!path.exists()).then_some(path)
}

/// Waits until `russet up` has printed its addresses, as a reader does.
fn announced(printed: &Receiver<String>, begin: Instant) -> Result<()> {
    loop {
        match printed.recv_timeout(MAX_SERVER_TIME.saturating_sub(begin.elapsed())) {
            Ok(line) if line == "Russet is up." => return Ok(()),
            Ok(_) => {}
            Err(RecvTimeoutError::Timeout) => bail!("it did not print \"Russet is up.\""),
            Err(RecvTimeoutError::Disconnected) => bail!("it ended"),
        }
    }
}

/// The lines that a process prints; they are read until it ends, so that it never waits for a reader.
fn lines_of(output: std::process::ChildStdout) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    receiver
}

impl Server {
    /// Ctrl-C.
    fn stop(mut self) -> Result<()> {
        if let Some(pid) = Pid::from_raw(self.process.id() as i32) {
            kill_process(pid, Signal::INT)?;
        }
        let begin = Instant::now();
        while self.process.try_wait()?.is_none() {
            ensure!(begin.elapsed() < MAX_SERVER_TIME, "`{}` did not end after Ctrl-C", self.verb);
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

impl Drop for Reader {
    /// The programs end before their folder is deleted, the newest first.
    fn drop(&mut self) {
        while let Some(server) = self.servers.pop() {
            if let Err(error) = server.stop() {
                println!("  {error:#}");
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Only if Ctrl-C did not end it.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
