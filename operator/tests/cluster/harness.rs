//! Harness: a server, an operator and stub agents, started and stopped together.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Config, Resource};
use russet_apiserver::RunningServer;
use russet_crds::conditions::{self, Type};
use russet_crds::{
    InferenceNode, LocalReference, Model, ModelDeployment, ModelDeploymentSpec, ModelSource, ModelSpec,
    Sharding,
};
use russet_operator::node_accounts::Credential;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::stub_agent::StubAgent;

pub const GIB: u64 = 1 << 30;

pub struct ClusterHarness {
    pub admin: Client,
    server: RunningServer,
    agents: Vec<StubAgent>,
    operator: TestOperator,
    _dir: tempfile::TempDir,
}

struct TestOperator {
    credential: Credential,
    registry: prometheus::Registry,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), russet_operator::Error>>,
}

impl TestOperator {
    async fn start(server: &RunningServer, credential: Credential) -> Self {
        let user = client(server, russet_rpc::tls::OPERATOR_USER, "russet:components").await;
        let registry = prometheus::Registry::new();
        let ready = Arc::new(AtomicBool::new(false));
        let (stop, stopped) = oneshot::channel::<()>();
        let run = russet_operator::run(
            user,
            "test",
            credential,
            registry.clone(),
            Default::default(),
            ready.clone(),
            async {
                let _ = stopped.await;
            },
        );
        let task = tokio::spawn(run);
        until("the operator is ready", || async { ready.load(Ordering::Acquire).then_some(()) }).await;
        Self { credential, registry, stop, task }
    }

    async fn stop(self) {
        let _ = self.stop.send(());
        self.task.await.unwrap().unwrap();
    }
}

impl ClusterHarness {
    pub async fn start(nodes: &[(&str, u64)]) -> Self {
        Self::start_with(Credential::Account, nodes).await
    }

    /// Starts a cluster with this node authentication.
    pub async fn start_with(credential: Credential, nodes: &[(&str, u64)]) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let _ = tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_test_writer()
            .try_init();
        let dir = tempfile::tempdir().unwrap();
        let config = russet_apiserver::ApiServerConfig::new(dir.path()).listen(([127, 0, 0, 1], 0).into());
        let server = russet_apiserver::start(config).await.unwrap();
        let kubeconfig = Kubeconfig::read_from(server.kubeconfig()).unwrap();
        let options = KubeConfigOptions::default();
        let admin =
            Client::try_from(Config::from_custom_kubeconfig(kubeconfig, &options).await.unwrap()).unwrap();
        russet_operator::install::apply(&admin, russet_operator::install::GatewayModels::Denied)
            .await
            .unwrap();

        let operator = TestOperator::start(&server, credential).await;
        let mut cluster = Self { admin, server, agents: Vec::new(), operator, _dir: dir };
        for (name, bytes) in nodes {
            // The operator admits machines that join; these exist from the start.
            let node = InferenceNode::new(name, Default::default());
            Api::all(cluster.admin.clone()).create(&Default::default(), &node).await.unwrap();
            cluster.start_agent(name, *bytes).await;
        }
        // The operator places only on machines that it has seen.
        let api: Api<InferenceNode> = Api::all(cluster.admin.clone());
        until("every machine takes work", || async {
            let all = api.list(&Default::default()).await.ok()?.items;
            let conditions = |node: &InferenceNode| node.status.clone().unwrap_or_default().conditions;
            all.iter().all(|node| conditions::is_true(&conditions(node), Type::Ready)).then_some(())
        })
        .await;
        cluster
    }

    /// Starts the stub agent of an admitted node.
    pub async fn start_agent(&mut self, name: &str, bytes: u64) {
        let user =
            client(&self.server, &russet_rpc::tls::node_user(name), russet_rpc::tls::NODES_GROUP).await;
        self.agents.push(StubAgent::start(user, name, bytes).await);
    }

    pub async fn client(&self, user: &str, group: &str) -> Client {
        client(&self.server, user, group).await
    }

    /// A client with a certificate that the cluster signed.
    pub async fn certified(&self, certificate: &str, key: &str) -> Client {
        certified(&self.server, certificate, key).await
    }

    pub fn agent(&self, name: &str) -> &StubAgent {
        self.agents.iter().find(|agent| agent.name() == name).unwrap()
    }

    /// Number of claims that agents refused, which must be zero.
    pub fn refusals(&self) -> usize {
        self.agents.iter().map(StubAgent::refusals).sum()
    }

    pub async fn create<K>(&self, object: K)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + std::fmt::Debug,
        K: serde::Serialize + serde::de::DeserializeOwned,
    {
        let api: Api<K> = Api::default_namespaced(self.admin.clone());
        api.create(&Default::default(), &object).await.unwrap();
    }

    /// Replaces the operator by a new one.
    pub async fn restart_operator(&mut self) {
        let next = TestOperator::start(&self.server, self.operator.credential).await;
        std::mem::replace(&mut self.operator, next).stop().await;
    }

    /// Runs `work` while no operator is running, and starts a new one afterwards.
    pub async fn unobserved<T>(self, work: impl Future<Output = T>) -> (Self, T) {
        let Self { admin, server, agents, operator, _dir } = self;
        let credential = operator.credential;
        operator.stop().await;
        let done = work.await;
        let operator = TestOperator::start(&server, credential).await;
        (Self { admin, server, agents, operator, _dir }, done)
    }

    /// Stops the agent without notice, as after a power failure.
    pub fn stop_agent(&mut self, node: &str) {
        self.agents.retain(|agent| agent.name() != node);
    }

    pub async fn granted(&self, node: &str) -> u64 {
        let api: Api<InferenceNode> = Api::all(self.admin.clone());
        api.get(node).await.unwrap().status.unwrap().memory.unwrap().granted_bytes
    }

    pub fn metrics(&self) -> String {
        prometheus::TextEncoder::new().encode_to_string(&self.operator.registry.gather()).unwrap()
    }

    pub async fn stop(self) {
        self.operator.stop().await;
        drop(self.agents);
        self.server.shutdown().await;
    }
}

async fn client(server: &RunningServer, user: &str, group: &str) -> Client {
    let (cert, key) = server.authority().issue_client(user, &[group], 1).unwrap();
    certified(server, &cert, &key).await
}

async fn certified(server: &RunningServer, cert: &str, key: &str) -> Client {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    russet_apiserver::pki::write_kubeconfig(&path, &server.url(), server.ca_pem(), cert, key).unwrap();
    let kubeconfig = Kubeconfig::read_from(&path).unwrap();
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    Client::try_from(config).unwrap()
}

/// Waits until `look` returns a value; the timeout is generous, because the machine may be busy.
pub async fn until<T, F: Future<Output = Option<T>>>(what: &str, look: impl Fn() -> F) -> T {
    for _ in 0..1200 {
        if let Some(seen) = look().await {
            return seen;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("not within a minute: {what}");
}

/// A Model whose headers a stub agent derives from its URI.
pub fn model(name: &str, architecture: &str, layers: u32, layer_bytes: u64) -> Model {
    // Models of one source would share their bytes.
    let uri = format!("file:///played/{name}/{architecture}/{layers}/{layer_bytes}");
    Model::new(name, ModelSpec { source: ModelSource { uri, ..ModelSource::default() }, preload: None })
}

pub fn deployment(name: &str, model: &str, sharding: Sharding) -> ModelDeployment {
    ModelDeployment::new(
        name,
        ModelDeploymentSpec {
            model_ref: LocalReference::new(model),
            sharding: Some(sharding),
            replicas: 1,
            ..ModelDeploymentSpec::default()
        },
    )
}
