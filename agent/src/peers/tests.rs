//! Two agents on loopback, with certificates of one CA.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use russet_crds::{FabricPort, PortPeer};
use russet_rpc::tls::{Connector, GATEWAY_USER, Protocol, TlsFiles, node_dns_name, node_user};

use super::client::{DialError, PeerClient};
use super::*;
use crate::fabric::probe::PortScan;

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// A CA that issues certificates in a directory.
pub(crate) struct TestCa {
    folder: std::path::PathBuf,
    ca: CertifiedIssuer<'static, KeyPair>,
}

impl TestCa {
    pub fn new(folder: &Path) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self {
            folder: folder.to_owned(),
            ca: CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap(),
        }
    }

    fn identity(&self, user: &str, name: &str) -> TlsFiles {
        let folder = self.folder.join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let files = TlsFiles::in_dir(&folder);
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, user);
        let key = KeyPair::generate().unwrap();
        let leaf = params.signed_by(&key, &self.ca).unwrap();
        std::fs::write(&files.ca, self.ca.pem()).unwrap();
        std::fs::write(&files.cert, leaf.pem()).unwrap();
        std::fs::write(&files.key, key.serialize_pem()).unwrap();
        files
    }

    pub fn node(&self, node: &str) -> TlsFiles {
        self.identity(&node_user(node), &node_dns_name(node))
    }
}

/// A node's agent, at its own address and at that of a port.
pub(crate) struct PeerAgent {
    idle_gate: IdleGate,
    granted: watch::Sender<u64>,
    ports: watch::Sender<PortScan>,
    pub port: u16,
    _address: watch::Sender<IpAddr>,
    task: tokio::task::JoinHandle<()>,
}

