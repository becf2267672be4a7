//! Somebody who subscribes to everything, as Home Assistant does to what it knows.

use std::collections::BTreeMap;
use std::time::Duration;

use rumqttc::{AsyncClient, Event, EventLoop, MqttOptions, Packet, QoS};

use super::broker::Running;

/// Generous: two cores may be building something else.
pub const PATIENCE: Duration = Duration::from_secs(90);

pub struct Observer {
    _client: AsyncClient,
    events: EventLoop,
    said: BTreeMap<String, String>,
}

impl Observer {
    pub async fn start(broker: &Running) -> Self {
        let id = format!("observer-{}", broker.observers());
        let mut options = MqttOptions::new(id, "127.0.0.1", broker.plain);
        options.set_keep_alive(Duration::from_secs(600));
        let (client, events) = AsyncClient::new(options, 10);
        client.subscribe("#", QoS::AtLeastOnce).await.unwrap();
        let mut observer = Self { _client: client, events, said: BTreeMap::new() };
        // From its acknowledgement on nothing is missed.
        let subscribed = async { while !matches!(observer.next().await, Packet::SubAck(_)) {} };
        tokio::time::timeout(PATIENCE, subscribed).await.unwrap();
        observer
    }

    async fn next(&mut self) -> Packet {
        loop {
            if let Event::Incoming(packet) = self.events.poll().await.unwrap() {
                if let Packet::Publish(said) = &packet {
                    let payload = String::from_utf8(said.payload.to_vec()).unwrap();
                    self.said.insert(said.topic.clone(), payload);
                }
                return packet;
            }
        }
    }

    /// What was said last.
    pub fn now(&self, topic: &str) -> Option<&str> {
        self.said.get(topic).map(String::as_str)
    }

    /// As if nothing had been said yet.
    pub fn forget(&mut self, topic: &str) {
        self.said.remove(topic);
    }

    /// Waits until this is what was said last.
    pub async fn until(&mut self, topic: &str, payload: &str) {
        let waiting = async {
            while self.now(topic) != Some(payload) {
                self.next().await;
            }
        };
        if tokio::time::timeout(PATIENCE, waiting).await.is_err() {
            panic!("waited {PATIENCE:?} for {payload:?} in {topic}; heard {:#?}", self.said);
        }
    }

    /// Waits until something was said, and returns it.
    pub async fn known(&mut self, topic: &str) -> String {
        let waiting = async {
            while self.now(topic).is_none() {
                self.next().await;
            }
        };
        tokio::time::timeout(PATIENCE, waiting).await.unwrap();
        self.now(topic).unwrap().to_owned()
    }
}
