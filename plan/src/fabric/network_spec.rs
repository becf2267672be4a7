//! The `spec.network` of each machine that makes the changes of [`network`](super::network). Pure and
//! idempotent; ports that were configured before stay.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use russet_crds::{AfterRestart, InferenceNodeStatus, NodeNetwork, PortAddress, ServiceOrder};

use super::address_plan::{NetworkChange, NoFreeNetwork, changes, is_lacking};

/// A node's network state.
#[derive(Clone, Debug, Default)]
pub struct NodeNetworkState {
    /// Its current `spec.network`.
    pub network: Option<NodeNetwork>,
    /// Its reported status.
    pub status: InferenceNodeStatus,
}

/// Whether a machine's internet traffic goes over a cable and a service order can fix that: macOS has one.
pub fn routes_internet_over_cable(status: &InferenceNodeStatus) -> bool {
    let is_mac = status.os.as_deref().is_some_and(|os| os.starts_with("macOS"));
    is_mac && status.ports.iter().any(|port| port.default_route)
}

/// The `spec.network` of every node that needs one, unchanged ones included. With `keep` it survives
/// restarts; settings that survive restarts already continue to.
pub fn network_specs(
    nodes: &BTreeMap<String, NodeNetworkState>,
    range: Ipv4Addr,
    keep: bool,
) -> Result<BTreeMap<String, NodeNetwork>, NoFreeNetwork> {
    let known = nodes.iter().map(|(name, node)| (name.clone(), with_spec_applied(node, keep))).collect();
    let mut changes = changes(&known, range)?;
    let desired = |(name, node): (&String, &NodeNetworkState)| {
        let made = changes.remove(name).unwrap_or_default();
        let orders = routes_internet_over_cable(&node.status);
        if made.is_empty() && !orders && node.network.is_none() {
            return None;
        }
        let before = node.network.clone().unwrap_or_default();
        let (survives, is_old) = (survives_restart(&before, keep), is_expired(node, &before, keep));
        let mut ports = if is_old { Vec::new() } else { before.ports };
        ports.retain(|port| node.status.ports.iter().any(|known| known.interface == port.interface));
        for change in made {
            let NetworkChange::AddAddress { interface, address } = change else { continue };
            ports.retain(|port| port.interface != interface);
            ports.push(PortAddress { interface, address: format!("{address}/30") });
        }
        ports.sort_by(|one, other| one.interface.cmp(&other.interface));
        let service_order = before.service_order.filter(|_| !is_old);
        let network = NodeNetwork {
            ports,
            service_order: service_order.or(orders.then_some(ServiceOrder::CablesLast)),
            after_restart: if survives { AfterRestart::Keep } else { AfterRestart::Drop },
            boot_id: if survives { None } else { node.status.boot_id.clone() },
        };
        let asks = !network.ports.is_empty() || network.service_order.is_some();
        asks.then(|| (name.clone(), network))
    };
    Ok(nodes.iter().filter_map(desired).collect())
}

fn survives_restart(asked: &NodeNetwork, keep: bool) -> bool {
    keep || asked.after_restart == AfterRestart::Keep
}

/// Valid until a restart that has happened: it is not requested again unless it is needed.
fn is_expired(node: &NodeNetworkState, asked: &NodeNetwork, keep: bool) -> bool {
    !survives_restart(asked, keep) && asked.boot_id != node.status.boot_id
}

/// A node's status with its `spec.network` applied, which may take as long as its helper is away: no other
/// cable gets that network, and a cable with both ends configured keeps it.
fn with_spec_applied(node: &NodeNetworkState, keep: bool) -> InferenceNodeStatus {
    let mut status = node.status.clone();
    let asked = node.network.as_ref().filter(|asked| !is_expired(node, asked, keep));
    for PortAddress { interface, address } in asked.into_iter().flat_map(|asked| &asked.ports) {
        let Some((address, _)) = address.split_once('/') else { continue };
        for port in status.ports.iter_mut().filter(|port| port.interface == *interface) {
            if is_lacking(port) {
                port.reason = None;
                port.rdma_device.get_or_insert_default();
            }
            (port.address, port.prefix_length, port.bridge) = (Some(address.to_owned()), Some(30), None);
        }
    }
    status
}

#[cfg(test)]
mod tests {
    use russet_crds::{FabricPort, PortPeer};

    use super::super::address_plan::DEFAULT_RANGE;
    use super::*;

    fn node(own: &str, sees: &str) -> NodeNetworkState {
        let peer = PortPeer { domain: Some(sees.to_owned()), ..PortPeer::default() };
        let port = FabricPort {
            interface: "en4".to_owned(),
            domain: Some(own.to_owned()),
            peers: vec![peer],
            bridge: Some("bridge0".to_owned()),
            reason: Some("PortInBridge".to_owned()),
            ..FabricPort::default()
        };
        let status = InferenceNodeStatus {
            ports: vec![port],
            os: Some("macOS 26.5 (25F71)".to_owned()),
            boot_id: Some("one".to_owned()),
            ..InferenceNodeStatus::default()
        };
        NodeNetworkState { network: None, status }
    }

