//! What the broker is told: topics and payloads of a node and of a deployment, and what Home Assistant reads to know
//! them. Pure; who tells it when is the session's business.

use serde_json::{Value, json};
use thiserror::Error;

/// What a status topic says of somebody who is there.
pub const ONLINE: &str = "online";
/// And of somebody who is not.
pub const OFFLINE: &str = "offline";

/// How topics begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicNames {
    prefix: String,
    /// Where Home Assistant looks; nothing is told there without it.
    discovery: Option<String>,
}

/// A topic cannot begin with this.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "{0:?} cannot begin a topic of MQTT: it is empty, longer than {MAX_PREFIX_BYTES} bytes, begins or ends with a slash, or has one of + # and control characters; write for example russet"
)]
pub struct BadPrefix(pub String);

/// Topics are at most 65,535 bytes, of which namespace and name take their part.
const MAX_PREFIX_BYTES: usize = 200;

/// Somebody who is there or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MqttEntity {
    /// What the broker knows its connection by; a second one of the same name ends the first.
    pub client_id: String,
    /// Topic of its status.
    pub status: String,
    /// Topic and payload by which Home Assistant knows it.
    pub discovery: Option<(String, String)>,
}

impl TopicNames {
    /// Checks what topics are to begin with. An empty `discovery` is none.
    pub fn new(prefix: &str, discovery: &str) -> Result<Self, BadPrefix> {
        let check = |text: &str| {
            let control = text.contains(|c: char| c.is_control() || matches!(c, '+' | '#'));
            let slashes = text.starts_with('/') || text.ends_with('/');
            let bad = text.is_empty() || text.len() > MAX_PREFIX_BYTES || control || slashes;
            if bad { Err(BadPrefix(text.to_owned())) } else { Ok(text.to_owned()) }
        };
        let discovery = if discovery.is_empty() { None } else { Some(check(discovery)?) };
        Ok(Self { prefix: check(prefix)?, discovery })
    }

    /// A node. It has one agent, so its name is enough.
    pub fn node(&self, node: &str) -> MqttEntity {
        let id = self.id("node", &[node]);
        let device = json!({
            "identifiers": [id],
            "name": node,
            "manufacturer": "Russet",
            "model": "Node",
            "sw_version": env!("CARGO_PKG_VERSION"),
        });
        let status = format!("{}/node/{node}/status", self.prefix);
        let discovery = self.discovery(&id, "Online", "connectivity", &status, device);
        MqttEntity { client_id: id, status, discovery }
    }

    /// A deployment, told of by the node whose rank 0 answers. Its topic is the same on every node: replicas share it,
    /// and it stays what it is when they move.
    pub fn deployment(&self, namespace: &str, name: &str, node: &str) -> MqttEntity {
        let id = self.id("deployment", &[namespace, name]);
        // All that Home Assistant is told is the same on every node, too.
        let device = json!({
            "identifiers": [id],
            "name": format!("{namespace}/{name}"),
            "manufacturer": "Russet",
            "model": "Deployment",
        });
        let status = format!("{}/deployment/{namespace}/{name}/status", self.prefix);
        let discovery = self.discovery(&id, "Answers", "running", &status, device);
        MqttEntity { client_id: format!("{id}@{}", encoded(node)), status, discovery }
    }

    /// A name with letters, digits, `-` and `_` alone, as Home Assistant wants it. Different objects have different
    /// ones: their own names hold no `_`, and a namespace has no dot.
    fn id(&self, kind: &str, names: &[&str]) -> String {
        let names: Vec<String> =
            [self.prefix.as_str(), kind].iter().chain(names).map(|name| encoded(name)).collect();
        names.join("_")
    }

    fn discovery(
        &self,
        id: &str,
        name: &str,
        class: &str,
        status: &str,
        device: Value,
    ) -> Option<(String, String)> {
        let topic = format!("{}/binary_sensor/{id}/config", self.discovery.as_ref()?);
        let payload = json!({
            "name": name,
            "unique_id": id,
            "device_class": class,
            "state_topic": status,
            "payload_on": ONLINE,
            "payload_off": OFFLINE,
            "qos": 1,
            "device": device,
            "origin": {"name": "Russet", "sw_version": env!("CARGO_PKG_VERSION")},
        });
        Some((topic, payload.to_string()))
    }
}

fn encoded(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect()
}

