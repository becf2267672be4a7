//! A machine with `russet up` and scripted models, as clients see it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use russet_tests::chat;
use russet_tests::cluster::program;
use russet_tests::control_plane::embedded::Embedded;
use russet_tests::processes::tail;
use serde_json::Value;
use tokio::process::Command;

/// Where `russet up` serves by itself; the test has a network of its own.
pub const GATEWAY: &str = "http://127.0.0.1:52415";
/// Time for `russet up` to serve.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for a verb of `russet`, of which one waits until a model serves.
const VERB_TIMEOUT: Duration = Duration::from_secs(300);
/// More than any prompt of an agent here.
const CONTEXT_TOKENS: u32 = 131_072;

/// The machine. It ends with its input, when it is dropped.
pub struct Machine {
    folder: tempfile::TempDir,
    russet: PathBuf,
    up: Embedded,
    /// Models that several clients have.
    shared: BTreeSet<String>,
}

/// Tokens that the gateway counted for a model.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenCounts {
    /// Of prompts.
    pub prompt: u64,
    /// Those of them that engines had cached.
    pub cached: u64,
}

/// A request that ended.
#[derive(Clone, Debug)]
pub struct EndedRequest {
    /// Its unique id.
    pub id: String,
    /// The model that its client named.
    pub model: String,
}

impl Machine {
    /// Starts it.
    pub async fn start() -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("russet-clients-").tempdir()?;
        let russet = program("russet")?;
        let log = std::fs::File::create(folder.path().join("up.log"))?;
        let mut command = Command::new(&russet);
        let home = folder.path().join("home");
        std::fs::create_dir_all(&home)?;
        command.env("HOME", home).env_remove("KUBECONFIG").stdin(Stdio::piped()).kill_on_drop(true);
        let arguments = ["--node-name", "node-a", "--address", "127.0.0.1", "--allow-file-root"];
        let mut arguments: Vec<String> = arguments.map(str::to_owned).into();
        arguments.push(folder.path().join("models").display().to_string());
        let up = Embedded::start(command, &folder.path().join("up"), log, &arguments)?;
        let mut machine = Self { folder, russet, up, shared: BTreeSet::new() };
        let begin = Instant::now();
        while !machine.is_ready().await {
            machine.up.check().with_context(|| machine.log())?;
            ensure!(begin.elapsed() < START_TIMEOUT, "russet up does not serve:\n{}", machine.log());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(machine)
    }

    async fn is_ready(&self) -> bool {
        let Ok(client) = chat::client() else { return false };
        let sent = client.get(format!("{GATEWAY}/readyz")).send().await;
        self.up.kubeconfig().exists() && sent.is_ok_and(|response| response.status().is_success())
    }

    fn log(&self) -> String {
        tail(&self.folder.path().join("up.log"), 30)
    }

