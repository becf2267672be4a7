//! Requests of the inbox by MQTT, over a real mosquitto: `cargo xtask oracle inbox` names one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rumqttc::{AsyncClient, Event, EventLoop, MqttOptions, Packet, QoS};
use russet_gateway::mqtt::MqttInbox;
use russet_gateway::response_store::ResponseStoreConfig;
use russet_gateway::routes::DeploymentState;
use russet_mqtt::Broker;
use russet_wire::event::FinishReason;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::harness::{GatewayLab, ScriptStep, TEST_TIMEOUT, access_key, finished, limits, started, token};

/// A mosquitto that keeps what it has for clients that are away.
struct Mosquitto {
    program: PathBuf,
    folder: tempfile::TempDir,
    port: u16,
    process: Option<Child>,
}

impl Mosquitto {
    /// One that runs; none where the environment names no program.
    async fn start() -> Option<Self> {
        let Some(program) = std::env::var_os("RUSSET_MOSQUITTO").map(PathBuf::from) else {
            assert!(std::env::var_os("RUSSET_ORACLES").is_none(), "RUSSET_MOSQUITTO names no mosquitto");
            println!("skipped: RUSSET_MOSQUITTO names no mosquitto; `cargo xtask oracle inbox` fetches one");
            return None;
        };
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let folder = tempfile::tempdir().unwrap();
        let text = format!(
            "user root\npersistence true\npersistence_location {}/\nautosave_interval 1\nautosave_on_changes true\n\
             allow_anonymous true\nlistener {port} 127.0.0.1\n",
            folder.path().display()
        );
        std::fs::write(folder.path().join("mosquitto.conf"), text).unwrap();
        let mut broker = Self { program, folder, port, process: None };
        broker.restart().await;
        Some(broker)
    }

    async fn restart(&mut self) {
        let log = std::fs::File::create(self.folder.path().join("log")).unwrap();
        let mut command = Command::new(&self.program);
        command.arg("-c").arg(self.folder.path().join("mosquitto.conf"));
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        self.process = Some(command.spawn().unwrap());
        self.listens(true).await;
    }

    /// Ends it as a signal of a service manager does: what it keeps is on the disk.
    async fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let pid = rustix::process::Pid::from_child(&process);
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
            process.wait().unwrap();
        }
        self.listens(false).await;
    }

    async fn listens(&self, expected: bool) {
        let reached = async {
            while tokio::net::TcpStream::connect(("127.0.0.1", self.port)).await.is_ok() != expected {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(TEST_TIMEOUT, reached).await.unwrap();
    }

    /// A gateway that keeps its inbox in this folder and takes requests from this broker.
    async fn gateway(&self, folder: &Path) -> GatewayLab {
        let mqtt = MqttInbox {
            broker: Broker::read(&format!("mqtt://127.0.0.1:{}", self.port), None, None).unwrap(),
            prefix: "russet".into(),
            client_id: "russet_inbox_here".into(),
            keep_alive: Duration::from_secs(30),
            socket: folder.join("mqtt.sock"),
        };
        let store = ResponseStoreConfig::new(folder.join("responses.db"));
        GatewayLab::start_with_mqtt(limits(), store, mqtt, &[access_key("a", "s-a", |_| {})]).await
    }
}

impl Drop for Mosquitto {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            process.kill().ok();
            process.wait().ok();
        }
    }
}

/// A client with a session, which sends requests and gets their answers.
struct Client {
    client: AsyncClient,
    events: EventLoop,
    answers: BTreeMap<String, Vec<Value>>,
    /// Answers to probes, which may come later than anything else.
    probes: usize,
}

impl Client {
    async fn connect(broker: &Mosquitto) -> Self {
        let mut options = MqttOptions::new("their-client", "127.0.0.1", broker.port);
        options.set_keep_alive(Duration::from_secs(600)).set_clean_session(false);
        options.set_max_packet_size(1 << 20, 1 << 20).set_inflight(100);
        let (client, events) = AsyncClient::new(options, 1000);
        client.subscribe("russet/inbox/+/response", QoS::AtLeastOnce).await.unwrap();
        let mut this = Self { client, events, answers: BTreeMap::new(), probes: 0 };
        this.until(|packet| matches!(packet, Packet::SubAck(_))).await;
        this
    }

