//! Starts all processes, measures the targets in turn so that other load on the machine affects all alike,
//! and prints the figures.

use std::time::Duration;

use russet_rpc::tls::TlsFiles;

use crate::load::{LoadResult, LoadTarget, run as load};
use crate::load_request::{Api, LoadRequest};
use crate::processes::{LITELLM_KEY, RoleProcess, identities, litellm, nginx};
use crate::{chunks, figure, streams};

/// Rounds of every target.
const ROUNDS: usize = 7;
/// Rounds of rates, which vary less.
const RATE_ROUNDS: usize = 3;
/// Duration of one measurement.
const MEASURE_TIME: Duration = Duration::from_secs(3);
/// Bytes of the conversation of an agent.
const LARGE_BODY: usize = 200_000;

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// An engine and a gateway in front of it.
struct Stage {
    folder: tempfile::TempDir,
    engine: RoleProcess,
    gateway: RoleProcess,
    /// The folder of the gateway's identity.
    identity: String,
    /// The engine itself.
    direct: LoadTarget,
    /// The engine through the gateway.
    through: LoadTarget,
}

impl Stage {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (engine_files, gateway_files) = identities(folder.path());
        let folder_of = |files: &TlsFiles| files.cert.parent().unwrap().to_str().unwrap().to_owned();
        let engine = RoleProcess::start(&["engine", &folder_of(&engine_files)], 1).await;
        let identity = folder_of(&gateway_files);
        let gateway = RoleProcess::start(&["gateway", &identity, &engine.output[0]], 2).await;
        let through = LoadTarget::Http { address: gateway.address(), key: gateway.output[1].clone() };
        let direct = LoadTarget::Grpc { address: engine.address(), files: gateway_files };
        Self { folder, engine, gateway, identity, direct, through }
    }
}

/// Measures, and prints the figures; without the program of LiteLLM not its.
pub async fn run(nginx_program: &str, litellm_program: Option<&str>) {
    let stage = Stage::start().await;
    let Stage { folder, gateway, direct, through, .. } = &stage;
    let upstream = RoleProcess::start(&["upstream"], 1).await;
    let nginx = nginx(nginx_program, folder.path(), upstream.address()).await;
    let key = gateway.output[1].clone();
    let http = |address| LoadTarget::Http { address, key: key.clone() };
    let peer_through = http(nginx.address);
    let peer_direct = http(upstream.address());
    let targets = [direct, through, &peer_direct, &peer_through];

    let small = LoadRequest::new(Api::Chat, false);
    let [ours, its] = saturated([(through, &small), (&peer_through, &small)]).await;
    figure("requests a second, small bodies, against nginx").peer(ours, its, "1/s").at_least(0.5);
    let [mine] = processor_times(through, &small, [&|| gateway.processor_time()]).await;
    let [its_time] = processor_times(&peer_through, &small, [&|| nginx.processor_time()]).await;
    figure("processor time of a request, small bodies, beside nginx").beside(mine, its_time, "µs").no_goal();
    let large = LoadRequest::of_bytes(LARGE_BODY);
    let [large_ours, large_its] = saturated([(through, &large), (&peer_through, &large)]).await;
    figure("requests a second, bodies of 200 kB, against nginx")
        .peer(large_ours, large_its, "1/s")
        .at_least(0.5);
    if let Some(program) = litellm_program {
        let litellm = litellm(program, folder.path(), upstream.address()).await;
        let peer = LoadTarget::Http { address: litellm.address, key: LITELLM_KEY.to_owned() };
        let [ours, its] = saturated([(through, &small), (&peer, &small)]).await;
        figure("requests a second, small bodies, against LiteLLM's proxy")
            .peer(ours, its, "1/s")
            .at_least(20.0);
    }

    let stream = LoadRequest::new(Api::Chat, true);
    let [streams_ours, _] = saturated([(through, &stream), (&peer_through, &stream)]).await;
    for (request, rate, what) in
        [(&small, ours, "to the end of an answer"), (&stream, streams_ours, "to the first token of a stream")]
    {
        let [(p50, its_p50), (p99, its_p99)] = added(targets, request, rate / 2.0).await;
        figure(&format!("added {what}, p50 at half load")).beside(p50, its_p50, "ms").no_goal();
        figure(&format!("added {what}, p99 at half load")).beside(p99, its_p99, "ms").at_most(1.0);
    }
    policy(&stage, &small).await;
    let [(p50, its_p50), (p99, its_p99)] = chunks::added(targets).await;
    figure("added to a chunk of a stream, p50").beside(p50, its_p50, "µs").no_goal();
    figure("added to a chunk of a stream, p99").beside(p99, its_p99, "µs").at_most(50.0);

    for streamed in [false, true] {
        let chat = LoadRequest::new(Api::Chat, streamed);
        let how = if streamed { "streamed" } else { "whole" };
        for (api, name) in
            [(Api::Responses, "Responses"), (Api::Messages, "Anthropic"), (Api::Ollama, "Ollama")]
        {
            let request = LoadRequest::new(api, streamed);
            let [its, chat] = saturated([(through, &request), (through, &chat)]).await;
            // Time of a request, in milliseconds of a machine that does nothing else.
            let what = format!("time of a request by {name}, {how}, against OpenAI chat");
            figure(&what).peer(1000.0 / its, 1000.0 / chat, "ms").at_most(1.1);
        }
    }

    let idle = gateway.memory();
    let held = streams::hold(through).await;
    let megabytes = |bytes: u64| bytes as f64 / 1e6;
    let what = format!("resident memory with {} streams, beside none", streams::STREAMS);
    figure(&what).beside(megabytes(gateway.memory()), megabytes(idle), "MB").at_most(100.0);
    drop(held);
}

