//! The choice of a replica: agents with a common beginning over replicas that keep what they read. Once where a request is
//! expected to take the least time, once where the fewest requests are, in turns.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use russet_gateway::dispatch::{DispatchLimits, ReplicaChoice};
use russet_gateway::keys::Keyring;
use russet_gateway::listen::{HttpListener, ListenerLimits};
use russet_gateway::server::GatewayServer;
use russet_rpc::tls::TlsFiles;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::figure;
use crate::measure::median;
use crate::processes::identities;
use crate::reading_engine::{self, SPEED};
use crate::roles::{listener, table_of};

const ROUNDS: u64 = 3;
const REPLICAS: usize = 3;
const AGENTS: usize = 8;
/// An agent reads files and runs commands, one a turn.
const TURNS: usize = 24;
/// Bytes that all agents begin with: the text of the system and the tools of one client.
const SHARED_BYTES: usize = 32_000;
/// Bytes of an agent's own: its project.
const OWN_BYTES: usize = 8_000;

/// Figures of a trace.
struct TraceResult {
    /// Of all turns, sorted, in seconds of a machine of usual speed.
    first_tokens: Vec<f64>,
    cached_tokens: f64,
    prompt_tokens: f64,
}

/// Measures, and prints the figures.
pub async fn run() {
    let folder = tempfile::tempdir().unwrap();
    let (engine_files, gateway_files) = identities(folder.path());
    for (gateways, what) in [(1, ""), (2, ", by turns over two gateways")] {
        let mut rounds: [Vec<TraceResult>; 2] = Default::default();
        for seed in 0..ROUNDS {
            let choices = [ReplicaChoice::ExpectedTime, ReplicaChoice::LeastRequests];
            for (choice, rounds) in choices.into_iter().zip(&mut rounds) {
                rounds.push(trace(&engine_files, &gateway_files, gateways, choice, seed).await);
            }
        }
        let medians =
            |of: fn(&TraceResult) -> f64| rounds.each_ref().map(|all| median(all.iter().map(of).collect()));
        let [ours, peer] = medians(|result| quantile(result, 0.95));
        figure(&format!("time to the first token, p95{what}")).peer(ours, peer, "s").at_most(0.5);
        let [ours, peer] = medians(|result| quantile(result, 0.5));
        figure(&format!("time to the first token, p50{what}")).beside(ours, peer, "s").no_goal();
        let [ours, peer] = medians(|result| 100.0 * result.cached_tokens / result.prompt_tokens);
        figure(&format!("tokens of prompts that were cached{what}")).beside(ours, peer, "%").no_goal();
    }
}

fn quantile(result: &TraceResult, quantile: f64) -> f64 {
    let last = result.first_tokens.len() - 1;
    result.first_tokens[(last as f64 * quantile).round() as usize]
}

/// Runs the agents against new engines and gateways.
async fn trace(
    engine_files: &TlsFiles,
    gateway_files: &TlsFiles,
    gateways: usize,
    choice: ReplicaChoice,
    seed: u64,
) -> TraceResult {
    // Everything of a trace ends with this set.
    let mut tasks = tokio::task::JoinSet::new();
    let mut engines = Vec::new();
    for _ in 0..REPLICAS {
        let listener = listener().await;
        engines.push(listener.local_addr().unwrap().to_string());
        tasks.spawn(reading_engine::serve(listener, engine_files.clone()));
    }
    let mut addresses = Vec::new();
    for _ in 0..gateways {
        addresses.push(gateway(&mut tasks, gateway_files.cert.parent().unwrap(), &engines, choice).await);
    }
    let mut agents = tokio::task::JoinSet::new();
    for number in 0..AGENTS {
        agents.spawn(agent(addresses.clone(), number, seed));
    }
    let turns: Vec<TimedRequest> = agents.join_all().await.into_iter().flatten().collect();
    let mut first_tokens: Vec<f64> = turns.iter().map(|turn| turn.first_token * SPEED).collect();
    first_tokens.sort_by(f64::total_cmp);
    let sum = |of: fn(&TimedRequest) -> f64| turns.iter().map(of).sum();
    TraceResult {
        first_tokens,
        cached_tokens: sum(|turn| turn.cached),
        prompt_tokens: sum(|turn| turn.prompt),
    }
}

