//! Reserved ports, for programs that get their listen address before they bind it: MLX, engines,
//! programs under test. They are below the ranges of ephemeral ports (Linux from 32768, macOS from 49152) and
//! below Kubernetes' NodePorts (from 30000), so that no outgoing connection takes one in between.

use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;

use tokio::net::{TcpSocket, TcpStream};

const PORT_RANGE: Range<u16> = 20_000..30_000;

/// A socket bound to a free port of `address`, not listening; the port is free again when it is
/// dropped.
///
/// # Errors
///
/// If no port is free, or the machine does not have the address.
pub fn bind_free(address: IpAddr) -> io::Result<TcpSocket> {
    // Concurrent processes start at different ports.
    let start = RandomState::new().hash_one(()) as u16 % PORT_RANGE.len() as u16;
    let mut ports = PORT_RANGE.cycle().skip(usize::from(start)).take(PORT_RANGE.len());
    loop {
        let socket = socket(address)?;
        match ports.next().map(|port| socket.bind(SocketAddr::new(address, port))) {
            Some(Ok(())) => return Ok(socket),
            Some(Err(error)) if error.kind() == io::ErrorKind::AddrInUse => {}
            Some(Err(error)) => return Err(error),
            None => {
                let (first, last) = (PORT_RANGE.start, PORT_RANGE.end - 1);
                let message = format!("no port of {address} from {first} to {last} is free");
                return Err(io::Error::new(io::ErrorKind::AddrInUse, message));
            }
        }
    }
}

/// `count` different socket addresses of `address` that are free now.
///
/// # Errors
///
/// As [`bind_free`].
pub fn free_addresses(address: IpAddr, count: usize) -> io::Result<Vec<SocketAddr>> {
    let held: Vec<TcpSocket> = (0..count).map(|_| bind_free(address)).collect::<io::Result<_>>()?;
    held.iter().map(TcpSocket::local_addr).collect()
}

/// Local end of outgoing connections.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Egress {
    /// An address of this machine.
    pub address: IpAddr,
    /// The network interface to which connections are bound, where the system permits it, regardless of the
    /// machine's routes. `None` leaves the choice to the routes.
    pub interface: Option<String>,
}

impl From<IpAddr> for Egress {
    fn from(address: IpAddr) -> Self {
        Self { address, interface: None }
    }
}

/// Connects through this egress.
///
/// # Errors
///
/// If the machine does not have the address, or the connection fails.
pub async fn connect_from(exit: &Egress, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = socket(exit.address)?;
    if let Some(interface) = &exit.interface
        && let Err(error) = bind_to_interface(&socket, interface, exit.address)
    {
        // Before Linux 5.7 this needed root. A removed interface took its address with it.
        tracing::debug!(interface, %error, "a connection has the interface's address, and is not tied to it");
    }
    socket.bind(SocketAddr::new(exit.address, 0))?;
    socket.connect(to).await
}

#[cfg(target_os = "linux")]
fn bind_to_interface(socket: &TcpSocket, interface: &str, _: IpAddr) -> io::Result<()> {
    socket.bind_device(Some(interface.as_bytes()))
}

#[cfg(target_os = "macos")]
fn bind_to_interface(socket: &TcpSocket, interface: &str, address: IpAddr) -> io::Result<()> {
    let found = if_addrs::get_if_addrs()?.into_iter().find(|found| found.name == interface);
    let index = found.and_then(|found| found.index).and_then(std::num::NonZeroU32::new);
    let index = Some(index.ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, format!("there is no network interface {interface}"))
    })?);
    let socket = socket2::SockRef::from(socket);
    match address {
        IpAddr::V4(_) => socket.bind_device_by_index_v4(index),
        IpAddr::V6(_) => socket.bind_device_by_index_v6(index),
    }
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
        let addresses = free_addresses(LOOPBACK, 100).unwrap();
        let listeners: Vec<TcpListener> =
            addresses.iter().map(|address| TcpListener::bind(address).unwrap()).collect();
        assert!(listeners.iter().all(|one| PORT_RANGE.contains(&one.local_addr().unwrap().port())));
    }

    #[test]
    fn reserved_port_cannot_be_bound_again() {
        let held = bind_free(LOOPBACK).unwrap();
        let error = TcpListener::bind(held.local_addr().unwrap()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn connection_is_bound_to_its_interface_only() {
        let listener = TcpListener::bind((LOOPBACK, 0)).unwrap();
        let to = listener.local_addr().unwrap();
        let connect = async |interface: Option<&str>| {
            let exit = Egress { address: LOOPBACK, interface: interface.map(str::to_owned) };
            let stream = connect_from(&exit, to).await?;
            socket2::SockRef::from(&stream).device()
        };
        assert_eq!(connect(Some("lo")).await.unwrap().as_deref(), Some(&b"lo"[..]));
        assert_eq!(connect(None).await.unwrap(), None);
        assert_eq!(connect(Some("en99")).await.unwrap(), None, "the address has to do");
    }

    #[test]
    fn an_address_of_another_machine_is_refused_at_once() {
        // A documentation range: no machine has it.
        let error = bind_free("192.0.2.1".parse().unwrap()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable);
    }
}
