//! MQTT connection of one entity: reconnects forever with exponential backoff, with a last will each time.
//! While connected, it corrects wrong statuses of its entity from others.

use std::time::Duration;

use rumqttc::{AsyncClient, ClientError, Event, LastWill, MqttOptions, Packet, QoS};
use russet_mqtt::{BrokerTransport, ConnectionHistory, Report};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::MqttConfig;
use super::topics::{MqttEntity, OFFLINE};

/// Delay of a correction, so that two contradicting clients cannot keep a broker busy.
const CORRECTION_DELAY: Duration = Duration::from_secs(1);
/// Maximum number of queued messages: online messages, a subscription and removal messages, twice.
const QUEUE_CAPACITY: usize = 16;

/// The connection of one entity.
#[derive(Debug)]
pub(super) struct MqttConnection {
    entity: MqttEntity,
    broker: String,
    options: MqttOptions,
    transport: BrokerTransport,
}

/// Whether to reconnect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionEnd {
    Retry,
    Done,
}

impl MqttConnection {
    pub fn new(config: &MqttConfig, entity: MqttEntity, transport: BrokerTransport) -> Self {
        let mut options = transport.options(&config.broker, &entity.client_id, config.keep_alive);
        options.set_last_will(LastWill::new(&entity.status, OFFLINE, QoS::AtLeastOnce, true));
        Self { entity, broker: config.broker.to_string(), options, transport }
    }

    /// Keeps the entity online until this is dropped.
    pub async fn run_until_dropped(self) {
        let (_remembered, forget) = watch::channel(false);
        self.run(forget).await;
    }

    /// Keeps the entity online until removal is requested; then removes its retained messages, once.
    pub async fn run(self, mut forget: watch::Receiver<bool>) {
        let mut history = ConnectionHistory::default();
        loop {
            let mut connected = None;
            let ended = self.connect_once(forget.clone(), &mut connected, history.is_contested()).await;
            let error = match ended {
                Ok(ConnectionEnd::Done) => return,
                Ok(ConnectionEnd::Retry) => None,
                Err(error) => Some(self.transport.last_error().unwrap_or(error)),
            };
            let (pause, report) = history.ended(connected.map(|since: Instant| since.elapsed()));
            let (broker, topic) = (&self.broker, &self.entity.status);
            match report {
                Report::Outage => tracing::warn!(
                    broker,
                    topic,
                    error,
                    "no connection to the MQTT broker; retrying, and nothing else waits for it"
                ),
                Report::Contested => tracing::warn!(
                    broker,
                    topic,
                    client_id = self.entity.client_id,
                    "the MQTT broker ends each connection within seconds, as it does when another client has the same client id; stop that one, or give one of them another --mqtt-prefix or node name; retried once a minute"
                ),
                Report::Known => {
                    tracing::debug!(broker, topic, error, "there is still no connection to the MQTT broker");
                }
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                // Without a connection nothing can be removed.
                Ok(_) = forget.wait_for(|forget| *forget) => return,
            }
        }
    }

    /// Runs one connection from connect to its end.
    async fn connect_once(
        &self,
        forget: watch::Receiver<bool>,
        connected: &mut Option<Instant>,
        contested: bool,
    ) -> Result<ConnectionEnd, String> {
        let (client, mut events) = AsyncClient::new(self.options.clone(), QUEUE_CAPACITY);
        // Later messages have tasks of their own: an event in progress must not be cancelled.
        let mut asides = JoinSet::new();
        loop {
            let event = match events.poll().await {
                Ok(event) => event,
                Err(_) if connected.is_some() && *forget.borrow() => return Ok(ConnectionEnd::Done),
                Err(error) => return Err(error.to_string()),
            };
            match event {
                Event::Incoming(Packet::ConnAck(_)) => {
                    *connected = Some(Instant::now());
                    let (broker, topic) = (&self.broker, &self.entity.status);
                    match contested {
                        false => tracing::info!(broker, topic, "connected to the MQTT broker"),
                        true => tracing::debug!(broker, topic, "connected to the MQTT broker"),
                    }
                    // Publish first, then subscribe: an earlier retained status is no contradiction.
                    let published = self.publish_online(&client).and_then(|()| {
                        client.try_subscribe(&self.entity.status, QoS::AtLeastOnce)
                    });
                    published.map_err(|error| error.to_string())?;
                    asides.spawn(publish_removal(client.clone(), self.entity.clone(), forget.clone()));
                }
                Event::Incoming(Packet::Publish(message))
                    // At most one correction waits beside the removal.
                    if self.entity.is_contradicted_by(&message.topic, &message.payload)
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

/// Number of unfinished tasks.
fn unfinished(asides: &mut JoinSet<()>) -> usize {
    while asides.try_join_next().is_some() {}
    asides.len()
}

/// Publishes the status again, after a delay.
async fn correct(client: AsyncClient, entity: MqttEntity, forget: watch::Receiver<bool>) {
    tokio::time::sleep(CORRECTION_DELAY).await;
    if *forget.borrow() {
        return;
    }
    for (topic, payload) in entity.online_messages() {
        // Fails only with the connection; the next one publishes everything again.
        if client.publish(topic, QoS::AtLeastOnce, true, payload).await.is_err() {
            return;
        }
    }
}

/// Removes the entity's retained messages once that is requested.
async fn publish_removal(client: AsyncClient, entity: MqttEntity, mut forget: watch::Receiver<bool>) {
    if forget.wait_for(|forget| *forget).await.is_err() {
        // The requesting side is gone.
        return std::future::pending().await;
    }
    for (topic, payload) in entity.removal_messages() {
        client.publish(topic, QoS::AtLeastOnce, true, payload).await.ok();
    }
    client.disconnect().await.ok();
}