async fn gateway(
    tasks: &mut tokio::task::JoinSet<()>,
    folder: &Path,
    engines: &[String],
    choice: ReplicaChoice,
) -> SocketAddr {
    let listener = listener().await;
    let address = listener.local_addr().unwrap();
    let (table_sender, table) = tokio::sync::watch::channel(Arc::new(table_of(engines)));
    let (keys_sender, keyring) = tokio::sync::watch::channel(Arc::new(Keyring::default().updated([], 0)));
    let server = GatewayServer::new(
        vec![HttpListener::loopback(listener)],
        table,
        keyring,
        TlsFiles { ca: folder.join("ca.crt"), ..TlsFiles::in_dir(folder) },
        DispatchLimits { replica_choice: choice, ..DispatchLimits::default() },
        ListenerLimits::default(),
    );
    tasks.spawn(async move {
        let _open = (table_sender, keys_sender);
        server.serve(std::future::pending()).await.unwrap();
    });
    address
}

/// A turn of an agent.
struct TimedRequest {
    /// Seconds.
    first_token: f64,
    prompt: f64,
    cached: f64,
}

/// An agent's turns, each with all turns before it. They begin at different times, and it reads what tools return.
async fn agent(gateways: Vec<SocketAddr>, number: usize, seed: u64) -> Vec<TimedRequest> {
    let mut random = StdRng::seed_from_u64(seed * 1000 + number as u64);
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let text = |of: &str, bytes: usize| format!("{of} ").repeat(bytes / (of.len() + 1));
    let system = text("A rule for all agents, and a tool of theirs.", SHARED_BYTES);
    let own = text(&format!("Project {number} has this file."), OWN_BYTES);
    let mut messages = vec![message("system", &system), message("user", &own)];
    let mut turns = Vec::new();
    // A machine of usual speed has an agent come every second or two.
    pause(number as f64 * 1.5 + random.random_range(0.0..1.0)).await;
    for turn in 0..TURNS {
        let gateway = gateways[(turn + number) % gateways.len()];
        let (answer, timed) = ask(&client, gateway, &messages).await;
        turns.push(timed);
        messages.push(message("assistant", &answer));
        let bytes = random.random_range(500..3000);
        messages.push(message("user", &text(&format!("Result {turn} for {number}."), bytes)));
        pause(random.random_range(0.5..4.0)).await;
    }
    turns
}

/// Seconds of a machine of usual speed.
async fn pause(seconds: f64) {
    tokio::time::sleep(Duration::from_secs_f64(seconds / SPEED)).await;
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

async fn ask(client: &reqwest::Client, gateway: SocketAddr, messages: &[Value]) -> (String, TimedRequest) {
    let body = json!({
        "model": "m", "messages": messages, "stream": true, "stream_options": {"include_usage": true},
    });
    let asked = Instant::now();
    let url = format!("http://{gateway}/v1/chat/completions");
    let response = client.post(url).json(&body).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let mut stream = response.bytes_stream();
    let (mut read, mut first_token) = (Vec::new(), None);
    while let Some(part) = stream.next().await {
        read.extend_from_slice(&part.unwrap());
        let has_text = || read.windows(15).any(|window| window == b"\"content\":\" wor");
        if first_token.is_none() && has_text() {
            first_token = Some(asked.elapsed().as_secs_f64());
        }
    }
    let read = String::from_utf8(read).unwrap();
    let events = read.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    let (mut answer, mut usage) = (String::new(), Value::Null);
    for event in events.map(|data| serde_json::from_str::<Value>(data).unwrap()) {
        answer += event["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
        if event["usage"].is_object() {
            usage = event["usage"].clone();
        }
    }
    let turn = TimedRequest {
        first_token: first_token.expect("an answer has text"),
        prompt: usage["prompt_tokens"].as_f64().unwrap(),
        cached: usage["prompt_tokens_details"]["cached_tokens"].as_f64().unwrap(),
    };
    (answer, turn)
}