impl PeerAgent {
    /// Waits until this many bandwidth probes may run.
    async fn permits(&self, count: usize) {
        let waited = async {
            while self.idle_gate.permits.available_permits() != count {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(60), waited).await.unwrap();
    }
}

impl Drop for PeerAgent {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(crate) fn agent(files: TlsFiles, store: Store) -> PeerAgent {
    let (granted, serving) = watch::channel(0);
    let (fabric, seen) = watch::channel(PortScan::default());
    let (address_sender, address) = watch::channel(LOOPBACK);
    let (port, idle) = (PeerListener::free_port().unwrap(), IdleGate::new(serving));
    let answers = PeerServer { idle_gate: idle.clone(), store };
    let task = tokio::spawn(run(PeerListener { files, port, address, ports: seen, server: answers }));
    PeerAgent { idle_gate: idle, granted, ports: fabric, port, _address: address_sender, task }
}

/// The agent of `a`, the connector of node `b`, and the agent's address.
fn pair(authority: &TestCa) -> (PeerAgent, Connector, SocketAddr) {
    rustls::crypto::ring::default_provider().install_default().ok();
    let context = crate::store::Context::new("https://huggingface.co", Vec::new()).unwrap();
    let store = Store::open(authority.folder.join("models"), context).unwrap();
    let agent = agent(authority.node("a"), store);
    let connector = authority.node("b").connector(Protocol::Agents).unwrap();
    let at = SocketAddr::new(LOOPBACK, agent.port);
    (agent, connector, at)
}

/// Connects as soon as the agent listens.
async fn connect(connector: &Connector, from: IpAddr, to: SocketAddr) -> PeerClient {
    let reached = async {
        loop {
            match PeerClient::connect(connector, "a", &from.into(), to).await {
                Ok(peer) => return peer,
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
            }
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(60), reached).await.unwrap()
}

#[tokio::test]
async fn peer_server_answers_only_nodes_at_every_address() {
    let folder = tempfile::tempdir().unwrap();
    let authority = TestCa::new(folder.path());
    let (agent, connector, at) = pair(&authority);
    let mut peer = connect(&connector, LOOPBACK, at).await;
    assert!(!peer.ping().await.unwrap().is_zero());
    peer.ping().await.unwrap();

    // Linux has all of 127/8; elsewhere a second loopback address would have to be created first.
    if cfg!(target_os = "linux") {
        // The agent listens at a cable's end as soon as it has an address, and no longer.
        let end: IpAddr = [127, 0, 4, 1].into();
        let cable = FabricPort {
            address: Some(end.to_string()),
            peers: vec![PortPeer::default()],
            ..FabricPort::default()
        };
        agent.ports.send_replace(PortScan { ports: vec![cable], ..PortScan::default() });
        let mut over = connect(&connector, [127, 0, 4, 2].into(), SocketAddr::new(end, agent.port)).await;
        over.ping().await.unwrap();
        agent.ports.send_replace(PortScan::default());
        let closed = async { while over.ping().await.is_ok() {} };
        tokio::time::timeout(std::time::Duration::from_secs(60), closed).await.unwrap();
        peer.ping().await.unwrap();
    }

    let error = PeerClient::connect(&connector, "c", &LOOPBACK.into(), at).await.unwrap_err();
    assert!(matches!(error, DialError::Unreachable { .. }), "a is not c: {error}");
    let grpc = authority.node("b").connector(Protocol::Grpc).unwrap();
    assert!(
        PeerClient::connect(&grpc, "a", &LOOPBACK.into(), at).await.is_err(),
        "gRPC is not what agents speak"
    );
    let gateway = authority.identity(GATEWAY_USER, "gateway.russet.dev").connector(Protocol::Agents).unwrap();
    let turned_away = async { PeerClient::connect(&gateway, "a", &LOOPBACK.into(), at).await?.ping().await };
    assert!(turned_away.await.is_err(), "the gateway is no node");
    let others = folder.path().join("others");
    let other = TestCa::new(&others).node("b").connector(Protocol::Agents).unwrap();
    assert!(
        PeerClient::connect(&other, "a", &LOOPBACK.into(), at).await.is_err(),
        "a certificate of another authority"
    );
}

#[tokio::test]
async fn node_that_takes_all_its_places_leaves_those_of_others() {
    let folder = tempfile::tempdir().unwrap();
    let authority = TestCa::new(folder.path());
    let (_agent, connector, at) = pair(&authority);
    let mut silent = Vec::new();
    for _ in 0..64 {
        let mut peer = connect(&connector, LOOPBACK, at).await;
        peer.ping().await.unwrap();
        silent.push(peer);
    }
    let more = async { PeerClient::connect(&connector, "a", &LOOPBACK.into(), at).await?.ping().await };
    more.await.unwrap_err();
    let other = authority.node("c").connector(Protocol::Agents).unwrap();
    connect(&other, LOOPBACK, at).await.ping().await.unwrap();
    // A place that is given back may be taken again.
    silent.pop();
    let again = async {
        loop {
            let peer = PeerClient::connect(&connector, "a", &LOOPBACK.into(), at).await;
            if let Ok(mut peer) = peer
                && peer.ping().await.is_ok()
            {
                return;
            }
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(60), again).await.unwrap();
}

#[tokio::test]
async fn bandwidth_probe_runs_only_on_an_idle_machine() {
    let folder = tempfile::tempdir().unwrap();
    let authority = TestCa::new(folder.path());
    let (agent, connector, at) = pair(&authority);
    agent.granted.send_replace(1 << 30);
    assert_eq!(connect(&connector, LOOPBACK, at).await.measure_bandwidth().await.unwrap(), None, "it serves");

    agent.granted.send_replace(0);
    agent.permits(1).await;
    let first = connect(&connector, LOOPBACK, at).await.measure_bandwidth();
    let meanwhile = async {
        agent.permits(0).await;
        connect(&connector, LOOPBACK, at).await.measure_bandwidth().await
    };
    let (first, second) = tokio::join!(first, meanwhile);
    assert_eq!(second.unwrap(), None, "one at a time");
    let carried = first.unwrap().unwrap();
    assert!(carried > 1_000_000, "{carried}");

    // A grant during the probe ends it.
    agent.permits(1).await;
    let flooding = connect(&connector, LOOPBACK, at).await.measure_bandwidth();
    let needed = async {
        agent.permits(0).await;
        agent.granted.send_replace(1);
    };
    let (carried, ()) = tokio::join!(flooding, needed);
    assert_eq!(carried.unwrap(), None, "somebody needs the machine");

    // A client that does not read keeps the machine no longer than others.
    agent.granted.send_replace(0);
    agent.permits(1).await;
    let silent = connect(&connector, LOOPBACK, at).await.get_unread(BANDWIDTH).await.unwrap();
    agent.permits(0).await;
    agent.permits(1).await;
    drop(silent);
}
