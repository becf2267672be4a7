//! `ifconfig`, `netstat -rn` and the bridge's preferences: interfaces and their addresses, members of
//! bridges, and default routes.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use serde_json::Value;

use super::{ParseError, json, text};

const IFCONFIG: &str = "ifconfig";
const NETSTAT: &str = "netstat -rn";
const PREFERENCES: &str = "plutil of the bridge preferences";

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    /// `en5`, `bridge0`.
    pub name: String,
    /// Maximum packet size.
    pub mtu: Option<u32>,
    /// Its IPv4 addresses.
    pub addresses: Vec<Address>,
    /// Whether the link has a peer; `None` where the tool does not say, as for a loopback.
    pub is_active: Option<bool>,
    /// Members, if it is a bridge.
    pub members: Vec<String>,
}

/// An IPv4 address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The address.
    pub ip: Ipv4Addr,
    /// Prefix length of its network.
    pub prefix: Option<u32>,
}

/// Prefix length of a mask like `0xfffffffc`; `None` for a non-contiguous one.
fn prefix(mask: &str) -> Option<u32> {
    let mask = u32::from_str_radix(mask.strip_prefix("0x")?, 16).ok()?;
    let ones = mask.leading_ones();
    (mask.count_ones() == ones).then_some(ones)
}

/// Parses all interfaces, in the printed order.
pub fn interfaces(output: &[u8]) -> Result<Vec<Interface>, ParseError> {
    let text = text(output);
    let mut interfaces: Vec<Interface> = Vec::new();
    for line in text.lines() {
        if !line.starts_with(char::is_whitespace)
            && let Some((name, flags)) = line.split_once(": flags=")
        {
            let mtu = flags.rsplit_once(" mtu ").and_then(|(_, mtu)| mtu.trim().parse().ok());
            interfaces.push(Interface { name: name.to_owned(), mtu, ..Interface::default() });
            continue;
        }
        let Some(interface) = interfaces.last_mut() else { continue };
        let mut words = line.split_whitespace();
        match (words.next(), words.next()) {
            (Some("inet"), Some(address)) => {
                let mask = words.skip_while(|word| *word != "netmask").nth(1);
                let prefix = mask.and_then(prefix);
                interface.addresses.extend(address.parse().ok().map(|ip| Address { ip, prefix }));
            }
            (Some("status:"), Some(status)) => interface.is_active = Some(status == "active"),
            (Some("member:"), Some(member)) => interface.members.push(member.to_owned()),
            _ => {}
        }
    }
    if interfaces.is_empty() { Err(ParseError::new(IFCONFIG, "no interface")) } else { Ok(interfaces) }
}

/// Interfaces with a default route, the preferred one first. A Thunderbolt port among them may take the
/// machine's internet traffic.
pub fn default_routes(output: &[u8]) -> Result<Vec<String>, ParseError> {
    let text = text(output);
    let mut lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let head = lines.find(|words| words.first() == Some(&"Destination"));
    let column = head.and_then(|head| head.iter().position(|word| *word == "Netif"));
    let column = column.ok_or_else(|| ParseError::new(NETSTAT, "no columns Destination and Netif"))?;
    // IPv6's table, where there is one, has a header of its own.
    let table = lines.take_while(|words| words.first() != Some(&"Destination"));
    let defaults = table.filter(|words| words.first() == Some(&"default"));
    Ok(defaults.filter_map(|words| words.get(column).map(|&interface| interface.to_owned())).collect())
}

/// Members of each bridge, from its preferences as JSON.
pub fn bridge_members(output: &[u8]) -> Result<BTreeMap<String, Vec<String>>, ParseError> {
    let all = json(PREFERENCES, output)?;
    let bridges = all.as_object().ok_or_else(|| ParseError::new(PREFERENCES, "no object of bridges"))?;
    let members = bridges.iter().map(|(name, bridge)| {
        let members = bridge.get("Interfaces").and_then(Value::as_array);
        let members =
            members.ok_or_else(|| ParseError::new(PREFERENCES, format!("no Interfaces of {name}")))?;
        Ok((name.clone(), members.iter().filter_map(Value::as_str).map(str::to_owned).collect()))
    });
    members.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_have_addresses_a_status_and_members() {
        let output = b"lo0: flags=8049<UP,LOOPBACK> mtu 16384\n\tinet 127.0.0.1 netmask 0xff000000\n\
            en6: flags=8863<UP> mtu 9000\n\tinet6 fe80::1%en6 prefixlen 64\n\tstatus: inactive\n\
            bridge0: flags=8863<UP> mtu 1500\n\tinet 192.0.2.20 netmask 0xffffff00\n\
            \tmember: en2 flags=3<LEARNING,DISCOVER>\n\tmember: en6 flags=3<LEARNING,DISCOVER>\n\tstatus: active\n";
        let found = interfaces(output).unwrap();
        assert_eq!(
            found.iter().map(|one| one.is_active).collect::<Vec<_>>(),
            [None, Some(false), Some(true)]
        );
        assert_eq!((found[1].mtu, found[1].addresses.len()), (Some(9000), 0));
        assert_eq!(
            (&found[2].members[..], found[2].addresses[0].ip.to_string().as_str()),
            (&["en2".to_owned(), "en6".to_owned()][..], "192.0.2.20")
        );
        assert_eq!(found[2].addresses[0].prefix, Some(24));
        for (mask, bits) in [
            ("0xfffffffc", Some(30)),
            ("0xffffffff", Some(32)),
            ("0x0", Some(0)),
            ("0xff00ff00", None),
            ("30", None),
        ] {
            assert_eq!(prefix(mask), bits, "{mask}");
        }
        assert!(interfaces(b"ifconfig: interface en99 does not exist\n").is_err());
    }

    #[test]
    fn default_routes_are_listed_by_interface() {
        let output = b"Routing tables\n\nInternet:\nDestination Gateway Flags Netif Expire\n\
            default 192.0.2.1 UGScg en1\ndefault link#13 UCSIg bridge0 !\n127 127.0.0.1 UCS lo0\n\n\
            Internet6:\nDestination Gateway Flags Netif Expire\ndefault fe80::%utun0 UGcIg utun0\n";
        assert_eq!(default_routes(output).unwrap(), ["en1", "bridge0"]);
        assert!(default_routes(b"Routing tables\n").is_err());
    }

    #[test]
    fn a_bridge_has_members_or_is_none() {
        let members = bridge_members(br#"{"bridge0":{"Interfaces":["en1","en6"]}}"#).unwrap();
        assert_eq!(members["bridge0"], ["en1", "en6"]);
        let error = bridge_members(br#"{"bridge0":{}}"#).unwrap_err();
        assert!(error.to_string().ends_with("printed no Interfaces of bridge0"), "{error}");
        assert!(bridge_members(b"[]").is_err());
    }
}