    /// Reads what comes until one is as expected.
    async fn until(&mut self, is_expected: impl Fn(&Packet) -> bool) {
        let reached = async {
            loop {
                // The broker may be away.
                let Ok(event) = self.events.poll().await else {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                };
                let Event::Incoming(packet) = event else { continue };
                if let Packet::Publish(publish) = &packet {
                    let name = publish.topic.split('/').nth(2).unwrap().to_owned();
                    let answer = serde_json::from_slice(&publish.payload).unwrap();
                    match name.as_str() {
                        "probe" => self.probes += 1,
                        _ => self.answers.entry(name).or_default().push(answer),
                    }
                }
                if is_expected(&packet) {
                    return;
                }
            }
        };
        tokio::time::timeout(TEST_TIMEOUT, reached).await.unwrap();
    }

    /// Sends these messages; returns once the broker has them.
    async fn send(&mut self, messages: impl IntoIterator<Item = (String, String)>) {
        for (name, text) in messages {
            self.client.publish(format!("russet/inbox/{name}"), QoS::AtLeastOnce, false, text).await.unwrap();
            self.until(|packet| matches!(packet, Packet::PubAck(_))).await;
        }
    }

    /// Waits until a gateway takes requests: before its first subscription the broker keeps none for it.
    async fn gateway_is_there(&mut self) {
        while self.probes == 0 {
            self.send([("probe".to_owned(), "?".to_owned())]).await;
            self.settle().await;
        }
    }

    /// Waits until so many requests have answers.
    async fn answered(&mut self, count: usize) {
        while self.answers.len() < count {
            self.until(|packet| matches!(packet, Packet::Publish(_))).await;
        }
    }

    /// Reads until the broker has answered a ping, and so has sent what it had.
    async fn settle(&mut self) {
        self.client.subscribe("russet/nothing", QoS::AtLeastOnce).await.unwrap();
        self.until(|packet| matches!(packet, Packet::SubAck(_))).await;
    }
}

fn chat(text: &str) -> String {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": text}]});
    json!({"key": "s-a", "body": body}).to_string()
}

fn content(answer: &Value) -> &Value {
    &answer["response"]["body"]["choices"][0]["message"]["content"]
}

/// An engine that says what it was told.
fn echo(lab: &GatewayLab) -> crate::harness::ScriptedEngine {
    let engine = lab.engine("a", |request| {
        vec![started(), token(&request.messages[0].content), finished(FinishReason::Stop)]
    });
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    engine
}

/// A broker, a gateway that takes requests from it and echoes them, and a client of the broker.
struct MqttLab {
    broker: Mosquitto,
    folder: tempfile::TempDir,
    lab: GatewayLab,
    engine: crate::harness::ScriptedEngine,
    client: Client,
}

impl MqttLab {
    /// One that runs; none where the environment names no broker.
    async fn start() -> Option<Self> {
        let broker = Mosquitto::start().await?;
        let folder = tempfile::tempdir().unwrap();
        let lab = broker.gateway(folder.path()).await;
        let engine = echo(&lab);
        let mut client = Client::connect(&broker).await;
        client.gateway_is_there().await;
        Some(Self { broker, folder, lab, engine, client })
    }
}

#[tokio::test]
async fn mosquitto_fifty_requests_get_fifty_answers() {
    let Some(MqttLab { broker: _broker, folder: _folder, lab, engine, mut client }) = MqttLab::start().await
    else {
        return;
    };
    // Each one twice, as by a client that is not sure.
    let messages = (0..50).flat_map(|number| [number, number]);
    client.send(messages.map(|number| (format!("r{number}"), chat(&format!("<{number}>"))))).await;
    client.answered(50).await;
    client.settle().await;
    for number in 0..50 {
        let answers = &client.answers[&format!("r{number}")];
        assert!(
            answers.iter().all(|answer| answer["status"] == "done" && answer == &answers[0]),
            "{answers:?}"
        );
        assert_eq!(content(&answers[0]), &json!(format!("<{number}>")));
    }
    assert_eq!(engine.requests(), 50, "each runs once");
    // They are requests of the inbox like any others.
    let list = lab.client.get(lab.url("/v1/inbox?limit=100")).bearer_auth("s-a").send().await.unwrap();
    let list: Value = list.json().await.unwrap();
    assert_eq!(list["data"].as_array().unwrap().len(), 50);
    assert_eq!(list["data"][0]["idempotency_key"], "r49");
}

