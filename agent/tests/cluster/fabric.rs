//! Two machines that simulate Macs with a cable between them: the output of their tools is synthetic, in
//! recorded formats; every process between a tool and an InferenceNode's status is real.

use std::path::{Path, PathBuf};

use kube::Api;
use russet_crds::conditions::{Type, get};
use russet_crds::{InferenceNode, LinkKind};

use crate::plane::*;

/// A Mac with one Thunderbolt 5 port, made of stub tools.
struct Mac {
    folder: PathBuf,
    own: &'static str,
    peer: &'static str,
    address: &'static str,
}

impl Mac {
    fn new(folder: PathBuf, own: &'static str, peer: &'static str, address: &'static str) -> Self {
        let mac = Self { folder, own, peer, address };
        mac.plug(true);
        mac
    }

    /// Plugs or unplugs the cable.
    fn plug(&self, is_in: bool) {
        let mut mac = std::process::Command::new(mac_stub_dir().join("mac"));
        mac.arg(&self.folder).args([self.own, self.address]).args(is_in.then_some(self.peer));
        assert!(mac.status().unwrap().success());
    }

    /// Sets the output of a stub tool.
    fn tool(&self, name: &str, printed: &str) {
        let file = |ending: &str| self.folder.join(format!("{name}.{ending}"));
        std::fs::write(file("next"), printed).unwrap();
        std::fs::rename(file("next"), file("out")).unwrap();
    }
}

fn mac_stub_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/mac_stub")
}

async fn join(plane: &TestControlPlane, folder: &Path, name: &str, mac: &Mac) -> TestAgent {
    let mut agent = TestAgent::join(plane, folder, name, None).await;
    agent.stop().await;
    agent.config.fabric_tools = Some(mac.folder.clone());
    agent.start();
    agent
}

/// Waits until a node's FabricHealthy has this status and reason; returns the node and the message.
async fn healthy(
    nodes: &Api<InferenceNode>,
    name: &str,
    status: &str,
    reason: &str,
) -> (InferenceNode, String) {
    wait_until(&format!("{name} is {status}, {reason}"), || async {
        let node = nodes.get(name).await.ok()?;
        let health = get(&node.status.as_ref()?.conditions, Type::FabricHealthy)?.clone();
        (health.status == status && health.reason == reason).then_some((node, health.message))
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cable_is_a_link_of_both_nodes_while_both_see_it() {
    // The cable's ends are addresses in 127/8, all of which only Linux has.
    if !cfg!(target_os = "linux") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let plane = TestControlPlane::start(&folder.path().join("plane")).await;
    let near = Mac::new(folder.path().join("mac-one"), "aaaa-1", "BBBB-1", "127.0.3.1");
    let far = Mac::new(folder.path().join("mac-two"), "bbbb-1", "aaaa-1", "127.0.3.2");
    let mut one = join(&plane, folder.path(), "one", &near).await;
    let nodes: Api<InferenceNode> = Api::all(plane.client.clone());
    let (_, words) = healthy(&nodes, "one", "True", "PeerNotJoined").await;
    assert!(words.contains("Mac at the other end is not a node of this cluster"), "{words}");

    let mut two = join(&plane, folder.path(), "two", &far).await;
    for (name, peer, own, other) in
        [("one", "two", "127.0.3.1", "127.0.3.2"), ("two", "one", "127.0.3.2", "127.0.3.1")]
    {
        let (node, words) = healthy(&nodes, name, "True", "RdmaReady").await;
        assert_eq!(words, format!("Thunderbolt 2 (en3): RDMA to node {peer}"));
        let status = node.status.unwrap();
        let link = &status.links[0];
        assert_eq!((status.links.len(), link.peer.as_str(), link.kind), (1, peer, LinkKind::Thunderbolt));
        assert_eq!((link.address.as_deref(), link.peer_address.as_deref()), (Some(own), Some(other)));
        assert_eq!(
            (link.rdma_device.as_deref(), link.bits_per_second),
            (Some("rdma_en3"), Some(80_000_000_000))
        );
        assert_eq!(status.backends, ["ring"], "who plays a Mac has no engine that could use RDMA");
    }

    // Each agent pings the other over the cable, and probes its bandwidth.
    for name in ["one", "two"] {
        let measured = wait_until(&format!("{name} has measured its link"), || async {
            let status = nodes.get(name).await.ok()?.status?;
            let measured = status.links.first()?.measured?;
            Some((measured.round_trip_microseconds?, measured.bits_per_second?))
        })
        .await;
        println!("{name}: {} us there and back, {} Mbit/s", measured.0, measured.1 / 1_000_000);
        assert!(measured.0 > 0 && measured.1 > 0, "{measured:?}");
    }

    far.plug(false);
    let (node, words) = healthy(&nodes, "one", "False", "CableOneSided").await;
    assert!(node.status.unwrap().links.is_empty(), "{words}");
    healthy(&nodes, "two", "True", "NoCables").await;
    near.plug(false);
    healthy(&nodes, "one", "True", "NoCables").await;

    // A replugged cable is a link again, and a failing tool removes none.
    near.plug(true);
    far.plug(true);
    healthy(&nodes, "two", "True", "RdmaReady").await;
    far.tool("networksetup", "You must run this tool as an administrator.\n");
    let (node, words) = healthy(&nodes, "two", "False", "PortsUnreadable").await;
    assert!(words.starts_with("networksetup -listallhardwareports printed no hardware port"), "{words}");
    assert_eq!(node.status.unwrap().links.len(), 1);
    healthy(&nodes, "one", "True", "RdmaReady").await;

    // A restarted agent removes no link before its first scan.
    two.stop().await;
    two.start();
    healthy(&nodes, "two", "False", "PortsUnreadable").await;
    let (node, _) = healthy(&nodes, "one", "True", "RdmaReady").await;
    assert_eq!(node.status.unwrap().links.len(), 1);
    one.stop().await;
    two.stop().await;
}