impl MqttEntity {
    /// What is said as soon as the broker listens, all of it retained.
    pub fn online_messages(&self) -> Vec<(&str, &str)> {
        let discovery = self.discovery.iter().map(|(topic, payload)| (topic.as_str(), payload.as_str()));
        discovery.chain([(self.status.as_str(), ONLINE)]).collect()
    }

    /// What makes the broker forget all of it: retained messages without a payload.
    pub fn removal_messages(&self) -> Vec<(&str, &str)> {
        self.online_messages().into_iter().rev().map(|(topic, _)| (topic, "")).collect()
    }

    /// Whether somebody said what is not so. An earlier connection's last will may come late, another replica may have
    /// ended, and a broker may have been cleaned.
    pub fn is_contradicted_by(&self, topic: &str, payload: &[u8]) -> bool {
        topic == self.status && payload != ONLINE.as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn discovery_payload_matches_home_assistant() {
        let names = TopicNames::new("russet", "homeassistant").unwrap();
        let node = names.node("studio-1.lan");
        assert_eq!(node.client_id, "russet_node_studio-1_lan");
        assert_eq!(node.status, "russet/node/studio-1.lan/status");
        let (topic, payload) = node.discovery.clone().unwrap();
        assert_eq!(topic, "homeassistant/binary_sensor/russet_node_studio-1_lan/config");
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(
            serde_json::from_str::<Value>(&payload).unwrap(),
            json!({
                "name": "Online", "unique_id": "russet_node_studio-1_lan", "device_class": "connectivity",
                "state_topic": "russet/node/studio-1.lan/status", "payload_on": "online", "payload_off": "offline",
                "qos": 1,
                "device": {
                    "identifiers": ["russet_node_studio-1_lan"], "name": "studio-1.lan", "manufacturer": "Russet",
                    "model": "Node", "sw_version": version,
                },
                "origin": {"name": "Russet", "sw_version": version},
            })
        );
        let chat = names.deployment("default", "chat", "studio-1.lan");
        assert_eq!(chat.status, "russet/deployment/default/chat/status");
        assert_eq!(chat.online_messages()[1], ("russet/deployment/default/chat/status", ONLINE));
        let topics: Vec<&str> = chat.online_messages().iter().map(|(topic, _)| *topic).collect();
        assert!(chat.removal_messages().iter().all(|(topic, payload)| topics.contains(topic) && payload.is_empty()));
        assert!(payload.len() < 2048, "rumqttc sends at most 10 KiB");
    }

    #[test]
    fn replicas_share_a_deployments_topics_and_no_connection() {
        let names = TopicNames::new("home/russet", "homeassistant").unwrap();
        let (one, two) = (names.deployment("a", "b", "one"), names.deployment("a", "b", "two"));
        assert_eq!((&one.status, &one.discovery), (&two.status, &two.discovery));
        assert_ne!(one.client_id, two.client_id);
        let all = [
            names.node("a-b"),
            names.node("a.b"),
            names.deployment("a", "b", "n"),
            names.deployment("a-b", "c", "n"),
            names.deployment("a", "b-c", "n"),
            names.deployment("a", "b.c", "n"),
            names.deployment("a", "b", "c"),
        ];
        let ids: BTreeSet<&str> = all.iter().map(|entity| entity.client_id.as_str()).collect();
        assert_eq!(ids.len(), all.len());
        assert_eq!(TopicNames::new("russet", "").unwrap().node("a").online_messages().len(), 1);
    }

    #[test]
    fn a_prefix_is_part_of_a_topic_and_no_filter() {
        for bad in ["", "/russet", "russet/", "a/#", "+", "a\0b", &"x".repeat(MAX_PREFIX_BYTES + 1)] {
            assert_eq!(TopicNames::new(bad, "homeassistant"), Err(BadPrefix(bad.to_owned())), "{bad:?}");
            if !bad.is_empty() {
                assert!(TopicNames::new("russet", bad).is_err(), "{bad:?}");
            }
        }
    }

    #[test]
    fn only_a_wrong_status_on_its_own_topic_contradicts() {
        let entity = TopicNames::new("russet", "").unwrap().node("a");
        for (topic, payload, wronged) in [
            (entity.status.as_str(), ONLINE, false),
            (&entity.status, OFFLINE, true),
            (&entity.status, "", true),
            ("russet/node/b/status", OFFLINE, false),
        ] {
            assert_eq!(entity.is_contradicted_by(topic, payload.as_bytes()), wronged, "{topic} {payload:?}");
        }
    }
}
