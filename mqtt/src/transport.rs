//! The way to a broker: over TCP, or over TLS by the bridge.

use std::path::PathBuf;
use std::time::Duration;

use rumqttc::{MqttOptions, Transport};
use russet_telemetry::tasks::TaskSet;

use crate::broker::Broker;
use crate::tls_bridge::TlsBridge;

/// The way to a broker. Clones share it.
#[derive(Clone, Debug)]
pub struct BrokerTransport {
    bridge: Option<TlsBridge>,
}

impl BrokerTransport {
    /// Prepares the way: for TLS it starts a bridge that listens at `socket`, a path that is short enough for one, and whose
    /// task is added to `tasks`.
    pub fn open(broker: &Broker, socket: impl FnOnce() -> PathBuf, tasks: &mut TaskSet) -> Self {
        Self { bridge: TlsBridge::open(broker, socket, tasks) }
    }

    /// Options of a client with this id, and with the broker's login.
    pub fn options(&self, broker: &Broker, client_id: &str, keep_alive: Duration) -> MqttOptions {
        let Broker { host, port, login, tls: _ } = broker;
        let mut options = match &self.bridge {
            Some(bridge) => {
                let mut options = MqttOptions::new(client_id, bridge.path().to_string_lossy(), 0);
                options.set_transport(Transport::unix());
                options
            }
            None => MqttOptions::new(client_id, host, *port),
        };
        // rumqttc panics below a second, and counts in seconds.
        options.set_keep_alive(Duration::from_secs(keep_alive.as_secs().clamp(1, 65_535)));
        if let Some((user, secret)) = login {
            options.set_credentials(user, &secret.0);
        }
        options
    }

    /// Why the last connection of a bridge ended; the client only sees that it did.
    pub fn last_error(&self) -> Option<String> {
        self.bridge.as_ref().and_then(TlsBridge::last_error)
    }
}
