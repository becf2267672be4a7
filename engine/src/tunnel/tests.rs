//! Tunnels between members on one machine, with plain sockets in place of MLX.

use std::net::{Ipv4Addr, SocketAddr};

use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpSocket;

use super::dial::{Neighbour, NeighbourPath};
use super::*;
use crate::identities::Identities;

const LABEL: &str = "group 7b1f, epoch 3, pipeline 0";

/// The sockets of one member's MLX.
struct RingMember {
    left: TcpStream,
    right: TcpStream,
    tunnel: Tunnel,
}

fn free_addresses(count: usize) -> Vec<SocketAddr> {
    russet_rpc::ports::free_addresses(Ipv4Addr::LOCALHOST.into(), count).unwrap()
}

fn names(size: usize) -> Vec<String> {
    (0..size).map(|member| format!("node-{member}")).collect()
}

async fn open(identities: &Identities, hosts: &[SocketAddr], own: usize) -> (Tunnel, Vec<SocketAddr>) {
    let files = TlsFiles::in_dir(&identities.node(&format!("node-{own}")));
    Tunnel::open(&files, LABEL, hosts, &names(hosts.len()), own, &[]).await.unwrap()
}

/// Whether a connecting member is accepted.
async fn reached(ring: &RingContext, address: SocketAddr, node: &str) -> Result<(), String> {
    Neighbour::new(node, address, &[]).connect(ring).await.map(|_| ())
}

/// Binds like MLX.
fn listen(address: SocketAddr) -> TcpListener {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.set_reuseport(true).unwrap();
    socket.bind(address).unwrap();
    socket.listen(1).unwrap()
}

/// Joins like MLX: each member connects to the next and accepts the previous.
async fn join(tunnel: Tunnel, tunnelled: &[SocketAddr], own: usize) -> RingMember {
    let listener = listen(tunnelled[own]);
    let connect = async {
        loop {
            match TcpStream::connect(tunnelled[(own + 1) % tunnelled.len()]).await {
                Ok(stream) => return stream,
                Err(_) => sleep(RETRY_BACKOFF.0).await,
            }
        }
    };
    let (accepted, right) = tokio::join!(listener.accept(), connect);
    let left = accepted.unwrap().0;
    left.set_nodelay(true).unwrap();
    right.set_nodelay(true).unwrap();
    RingMember { left, right, tunnel }
}

async fn ring(identities: &Identities, size: usize) -> Vec<RingMember> {
    let hosts = free_addresses(size);
    let members = (0..size).map(|own| {
        let hosts = &hosts;
        async move {
            let (tunnel, tunnelled) = open(identities, hosts, own).await;
            join(tunnel, &tunnelled, own).await
        }
    });
    futures::future::join_all(members).await
}

#[tokio::test]
async fn rings_of_two_and_three_carry_bytes_in_both_directions() {
    let identities = Identities::new();
    for size in [2, 3] {
        let mut members = ring(&identities, size).await;
        for round in 0..3_u8 {
            for (own, member) in members.iter_mut().enumerate() {
                member.right.write_all(&[round, own as u8, b'>']).await.unwrap();
                member.left.write_all(&[round, own as u8, b'<']).await.unwrap();
            }
            for (own, member) in members.iter_mut().enumerate() {
                let (previous, next) = ((own + size - 1) % size, (own + 1) % size);
                let mut got = [0; 3];
                member.left.read_exact(&mut got).await.unwrap();
                assert_eq!(got, [round, previous as u8, b'>'], "member {own} of {size}");
                member.right.read_exact(&mut got).await.unwrap();
                assert_eq!(got, [round, next as u8, b'<'], "member {own} of {size}");
            }
        }
    }
}

