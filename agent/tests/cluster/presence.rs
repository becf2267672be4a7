//! Presence as a broker sees it, through killed and frozen agents, brokers that go and come back, and replicas that move.
//! Every story is told to a small broker of this test's own (`small.rs`), and all of them to a real mosquitto where
//! `RUSSET_MOSQUITTO` names one (`cargo xtask oracle presence` does).

mod broker;
mod observer;
mod small;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use russet_agent::presence::broker::Broker;
use russet_agent::presence::entity::Names;
use russet_agent::presence::{Deployment, Presence, PresenceConfig};

use kube::Api;
use kube::api::{DeleteParams, PostParams};
use russet_crds::{InferenceNode, ModelDeployment};

use self::broker::{Kind, Running};
use self::observer::Observer;
use super::plane::{Agent, Plane, deployment, pid, signal};

/// As short as the protocol allows, for the one who is frozen.
const SHORT: Duration = Duration::from_secs(1);
/// For all others: a busy machine must not look like a frozen one.
const LONG: Duration = Duration::from_secs(300);

const NODE: &str = "russet/node/one/status";
const KNOWN: &str = "homeassistant/binary_sensor/russet_node_one/config";
const CHAT: &str = "russet/deployment/default/chat/status";

fn config(
    url: &str,
    keep_alive: Duration,
    password: Option<&Path>,
    authority: Option<&Path>,
) -> PresenceConfig {
    let broker = Broker::read(url, password, authority).unwrap();
    PresenceConfig { broker, names: Names::new("russet", "homeassistant").unwrap(), keep_alive }
}

fn start(broker: &Running, node: &str, folder: &Path) -> Presence {
    let password = broker.password.as_deref();
    Presence::start(Some(config(&broker.url, LONG, password, broker.authority.as_deref())), node, folder)
}

fn chat() -> BTreeSet<Deployment> {
    BTreeSet::from([("default".to_owned(), "chat".to_owned())])
}

/// This test again as a process that is present until it is killed.
struct Other(Child);

/// Tells [`speaks_until_it_is_killed`] whom to be present at.
const SPEAK: &str = "RUSSET_TEST_PRESENCE";

impl Other {
    fn start(broker: &Running) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "presence::speaks_until_it_is_killed"])
            .env(SPEAK, &broker.url)
            .stdout(Stdio::null())
            .spawn();
        Self(child.unwrap())
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.0.id().to_string()]).status().unwrap();
        assert!(sent.success(), "{name} could not be sent");
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// No test, but the process that others kill.
#[tokio::test]
async fn speaks_until_it_is_killed() {
    let Ok(url) = std::env::var(SPEAK) else { return };
    let folder = tempfile::tempdir().unwrap();
    let presence = Presence::start(Some(config(&url, SHORT, None, None)), "one", folder.path());
    presence.answering(chat());
    std::future::pending::<()>().await;
}

async fn killed_and_frozen(kind: Kind) {
    let broker = Running::start(kind).await;
    let mut seen = Observer::start(&broker).await;
    let other = Other::start(&broker);
    seen.until(NODE, "online").await;
    seen.until(CHAT, "online").await;
    let known: serde_json::Value = serde_json::from_str(&seen.known(KNOWN).await).unwrap();
    assert_eq!(known["state_topic"], NODE);

    // Its connections stand, and nobody speaks over them: the keep-alive ends them.
    other.signal("-STOP");
    seen.until(NODE, "offline").await;
    seen.until(CHAT, "offline").await;
    other.signal("-CONT");
    seen.until(NODE, "online").await;
    seen.until(CHAT, "online").await;

    other.signal("-KILL");
    seen.until(NODE, "offline").await;
    seen.until(CHAT, "offline").await;

    // Whoever comes later hears the same: all of it is retained.
    let mut late = Observer::start(&broker).await;
    late.until(NODE, "offline").await;
    let _again = Other::start(&broker);
    seen.until(NODE, "online").await;
}

async fn replicas(kind: Kind) {
    let broker = Running::start(kind).await;
    let mut seen = Observer::start(&broker).await;
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let one = start(&broker, "one", folders[0].path());
    let two = start(&broker, "two", folders[1].path());
    seen.until(NODE, "online").await;
    seen.until("russet/node/two/status", "online").await;
    assert_eq!(seen.now(CHAT), None, "nobody has said that it answers");

    one.answering(chat());
    seen.until(CHAT, "online").await;
    one.answering(BTreeSet::new());
    seen.until(CHAT, "offline").await;

    // One of two replicas ends: the other one says that the deployment answers.
    one.answering(chat());
    seen.until(CHAT, "online").await;
    seen.forget(CHAT);
    two.answering(chat());
    seen.until(CHAT, "online").await;
    one.answering(BTreeSet::new());
    seen.until(CHAT, "offline").await;
    seen.until(CHAT, "online").await;

    // An agent that ends leaves its node offline; of a node that was removed nothing is left.
    one.end(false).await;
    seen.until(NODE, "offline").await;
    two.end(true).await;
    seen.until("russet/node/two/status", "").await;
    seen.until("homeassistant/binary_sensor/russet_node_two/config", "").await;
    seen.until(CHAT, "offline").await;
}

