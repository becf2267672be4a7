//! Requests by MQTT: messages to a broker become requests of the inbox, and their answers become messages. A message is
//! acknowledged once its request is on the disk, and an answer counts as published once the broker has it, so nothing is lost
//! when the gateway, the broker or the way between them ends. The id in the topic is the request's idempotency key, so what is
//! delivered twice runs once.
//!
//! ```text
//! PREFIX/inbox/ID ──▶ message ──▶ inbox (durable) ──▶ PUBACK
//! PREFIX/inbox/ID/response ◀── answer ◀── inbox: has ended        PUBACK ──▶ published (durable)
//! ```

mod message;
mod session;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderMap;
use jiff::Timestamp;
use rumqttc::{MqttOptions, Publish};
use russet_mqtt::{Broker, BrokerTransport, ConnectionHistory, Report};
use russet_telemetry::tasks::TaskSet;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::error::{ErrorKind, GatewayError, RETRY_AFTER};
use crate::inbox::Inbox;
use crate::keys::Keyring;
use crate::request_id::RequestId;
use crate::response_store::InboxRow;
use crate::serving::ApiState;
use message::{MAX_NAME_BYTES, RequestMessage, Topics, refused};
use session::OutgoingMessage;

/// Messages whose requests are on their way to the disk: each is in memory until it is there.
const MAX_ACCEPTING: usize = 16;
/// Answers on their way to the broker: each is in memory until it has them.
const MAX_PUBLISHING: usize = 4;
/// How long a request that has ended may take to be gone.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// Largest message that is a request: the largest body, and what is around it.
const MAX_MESSAGE_BYTES: usize = (16 << 20) + (64 << 10);
/// How often a connection may end while an answer is on its way: then the broker takes no such message.
const MAX_PUBLICATIONS: u32 = 5;
/// What MQTT can carry. A larger message than is taken is read all the same: the broker would deliver it for ever.
const MAX_PACKET_BYTES: usize = 256 << 20;

/// Which broker requests come from.
#[derive(Clone, Debug)]
pub struct MqttInbox {
    /// The broker.
    pub broker: Broker,
    /// What all topics begin with.
    pub prefix: String,
    /// Distinguishes this gateway from other clients of the broker.
    pub client_id: String,
    /// MQTT's keep-alive.
    pub keep_alive: Duration,
    /// Where the way to a broker with TLS has its socket.
    pub socket: PathBuf,
}

/// An answer that the broker does not have, and how many connections ended while it was on its way.
#[derive(Clone, Debug)]
struct Unpublished {
    row: InboxRow,
    tries: u32,
}

/// Takes requests from a broker.
pub(crate) struct MqttGateway {
    pub(crate) config: MqttInbox,
    pub(crate) api: Arc<ApiState>,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) keyring: watch::Receiver<Arc<Keyring>>,
    pub(crate) stopping: CancellationToken,
}

impl MqttGateway {
    /// Takes requests until the gateway stops, over as many connections as that takes.
    pub(crate) async fn run(self) {
        let Some(mut answers) = self.inbox.unpublished() else { return };
        let stopping = self.stopping.clone();
        let shared = Arc::new(self);
        let mut tasks = TaskSet::default();
        let socket = || shared.config.socket.clone();
        let transport = BrokerTransport::open(&shared.config.broker, socket, &mut tasks);
        let mut keyring = shared.keyring.clone();
        tokio::select! {
            _ = keyring.wait_for(|keyring| keyring.synced) => {}
            () = stopping.cancelled() => return,
        }
        let mut history = ConnectionHistory::default();
        let mut backlog = VecDeque::new();
        loop {
            let mut connected = None;
            let ended = tokio::select! {
                ended = session::run(&shared, &transport, &mut connected, &mut answers, &mut backlog) => ended,
                () = stopping.cancelled() => return,
            };
            let error = transport.last_error().unwrap_or(ended);
            let (pause, report) = history.ended(connected.map(|since: Instant| since.elapsed()));
            let broker = shared.config.broker.to_string();
            match report {
                Report::Known => {
                    tracing::debug!(broker, error, "there is still no connection to the MQTT broker")
                }
                Report::Outage => tracing::warn!(
                    broker,
                    error,
                    "no connection to the MQTT broker; requests and answers wait for the next one"
                ),
                Report::Contested => tracing::warn!(
                    broker,
                    client_id = shared.config.client_id,
                    "the MQTT broker ends each connection within seconds, as it does when another client has the same client id; a gateway takes requests of one prefix, so give one of them another --mqtt-prefix"
                ),
            }
            tokio::select! {
                () = sleep(pause) => {}
                () = stopping.cancelled() => return,
            }
        }
    }

