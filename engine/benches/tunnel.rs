//! Benchmark: cost of a tunnel against plain TCP on loopback: round trips through one connection, and outputs
//! of a pipeline of two engines. Each figure is a line of JSON for `cargo xtask bench tunnel`.

#![allow(clippy::unwrap_used, reason = "a bench fails as a whole")]

#[path = "../tests/support/engines.rs"]
mod engines;
#[path = "../tests/support/identities.rs"]
mod identities;

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use russet_engine::tunnel::Tunnel;
use russet_rpc::engine::engine_client::EngineClient;
use russet_rpc::tls::TlsFiles;
use russet_wire::engine_config::Transport;
use russet_wire::event::GenerationEvent;
use russet_wire::request::GenerationRequest;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tonic::transport::Channel;

use engines::{EngineHarness, TestEngine, ask, free_addresses, next, say, within};
use identities::Identities;

/// Odd, so that a median is one of them. Rounds alternate, so that other load on the machine affects both.
const ROUNDS: usize = 7;
/// Tokens of an output.
const TOKENS: u32 = 200;

fn main() {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(
        async {
            carry().await;
            decode().await;
        },
    );
}

/// One connection through a tunnel and one without.
async fn carry() {
    let identities = Identities::new();
    let hosts = free_addresses(2);
    let nodes = ["node-0".to_owned(), "node-1".to_owned()];
    let open = async |own: usize| {
        let files = TlsFiles::in_dir(&identities.node(&nodes[own]));
        Tunnel::open(&files, "bench", &hosts, &nodes, own, &[]).await.unwrap()
    };
    let ((_first, tunnelled_first), (_second, tunnelled_second)) = tokio::join!(open(0), open(1));
    // A tunnel is open when both directions are, so both members connect like MLX.
    let (through, _back) = tokio::join!(
        connection(tunnelled_first[1], tunnelled_second[1]),
        connection(tunnelled_second[0], tunnelled_first[0])
    );
    let own = free_addresses(1)[0];
    let (mut through, mut direct) = (through, connection(own, own).await);
    for (what, unit, rounds, size) in
        [("16 KiB there and back", "µs", 200_u32, 16_usize << 10), ("4 MiB at a time", "MB/s", 4, 4 << 20)]
    {
        let mut seconds = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            for (ends, seconds) in [&mut through, &mut direct].into_iter().zip(&mut seconds) {
                seconds.push(within(what, there_and_back(ends, rounds, size)).await);
            }
        }
        let [ours, peer] = seconds.map(|seconds| match unit {
            "µs" => median(seconds) / f64::from(rounds) * 1e6,
            _ => f64::from(2 * rounds) * size as f64 / median(seconds) / 1e6,
        });
        tell(what, ours, peer, unit);
    }
}

/// Both ends of a connection to `over` that arrives at a listener at `to`.
async fn connection(over: SocketAddr, to: SocketAddr) -> (TcpStream, TcpStream) {
    // The tunnel reserves the port until MLX binds it like this.
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.set_reuseport(true).unwrap();
    socket.bind(to).unwrap();
    let listener = socket.listen(1).unwrap();
    let connect = async {
        loop {
            match TcpStream::connect(over).await {
                Ok(stream) => return stream,
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    let (accepted, near) = within("a connection", async { tokio::join!(listener.accept(), connect) }).await;
    let far = accepted.unwrap().0;
    near.set_nodelay(true).unwrap();
    far.set_nodelay(true).unwrap();
    (near, far)
}

/// Seconds for `rounds` round trips of `size` bytes.
async fn there_and_back((near, far): &mut (TcpStream, TcpStream), rounds: u32, size: usize) -> f64 {
    let since = Instant::now();
    let (mut out, mut back) = (vec![0; size], vec![0; size]);
    let ping = async {
        for _ in 0..rounds {
            near.write_all(&out).await.unwrap();
            near.read_exact(&mut out).await.unwrap();
        }
    };
    let pong = async {
        for _ in 0..rounds {
            far.read_exact(&mut back).await.unwrap();
            far.write_all(&back).await.unwrap();
        }
    };
    tokio::join!(ping, pong);
    since.elapsed().as_secs_f64()
}

/// The smoke model on two ranks, over a tunnel and over plain TCP.
async fn decode() {
    let smoke = Path::new(env!("CARGO_MANIFEST_DIR")).join("smoke/model");
    let mut lab = EngineHarness::new();
    let mut groups: Vec<(Vec<TestEngine>, EngineClient<Channel>)> = Vec::new();
    lab.config.orphan_seconds = 3600;
    lab.config.prefix_cache = false;
    for transport in [Transport::Tunnel, Transport::Direct] {
        lab.config.transport = transport;
        let engines = lab.start(&smoke, &[2, 2]);
        let client = lab.client(&engines[0]).await;
        groups.push((engines, client));
    }
    let mut rates = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (group, rates) in groups.iter_mut().zip(&mut rates) {
            rates.push(rate(&mut group.1).await);
        }
    }
    let [ours, peer] = rates.map(median);
    tell("decode of the smoke model on 2 ranks", ours, peer, "tokens/s");
}

/// Tokens per second after the first.
async fn rate(client: &mut EngineClient<Channel>) -> f64 {
    let request = GenerationRequest { max_tokens: Some(TOKENS), ignore_eos: true, ..say("What is Russet?") };
    let mut events = ask(client, request).await;
    let (mut tokens, mut first) = (0, None);
    loop {
        match next(&mut events).await {
            Some(GenerationEvent::Token { .. }) => {
                tokens += 1;
                first.get_or_insert_with(Instant::now);
            }
            Some(GenerationEvent::Started { .. }) => {}
            Some(GenerationEvent::Finished { .. }) => break,
            other => panic!("{other:?} after {tokens} tokens"),
        }
    }
    assert_eq!(tokens, TOKENS);
    f64::from(TOKENS - 1) / first.unwrap().elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn tell(what: &str, ours: f64, peer: f64, unit: &str) {
    println!("{}", serde_json::json!({"what": what, "ours": ours, "peer": peer, "unit": unit}));
}
