//! A client that subscribes to all topics, as Home Assistant does to those it knows.

use std::collections::BTreeMap;
use std::time::Duration;

use rumqttc::{AsyncClient, Event, EventLoop, MqttOptions, Packet, QoS};

use super::broker::RunningBroker;

/// Generous: two cores may be busy with a build.
pub const TIMEOUT: Duration = Duration::from_secs(90);

pub struct Observer {
    _client: AsyncClient,
    events: EventLoop,
    last_payloads: BTreeMap<String, String>,
}

impl Observer {
    pub async fn start(broker: &RunningBroker) -> Self {
        let id = format!("observer-{}", broker.observers());
        let mut options = MqttOptions::new(id, "127.0.0.1", broker.plain);
        options.set_keep_alive(Duration::from_secs(600));
        let (client, events) = AsyncClient::new(options, 10);
        client.subscribe("#", QoS::AtLeastOnce).await.unwrap();
        let mut observer = Self { _client: client, events, last_payloads: BTreeMap::new() };
        // From the SUBACK on nothing is missed.
        let subscribed = async { while !matches!(observer.next().await, Packet::SubAck(_)) {} };
        tokio::time::timeout(TIMEOUT, subscribed).await.unwrap();
        observer
    }

    async fn next(&mut self) -> Packet {
        loop {
            if let Event::Incoming(packet) = self.events.poll().await.unwrap() {
                if let Packet::Publish(said) = &packet {
                    let payload = String::from_utf8(said.payload.to_vec()).unwrap();
                    self.last_payloads.insert(said.topic.clone(), payload);
                }
                return packet;
            }
        }
    }

    /// The last payload of a topic.
    pub fn last(&self, topic: &str) -> Option<&str> {
        self.last_payloads.get(topic).map(String::as_str)
    }

    /// Clears the last payload of a topic.
    pub fn forget(&mut self, topic: &str) {
        self.last_payloads.remove(topic);
    }

    /// Waits until this is the last payload.
    pub async fn wait_for(&mut self, topic: &str, payload: &str) {
        let waiting = async {
            while self.last(topic) != Some(payload) {
                self.next().await;
            }
        };
        if tokio::time::timeout(TIMEOUT, waiting).await.is_err() {
            panic!("waited {TIMEOUT:?} for {payload:?} in {topic}; heard {:#?}", self.last_payloads);
        }
    }

    /// Waits until there is a payload, and returns it.
    pub async fn wait_known(&mut self, topic: &str) -> String {
        let waiting = async {
            while self.last(topic).is_none() {
                self.next().await;
            }
        };
        tokio::time::timeout(TIMEOUT, waiting).await.unwrap();
        self.last(topic).unwrap().to_owned()
    }
}
