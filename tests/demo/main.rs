//! The program of `cargo xtask demo` once everything is built: two machines, the quickstart samples, one
//! prompt, and the tables that a user would look at. It does nothing that a user could not do by hand.

use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Parser;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use russet_tests::chat::{self, StreamEnd};
use russet_tests::cluster::{TestCluster, condition, repository};
use serde_json::json;
use tempfile::TempDir;

/// Run one model on two simulated machines and answer a prompt.
#[derive(Parser)]
struct Arguments {
    /// Exit after the answer.
    #[arg(long)]
    once: bool,
    /// The model.
    #[arg(long, value_enum, default_value = "smoke")]
    model: DemoModel,
    /// The prompt; each model has one of its own.
    #[arg(long)]
    question: Option<String>,
}

/// A model that the demo's hub has.
#[derive(Clone, Copy, clap::ValueEnum)]
enum DemoModel {
    /// The smoke model of this repository, which knows sums.
    Smoke,
    /// SmolLM2-135M-Instruct in GGUF, from a wheel of PyPI.
    Smollm2,
}

impl DemoModel {
    fn name(self) -> &'static str {
        match self {
            Self::Smoke => "smoke",
            Self::Smollm2 => "smollm2",
        }
    }

    fn question(self) -> &'static str {
        match self {
            Self::Smoke => "What is 17 + 25?",
            Self::Smollm2 => "What is the capital of France?",
        }
    }

    /// The folder that the hub serves, and what it is deleted with.
    fn folder(self) -> Result<(PathBuf, Option<TempDir>)> {
        match self {
            Self::Smoke => Ok((repository().join("engine/smoke/model"), None)),
            Self::Smollm2 => {
                let file = std::env::var_os("RUSSET_SMOLLM2").map(PathBuf::from);
                let file =
                    file.context("RUSSET_SMOLLM2 is not set; `cargo xtask demo --model smollm2` sets it")?;
                let folder = tempfile::tempdir()?;
                let name = file.file_name().context("RUSSET_SMOLLM2 names no file")?;
                std::os::unix::fs::symlink(&file, folder.path().join(name))?;
                Ok((folder.path().to_owned(), Some(folder)))
            }
        }
    }

    /// The quickstart's samples with this model in place of the smoke model.
    fn samples(self) -> Result<(PathBuf, Option<TempDir>)> {
        let samples = repository().join("manifests/samples/quickstart");
        if let Self::Smoke = self {
            return Ok((samples, None));
        }
        let folder = tempfile::tempdir()?;
        for file in ["model.yaml", "deployment.yaml", "kustomization.yaml"] {
            let text = std::fs::read_to_string(samples.join(file)).with_context(|| format!("read {file}"))?;
            let lines = text.lines().filter(|line| !line.starts_with('#'));
            let text = lines.map(|line| line.replace("smoke", self.name()) + "\n").collect::<String>();
            std::fs::write(folder.path().join(file), text)?;
        }
        Ok((folder.path().to_owned(), Some(folder)))
    }
}