    /// A new empty folder.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.folder.path().join(name);
        if folder.exists() {
            std::fs::remove_dir_all(&folder)?;
        }
        std::fs::create_dir_all(&folder)?;
        Ok(folder)
    }

    /// `russet` with a home; what it printed.
    pub async fn russet(&self, home: &Path, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(&self.russet);
        command.args(arguments).env("KUBECONFIG", self.up.kubeconfig()).env("HOME", home);
        let output = bounded(&mut command, VERB_TIMEOUT).await?;
        let text = format!("{}{}", output.stdout, output.stderr);
        ensure!(output.code == Some(0), "russet {}: {text}", arguments.join(" "));
        Ok(text)
    }

    /// Deploys a model that answers by a script, and waits until it serves.
    pub async fn deploy(&self, name: &str, script: &Value) -> Result<()> {
        let [python, vocabularies] = ["RUSSET_PYTHON", "RUSSET_VOCABULARIES"].map(std::env::var_os);
        let python = python.context("RUSSET_PYTHON is not set; `cargo xtask oracle clients` sets it")?;
        let vocabularies = vocabularies.context("RUSSET_VOCABULARIES is not set")?;
        let (model, file) = (self.folder.path().join("models").join(name), self.folder("script")?);
        std::fs::write(file.join("script.json"), script.to_string())?;
        let mut make = Command::new(python);
        make.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("clients/scripted.py"))
            .arg(Path::new(&vocabularies).join("ggml-vocab-gpt-2.gguf"))
            .arg(file.join("script.json"))
            .arg(&model);
        let output = bounded(&mut make, VERB_TIMEOUT).await?;
        ensure!(output.code == Some(0), "the model of {name} was not made: {}", output.stderr);
        let objects = format!(
            "apiVersion: russet.dev/v1alpha1\nkind: Model\nmetadata: {{name: {name}}}\n\
             spec: {{source: {{uri: 'file://{}'}}}}\n---\n\
             apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {{name: {name}}}\nspec:\n  \
             modelRef: {{name: {name}}}\n  \
             sharding: {{mode: Single, kv: {{contextTokens: {CONTEXT_TOKENS}, maxSequences: 2}}}}\n",
            model.display()
        );
        let path = file.join("objects.yaml");
        std::fs::write(&path, objects)?;
        let home = self.folder.path();
        self.russet(home, &["apply", "-f", &path.display().to_string()]).await?;
        let deployment = format!("modeldeployments/{name}");
        if let Err(error) = self.russet(home, &["wait", &deployment, "--timeout-seconds", "200"]).await {
            let why = self.russet(home, &["explain", &format!("modeldeployment/{name}")]).await;
            bail!("{error:#}\n{}", why.unwrap_or_else(|error| format!("{error:#}")));
        }
        Ok(())
    }

    /// The same for a model of several clients, which stays.
    pub async fn deploy_once(&mut self, name: &str, script: &Value) -> Result<()> {
        if !self.shared.contains(name) {
            self.deploy(name, script).await?;
            self.shared.insert(name.to_owned());
        }
        Ok(())
    }

    /// Deletes it, so that the next one has the memory and the cores.
    pub async fn delete(&self, name: &str) -> Result<()> {
        for kind in ["modeldeployments", "models"] {
            self.russet(self.folder.path(), &["delete", &format!("{kind}/{name}")]).await?;
        }
        Ok(())
    }

    /// Applies objects.
    pub async fn apply(&self, objects: &str) -> Result<()> {
        let path = self.folder("objects")?.join("objects.yaml");
        std::fs::write(&path, objects)?;
        self.russet(self.folder.path(), &["apply", "-f", &path.display().to_string()]).await.map(drop)
    }

    /// Deletes an object.
    pub async fn delete_object(&self, name: &str) -> Result<()> {
        self.russet(self.folder.path(), &["delete", name]).await.map(drop)
    }

    /// Unique ids of the requests that ended, in their order, each with the model that its client named: from the audit log.
    pub fn ended_requests(&self) -> Result<Vec<EndedRequest>> {
        let folder = self.folder.path().join("up/gateway/audit");
        let mut files: Vec<PathBuf> =
            std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
        files.retain(|file| file.extension().is_some_and(|extension| extension == "log"));
        files.sort();
        let mut ended = Vec::new();
        for file in files {
            let text = std::fs::read_to_string(file)?;
            // The last line may be half written.
            for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
                let entry: Value = serde_json::from_str(line.split('\t').next().unwrap_or_default())?;
                if let (Some("completed"), Some(id), Some(model)) =
                    (entry["event"].as_str(), entry["request"].as_str(), entry["model"].as_str())
                {
                    ended.push(EndedRequest { id: id.to_owned(), model: model.to_owned() });
                }
            }
        }
        Ok(ended)
    }

    /// What the gateway says of one of its last requests.
    pub async fn why(&self, id: &str) -> Result<Value> {
        let sent = chat::client()?.get(format!("{GATEWAY}/requests/{id}/why")).send().await?;
        Ok(sent.error_for_status()?.json().await?)
    }

    /// What the gateway counted so far for a model.
    pub async fn tokens(&self, model: &str) -> Result<TokenCounts> {
        let text = chat::client()?.get(format!("{GATEWAY}/metrics")).send().await?.text().await?;
        let label = format!("model_name=\"{model}\"");
        let count = |metric: &str| {
            let is_one = |line: &&str| line.starts_with(metric) && line.contains(&label);
            let numbers = text.lines().filter(is_one).filter_map(|line| line.rsplit(' ').next());
            numbers.filter_map(|number| number.parse::<f64>().ok()).sum::<f64>() as u64
        };
        Ok(TokenCounts {
            prompt: count("russet_gateway_prompt_tokens_total{"),
            cached: count("russet_gateway_cached_tokens_total{"),
        })
    }

    /// Stops it as Ctrl-C does.
    pub async fn stop(self) -> Result<()> {
        let Self { folder, up, .. } = self;
        up.stop().await?;
        drop(folder);
        Ok(())
    }
}

/// How a program ended.
#[derive(Debug)]
pub struct ProgramOutput {
    /// `None` where a signal ended it.
    pub code: Option<i32>,
    /// What it wrote to standard output.
    pub stdout: String,
    /// What it wrote to standard error.
    pub stderr: String,
}

/// Runs a program without input; one that does not end in time is killed, with all that it started.
pub async fn bounded(command: &mut Command, timeout: Duration) -> Result<ProgramOutput> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.process_group(0).kill_on_drop(true);
    let child = command.spawn().with_context(|| format!("cannot run {command:?}"))?;
    let group = child.id().and_then(|id| rustix::process::Pid::from_raw(id as i32));
    let ended = tokio::time::timeout(timeout, child.wait_with_output()).await;
    // What it started may go on without it.
    if let Some(group) = group {
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
    let output = ended.map_err(|_| anyhow::anyhow!("it did not end within {} s", timeout.as_secs()))??;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(ProgramOutput {
        code: output.status.code(),
        stdout: text(&output.stdout),
        stderr: text(&output.stderr),
    })
}

/// The environment of a client: a home, and no way to a proxy, a key or a setting of the person who runs the test.
pub fn environment<'a>(
    command: &'a mut Command,
    home: &Path,
    more: &BTreeMap<&str, &str>,
) -> &'a mut Command {
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    command
        .env_clear()
        .env("PATH", path)
        .env("HOME", home)
        .env("NO_PROXY", "*")
        .env("LANG", "C.UTF-8")
        .envs(more)
}
