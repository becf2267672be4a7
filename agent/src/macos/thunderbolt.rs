//! `system_profiler SPThunderboltDataType -json`: a machine's Thunderbolt buses, and the peers on each.
//!
//! A bus is one port of the machine and has a domain, a UUID of its own. Another Mac appears with the domain
//! of *its* port, so two machines share a cable when each lists the other's domain. Docks and hubs in between
//! have no domain, and devices behind them are nested. Apple writes `receptacle_connected` and
//! `receptacle_no_devices_connected`: one word contains the other.

use serde_json::Value;

use super::{ParseError, gigabits, json};

const TOOL: &str = "system_profiler SPThunderboltDataType -json";

/// Protocol of the service that a Mac offers over a cable while RDMA is enabled on it (exo-explore/exo#1390).
const RDMA_PROTOCOL: u64 = 64087;

/// Maximum number of hubs between two machines; deeper nesting is not parsed.
const MAX_HUBS: usize = 16;

/// One Thunderbolt port of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bus {
    /// `thunderboltusb4_bus_2`.
    pub name: String,
    /// Its domain, in upper case; some buses have none.
    pub domain: Option<String>,
    /// The number printed beside the port, from 1; unrelated to the interface's number.
    pub receptacle: Option<u32>,
    /// State of its cable.
    pub plug: Plug,
    /// Macs at the other end, directly or behind hubs.
    pub peers: Vec<ThunderboltPeer>,
    /// Everything else at the other end: docks, hubs, drives.
    pub devices: Vec<String>,
}

/// State of a port's cable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plug {
    /// Nothing plugged in; the maximum speed is 120 × 10⁹ bit/s on Thunderbolt 5 and 40 × 10⁹ on 4.
    Idle {
        /// Maximum speed.
        max_bits_per_second: Option<u64>,
    },
    /// Something plugged in, at this speed.
    Connected {
        /// Negotiated speed.
        bits_per_second: Option<u64>,
    },
    /// Not reported.
    Unknown,
}

/// A Mac at the other end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThunderboltPeer {
    /// Name of the machine, user-given or default.
    pub name: String,
    /// `Mac15,14`.
    pub model: String,
    /// Domain of its port, in upper case.
    pub domain: Option<String>,
    /// Whether it offers RDMA; `None` where its services' protocols are not listed.
    pub offers_rdma: Option<bool>,
    /// Names of docks and hubs in between, the nearest first.
    pub through: Vec<String>,
    /// Speed of the slowest segment, in bits per second.
    pub bits_per_second: Option<u64>,
}

/// Parses the buses, in the printed order.
pub fn buses(output: &[u8]) -> Result<Vec<Bus>, ParseError> {
    let all = json(TOOL, output)?;
    let buses = all.get("SPThunderboltDataType").and_then(Value::as_array);
    let buses = buses.ok_or_else(|| ParseError::new(TOOL, "no list SPThunderboltDataType"))?;
    buses.iter().map(bus).collect()
}

fn word(value: &Value, key: &str) -> Option<String> {
    value.get(key)?.as_str().map(str::to_owned)
}

fn domain(value: &Value) -> Option<String> {
    word(value, "domain_uuid_key").map(|uuid| uuid.to_ascii_uppercase())
}

fn bus(bus: &Value) -> Result<Bus, ParseError> {
    let name = word(bus, "_name").ok_or_else(|| ParseError::new(TOOL, "a bus without a name"))?;
    let port = bus.get("receptacle_1_tag");
    let speed =
        port.and_then(|port| port.get("current_speed_key")).and_then(Value::as_str).and_then(gigabits);
    let status = port.and_then(|port| port.get("receptacle_status_key")).and_then(Value::as_str);
    let plug = match status {
        Some("receptacle_connected") => Plug::Connected { bits_per_second: speed },
        Some("receptacle_no_devices_connected") => Plug::Idle { max_bits_per_second: speed },
        _ => Plug::Unknown,
    };
    let receptacle = port.and_then(|port| word(port, "receptacle_id_key")).and_then(|id| id.parse().ok());
    let mut found =
        Bus { domain: domain(bus), name, receptacle, plug, peers: Vec::new(), devices: Vec::new() };
    let negotiated = if let Plug::Connected { bits_per_second } = plug { bits_per_second } else { None };
    peers_behind(bus, &mut Vec::new(), negotiated, &mut found)?;
    Ok(found)
}