#[tokio::main]
async fn main() -> std::process::ExitCode {
    let _ = rustls::crypto::ring::default_provider().install_default();
    match run(Arguments::parse()).await {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nThe demo failed: {error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}

async fn run(arguments: Arguments) -> Result<()> {
    let started = std::time::Instant::now();
    let (model, _kept) = arguments.model.folder()?;
    let mut say = |text: &str| println!("▸ {text}");
    let name = format!("russet/{}", arguments.model.name());
    let mut cluster = TestCluster::start(&[(&name, &model)], &mut say).await?;
    let outcome = tokio::select! {
        outcome = show(&mut cluster, &arguments, started) => outcome,
        _ = tokio::signal::ctrl_c() => Ok(()),
    };
    println!("▸ stopping");
    let stopped = cluster.stop().await;
    outcome.and(stopped)
}

async fn show(cluster: &mut TestCluster, arguments: &Arguments, started: std::time::Instant) -> Result<()> {
    let model = arguments.model.name();
    let (samples, _kept) = arguments.model.samples()?;
    let shown = samples.strip_prefix(repository()).unwrap_or(&samples);
    println!("▸ russet apply -f {}", shown.display());
    print!("{}", cluster.russet(&["apply", "-f", &samples.display().to_string()]).await?);
    wait_with_bars(cluster, model).await?;

    println!("▸ the tables");
    for what in ["inferencenodes", "models", "modelcopies", "modeldeployments", "shardgroups", "shards"] {
        println!("  russet get {what}");
        for line in cluster.russet(&["get", what]).await?.lines() {
            println!("    {line}");
        }
    }

    println!("▸ POST {}/chat/completions", cluster.base_url());
    let question = arguments.question.as_deref().unwrap_or(arguments.model.question());
    println!("  {:7}  {question}", "you");
    print!("  {model:7}  ");
    let body = chat::question(model, question, json!({"max_tokens": 200}));
    let mut answer = chat::ask(&cluster.base_url(), &body).await.context("the question was not taken")?;
    let end = loop {
        match answer.piece().await {
            Ok(Some(text)) => {
                print!("{text}");
                std::io::stdout().flush()?;
            }
            Ok(None) => {}
            Err(end) => break end,
        }
    };
    println!();
    match &end {
        StreamEnd::Finished(reason) => println!("  ({} pieces, finish reason {reason})", answer.pieces),
        other => bail!("the answer ended with {other:?} after \"{}\"", answer.text),
    }

    println!("\n▸ ready {:.1} s after the start", started.elapsed().as_secs_f64());
    println!("  API      https://127.0.0.1:{}", cluster.api_port);
    println!("           export KUBECONFIG={}", cluster.kubeconfig().display());
    println!("  Gateway  {}   (OpenAI's API, any key)", cluster.base_url());
    println!("  Metrics  http://127.0.0.1:{}/metrics (gateway)", cluster.gateway_port);
    for (url, _) in cluster.plane()?.metrics()? {
        println!("           {url}/metrics (control plane)");
    }
    for line in metrics_addresses(cluster).await? {
        println!("           {line}");
    }
    if arguments.once {
        return Ok(());
    }
    println!("  Ctrl-C stops everything.");
    std::future::pending::<()>().await;
    Ok(())
}

/// Progress bars for copies and loading, until the deployment is Ready.
async fn wait_with_bars(cluster: &mut TestCluster, model: &str) -> Result<()> {
    let bars = MultiProgress::new();
    let mut known: std::collections::BTreeMap<String, ProgressBar> = std::collections::BTreeMap::new();
    let style = ProgressStyle::with_template("  {prefix:34} [{bar:28}] {bytes:>10}/{total_bytes:<10} {msg}")?
        .progress_chars("━━ ");
    let mut last = String::new();
    let result = cluster
        .until(&format!("the ModelDeployment {model} is Ready"), async |cluster| {
            let copies = cluster.get("modelcopies").await?;
            for copy in copies["items"].as_array().into_iter().flatten() {
                if copy["spec"]["want"] == "Files" {
                    let node = copy["spec"]["nodeName"].as_str().unwrap_or("?");
                    advance(
                        &bars,
                        &mut known,
                        &style,
                        &format!("copy to {node}"),
                        &copy["status"]["bytesDone"],
                        &copy["status"]["bytesTotal"],
                        reason(copy),
                    );
                }
            }
            let shards = cluster.get("shards").await?;
            for shard in shards["items"].as_array().into_iter().flatten() {
                let name = format!(
                    "load rank {} on {}",
                    shard["spec"]["rank"],
                    shard["spec"]["nodeName"].as_str().unwrap_or("?")
                );
                advance(
                    &bars,
                    &mut known,
                    &style,
                    &name,
                    &shard["status"]["loadedBytes"],
                    &shard["status"]["totalBytes"],
                    reason(shard),
                );
            }
            let deployment = cluster.get(&format!("modeldeployments {model}")).await?;
            let ready = condition(&deployment, "Ready");
            let message = ready.and_then(|ready| ready["message"].as_str()).unwrap_or("").to_owned();
            if message != last && !message.is_empty() {
                let line = format!("  · {message}");
                // Without a terminal there are no bars, and their lines would not be shown.
                if bars.is_hidden() {
                    println!("{line}")
                } else {
                    bars.println(line)?
                }
                last = message;
            }
            if condition(&deployment, "Stalled").is_some_and(|stalled| stalled["status"] == "True") {
                bail!("the deployment cannot become Ready: {last}");
            }
            Ok(ready.is_some_and(|ready| ready["status"] == "True"))
        })
        .await;
    for bar in known.values() {
        bar.tick();
        bar.abandon();
    }
    result
}

fn reason(object: &serde_json::Value) -> &str {
    condition(object, "Ready").and_then(|ready| ready["reason"].as_str()).unwrap_or("")
}

fn advance(
    bars: &MultiProgress,
    known: &mut std::collections::BTreeMap<String, ProgressBar>,
    style: &ProgressStyle,
    name: &str,
    done: &serde_json::Value,
    total: &serde_json::Value,
    message: &str,
) {
    let total = total.as_u64().unwrap_or(0);
    if total == 0 {
        return;
    }
    let bar = known.entry(name.to_owned()).or_insert_with(|| {
        let bar = bars.add(ProgressBar::new(total).with_style(style.clone()).with_prefix(name.to_owned()));
        bar.enable_steady_tick(Duration::from_millis(200));
        bar
    });
    bar.set_length(total);
    bar.set_position(done.as_u64().unwrap_or(0));
    bar.set_message(message.to_owned());
}

async fn metrics_addresses(cluster: &TestCluster) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    for (what, name) in [("inferencenodes", "agent"), ("shards", "engine")] {
        let list = cluster.get(what).await?;
        for object in list["items"].as_array().into_iter().flatten() {
            if let Some(address) = object["status"]["metricsAddress"].as_str() {
                let node = object["spec"]["nodeName"]
                    .as_str()
                    .or(object["metadata"]["name"].as_str())
                    .unwrap_or("?");
                lines.push(format!("http://{address}/metrics ({name}; {node}'s own loopback)"));
            }
        }
    }
    Ok(lines)
}
