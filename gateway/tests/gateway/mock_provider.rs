//! A provider outside of the cluster: an HTTP server on loopback that answers as its script says, and remembers what it was
//! asked.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use futures::StreamExt as _;
use russet_crds::{ModelProviderSpec, Zone};
use russet_gateway::routes::Provider;
use serde_json::{Value, json};
use tokio::sync::watch;

/// What the provider does next with a request.
#[derive(Clone)]
pub enum Reply {
    /// These events, and the end of the stream.
    Events(Vec<String>),
    /// These events, and then nothing.
    Stall(Vec<String>),
    /// An answer with this status, header and body.
    Status(u16, Option<(&'static str, &'static str)>, &'static str),
    /// Another reply with these headers.
    With(Vec<(&'static str, String)>, Box<Reply>),
}

/// A request that it got.
#[derive(Clone, Debug)]
pub struct ReceivedRequest {
    pub path: String,
    pub headers: HeaderMap,
    pub body: Value,
}

type ReplyFn = dyn Fn(&ReceivedRequest) -> Reply + Send + Sync;

pub struct MockProvider {
    pub address: SocketAddr,
    asked: Arc<Mutex<Vec<ReceivedRequest>>>,
    /// Answers that have a client.
    running: watch::Receiver<usize>,
    server: tokio::task::JoinHandle<()>,
}

struct MockState {
    reply: Box<ReplyFn>,
    asked: Arc<Mutex<Vec<ReceivedRequest>>>,
    running: watch::Sender<usize>,
}

struct Running(watch::Sender<usize>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.send_modify(|running| *running -= 1);
    }
}

impl MockProvider {
    pub async fn start(reply: impl Fn(&ReceivedRequest) -> Reply + Send + Sync + 'static) -> Self {
        Self::start_at("127.0.0.1", reply).await
    }

    /// The same on an address of this machine.
    pub async fn start_at(
        host: &str,
        reply: impl Fn(&ReceivedRequest) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = tokio::net::TcpListener::bind((host, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (running, watched) = watch::channel(0);
        let state = MockState { reply: Box::new(reply), asked: asked.clone(), running };
        let app = axum::Router::new().fallback(answer).with_state(Arc::new(state));
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { address, asked, running: watched, server }
    }

    /// A provider that always says this, as OpenAI would.
    pub async fn saying(text: &'static str) -> Self {
        Self::start(move |_| Reply::Events(openai(&[text]))).await
    }

    /// What it was asked.
    pub fn asked(&self) -> Vec<ReceivedRequest> {
        self.asked.lock().unwrap().clone()
    }

    /// Waits until so many of its answers have a client.
    pub async fn running(&self, count: usize) {
        let mut running = self.running.clone();
        let waited =
            tokio::time::timeout(crate::harness::TEST_TIMEOUT, running.wait_for(|running| *running == count));
        assert!(waited.await.is_ok(), "{count} answers were never reached");
    }

    /// Its object, said to be in this zone.
    pub fn object(&self, name: &str, zone: Zone) -> Provider {
        Provider {
            namespace: "default".into(),
            name: name.into(),
            spec: ModelProviderSpec {
                endpoint: format!("http://{}/v1", self.address),
                zone,
                ..ModelProviderSpec::default()
            },
            ..Provider::default()
        }
    }
}

impl Drop for MockProvider {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn answer(State(state): State<Arc<MockState>>, request: axum::extract::Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 16 << 20).await.unwrap();
    let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
    let asked = ReceivedRequest { path: parts.uri.path().to_owned(), headers: parts.headers, body };
    let reply = (state.reply)(&asked);
    state.asked.lock().unwrap().push(asked);
    respond(&state, reply)
}

fn respond(state: &MockState, reply: Reply) -> Response {
    let (events, stalls) = match reply {
        Reply::With(headers, reply) => {
            let mut response = respond(state, *reply);
            for (name, value) in headers {
                response.headers_mut().insert(name, value.parse().unwrap());
            }
            return response;
        }
        Reply::Status(status, header, body) => {
            let mut response = Response::new(Body::from(body));
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            if let Some((name, value)) = header {
                response.headers_mut().insert(name, value.parse().unwrap());
            }
            return response;
        }
        Reply::Events(events) => (events, false),
        Reply::Stall(events) => (events, true),
    };
    state.running.send_modify(|running| *running += 1);
    let running = Running(state.running.clone());
    let events =
        events.into_iter().map(|event| Ok::<_, std::io::Error>(Bytes::from(format!("data: {event}\n\n"))));
    let end = async move {
        let _running = running;
        if stalls {
            std::future::pending::<()>().await;
        }
        Ok(Bytes::new())
    };
    let body = futures::stream::iter(events).chain(futures::stream::once(end));
    let mut response = Response::new(Body::from_stream(body));
    response.headers_mut().insert("content-type", "text/event-stream".parse().unwrap());
    response
}

/// Events of OpenAI's stream with these texts, whole.
pub fn openai(texts: &[&str]) -> Vec<String> {
    let mut events = openai_begun(texts);
    events.push(json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}).to_string());
    events.push(json!({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 2}}).to_string());
    events.push("[DONE]".into());
    events
}

/// The same without an end.
pub fn openai_begun(texts: &[&str]) -> Vec<String> {
    let event = |text: &&str| json!({"choices": [{"index": 0, "delta": {"content": text}}]}).to_string();
    texts.iter().map(event).collect()
}