#[tokio::test]
async fn a_megabyte_arrives_whole_while_another_goes_the_other_way() {
    let mut members = ring(&Identities::new(), 2).await;
    let sent: Vec<u8> = (0..3_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let (first, second) = members.split_at_mut(1);
    let (right, left) = (&mut first[0].right, &mut second[0].left);
    let (mut out, mut back) = (vec![0; sent.len()], vec![0; sent.len()]);
    let (mut from_right, mut to_right) = right.split();
    let (mut from_left, mut to_left) = left.split();
    tokio::try_join!(
        to_right.write_all(&sent),
        to_left.write_all(&sent),
        from_left.read_exact(&mut out),
        from_right.read_exact(&mut back),
    )
    .unwrap();
    assert!(out == sent && back == sent);
}

/// Runs an unauthorized attempt, and checks that it gets nothing but the end of the connection.
async fn rejected(what: &str, attempt: impl Future<Output = Result<(), String>>) {
    let outcome =
        timeout(CONNECT_TIMEOUT, attempt).await.unwrap_or_else(|_| panic!("{what} was left hanging"));
    assert!(outcome.is_err(), "{what} was let in");
}

#[tokio::test]
async fn tunnel_rejects_strangers_and_still_accepts_its_neighbour() {
    let (identities, others) = (Identities::new(), Identities::new());
    let hosts = free_addresses(3);
    let (first, tunnelled_first) = open(&identities, &hosts, 0).await;
    // The member before 0 is 2; 1 is a node of the same cluster and of the same ring.
    let known = |dir: std::path::PathBuf| RingContext {
        identity: RingIdentity::read(&TlsFiles::in_dir(&dir)).unwrap(),
        label: LABEL.to_owned(),
    };
    for (what, ring) in [
        ("the node of another member", known(identities.node("node-1"))),
        ("a node outside the group", known(identities.node("node-9"))),
        ("a gateway", known(identities.folder("russet:gateway", "gateway.russet.dev"))),
        ("a certificate of another CA", {
            let mut files = TlsFiles::in_dir(&others.node("node-2"));
            files.ca = TlsFiles::in_dir(&identities.node("node-0")).ca;
            RingContext { identity: RingIdentity::read(&files).unwrap(), label: LABEL.to_owned() }
        }),
        (
            "another epoch",
            RingContext {
                label: "group 7b1f, epoch 2, pipeline 0".into(),
                ..known(identities.node("node-2"))
            },
        ),
    ] {
        rejected(what, reached(&ring, hosts[0], "node-0")).await;
    }
    rejected("TLS without a certificate", async {
        let mut roots = rustls::RootCertStore::empty();
        let ca = std::fs::read(TlsFiles::in_dir(&identities.node("node-0")).ca).unwrap();
        roots.add(rustls::pki_types::pem::PemObject::from_pem_slice(&ca).unwrap()).unwrap();
        let mut config = rustls::ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![b"russet-ring/1".to_vec()];
        let stream = TcpStream::connect(hosts[0]).await.map_err(error_chain)?;
        let name = ServerName::try_from("node-0.node.russet.dev").unwrap();
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let mut stream = connector.connect(name, stream).await.map_err(error_chain)?;
        handshake::exchange_labels(&mut stream, LABEL).await
    })
    .await;
    rejected("plain TCP", async {
        let mut stream = TcpStream::connect(hosts[0]).await.map_err(error_chain)?;
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.map_err(error_chain)?;
        let mut got = Vec::new();
        stream.read_to_end(&mut got).await.map_err(error_chain)?;
        // At most a TLS alert may arrive.
        if got.first() == Some(&0x15) { Err("an alert".into()) } else { greeting_of(&got) }
    })
    .await;
    // The connecting side is as careful: it rejects a host with another node's certificate.
    let guest = known(identities.node("node-2"));
    rejected("a host that is another node", reached(&guest, hosts[0], "node-1")).await;

    let (second, tunnelled_second) = open(&identities, &hosts, 1).await;
    let (third, tunnelled_third) = open(&identities, &hosts, 2).await;
    let (mut a, _b, mut c) = tokio::join!(
        join(first, &tunnelled_first, 0),
        join(second, &tunnelled_second, 1),
        join(third, &tunnelled_third, 2)
    );
    c.right.write_all(b"it is me").await.unwrap();
    let mut got = [0; 8];
    a.left.read_exact(&mut got).await.unwrap();
    assert_eq!(&got, b"it is me");
}

/// Checks what a client without TLS received.
fn greeting_of(got: &[u8]) -> Result<(), String> {
    if got.is_empty() { Err("closed".into()) } else { Ok(()) }
}

#[tokio::test]
async fn another_process_of_the_machine_is_not_taken_for_mlx() {
    let identities = Identities::new();
    let hosts = free_addresses(2);
    let (first, tunnelled_first) = open(&identities, &hosts, 0).await;
    let (second, tunnelled_second) = open(&identities, &hosts, 1).await;
    // It reads until the connection is closed, so its exit shows the rejection.
    let script = format!("exec 3<>/dev/tcp/127.0.0.1/{}; cat <&3", tunnelled_first[1].port());
    let stranger = tokio::process::Command::new("bash").args(["-c", &script]).kill_on_drop(true).output();
    let output = timeout(CONNECT_TIMEOUT, stranger).await.expect("the stranger was let in").unwrap();
    assert!(output.stdout.is_empty());
    let (mut a, mut b) = tokio::join!(join(first, &tunnelled_first, 0), join(second, &tunnelled_second, 1));
    a.right.write_all(b"ours").await.unwrap();
    let mut got = [0; 4];
    b.left.read_exact(&mut got).await.unwrap();
    assert_eq!(&got, b"ours");
}

#[tokio::test]
async fn closed_tunnel_closes_both_sides_with_a_reason() {
    let mut members = ring(&Identities::new(), 2).await;
    let mut second = members.pop().unwrap();
    let mut first = members.pop().unwrap();
    // MLX of 0 is gone; its tunnel is still there.
    drop(first.right);
    let end =
        timeout(CONNECT_TIMEOUT, second.left.read(&mut [0; 1])).await.expect("the close did not arrive");
    assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
    let lost = timeout(CONNECT_TIMEOUT, second.tunnel.wait_lost()).await.unwrap();
    assert!(lost.to_string().contains("the connection from node-0 ended"), "{lost}");
    // The whole process of 1 is gone.
    drop(second);
    let end = timeout(CONNECT_TIMEOUT, first.left.read(&mut [0; 1])).await.expect("the end did not arrive");
    assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
}

/// Cut off mid-read, MLX gets the rest as zeros and may send anything, until the tunnel is dropped.
#[tokio::test]
async fn peer_stub_feeds_mlx_until_the_tunnel_is_dropped() {
    // With the neighbour gone, as after a kill, and with it still there, as behind a cut cable.
    for gone in [true, false] {
        let mut members = ring(&Identities::new(), 2).await;
        let mut second = members.pop().unwrap();
        let RingMember { left, right, tunnel } = members.pop().unwrap();
        second.right.write_all(b"some").await.unwrap();
        let mut local = [left, right];
        let mut got = [0; 4];
        timeout(CONNECT_TIMEOUT, local[0].read_exact(&mut got)).await.unwrap().unwrap();
        let second = (!gone).then_some(second);
        tunnel.stub_switch().activate();
        for end in &mut local {
            let mut rest = vec![7; 1 << 20];
            timeout(CONNECT_TIMEOUT, end.read_exact(&mut rest)).await.unwrap().unwrap();
            assert!(rest.iter().all(|byte| *byte == 0), "gone: {gone}");
            timeout(CONNECT_TIMEOUT, end.write_all(&rest)).await.unwrap().unwrap();
        }
        drop(tunnel);
        for end in &mut local {
            let closed = timeout(CONNECT_TIMEOUT, end.read_to_end(&mut Vec::new())).await;
            closed.expect("the end did not arrive").ok();
        }
        drop(second);
    }
}

/// A killed neighbour, as a writer sees it before any read has returned the end.
struct DeadPeer;

impl tokio::io::AsyncRead for DeadPeer {
    fn poll_read(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
        _: &mut tokio::io::ReadBuf<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::task::Poll::Pending
    }
}

impl tokio::io::AsyncWrite for DeadPeer {
    fn poll_write(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
        _: &[u8],
    ) -> std::task::Poll<std::io::Result<usize>> {
        std::task::Poll::Ready(Err(std::io::ErrorKind::BrokenPipe.into()))
    }

    fn poll_flush(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn poll_shutdown(
        self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        self.poll_flush(context)
    }
}

/// MLX sends at the very moment at which its neighbour dies: the loss does not count as an end by MLX.
#[tokio::test]
async fn peer_stub_replaces_a_neighbour_lost_during_a_write() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let mut mlx = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (local, _) = listener.accept().await.unwrap();
    let alone = StubSwitch::default();
    mlx.write_all(b"a sum").await.unwrap();
    let reason = timeout(CONNECT_TIMEOUT, relay::run(local, DeadPeer, alone.subscribe())).await.unwrap();
    assert!(reason.contains("broken pipe"), "{reason}");
    alone.activate();
    let mut rest = vec![7; 1 << 20];
    timeout(CONNECT_TIMEOUT, mlx.read_exact(&mut rest)).await.unwrap().unwrap();
    assert!(rest.iter().all(|byte| *byte == 0));
}

#[tokio::test]
async fn tunnel_rejects_invalid_rings_and_identities_by_name() {
    let identities = Identities::new();
    let files = TlsFiles::in_dir(&identities.node("node-0"));
    let hosts = free_addresses(2);
    for (hosts, nodes, own) in
        [(&hosts[..1], names(1), 0), (&hosts[..], names(1), 0), (&hosts[..], names(2), 2)]
    {
        let error = Tunnel::open(&files, LABEL, hosts, &nodes, own, &[]).await.unwrap_err();
        assert!(matches!(error, TunnelError::Members { .. }), "{error}");
    }
    let nowhere = TlsFiles::in_dir(std::path::Path::new("/nowhere"));
    let error = Tunnel::open(&nowhere, LABEL, &hosts, &names(2), 0, &[]).await.unwrap_err();
    assert!(error.to_string().contains("/nowhere/tls.crt"), "{error}");
    let taken = std::net::TcpListener::bind(hosts[0]).unwrap();
    let error = Tunnel::open(&files, LABEL, &hosts, &names(2), 0, &[]).await.unwrap_err();
    assert!(error.to_string().contains(&taken.local_addr().unwrap().to_string()), "{error}");
}

/// Two members whose nodes have a cable: 127.0.1.x are its ends, in addition to the published addresses.
/// Linux has all of 127/8; other systems need these addresses configured first.
fn cable(own: usize, ends: [&str; 2]) -> Vec<CableEnds> {
    let (node, own, peer) = (format!("node-{}", 1 - own), ends[own], ends[1 - own]);
    vec![CableEnds { node, own: own.parse().unwrap(), peer: peer.parse().unwrap() }]
}

/// Has both members join with these cables; returns the path of each to the other.
async fn paths(cables: [Vec<CableEnds>; 2]) -> [NeighbourPath; 2] {
    let identities = Identities::new();
    let hosts = free_addresses(2);
    let member = async |own: usize| {
        let files = TlsFiles::in_dir(&identities.node(&format!("node-{own}")));
        let opened = Tunnel::open(&files, LABEL, &hosts, &names(2), own, &cables[own]).await;
        let (tunnel, tunnelled) = opened.unwrap();
        let mut member = join(tunnel, &tunnelled, own).await;
        member.right.write_all(b"over there").await.unwrap();
        let mut said = [0; 10];
        member.left.read_exact(&mut said).await.unwrap();
        assert_eq!(&said, b"over there");
        let mut path = member.tunnel.path();
        let taken = timeout(CONNECT_TIMEOUT, path.wait_for(Option::is_some)).await.unwrap().unwrap().clone();
        (member, taken.unwrap())
    };
    let ((_first, one), (_second, other)) = tokio::join!(member(0), member(1));
    [one, other]
}

#[tokio::test]
async fn neighbours_meet_over_the_cable_that_joins_their_nodes() {
    if !cfg!(target_os = "linux") {
        return;
    }
    let ends = ["127.0.1.1", "127.0.1.2"];
    let taken = paths([cable(0, ends), cable(1, ends)]).await;
    for (own, path) in taken.iter().enumerate() {
        let met = [path.from.ip().to_string(), path.to.ip().to_string()];
        assert_eq!(met, [ends[own], ends[1 - own]], "{path}");
        assert!(path.over_cable && path.fallback.is_none(), "{path:?}");
    }
}

#[tokio::test]
async fn dead_cable_is_reported_and_the_published_address_used() {
    if !cfg!(target_os = "linux") {
        return;
    }
    // Only one of the two knows the cable, so the other end does not listen.
    let ends = ["127.0.1.3", "127.0.1.4"];
    let identities = Identities::new();
    let hosts = free_addresses(2);
    let (files, knows) = (TlsFiles::in_dir(&identities.node("node-0")), cable(0, ends));
    let (one, tunnelled) = Tunnel::open(&files, LABEL, &hosts, &names(2), 0, &knows).await.unwrap();
    let (other, hosts_other) = open(&identities, &hosts, 1).await;
    let mut path = one.path();
    let (_one, _other) = tokio::join!(join(one, &tunnelled, 0), join(other, &hosts_other, 1));
    let taken =
        timeout(CONNECT_TIMEOUT, path.wait_for(Option::is_some)).await.unwrap().unwrap().clone().unwrap();
    assert_eq!((taken.to, taken.over_cable), (hosts[1], false));
    let why = taken.fallback.unwrap();
    assert!(why.starts_with("127.0.1.3 to 127.0.1.4: ") && why.contains("refused"), "{why}");

    // A cable end whose address this machine does not have is ignored.
    let gone = ["192.0.2.77", "192.0.2.78"];
    let [path, _] = paths([cable(0, gone), cable(1, gone)]).await;
    let why = path.fallback.unwrap();
    assert!(why.starts_with("192.0.2.77 to 192.0.2.78: ") && why.contains("assign"), "{why}");
}
