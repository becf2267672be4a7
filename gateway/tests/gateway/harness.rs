//! Test harness: a gateway on free loopback ports, one of them as other machines see it, engines that run
//! scripts, and a client.

use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::Stream;
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use russet_crds::{AccessKey, AccessKeySpec};
use russet_gateway::audit::AuditLog;
use russet_gateway::dispatch::DispatchLimits;
use russet_gateway::keys::Keyring;
use russet_gateway::listen::{Certificate, HttpListener, ListenerLimits, ServerFiles};
use russet_gateway::request_defaults::RequestDefaults;
use russet_gateway::response_store::ResponseStoreConfig;
use russet_gateway::routes::{Deployment, DeploymentState, Endpoint, ModelAlias, RoutingTable};
use russet_gateway::server::GatewayServer;
use russet_rpc::engine as pb;
use russet_rpc::engine::engine_server::{Engine as Service, EngineServer};
use russet_rpc::tls::{self, TlsFiles};
use russet_wire::event::{Delta, EngineEvent, FinishReason, GenerationEvent, Usage};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

/// Timeout of every wait: far beyond what a loaded machine needs.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Limits so long that nothing times out unless a test changes them.
pub fn limits() -> DispatchLimits {
    DispatchLimits {
        sync_timeout: TEST_TIMEOUT,
        hold_timeout: TEST_TIMEOUT,
        headers_timeout: TEST_TIMEOUT,
        prompt_timeout: Duration::ZERO,
        heartbeat: TEST_TIMEOUT,
        ..DispatchLimits::default()
    }
}

/// The next step of a scripted engine.
#[derive(Clone)]
pub enum ScriptStep {
    Say(GenerationEvent),
    /// Computes until it has done so for so many microseconds in all, and says so from now on.
    Compute(u64),
    /// Says from now on that it has computed for so many microseconds, whatever it did.
    Claim(u64),
    /// Prepares the prompt until the request is cancelled: the response does not begin. Only as the first step.
    Prepare,
    /// Prepares the prompt until the token is cancelled. Only as the first step.
    PrepareUntil(CancellationToken),
    /// Sends nothing until the request is cancelled.
    Hang,
    /// Sends nothing until the token is cancelled.
    Until(CancellationToken),
    /// Says a word every 10 ms until the request is cancelled.
    Babble,
    /// Ends the stream with this status.
    Break(tonic::Code, &'static str),
}

pub fn started() -> ScriptStep {
    ScriptStep::Say(GenerationEvent::Started { prompt_tokens: 7, emitted_tokens: 0 })
}

pub fn token(text: &str) -> ScriptStep {
    ScriptStep::Say(GenerationEvent::Token { id: 1, delta: Delta::text(text) })
}

pub fn finished(reason: FinishReason) -> ScriptStep {
    ScriptStep::Say(GenerationEvent::Finished {
        reason,
        usage: Usage { prompt_tokens: 7, completion_tokens: 3, cached_tokens: 2 },
    })
}

/// A complete response: `Hello there`.
pub fn hello() -> Vec<ScriptStep> {
    vec![started(), token("Hello"), token(""), token(" there"), finished(FinishReason::Stop)]
}

pub struct Certificates {
    issuer: Issuer<'static, KeyPair>,
    dir: tempfile::TempDir,
}

impl Certificates {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "test ca");
        std::fs::write(dir.path().join("ca.crt"), params.clone().self_signed(&key).unwrap().pem()).unwrap();
        Self { issuer: Issuer::new(params, key), dir }
    }

    pub fn gateway(&self) -> TlsFiles {
        self.identity(tls::GATEWAY_USER, vec![])
    }

    /// The server certificate that other machines see, valid for 127.0.0.1; issued again at every call.
    pub fn server(&self) -> ServerFiles {
        let folder = self.dir.path().join("server");
        let _ = std::fs::remove_dir_all(&folder);
        let files = self.identity("server", vec!["127.0.0.1".into()]);
        ServerFiles { cert: files.cert, key: files.key }
    }

    pub fn ca_path(&self) -> std::path::PathBuf {
        self.dir.path().join("ca.crt")
    }

    pub fn ca(&self) -> reqwest::Certificate {
        reqwest::Certificate::from_pem(&std::fs::read(self.ca_path()).unwrap()).unwrap()
    }

    pub fn ca_der(&self) -> rustls::pki_types::CertificateDer<'static> {
        use rustls::pki_types::pem::PemObject as _;
        rustls::pki_types::CertificateDer::from_pem_file(self.ca_path()).unwrap()
    }

    fn identity(&self, user: &str, dns: Vec<String>) -> TlsFiles {
        let folder = self.dir.path().join(user.replace(':', "-"));
        let ca = self.dir.path().join("ca.crt");
        if !folder.exists() {
            std::fs::create_dir(&folder).unwrap();
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::new(dns).unwrap();
            params.distinguished_name.push(DnType::CommonName, user);
            params.extended_key_usages =
                vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
            let certificate = params.signed_by(&key, &self.issuer).unwrap();
            std::fs::write(folder.join("tls.crt"), certificate.pem()).unwrap();
            std::fs::write(folder.join("tls.key"), key.serialize_pem()).unwrap();
        }
        TlsFiles { ca, ..TlsFiles::in_dir(Path::new(&folder)) }
    }
}

