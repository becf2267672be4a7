//! MQTT presence as a broker sees it: killed and frozen agents, brokers that stop and return, and replicas
//! that move. Every test runs against a small broker of its own (`small_broker.rs`), and against a real
//! mosquitto where `RUSSET_MOSQUITTO` names one (`cargo xtask oracle presence` does).

mod broker;
mod observer;
mod small_broker;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use russet_agent::mqtt::topics::TopicNames;
use russet_agent::mqtt::{DeploymentKey, MqttConfig, MqttPresence};
use russet_mqtt::Broker;

use kube::Api;
use kube::api::{DeleteParams, PostParams};
use russet_crds::{InferenceNode, ModelDeployment};

use self::broker::{BrokerKind, RunningBroker};
use self::observer::Observer;
use super::plane::{TestAgent, TestControlPlane, deployment, pid, signal};

/// Keep-alive of a frozen client: as short as the protocol allows.
const SHORT: Duration = Duration::from_secs(1);
/// Keep-alive of all others: a busy machine must not look like a frozen one.
const LONG: Duration = Duration::from_secs(300);

const NODE: &str = "russet/node/one/status";
const KNOWN: &str = "homeassistant/binary_sensor/russet_node_one/config";
const CHAT: &str = "russet/deployment/default/chat/status";

fn config(url: &str, keep_alive: Duration, password: Option<&Path>, authority: Option<&Path>) -> MqttConfig {
    let broker = Broker::read(url, password, authority).unwrap();
    MqttConfig { broker, names: TopicNames::new("russet", "homeassistant").unwrap(), keep_alive }
}

fn start(broker: &RunningBroker, node: &str, folder: &Path) -> MqttPresence {
    let password = broker.password.as_deref();
    MqttPresence::start(Some(config(&broker.url, LONG, password, broker.authority.as_deref())), node, folder)
}

fn chat() -> BTreeSet<DeploymentKey> {
    BTreeSet::from([("default".to_owned(), "chat".to_owned())])
}

/// This test as a child process that stays online until it is killed.
struct ChildAgent(Child);

/// Variable with the broker for [`child_agent_stays_online_until_killed`].
const CHILD_VARIABLE: &str = "RUSSET_TEST_PRESENCE";

impl ChildAgent {
    fn start(broker: &RunningBroker) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "mqtt::child_agent_stays_online_until_killed"])
            .env(CHILD_VARIABLE, &broker.url)
            .stdout(Stdio::null())
            .spawn();
        Self(child.unwrap())
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.0.id().to_string()]).status().unwrap();
        assert!(sent.success(), "{name} could not be sent");
    }
}

