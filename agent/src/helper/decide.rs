//! Compares current and desired state: which changes to make and which to undo. Pure; a machine in its
//! desired state needs none.

use super::change::{MachineChange, PREFIX_BITS};
use super::check::DesiredState;
use super::current_state::CurrentState;

/// Missing changes, in the order of their application.
pub fn pending_changes(current: &CurrentState, desired: &DesiredState) -> Vec<MachineChange> {
    let DesiredState { ports, cables_last, wired } = desired;
    let mut changes = Vec::new();
    for (name, &address) in ports {
        let Some(interface) = current.interface(name) else { continue };
        let of = || name.clone();
        changes
            .extend(interface.bridge.clone().map(|bridge| MachineChange::Leave { interface: of(), bridge }));
        let is_desired = |ip, prefix| ip == address && prefix == PREFIX_BITS;
        // A link-local address may stay beside another one.
        let others = interface.addresses.iter().map(|own| own.config);
        let others = others.filter(|held| !held.ip.is_link_local() && !is_desired(held.ip, held.prefix));
        changes.extend(others.map(|held| MachineChange::Drop { interface: of(), held }));
        changes.extend((!interface.is_up).then(|| MachineChange::Raise { interface: of() }));
        let has = interface.addresses.iter().any(|own| is_desired(own.config.ip, own.config.prefix));
        changes.extend((!has).then(|| MachineChange::Give { interface: of(), address }));
    }
    if *cables_last {
        let (before, after) = (current.service_names(), current.cables_last());
        changes.extend((before != after).then_some(MachineChange::Order { before, after }));
    }
    if let (Some(after), Some(before)) = (*wired, current.wired) {
        changes.extend((before != after).then_some(MachineChange::Wire { before, after }));
    }
    changes
}

/// Whether a change belongs to the desired state; one that does not is undone.
pub fn is_desired(change: &MachineChange, desired: &DesiredState) -> bool {
    match change {
        MachineChange::Leave { interface, .. } | MachineChange::Raise { interface } => {
            desired.ports.contains_key(interface)
        }
        MachineChange::Drop { interface, held } => desired
            .ports
            .get(interface)
            .is_some_and(|address| *address != held.ip || held.prefix != PREFIX_BITS),
        MachineChange::Give { interface, address } => desired.ports.get(interface) == Some(address),
        MachineChange::Order { .. } => desired.cables_last,
        MachineChange::Wire { after, .. } => desired.wired == Some(*after),
    }
}

/// Whether a change is in effect and can be undone: it may never have been applied, another program may have
/// undone it, or its interface may be gone. Later changes by others are not touched.
pub fn is_applied(change: &MachineChange, current: &CurrentState) -> bool {
    let of = |name: &String| current.interface(name);
    let has = |name: &String, ip, prefix| {
        let found = |one: &super::current_state::Interface| {
            one.addresses.iter().any(|own| own.config.ip == ip && own.config.prefix == prefix)
        };
        of(name).map(found)
    };
    match change {
        MachineChange::Leave { interface, bridge } => {
            of(bridge).is_some() && of(interface).is_some_and(|one| one.bridge.is_none())
        }
        MachineChange::Drop { interface, held } => has(interface, held.ip, held.prefix) == Some(false),
        MachineChange::Raise { interface } => of(interface).is_some_and(|one| one.is_up),
        MachineChange::Give { interface, address } => has(interface, *address, PREFIX_BITS) == Some(true),
        // Services may have been added or removed since; the order of the remaining ones is as applied.
        MachineChange::Order { after, .. } => {
            let now = current.service_names();
            let still = after.iter().filter(|name| now.contains(name));
            still.eq(now.iter().filter(|name| after.contains(name)))
        }
        MachineChange::Wire { after, .. } => current.wired == Some(*after),
    }
}

/// The change in the form to undo on this machine: services added since keep their place, removed ones are
/// left out.
pub fn undo_change(change: &MachineChange, current: &CurrentState) -> MachineChange {
    let MachineChange::Order { before, after } = change else { return change.clone() };
    let now = current.service_names();
    let mut old = before.iter().filter(|name| now.contains(name) && after.contains(name));
    let place = |name: &String| match after.contains(name) && before.contains(name) {
        true => old.next().unwrap_or(name).clone(),
        false => name.clone(),
    };
    MachineChange::Order { before: now.iter().map(place).collect(), after: now.clone() }
}

#[cfg(test)]
mod tests {
    use super::super::check::tests::{current_state, policy};
    use super::super::check::{DesiredState, check};
    use super::super::protocol::{MachineRequest, Network, Port, RestartPolicy};
    use super::*;
    use crate::macos::services::NetworkService;

