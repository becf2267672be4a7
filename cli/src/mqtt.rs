//! The MQTT flags, which `agent` and `join` take and `up` passes on.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use russet_agent::MqttConfig;
use russet_agent::mqtt::topics::TopicNames;
use russet_mqtt::Broker;

/// MQTT broker to which this node publishes its state.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub struct MqttArguments {
    /// MQTT broker to which this node publishes whether it and its deployments are online, such as
    /// mqtt://me@homeassistant.local or mqtts://me@host:8883; without it, nothing is published.
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
    /// Discovery prefix of Home Assistant; empty disables discovery.
    #[arg(long, default_value = "homeassistant")]
    mqtt_discovery_prefix: String,
    /// Keep-alive interval; after one and a half of it the broker publishes a silent machine as offline.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u16).range(1..=3600), value_name = "SECONDS")]
    mqtt_keep_alive: u16,
}

impl MqttArguments {
    /// The broker's configuration, if one is given.
    pub fn config(&self) -> Result<Option<MqttConfig>> {
        let Self {
            mqtt,
            mqtt_password_file,
            mqtt_ca_file,
            mqtt_prefix,
            mqtt_discovery_prefix,
            mqtt_keep_alive,
        } = self;
        let Some(url) = mqtt else { return Ok(None) };
        Ok(Some(MqttConfig {
            broker: Broker::read(url, mqtt_password_file.as_deref(), mqtt_ca_file.as_deref())?,
            names: TopicNames::new(mqtt_prefix, mqtt_discovery_prefix)?,
            keep_alive: Duration::from_secs((*mqtt_keep_alive).into()),
        }))
    }

    /// The same flags for a child process.
    pub fn to_flags(&self) -> Vec<String> {
        let Self {
            mqtt,
            mqtt_password_file,
            mqtt_ca_file,
            mqtt_prefix,
            mqtt_discovery_prefix,
            mqtt_keep_alive,
        } = self;
        let Some(url) = mqtt else { return Vec::new() };
        let mut flags = vec!["--mqtt".to_owned(), url.clone()];
        for (flag, file) in [("--mqtt-password-file", mqtt_password_file), ("--mqtt-ca-file", mqtt_ca_file)] {
            if let Some(file) = file {
                flags.extend([flag.to_owned(), file.display().to_string()]);
            }
        }
        for (flag, value) in [
            ("--mqtt-prefix", mqtt_prefix.clone()),
            ("--mqtt-discovery-prefix", mqtt_discovery_prefix.clone()),
            ("--mqtt-keep-alive", mqtt_keep_alive.to_string()),
        ] {
            flags.extend([flag.to_owned(), value]);
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
