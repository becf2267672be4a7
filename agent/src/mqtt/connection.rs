//! One connection to the broker, for one who is present: made again for ever, with pauses that grow, and given a last
//! will each time. While it stands, what others say wrongly of its owner is corrected.

use std::path::Path;
use std::time::Duration;

use rumqttc::{AsyncClient, ClientError, Event, LastWill, MqttOptions, Packet, QoS, Transport};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::MqttConfig;
use super::broker::Broker;
use super::topics::{MqttEntity, OFFLINE};
use super::tls_bridge::TlsBridge;

/// Pause after the first connection that failed; doubled up to [`LONGEST_PAUSE`].
const INITIAL_BACKOFF: Duration = Duration::from_secs(1);
/// A broker is restarted in less, and one that is gone for good costs a packet a minute.
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// A wrong status stands at least this long, so that two who contradict each other cannot keep a broker busy.
const CORRECTION_DELAY: Duration = Duration::from_secs(1);
/// What waits for the broker at once: an arrival, a subscription, a farewell, twice.
const QUEUE_CAPACITY: usize = 16;

/// How the broker is reached.
#[derive(Clone, Debug)]
pub(super) struct BrokerTransport {
    bridge: Option<TlsBridge>,
}

impl BrokerTransport {
    /// Sets out: TLS is spoken by a bridge, whose task is one of `tasks`.
    pub fn open(broker: &Broker, folder: &Path, tasks: &mut JoinSet<()>) -> Self {
        Self { bridge: TlsBridge::open(broker, folder, tasks) }
    }
}

/// One who is present.
#[derive(Debug)]
pub(super) struct MqttConnection {
    entity: MqttEntity,
    broker: String,
    options: MqttOptions,
    transport: BrokerTransport,
}

/// Whether a session goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionEnd {
    Retry,
    Done,
}

impl MqttConnection {
    pub fn new(config: &MqttConfig, entity: MqttEntity, transport: BrokerTransport) -> Self {
        let Broker { host, port, login, tls: _ } = &config.broker;
        let mut options = match &transport.bridge {
            Some(bridge) => {
                let mut options = MqttOptions::new(&entity.client_id, bridge.path().to_string_lossy(), 0);
                options.set_transport(Transport::unix());
                options
            }
            None => MqttOptions::new(&entity.client_id, host, *port),
        };
        // rumqttc panics below a second, and counts in seconds.
        options.set_keep_alive(Duration::from_secs(config.keep_alive.as_secs().clamp(1, 65_535)));
        options.set_last_will(LastWill::new(&entity.status, OFFLINE, QoS::AtLeastOnce, true));
        if let Some((user, secret)) = login {
            options.set_credentials(user, &secret.0);
        }
        Self { entity, broker: config.broker.to_string(), options, transport }
    }

    /// Says that its owner is there until this is dropped.
    pub async fn run_until_dropped(self) {
        let (_remembered, forget) = watch::channel(false);
        self.run(forget).await;
    }

    /// The same until its owner is to be forgotten: then the broker is told so, once.
    pub async fn run(self, mut forget: watch::Receiver<bool>) {
        let (mut pause, mut complained) = (INITIAL_BACKOFF, false);
        loop {
            let mut connected = false;
            let ended = self.connect_once(forget.clone(), &mut connected).await;
            if connected {
                (pause, complained) = (INITIAL_BACKOFF, false);
            }
            match ended {
                Ok(ConnectionEnd::Done) => return,
                Ok(ConnectionEnd::Retry) => {}
                Err(error) => {
                    let error = self.transport.bridge.as_ref().and_then(TlsBridge::last_error).unwrap_or(error);
                    let (broker, topic) = (&self.broker, &self.entity.status);
                    match complained {
                        // One line an outage.
                        false => tracing::warn!(
                            broker,
                            topic,
                            error,
                            "the MQTT broker is not told who is present; tried again, and nothing else waits for it"
                        ),
                        true => tracing::debug!(broker, topic, error, "the MQTT broker is still away"),
                    }
                    complained = true;
                }
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                // Who is away cannot be told to forget.
                Ok(_) = forget.wait_for(|forget| *forget) => return,
            }
            pause = (pause * 2).min(MAX_BACKOFF);
        }
    }

    /// From connecting to the connection's end.
    async fn connect_once(&self, forget: watch::Receiver<bool>, connected: &mut bool) -> Result<ConnectionEnd, String> {
        let (client, mut events) = AsyncClient::new(self.options.clone(), QUEUE_CAPACITY);
        // What is said later has tasks of its own: an event that is being sent must not be cut off.
        let mut asides = JoinSet::new();
        loop {
            let event = match events.poll().await {
                Ok(event) => event,
                Err(_) if *connected && *forget.borrow() => return Ok(ConnectionEnd::Done),
                Err(error) => return Err(error.to_string()),
            };
            match event {
                Event::Incoming(Packet::ConnAck(_)) => {
                    *connected = true;
                    tracing::info!(broker = self.broker, topic = self.entity.status, "present at the MQTT broker");
                    // First what is so, then what others say: an earlier status is no contradiction.
                    let said = self.publish_online(&client).and_then(|()| {
                        client.try_subscribe(&self.entity.status, QoS::AtLeastOnce)
                    });
                    said.map_err(|error| error.to_string())?;
                    asides.spawn(publish_removal(client.clone(), self.entity.clone(), forget.clone()));
                }
                Event::Incoming(Packet::Publish(heard))
                    // Beside the farewell at most one correction waits.
                    if self.entity.is_contradicted_by(&heard.topic, &heard.payload)
                        && !*forget.borrow()
                        && unfinished(&mut asides) < 2 =>
                {
                    asides.spawn(correct(client.clone(), self.entity.clone(), forget.clone()));
                }
                Event::Incoming(Packet::Disconnect) => return Ok(ConnectionEnd::Retry),
                _ => {}
            }
        }
    }

    fn publish_online(&self, client: &AsyncClient) -> Result<(), ClientError> {
        for (topic, payload) in self.entity.online_messages() {
            client.try_publish(topic, QoS::AtLeastOnce, true, payload)?;
        }
        Ok(())
    }
}

/// How many tasks have not ended.
fn unfinished(asides: &mut JoinSet<()>) -> usize {
    while asides.try_join_next().is_some() {}
    asides.len()
}

/// Says again what is so, after a moment.
async fn correct(client: AsyncClient, entity: MqttEntity, forget: watch::Receiver<bool>) {
    tokio::time::sleep(CORRECTION_DELAY).await;
    if *forget.borrow() {
        return;
    }
    for (topic, payload) in entity.online_messages() {
        // It fails with its connection, after which all is said anew.
        if client.publish(topic, QoS::AtLeastOnce, true, payload).await.is_err() {
            return;
        }
    }
}

/// Has the broker forget its owner, once that is asked for.
async fn publish_removal(client: AsyncClient, entity: MqttEntity, mut forget: watch::Receiver<bool>) {
    if forget.wait_for(|forget| *forget).await.is_err() {
        // Nobody can ask any more.
        return std::future::pending().await;
    }
    for (topic, payload) in entity.removal_messages() {
        client.publish(topic, QoS::AtLeastOnce, true, payload).await.ok();
    }
    client.disconnect().await.ok();
}
