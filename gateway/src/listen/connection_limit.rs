//! Connection limit of a listener. The last connections are reserved for hosts that have few, so that no host
//! takes all of them.

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
    /// A limit of `max_connections`, the last `reserved` of which are for hosts that have fewer than that.
    pub(super) fn new(max_connections: usize, reserved: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(max_connections)), reserved, per_host: Arc::default() }
    }

    /// The next connection, once a permit is free; when few are left, connections of hosts that have many are
    /// closed.
    pub(super) async fn accept(&self, listener: &TcpListener) -> (TcpStream, ConnectionPermit) {
        loop {
            // The semaphore is never closed.
            let permit = self.permits.clone().acquire_owned().await.ok();
            match listener.accept().await {
                Ok((stream, peer)) => match self.admit(peer.ip(), permit) {
                    Some(permit) => return (stream, permit),
                    None => tracing::debug!(
                        %peer,
                        "closed a connection: its host has {reserved} or more, and fewer than {reserved} are free",
                        reserved = self.reserved
                    ),
                },
                Err(error) => {
                    // Usually a client that has disconnected, or no free file descriptor: the next accept may
                    // work.
                    tracing::debug!("cannot accept a connection: {error}");
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
            }
        }
    }

    fn admit(&self, peer: IpAddr, permit: Option<OwnedSemaphorePermit>) -> Option<ConnectionPermit> {
        let host = host_of(peer);
        let mut per_host = self.per_host.lock();
        let count = per_host.entry(host).or_default();
        if *count >= self.reserved && self.permits.available_permits() < self.reserved {
            return None;
        }
        *count += 1;
        Some(ConnectionPermit { host, per_host: self.per_host.clone(), _permit: permit })
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut per_host = self.per_host.lock();
        if let Some(count) = per_host.get_mut(&self.host) {
            *count -= 1;
            if *count == 0 {
                per_host.remove(&self.host);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_host_cannot_take_reserved_connections() {
        let limiter = ConnectionLimiter::new(7, 2);
        let admit = |address: &str| {
            let permit = limiter.permits.clone().try_acquire_owned().expect("a permit is free");
            limiter.admit(address.parse().unwrap(), Some(permit))
        };
        let first_host: Vec<ConnectionPermit> = (0..5).map(|_| admit("10.0.0.1").unwrap()).collect();
        assert!(admit("::ffff:10.0.0.1").is_none(), "the last two are reserved for other hosts");
        let other = admit("10.0.0.2").unwrap();
        assert!(admit("10.0.0.1").is_none());
        drop((first_host, other));
        let _five: Vec<ConnectionPermit> =
            (1..6).map(|host| admit(&format!("2001:db8::{host}:1")).unwrap()).collect();
        assert!(admit("2001:db8::9:1").is_none(), "one network of a host is one host");
        let neighbour = admit("2001:db8:0:1::1").unwrap();
        assert_eq!(limiter.per_host.lock().len(), 2);
        drop(neighbour);
        assert_eq!(limiter.per_host.lock().len(), 1, "hosts without connections are removed");
    }
}