async fn broker_away(kind: Kind) {
    let mut broker = Running::start(kind).await;
    broker.stop().await;
    let folder = tempfile::tempdir().unwrap();
    let presence = start(&broker, "one", folder.path());
    presence.answering(chat());
    broker.come_back().await;
    for _ in 0..2 {
        // It comes back each time without what it knew.
        let mut seen = Observer::start(&broker).await;
        seen.until(NODE, "online").await;
        seen.until(CHAT, "online").await;
        seen.known(KNOWN).await;
        broker.stop().await;
        broker.come_back().await;
    }
    broker.stop().await;
    // Nobody waits for it.
    tokio::time::timeout(observer::PATIENCE, presence.end(true)).await.unwrap();
}

async fn encrypted(kind: Kind) {
    let broker = Running::start_encrypted(kind).await;
    assert!(broker.url.starts_with("mqtts://"));
    let folder = tempfile::tempdir().unwrap();
    let mut seen = Observer::start(&broker).await;
    let presence = start(&broker, "one", folder.path());
    presence.answering(chat());
    seen.until(NODE, "online").await;
    seen.until(CHAT, "online").await;
    presence.answering(BTreeSet::new());
    seen.until(CHAT, "offline").await;
    presence.end(true).await;
    seen.until(NODE, "").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_or_frozen_agent_is_offline_and_back_when_it_lives() {
    killed_and_frozen(Kind::Small).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deployment_is_online_while_any_of_its_replicas_answers() {
    replicas(Kind::Small).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_was_away_is_told_everything_again() {
    broker_away(Kind::Small).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_wants_tls_and_a_login_gets_both() {
    encrypted(Kind::Small).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_story_holds_with_a_real_mosquitto() {
    let Some(program) = broker::mosquitto() else { return };
    killed_and_frozen(Kind::Mosquitto(program.clone())).await;
    replicas(Kind::Mosquitto(program.clone())).await;
    broker_away(Kind::Mosquitto(program.clone())).await;
    encrypted(Kind::Mosquitto(program)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deployment_is_online_while_its_rank_0_serves_and_a_removed_node_is_forgotten() {
    let broker = Running::start(Kind::Small).await;
    let mut seen = Observer::start(&broker).await;
    let folder = tempfile::tempdir().unwrap();
    let mut plane = Plane::start(&folder.path().join("plane")).await;
    let mut agents = Vec::new();
    for name in ["one", "two"] {
        let mut agent = Agent::join(&plane, folder.path(), name, None).await;
        agent.stop().await;
        agent.config.presence = Some(config(&broker.url, LONG, None, None));
        agent.start();
        agents.push(agent);
        seen.until(&format!("russet/node/{name}/status"), "online").await;
    }
    plane.create_model(folder.path()).await;
    assert_eq!(seen.now(CHAT), None);
    let deployments: Api<ModelDeployment> = Api::namespaced(plane.client.clone(), "default");
    deployments.create(&PostParams::default(), &deployment()).await.unwrap();
    seen.until(CHAT, "online").await;

    // Its group forms anew after a loss.
    let ranks = plane.serving(1).await;
    signal(pid(&ranks[0]), "-9");
    seen.until(CHAT, "offline").await;
    seen.until(CHAT, "online").await;

    deployments.delete("chat", &DeleteParams::default()).await.unwrap();
    seen.until(CHAT, "offline").await;

    let nodes: Api<InferenceNode> = Api::all(plane.client.clone());
    nodes.delete("one", &DeleteParams::default()).await.unwrap();
    seen.until(NODE, "").await;
    seen.until(KNOWN, "").await;
    agents.remove(0).removed().await;
    agents.remove(0).stop().await;
    seen.until("russet/node/two/status", "offline").await;
    plane.stop().await;
}

#[tokio::test]
async fn nobody_is_told_where_nobody_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let presence = Presence::start(None, "one", folder.path());
    presence.answering(chat());
    presence.end(true).await;
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
