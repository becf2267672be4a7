//! Room for connections: so many on a listener, and so many of one host, which therefore cannot take all of it.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The room of one listener.
pub(super) struct Room {
    all: Arc<Semaphore>,
    each: usize,
    held: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// What one connection takes of it, given back when dropped.
pub(super) struct Place {
    host: IpAddr,
    held: Arc<Mutex<HashMap<IpAddr, usize>>>,
    _of_all: Option<OwnedSemaphorePermit>,
}

impl Room {
    /// Room for `all` connections, of which one host has at most `each`.
    pub(super) fn new(all: usize, each: usize) -> Self {
        Self { all: Arc::new(Semaphore::new(all)), each, held: Arc::default() }
    }

    /// The next connection, once there is room for it; those of a host that has too many are closed.
    pub(super) async fn accept(&self, listener: &TcpListener) -> (TcpStream, Place) {
        loop {
            // The semaphore is never closed.
            let place = self.all.clone().acquire_owned().await.ok();
            match listener.accept().await {
                Ok((stream, peer)) => match self.place(peer.ip(), place) {
                    Some(place) => return (stream, place),
                    None => tracing::debug!(%peer, "closed: its host has {} connections already", self.each),
                },
                Err(error) => {
                    // Mostly a client that left again, or no file descriptor to be had: the next may work.
                    tracing::debug!("a connection could not be accepted: {error}");
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
            }
        }
    }

    fn place(&self, peer: IpAddr, of_all: Option<OwnedSemaphorePermit>) -> Option<Place> {
        let host = host(peer);
        let mut held = self.held.lock();
        let count = held.entry(host).or_default();
        if *count >= self.each {
            return None;
        }
        *count += 1;
        Some(Place { host, held: self.held.clone(), _of_all: of_all })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut held = self.held.lock();
        if let Some(count) = held.get_mut(&self.host) {
            *count -= 1;
            if *count == 0 {
                held.remove(&self.host);
            }
        }
    }
}

/// Whom an address belongs to: in IPv6 one host has all addresses of a /64.
fn host(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_host_has_its_share_and_gets_it_back() {
        let room = Room::new(9, 2);
        let place = |address: &str| room.place(address.parse().unwrap(), None);
        let (first, _second) = (place("10.0.0.1").unwrap(), place("::ffff:10.0.0.1").unwrap());
        assert!(place("10.0.0.1").is_none());
        let _other = place("10.0.0.2").unwrap();
        drop(first);
        let _third = place("10.0.0.1").unwrap();
        assert!(place("10.0.0.1").is_none());
        let _net = (place("2001:db8::1").unwrap(), place("2001:db8::ffff:1").unwrap());
        assert!(place("2001:db8::2:3").is_none(), "one network of a host is one host");
        let neighbour = place("2001:db8:0:1::1").unwrap();
        assert_eq!(room.held.lock().len(), 4);
        drop(neighbour);
        assert_eq!(room.held.lock().len(), 3, "who left is forgotten");
    }
}