/// Collects everything below `parent`, which is reached through `through` at `bits_per_second`.
fn peers_behind(
    parent: &Value,
    through: &mut Vec<String>,
    bits_per_second: Option<u64>,
    found: &mut Bus,
) -> Result<(), ParseError> {
    if through.len() > MAX_HUBS {
        return Err(ParseError::new(TOOL, format!("more than {MAX_HUBS} hubs in a row on {}", found.name)));
    }
    for item in parent.get("_items").and_then(Value::as_array).into_iter().flatten() {
        let name = word(item, "_name").unwrap_or_else(|| "a device without a name".to_owned());
        // Docks have neither; a truncated output may lack the domain.
        if item.get("domain_uuid_key").is_some() || item.get("services_title").is_some() {
            found.peers.push(ThunderboltPeer {
                name,
                model: word(item, "device_name_key").unwrap_or_default(),
                domain: domain(item),
                offers_rdma: offers_rdma(item),
                through: through.clone(),
                bits_per_second,
            });
            continue;
        }
        found.devices.push(name.clone());
        let upstream =
            item.get("receptacle_upstream_ambiguous_tag").and_then(|port| port.get("current_speed_key"));
        let upstream = upstream.and_then(Value::as_str).and_then(gigabits);
        through.push(name);
        peers_behind(item, through, bits_per_second.into_iter().chain(upstream).min(), found)?;
        through.pop();
    }
    Ok(())
}

/// Whether one of the peer's services is RDMA; `None` where protocols are left out.
fn offers_rdma(peer: &Value) -> Option<bool> {
    let services = peer.get("services_title")?.as_array()?;
    let protocols = services.iter().map(|service| service.get("protocol_id_key").and_then(Value::as_u64));
    let protocols: Option<Vec<u64>> = protocols.collect();
    Some(protocols?.contains(&RDMA_PROTOCOL))
}

/// A cable between two machines, as both report it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ThunderboltCable {
    /// Domains of its ends, the smaller first.
    pub ends: [String; 2],
    /// Bits per second, the smaller value of both ends.
    pub bits_per_second: Option<u64>,
    /// Whether both ends are ports of the same machine.
    pub is_loop: bool,
    /// Whether only one end reports the other: a cable being plugged in, or a defective one.
    pub is_one_sided: bool,
}

