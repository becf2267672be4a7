//! MQTT topics and payloads of a node and of a deployment, and their discovery messages for Home Assistant.
//! Pure. Not here: when they are published.

use russet_mqtt::{BadPrefix, topic_prefix};
use serde_json::{Value, json};

/// Status payload of an online entity.
pub const ONLINE: &str = "online";
/// Status payload of an offline entity.
pub const OFFLINE: &str = "offline";

/// Topic prefixes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicNames {
    prefix: String,
    /// Discovery prefix of Home Assistant; without it no discovery messages are published.
    discovery: Option<String>,
}

/// A node or a deployment that is online or offline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MqttEntity {
    /// MQTT client id; a second connection with the same id ends the first.
    pub client_id: String,
    /// Topic of its status.
    pub status: String,
    /// Discovery topic and payload for Home Assistant.
    pub discovery: Option<(String, String)>,
}

impl TopicNames {
    /// Validates the prefixes. An empty `discovery` disables discovery.
    pub fn new(prefix: &str, discovery: &str) -> Result<Self, BadPrefix> {
        let discovery = if discovery.is_empty() { None } else { Some(topic_prefix(discovery)?) };
        Ok(Self { prefix: topic_prefix(prefix)?, discovery })
    }

    /// The entity of a node. It has one agent, so its name is unique.
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

    /// The entity of a deployment, published by the node of its rank 0. Its topic is the same on every node:
    /// replicas share it, and it stays when they move.
    pub fn deployment(&self, namespace: &str, name: &str, node: &str) -> MqttEntity {
        let id = self.id("deployment", &[namespace, name]);
        // The discovery message is the same on every node, too.
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

    /// An id of letters, digits, `-` and `_` only, as Home Assistant requires. Ids are unique: the objects'
    /// own names contain no `_`, and a namespace contains no dot.
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
    /// Messages on connection, all of them retained.
    pub fn online_messages(&self) -> Vec<(&str, &str)> {
        let discovery = self.discovery.iter().map(|(topic, payload)| (topic.as_str(), payload.as_str()));
        discovery.chain([(self.status.as_str(), ONLINE)]).collect()
    }

    /// Messages that remove the retained ones: the same topics with empty payloads.
    pub fn removal_messages(&self) -> Vec<(&str, &str)> {
        self.online_messages().into_iter().rev().map(|(topic, _)| (topic, "")).collect()
    }

    /// Whether a received status contradicts this entity's. An earlier connection's last will may arrive
    /// late, another replica may have ended, and a broker may have been cleared.
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
        assert!(
            chat.removal_messages()
                .iter()
                .all(|(topic, payload)| topics.contains(topic) && payload.is_empty())
        );
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
    fn both_prefixes_are_checked() {
        for bad in ["/russet", "a/#"] {
            assert_eq!(TopicNames::new(bad, "homeassistant"), Err(BadPrefix(bad.to_owned())), "{bad:?}");
            assert_eq!(TopicNames::new("russet", bad), Err(BadPrefix(bad.to_owned())), "{bad:?}");
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
