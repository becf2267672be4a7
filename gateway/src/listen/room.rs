//! Room for connections: so many on a listener, the last of them for hosts that have few, so that no host takes all.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use russet_rpc::tls::host;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The room of one listener.
pub(super) struct Room {
    all: Arc<Semaphore>,
    few: usize,
    held: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// What one connection takes of it, given back when dropped.
pub(super) struct Place {
    host: IpAddr,
    held: Arc<Mutex<HashMap<IpAddr, usize>>>,
    _of_all: Option<OwnedSemaphorePermit>,
}

impl Room {
    /// Room for `all` connections, of which the last `few` are for hosts that have fewer than that.
    pub(super) fn new(all: usize, few: usize) -> Self {
        Self { all: Arc::new(Semaphore::new(all)), few, held: Arc::default() }
    }

    /// The next connection, once there is room for it; those of a host that has many are closed when little is left.
    pub(super) async fn accept(&self, listener: &TcpListener) -> (TcpStream, Place) {
        loop {
            // The semaphore is never closed.
            let place = self.all.clone().acquire_owned().await.ok();
            match listener.accept().await {
                Ok((stream, peer)) => match self.place(peer.ip(), place) {
                    Some(place) => return (stream, place),
                    None => tracing::debug!(
                        %peer,
                        "closed: its host has {few} connections or more, and fewer than {few} places are left",
                        few = self.few
                    ),
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
        if *count >= self.few && self.all.available_permits() < self.few {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_host_has_what_nobody_wants_and_leaves_room_for_others() {
        let room = Room::new(7, 2);
        let place = |address: &str| {
            let of_all = room.all.clone().try_acquire_owned().expect("a place is free");
            room.place(address.parse().unwrap(), Some(of_all))
        };
        let alone: Vec<Place> = (0..5).map(|_| place("10.0.0.1").unwrap()).collect();
        assert!(place("::ffff:10.0.0.1").is_none(), "the last two are for others");
        let other = place("10.0.0.2").unwrap();
        assert!(place("10.0.0.1").is_none());
        drop((alone, other));
        let _five: Vec<Place> = (1..6).map(|host| place(&format!("2001:db8::{host}:1")).unwrap()).collect();
        assert!(place("2001:db8::9:1").is_none(), "one network of a host is one host");
        let neighbour = place("2001:db8:0:1::1").unwrap();
        assert_eq!(room.held.lock().len(), 2);
        drop(neighbour);
        assert_eq!(room.held.lock().len(), 1, "who left is forgotten");
    }
}
