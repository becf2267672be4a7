//! A control plane in this process, and agents that join it.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use kube::api::{ListParams, PostParams};
use kube::{Api, Client};
use russet_agent::process::record;
use russet_agent::token::JoinToken;
use russet_agent::{Access, AgentConfig, JoinConfig};
use russet_crds::conditions::{Type, is_true};
use russet_crds::{
    KvCapacity, Model, ModelDeployment, ModelDeploymentSpec, ModelSource, ModelSpec, Shard, Sharding,
    ShardingMode,
};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Generous: two cores may be busy with a build.
pub const TIMEOUT: Duration = Duration::from_secs(90);

/// Polls `look` until it returns something.
pub async fn wait_until<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    let search = async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    match tokio::time::timeout(TIMEOUT, search).await {
        Ok(found) => found,
        Err(_) => panic!("waited {TIMEOUT:?} for: {what}"),
    }
}

/// A control plane in a directory; it can be stopped and started again.
pub struct TestControlPlane {
    pub folder: PathBuf,
    pub running: Option<russet_apiserver::RunningServer>,
    pub operator: Option<JoinHandle<()>>,
    pub client: Client,
    pub address: std::net::SocketAddr,
}

impl TestControlPlane {
    pub async fn start(folder: &Path) -> Self {
        rustls::crypto::ring::default_provider().install_default().ok();
        let listen = ([127, 0, 0, 1], 0).into();
        let (running, client) = Self::serve(folder, listen).await;
        let denied = russet_operator::install::GatewayModels::Denied;
        russet_operator::install::apply(&client, denied).await.unwrap();
        let address = running.addr();
        let mut plane =
            Self { folder: folder.to_owned(), running: Some(running), operator: None, client, address };
        plane.start_operator();
        plane
    }

    pub async fn serve(
        folder: &Path,
        listen: std::net::SocketAddr,
    ) -> (russet_apiserver::RunningServer, Client) {
        let config = russet_apiserver::ApiServerConfig::new(folder).listen(listen);
        let running = russet_apiserver::start(config).await.unwrap();
        let kubeconfig = kube::config::Kubeconfig::read_from(running.kubeconfig()).unwrap();
        let config = kube::Config::from_custom_kubeconfig(kubeconfig, &Default::default()).await.unwrap();
        (running, Client::try_from(config).unwrap())
    }

    /// Creates the Model "tiny", with its files in `folder`.
    pub async fn create_model(&self, folder: &Path) {
        let source = ModelSource { uri: model(&folder.join("tiny")), ..ModelSource::default() };
        let tiny = Model::new("tiny", ModelSpec { source, preload: None });
        let models: Api<Model> = Api::namespaced(self.client.clone(), "default");
        models.create(&PostParams::default(), &tiny).await.unwrap();
    }

    pub fn start_operator(&mut self) {
        let client = self.client.clone();
        self.operator = Some(tokio::spawn(async move {
            let (registry, ready) = (prometheus::Registry::new(), Arc::new(AtomicBool::new(false)));
            // Nodes of these tests use both kinds of credentials.
            let credential = russet_operator::node_accounts::Credential::Account;
            let forever = std::future::pending();
            russet_operator::run(client, "test", credential, registry, Default::default(), ready, forever)
                .await
                .unwrap();
        }));
    }

    pub async fn stop(&mut self) {
        if let Some(operator) = self.operator.take() {
            operator.abort();
        }
        if let Some(running) = self.running.take() {
            running.shutdown().await;
        }
    }

    pub async fn restart(&mut self) {
        let (running, client) = Self::serve(&self.folder, self.address).await;
        (self.running, self.client) = (Some(running), client);
        self.start_operator();
    }

    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// Creates a join token like `russet token create`.
    pub async fn token(&self) -> JoinToken {
        let ca_pin = self.running.as_ref().unwrap().authority().pin().unwrap();
        let hour = jiff::SignedDuration::from_hours(1);
        let made = russet_operator::join_tokens::create(&self.client, hour).await.unwrap();
        JoinToken { id: made.id, secret: made.secret, ca_pin, ca: None }
    }

    pub async fn shards(&self) -> Vec<Shard> {
        let shards: Api<Shard> = Api::namespaced(self.client.clone(), "default");
        let mut found = shards.list(&ListParams::default()).await.unwrap().items;
        found.sort_by_key(|shard| shard.spec.rank);
        found
    }

    /// Waits until both ranks serve at an epoch of at least `epoch`.
    pub async fn serving(&self, epoch: i64) -> Vec<Shard> {
        wait_until(&format!("two ranks that serve at epoch {epoch} or later"), || async {
            let shards = self.shards().await;
            let serve = |shard: &Shard| {
                shard.spec.epoch >= epoch
                    && shard.status.as_ref().is_some_and(|status| {
                        status.observed_epoch == Some(shard.spec.epoch)
                            && is_true(&status.conditions, Type::Ready)
                    })
            };
            (shards.len() == 2 && shards.iter().all(serve)).then_some(shards)
        })
        .await
    }
}

pub fn pid(shard: &Shard) -> u32 {
    shard.status.as_ref().and_then(|status| status.engine_pid).expect("an engine runs") as u32
}

pub fn signal(pid: u32, name: &str) {
    let sent = std::process::Command::new("kill").args([name, &pid.to_string()]).status().unwrap();
    assert!(sent.success(), "{name} could not be sent to {pid}");
}

