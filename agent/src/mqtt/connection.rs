//! MQTT connection of one entity: reconnects forever with exponential backoff, with a last will each time.
//! While connected, it corrects wrong statuses of its entity from others.

use std::path::Path;
use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};
use rumqttc::{AsyncClient, ClientError, Event, LastWill, MqttOptions, Packet, QoS, Transport};
use russet_telemetry::tasks::TaskSet;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::MqttConfig;
use super::broker::Broker;
use super::tls_bridge::TlsBridge;
use super::topics::{MqttEntity, OFFLINE};

/// Maximum backoff. A broker restarts in less, and one that is gone for good costs a packet a minute.
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Backoff after failed connections; it doubles.
const BACKOFF: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(Duration::from_secs(1))
    .with_max_delay(MAX_BACKOFF)
    .without_max_times();
/// Delay of a correction, so that two contradicting clients cannot keep a broker busy.
const CORRECTION_DELAY: Duration = Duration::from_secs(1);
/// Maximum number of queued messages: online messages, a subscription and removal messages, twice.
const QUEUE_CAPACITY: usize = 16;

/// Transport to the broker.
#[derive(Clone, Debug)]
pub(super) struct BrokerTransport {
    bridge: Option<TlsBridge>,
}

impl BrokerTransport {
    /// Prepares the transport: for TLS it starts a bridge, whose task is added to `tasks`.
    pub fn open(broker: &Broker, folder: &Path, tasks: &mut TaskSet) -> Self {
        Self { bridge: TlsBridge::open(broker, folder, tasks) }
    }
}

/// The connection of one entity.
#[derive(Debug)]
pub(super) struct MqttConnection {
    entity: MqttEntity,
    broker: String,
    options: MqttOptions,
    transport: BrokerTransport,
}

/// A connection that ended sooner after it was accepted may have been taken over.
const MIN_CONNECTED: Duration = Duration::from_secs(5);
/// Such ends in a row that mean another client with the same id: a broker that restarts ends one or two.
const MAX_SHORT_CONNECTIONS: u32 = 3;
/// A connection this long shows that nobody contests the id any more: the other one waits for as long as this one.
const UNCONTESTED_AFTER: Duration = Duration::from_secs(150);

/// What earlier connections tell about the next one.
#[derive(Debug)]
struct ConnectionHistory {
    delays: ExponentialBackoff,
    /// Connections in a row that were accepted and ended within [`MIN_CONNECTED`].
    short: u32,
    reported: bool,
}

/// What to log about the end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Report {
    /// The first end of an outage.
    Outage,
    /// Another client has the same id.
    Contested,
    /// Nothing new.
    Known,
}

impl Default for ConnectionHistory {
    fn default() -> Self {
        Self { delays: BACKOFF.build(), short: 0, reported: false }
    }
}

impl ConnectionHistory {
    fn is_contested(&self) -> bool {
        self.short >= MAX_SHORT_CONNECTIONS
    }

    /// Records an end; the connection was accepted for `elapsed`, or never. Returns the pause before the next.
    fn ended(&mut self, elapsed: Option<Duration>) -> (Duration, Report) {
        let enough = if self.is_contested() { UNCONTESTED_AFTER } else { MIN_CONNECTED };
        let mut report = Report::Known;
        match elapsed {
            Some(elapsed) if elapsed >= enough => *self = Self::default(),
            Some(_) => {
                self.short += 1;
                if self.short == MAX_SHORT_CONNECTIONS {
                    report = Report::Contested;
                }
            }
            None => {}
        }
        if report == Report::Known && !self.reported {
            report = Report::Outage;
        }
        self.reported = true;
        let pause = self.delays.next().unwrap_or(MAX_BACKOFF);
        (if self.is_contested() { MAX_BACKOFF } else { pause }, report)
    }
}

/// Whether to reconnect.
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
                Err(error) => {
                    Some(self.transport.bridge.as_ref().and_then(TlsBridge::last_error).unwrap_or(error))
                }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contested_client_id_is_said_once_and_retried_each_minute() {
        let seconds = Duration::from_secs;
        let mut history = ConnectionHistory::default();
        for (story, elapsed, pause, report) in [
            ("no broker yet", None, 1, Report::Outage),
            ("still none", None, 2, Report::Known),
            ("an hour online, then its restart", Some(3_600), 1, Report::Outage),
            ("ended at once", Some(0), 2, Report::Known),
            ("ended again", Some(1), 4, Report::Known),
            ("and again", Some(4), 60, Report::Contested),
            ("the other waits a minute too", Some(60), 60, Report::Known),
            ("no broker meanwhile", None, 60, Report::Known),
            ("taken over", Some(90), 60, Report::Known),
            ("the other client is gone", Some(150), 1, Report::Outage),
            ("short", Some(2), 2, Report::Known),
            ("long enough, so it counts anew", Some(5), 1, Report::Outage),
        ] {
            assert_eq!(history.ended(elapsed.map(seconds)), (seconds(pause), report), "{story}");
        }
    }
}