    fn options(&self, transport: &BrokerTransport) -> MqttOptions {
        let MqttInbox { broker, client_id, keep_alive, .. } = &self.config;
        let mut options = transport.options(broker, client_id, *keep_alive);
        // The broker keeps messages for this client while it is away, and until they are acknowledged.
        options.set_clean_session(false);
        options.set_manual_acks(true);
        options.set_max_packet_size(MAX_PACKET_BYTES, MAX_PACKET_BYTES);
        options
    }

    /// Keeps the request of a message of so many bytes, durably; topic and text of what is published where it is refused.
    async fn accept(&self, topics: &Topics, publish: &Publish, bytes: usize) -> Option<OutgoingMessage> {
        // A longer name has no topic for its answer.
        let name = topics.name(&publish.topic).filter(|name| name.len() <= MAX_NAME_BYTES)?;
        if bytes == 0 {
            // As a retained message is removed.
            return None;
        }
        let accepted = self.accept_message(name, publish, bytes).await;
        accepted.err().map(|error| (topics.response(name), refused(&error)))
    }

    async fn accept_message(&self, name: &str, publish: &Publish, bytes: usize) -> Result<(), GatewayError> {
        if bytes > MAX_MESSAGE_BYTES {
            let message = format!("the message has {bytes} bytes, and at most {MAX_MESSAGE_BYTES} are taken");
            return Err(GatewayError::new(ErrorKind::TooLarge, message));
        }
        let RequestMessage { credentials, request } = RequestMessage::parse(name, &publish.payload)?;
        let caller = message::caller(&self.keyring.borrow(), &credentials)?;
        let _permit = self.api.hold(&caller, bytes)?;
        let own = self.api.own_inbox(&caller)?;
        // A retained message comes with each connection.
        let again = publish.dup || publish.retain;
        let id = RequestId::new(&HeaderMap::new());
        let accepted = own.accept(&id, request, Some(name.to_owned()), false, again).await?;
        own.publish(&accepted, name, again).await
    }

    /// Topic and text of the answer of a request that has ended; none where it was deleted, or its key. An answer that the broker
    /// has not taken says where it is.
    async fn answer(
        &self,
        topics: &Topics,
        Unpublished { row, tries }: &Unpublished,
    ) -> Result<Option<OutgoingMessage>, GatewayError> {
        let Some(topic) = row.reply.as_deref().map(|name| topics.response(name)) else { return Ok(None) };
        let Some(caller) = self.keyring.borrow().caller_of(&row.owner, Timestamp::now()) else {
            return Ok(None);
        };
        let own = self.api.own_inbox(&caller)?;
        let text = async {
            // It has ended, and is about to be gone.
            let row = own.get(&row.id, END_TIMEOUT).await?;
            if !row.state.has_ended() {
                // It runs again, and its own end is published.
                return Ok(None);
            }
            if *tries < MAX_PUBLICATIONS {
                let (record, _permit) = own.record(&self.api, row).await?;
                return Ok(serde_json::to_string(&record).ok());
            }
            tracing::warn!(
                id = row.id,
                "the MQTT broker does not take this answer; where it is, is published"
            );
            Ok(Some(message::without_answer(&row)))
        };
        let text: Result<_, GatewayError> = text.await;
        match text {
            Ok(text) => Ok(text.map(|text| (topic, text))),
            Err(error) if error.kind == ErrorKind::RequestNotFound => Ok(None),
            Err(error) => {
                // The memory for it may be there soon.
                sleep(RETRY_AFTER).await;
                Err(error)
            }
        }
    }
}