    fn desired(ports: &[(&str, &str)], wired: Option<u64>) -> DesiredState {
        let port = |(interface, address): &(&str, &str)| Port {
            interface: (*interface).to_owned(),
            address: (*address).to_owned(),
        };
        let ports = ports.iter().map(port).collect();
        let network = Network { ports, cables_last: false, after_restart: RestartPolicy::Drop };
        let request = MachineRequest {
            node: "a".into(),
            network: Some(network),
            wired_limit_mebibytes: wired,
            ..MachineRequest::default()
        };
        check(&request, &current_state(), &policy(), None).unwrap()
    }

    /// The machine after a change.
    fn applied(mut present: CurrentState, change: &MachineChange) -> CurrentState {
        use super::super::current_state::{AddressConfig, Interface, InterfaceAddress};
        let mut of = |name: &String, change: &dyn Fn(&mut Interface)| {
            present.interfaces.iter_mut().filter(|one| one.name == *name).for_each(change);
        };
        match change {
            MachineChange::Leave { interface, .. } => of(interface, &|one| one.bridge = None),
            MachineChange::Drop { interface, held } => {
                of(interface, &|one| one.addresses.retain(|own| own.config != *held));
            }
            MachineChange::Raise { interface } => of(interface, &|one| one.is_up = true),
            MachineChange::Give { interface, address } => of(interface, &|one| {
                let held = AddressConfig { ip: *address, prefix: PREFIX_BITS, broadcast: None };
                one.addresses.push(InterfaceAddress { config: held, is_dhcp: false });
            }),
            MachineChange::Order { after, .. } => {
                present.services.sort_by_key(|service| after.iter().position(|name| *name == service.name));
            }
            MachineChange::Wire { after, .. } => present.wired = Some(*after),
        }
        present
    }

    fn descriptions(changes: &[MachineChange]) -> Vec<String> {
        changes.iter().map(MachineChange::to_string).collect()
    }

    #[test]
    fn missing_changes_are_applied_once() {
        let desired_state = desired(&[("en4", "172.31.240.1/30"), ("en5", "172.31.240.5/30")], Some(5000));
        let changes = pending_changes(&current_state(), &desired_state);
        assert_eq!(
            descriptions(&changes),
            [
                "en4 left bridge0",
                "en4 has 172.31.240.1/30",
                "en5 lost 10.9.9.9/24",
                "en5 has 172.31.240.5/30",
                "the GPU may wire 5000 MiB"
            ]
        );
        let mut bridge = current_state();
        bridge.interfaces.push(super::super::current_state::Interface {
            name: "bridge0".into(),
            is_up: true,
            ..Default::default()
        });
        let done = changes.iter().fold(bridge.clone(), applied);
        assert_eq!(pending_changes(&done, &desired_state), []);
        assert!(changes.iter().all(|change| is_desired(change, &desired_state) && is_applied(change, &done)));
        assert!(
            !changes.iter().any(|change| is_applied(change, &bridge)),
            "nothing was done, so nothing is undone"
        );
        let none = check(&MachineRequest { node: "a".into(), ..Default::default() }, &done, &policy(), None)
            .unwrap();
        assert!(!changes.iter().any(|change| is_desired(change, &none)));
    }

    #[test]
    fn cable_services_move_last_and_others_keep_their_order() {
        let service = |name: &str, port: &str, device: &str| NetworkService {
            name: name.to_owned(),
            port: port.to_owned(),
            device: Some(device.to_owned()),
            enabled: true,
        };
        let services = vec![
            service("Thunderbolt Bridge", "Thunderbolt Bridge", "bridge0"),
            service("Cable", "Thunderbolt 4", "en5"),
            service("Wi-Fi", "Wi-Fi", "en1"),
            service("Bridge of mine", "VLAN", "bridge0"),
            service("Ethernet", "Ethernet", "en0"),
            service("Adapter", "Thunderbolt Ethernet", "en9"),
        ];
        let present = CurrentState { services, ..current_state() };
        let desired_state = DesiredState { cables_last: true, ..desired(&[], None) };
        let changes = pending_changes(&present, &desired_state);
        let [MachineChange::Order { after: order, .. }] = &changes[..] else { panic!("{changes:?}") };
        assert_eq!(order, &["Wi-Fi", "Ethernet", "Adapter", "Thunderbolt Bridge", "Cable", "Bridge of mine"]);
        let mut done = applied(present, &changes[0]);
        assert_eq!((pending_changes(&done, &desired_state), is_applied(&changes[0], &done)), (vec![], true));
        // A service added since keeps its place, a removed one is left out.
        let mut since = done.clone();
        since.services.retain(|service| service.name != "Ethernet");
        since.services.insert(1, service("VPN", "VPN", "utun0"));
        assert!(is_applied(&changes[0], &since));
        let MachineChange::Order { before, .. } = undo_change(&changes[0], &since) else { panic!() };
        assert_eq!(before, ["Thunderbolt Bridge", "VPN", "Cable", "Wi-Fi", "Bridge of mine", "Adapter"]);
        done.services.swap(0, 1);
        assert!(!is_applied(&changes[0], &done), "an order that somebody chose since is his");
    }
}
