//! Hostile inputs against a running machine: each must be refused or answered, by a process that grows by less than a
//! bound and goes on, while another namespace is answered. `cargo xtask proof hostile` runs all of it and writes the table.

mod floods;
mod inputs;
mod memory;
mod repositories;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use reqwest::Method;
use russet_tests::chat;
use russet_tests::control_plane::PlaneProcess;
use russet_tests::tenants::{HOSTILE, MachineOptions, OTHER, RUSSET, TenantMachine};
use serde_json::json;

use inputs::{Delivery, HostileInput, Subject};

/// A process may grow by so much, in bytes, for what it was sent.
const MAX_GROWTH: u64 = 64 << 20;
/// An agent that reads headers may hold so much, in bytes.
const MAX_AGENT: u64 = 500 << 20;
/// Descriptors that each process may open: few, so that floods reach the bounds that follow from them.
const DESCRIPTORS: usize = 1024;
/// Another namespace shall be answered within this.
const GOAL: Duration = Duration::from_secs(1);
/// Time for a condition to appear.
const CONDITION_TIMEOUT: Duration = Duration::from_secs(90);
/// Interval between two requests of the other namespace.
const PROBE_INTERVAL: Duration = Duration::from_millis(20);

fn main() -> std::process::ExitCode {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let outcome =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(anyhow::Error::from);
    match outcome.and_then(|runtime| runtime.block_on(run())) {
        Ok(true) => std::process::ExitCode::SUCCESS,
        Ok(false) => std::process::ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}

/// Runs the rows whose names contain the argument; whether all passed.
async fn run() -> Result<bool> {
    let only = std::env::args().nth(1).unwrap_or_default();
    let folder = tempfile::Builder::new().prefix("russet-hostile-").tempdir()?;
    let models = folder.path().join("hub");
    std::fs::create_dir(&models)?;
    let repositories = repositories::write(&models)?;
    let served: Vec<_> = repositories.iter().map(|(name, path)| (*name, path.as_path())).collect();
    let data = folder.path().join("russet");
    std::fs::create_dir(&data)?;
    let options =
        MachineOptions { repositories: &served, descriptors: DESCRIPTORS, ..MachineOptions::default() };
    let fixture = Arc::new(TenantMachine::start(&data, &options).await?);
    let (mut passed, mut failed) = (0, 0);
    for input in inputs::table().iter().filter(|input| input.name.contains(&only)) {
        let row = row(&fixture, input).await;
        match row {
            Ok(row) => {
                println!("{row}");
                passed += 1;
            }
            Err(error) => {
                println!("hostile | {} | {} | failed: {error:#} | | | NO", input.name, input.subject.name());
                println!("{}", fixture.logs());
                failed += 1;
            }
        }
    }
    Arc::into_inner(fixture).context("a probe still runs")?.stop().await?;
    let word = if failed == 0 { "ok" } else { "FAILED" };
    println!("test result: {word}. {passed} passed; {failed} failed; 0 ignored");
    Ok(failed == 0 && passed > 0)
}

/// Sends an input and measures; its line of the table.
async fn row(fixture: &Arc<TenantMachine>, input: &HostileInput) -> Result<String> {
    let pid = pid(fixture, input.subject).await?;
    memory::reset_peak(pid)?;
    let before = memory::resident(pid)?;
    let probe = Probe::start(fixture.clone(), input.subject);
    let answer = deliver(fixture, &input.delivery).await;
    let slowest = probe.stop().await?;
    let answer = answer?;
    let peak = memory::peak(pid).with_context(|| format!("the {} ended", input.subject.name()))?;
    ensure!(self::pid(fixture, input.subject).await? == pid, "the {} was ended", input.subject.name());
    let growth = peak.saturating_sub(before);
    match input.subject {
        Subject::Agent => ensure!(peak < MAX_AGENT, "the agent held {} MiB", peak >> 20),
        _ => ensure!(growth < MAX_GROWTH, "it grew by {} MiB; the answer was {answer}", growth >> 20),
    }
    let met = if slowest <= GOAL { "yes" } else { "NO" };
    Ok(format!(
        "hostile | {} | {} | {answer} | {} | {} | {met}",
        input.name,
        input.subject.name(),
        growth >> 20,
        slowest.as_millis()
    ))
}

async fn pid(fixture: &TenantMachine, subject: Subject) -> Result<i32> {
    match subject {
        Subject::Serve => fixture.pid(PlaneProcess::Serve),
        Subject::Gateway => fixture.pid(PlaneProcess::Gateway),
        Subject::Agent => fixture.pid(PlaneProcess::Agent),
        Subject::Engine => fixture.engine().await,
    }
}

/// Sends an input; how it was answered, in few words.
async fn deliver(fixture: &Arc<TenantMachine>, delivery: &Delivery) -> Result<String> {
    match delivery {
        Delivery::Api { method, path, media, bodies, accepted } => {
            let mut codes = Vec::new();
            for body in bodies() {
                let (code, answer) = fixture.send(Some(HOSTILE), method.clone(), path, media, body).await?;
                let text = String::from_utf8_lossy(&answer);
                ensure!(accepted.contains(&code.as_u16()), "{code}: {text:.300}");
                codes.push(code.as_u16());
            }
            Ok(shortened(codes))
        }
        Delivery::Flood { flood, count } => floods::send(fixture, *flood, *count).await,
        Delivery::MadeUpMethods { count } => made_up_methods(fixture, *count).await,
        Delivery::Chat { bodies, accepted } => {
            let client = chat::client()?;
            let url = format!("{}/v1/chat/completions", fixture.gateway());
            let requests = bodies()
                .into_iter()
                .map(|body| client.post(&url).header("Content-Type", "application/json").body(body).send());
            let mut codes = Vec::new();
            for answer in futures::future::join_all(requests).await {
                let answer = answer?;
                let code = answer.status().as_u16();
                let text = answer.text().await?;
                ensure!(accepted.contains(&code), "{code}: {text:.300}");
                codes.push(code);
            }
            Ok(shortened(codes))
        }
        Delivery::Model { repository, words } => model(fixture, repository, words).await,
    }
}

/// The codes, each once.
fn shortened(mut codes: Vec<u16>) -> String {
    codes.sort_unstable();
    codes.dedup();
    codes.iter().map(u16::to_string).collect::<Vec<_>>().join(", ")
}

async fn made_up_methods(fixture: &TenantMachine, count: usize) -> Result<String> {
    let series = async || -> Result<usize> {
        let (_, metrics) = fixture.send(None, Method::GET, "/metrics", "text/plain", Vec::new()).await?;
        Ok(String::from_utf8_lossy(&metrics).lines().count())
    };
    let method = |number: usize| Method::from_bytes(format!("MADEUP{number}").as_bytes());
    // The first of them makes the series of `other`.
    fixture.send(Some(HOSTILE), method(count)?, "/x", "text/plain", Vec::new()).await?;
    let before = series().await?;
    let mut codes = Vec::new();
    for number in 0..count {
        let (code, _) = fixture.send(Some(HOSTILE), method(number)?, "/x", "text/plain", Vec::new()).await?;
        codes.push(code.as_u16());
    }
    let after = series().await?;
    ensure!(after < before + 20, "{count} methods made {} lines of metrics", after - before);
    Ok(shortened(codes))
}

/// Creates a Model and its deployment, and waits until a condition of either has all words.
async fn model(fixture: &TenantMachine, repository: &str, words: &[&str]) -> Result<String> {
    let name = repository.rsplit('/').next().context("a repository has a name")?;
    let place = format!("{RUSSET}/namespaces/{HOSTILE}");
    let api = "russet.dev/v1alpha1";
    let (model, deployment) = (format!("{place}/models/{name}"), format!("{place}/modeldeployments/{name}"));
    let uri = format!("hf://{repository}");
    fixture
        .apply(&model, json!({"apiVersion": api, "kind": "Model", "metadata": {"name": name}, "spec": {"source": {"uri": uri}}}))
        .await?;
    fixture
        .apply(&deployment, json!({"apiVersion": api, "kind": "ModelDeployment", "metadata": {"name": name}, "spec": {"modelRef": {"name": name}}}))
        .await?;
    let begin = Instant::now();
    let found = loop {
        let mut conditions = Vec::new();
        for path in [&model, &deployment] {
            let object = fixture.get(path).await?;
            conditions.extend(object["status"]["conditions"].as_array().cloned().unwrap_or_default());
        }
        let says = |condition: &&serde_json::Value| {
            let text = condition.to_string();
            condition["status"] == "False" && words.iter().all(|word| text.contains(word))
        };
        if let Some(condition) = conditions.iter().find(says) {
            break condition["reason"].as_str().unwrap_or_default().to_owned();
        }
        if begin.elapsed() > CONDITION_TIMEOUT {
            bail!("no condition says {words:?}: {conditions:?}");
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    for path in [&deployment, &model] {
        fixture.send(None, Method::DELETE, path, "application/json", Vec::new()).await?;
    }
    Ok(found)
}

/// Requests of the other namespace, one after the other, while an input is sent.
struct Probe {
    ended: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<Result<Duration>>,
}

impl Probe {
    fn start(fixture: Arc<TenantMachine>, subject: Subject) -> Self {
        let ended = Arc::new(AtomicBool::new(false));
        let over = ended.clone();
        let task = tokio::spawn(async move {
            let mut slowest = Duration::ZERO;
            let path = format!("/api/v1/namespaces/{OTHER}/configmaps/plain");
            loop {
                // At least one, whatever was quicker.
                let last = over.load(Ordering::SeqCst);
                let begin = Instant::now();
                let (code, _) =
                    fixture.send(Some(OTHER), Method::GET, &path, "application/json", Vec::new()).await?;
                ensure!(code.is_success(), "the other namespace was answered with {code}");
                if matches!(subject, Subject::Gateway | Subject::Engine) {
                    let body = chat::question("other/smoke", "hi", json!({"stream": false, "max_tokens": 1}));
                    let url = format!("{}/v1/chat/completions", fixture.gateway());
                    let answer = chat::client()?.post(url).json(&body).send().await?;
                    ensure!(
                        answer.status().is_success(),
                        "the other chat was answered with {}",
                        answer.status()
                    );
                }
                slowest = slowest.max(begin.elapsed());
                if last {
                    return Ok(slowest);
                }
                tokio::time::sleep(PROBE_INTERVAL).await;
            }
        });
        Self { ended, task }
    }

    /// The slowest of its requests.
    async fn stop(self) -> Result<Duration> {
        self.ended.store(true, Ordering::SeqCst);
        self.task.await?
    }
}
