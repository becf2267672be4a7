//! Two agents on loopback, with certificates of one authority.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use russet_crds::{FabricPort, PortPeer};
use russet_rpc::tls::{Connector, Files, GATEWAY_USER, Protocol, node_dns_name, node_user};

use super::dial::{DialError, Peer};
use super::*;
use crate::fabric::probe::Seen;

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// An authority that signs in a folder.
pub(crate) struct Authority {
    folder: std::path::PathBuf,
    ca: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    pub fn new(folder: &Path) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self {
            folder: folder.to_owned(),
            ca: CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap(),
        }
    }

    fn identity(&self, user: &str, name: &str) -> Files {
        let folder = self.folder.join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let files = Files::in_dir(&folder);
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, user);
        let key = KeyPair::generate().unwrap();
        let leaf = params.signed_by(&key, &self.ca).unwrap();
        std::fs::write(&files.ca, self.ca.pem()).unwrap();
        std::fs::write(&files.cert, leaf.pem()).unwrap();
        std::fs::write(&files.key, key.serialize_pem()).unwrap();
        files
    }

    pub fn node(&self, node: &str) -> Files {
        self.identity(&node_user(node), &node_dns_name(node))
    }
}

/// The agent of a node, at its own address and at that of a port.
pub(crate) struct Agent {
    idle: Idle,
    granted: watch::Sender<u64>,
    fabric: watch::Sender<Seen>,
    pub port: u16,
    _address: watch::Sender<IpAddr>,
    task: tokio::task::JoinHandle<()>,
}

impl Agent {
    /// Waits until so many more floods may run.
    async fn permits(&self, count: usize) {
        let waited = async {
            while self.idle.one.available_permits() != count {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(60), waited).await.unwrap();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(crate) fn agent(files: Files, store: Store) -> Agent {
    let (granted, serving) = watch::channel(0);
    let (fabric, seen) = watch::channel(Seen::default());
    let (kept, address) = watch::channel(LOOPBACK);
    let (port, idle) = (Listening::port().unwrap(), Idle::new(serving));
    let answers = Answers { idle: idle.clone(), store };
    let task = tokio::spawn(keep(Listening { files, port, address, fabric: seen, answers }));
    Agent { idle, granted, fabric, port, _address: kept, task }
}

/// The agent of `a`, what node `b` connects with, and where.
fn pair(authority: &Authority) -> (Agent, Connector, SocketAddr) {
    rustls::crypto::ring::default_provider().install_default().ok();
    let context = crate::store::Context::new("https://huggingface.co", Vec::new()).unwrap();
    let store = Store::open(authority.folder.join("models"), context).unwrap();
    let agent = agent(authority.node("a"), store);
    let connector = authority.node("b").connector(Protocol::Agents).unwrap();
    let at = SocketAddr::new(LOOPBACK, agent.port);
    (agent, connector, at)
}

/// Connects as soon as somebody listens.
async fn reach(connector: &Connector, from: IpAddr, to: SocketAddr) -> Peer {
    let reached = async {
        loop {
            match Peer::connect(connector, "a", &from.into(), to).await {
                Ok(peer) => return peer,
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
            }
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(60), reached).await.unwrap()
}

#[tokio::test]
async fn a_node_is_answered_at_every_address_of_the_other_and_nobody_else_is() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new(folder.path());
    let (agent, connector, at) = pair(&authority);
    let mut peer = reach(&connector, LOOPBACK, at).await;
    assert!(!peer.ping().await.unwrap().is_zero());
    peer.ping().await.unwrap();

    // Linux has all of 127/8; elsewhere a second address of loopback has to be made first.
    if cfg!(target_os = "linux") {
        // An end of a cable is listened at once it has an address, and no longer.
        let end: IpAddr = [127, 0, 4, 1].into();
        let cable = FabricPort {
            address: Some(end.to_string()),
            peers: vec![PortPeer::default()],
            ..FabricPort::default()
        };
        agent.fabric.send_replace(Seen { ports: vec![cable], ..Seen::default() });
        let mut over = reach(&connector, [127, 0, 4, 2].into(), SocketAddr::new(end, agent.port)).await;
        over.ping().await.unwrap();
        agent.fabric.send_replace(Seen::default());
        let closed = async { while over.ping().await.is_ok() {} };
        tokio::time::timeout(std::time::Duration::from_secs(60), closed).await.unwrap();
        peer.ping().await.unwrap();
    }

    let error = Peer::connect(&connector, "c", &LOOPBACK.into(), at).await.unwrap_err();
    assert!(matches!(error, DialError::Unreachable { .. }), "a is not c: {error}");
    let grpc = authority.node("b").connector(Protocol::Grpc).unwrap();
    assert!(Peer::connect(&grpc, "a", &LOOPBACK.into(), at).await.is_err(), "gRPC is not what agents speak");
    let gateway = authority.identity(GATEWAY_USER, "gateway.russet.dev").connector(Protocol::Agents).unwrap();
    let turned_away = async { Peer::connect(&gateway, "a", &LOOPBACK.into(), at).await?.ping().await };
    assert!(turned_away.await.is_err(), "the gateway is no node");
    let others = folder.path().join("others");
    let other = Authority::new(&others).node("b").connector(Protocol::Agents).unwrap();
    assert!(
        Peer::connect(&other, "a", &LOOPBACK.into(), at).await.is_err(),
        "a certificate of another authority"
    );
}

#[tokio::test]
async fn a_way_is_tried_only_while_nobody_needs_the_machine() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new(folder.path());
    let (agent, connector, at) = pair(&authority);
    agent.granted.send_replace(1 << 30);
    assert_eq!(reach(&connector, LOOPBACK, at).await.flood().await.unwrap(), None, "it serves");

    agent.granted.send_replace(0);
    agent.permits(1).await;
    let first = reach(&connector, LOOPBACK, at).await.flood();
    let meanwhile = async {
        agent.permits(0).await;
        reach(&connector, LOOPBACK, at).await.flood().await
    };
    let (first, second) = tokio::join!(first, meanwhile);
    assert_eq!(second.unwrap(), None, "one at a time");
    let carried = first.unwrap().unwrap();
    assert!(carried > 1_000_000, "{carried}");

    // What is granted in the middle ends it.
    agent.permits(1).await;
    let flooding = reach(&connector, LOOPBACK, at).await.flood();
    let needed = async {
        agent.permits(0).await;
        agent.granted.send_replace(1);
    };
    let (carried, ()) = tokio::join!(flooding, needed);
    assert_eq!(carried.unwrap(), None, "somebody needs the machine");

    // Who asks and does not read keeps the machine no longer than others.
    agent.granted.send_replace(0);
    agent.permits(1).await;
    let silent = reach(&connector, LOOPBACK, at).await.unread(FLOOD).await.unwrap();
    agent.permits(0).await;
    agent.permits(1).await;
    drop(silent);
}
