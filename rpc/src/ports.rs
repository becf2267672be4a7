//! Ports for those who are told where to listen before they do: MLX, engines, programs under test.
//! They lie below the ranges from which systems take ports for outgoing connections (Linux from 32768,
//! macOS from 49152) and below Kubernetes' NodePorts (from 30000), so that no connection made in
//! between gets one of them.

use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;

use tokio::net::{TcpSocket, TcpStream};

const PORTS: Range<u16> = 20_000..30_000;

/// A socket bound to a free port of `address`, and not listened on; the port is free again when it is
/// dropped.
///
/// # Errors
///
/// If no port is free, or the machine does not have the address.
pub fn bound(address: IpAddr) -> io::Result<TcpSocket> {
    // Processes that ask at the same time begin at different ports.
    let start = RandomState::new().hash_one(()) as u16 % PORTS.len() as u16;
    let mut ports = PORTS.cycle().skip(usize::from(start)).take(PORTS.len());
    loop {
        let socket = socket(address)?;
        match ports.next().map(|port| socket.bind(SocketAddr::new(address, port))) {
            Some(Ok(())) => return Ok(socket),
            Some(Err(error)) if error.kind() == io::ErrorKind::AddrInUse => {}
            Some(Err(error)) => return Err(error),
            None => {
                let (first, last) = (PORTS.start, PORTS.end - 1);
                let told = format!("no port of {address} from {first} to {last} is free");
                return Err(io::Error::new(io::ErrorKind::AddrInUse, told));
            }
        }
    }
}

/// So many addresses of `address` that are free now and differ.
///
/// # Errors
///
/// As [`bound`].
pub fn free(address: IpAddr, count: usize) -> io::Result<Vec<SocketAddr>> {
    let held: Vec<TcpSocket> = (0..count).map(|_| bound(address)).collect::<io::Result<_>>()?;
    held.iter().map(TcpSocket::local_addr).collect()
}

/// A connection out of this address of the machine, whatever its routes say.
///
/// # Errors
///
/// If the machine does not have the address, or nobody answers.
pub async fn connect_from(own: IpAddr, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = socket(own)?;
    socket.bind(SocketAddr::new(own, 0))?;
    socket.connect(to).await
}

fn socket(address: IpAddr) -> io::Result<TcpSocket> {
    if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const LOOPBACK: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    #[test]
    fn ports_differ_lie_in_the_range_and_can_be_listened_on() {
        let addresses = free(LOOPBACK, 100).unwrap();
        let listeners: Vec<TcpListener> =
            addresses.iter().map(|address| TcpListener::bind(address).unwrap()).collect();
        assert!(listeners.iter().all(|one| PORTS.contains(&one.local_addr().unwrap().port())));
    }

    #[test]
    fn a_port_that_is_held_is_nobody_elses() {
        let held = bound(LOOPBACK).unwrap();
        let error = TcpListener::bind(held.local_addr().unwrap()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn an_address_of_another_machine_is_refused_at_once() {
        // A documentation range: no machine has it.
        let error = bound("192.0.2.1".parse().unwrap()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable);
    }
}
