//! One connection to the broker, for one who is present: made again for ever, with pauses that grow, and given a last
//! will each time. While it stands, what others say wrongly of its owner is corrected.

use std::path::Path;
use std::time::Duration;

use rumqttc::{AsyncClient, ClientError, Event, LastWill, MqttOptions, Packet, QoS, Transport};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::PresenceConfig;
use super::broker::Broker;
use super::entity::{Entity, OFFLINE};
use super::tls::Bridge;

/// Pause after the first connection that failed; doubled up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// A broker is restarted in less, and one that is gone for good costs a packet a minute.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// A wrong status stands at least this long, so that two who contradict each other cannot keep a broker busy.
const CORRECTION: Duration = Duration::from_secs(1);
/// What waits for the broker at once: an arrival, a subscription, a farewell, twice.
const CAPACITY: usize = 16;

/// How the broker is reached.
#[derive(Clone, Debug)]
pub(super) struct Way {
    bridge: Option<Bridge>,
}

impl Way {
    /// Sets out: TLS is spoken by a bridge, whose task is one of `tasks`.
    pub fn open(broker: &Broker, folder: &Path, tasks: &mut JoinSet<()>) -> Self {
        Self { bridge: Bridge::open(broker, folder, tasks) }
    }
}

/// One who is present.
#[derive(Debug)]
pub(super) struct Session {
    entity: Entity,
    broker: String,
    options: MqttOptions,
    way: Way,
}

/// Whether a session goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Again,
    Over,
}

impl Session {
    pub fn new(config: &PresenceConfig, entity: Entity, way: Way) -> Self {
        let Broker { host, port, login, tls: _ } = &config.broker;
        let mut options = match &way.bridge {
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
        Self { entity, broker: config.broker.to_string(), options, way }
    }

    /// Says that its owner is there until this is dropped.
    pub async fn keep_online(self) {
        let (_remembered, forget) = watch::channel(false);
        self.keep(forget).await;
    }

    /// The same until its owner is to be forgotten: then the broker is told so, once.
    pub async fn keep(self, mut forget: watch::Receiver<bool>) {
        let (mut pause, mut complained) = (FIRST_PAUSE, false);
        loop {
            let mut connected = false;
            let ended = self.connection(forget.clone(), &mut connected).await;
            if connected {
                (pause, complained) = (FIRST_PAUSE, false);
            }
            match ended {
                Ok(Next::Over) => return,
                Ok(Next::Again) => {}
                Err(error) => {
                    let error = self.way.bridge.as_ref().and_then(Bridge::trouble).unwrap_or(error);
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
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// From connecting to the connection's end.
    async fn connection(&self, forget: watch::Receiver<bool>, connected: &mut bool) -> Result<Next, String> {
        let (client, mut events) = AsyncClient::new(self.options.clone(), CAPACITY);
        // What is said later has tasks of its own: an event that is being sent must not be cut off.
        let mut asides = JoinSet::new();
        loop {
            let event = match events.poll().await {
                Ok(event) => event,
                Err(_) if *connected && *forget.borrow() => return Ok(Next::Over),
                Err(error) => return Err(error.to_string()),
            };
            match event {
                Event::Incoming(Packet::ConnAck(_)) => {
                    *connected = true;
                    tracing::info!(broker = self.broker, topic = self.entity.status, "present at the MQTT broker");
                    // First what is so, then what others say: an earlier status is no contradiction.
                    let said = self.arrive(&client).and_then(|()| {
                        client.try_subscribe(&self.entity.status, QoS::AtLeastOnce)
                    });
                    said.map_err(|error| error.to_string())?;
                    asides.spawn(farewell(client.clone(), self.entity.clone(), forget.clone()));
                }
                Event::Incoming(Packet::Publish(heard))
                    // Beside the farewell at most one correction waits.
                    if self.entity.is_wronged_by(&heard.topic, &heard.payload)
                        && !*forget.borrow()
                        && waiting(&mut asides) < 2 =>
                {
                    asides.spawn(correct(client.clone(), self.entity.clone(), forget.clone()));
                }
                Event::Incoming(Packet::Disconnect) => return Ok(Next::Again),
                _ => {}
            }
        }
    }

    fn arrive(&self, client: &AsyncClient) -> Result<(), ClientError> {
        for (topic, payload) in self.entity.arrival() {
            client.try_publish(topic, QoS::AtLeastOnce, true, payload)?;
        }
        Ok(())
    }
}

/// How many tasks have not ended.
fn waiting(asides: &mut JoinSet<()>) -> usize {
    while asides.try_join_next().is_some() {}
    asides.len()
}

/// Says again what is so, after a moment.
async fn correct(client: AsyncClient, entity: Entity, forget: watch::Receiver<bool>) {
    tokio::time::sleep(CORRECTION).await;
    if *forget.borrow() {
        return;
    }
    for (topic, payload) in entity.arrival() {
        // It fails with its connection, after which all is said anew.
        if client.publish(topic, QoS::AtLeastOnce, true, payload).await.is_err() {
            return;
        }
    }
}

/// Has the broker forget its owner, once that is asked for.
async fn farewell(client: AsyncClient, entity: Entity, mut forget: watch::Receiver<bool>) {
    if forget.wait_for(|forget| *forget).await.is_err() {
        // Nobody can ask any more.
        return std::future::pending().await;
    }
    for (topic, payload) in entity.oblivion() {
        client.publish(topic, QoS::AtLeastOnce, true, payload).await.ok();
    }
    client.disconnect().await.ok();
}