#[tokio::test]
async fn mosquitto_what_is_no_request_is_refused() {
    let Some(MqttLab { broker: _broker, folder: _folder, lab: _lab, engine, mut client }) =
        MqttLab::start().await
    else {
        return;
    };
    let keyless = json!({"body": {"model": "m"}}).to_string();
    let wrong = json!({"key": "nix", "body": {"model": "m"}}).to_string();
    for (name, text, code) in [
        ("no-json", "{".to_owned(), "invalid_request"),
        ("no-key", keyless, "invalid_api_key"),
        ("wrong-key", wrong, "invalid_api_key"),
        ("again", chat("a"), ""),
        ("again", chat("b"), "idempotency_key_reused"),
    ] {
        client.send([(name.to_owned(), text)]).await;
        let answered = |client: &Client| client.answers.get(name).and_then(|all| all.last()).cloned();
        while answered(&client).is_none_or(|answer| (answer["status"] == "done") != code.is_empty()) {
            client.until(|packet| matches!(packet, Packet::Publish(_))).await;
        }
        let answer = answered(&client).unwrap();
        if code.is_empty() {
            assert_eq!(content(&answer), "a");
        } else {
            assert_eq!((&answer["status"], &answer["error"]["code"]), (&json!("refused"), &json!(code)));
        }
    }
    // An error of the model's is an answer.
    let unknown = json!({"key": "s-a", "path": "/v1/messages", "body": {"model": "nix"}}).to_string();
    client.send([("unknown".to_owned(), unknown)]).await;
    while !client.answers.contains_key("unknown") {
        client.until(|packet| matches!(packet, Packet::Publish(_))).await;
    }
    let answer = &client.answers["unknown"][0];
    assert_eq!((&answer["status"], &answer["response"]["body"]["type"]), (&json!("failed"), &json!("error")));
    assert_eq!(engine.requests(), 1);
}

#[tokio::test]
async fn mosquitto_a_flood_of_refusals_stops_nothing() {
    let Some(MqttLab { broker: _broker, folder: _folder, lab: _lab, engine, mut client }) =
        MqttLab::start().await
    else {
        return;
    };
    for number in 0..900 {
        // Nobody acknowledges these, so that they come as quickly as they can.
        client.client.publish(format!("russet/inbox/f{number}"), QoS::AtMostOnce, false, "?").await.unwrap();
    }
    client.send([("good".to_owned(), chat("good"))]).await;
    while !client.answers.contains_key("good") {
        client.until(|packet| matches!(packet, Packet::Publish(_))).await;
    }
    assert_eq!((content(&client.answers["good"][0]), engine.requests()), (&json!("good"), 1));
}

#[tokio::test]
async fn mosquitto_nothing_is_lost_while_one_of_them_is_away() {
    let Some(MqttLab { mut broker, folder, lab, engine, mut client }) = MqttLab::start().await else {
        return;
    };
    client.send([("first".to_owned(), chat("first"))]).await;
    client.answered(1).await;
    drop(engine);
    lab.kill().await;
    // The broker keeps what is sent to a gateway that is away.
    client.send((0..10).map(|number| (format!("away{number}"), chat("away")))).await;
    let lab = broker.gateway(folder.path()).await;
    let hold = CancellationToken::new();
    let wait = hold.clone();
    let engine = lab.engine("a", move |request| {
        let says = request.messages[0].content.clone();
        vec![ScriptStep::PrepareUntil(wait.clone()), started(), token(&says), finished(FinishReason::Stop)]
    });
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    engine.running(10).await;
    // The gateway is killed while it has them, the broker ends, and the answers are there when both are back.
    lab.kill().await;
    let lab = broker.gateway(folder.path()).await;
    hold.cancel();
    broker.stop().await;
    let engine = echo(&lab);
    engine.requested(10).await;
    broker.restart().await;
    client.answered(11).await;
    client.settle().await;
    for number in 0..10 {
        let answers = &client.answers[&format!("away{number}")];
        assert!(
            answers.iter().all(|answer| answer["status"] == "done" && content(answer) == "away"),
            "{answers:?}"
        );
        assert_eq!(answers.len(), 1, "it was published once");
    }
    assert_eq!(engine.requests(), 10);
}
