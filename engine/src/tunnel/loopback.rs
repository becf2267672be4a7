//! The loopback side of a tunnel: where MLX of this process listens and connects. Other local processes can
//! reach both ports, so the owner of each connection is checked where the system reports it: on Linux, by its
//! socket table. Elsewhere the first connection is accepted.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::{Instant, sleep};

/// Poll interval while MLX does not listen yet.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A loopback port reserved for MLX: bound without listening, so that no other process gets it. MLX can still
/// bind it, because both sockets allow sharing.
#[derive(Debug)]
pub(super) struct ReservedPort {
    socket: TcpSocket,
    port: u16,
}

impl ReservedPort {
    pub(super) fn reserve() -> std::io::Result<Self> {
        let socket = TcpSocket::new_v4()?;
        socket.set_reuseaddr(true)?;
        socket.set_reuseport(true)?;
        // A port that the system chooses is never in use, shared or not.
        socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        let port = socket.local_addr()?.port();
        Ok(Self { socket, port })
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }
}

/// Why MLX's port is unusable.
pub(super) enum MlxPortError {
    /// MLX does not listen.
    NotListening(u16),
    /// Another process connected first.
    Intruder(u16),
}

/// Connects to MLX as soon as it listens, and checks that no other process did so before.
pub(super) async fn connect(reserved: ReservedPort, patience: Duration) -> Result<TcpStream, MlxPortError> {
    let ReservedPort { socket, port } = reserved;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let since = Instant::now();
    let stream = loop {
        match TcpStream::connect(address).await {
            Ok(stream) => break stream,
            Err(_) if since.elapsed() < patience => sleep(POLL_INTERVAL).await,
            Err(_) => return Err(MlxPortError::NotListening(port)),
        }
    };
    drop(socket);
    let (Ok(()), Ok(own)) = (stream.set_nodelay(true), stream.local_addr()) else {
        return Err(MlxPortError::NotListening(port));
    };
    // MLX accepts the first connection of its queue. An earlier one is in the table even if it is closed
    // again.
    let intruder = table::sockets().iter().any(|socket| {
        socket.local == address && socket.remote.port() != 0 && socket.remote != own && !socket.is_time_wait()
    });
    if intruder { Err(MlxPortError::Intruder(port)) } else { Ok(stream) }
}

/// The first connection from this process.
pub(super) async fn accept_own(forwarder: TcpListener) -> TcpStream {
    loop {
        match forwarder.accept().await {
            Ok((stream, from)) if is_own(&stream, from) && stream.set_nodelay(true).is_ok() => return stream,
            Ok((_, from)) => {
                tracing::warn!(%from, "refused a connection that MLX of this process did not make")
            }
            Err(_) => sleep(POLL_INTERVAL).await,
        }
    }
}

/// Whether the peer of an accepted connection is a socket of this process.
fn is_own(stream: &TcpStream, from: SocketAddr) -> bool {
    if !cfg!(target_os = "linux") {
        return true;
    }
    let Ok(to) = stream.local_addr() else { return false };
    let sockets = table::sockets();
    let other = sockets.iter().find(|socket| socket.local == from && socket.remote == to);
    other.is_some_and(|socket| table::holds(socket.inode))
}

/// The IPv4 socket table of Linux; empty on other systems.
mod table {
    use std::net::{Ipv4Addr, SocketAddr};

    /// One line.
    pub(super) struct SocketRow {
        pub(super) local: SocketAddr,
        pub(super) remote: SocketAddr,
        state: u8,
        pub(super) inode: u64,
    }

    impl SocketRow {
        /// A closed connection in TIME_WAIT.
        pub(super) fn is_time_wait(&self) -> bool {
            const TIME_WAIT: u8 = 6;
            self.state == TIME_WAIT
        }
    }

    pub(super) fn sockets() -> Vec<SocketRow> {
        let text = std::fs::read_to_string("/proc/self/net/tcp").unwrap_or_default();
        text.lines().filter_map(parse).collect()
    }

    /// `0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 12345 …`
    pub(super) fn parse(line: &str) -> Option<SocketRow> {
        let mut words = line.split_ascii_whitespace().skip(1);
        let (local, remote) = (address(words.next()?)?, address(words.next()?)?);
        let state = u8::from_str_radix(words.next()?, 16).ok()?;
        let inode = words.nth(5)?.parse().ok()?;
        Some(SocketRow { local, remote, state, inode })
    }

    fn address(text: &str) -> Option<SocketAddr> {
        let (ip, port) = text.split_once(':')?;
        // The four bytes are printed in native byte order.
        let ip = Ipv4Addr::from(u32::from_str_radix(ip, 16).ok()?.to_ne_bytes());
        Some(SocketAddr::from((ip, u16::from_str_radix(port, 16).ok()?)))
    }

    /// Whether this process has the socket open.
    pub(super) fn holds(inode: u64) -> bool {
        let expected = format!("socket:[{inode}]");
        let Ok(descriptors) = std::fs::read_dir("/proc/self/fd") else { return false };
        descriptors.flatten().any(|entry| {
            std::fs::read_link(entry.path()).is_ok_and(|target| target.as_os_str() == expected.as_str())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_sockets_is_read() {
        let line = "   0: 0100007F:1F90 0200007F:0016 06 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100";
        let socket = table::parse(line).unwrap();
        assert_eq!(socket.local, "127.0.0.1:8080".parse().unwrap());
        assert_eq!(socket.remote, "127.0.0.2:22".parse().unwrap());
        assert_eq!((socket.inode, socket.is_time_wait()), (4711, true));
        assert!(table::parse("  sl  local_address rem_address   st tx_queue rx_queue").is_none());
    }

    /// Listens like MLX, with both sharing options.
    fn listen_sharing(port: u16) -> TcpListener {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.set_reuseport(true).unwrap();
        socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).unwrap();
        socket.listen(1).unwrap()
    }

    #[tokio::test]
    async fn mlx_listens_on_its_reserved_port() {
        let reserved = ReservedPort::reserve().unwrap();
        let port = reserved.port();
        let chosen: Vec<_> = (0..200).map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        assert!(chosen.iter().all(|other| other.local_addr().unwrap().port() != port));
        let listener = listen_sharing(port);
        let Ok(own) = connect(reserved, Duration::from_secs(60)).await else { panic!("refused") };
        let (_, from) = listener.accept().await.unwrap();
        assert_eq!(from, own.local_addr().unwrap());
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn intruder_on_the_port_of_mlx_is_detected_after_it_left() {
        for still_connected in [true, false] {
            let reserved = ReservedPort::reserve().unwrap();
            let port = reserved.port();
            let _listener = listen_sharing(port);
            let stranger = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
            let _stranger = still_connected.then_some(stranger);
            assert!(matches!(
                connect(reserved, Duration::from_secs(60)).await,
                Err(MlxPortError::Intruder(reported)) if reported == port
            ));
        }
    }
}
