//! Connection limit of a listener. The last connections are reserved for hosts that have few, so that no host
//! takes all.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use russet_rpc::tls::host_of;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The connection limit of one listener.
pub(super) struct ConnectionLimiter {
    permits: Arc<Semaphore>,
    reserved: usize,
    per_host: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// One connection's permit, released on drop.
pub(super) struct ConnectionPermit {
    host: IpAddr,
    per_host: Arc<Mutex<HashMap<IpAddr, usize>>>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl ConnectionLimiter {
    /// A limit of `all` connections, the last `few` of which are reserved for hosts that have fewer than
    /// that.
    pub(super) fn new(all: usize, reserved: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(all)), reserved, per_host: Arc::default() }
    }

    /// The next connection, once a permit is free; when few are left, connections of hosts that have many are
    /// closed.
    pub(super) async fn accept(&self, listener: &TcpListener) -> (TcpStream, ConnectionPermit) {
        loop {
            // The semaphore is never closed.
            let place = self.permits.clone().acquire_owned().await.ok();
            match listener.accept().await {
                Ok((stream, peer)) => match self.admit(peer.ip(), place) {
                    Some(place) => return (stream, place),
                    None => tracing::debug!(
                        %peer,
                        "closed: its host has {few} connections or more, and fewer than {few} places are left",
                        few = self.reserved
                    ),
                },
                Err(error) => {
                    // Usually a client that has disconnected, or no free file descriptor: the next accept may
                    // work.
                    tracing::debug!("a connection could not be accepted: {error}");
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
            }
        }
    }

    fn admit(&self, peer: IpAddr, of_all: Option<OwnedSemaphorePermit>) -> Option<ConnectionPermit> {
        let host = host_of(peer);
        let mut held = self.per_host.lock();
        let count = held.entry(host).or_default();
        if *count >= self.reserved && self.permits.available_permits() < self.reserved {
            return None;
        }
        *count += 1;
        Some(ConnectionPermit { host, per_host: self.per_host.clone(), _permit: of_all })
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut held = self.per_host.lock();
        if let Some(count) = held.get_mut(&self.host) {
            *count -= 1;
            if *count == 0 {
                held.remove(&self.host);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_host_cannot_take_reserved_connections() {
        let room = ConnectionLimiter::new(7, 2);
        let place = |address: &str| {
            let of_all = room.permits.clone().try_acquire_owned().expect("a place is free");
            room.admit(address.parse().unwrap(), Some(of_all))
        };
        let alone: Vec<ConnectionPermit> = (0..5).map(|_| place("10.0.0.1").unwrap()).collect();
        assert!(place("::ffff:10.0.0.1").is_none(), "the last two are for others");
        let other = place("10.0.0.2").unwrap();
        assert!(place("10.0.0.1").is_none());
        drop((alone, other));
        let _five: Vec<ConnectionPermit> =
            (1..6).map(|host| place(&format!("2001:db8::{host}:1")).unwrap()).collect();
        assert!(place("2001:db8::9:1").is_none(), "one network of a host is one host");
        let neighbour = place("2001:db8:0:1::1").unwrap();
        assert_eq!(room.per_host.lock().len(), 2);
        drop(neighbour);
        assert_eq!(room.per_host.lock().len(), 1, "who left is forgotten");
    }
}
