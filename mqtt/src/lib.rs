//! A broker of MQTT: its address and secrets, and the way to it. Not here: what is published and read, see the agent's `mqtt`
//! and the gateway's `inbox`.

mod broker;
mod history;
mod prefix;
mod tls_bridge;
mod transport;

pub use broker::{Broker, BrokerError, Secret, Trust};
pub use history::{ConnectionHistory, Report};
pub use prefix::{BadPrefix, topic_prefix};
pub use transport::BrokerTransport;
