//! From how the machine is and how it should be to what is to be done and what to be taken back. Pure; a machine that is
//! as it should be has nothing to do.

use super::check::Wish;
use super::deed::{Deed, PREFIX};
use super::present::Present;

/// What is missing, in the order in which it is done.
pub fn missing(present: &Present, wish: &Wish) -> Vec<Deed> {
    let Wish { ports, cables_last, wired } = wish;
    let mut deeds = Vec::new();
    for (name, &address) in ports {
        let Some(interface) = present.interface(name) else { continue };
        let of = || name.clone();
        deeds.extend(interface.bridge.clone().map(|bridge| Deed::Leave { interface: of(), bridge }));
        let wanted = |ip, prefix| ip == address && prefix == PREFIX;
        // What a port gave itself may stay beside another.
        let others = interface.addresses.iter().map(|own| own.held);
        let others = others.filter(|held| !held.ip.is_link_local() && !wanted(held.ip, held.prefix));
        deeds.extend(others.map(|held| Deed::Drop { interface: of(), held }));
        deeds.extend((!interface.is_up).then(|| Deed::Raise { interface: of() }));
        let has = interface.addresses.iter().any(|own| wanted(own.held.ip, own.held.prefix));
        deeds.extend((!has).then(|| Deed::Give { interface: of(), address }));
    }
    if *cables_last {
        let (before, after) = (present.order(), present.cables_last());
        deeds.extend((before != after).then_some(Deed::Order { before, after }));
    }
    if let (Some(after), Some(before)) = (*wired, present.wired) {
        deeds.extend((before != after).then_some(Deed::Wire { before, after }));
    }
    deeds
}

/// Whether a deed serves a wish; one that does not is taken back.
pub fn serves(deed: &Deed, wish: &Wish) -> bool {
    match deed {
        Deed::Leave { interface, .. } | Deed::Raise { interface } => wish.ports.contains_key(interface),
        Deed::Drop { interface, held } => {
            wish.ports.get(interface).is_some_and(|address| *address != held.ip || held.prefix != PREFIX)
        }
        Deed::Give { interface, address } => wish.ports.get(interface) == Some(address),
        Deed::Order { .. } => wish.cables_last,
        Deed::Wire { after, .. } => wish.wired == Some(*after),
    }
}

/// Whether there is anything to take back of a deed: it may never have been done, somebody else may have undone it, or
/// its interface may be gone. What somebody changed since is his.
pub fn is_there(deed: &Deed, present: &Present) -> bool {
    let of = |name: &String| present.interface(name);
    let has = |name: &String, ip, prefix| {
        let found = |one: &super::present::Interface| {
            one.addresses.iter().any(|own| own.held.ip == ip && own.held.prefix == prefix)
        };
        of(name).map(found)
    };
    match deed {
        Deed::Leave { interface, bridge } => {
            of(bridge).is_some() && of(interface).is_some_and(|one| one.bridge.is_none())
        }
        Deed::Drop { interface, held } => has(interface, held.ip, held.prefix) == Some(false),
        Deed::Raise { interface } => of(interface).is_some_and(|one| one.is_up),
        Deed::Give { interface, address } => has(interface, *address, PREFIX) == Some(true),
        // Services may have come and gone since; of those that were there then the order is as it was made.
        Deed::Order { after, .. } => {
            let now = present.order();
            let still = after.iter().filter(|name| now.contains(name));
            still.eq(now.iter().filter(|name| after.contains(name)))
        }
        Deed::Wire { after, .. } => present.wired == Some(*after),
    }
}

/// The deed as it is to be undone on this machine: services that came since stay where they are, those that went are not
/// named.
pub fn restored(deed: &Deed, present: &Present) -> Deed {
    let Deed::Order { before, after } = deed else { return deed.clone() };
    let now = present.order();
    let mut old = before.iter().filter(|name| now.contains(name) && after.contains(name));
    let place = |name: &String| match after.contains(name) && before.contains(name) {
        true => old.next().unwrap_or(name).clone(),
        false => name.clone(),
    };
    Deed::Order { before: now.iter().map(place).collect(), after: now.clone() }
}

#[cfg(test)]
mod tests {
    use super::super::check::tests::{machine, policy};
    use super::super::check::{Wish, check};
    use super::super::protocol::{Network, Port, Restart, Wanted};
    use super::*;
    use crate::macos::services::Service;

