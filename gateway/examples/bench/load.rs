//! Load generator: a number of connections that send requests, as fast as possible or at a steady rate, and
//! the latency of each.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::TokioIo;
use russet_rpc::engine as pb;
use russet_rpc::engine::engine_client::EngineClient;
use russet_rpc::tls::TlsFiles;
use russet_wire::conversation::Message;
use russet_wire::event::GenerationEvent;
use russet_wire::request::{GenerationRequest, Sampling};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tonic::transport::Channel;

/// Connections, each with one request at a time.
const CONNECTIONS: u64 = 32;

/// The server under load, and its protocol.
#[derive(Clone)]
pub enum LoadTarget {
    /// OpenAI's API over HTTP/1.1.
    Http { address: SocketAddr, key: String },
    /// The engine directly.
    Grpc { address: SocketAddr, files: TlsFiles },
}

/// The result of a run.
pub struct LoadResult {
    /// Answers per second.
    pub rate: f64,
    /// Sorted latencies of all requests: to the first token if streamed, else to the end.
    latencies: Vec<Duration>,
}

impl LoadResult {
    /// In milliseconds.
    pub fn quantile(&self, quantile: f64) -> f64 {
        let last = self.latencies.len() - 1;
        self.latencies[(last as f64 * quantile).round() as usize].as_secs_f64() * 1000.0
    }
}

enum LoadConnection {
    Http(hyper::client::conn::http1::SendRequest<Full<bytes::Bytes>>, String),
    Grpc(EngineClient<Channel>),
}

impl LoadConnection {
    async fn open(target: &LoadTarget) -> Self {
        match target {
            LoadTarget::Http { address, key } => {
                let stream = TcpStream::connect(address).await.unwrap();
                stream.set_nodelay(true).unwrap();
                let (sender, connection) =
                    hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
                tokio::spawn(connection);
                Self::Http(sender, key.clone())
            }
            LoadTarget::Grpc { address, files } => {
                let channel = files.channel(&address.to_string(), super::roles::NODE).unwrap();
                Self::Grpc(EngineClient::new(channel))
            }
        }
    }

    /// Sends one request; returns when the first token came.
    async fn send(&mut self, streamed: bool) -> Instant {
        let mut first = None;
        match self {
            Self::Http(sender, key) => {
                let body = format!(
                    "{{\"model\":\"m\",\"stream\":{streamed},\"messages\":[{{\"role\":\"user\",\"content\":\"What is 17 + 25?\"}}]}}"
                );
                let request = http::Request::post("/v1/chat/completions")
                    .header("host", "127.0.0.1")
                    .header("content-type", "application/json")
                    .header("authorization", format!("Bearer {key}"))
                    .body(Full::new(body.into()))
                    .unwrap();
                sender.ready().await.unwrap();
                let response = sender.send_request(request).await.unwrap();
                assert_eq!(response.status(), 200);
                let mut body = response.into_body();
                let mut bytes = 0;
                while let Some(frame) = body.frame().await {
                    let Ok(data) = frame.unwrap().into_data() else { continue };
                    bytes += data.len();
                    let token = || data.windows(7).any(|window| window == b"\" word\"");
                    if streamed && first.is_none() && token() {
                        first = Some(Instant::now());
                    }
                }
                assert!(bytes > 300, "an answer of {bytes} bytes");
            }
            Self::Grpc(client) => {
                let request = GenerationRequest {
                    id: "bench".into(),
                    messages: vec![Message::new("user", "What is 17 + 25?")],
                    sampling: Sampling { temperature: 1.0, ..Sampling::default() },
                    ..GenerationRequest::default()
                };
                let answer = client.generate(pb::GenerateRequest::from(request)).await.unwrap();
                let mut events = answer.into_inner();
                let mut tokens = 0;
                while let Some(event) = events.message().await.unwrap() {
                    if let GenerationEvent::Token { .. } = GenerationEvent::from(event) {
                        tokens += 1;
                        if streamed && first.is_none() {
                            first = Some(Instant::now());
                        }
                    }
                }
                assert_eq!(tokens, super::roles::TOKENS);
            }
        }
        if streamed { first.expect("a stream has tokens") } else { Instant::now() }
    }
}

/// Sends requests for `time`: at `rate` per second, or as fast as answers come.
pub async fn run(target: &LoadTarget, streamed: bool, rate: Option<f64>, time: Duration) -> LoadResult {
    let mut connections = Vec::new();
    // Like the gateway, all requests share one gRPC connection.
    let shared = match target {
        LoadTarget::Grpc { .. } => Some(LoadConnection::open(target).await),
        LoadTarget::Http { .. } => None,
    };
    for _ in 0..CONNECTIONS {
        connections.push(match &shared {
            Some(LoadConnection::Grpc(client)) => LoadConnection::Grpc(client.clone()),
            _ => LoadConnection::open(target).await,
        });
    }
    for connection in &mut connections {
        connection.send(streamed).await;
    }
    let start = Instant::now();
    let next = Arc::new(AtomicU64::new(0));
    let asking: Vec<_> = connections
        .into_iter()
        .map(|mut connection| {
            let next = next.clone();
            tokio::spawn(async move {
                let mut latencies = Vec::new();
                loop {
                    let sent_at = match rate {
                        None => Instant::now(),
                        Some(rate) => {
                            let number = next.fetch_add(1, Ordering::Relaxed);
                            let due = start + Duration::from_secs_f64(number as f64 / rate);
                            if due <= Instant::now() {
                                // All connections were busy: the server caused that wait.
                                due
                            } else {
                                tokio::time::sleep_until(due).await;
                                // A late timer is not the server's fault.
                                Instant::now()
                            }
                        }
                    };
                    if sent_at >= start + time {
                        return latencies;
                    }
                    latencies.push(connection.send(streamed).await.saturating_duration_since(sent_at));
                }
            })
        })
        .collect();
    let mut latencies = Vec::new();
    for asking in asking {
        latencies.extend(asking.await.unwrap());
    }
    let rate = latencies.len() as f64 / start.elapsed().as_secs_f64();
    latencies.sort_unstable();
    assert!(!latencies.is_empty(), "nothing was answered");
    LoadResult { rate, latencies }
}