/// The cables between the given machines, each described by its buses. Ends at other machines are left out.
pub fn cables(machines: &[&[Bus]]) -> Vec<ThunderboltCable> {
    let owner = |domain: &str| {
        machines.iter().position(|buses| buses.iter().any(|bus| bus.domain.as_deref() == Some(domain)))
    };
    let mut cables: Vec<ThunderboltCable> = Vec::new();
    for (index, buses) in machines.iter().enumerate() {
        for bus in *buses {
            let Some(own) = &bus.domain else { continue };
            for peer in &bus.peers {
                let Some((other, seen)) =
                    peer.domain.as_deref().and_then(|domain| Some((owner(domain)?, domain)))
                else {
                    continue;
                };
                let mut ends = [own.clone(), seen.to_owned()];
                ends.sort();
                match cables.iter_mut().find(|cable| cable.ends == ends) {
                    Some(cable) => {
                        cable.is_one_sided = false;
                        cable.bits_per_second =
                            cable.bits_per_second.into_iter().chain(peer.bits_per_second).min();
                    }
                    None => cables.push(ThunderboltCable {
                        ends,
                        bits_per_second: peer.bits_per_second,
                        is_loop: other == index,
                        is_one_sided: true,
                    }),
                }
            }
        }
    }
    cables.sort();
    cables
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Synthetic output in the format of a Mac.
    fn printed(buses: &Value) -> Vec<u8> {
        json!({"SPThunderboltDataType": buses}).to_string().into_bytes()
    }

    fn port(number: u32, status: &str, speed: &str) -> Value {
        json!({
            "current_speed_key": speed,
            "link_status_key": "0x2",
            "receptacle_id_key": number.to_string(),
            "receptacle_status_key": status,
        })
    }

    fn mac(domain: &str) -> Value {
        json!({"_name": "studio", "device_name_key": "Mac15,14", "domain_uuid_key": domain})
    }

    fn bus_to(domain: &str, items: &[Value], speed: &str) -> Value {
        json!({
            "_name": "thunderboltusb4_bus_0",
            "_items": items,
            "domain_uuid_key": domain,
            "receptacle_1_tag": port(1, "receptacle_connected", speed),
        })
    }

    #[test]
    fn idle_and_connected_ports_are_distinguished() {
        let bus = |status| json!({"_name": "b", "receptacle_1_tag": port(3, status, "Up to 120 Gb/s")});
        let both =
            json!([bus("receptacle_no_devices_connected"), bus("receptacle_connected"), {"_name": "bare"}]);
        let both = buses(&printed(&both)).unwrap();
        let speed = Some(120_000_000_000);
        assert_eq!(both[0].plug, Plug::Idle { max_bits_per_second: speed });
        assert_eq!(both[1].plug, Plug::Connected { bits_per_second: speed });
        assert_eq!((both[2].plug, both[2].receptacle, &both[2].domain), (Plug::Unknown, None, &None));
        assert_eq!(both[0].receptacle, Some(3));
    }

    #[test]
    fn a_mac_behind_hubs_is_as_fast_as_the_slowest_of_them() {
        let hub = |name: &str, speed: &str, items: &[Value]| {
            let upstream = json!({"current_speed_key": speed});
            json!({"_name": name, "_items": items, "receptacle_upstream_ambiguous_tag": upstream})
        };
        let far = hub("far hub", "80 Gb/s", &[mac("b")]);
        let near = hub("near hub", "40 Gb/s", &[far]);
        let found = buses(&printed(&json!([bus_to("a", &[near], "80 Gb/s")]))).unwrap().remove(0);
        assert_eq!(found.devices, ["near hub", "far hub"]);
        assert_eq!(found.peers[0].through, ["near hub", "far hub"]);
        assert_eq!(found.peers[0].bits_per_second, Some(40_000_000_000));
        assert_eq!(found.peers[0].domain.as_deref(), Some("B"));
    }

    #[test]
    fn endless_hub_chain_is_refused() {
        let mut deep = mac("b");
        for _ in 0..=MAX_HUBS {
            deep = json!({"_name": "hub", "_items": [deep]});
        }
        let error = buses(&printed(&json!([bus_to("a", &[deep], "80 Gb/s")]))).unwrap_err();
        assert!(error.to_string().contains("more than 16 hubs in a row on thunderboltusb4_bus_0"), "{error}");
    }

    #[test]
    fn rdma_is_recognised_by_protocol_number_not_by_name() {
        let peer =
            |services: Value| json!({"_name": "m", "domain_uuid_key": "b", "services_title": services});
        for (services, offers) in [
            (json!([{"_name": "service_ip", "protocol_id_key": 1}]), Some(false)),
            (json!([{"_name": "x", "protocol_id_key": 64087, "service_key_key": "\u{fffd}"}]), Some(true)),
            (json!([{"_name": "unknown_xd_service"}]), None),
        ] {
            let found = buses(&printed(&json!([bus_to("a", &[peer(services)], "80 Gb/s")]))).unwrap();
            assert_eq!(found[0].peers[0].offers_rdma, offers);
        }
    }

    #[test]
    fn cable_needs_reports_of_both_ends() {
        let of = |values: &[Value]| buses(&printed(&json!(values))).unwrap();
        let left = of(&[bus_to("a", &[mac("b")], "80 Gb/s"), bus_to("c", &[mac("d")], "40 Gb/s")]);
        let right = of(&[bus_to("b", &[mac("a")], "40 Gb/s"), bus_to("d", &[], "40 Gb/s")]);
        let found = cables(&[&left, &right]);
        let ends: Vec<_> = found.iter().map(|cable| cable.ends.concat()).collect();
        assert_eq!(ends, ["AB", "CD"]);
        assert_eq!(found[0].bits_per_second, Some(40_000_000_000));
        assert_eq!(found.iter().map(|cable| cable.is_one_sided).collect::<Vec<_>>(), [false, true]);

        let looped = of(&[bus_to("a", &[mac("b")], "80 Gb/s"), bus_to("b", &[mac("a")], "80 Gb/s")]);
        let found = cables(&[&looped]);
        assert!(found.len() == 1 && found[0].is_loop && !found[0].is_one_sided, "{found:?}");
        assert_eq!(cables(&[&left[..1]]), [], "nobody described the other machine");
    }
}