impl Drop for ChildAgent {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Not a test, but the child process that other tests kill.
#[tokio::test]
async fn child_agent_stays_online_until_killed() {
    let Ok(url) = std::env::var(CHILD_VARIABLE) else { return };
    let folder = tempfile::tempdir().unwrap();
    let presence = MqttPresence::start(Some(config(&url, SHORT, None, None)), "one", folder.path());
    presence.set_serving(chat());
    std::future::pending::<()>().await;
}

async fn killed_and_frozen(kind: BrokerKind) {
    let broker = RunningBroker::start(kind).await;
    let mut seen = Observer::start(&broker).await;
    let other = ChildAgent::start(&broker);
    seen.wait_for(NODE, "online").await;
    seen.wait_for(CHAT, "online").await;
    let known: serde_json::Value = serde_json::from_str(&seen.wait_known(KNOWN).await).unwrap();
    assert_eq!(known["state_topic"], NODE);

    // Its connections stay open without traffic: the keep-alive ends them.
    other.signal("-STOP");
    seen.wait_for(NODE, "offline").await;
    seen.wait_for(CHAT, "offline").await;
    other.signal("-CONT");
    seen.wait_for(NODE, "online").await;
    seen.wait_for(CHAT, "online").await;

    other.signal("-KILL");
    seen.wait_for(NODE, "offline").await;
    seen.wait_for(CHAT, "offline").await;

    // A later subscriber gets the same: all of it is retained.
    let mut late = Observer::start(&broker).await;
    late.wait_for(NODE, "offline").await;
    let _again = ChildAgent::start(&broker);
    seen.wait_for(NODE, "online").await;
}

async fn replicas(kind: BrokerKind) {
    let broker = RunningBroker::start(kind).await;
    let mut seen = Observer::start(&broker).await;
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let one = start(&broker, "one", folders[0].path());
    let two = start(&broker, "two", folders[1].path());
    seen.wait_for(NODE, "online").await;
    seen.wait_for("russet/node/two/status", "online").await;
    assert_eq!(seen.last(CHAT), None, "nobody has said that it answers");

    one.set_serving(chat());
    seen.wait_for(CHAT, "online").await;
    one.set_serving(BTreeSet::new());
    seen.wait_for(CHAT, "offline").await;

    // One of two replicas ends: the other one publishes that the deployment is online.
    one.set_serving(chat());
    seen.wait_for(CHAT, "online").await;
    seen.forget(CHAT);
    two.set_serving(chat());
    seen.wait_for(CHAT, "online").await;
    one.set_serving(BTreeSet::new());
    seen.wait_for(CHAT, "offline").await;
    seen.wait_for(CHAT, "online").await;

    // An agent that exits leaves its node offline; a removed node leaves no retained messages.
    one.end(false).await;
    seen.wait_for(NODE, "offline").await;
    two.end(true).await;
    seen.wait_for("russet/node/two/status", "").await;
    seen.wait_for("homeassistant/binary_sensor/russet_node_two/config", "").await;
    seen.wait_for(CHAT, "offline").await;
}

async fn broker_away(kind: BrokerKind) {
    let mut broker = RunningBroker::start(kind).await;
    broker.stop().await;
    let folder = tempfile::tempdir().unwrap();
    let presence = start(&broker, "one", folder.path());
    presence.set_serving(chat());
    broker.restart().await;
    for _ in 0..2 {
        // It returns each time without its retained messages.
        let mut seen = Observer::start(&broker).await;
        seen.wait_for(NODE, "online").await;
        seen.wait_for(CHAT, "online").await;
        seen.wait_known(KNOWN).await;
        broker.stop().await;
        broker.restart().await;
    }
    broker.stop().await;
    // The shutdown does not wait for it.
    tokio::time::timeout(observer::TIMEOUT, presence.end(true)).await.unwrap();
}

async fn encrypted(kind: BrokerKind) {
    let broker = RunningBroker::start_encrypted(kind).await;
    assert!(broker.url.starts_with("mqtts://"));
    let folder = tempfile::tempdir().unwrap();
    let mut seen = Observer::start(&broker).await;
    let presence = start(&broker, "one", folder.path());
    presence.set_serving(chat());
    seen.wait_for(NODE, "online").await;
    seen.wait_for(CHAT, "online").await;
    presence.set_serving(BTreeSet::new());
    seen.wait_for(CHAT, "offline").await;
    presence.end(true).await;
    seen.wait_for(NODE, "").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_or_frozen_agent_goes_offline_and_recovers() {
    killed_and_frozen(BrokerKind::Small).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deployment_is_online_while_any_of_its_replicas_answers() {
    replicas(BrokerKind::Small).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reconnected_broker_receives_all_messages_again() {
    broker_away(BrokerKind::Small).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_wants_tls_and_a_login_gets_both() {
    encrypted(BrokerKind::Small).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mqtt_scenarios_pass_with_a_real_mosquitto() {
    let Some(program) = broker::mosquitto() else { return };
    killed_and_frozen(BrokerKind::Mosquitto(program.clone())).await;
    replicas(BrokerKind::Mosquitto(program.clone())).await;
    broker_away(BrokerKind::Mosquitto(program.clone())).await;
    encrypted(BrokerKind::Mosquitto(program)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deployment_is_online_while_rank_0_serves_until_node_removal() {
    let broker = RunningBroker::start(BrokerKind::Small).await;
    let mut seen = Observer::start(&broker).await;
    let folder = tempfile::tempdir().unwrap();
    let mut plane = TestControlPlane::start(&folder.path().join("plane")).await;
    let mut agents = Vec::new();
    for name in ["one", "two"] {
        let mut agent = TestAgent::join(&plane, folder.path(), name, None).await;
        agent.stop().await;
        agent.config.mqtt = Some(config(&broker.url, LONG, None, None));
        agent.start();
        agents.push(agent);
        seen.wait_for(&format!("russet/node/{name}/status"), "online").await;
    }
    plane.create_model(folder.path()).await;
    assert_eq!(seen.last(CHAT), None);
    let deployments: Api<ModelDeployment> = Api::namespaced(plane.client.clone(), "default");
    deployments.create(&PostParams::default(), &deployment()).await.unwrap();
    seen.wait_for(CHAT, "online").await;

    // Its group is formed again after a loss.
    let ranks = plane.serving(1).await;
    signal(pid(&ranks[0]), "-9");
    seen.wait_for(CHAT, "offline").await;
    seen.wait_for(CHAT, "online").await;

    deployments.delete("chat", &DeleteParams::default()).await.unwrap();
    seen.wait_for(CHAT, "offline").await;

    let nodes: Api<InferenceNode> = Api::all(plane.client.clone());
    nodes.delete("one", &DeleteParams::default()).await.unwrap();
    seen.wait_for(NODE, "").await;
    seen.wait_for(KNOWN, "").await;
    agents.remove(0).wait_removed().await;
    agents.remove(0).stop().await;
    seen.wait_for("russet/node/two/status", "offline").await;
    plane.stop().await;
}

#[tokio::test]
async fn nothing_is_published_without_a_broker() {
    let folder = tempfile::tempdir().unwrap();
    let presence = MqttPresence::start(None, "one", folder.path());
    presence.set_serving(chat());
    presence.end(true).await;
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