    fn apply_specs(
        nodes: &mut BTreeMap<String, NodeNetworkState>,
        keep: bool,
    ) -> BTreeMap<String, NodeNetwork> {
        let asked = network_specs(nodes, DEFAULT_RANGE, keep).unwrap();
        for (name, network) in &asked {
            nodes.get_mut(name).unwrap().network = Some(network.clone());
        }
        asked
    }

    #[test]
    fn network_spec_is_stable_and_grows_with_new_cables() {
        let mut nodes: BTreeMap<String, NodeNetworkState> =
            [("a".to_owned(), node("A", "B")), ("b".to_owned(), node("B", "A"))].into();
        let first = apply_specs(&mut nodes, false);
        assert_eq!(first["a"].ports[0].address, "172.31.240.1/30");
        assert_eq!(first["b"].ports[0].address, "172.31.240.2/30");
        assert_eq!(
            (first["a"].after_restart, first["a"].boot_id.as_deref(), first["a"].service_order),
            (AfterRestart::Drop, Some("one"), None)
        );
        assert_eq!(apply_specs(&mut nodes, false), first, "asked for, not yet applied");

        // Applied: nothing is missing, and the settings stay.
        for (name, host) in [("a", 1), ("b", 2)] {
            let port = &mut nodes.get_mut(name).unwrap().status.ports[0];
            port.address = Some(format!("172.31.240.{host}"));
            (port.bridge, port.reason, port.prefix_length) = (None, None, Some(30));
            port.rdma_device = Some("rdma_en4".to_owned());
        }
        assert_eq!(apply_specs(&mut nodes, false), first);
        let retained = apply_specs(&mut nodes, true);
        assert_eq!((retained["a"].after_restart, &retained["a"].boot_id), (AfterRestart::Keep, &None));
        assert_eq!(apply_specs(&mut nodes, false), retained, "what outlasts restarts goes on to");

        let traffic = nodes.get_mut("b").unwrap();
        traffic.status.ports[0].default_route = true;
        let last = apply_specs(&mut nodes, false);
        assert_eq!(
            (last["b"].service_order, last["a"].service_order),
            (Some(ServiceOrder::CablesLast), None)
        );
        // A port that is gone is left out, and a machine without settings is left alone.
        nodes.get_mut("a").unwrap().status.ports.clear();
        assert!(!apply_specs(&mut nodes, false).contains_key("a"));
    }

    #[test]
    fn pending_network_is_not_given_to_another_cable() {
        let mut nodes: BTreeMap<String, NodeNetworkState> =
            [("a".to_owned(), node("A", "B")), ("b".to_owned(), node("B", "A"))].into();
        let first = apply_specs(&mut nodes, false);
        // A helper at one end only: a second call changes nothing.
        let port = &mut nodes.get_mut("a").unwrap().status.ports[0];
        port.address = Some("172.31.240.1".to_owned());
        (port.bridge, port.reason, port.prefix_length) = (None, None, Some(30));
        port.rdma_device = Some("rdma_en4".to_owned());
        assert_eq!(apply_specs(&mut nodes, false), first);

        // No helper at either end, and the cable is moved to another port: that one gets a network of its
        // own.
        let mut nodes: BTreeMap<String, NodeNetworkState> =
            [("a".to_owned(), node("A", "B")), ("b".to_owned(), node("B", "A"))].into();
        apply_specs(&mut nodes, false);
        let ports = &mut nodes.get_mut("a").unwrap().status.ports;
        let moved =
            FabricPort { interface: "en3".to_owned(), domain: Some("A3".to_owned()), ..ports[0].clone() };
        ports[0].peers.clear();
        ports.push(moved);
        nodes.get_mut("b").unwrap().status.ports[0].peers[0].domain = Some("A3".to_owned());
        let again = apply_specs(&mut nodes, false);
        let shown = |name: &str| -> Vec<String> {
            again[name].ports.iter().map(|port| format!("{} {}", port.interface, port.address)).collect()
        };
        assert_eq!(shown("a"), ["en3 172.31.240.5/30", "en4 172.31.240.1/30"]);
        assert_eq!(shown("b"), ["en4 172.31.240.6/30"]);
        assert_eq!(apply_specs(&mut nodes, false), again);
    }

    #[test]
    fn network_spec_of_an_earlier_boot_is_requested_again() {
        let mut nodes: BTreeMap<String, NodeNetworkState> =
            [("a".to_owned(), node("A", "B")), ("b".to_owned(), node("B", "A"))].into();
        apply_specs(&mut nodes, false);
        let a = nodes.get_mut("a").unwrap();
        a.status.boot_id = Some("two".to_owned());
        a.network
            .as_mut()
            .unwrap()
            .ports
            .push(PortAddress { interface: "en9".to_owned(), address: "10.0.0.1/30".to_owned() });
        let again = apply_specs(&mut nodes, false);
        assert_eq!((again["a"].boot_id.as_deref(), again["a"].ports.len()), (Some("two"), 1));
    }
}