/// A scripted engine in a runtime of its own, so that killing it closes every socket at once, as the kernel
/// does for a killed process.
pub struct ScriptedEngine {
    pub address: SocketAddr,
    node: String,
    pub received: Arc<Mutex<Vec<pb::GenerateRequest>>>,
    pub callers: Arc<Mutex<Vec<String>>>,
    /// The marks of each prompt.
    pub marks: Arc<Mutex<Vec<Vec<pb::PrefixMark>>>>,
    /// What it tells of its prefix cache; it refuses to tell while this is empty.
    pub prefixes: watch::Sender<Vec<pb::PrefixesEvent>>,
    running: watch::Receiver<usize>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl ScriptedEngine {
    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    /// Waits until exactly `count` requests hold a slot.
    pub async fn running(&self, count: usize) {
        let mut running = self.running.clone();
        let waited = tokio::time::timeout(TEST_TIMEOUT, running.wait_for(|running| *running == count)).await;
        assert!(
            waited.is_ok(),
            "{count} running requests were never reached; there are {}",
            *self.running.borrow()
        );
    }

    /// Waits until a request with this content arrives.
    pub async fn received(&self, content: &str) {
        let arrived = tokio::time::timeout(TEST_TIMEOUT, async {
            let is_it = |request: &pb::GenerateRequest| request.messages[0].content == content;
            while !self.received.lock().unwrap().iter().any(is_it) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        assert!(arrived.await.is_ok(), "{content} never arrived");
    }

    /// Waits until it has been sent so many requests.
    pub async fn requested(&self, count: usize) {
        let arrived = tokio::time::timeout(TEST_TIMEOUT, async {
            while self.requests() < count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        assert!(arrived.await.is_ok(), "{} requests in place of {count}", self.requests());
    }

    /// How many listen to what it has cached, itself included.
    pub fn followers(&self) -> usize {
        self.prefixes.receiver_count()
    }

    /// It has cached this prompt, a token for every byte, and says so.
    pub fn has_cached(&self, marks: &[pb::PrefixMark]) {
        let block = |mark: &pb::PrefixMark| mark.key.to_le_bytes().to_vec();
        let marked = |mark: &pb::PrefixMark| pb::MarkedBlock {
            key: mark.key,
            block: block(mark),
            tokens: mark.bytes as u32,
        };
        self.prefixes.send_modify(|events| {
            events.push(pb::PrefixesEvent {
                added: marks.iter().map(block).collect(),
                marked: marks.iter().map(marked).collect(),
                ..pb::PrefixesEvent::default()
            });
        });
    }

    pub fn requests(&self) -> usize {
        self.received.lock().unwrap().len()
    }
}

impl Drop for ScriptedEngine {
    fn drop(&mut self) {
        self.kill();
    }
}

type ScriptFn = Box<dyn Fn(&pb::GenerateRequest) -> Vec<ScriptStep> + Send + Sync>;

struct ScriptedService {
    steps: ScriptFn,
    received: Arc<Mutex<Vec<pb::GenerateRequest>>>,
    callers: Arc<Mutex<Vec<String>>>,
    marks: Arc<Mutex<Vec<Vec<pb::PrefixMark>>>>,
    prefixes: watch::Receiver<Vec<pb::PrefixesEvent>>,
    running: watch::Sender<usize>,
}

struct RunningSlot(watch::Sender<usize>);

impl Drop for RunningSlot {
    fn drop(&mut self) {
        self.0.send_modify(|running| *running -= 1);
    }
}

/// Takes the time, as an engine would, until so many microseconds are over in all.
async fn compute(computed: Option<u64>, until: u64) -> Option<u64> {
    let rest = until.saturating_sub(computed.unwrap_or_default());
    tokio::time::sleep(Duration::from_micros(rest)).await;
    Some(until)
}

type EventStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl ScriptedService {
    /// Follows the steps of a chat with this text; returns the failure among them, and how long it computed.
    async fn script(&self, content: String) -> Result<(Option<pb::Failed>, Option<u64>), Status> {
        let message = pb::Message { role: "user".into(), content, ..pb::Message::default() };
        let request = pb::GenerateRequest { messages: vec![message], ..pb::GenerateRequest::default() };
        let steps = (self.steps)(&request);
        self.received.lock().unwrap().push(request);
        self.running.send_modify(|running| *running += 1);
        let _slot = RunningSlot(self.running.clone());
        let mut computed = None;
        for step in steps {
            match step {
                ScriptStep::Say(GenerationEvent::Failed(failure)) => {
                    return Ok((Some(failure.into()), computed));
                }
                ScriptStep::Say(_) => {}
                ScriptStep::Compute(until) => computed = compute(computed, until).await,
                ScriptStep::Claim(microseconds) => computed = Some(microseconds),
                ScriptStep::Prepare | ScriptStep::Hang | ScriptStep::Babble => std::future::pending().await,
                ScriptStep::Until(token) | ScriptStep::PrepareUntil(token) => token.cancelled().await,
                ScriptStep::Break(code, message) => return Err(Status::new(code, message)),
            }
        }
        Ok((None, computed))
    }
}

#[tonic::async_trait]
impl Service for ScriptedService {
    type GenerateStream = EventStream<pb::GenerateEvent>;
    type FollowStream = EventStream<pb::FollowReply>;
    type PrefixesStream = EventStream<pb::PrefixesEvent>;

    async fn describe(
        &self,
        _: Request<pb::DescribeRequest>,
    ) -> Result<Response<pb::EngineDescription>, Status> {
        Err(Status::unimplemented("not called by gateways"))
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
        let mut events = self.prefixes.clone();
        if events.borrow().is_empty() {
            return Err(Status::unavailable("this engine tells nothing yet"));
        }
        Ok(Response::new(Box::pin(async_stream::stream! {
            let mut sent = 0;
            loop {
                let new = events.borrow_and_update().get(sent..).unwrap_or_default().to_vec();
                sent += new.len();
                for event in new {
                    yield Ok(event);
                }
                if events.changed().await.is_err() {
                    return;
                }
            }
        })))
    }

    /// A vector of the length of each text, behind the steps of a chat with the first text.
    async fn embed(&self, request: Request<pb::EmbedRequest>) -> Result<Response<pb::EmbedReply>, Status> {
        let request = request.into_inner();
        let length = |input: &pb::EmbedInput| match &input.input {
            Some(pb::embed_input::Input::Text(text)) => text.len(),
            Some(pb::embed_input::Input::TokenIds(pb::TokenIds { ids })) => ids.len(),
            None => 0,
        };
        let lengths: Vec<u32> = request.inputs.iter().map(|input| length(input) as u32).collect();
        let dimensions = request.dimensions.unwrap_or(3);
        let vector = |length: &u32| vec![*length as f32; dimensions as usize];
        let first = request.inputs.first().and_then(|input| match &input.input {
            Some(pb::embed_input::Input::Text(text)) => Some(text.clone()),
            _ => None,
        });
        let (failed, engine_microseconds) = self.script(first.unwrap_or_default()).await?;
        let values = lengths.iter().flat_map(vector).flat_map(f32::to_le_bytes).collect();
        Ok(Response::new(pb::EmbedReply {
            failed,
            dimensions,
            values,
            prompt_tokens: lengths,
            engine_microseconds,
        }))
    }

    /// The length of each document as its score, behind the steps of a chat with the query.
    async fn rerank(&self, request: Request<pb::RerankRequest>) -> Result<Response<pb::RerankReply>, Status> {
        let pb::RerankRequest { query, documents, .. } = request.into_inner();
        let lengths: Vec<u32> = documents.iter().map(|document| document.len() as u32).collect();
        let scores = lengths.iter().map(|length| *length as f32 / 100.0).collect();
        let (failed, engine_microseconds) = self.script(query).await?;
        Ok(Response::new(pb::RerankReply { failed, scores, prompt_tokens: lengths, engine_microseconds }))
    }

    /// The bytes of all messages as their tokens, behind the steps of a chat.
    async fn count_tokens(
        &self,
        request: Request<pb::GenerateRequest>,
    ) -> Result<Response<pb::CountTokensReply>, Status> {
        let request = request.into_inner();
        let prompt_tokens = request.messages.iter().map(|message| message.content.len() as u32).sum();
        let first = request.messages.first().map(|message| message.content.clone()).unwrap_or_default();
        self.received.lock().unwrap().push(request);
        let (failed, _) = self.script(first).await?;
        Ok(Response::new(pb::CountTokensReply { failed, prompt_tokens }))
    }

    async fn generate(
        &self,
        request: Request<pb::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        self.callers.lock().unwrap().push(tls::peer_user(&request).unwrap_or_default());
        let steps = (self.steps)(request.get_ref());
        // What a prompt is marked with is nobody's concern but those tests' that script what engines have cached.
        let request = request.into_inner();
        self.marks.lock().unwrap().push(request.prefix_marks.clone());
        self.received.lock().unwrap().push(pb::GenerateRequest { prefix_marks: Vec::new(), ..request });
        self.running.send_modify(|running| *running += 1);
        let slot = RunningSlot(self.running.clone());
        match steps.first() {
            Some(ScriptStep::Prepare) => std::future::pending::<()>().await,
            Some(ScriptStep::PrepareUntil(token)) => token.cancelled().await,
            _ => {}
        }
        Ok(Response::new(Box::pin(async_stream::stream! {
            let _slot = slot;
            let mut engine_microseconds = None;
            for step in steps {
                match step {
                    ScriptStep::Say(event) => yield Ok(EngineEvent { event, engine_microseconds }.into()),
                    ScriptStep::Compute(until) => {
                        engine_microseconds = compute(engine_microseconds, until).await;
                    }
                    ScriptStep::Claim(microseconds) => engine_microseconds = Some(microseconds),
                    ScriptStep::Prepare | ScriptStep::Hang => std::future::pending().await,
                    ScriptStep::Babble => loop {
                        let event = GenerationEvent::Token { id: 1, delta: Delta::text("x") };
                        yield Ok(EngineEvent { event, engine_microseconds }.into());
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    },
                    ScriptStep::Until(token) | ScriptStep::PrepareUntil(token) => token.cancelled().await,
                    ScriptStep::Break(code, message) => {
                        yield Err(Status::new(code, message));
                        return;
                    }
                }
            }
        })))
    }
}

/// An engine on `node` that answers every request with the steps of `steps`.
pub fn script_engine(
    certificates: &Certificates,
    node: &str,
    steps: impl Fn(&pb::GenerateRequest) -> Vec<ScriptStep> + Send + Sync + 'static,
) -> ScriptedEngine {
    let files = certificates.identity(&tls::node_user(node), vec![tls::node_dns_name(node)]);
    let (running, watched) = watch::channel(0);
    let received = Arc::new(Mutex::new(vec![]));
    let callers = Arc::new(Mutex::new(vec![]));
    let marks = Arc::new(Mutex::new(vec![]));
    let (prefixes, listened) = watch::channel(vec![]);
    let script = ScriptedService {
        steps: Box::new(steps),
        received: received.clone(),
        callers: callers.clone(),
        marks: marks.clone(),
        prefixes: listened,
        running,
    };
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let server = tonic::transport::Server::builder().add_service(EngineServer::new(script));
    runtime.spawn(async move {
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        server.serve_with_incoming(files.incoming_grpc(listener).unwrap()).await
    });
    ScriptedEngine {
        address,
        node: node.into(),
        received,
        callers,
        marks,
        prefixes,
        running: watched,
        runtime: Some(runtime),
    }
}

pub struct GatewayLab {
    pub certificates: Certificates,
    publish: watch::Sender<Arc<RoutingTable>>,
    keyring: watch::Sender<Arc<Keyring>>,
    pub address: SocketAddr,
    /// The address of the listener for other machines.
    pub network: SocketAddr,
    pub client: reqwest::Client,
    pub stop: CancellationToken,
    pub served: Option<tokio::task::JoinHandle<Result<(), russet_gateway::Error>>>,
}

fn client(certificates: &Certificates) -> reqwest::ClientBuilder {
    reqwest::Client::builder().timeout(TEST_TIMEOUT).no_proxy().tls_certs_only([certificates.ca()])
}

impl GatewayLab {
    pub async fn start(limits: DispatchLimits) -> Self {
        Self::start_with(limits, ListenerLimits::default()).await
    }

    pub async fn start_with(limits: DispatchLimits, listener_limits: ListenerLimits) -> Self {
        Self::serve(limits, listener_limits, |gateway| gateway).await
    }

    /// A gateway that keeps responses.
    pub async fn start_keeping(limits: DispatchLimits, responses: ResponseStoreConfig) -> Self {
        Self::serve(limits, ListenerLimits::default(), |gateway| gateway.with_responses(responses)).await
    }

    /// The same in this folder, with usual limits.
    pub async fn start_in(folder: &Path) -> Self {
        Self::start_keeping(limits(), ResponseStoreConfig::new(folder.join("responses.db"))).await
    }

    /// The same in a folder of its own.
    pub async fn start_in_new_folder() -> (tempfile::TempDir, Self) {
        let folder = tempfile::tempdir().unwrap();
        let lab = Self::start_in(folder.path()).await;
        (folder, lab)
    }

    /// Asks it to stop; returns once it has begun to, and listens no more.
    pub async fn stops(&self) {
        self.stop.cancel();
        let closed = tokio::time::timeout(TEST_TIMEOUT, async {
            while tokio::net::TcpStream::connect(self.address).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        closed.await.unwrap();
    }

    /// A gateway that keeps responses and takes requests from a broker.
    pub async fn start_with_mqtt(
        limits: DispatchLimits,
        responses: ResponseStoreConfig,
        mqtt: russet_gateway::mqtt::MqttInbox,
        keys: &[AccessKey],
    ) -> Self {
        let change = |gateway: GatewayServer| gateway.with_responses(responses).with_mqtt(mqtt);
        Self::serve_with_keys(limits, ListenerLimits::default(), keys, change).await
    }

    /// A gateway with an audit log.
    pub async fn start_audited(limits: DispatchLimits, audit: AuditLog) -> Self {
        Self::serve(limits, ListenerLimits::default(), |gateway| gateway.with_audit_log(audit)).await
    }

    async fn serve(
        limits: DispatchLimits,
        listener_limits: ListenerLimits,
        change: impl FnOnce(GatewayServer) -> GatewayServer,
    ) -> Self {
        Self::serve_with_keys(limits, listener_limits, &[], change).await
    }

    async fn serve_with_keys(
        limits: DispatchLimits,
        listener_limits: ListenerLimits,
        keys: &[AccessKey],
        change: impl FnOnce(GatewayServer) -> GatewayServer,
    ) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let certificates = Certificates::new();
        let bind = || tokio::net::TcpListener::bind("127.0.0.1:0");
        let (inside, outside) = (bind().await.unwrap(), bind().await.unwrap());
        let (address, network) = (inside.local_addr().unwrap(), outside.local_addr().unwrap());
        let certificate = Certificate::read(certificates.server()).unwrap();
        let listeners = vec![HttpListener::loopback(inside), HttpListener::network(outside, &certificate)];
        let (publish, table) = watch::channel(Arc::new(RoutingTable::default()));
        let (keyring, known_keys) = watch::channel(Arc::new(Keyring::default().updated(keys, keys.len())));
        let stop = CancellationToken::new();
        let gateway = change(GatewayServer::new(
            listeners,
            table,
            known_keys,
            certificates.gateway(),
            limits,
            listener_limits,
        ));
        let served = tokio::spawn(gateway.serve(stop.clone().cancelled_owned()));
        let client = client(&certificates).build().unwrap();
        Self { certificates, publish, keyring, address, network, client, stop, served: Some(served) }
    }

    /// Ends at once, as a killed process does; returns when nothing of it is left that writes.
    pub async fn kill(mut self) {
        let served = self.served.take().unwrap();
        served.abort();
        let _ = served.await;
    }

    /// A client that connects from this address.
    pub fn client_from(&self, address: impl Into<std::net::IpAddr>) -> reqwest::Client {
        client(&self.certificates).local_address(address.into()).build().unwrap()
    }

    /// Publishes exactly these keys.
    pub fn keys(&self, keys: &[AccessKey]) {
        let next = self.keyring.borrow().updated(keys, keys.len());
        self.keyring.send_replace(Arc::new(next));
    }

    /// Resets the keyring to the state before the first list.
    pub fn clear_keys(&self) {
        self.keyring.send_replace(Arc::default());
    }

    /// An engine that answers every request with the steps of `steps`.
    pub fn engine(
        &self,
        node: &str,
        steps: impl Fn(&pb::GenerateRequest) -> Vec<ScriptStep> + Send + Sync + 'static,
    ) -> ScriptedEngine {
        script_engine(&self.certificates, node, steps)
    }

    /// The only engine of the model `m`, with one script for all requests.
    pub fn only_engine(&self, steps: Vec<ScriptStep>) -> ScriptedEngine {
        let engine = self.engine("a", move |_| steps.clone());
        self.publish(&[("m", DeploymentState::Ready, &[&engine])]);
        engine
    }

    /// Publishes exactly these deployments.
    pub fn publish(&self, deployments: &[(&str, DeploymentState, &[&ScriptedEngine])]) {
        self.publish_with(deployments, vec![]);
    }

    /// The same with names of ModelRoutes.
    pub fn publish_with(
        &self,
        deployments: &[(&str, DeploymentState, &[&ScriptedEngine])],
        names: Vec<ModelAlias>,
    ) {
        let deployments = deployments
            .iter()
            .map(|(name, state, engines)| Deployment {
                namespace: "default".into(),
                name: (*name).into(),
                created: 1_700_000_000,
                context_tokens: 8192,
                model: "small".into(),
                adapters: Default::default(),
                defaults: RequestDefaults::default(),
                load_quantization: "",
                memory_bytes: 0,
                idle_limits: None,
                state: state.clone(),
                endpoints: engines
                    .iter()
                    .map(|engine| Endpoint {
                        address: engine.address.to_string().into(),
                        node: engine.node.as_str().into(),
                        group: format!("default/{name}-0").into(),
                        model: "small".into(),
                        adapters: Default::default(),
                        epoch: 1,
                    })
                    .collect(),
            })
            .collect();
        self.publish.send_replace(Arc::new(RoutingTable {
            synced: true,
            deployments,
            aliases: names.into(),
            ..RoutingTable::default()
        }));
    }

    /// Changes the routing table.
    pub fn change(&self, change: impl FnOnce(&mut RoutingTable)) {
        self.publish.send_modify(|table| change(Arc::make_mut(table)));
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// The same for the network listener.
    pub fn network_url(&self, path: &str) -> String {
        format!("https://{}{path}", self.network)
    }

    /// A chat request for the model `m`, with additional fields.
    pub fn chat(&self, more: Value) -> reqwest::RequestBuilder {
        self.client.post(self.url("/v1/chat/completions")).json(&chat_body(more))
    }

    /// The same from another machine.
    pub fn network_chat(&self, more: Value) -> reqwest::RequestBuilder {
        self.client.post(self.network_url("/v1/chat/completions")).json(&chat_body(more))
    }

    pub async fn metrics(&self) -> String {
        self.client.get(self.url("/metrics")).send().await.unwrap().text().await.unwrap()
    }
}

fn chat_body(more: Value) -> Value {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// An AccessKey of the namespace `default` for this secret.
pub fn access_key(name: &str, secret: &str, change: impl FnOnce(&mut AccessKeySpec)) -> AccessKey {
    use sha2::Digest as _;
    let secret_sha256 = hex::encode(sha2::Sha256::digest(secret));
    let mut spec = AccessKeySpec { secret_sha256, ..Default::default() };
    change(&mut spec);
    let mut key = AccessKey::new(name, spec);
    key.metadata.namespace = Some("default".into());
    key
}

impl Drop for GatewayLab {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(served) = &self.served {
            served.abort();
        }
    }
}

/// Waits until the metrics contain this line.
pub async fn wait_for_metric(lab: &GatewayLab, line: &str) {
    let appeared = tokio::time::timeout(TEST_TIMEOUT, async {
        while !lab.metrics().await.contains(line) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    assert!(appeared.await.is_ok(), "{line} never came:\n{}", lab.metrics().await);
}

/// The events of a stream, with values that differ from run to run replaced; comments and `[DONE]` as texts.
pub fn transcript(text: &str) -> Vec<Value> {
    assert!(text.is_empty() || text.ends_with("\n\n"), "an event is cut off: {text:?}");
    text.split_terminator("\n\n")
        .map(|event| match event.strip_prefix("data: ") {
            Some("[DONE]") => json!("[DONE]"),
            Some(data) => normalize(serde_json::from_str(data).unwrap()),
            None => json!(event),
        })
        .collect()
}

/// Checks id and time, and replaces them.
pub fn normalize(mut value: Value) -> Value {
    if let Some(id) = value.get("id").and_then(Value::as_str) {
        assert!(id.starts_with("chatcmpl-") && id.len() == "chatcmpl-".len() + 24, "{id}");
        assert!(value["created"].as_u64().unwrap() > 1_700_000_000, "{value}");
        value["id"] = json!("ID");
        value["created"] = json!(0);
    }
    value
}

/// A chunk with this delta.
pub fn chunk(delta: Value, reason: Option<&str>) -> Value {
    json!({
        "id": "ID", "object": "chat.completion.chunk", "created": 0, "model": "m",
        "choices": [{"index": 0, "delta": delta, "logprobs": null, "finish_reason": reason}],
    })
}
