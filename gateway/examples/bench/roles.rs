//! The processes of the benchmark: an engine over gRPC and mutual TLS, the same answer over plain HTTP for
//! nginx, and the gateway with a key and a quota. Each prints its address and serves until its input closes.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse as _, Response as HttpResponse};
use axum::routing::post;
use futures::{Stream, StreamExt as _, stream};
use russet_crds::{AccessKey, AccessKeySpec, Budget, BudgetLimit, BudgetPeriod, BudgetSpec};
use russet_gateway::audit::AuditLog;
use russet_gateway::dispatch::DispatchLimits;
use russet_gateway::keys::{Keyring, Secret};
use russet_gateway::listen::{HttpListener, ListenerLimits};
use russet_gateway::request_defaults::RequestDefaults;
use russet_gateway::routes::{Deployment, DeploymentState, Endpoint, RoutingTable};
use russet_gateway::server::GatewayServer;
use russet_rpc::engine as pb;
use russet_rpc::engine::engine_server::{Engine, EngineServer};
use russet_rpc::tls::TlsFiles;
use russet_wire::event::{Delta, FinishReason, GenerationEvent, Usage};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;
use tokio::time::interval;
use tonic::{Request, Response, Status, Streaming};

use crate::arrivals::{every, moments};
use crate::chunks;
use crate::load_request::{ENDLESS, PACED};
use crate::streams::STREAMS;

/// Tokens of every answer.
pub const TOKENS: u32 = 16;
/// Tokens of an answer at a steady pace.
pub const PACED_TOKENS: u32 = 200;
/// The time between two of them.
const PACE: Duration = Duration::from_millis(10);
/// The time between two tokens of an answer that does not end.
const SLOW_PACE: Duration = Duration::from_secs(1);
/// The node whose certificate the engine shows.
pub const NODE: &str = "bench";

pub async fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.unwrap()
}

fn announce(address: SocketAddr) {
    println!("{address}");
}

async fn input_closed() {
    let mut input = tokio::io::stdin();
    let mut buffer = [0; 16];
    while matches!(input.read(&mut buffer).await, Ok(count) if count > 0) {}
}

struct InstantEngine;

pub type EventStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Engine for InstantEngine {
    type GenerateStream = EventStream<pb::GenerateEvent>;
    type FollowStream = EventStream<pb::FollowReply>;
    type PrefixesStream = EventStream<pb::PrefixesEvent>;

    async fn describe(
        &self,
        _: Request<pb::DescribeRequest>,
    ) -> Result<Response<pb::EngineDescription>, Status> {
        Err(Status::unimplemented("not called by gateways"))
    }

    async fn count_tokens(
        &self,
        _: Request<pb::GenerateRequest>,
    ) -> Result<Response<pb::CountTokensReply>, Status> {
        Err(Status::unimplemented("not measured"))
    }

    async fn embed(&self, _: Request<pb::EmbedRequest>) -> Result<Response<pb::EmbedReply>, Status> {
        Err(Status::unimplemented("not measured"))
    }

    async fn rerank(&self, _: Request<pb::RerankRequest>) -> Result<Response<pb::RerankReply>, Status> {
        Err(Status::unimplemented("not measured"))
    }

    async fn follow(
        &self,
        _: Request<Streaming<pb::FollowCommand>>,
    ) -> Result<Response<Self::FollowStream>, Status> {
        Err(Status::unimplemented("not called by gateways"))
    }

    async fn prefixes(
        &self,
        _: Request<pb::PrefixesRequest>,
    ) -> Result<Response<Self::PrefixesStream>, Status> {
        Err(Status::unimplemented("not called by gateways"))
    }

    async fn generate(
        &self,
        request: Request<pb::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        let answer = Answer::to(request.messages.last().map_or("", |message| &message.content));
        let tokens = answer
            .texts()
            .zip(stream::iter(0..))
            .map(|(text, id)| GenerationEvent::Token { id, delta: Delta::text(text) });
        let usage = Usage { prompt_tokens: 7, completion_tokens: TOKENS, cached_tokens: 0 };
        let started = GenerationEvent::Started { prompt_tokens: 7, emitted_tokens: 0 };
        let finished = GenerationEvent::Finished { reason: FinishReason::Stop, usage };
        let events = stream::iter([started]).chain(tokens).chain(stream::iter([finished]));
        Ok(Response::new(Box::pin(events.map(|event| Ok(event.into())))))
    }
}

/// How a prompt is answered.
#[derive(Clone, Copy)]
enum Answer {
    /// At once.
    Instant,
    /// At a steady pace, with times.
    Paced,
    /// Slowly, without an end.
    Endless,
}

impl Answer {
    fn to(prompt: &str) -> Self {
        match () {
            () if prompt.starts_with(PACED) => Self::Paced,
            () if prompt.starts_with(ENDLESS) => Self::Endless,
            () => Self::Instant,
        }
    }

    /// The texts of its tokens, when they are made.
    fn texts(self) -> Pin<Box<dyn Stream<Item = String> + Send>> {
        match self {
            Self::Instant => Box::pin(stream::iter((0..TOKENS).map(|_| " word".to_owned()))),
            Self::Paced => Box::pin(
                stream::unfold(moments(every(PACE)), |mut pace| async {
                    pace.recv().await?;
                    Some((chunks::token(), pace))
                })
                .take(PACED_TOKENS as usize),
            ),
            Self::Endless => Box::pin(stream::unfold(interval(SLOW_PACE), |mut pace| async {
                pace.tick().await;
                Some((" word".to_owned(), pace))
            })),
        }
    }
}

