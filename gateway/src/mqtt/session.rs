//! One connection to a broker: its messages become requests, and answers are published until the broker has them.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use rumqttc::{AsyncClient, Event, EventLoop, Outgoing, Packet, Publish, QoS, SubscribeReasonCode};
use russet_mqtt::BrokerTransport;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

use super::message::Topics;
use super::{MAX_ACCEPTING, MAX_MESSAGE_BYTES, MAX_PUBLISHING, MqttGateway, Unpublished};
use crate::error::GatewayError;
use crate::response_store::InboxRow;

/// Messages of the client that wait for the connection: more than there are numbers for what is on its way, so that nobody
/// who takes events waits for who sends them.
const QUEUE_CAPACITY: usize = 2 * 65_536;

/// Topic and text of a message.
pub(super) type OutgoingMessage = (String, String);

/// Runs one connection; why it ended. What the broker does not have then is in the backlog.
pub(super) async fn run(
    gateway: &Arc<MqttGateway>,
    transport: &BrokerTransport,
    connected: &mut Option<Instant>,
    answers: &mut mpsc::UnboundedReceiver<InboxRow>,
    backlog: &mut VecDeque<Unpublished>,
) -> String {
    let (client, events) = AsyncClient::new(gateway.options(transport), QUEUE_CAPACITY);
    let (sender, mut received) = mpsc::unbounded_channel();
    let mut poller = JoinSet::new();
    poller.spawn(poll(events, sender));
    let mut session = Session {
        gateway,
        topics: Topics::new(&gateway.config.prefix),
        client,
        accepting: JoinSet::new(),
        preparing: JoinSet::new(),
        sent: SentMessages::default(),
        is_subscribed: false,
    };
    let error = loop {
        if session.takes_answers()
            && let Some(row) = backlog.pop_front()
        {
            session.prepare(row);
            continue;
        }
        let step = tokio::select! {
            event = received.recv() => match event {
                Some((Ok(event), permit)) => {
                    if matches!(event, Event::Incoming(Packet::ConnAck(_))) {
                        *connected = Some(Instant::now());
                    }
                    session.event(event, permit).await
                }
                Some((Err(error), _)) => Err(error),
                None => Err("its task ended".to_owned()),
            },
            Some(accepted) = session.accepting.join_next() => session.accepted(accepted).await,
            Some(prepared) = session.preparing.join_next() => session.prepared(prepared, backlog).await,
            Some(row) = answers.recv(), if backlog.is_empty() => {
                backlog.push_back(Unpublished { row, tries: 0 });
                Ok(())
            }
        };
        if let Err(error) = step {
            break error;
        }
    };
    backlog.extend(session.sent.unacknowledged());
    while let Some(prepared) = session.preparing.join_next().await {
        backlog.extend(prepared.ok().map(|(_, answer)| answer));
    }
    error
}

struct Session<'a> {
    gateway: &'a Arc<MqttGateway>,
    topics: Topics,
    client: AsyncClient,
    /// Messages whose requests are on their way to the disk, and what is published where one is refused.
    accepting: JoinSet<(Option<OutgoingMessage>, Publish)>,
    /// Answers that are read from the store.
    preparing: JoinSet<(Result<Option<OutgoingMessage>, GatewayError>, Unpublished)>,
    sent: SentMessages,
    is_subscribed: bool,
}

