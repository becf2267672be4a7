//! The MQTT flags, which `agent`, `join` and `gateway` take and `up` passes on.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use russet_agent::MqttConfig;
use russet_agent::mqtt::topics::TopicNames;
use russet_gateway::mqtt::MqttInbox;
use russet_mqtt::{Broker, topic_prefix};

/// An MQTT broker.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub struct BrokerArguments {
    /// MQTT broker, such as mqtt://me@homeassistant.local or mqtts://me@host:8883. A node publishes there whether it and its
    /// deployments are online, and a gateway takes requests of the inbox from it; without it, there is none of that.
    #[arg(long, value_name = "URL")]
    mqtt: Option<String>,
    /// File with the password of the broker's user.
    #[arg(long, requires = "mqtt", value_name = "FILE")]
    mqtt_password_file: Option<PathBuf>,
    /// CA that signed the certificate of a broker at mqtts://, PEM.
    #[arg(long, requires = "mqtt", value_name = "FILE")]
    mqtt_ca_file: Option<PathBuf>,
    /// Prefix of every topic.
    #[arg(long, default_value = "russet")]
    mqtt_prefix: String,
    /// Keep-alive interval; after one and a half of it the broker takes a silent machine for offline.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u16).range(1..=3600), value_name = "SECONDS")]
    mqtt_keep_alive: u16,
}

impl BrokerArguments {
    /// The broker, if one is given.
    fn broker(&self) -> Result<Option<Broker>> {
        let Self { mqtt, mqtt_password_file, mqtt_ca_file, .. } = self;
        let Some(url) = mqtt else { return Ok(None) };
        Ok(Some(Broker::read(url, mqtt_password_file.as_deref(), mqtt_ca_file.as_deref())?))
    }

    fn keep_alive(&self) -> Duration {
        Duration::from_secs(self.mqtt_keep_alive.into())
    }

    /// Where a gateway takes requests from, if a broker is given. `socket` is the way to one with TLS.
    pub fn inbox(&self, socket: PathBuf) -> Result<Option<MqttInbox>> {
        let Some(broker) = self.broker()? else { return Ok(None) };
        let prefix = topic_prefix(&self.mqtt_prefix)?;
        // The same for every start: the broker keeps what came meanwhile for the client with this id.
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let client_id = format!("{prefix}_inbox_{host}");
        Ok(Some(MqttInbox { broker, prefix, client_id, keep_alive: self.keep_alive(), socket }))
    }

    /// The same flags for a child process.
    pub fn to_flags(&self) -> Vec<String> {
        let Self { mqtt, mqtt_password_file, mqtt_ca_file, mqtt_prefix, mqtt_keep_alive } = self;
        let Some(url) = mqtt else { return Vec::new() };
        let mut flags = vec!["--mqtt".to_owned(), url.clone()];
        for (flag, file) in [("--mqtt-password-file", mqtt_password_file), ("--mqtt-ca-file", mqtt_ca_file)] {
            if let Some(file) = file {
                flags.extend([flag.to_owned(), file.display().to_string()]);
            }
        }
        flags.extend(["--mqtt-prefix".to_owned(), mqtt_prefix.clone()]);
        flags.extend(["--mqtt-keep-alive".to_owned(), mqtt_keep_alive.to_string()]);
        flags
    }
}

/// The broker to which a node publishes its state.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub struct MqttArguments {
    #[command(flatten)]
    pub broker: BrokerArguments,
    /// Discovery prefix of Home Assistant; empty disables discovery.
    #[arg(long, default_value = "homeassistant")]
    mqtt_discovery_prefix: String,
}

impl MqttArguments {
    /// The broker's configuration, if one is given.
    pub fn config(&self) -> Result<Option<MqttConfig>> {
        let Some(broker) = self.broker.broker()? else { return Ok(None) };
        Ok(Some(MqttConfig {
            broker,
            names: TopicNames::new(&self.broker.mqtt_prefix, &self.mqtt_discovery_prefix)?,
            keep_alive: self.broker.keep_alive(),
        }))
    }

    /// The same flags for a child process.
    pub fn to_flags(&self) -> Vec<String> {
        let mut flags = self.broker.to_flags();
        if !flags.is_empty() {
            flags.extend(["--mqtt-discovery-prefix".to_owned(), self.mqtt_discovery_prefix.clone()]);
        }
        flags
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct MqttFlags {
        #[command(flatten)]
        presence: MqttArguments,
    }

    #[test]
    fn child_process_gets_the_flags_of_its_parent() {
        let line = "russet --mqtt mqtts://me@h --mqtt-password-file p --mqtt-ca-file c --mqtt-prefix home/russet --mqtt-keep-alive 5";
        let parsed = MqttFlags::try_parse_from(line.split(' ')).unwrap().presence;
        let flags = [vec!["russet".to_owned()], parsed.to_flags()].concat();
        let heard = MqttFlags::try_parse_from(flags).unwrap().presence;
        assert_eq!(format!("{heard:?}"), format!("{parsed:?}"));
        assert!(parsed.config().is_err(), "there are no such files");
        let silent = MqttFlags::try_parse_from(["russet"]).unwrap().presence;
        assert!(silent.config().unwrap().is_none() && silent.to_flags().is_empty());
        let quiet = ["russet", "--mqtt", "mqtt://h", "--mqtt-discovery-prefix", ""];
        let config = MqttFlags::try_parse_from(quiet).unwrap().presence.config().unwrap().unwrap();
        assert!(config.names.node("a").discovery.is_none());
        for bad in ["russet --mqtt-ca-file c", "russet --mqtt mqtt://h --mqtt-keep-alive 0"] {
            assert!(MqttFlags::try_parse_from(bad.split(' ')).is_err(), "{bad}");
        }
        assert!(
            MqttFlags::try_parse_from(["russet", "--mqtt", "mqtt://h", "--mqtt-prefix", "#"])
                .unwrap()
                .presence
                .config()
                .is_err()
        );
    }
}
