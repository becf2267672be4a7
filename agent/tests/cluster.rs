//! Agents in a whole cluster: the real API server and the real operator in this process, real
//! engine processes that compute nothing (`examples/fake_engine.rs`).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, whichever function of it does")]

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use russet_agent::join::identity::{Identity, Material};
use russet_agent::join::request::is_current;
use russet_agent::leave::{LeaveConfig, LeaveError, leave};
use russet_agent::process::adopt;
use russet_agent::token::JoinToken;
use russet_agent::{Access, AgentConfig, JoinConfig};
use russet_crds::conditions::{Type, get, is_true};
use russet_crds::{
    InferenceNode, KvRoom, Model, ModelCopy, ModelCopySpec, ModelDeployment, ModelDeploymentSpec,
    ModelSource, ModelSpec, NamespacedReference, Shard, ShardSpec, Sharding, ShardingMode, Want,
};
use serde_json::json;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Generous: two cores may be building something else.
const PATIENCE: Duration = Duration::from_secs(90);

/// Waits for `look` to return something.
async fn until<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    let search = async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    match tokio::time::timeout(PATIENCE, search).await {
        Ok(found) => found,
        Err(_) => panic!("waited {PATIENCE:?} for: {what}"),
    }
}

/// A control plane in a folder; it can go and come back.
struct Plane {
    folder: PathBuf,
    running: Option<russet_apiserver::Running>,
    operator: Option<JoinHandle<()>>,
    client: Client,
    address: std::net::SocketAddr,
}

impl Plane {
    async fn start(folder: &Path) -> Self {
        rustls::crypto::ring::default_provider().install_default().ok();
        let listen = ([127, 0, 0, 1], 0).into();
        let (running, client) = Self::serve(folder, listen).await;
        russet_operator::install::apply(&client).await.unwrap();
        let address = running.addr();
        let mut plane =
            Self { folder: folder.to_owned(), running: Some(running), operator: None, client, address };
        plane.operate();
        plane
    }

    async fn serve(folder: &Path, listen: std::net::SocketAddr) -> (russet_apiserver::Running, Client) {
        let config = russet_apiserver::Config::new(folder).listen(listen);
        let running = russet_apiserver::start(config).await.unwrap();
        let kubeconfig = kube::config::Kubeconfig::read_from(running.kubeconfig()).unwrap();
        let config = kube::Config::from_custom_kubeconfig(kubeconfig, &Default::default()).await.unwrap();
        (running, Client::try_from(config).unwrap())
    }

    /// The Model "tiny", whose files are put into `folder`.
    async fn create_model(&self, folder: &Path) {
        let source = ModelSource { uri: model(&folder.join("tiny")), ..ModelSource::default() };
        let tiny = Model::new("tiny", ModelSpec { source, preload: None });
        let models: Api<Model> = Api::namespaced(self.client.clone(), "default");
        models.create(&PostParams::default(), &tiny).await.unwrap();
    }

    fn operate(&mut self) {
        let client = self.client.clone();
        self.operator = Some(tokio::spawn(async move {
            let (registry, ready) = (prometheus::Registry::new(), Arc::new(AtomicBool::new(false)));
            // Nodes of these tests come both ways.
            let credential = russet_operator::accounts::Credential::Account;
            let forever = std::future::pending();
            russet_operator::run(client, "test", credential, registry, Default::default(), ready, forever)
                .await
                .unwrap();
        }));
    }

    async fn stop(&mut self) {
        if let Some(operator) = self.operator.take() {
            operator.abort();
        }
        if let Some(running) = self.running.take() {
            running.shutdown().await;
        }
    }

    async fn come_back(&mut self) {
        let (running, client) = Self::serve(&self.folder, self.address).await;
        (self.running, self.client) = (Some(running), client);
        self.operate();
    }

    fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// Makes a join token as `russet token create` does.
    async fn token(&self) -> JoinToken {
        let ca_pin = self.running.as_ref().unwrap().authority().pin().unwrap();
        let hour = jiff::SignedDuration::from_hours(1);
        let made = russet_operator::tokens::create(&self.client, hour).await.unwrap();
        JoinToken { id: made.id, secret: made.secret, ca_pin, ca: None }
    }

    async fn shards(&self) -> Vec<Shard> {
        let shards: Api<Shard> = Api::namespaced(self.client.clone(), "default");
        let mut found = shards.list(&ListParams::default()).await.unwrap().items;
        found.sort_by_key(|shard| shard.spec.rank);
        found
    }

    /// Waits until both ranks serve at an epoch of at least `epoch`.
    async fn serving(&self, epoch: i64) -> Vec<Shard> {
        until(&format!("two ranks that serve at epoch {epoch} or later"), || async {
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

fn pid(shard: &Shard) -> u32 {
    shard.status.as_ref().and_then(|status| status.engine_pid).expect("an engine runs") as u32
}

fn signal(pid: u32, name: &str) {
    let sent = std::process::Command::new("kill").args([name, &pid.to_string()]).status().unwrap();
    assert!(sent.success(), "{name} could not be sent to {pid}");
}

fn alive(pid: u32) -> bool {
    russet_agent::hardware::process_start(pid).is_some()
}

/// What stops an agent, and what it ends with.
type Running = (oneshot::Sender<()>, JoinHandle<Result<(), russet_agent::Error>>);

/// An agent that can be restarted; its engines end with the test, however it ends.
struct Agent {
    config: AgentConfig,
    running: Option<Running>,
}

impl Agent {
    async fn join(plane: &Plane, folder: &Path, name: &str, access: Option<Access>) -> Self {
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
            address: Some([127, 0, 0, 1].into()),
            engine_binary: Some(engine()),
            metrics_listen: ([127, 0, 0, 1], 0).into(),
        };
        let mut agent = Self { config, running: None };
        agent.start();
        agent
    }

    fn start(&mut self) {
        let (stop, stopped) = oneshot::channel();
        let config = self.config.clone();
        let task =
            tokio::spawn(async move { russet_agent::run(config, async { drop(stopped.await) }).await });
        self.running = Some((stop, task));
    }

    async fn stop(&mut self) {
        if let Some((stop, task)) = self.running.take() {
            stop.send(()).ok();
            task.await.unwrap().unwrap();
        }
    }

    /// The agent has ended by itself.
    async fn ended(mut self) {
        let (_stop, task) = self.running.take().unwrap();
        tokio::time::timeout(PATIENCE, task).await.unwrap().unwrap().unwrap();
    }

    /// The agent has ended because its node was removed; what it said.
    async fn removed(mut self) -> String {
        let (_stop, task) = self.running.take().unwrap();
        tokio::time::timeout(PATIENCE, task).await.unwrap().unwrap().unwrap_err().to_string()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        for record in adopt::load(&self.config.data_dir.join("agent/engines")) {
            if let Some(process) = record.process {
                process.kill(&process.boot_id);
            }
        }
    }
}

/// The fake engine, which cargo builds beside the tests.
fn engine() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let path = own.parent().unwrap().parent().unwrap().join("examples/fake_engine");
    assert!(path.exists(), "{} is missing; run the tests with cargo test", path.display());
    path
}

/// A model of four layers in `folder`.
fn model(folder: &Path) -> String {
    std::fs::create_dir_all(folder).unwrap();
    let mut offset = 0;
    let mut tensors = serde_json::Map::new();
    let mut tensor = |name: String| {
        let entry =
            serde_json::json!({"dtype": "BF16", "shape": [64, 64], "data_offsets": [offset, offset + 8192]});
        offset += 8192;
        tensors.insert(name, entry);
    };
    tensor("model.embed_tokens.weight".into());
    tensor("model.norm.weight".into());
    (0..4).for_each(|layer| tensor(format!("model.layers.{layer}.mlp.up_proj.weight")));
    let header = serde_json::Value::from(tensors).to_string();
    let mut weights = (header.len() as u64).to_le_bytes().to_vec();
    weights.extend(header.as_bytes());
    weights.resize(weights.len() + offset, 3);
    std::fs::write(folder.join("model.safetensors"), weights).unwrap();
    let config = serde_json::json!({
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
        "vocab_size": 64, "max_position_embeddings": 128,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    format!("file://{}", folder.display())
}

fn deployment() -> ModelDeployment {
    deployment_of("chat")
}

fn deployment_of(name: &str) -> ModelDeployment {
    let sharding = Sharding {
        mode: ShardingMode::Pipeline,
        ranks: Some(2),
        kv: KvRoom { context_tokens: 64, max_sequences: 1, kv_tokens: None, headroom_percent: 5 },
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_joins_only_the_cluster_its_token_names_and_with_a_token_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let mut plane = Plane::start(&folder.path().join("plane")).await;
    let token = plane.token().await;
    let join = |text: String, name: &str, machine: &str| {
        russet_agent::join(JoinConfig {
            // The first is not there: nobody listens on the port of discard.
            servers: vec!["https://127.0.0.1:9".into(), plane.url()],
            token: text,
            data_dir: folder.path().join(machine),
            node_name: name.into(),
            access: None,
        })
    };
    let pin = JoinToken { ca_pin: format!("sha256:{}", "00".repeat(32)), ..token.clone() };
    let secret = JoinToken { secret: "fedcba9876543210".into(), ..token.clone() };
    let unknown = JoinToken { id: "zzzzzz".into(), ..token.clone() };
    let expired = russet_operator::tokens::create(&plane.client, jiff::SignedDuration::from_secs(-1));
    let expired = expired.await.unwrap();
    let expired = JoinToken { id: expired.id, secret: expired.secret, ..token.clone() };
    for (story, text, name, words) in [
        ("no token", "abcdef.0123456789abcdef".to_owned(), "a", "no join token"),
        ("another CA", pin.encode(), "a", "is not the server this token is for"),
        ("a wrong secret", secret.encode(), "a", "does not accept the token"),
        ("an unknown token", unknown.encode(), "a", "does not accept the token zzzzzz"),
        ("an expired token", expired.encode(), "a", "russet token create"),
        ("no name", token.encode(), "A!", "cannot be a node's name"),
    ] {
        let error = join(text, name, "m1").await.unwrap_err().to_string();
        assert!(error.contains(words), "{story}: {error}");
    }

    let identity = join(token.encode(), "a", "m1").await.unwrap();
    let key = std::fs::read(identity.folder.join("tls.key")).unwrap();
    assert_eq!(join(token.encode(), "a", "m1").await.unwrap(), identity, "joining again changes nothing");
    assert_eq!(std::fs::read(identity.folder.join("tls.key")).unwrap(), key);

    // The same token on another machine, whatever it calls itself.
    for name in ["a", "b"] {
        let error = join(token.encode(), name, "m2").await.unwrap_err().to_string();
        assert!(error.contains("was used by node a"), "{error}");
    }
    // The first machine lost what it got and kept its key: it may finish.
    russet_rpc::tls::folder::remove(&identity.folder).unwrap();
    std::fs::write(identity.folder.join("joining.key"), &key).unwrap();
    assert_eq!(join(token.encode(), "a", "m1").await.unwrap(), identity);
    assert!(!identity.folder.join("joining.key").exists());
    plane.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_client_takes_renewed_credentials_of_any_kind() {
    use k8s_openapi::api::authentication::v1::SelfSubjectReview;
    let folder = tempfile::tempdir().unwrap();
    let mut plane = Plane::start(&folder.path().join("plane")).await;
    let authority = plane.running.as_ref().unwrap().authority();
    let ca = authority.cert_pem();
    let issue = |node: &str| {
        let (user, names) = (format!("russet:node:{node}"), [format!("{node}.node.russet.dev")]);
        authority.issue_peer(&user, &["russet:nodes"], &names, 1).unwrap()
    };
    let store = |node: &str, token: Option<&str>| {
        let (certificate, key) = issue(node);
        let material = Material { certificate: &certificate, key: &key, ca, server_ca: ca, token };
        Identity::store(&folder.path().join("agent"), node, &[plane.url()], &material).unwrap()
    };
    let client = store("a", None).client(|_| {}).await.unwrap();
    let who = || async {
        let reviews: Api<SelfSubjectReview> = Api::all(client.clone());
        let review = reviews.create(&PostParams::default(), &SelfSubjectReview::default()).await.unwrap();
        review.status.unwrap().user_info.unwrap().username.unwrap()
    };
    assert_eq!(who().await, "russet:node:a");
    store("b", None);
    assert_eq!(who().await, "russet:node:b");
    russet_operator::accounts::admit(&plane.client, "c", None).await.unwrap();
    let token = russet_agent::join::access::token(&plane.client, "c").await.unwrap();
    store("c", Some(&token));
    assert_eq!(who().await, "system:serviceaccount:russet-nodes:c");
    plane.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_ca_takes_the_place_of_the_first_and_no_node_joins_anew() {
    let folder = tempfile::tempdir().unwrap();
    let mut plane = Plane::start(&folder.path().join("plane")).await;
    let mut agents = [
        Agent::join(&plane, folder.path(), "one", None).await,
        Agent::join(&plane, folder.path(), "two", Some(Access::Token)).await,
    ];
    let pki = plane.folder.join("pki");
    let (old, old_key) = {
        let authority = plane.running.as_ref().unwrap().authority();
        (authority.cert_pem().to_owned(), authority.key_pem().to_owned())
    };
    let next = russet_apiserver::pki::Authority::generate("russet-ca").unwrap();
    let (new, new_key) = (next.cert_pem().to_owned(), next.key_pem().to_owned());
    // The new one is trusted before it signs, and the old one until nothing of it is left.
    for (story, authorities, key) in [
        ("the new one is trusted", old.clone() + &new, &old_key),
        ("the new one signs", new.clone() + &old, &new_key),
        ("the old one is gone", new.clone(), &new_key),
    ] {
        for agent in &mut agents {
            agent.stop().await;
        }
        plane.stop().await;
        std::fs::write(pki.join("ca.crt"), &authorities).unwrap();
        std::fs::write(pki.join("ca.key"), key).unwrap();
        plane.come_back().await;
        let maps: Api<ConfigMap> = Api::namespaced(plane.client.clone(), "russet-system");
        until("it is published", || async {
            (maps.get("russet-ca").await.ok()?.data?.get("ca.crt")? == &authorities).then_some(())
        })
        .await;
        for agent in &mut agents {
            agent.start();
            let kept = Identity::load(&agent.config.data_dir.join("agent")).unwrap().unwrap();
            until(story, || async {
                let certificate = kept.certificate_pem().ok()?;
                let follows = kept.ca_pem().ok()? == authorities
                    && kept.server_ca_pem().ok()? == authorities
                    && is_current(&authorities, &certificate);
                follows.then_some(())
            })
            .await;
            // It is heard with what it has now.
            let client = kept.client(|_| {}).await.unwrap();
            Api::<InferenceNode>::all(client).get(&kept.node).await.unwrap();
        }
    }
    for agent in &mut agents {
        agent.stop().await;
    }
    plane.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_leaves_is_emptied_forgotten_and_comes_back_only_with_a_new_token() {
    let folder = tempfile::tempdir().unwrap();
    let mut plane = Plane::start(&folder.path().join("plane")).await;
    let nodes: Api<InferenceNode> = Api::all(plane.client.clone());
    let leases: Api<Lease> = Api::namespaced(plane.client.clone(), "russet-system");
    for (name, access) in [("one", None), ("two", Some(Access::Token))] {
        let agent = Agent::join(&plane, folder.path(), name, access).await;
        let data_dir = agent.config.data_dir.clone();
        let ready = || async {
            let status = nodes.get(name).await.ok()?.status?;
            is_true(&status.conditions, Type::Ready).then_some(())
        };
        until("the node is ready", ready).await;
        let models = data_dir.join("agent/models");
        std::fs::write(models.join("kept"), "a model").unwrap();
        let config = LeaveConfig { data_dir: data_dir.clone(), force: false, purge: false };
        assert_eq!(leave(config.clone()).await.unwrap(), name);
        assert!(nodes.get_opt(name).await.unwrap().is_none());
        until("its Lease goes with it", || async {
            matches!(leases.get_opt(&format!("node-{name}")).await, Ok(None)).then_some(())
        })
        .await;
        agent.ended().await;
        let left: Vec<String> = std::fs::read_dir(data_dir.join("agent"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != "lock")
            .collect();
        assert_eq!(left, ["models"]);
        assert!(models.join("kept").exists());
        assert!(matches!(leave(config).await, Err(LeaveError::NotJoined(_))));

        let again = Agent::join(&plane, folder.path(), name, access).await;
        until("the node is ready again", ready).await;
        // Removed by an administrator: the agent ends and says so.
        nodes.delete(name, &DeleteParams::default()).await.unwrap();
        let error = again.removed().await;
        assert!(error.contains("was removed from the cluster"), "{error}");
    }
    plane.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_serve_a_model_through_kills_restarts_and_a_lost_control_plane() {
    let folder = tempfile::tempdir().unwrap();
    let mut plane = Plane::start(&folder.path().join("plane")).await;
    let mut one = Agent::join(&plane, folder.path(), "one", None).await;
    // As on an API server that does not believe the data plane's CA.
    let mut two = Agent::join(&plane, folder.path(), "two", Some(Access::Token)).await;

    plane.create_model(folder.path()).await;
    let deployments: Api<ModelDeployment> = Api::namespaced(plane.client.clone(), "default");
    deployments.create(&PostParams::default(), &deployment()).await.unwrap();

    // From nothing to serving: headers, plan, copies, claims, peers, engines.
    let first = plane.serving(1).await;
    assert_ne!(pid(&first[0]), pid(&first[1]));
    let nodes: Api<InferenceNode> = Api::all(plane.client.clone());
    until("granted memory in the node's status", || async {
        let memory = nodes.get("one").await.ok()?.status?.memory?;
        (memory.granted_bytes > 0 && memory.total_bytes == 1 << 30).then_some(())
    })
    .await;
    let copies: Api<ModelCopy> = Api::all(plane.client.clone());
    for copy in copies.list(&ListParams::default()).await.unwrap() {
        let status = copy.status.clone().unwrap_or_default();
        assert!(is_true(&status.conditions, Type::Verified), "{status:?}");
        assert!(status.sha256.is_some() && status.bytes_done > 0, "{status:?}");
    }
    until("both copies were used", || async {
        let copies = copies.list(&ListParams::default()).await.ok()?;
        copies
            .iter()
            .all(|copy| copy.status.as_ref().is_some_and(|it| it.last_used_time.is_some()))
            .then_some(())
    })
    .await;

    // Kill -9 of one rank: the whole group forms anew at a higher epoch.
    signal(pid(&first[1]), "-9");
    let second = plane.serving(first[0].spec.epoch + 1).await;
    for (before, after) in first.iter().zip(&second) {
        assert_ne!(pid(before), pid(after));
        assert!(!alive(pid(before)), "an engine of an older epoch lives on");
    }

    // Losing an agent disturbs no engine, and the next one adopts it.
    one.stop().await;
    two.stop().await;
    assert!(second.iter().all(|shard| alive(pid(shard))));
    one.start();
    two.start();
    // Killing an adopted engine is noticed although it is nobody's child here.
    let leases: Api<Lease> = Api::namespaced(plane.client.clone(), "russet-system");
    let renewed = |leases: Api<Lease>| async move {
        let lease = leases.get("node-one").await.ok()?;
        lease.spec?.renew_time
    };
    let before = renewed(leases.clone()).await;
    until("a Lease renewed by the restarted agent", || async {
        let now = renewed(leases.clone()).await;
        (now > before).then_some(())
    })
    .await;
    let adopted = plane.serving(second[0].spec.epoch).await;
    assert_eq!(adopted.iter().map(pid).collect::<Vec<_>>(), second.iter().map(pid).collect::<Vec<_>>());

    // Losing the control plane disturbs nothing either.
    plane.stop().await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(adopted.iter().all(|shard| alive(pid(shard))));
    plane.come_back().await;
    let back = plane.serving(adopted[0].spec.epoch).await;
    assert_eq!(back.iter().map(pid).collect::<Vec<_>>(), adopted.iter().map(pid).collect::<Vec<_>>());
    let leases: Api<Lease> = Api::namespaced(plane.client.clone(), "russet-system");
    let before = renewed(leases.clone()).await;
    until("a Lease renewed after the control plane came back", || async {
        (renewed(leases.clone()).await > before).then_some(())
    })
    .await;

    // An adopted engine that dies is noticed by its process alone.
    signal(pid(&back[0]), "-9");
    let third = plane.serving(back[0].spec.epoch + 1).await;

    // Deleting the deployment ends the engines and frees the memory.
    let deployments: Api<ModelDeployment> = Api::namespaced(plane.client.clone(), "default");
    deployments.delete("chat", &DeleteParams::default()).await.unwrap();
    let models: Api<Model> = Api::namespaced(plane.client.clone(), "default");
    models.delete("tiny", &DeleteParams::default()).await.unwrap();
    until("engines that are gone", || async { (!third.iter().any(|shard| alive(pid(shard)))).then_some(()) })
        .await;
    let nodes: Api<InferenceNode> = Api::all(plane.client.clone());
    until("memory that is free again", || async {
        let memory = nodes.get("two").await.ok()?.status?.memory?;
        (memory.granted_bytes == 0).then_some(())
    })
    .await;
    // A deleted Model leaves no files behind, whether its copy or its engine went first.
    let published = |agent: &Agent| {
        let entries = std::fs::read_dir(agent.config.data_dir.join("agent/models")).unwrap();
        let hidden = |name: std::ffi::OsString| name.to_string_lossy().starts_with('.');
        entries.filter(|entry| !hidden(entry.as_ref().unwrap().file_name())).count()
    };
    until("stores that are empty", || async { (published(&one) + published(&two) == 0).then_some(()) }).await;
    one.stop().await;
    two.stop().await;
    plane.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_lost_its_group_is_of_the_next_one_and_replaced_if_it_cannot_be() {
    let folder = tempfile::tempdir().unwrap();
    let mut plane = Plane::start(&folder.path().join("plane")).await;
    let mut one = Agent::join(&plane, folder.path(), "one", None).await;
    let mut two = Agent::join(&plane, folder.path(), "two", None).await;
    plane.create_model(folder.path()).await;
    let deployments: Api<ModelDeployment> = Api::namespaced(plane.client.clone(), "default");
    for (name, restarts, stays) in [("again", false, true), ("mute", false, false), ("mute", true, false)] {
        let story = format!("{name}, its agent restarts meanwhile: {restarts}");
        deployments.create(&PostParams::default(), &deployment_of(name)).await.unwrap();
        let before = plane.serving(1).await;
        // The survivor is rank 0's; which of the agents has it is the planner's business.
        signal(pid(&before[1]), "-9");
        let left = if before[0].spec.node_name == "one" { &mut one } else { &mut two };
        if restarts {
            let engines = left.config.data_dir.join("agent/engines");
            until("an engine that is kept for the next formation", || async {
                adopt::load(&engines).iter().any(|record| record.kept).then_some(())
            })
            .await;
            left.stop().await;
            left.start();
        }
        let after = plane.serving(before[0].spec.epoch + 1).await;
        assert_eq!(after[0].spec.epoch, before[0].spec.epoch + 1, "{story}: more than one epoch passed");
        assert_eq!(pid(&after[0]) == pid(&before[0]), stays, "{story}");
        assert_eq!(alive(pid(&before[0])), stays, "{story}: an engine of an older epoch lives on");
        assert_ne!(pid(&after[1]), pid(&before[1]), "{story}");
        deployments.delete(name, &DeleteParams::default()).await.unwrap();
        until("ranks that are gone", || async {
            let gone = !after.iter().any(|shard| alive(pid(shard)));
            (gone && plane.shards().await.is_empty()).then_some(())
        })
        .await;
    }
    one.stop().await;
    two.stop().await;
    plane.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_stands_still_is_killed_and_its_group_forms_anew() {
    let folder = tempfile::tempdir().unwrap();
    let mut plane = Plane::start(&folder.path().join("plane")).await;
    let mut one = Agent::join(&plane, folder.path(), "one", None).await;
    let mut two = Agent::join(&plane, folder.path(), "two", None).await;
    plane.create_model(folder.path()).await;
    let deployments: Api<ModelDeployment> = Api::namespaced(plane.client.clone(), "default");
    deployments.create(&PostParams::default(), &deployment()).await.unwrap();
    let events: Api<k8s_openapi::api::events::v1::Event> = Api::default_namespaced(plane.client.clone());
    let mut ranks = plane.serving(1).await;
    for (story, rank, name, reason, words) in [
        (
            "a process that is stopped answers nothing, not even SIGTERM",
            0,
            "-STOP",
            "EngineSilent",
            "was silent for",
        ),
        (
            "one that beats, and whose batch does not end",
            1,
            "-USR1",
            "EngineHung",
            "where 0.020 s were forecast",
        ),
    ] {
        let before = ranks;
        signal(pid(&before[rank]), name);
        ranks = plane.serving(before[0].spec.epoch + 1).await;
        assert_eq!(ranks[0].spec.epoch, before[0].spec.epoch + 1, "{story}: more than one epoch passed");
        assert!(
            !before.iter().any(|shard| alive(pid(shard))),
            "{story}: an engine of an older epoch lives on"
        );
        until(&format!("{story}: an event"), || async {
            let all = events.list(&ListParams::default()).await.ok()?.items;
            let says = |event: &k8s_openapi::api::events::v1::Event| {
                event.reason.as_deref() == Some(reason)
                    && event
                        .note
                        .as_ref()
                        .is_some_and(|note| note.contains(words) && note.contains(&format!("rank {rank}")))
            };
            all.iter().any(says).then_some(())
        })
        .await;
    }
    // Who is thought to be well is left alone.
    let epoch = ranks[0].spec.epoch;
    one.stop().await;
    one.start();
    let same = plane.serving(epoch).await;
    assert_eq!(same.iter().map(pid).collect::<Vec<_>>(), ranks.iter().map(pid).collect::<Vec<_>>());
    deployments.delete("chat", &DeleteParams::default()).await.unwrap();
    until("engines that are gone", || async { (!same.iter().any(|shard| alive(pid(shard)))).then_some(()) })
        .await;
    one.stop().await;
    two.stop().await;
    plane.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_fit_or_may_not_be_read_is_refused_in_the_status() {
    let folder = tempfile::tempdir().unwrap();
    let mut plane = Plane::start(&folder.path().join("plane")).await;
    let mut agent = Agent::join(&plane, folder.path(), "one", None).await;

    let copy = |name: &str, uri: String| {
        let spec = ModelCopySpec {
            model_ref: NamespacedReference { namespace: "default".into(), name: name.into() },
            source: ModelSource { uri, ..ModelSource::default() },
            commit: None,
            node_name: "one".into(),
            want: Want::Files,
            retention: None,
        };
        ModelCopy::new(name, spec)
    };
    let corrupt = folder.path().join("corrupt");
    let uri = model(&corrupt);
    std::fs::write(corrupt.join("model.safetensors"), [9_u8; 64]).unwrap();
    let copies: Api<ModelCopy> = Api::all(plane.client.clone());
    for (name, uri, reason, part) in [
        ("forbidden", "file:///etc".to_owned(), "SourceNotAllowed", "--allow-file-root"),
        ("absent", format!("file://{}/none", folder.path().display()), "SourceNotFound", "none"),
        ("corrupt", uri, "CorruptModel", "model.safetensors"),
    ] {
        copies.create(&PostParams::default(), &copy(name, uri)).await.unwrap();
        let ready = until(name, || async {
            let status = copies.get(name).await.ok()?.status?;
            get(&status.conditions, Type::Ready).filter(|ready| ready.reason == reason).cloned()
        })
        .await;
        assert!(ready.status == "False" && ready.message.contains(part), "{}", ready.message);
    }

    // What the owner wants left is left: no byte comes, and the copy comes by itself when there is room.
    let nodes: Api<InferenceNode> = Api::all(plane.client.clone());
    let reserve = async |reserve: &str, bytes: u64| {
        let patch = Patch::Merge(json!({"spec": {"disk": {"reserve": reserve}}}));
        nodes.patch("one", &PatchParams::default(), &patch).await.unwrap();
        until("a reserve in the node's status", || async {
            nodes.get("one").await.ok()?.status?.disk.filter(|disk| disk.reserve_bytes == Some(bytes))
        })
        .await
    };
    let disk = reserve("900Ti", 900 << 40).await;
    assert_eq!((disk.models_limit_bytes, disk.models_limit.as_deref()), (Some(0), Some("0")));
    assert!(disk.free_bytes > 0 && disk.total_bytes >= disk.free_bytes, "{disk:?}");
    copies
        .create(&PostParams::default(), &copy("roomless", model(&folder.path().join("good"))))
        .await
        .unwrap();
    let roomless = || async { copies.get("roomless").await.ok()?.status };
    let said = until("a copy without room", || async {
        let ready = get(&roomless().await?.conditions, Type::Ready)?.clone();
        (ready.reason == "DiskPressure").then_some(ready.message)
    })
    .await;
    assert!(said.contains("900.0 TiB stay reserved") && said.contains("spec.disk.reserve"), "{said}");
    assert_eq!(roomless().await.unwrap().bytes_done, 0);
    reserve("1", 1).await;
    until("the copy is there", || async {
        is_true(&roomless().await?.conditions, Type::Ready).then_some(())
    })
    .await;

    let spec = ShardSpec {
        group_ref: russet_crds::LocalReference::new("group"),
        group_uid: "g".into(),
        served_model_name: "chat".into(),
        model_ref: russet_crds::LocalReference::new("tiny"),
        node_name: "one".into(),
        layers_per_rank: vec![4],
        tensor_size: 1,
        weight_bytes: 2 << 30,
        context_tokens: 16,
        max_sequences: 1,
        kv_tokens: None,
        epoch: 1,
        ..ShardSpec::default()
    };
    let shards: Api<Shard> = Api::namespaced(plane.client.clone(), "default");
    shards.create(&PostParams::default(), &Shard::new("large", spec)).await.unwrap();
    let claimed = until("a refusal", || async {
        let status = shards.get("large").await.ok()?.status?;
        get(&status.conditions, Type::Claimed).cloned()
    })
    .await;
    assert_eq!((claimed.status.as_str(), claimed.reason.as_str()), ("False", "MemoryRefused"));
    assert!(
        claimed.message.contains("2147483648") && claimed.message.contains("servingLimit"),
        "{}",
        claimed.message
    );
    assert_eq!(shards.get("large").await.unwrap().name_any(), "large");
    agent.stop().await;
    plane.stop().await;
}