impl Session<'_> {
    /// Whether there is room for one more answer on its way.
    fn takes_answers(&self) -> bool {
        self.is_subscribed && self.sent.count() + self.preparing.len() < MAX_PUBLISHING
    }

    fn prepare(&mut self, answer: Unpublished) {
        let (gateway, topics) = (self.gateway.clone(), self.topics.clone());
        self.preparing.spawn(async move { (gateway.answer(&topics, &answer).await, answer) });
    }

    async fn event(
        &mut self,
        event: Event,
        permit: Option<(OwnedSemaphorePermit, usize)>,
    ) -> Result<(), String> {
        match event {
            Event::Incoming(Packet::ConnAck(_)) => {
                let subscribed = self.client.subscribe(self.topics.filter(), QoS::AtLeastOnce).await;
                subscribed.map_err(|error| error.to_string())?;
            }
            Event::Incoming(Packet::SubAck(granted)) => {
                let (broker, topic) = (self.gateway.config.broker.to_string(), self.topics.filter());
                if granted.return_codes.contains(&SubscribeReasonCode::Failure) {
                    return Err(format!("the broker does not let this client subscribe to {topic}"));
                }
                tracing::info!(broker, topic, "requests are taken from the MQTT broker");
                self.is_subscribed = true;
            }
            Event::Incoming(Packet::Publish(mut publish)) => {
                let (gateway, topics) = (self.gateway.clone(), self.topics.clone());
                let (permit, bytes) = permit.unzip();
                self.accepting.spawn(async move {
                    let refusal = gateway.accept(&topics, &publish, bytes.unwrap_or_default()).await;
                    // An acknowledgement needs its number alone.
                    publish.payload = Bytes::new();
                    drop(permit);
                    (refusal, publish)
                });
            }
            Event::Outgoing(Outgoing::Publish(number)) => self.sent.numbered(number),
            Event::Incoming(Packet::PubAck(ack)) => {
                if let Some(Unpublished { row, .. }) = self.sent.acknowledged(ack.pkid)
                    && let Err(error) = self.gateway.inbox.published(&row).await
                {
                    tracing::warn!(id = row.id, %error, "an answer is published again when the gateway starts again");
                }
            }
            Event::Incoming(Packet::Disconnect) => return Err("the broker ended it".to_owned()),
            _ => {}
        }
        Ok(())
    }

    /// The request of a message is on the disk, or refused: the broker may forget the message.
    async fn accepted(
        &mut self,
        accepted: Result<(Option<OutgoingMessage>, Publish), JoinError>,
    ) -> Result<(), String> {
        let (refusal, publish) = accepted.map_err(|error| error.to_string())?;
        if let Some((topic, text)) = refusal {
            // Whoever floods the topic may miss one.
            match self.client.try_publish(topic, QoS::AtLeastOnce, false, text) {
                Ok(()) => self.sent.publishing(None),
                Err(error) => tracing::debug!(%error, "a refusal is not published"),
            }
        }
        self.client.ack(&publish).await.map_err(|error| error.to_string())
    }

    /// An answer was read.
    async fn prepared(
        &mut self,
        prepared: Result<(Result<Option<OutgoingMessage>, GatewayError>, Unpublished), JoinError>,
        backlog: &mut VecDeque<Unpublished>,
    ) -> Result<(), String> {
        match prepared.map_err(|error| error.to_string())? {
            (Ok(Some(message)), answer) => self.publish(message, answer).await,
            // It was deleted, or its key.
            (Ok(None), _) => Ok(()),
            (Err(error), answer) => {
                tracing::warn!(id = answer.row.id, %error, "an answer is published later");
                backlog.push_back(answer);
                Ok(())
            }
        }
    }

    async fn publish(&mut self, (topic, text): OutgoingMessage, answers: Unpublished) -> Result<(), String> {
        self.sent.publishing(Some(answers));
        let published = self.client.publish(topic, QoS::AtLeastOnce, false, text).await;
        published.map_err(|error| error.to_string())
    }
}

/// Answers and refusals on their way to the broker.
#[derive(Default)]
struct SentMessages {
    /// In the order of their publication, until the client has given them numbers. A refusal has no request.
    unnumbered: VecDeque<Option<Unpublished>>,
    by_number: HashMap<u16, Unpublished>,
}

impl SentMessages {
    /// A message is given to the client.
    fn publishing(&mut self, answer: Option<Unpublished>) {
        self.unnumbered.push_back(answer);
    }

    /// The client has sent the next message with this number.
    fn numbered(&mut self, number: u16) {
        if let Some(Some(answer)) = self.unnumbered.pop_front() {
            self.by_number.insert(number, answer);
        }
    }

    /// The broker has the message with this number; the request that it answers.
    fn acknowledged(&mut self, number: u16) -> Option<Unpublished> {
        self.by_number.remove(&number)
    }

    fn count(&self) -> usize {
        self.unnumbered.len() + self.by_number.len()
    }

    /// Requests whose answers the broker does not have.
    fn unacknowledged(self) -> impl Iterator<Item = Unpublished> {
        let sent = self.unnumbered.into_iter().flatten().chain(self.by_number.into_values());
        sent.map(|answer| Unpublished { tries: answer.tries + 1, ..answer })
    }
}

/// An event, and of a message its place and how many bytes it has.
type ReceivedEvent = (Result<Event, String>, Option<(OwnedSemaphorePermit, usize)>);

/// Passes events on, in a task of its own: one that is on its way must not be cancelled. A message waits until so many before
/// it are on the disk, and holds up what the broker sends; of one that is too large nothing is kept.
async fn poll(mut events: EventLoop, sender: mpsc::UnboundedSender<ReceivedEvent>) {
    let places = Arc::new(Semaphore::new(MAX_ACCEPTING));
    loop {
        let mut event = events.poll().await;
        let mut place = None;
        if let Ok(Event::Incoming(Packet::Publish(publish))) = &mut event {
            let bytes = publish.payload.len();
            if bytes > MAX_MESSAGE_BYTES {
                publish.payload = Bytes::new();
            }
            // They are never closed.
            place = places.clone().acquire_owned().await.ok().map(|permit| (permit, bytes));
        }
        let is_last = event.is_err();
        if sender.send((event.map_err(|error| error.to_string()), place)).is_err() || is_last {
            return;
        }
    }
}
