//! A small MQTT 3.1.1 broker: retained messages, last wills, keep-alive, one connection per client id. It
//! delivers at most once, supports no filters but `#`, and persists nothing.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::{SinkExt as _, StreamExt as _};
use rumqttc::{
    Codec, ConnAck, ConnectReturnCode, LastWill, Packet, PubAck, Publish, QoS, SubAck, SubscribeReasonCode,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::codec::Framed;
use tokio_util::sync::CancellationToken;

/// Aborts the broker and all its connections when dropped.
pub struct SmallBroker {
    _tasks: JoinSet<()>,
}

#[derive(Clone, Default)]
struct SharedBroker(Arc<Mutex<BrokerState>>);

#[derive(Default)]
struct BrokerState {
    retained: BTreeMap<String, Publish>,
    /// By client id: its connection's token, its sender, and its subscriptions.
    clients: BTreeMap<String, (CancellationToken, mpsc::UnboundedSender<Packet>, Vec<String>)>,
}

impl SmallBroker {
    /// Serves all clients at the first listener, and those with the password over TLS at the second.
    pub fn start(plain: TcpListener, encrypted: Option<(TcpListener, TlsAcceptor, String)>) -> Self {
        let (state, mut tasks) = (SharedBroker::default(), JoinSet::new());
        let shared = state.clone();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = plain.accept().await {
                connections.spawn(shared.clone().serve(stream, None));
            }
        });
        if let Some((listener, acceptor, password)) = encrypted {
            tasks.spawn(async move {
                let mut connections = JoinSet::new();
                while let Ok((stream, _)) = listener.accept().await {
                    let (state, acceptor, password) = (state.clone(), acceptor.clone(), password.clone());
                    connections.spawn(async move {
                        if let Ok(stream) = acceptor.accept(stream).await {
                            state.serve(stream, Some(password)).await;
                        }
                    });
                }
            });
        }
        Self { _tasks: tasks }
    }
}

impl SharedBroker {
    async fn serve<S: AsyncRead + AsyncWrite + Unpin>(self, stream: S, password: Option<String>) {
        let codec = Codec { max_incoming_size: 1 << 20, max_outgoing_size: 1 << 20 };
        let mut stream = Framed::new(stream, codec);
        let Some(Ok(Packet::Connect(connect))) = stream.next().await else { return };
        let given = connect.login.map(|login| login.password);
        let code = match password.is_none() || given == password {
            true => ConnectReturnCode::Success,
            false => ConnectReturnCode::BadUserNamePassword,
        };
        let sent = stream.send(Packet::ConnAck(ConnAck::new(code, false))).await;
        if code != ConnectReturnCode::Success || sent.is_err() {
            return;
        }
        let (over, (outbox, mut inbox)) = (CancellationToken::new(), mpsc::unbounded_channel());
        let client = (over.clone(), outbox.clone(), Vec::new());
        if let Some((earlier, ..)) = self.0.lock().unwrap().clients.insert(connect.client_id.clone(), client)
        {
            earlier.cancel();
        }
        let silence = Duration::from_secs(connect.keep_alive.into()) * 3 / 2;
        let mut will = connect.last_will;
        loop {
            let packet = tokio::select! {
                () = over.cancelled() => break,
                Some(packet) = inbox.recv() => {
                    if stream.send(packet).await.is_err() {
                        break;
                    }
                    continue;
                }
                heard = tokio::time::timeout(silence, stream.next()) => match heard {
                    Ok(Some(Ok(packet))) => packet,
                    _ => break,
                },
            };
            match packet {
                Packet::Publish(said) => {
                    let acknowledged = PubAck::new(said.pkid);
                    let needs_ack = said.qos == QoS::AtLeastOnce;
                    self.publish(said);
                    if needs_ack {
                        outbox.send(Packet::PubAck(acknowledged)).unwrap();
                    }
                }
                Packet::Subscribe(asked) => {
                    let granted = vec![SubscribeReasonCode::Success(QoS::AtMostOnce); asked.filters.len()];
                    outbox.send(Packet::SubAck(SubAck::new(asked.pkid, granted))).unwrap();
                    let filters: Vec<String> = asked.filters.into_iter().map(|filter| filter.path).collect();
                    let mut known = self.0.lock().unwrap();
                    let matching = known.retained.values().filter(|said| matches_any(&filters, &said.topic));
                    matching.for_each(|said| outbox.send(Packet::Publish(said.clone())).unwrap());
                    if let Some((.., all)) = known.clients.get_mut(&connect.client_id) {
                        all.extend(filters);
                    }
                }
                Packet::PingReq => outbox.send(Packet::PingResp).unwrap(),
                Packet::Disconnect => {
                    will = None;
                    break;
                }
                _ => {}
            }
        }
        if !over.is_cancelled() {
            self.0.lock().unwrap().clients.remove(&connect.client_id);
        }
        if let Some(LastWill { topic, message, qos, retain }) = will {
            self.publish(Publish { retain, ..Publish::new(topic, qos, message) });
        }
    }

    fn publish(&self, said: Publish) {
        let mut known = self.0.lock().unwrap();
        let message = Publish { qos: QoS::AtMostOnce, retain: false, pkid: 0, ..said.clone() };
        for (_, outbox, filters) in known.clients.values() {
            if matches_any(filters, &message.topic) {
                outbox.send(Packet::Publish(message.clone())).ok();
            }
        }
        match (said.retain, said.payload.is_empty()) {
            (true, true) => drop(known.retained.remove(&message.topic)),
            (true, false) => {
                drop(known.retained.insert(message.topic.clone(), Publish { retain: true, ..message }))
            }
            (false, _) => {}
        }
    }
}

fn matches_any(filters: &[String], topic: &str) -> bool {
    filters.iter().any(|filter| filter == "#" || filter == topic)
}