/// Measures what is added to chunks alone, which takes half a minute: what stands for the peer is no proxy at all.
pub async fn run_chunks() {
    let stage = Stage::start().await;
    let Stage { direct, through, .. } = &stage;
    let [(p50, none_p50), (p99, none_p99)] = chunks::added([direct, through, direct, direct]).await;
    figure("added to a chunk of a stream, p50, beside nothing").beside(p50, none_p50, "µs").no_goal();
    figure("added to a chunk of a stream, p99, beside nothing").beside(p99, none_p99, "µs").no_goal();
}

/// Measures what policy costs alone, which takes two minutes.
pub async fn run_policy() {
    policy(&Stage::start().await, &LoadRequest::new(Api::Chat, false)).await;
}

/// Prints what a request costs the gateway and the engine in time of the processor, whole and streamed, which takes seconds.
pub async fn run_processor() {
    let stage = Stage::start().await;
    let Stage { engine, gateway, through, .. } = &stage;
    for (streamed, how) in [(false, "whole"), (true, "streamed")] {
        let request = LoadRequest::new(Api::Chat, streamed);
        let [ours, its] =
            processor_times(through, &request, [&|| gateway.processor_time(), &|| engine.processor_time()])
                .await;
        figure(&format!("processor time of a request, {how}, gateway and engine"))
            .beside(ours, its, "µs")
            .no_goal();
    }
}

/// What a request costs some processes in time of the processor, in microseconds, under full load; each says what it has had.
async fn processor_times<const PROCESSES: usize>(
    target: &LoadTarget,
    request: &LoadRequest,
    spent: [&dyn Fn() -> Duration; PROCESSES],
) -> [f64; PROCESSES] {
    let before = spent.map(|spent| spent());
    let answers = load(target, request, None, MEASURE_TIME).await.answers() as f64;
    let after = spent.map(|spent| spent());
    std::array::from_fn(|one| (after[one] - before[one]).as_secs_f64() * 1e6 / answers)
}

/// What a gateway serves and adds that has a Budget, whose journal is written before an answer begins and ends, and an audit
/// log; beside one without.
async fn policy(stage: &Stage, request: &LoadRequest) {
    let Stage { folder, engine, identity, direct, through: plain, .. } = stage;
    let own = folder.path().join("policy");
    std::fs::create_dir(&own).unwrap();
    let gateway =
        RoleProcess::start(&["gateway", identity, &engine.output[0], own.to_str().unwrap()], 2).await;
    let with_policy = LoadTarget::Http { address: gateway.address(), key: gateway.output[1].clone() };
    let [rate, without] = saturated([(&with_policy, request), (plain, request)]).await;
    figure("requests a second with a Budget and an audit log, against without")
        .peer(rate, without, "1/s")
        .no_goal();
    let targets = [direct, &with_policy, direct, plain];
    let [(p50, its_p50), (p99, its_p99)] = added(targets, request, rate / 2.0).await;
    let what = "added with a Budget and an audit log, beside without";
    figure(&format!("{what}, p50 at half load")).beside(p50, its_p50, "ms").no_goal();
    figure(&format!("{what}, p99 at half load")).beside(p99, its_p99, "ms").at_most(its_p99 + 1.0);
}

/// What a proxy adds to the latency: ours and the peer's.
type Added = (f64, f64);

/// The median and the 99th percentile of what ours and the peer add at this rate, in milliseconds: `targets` are direct and
/// through, ours and the peer's.
async fn added(targets: [&LoadTarget; 4], request: &LoadRequest, rate: f64) -> [Added; 2] {
    let mut added: [(Vec<f64>, Vec<f64>); 2] = Default::default();
    for _ in 0..ROUNDS {
        let mut turn: Vec<LoadResult> = Vec::new();
        for target in targets {
            turn.push(load(target, request, Some(rate), MEASURE_TIME).await);
        }
        for (quantile, (mine, its)) in [0.5, 0.99].into_iter().zip(&mut added) {
            mine.push(turn[1].quantile(quantile) - turn[0].quantile(quantile));
            its.push(turn[3].quantile(quantile) - turn[2].quantile(quantile));
        }
    }
    added.map(|(mine, its)| (median(mine), median(its)))
}

/// Answers per second of two targets under full load, in turns: the medians of the rounds.
async fn saturated(targets: [(&LoadTarget, &LoadRequest); 2]) -> [f64; 2] {
    let mut rates = [vec![], vec![]];
    for _ in 0..RATE_ROUNDS {
        for ((target, request), rates) in targets.into_iter().zip(&mut rates) {
            rates.push(load(target, request, None, MEASURE_TIME).await.rate);
        }
    }
    rates.map(median)
}
