//! Load generator: a number of connections that send requests, as fast as possible or at a steady rate, and
//! the latency of each.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::TokioIo;
use russet_rpc::engine as pb;
use russet_rpc::engine::engine_client::EngineClient;
use russet_rpc::tls::TlsFiles;
use russet_wire::conversation::Message;
use russet_wire::event::GenerationEvent;
use russet_wire::request::{GenerationRequest, Sampling};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tonic::transport::Channel;

use crate::arrivals::{every, moments};
use crate::load_request::LoadRequest;

/// Connections, each with one request at a time.
pub const CONNECTIONS: usize = 32;

/// The server under load, and its protocol.
#[derive(Clone)]
pub enum LoadTarget {
    /// Its API over HTTP/1.1.
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
    /// How many requests were answered.
    pub fn answers(&self) -> usize {
        self.latencies.len()
    }

    /// In milliseconds.
    pub fn quantile(&self, quantile: f64) -> f64 {
        let last = self.latencies.len() - 1;
        self.latencies[(last as f64 * quantile).round() as usize].as_secs_f64() * 1000.0
    }
}

/// One client of a server.
pub enum LoadConnection {
    Http(hyper::client::conn::http1::SendRequest<Full<Bytes>>, String),
    Grpc(EngineClient<Channel>),
}

impl LoadConnection {
    pub async fn open(target: &LoadTarget) -> Self {
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

    /// As many connections as load is sent on. Like the gateway, all gRPC requests share one.
    pub async fn open_all(target: &LoadTarget, count: usize) -> Vec<Self> {
        let mut all = vec![Self::open(target).await];
        while all.len() < count {
            all.push(match &all[0] {
                Self::Grpc(client) => Self::Grpc(client.clone()),
                Self::Http(..) => Self::open(target).await,
            });
        }
        all
    }

    /// Sends one request and reads the answer to its end, or until `read` breaks it off; `read` gets each piece of the body,
    /// or the text of each token.
    pub async fn exchange(&mut self, request: &LoadRequest, mut read: impl FnMut(&[u8]) -> bool) {
        match self {
            Self::Http(sender, key) => {
                let request = http::Request::post(request.path())
                    .header("host", "127.0.0.1")
                    .header("content-type", "application/json")
                    .header("authorization", format!("Bearer {key}"))
                    .body(Full::new(request.body()))
                    .unwrap();
                sender.ready().await.unwrap();
                let response = sender.send_request(request).await.unwrap();
                let status = response.status();
                let mut body = response.into_body();
                while let Some(frame) = body.frame().await {
                    let Ok(data) = frame.unwrap().into_data() else { continue };
                    assert_eq!(status, 200, "{}", String::from_utf8_lossy(&data));
                    if !read(&data) {
                        return;
                    }
                }
            }
            Self::Grpc(client) => {
                let request = GenerationRequest {
                    id: "bench".into(),
                    messages: vec![Message::new("user", request.prompt())],
                    sampling: Sampling { temperature: 1.0, ..Sampling::default() },
                    ..GenerationRequest::default()
                };
                let answer = client.generate(pb::GenerateRequest::from(request)).await.unwrap();
                let mut events = answer.into_inner();
                while let Some(event) = events.message().await.unwrap() {
                    if let GenerationEvent::Token { delta, .. } = GenerationEvent::from(event)
                        && !read(delta.text.as_bytes())
                    {
                        return;
                    }
                }
            }
        }
    }

    /// Sends one request; returns when the first token came if it is streamed, else the end.
    async fn send(&mut self, request: &LoadRequest) -> Instant {
        let (mut first, mut bytes) = (None, 0);
        self.exchange(request, |data| {
            bytes += data.len();
            if first.is_none() && data.windows(4).any(|window| window == b"word") {
                first = Some(Instant::now());
            }
            true
        })
        .await;
        assert!(bytes >= 5 * super::roles::TOKENS as usize, "an answer of {bytes} bytes");
        let first = first.expect("an answer has tokens");
        if request.streamed { first } else { Instant::now() }
    }
}

/// Sends requests for `time`: at `rate` per second, evenly, or as fast as answers come.
pub async fn run(
    target: &LoadTarget,
    request: &LoadRequest,
    rate: Option<f64>,
    time: Duration,
) -> LoadResult {
    let mut connections = LoadConnection::open_all(target, CONNECTIONS).await;
    for connection in &mut connections {
        connection.send(request).await;
    }
    let start = Instant::now();
    // A request that finds all connections busy waits, and the server caused that wait.
    let due = rate.map(|rate| {
        let due = every(Duration::from_secs_f64(1.0 / rate)).take_while(move |due| *due < start + time);
        Arc::new(Mutex::new(moments(due)))
    });
    let asking: Vec<_> = connections
        .into_iter()
        .map(|mut connection| {
            let (due, request) = (due.clone(), request.clone());
            tokio::spawn(async move {
                let mut latencies = Vec::new();
                loop {
                    let sent_at = match &due {
                        None => Some(Instant::now()).filter(|now| *now < start + time),
                        Some(due) => due.lock().await.recv().await,
                    };
                    let Some(sent_at) = sent_at else { return latencies };
                    latencies.push(connection.send(&request).await.saturating_duration_since(sent_at));
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