/// An engine that responds immediately.
pub async fn engine(folder: &Path) {
    let files = TlsFiles::in_dir(folder);
    let listener = listener().await;
    announce(listener.local_addr().unwrap());
    let incoming = files.incoming_grpc(listener).unwrap();
    let mut server = tonic::transport::Server::builder().max_concurrent_streams(2 * STREAMS as u32);
    let served = server.add_service(EngineServer::new(InstantEngine));
    served.serve_with_incoming_shutdown(incoming, input_closed()).await.unwrap();
}

/// The same answers over HTTP, for nginx: as many bytes as the gateway's responses.
pub async fn upstream() {
    let listener = listener().await;
    announce(listener.local_addr().unwrap());
    let router = Router::new().route("/v1/chat/completions", post(answer));
    tokio::select! {
        served = async { axum::serve(axum::serve::ListenerExt::tap_io(listener, |stream| { let _ = stream.set_nodelay(true); }), router).await } => served.unwrap(),
        () = input_closed() => {}
    }
}

async fn answer(body: Bytes) -> HttpResponse {
    // What the load generator sends begins with all that matters here; to read more would take nginx's time.
    let head = String::from_utf8_lossy(&body[..body.len().min(96)]);
    let chunk = |delta: &str, reason: &str| {
        format!(
            "data: {{\"id\":\"chatcmpl-000000000000000000000000\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"m\",\"choices\":[{{\"index\":0,\"delta\":{delta},\"logprobs\":null,\"finish_reason\":{reason}}}]}}\n\n"
        )
    };
    if head.contains("\"stream\":true") {
        let answer = Answer::to(head.rsplit("\"content\":\"").next().unwrap_or_default());
        let tokens = answer.texts().map(move |text| chunk(&format!("{{\"content\":\"{text}\"}}"), "null"));
        let chunks = stream::iter([chunk("{\"role\":\"assistant\",\"content\":\"\"}", "null")])
            .chain(tokens)
            .chain(stream::iter([chunk("{}", "\"stop\"") + "data: [DONE]\n\n"]));
        let stream = chunks.map(Ok::<_, std::convert::Infallible>);
        return ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(stream)).into_response();
    }
    let text = " word".repeat(TOKENS as usize);
    let whole = format!(
        "{{\"id\":\"chatcmpl-000000000000000000000000\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"m\",\"choices\":[{{\"index\":0,\"message\":{{\"role\":\"assistant\",\"content\":\"{text}\",\"refusal\":null}},\"logprobs\":null,\"finish_reason\":\"stop\"}}],\"usage\":{{\"prompt_tokens\":7,\"completion_tokens\":16,\"total_tokens\":23}}}}"
    );
    ([(header::CONTENT_TYPE, "application/json")], whole).into_response()
}

/// A routing table with one deployment, `m`, of engines at these addresses.
pub fn table_of(engines: &[String]) -> RoutingTable {
    let endpoint = |(number, address): (usize, &String)| Endpoint {
        address: address.as_str().into(),
        node: NODE.into(),
        group: format!("default/m-{number}").into(),
        model: "small".into(),
        adapters: BTreeMap::new(),
        epoch: 1,
    };
    let deployment = Deployment {
        namespace: "default".into(),
        name: "m".into(),
        created: 1_700_000_000,
        context_tokens: 8192,
        model: "small".into(),
        adapters: BTreeMap::new(),
        defaults: RequestDefaults::default(),
        load_quantization: "",
        memory_bytes: 0,
        idle_limits: None,
        state: DeploymentState::Ready,
        endpoints: engines.iter().enumerate().map(endpoint).collect(),
    };
    RoutingTable { synced: true, deployments: vec![deployment], ..RoutingTable::default() }
}

/// A Budget that is never used up: it is reserved, settled and written to the disk all the same.
fn budget() -> Budget {
    let limit = BudgetLimit {
        per: BudgetPeriod::Month,
        requests: Some(1_000_000_000),
        tokens: Some(1_000_000_000_000),
        money: "1000".parse().ok(),
        joules: Some(1_000_000_000_000),
    };
    let mut budget = Budget::new("bench", BudgetSpec { limits: vec![limit], ..BudgetSpec::default() });
    budget.metadata.namespace = Some("default".into());
    budget
}

/// The gateway before the engine at `engine`; with a folder for policy, it has a Budget and an audit log there. Prints its
/// address, then the key that it accepts.
pub async fn gateway(folder: &Path, engine: &str, policy: Option<&Path>) {
    // One log line per request, as `russet gateway` writes.
    russet_telemetry::logs::init("gateway", false);
    let listener = listener().await;
    announce(listener.local_addr().unwrap());
    let table = table_of(&[engine.to_owned()]);
    let secret = Secret::generate();
    // A quota that is never reached: it is counted all the same.
    let spec = AccessKeySpec {
        secret_sha256: secret.sha256(),
        models: vec!["m".into()],
        requests_per_minute: Some(100_000_000),
        ..Default::default()
    };
    let mut key = AccessKey::new("bench", spec);
    key.metadata.namespace = Some("default".into());
    println!("{}", secret.expose());
    let (_table, table) = tokio::sync::watch::channel(Arc::new(table));
    let (_keyring, keyring) = tokio::sync::watch::channel(Arc::new(Keyring::default().updated([&key], 1)));
    let listeners = vec![HttpListener::loopback(listener)];
    let gateway = GatewayServer::new(
        listeners,
        table,
        keyring,
        TlsFiles::in_dir(folder),
        DispatchLimits::default(),
        ListenerLimits::default(),
    );
    let gateway = match policy {
        None => gateway,
        Some(folder) => gateway
            .with_budgets(vec![budget()], folder.join("budgets.db"))
            .with_audit_log(AuditLog::open(&folder.join("audit")).unwrap()),
    };
    gateway.serve(input_closed()).await.unwrap();
}
