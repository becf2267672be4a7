//! Two machines that play Macs with a cable between them: what their tools print is synthetic, in the shapes of what
//! people recorded, and every process between a tool and an InferenceNode's status is real.

use std::path::{Path, PathBuf};

use kube::Api;
use russet_crds::conditions::{Type, get};
use russet_crds::{InferenceNode, LinkKind};
use serde_json::json;

use crate::plane::*;

/// A Mac with one Thunderbolt 5 port in use, by the programs that say so.
struct Mac {
    folder: PathBuf,
    own: &'static str,
    peer: &'static str,
    address: &'static str,
}

impl Mac {
    fn new(folder: PathBuf, own: &'static str, peer: &'static str, address: &'static str) -> Self {
        std::fs::create_dir_all(&folder).unwrap();
        let mac = Self { folder, own, peer, address };
        mac.plug(true);
        mac.tool(
            "networksetup",
            "Hardware Port: Thunderbolt 2\nDevice: en3\nEthernet Address: 02:00:5e:00:53:01\n",
        );
        let address = mac.address;
        mac.tool(
            "ifconfig",
            &format!("en3: flags=8863<UP> mtu 1500\n\tinet {address} netmask 0xfffffffc\n\tstatus: active\n"),
        );
        mac.tool("netstat", "Destination Gateway Flags Netif Expire\ndefault 192.0.2.254 UGScg en0\n");
        mac.tool("rdma_ctl", "enabled\n");
        mac.tool("ibv_devices", "    device          \t   node GUID\n    ------          \t----------------\n    rdma_en3        \t0000000000000003\n");
        mac.tool("ibv_devinfo", "hca_id:\trdma_en3\n\ttransport:\t\tThunderbolt (100)\n\t\tport:\t1\n\t\t\tstate:\t\tPORT_ACTIVE (4)\n");
        mac
    }

    /// Puts the cable in, or takes it out.
    fn plug(&self, is_in: bool) {
        let (status, speed) = match is_in {
            true => ("receptacle_connected", "80 Gb/s"),
            false => ("receptacle_no_devices_connected", "Up to 120 Gb/s"),
        };
        let peer = json!({"_name": "Mac", "device_name_key": "Mac15,14", "domain_uuid_key": self.peer});
        let bus = json!({
            "_name": "thunderboltusb4_bus_1",
            "_items": if is_in { vec![peer] } else { vec![] },
            "domain_uuid_key": self.own,
            "receptacle_1_tag": {"receptacle_id_key": "2", "receptacle_status_key": status, "current_speed_key": speed},
        });
        let hardware = json!([{"machine_name": "Mac mini"}]);
        let printed = json!({"SPHardwareDataType": hardware, "SPThunderboltDataType": [bus]});
        self.tool("system_profiler", &format!("{printed}\n"));
    }

    /// Has a tool print this.
    fn tool(&self, name: &str, printed: &str) {
        let file = |ending: &str| self.folder.join(format!("{name}.{ending}"));
        std::fs::write(file("next"), printed).unwrap();
        std::fs::rename(file("next"), file("out")).unwrap();
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/played/tool");
        std::os::unix::fs::symlink(program, self.folder.join(name)).ok();
    }
}

async fn join(plane: &Plane, folder: &Path, name: &str, mac: &Mac) -> Agent {
    let mut agent = Agent::join(plane, folder, name, None).await;
    agent.stop().await;
    agent.config.fabric_tools = Some(mac.folder.clone());
    agent.start();
    agent
}

/// Waits until FabricHealthy of a node has this status and reason; the node, and what it says.
async fn healthy(
    nodes: &Api<InferenceNode>,
    name: &str,
    status: &str,
    reason: &str,
) -> (InferenceNode, String) {
    until(&format!("{name} is {status}, {reason}"), || async {
        let node = nodes.get(name).await.ok()?;
        let health = get(&node.status.as_ref()?.conditions, Type::FabricHealthy)?.clone();
        (health.status == status && health.reason == reason).then_some((node, health.message))
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cable_is_a_link_of_both_nodes_while_both_see_it() {
    let folder = tempfile::tempdir().unwrap();
    let plane = Plane::start(&folder.path().join("plane")).await;
    let near = Mac::new(folder.path().join("mac-one"), "aaaa-1", "BBBB-1", "192.0.2.1");
    let far = Mac::new(folder.path().join("mac-two"), "bbbb-1", "aaaa-1", "192.0.2.2");
    let mut one = join(&plane, folder.path(), "one", &near).await;
    let nodes: Api<InferenceNode> = Api::all(plane.client.clone());
    let (_, words) = healthy(&nodes, "one", "True", "PeerNotJoined").await;
    assert!(words.contains("Mac at the other end is no node of this cluster"), "{words}");

    let mut two = join(&plane, folder.path(), "two", &far).await;
    for (name, peer, own, other) in
        [("one", "two", "192.0.2.1", "192.0.2.2"), ("two", "one", "192.0.2.2", "192.0.2.1")]
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

    far.plug(false);
    let (node, words) = healthy(&nodes, "one", "False", "CableOneSided").await;
    assert!(node.status.unwrap().links.is_empty(), "{words}");
    healthy(&nodes, "two", "True", "NoCables").await;
    near.plug(false);
    healthy(&nodes, "one", "True", "NoCables").await;

    // A cable that is plugged in again is a link again, and a tool that fails takes none away.
    near.plug(true);
    far.plug(true);
    healthy(&nodes, "two", "True", "RdmaReady").await;
    far.tool("networksetup", "You must run this tool as an administrator.\n");
    let (node, words) = healthy(&nodes, "two", "False", "PortsUnreadable").await;
    assert!(words.starts_with("networksetup -listallhardwareports printed no hardware port"), "{words}");
    assert_eq!(node.status.unwrap().links.len(), 1);
    healthy(&nodes, "one", "True", "RdmaReady").await;

    // An agent that starts anew takes no link away before it has looked.
    two.stop().await;
    two.start();
    healthy(&nodes, "two", "False", "PortsUnreadable").await;
    let (node, _) = healthy(&nodes, "one", "True", "RdmaReady").await;
    assert_eq!(node.status.unwrap().links.len(), 1);
    one.stop().await;
    two.stop().await;
}