pub fn alive(pid: u32) -> bool {
    russet_agent::hardware::process_start(pid).is_some()
}

/// The shutdown sender of an agent, and its task.
pub type RunningAgent = (oneshot::Sender<()>, JoinHandle<Result<(), russet_agent::Error>>);

/// An agent that can be restarted; its engines are killed at the end of the test.
pub struct TestAgent {
    pub config: AgentConfig,
    pub running: Option<RunningAgent>,
}

impl TestAgent {
    pub async fn join(plane: &TestControlPlane, folder: &Path, name: &str, access: Option<Access>) -> Self {
        let data_dir = folder.join(name);
        let join = JoinConfig {
            servers: vec![plane.url()],
            token: plane.token().await.encode(),
            data_dir: data_dir.clone(),
            node_name: name.into(),
            access,
        };
        russet_agent::join(join).await.unwrap();
        let config = AgentConfig {
            data_dir,
            node_name: name.into(),
            memory: Some(1 << 30),
            allow_file_roots: vec![folder.to_owned()],
            allow_private_sources: Vec::new(),
            address: Some([127, 0, 0, 1].into()),
            engine_binary: Some(engine()),
            metrics_listen: ([127, 0, 0, 1], 0).into(),
            fabric_tools: None,
            mqtt: None,
            helper: folder.join(format!("{name}-helper.sock")),
            // What an administrator does is awaited by tests, again and again.
            report_interval: Duration::from_secs(1),
        };
        let mut agent = Self { config, running: None };
        agent.start();
        agent
    }

    pub fn start(&mut self) {
        let (stop, stopped) = oneshot::channel();
        let config = self.config.clone();
        let task =
            tokio::spawn(async move { russet_agent::run(config, async { drop(stopped.await) }).await });
        self.running = Some((stop, task));
    }

    pub async fn stop(&mut self) {
        if let Some((stop, task)) = self.running.take() {
            stop.send(()).ok();
            task.await.unwrap().unwrap();
        }
    }

    /// Waits until the agent has exited by itself.
    pub async fn wait_exit(mut self) {
        let (_stop, task) = self.running.take().unwrap();
        tokio::time::timeout(TIMEOUT, task).await.unwrap().unwrap().unwrap();
    }

    /// Waits until the agent has exited because its node was removed; returns the error.
    pub async fn wait_removed(mut self) -> String {
        let (_stop, task) = self.running.take().unwrap();
        tokio::time::timeout(TIMEOUT, task).await.unwrap().unwrap().unwrap_err().to_string()
    }
}

impl Drop for TestAgent {
    fn drop(&mut self) {
        for record in record::load(&self.config.data_dir.join("agent/engines")) {
            if let Some(process) = record.process {
                process.kill(&process.boot_id);
            }
        }
    }
}

/// Path of the fake engine, which cargo builds beside the tests.
pub fn engine() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let path = own.parent().unwrap().parent().unwrap().join("examples/fake_engine");
    assert!(path.exists(), "{} is missing; run the tests with cargo test", path.display());
    path
}

/// Creates a llama of four layers in `folder`: every matrix is 64 by 64, and the head is the embedding.
pub fn model(folder: &Path) -> String {
    std::fs::create_dir_all(folder).unwrap();
    let mut offset: usize = 0;
    let mut tensors = serde_json::Map::new();
    let mut tensor = |name: String, shape: &[usize]| {
        let end = offset + 2 * shape.iter().product::<usize>();
        let entry = serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]});
        offset = end;
        tensors.insert(name, entry);
    };
    tensor("model.embed_tokens.weight".into(), &[64, 64]);
    tensor("model.norm.weight".into(), &[64]);
    for layer in 0..4 {
        let path = format!("model.layers.{layer}");
        for name in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            tensor(format!("{path}.self_attn.{name}.weight"), &[64, 64]);
        }
        for name in ["gate_proj", "up_proj", "down_proj"] {
            tensor(format!("{path}.mlp.{name}.weight"), &[64, 64]);
        }
        for name in ["input_layernorm", "post_attention_layernorm"] {
            tensor(format!("{path}.{name}.weight"), &[64]);
        }
    }
    let header = serde_json::Value::from(tensors).to_string();
    let mut weights = (header.len() as u64).to_le_bytes().to_vec();
    weights.extend(header.as_bytes());
    weights.resize(weights.len() + offset, 3);
    std::fs::write(folder.join("model.safetensors"), weights).unwrap();
    let config = serde_json::json!({
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
        "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 128,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    std::fs::write(folder.join("tokenizer.json"), "{}").unwrap();
    let tokenizer = r#"{"eos_token": "</s>", "chat_template": "{{ messages[0].content }}"}"#;
    std::fs::write(folder.join("tokenizer_config.json"), tokenizer).unwrap();
    format!("file://{}", folder.display())
}

pub fn deployment() -> ModelDeployment {
    deployment_of("chat")
}

pub fn deployment_of(name: &str) -> ModelDeployment {
    let sharding = Sharding {
        mode: ShardingMode::Pipeline,
        ranks: Some(2),
        kv: KvCapacity { context_tokens: 64, max_sequences: 1, kv_tokens: None, headroom_percent: 5 },
        ..Sharding::default()
    };
    let spec = ModelDeploymentSpec {
        model_ref: russet_crds::LocalReference::new("tiny"),
        sharding: Some(sharding),
        replicas: 1,
        ..ModelDeploymentSpec::default()
    };
    ModelDeployment::new(name, spec)
}