    fn wish(ports: &[(&str, &str)], wired: Option<u64>) -> Wish {
        let port = |(interface, address): &(&str, &str)| Port {
            interface: (*interface).to_owned(),
            address: (*address).to_owned(),
        };
        let ports = ports.iter().map(port).collect();
        let network = Network { ports, cables_last: false, after_restart: Restart::Drop };
        let wanted = Wanted {
            node: "a".into(),
            network: Some(network),
            wired_limit_mebibytes: wired,
            ..Wanted::default()
        };
        check(&wanted, &machine(), &policy(), None).unwrap()
    }

    /// The machine after a deed.
    fn after(mut present: Present, deed: &Deed) -> Present {
        use super::super::present::{Address, Held, Interface};
        let mut of = |name: &String, change: &dyn Fn(&mut Interface)| {
            present.interfaces.iter_mut().filter(|one| one.name == *name).for_each(change);
        };
        match deed {
            Deed::Leave { interface, .. } => of(interface, &|one| one.bridge = None),
            Deed::Drop { interface, held } => {
                of(interface, &|one| one.addresses.retain(|own| own.held != *held));
            }
            Deed::Raise { interface } => of(interface, &|one| one.is_up = true),
            Deed::Give { interface, address } => of(interface, &|one| {
                let held = Held { ip: *address, prefix: PREFIX, broadcast: None };
                one.addresses.push(Address { held, is_lent: false });
            }),
            Deed::Order { after, .. } => {
                present.services.sort_by_key(|service| after.iter().position(|name| *name == service.name));
            }
            Deed::Wire { after, .. } => present.wired = Some(*after),
        }
        present
    }

    fn words(deeds: &[Deed]) -> Vec<String> {
        deeds.iter().map(Deed::to_string).collect()
    }

    #[test]
    fn what_is_missing_is_done_once() {
        let wish = wish(&[("en4", "172.31.240.1/30"), ("en5", "172.31.240.5/30")], Some(5000));
        let deeds = missing(&machine(), &wish);
        assert_eq!(
            words(&deeds),
            [
                "en4 left bridge0",
                "en4 has 172.31.240.1/30",
                "en5 lost 10.9.9.9/24",
                "en5 has 172.31.240.5/30",
                "the GPU may wire 5000 MiB"
            ]
        );
        let mut bridge = machine();
        bridge.interfaces.push(super::super::present::Interface {
            name: "bridge0".into(),
            is_up: true,
            ..Default::default()
        });
        let done = deeds.iter().fold(bridge.clone(), after);
        assert_eq!(missing(&done, &wish), []);
        assert!(deeds.iter().all(|deed| serves(deed, &wish) && is_there(deed, &done)));
        assert!(!deeds.iter().any(|deed| is_there(deed, &bridge)), "nothing was done, so nothing is undone");
        let none = check(&Wanted { node: "a".into(), ..Default::default() }, &done, &policy(), None).unwrap();
        assert!(!deeds.iter().any(|deed| serves(deed, &none)));
    }

    #[test]
    fn services_of_cables_come_last_and_the_rest_stays_in_order() {
        let service = |name: &str, port: &str, device: &str| Service {
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
        let present = Present { services, ..machine() };
        let wish = Wish { cables_last: true, ..wish(&[], None) };
        let deeds = missing(&present, &wish);
        let [Deed::Order { after: order, .. }] = &deeds[..] else { panic!("{deeds:?}") };
        assert_eq!(order, &["Wi-Fi", "Ethernet", "Adapter", "Thunderbolt Bridge", "Cable", "Bridge of mine"]);
        let mut done = after(present, &deeds[0]);
        assert_eq!((missing(&done, &wish), is_there(&deeds[0], &done)), (vec![], true));
        // A service that came since stays where it is, one that went is not named.
        let mut since = done.clone();
        since.services.retain(|service| service.name != "Ethernet");
        since.services.insert(1, service("VPN", "VPN", "utun0"));
        assert!(is_there(&deeds[0], &since));
        let Deed::Order { before, .. } = restored(&deeds[0], &since) else { panic!() };
        assert_eq!(before, ["Thunderbolt Bridge", "VPN", "Cable", "Wi-Fi", "Bridge of mine", "Adapter"]);
        done.services.swap(0, 1);
        assert!(!is_there(&deeds[0], &done), "an order that somebody chose since is his");
    }
}
