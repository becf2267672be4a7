//! What kind of network an address is of: the public internet, the owner's networks, or this machine. By IANA's registries of
//! special-purpose addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The IPv4 address that an IPv6 address stands for: mapped, compatible, translated (NAT64) or 6to4. Otherwise itself.
pub fn plain(address: IpAddr) -> IpAddr {
    let IpAddr::V6(address) = address else { return address };
    let [a, b, c, d, e, f, high, low] = address.segments();
    let v4 = |high: u16, low: u16| {
        let ([one, two], [three, four]) = (high.to_be_bytes(), low.to_be_bytes());
        IpAddr::V4(Ipv4Addr::new(one, two, three, four))
    };
    match (a, b, c, d, e, f) {
        (0, 0, 0, 0, 0, 0xffff) | (0x64, 0xff9b, 0, 0, 0, 0) => v4(high, low),
        // `::` and `::1` are addresses of their own.
        (0, 0, 0, 0, 0, 0) if high != 0 => v4(high, low),
        (0x2002, ..) => v4(b, c),
        _ => IpAddr::V6(address),
    }
}

/// Whether an address is one of the public internet, by IANA's registries of special-purpose addresses.
pub fn is_public(address: IpAddr) -> bool {
    match plain(address) {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let special = match (a, b, c) {
        // This network, private, loopback.
        (0 | 10 | 127, ..) => true,
        // Carrier-grade NAT.
        (100, 64..=127, _) => true,
        // Link-local: a cloud's metadata service is 169.254.169.254.
        (169, 254, _) => true,
        (172, 16..=31, _) | (192, 168, _) => true,
        // Protocol assignments, 6to4 relays; benchmarks; documentation.
        (192, 0, 0 | 2) | (192, 88, 99) | (198, 18..=19, _) | (198, 51, 100) | (203, 0, 113) => true,
        // Multicast, reserved, broadcast.
        (224..=255, ..) => true,
        _ => false,
    };
    !special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let [a, b, ..] = address.segments();
    // Only 2000::/3 is given out; in it: Teredo and its neighbours, documentation, and SRv6 segments.
    let special = match a {
        0x2001 => b < 0x200 || b == 0xdb8,
        0x3fff => b < 0x1000,
        _ => false,
    };
    !special && a & 0xe000 == 0x2000
}

/// Whether it is an address of this machine's loopback interface.
pub fn is_loopback(address: IpAddr) -> bool {
    plain(address).is_loopback()
}

/// Whether an address is one of the owner's networks: private, link-local, or of a tailnet.
pub fn is_private(address: IpAddr) -> bool {
    match plain(address) {
        IpAddr::V4(address) => {
            let [a, b, ..] = address.octets();
            // Carrier-grade NAT, of which tailnets take their addresses. Clouds tell their machines' credentials at one of the
            // link-local ones.
            let is_shared = (a, b & 0xc0) == (100, 64);
            address.is_private()
                || is_shared
                || (address.is_link_local() && address != Ipv4Addr::new(169, 254, 169, 254))
        }
        IpAddr::V6(address) => address.is_unique_local() || address.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_of_one_kind_of_network() {
        for (text, public, private, loopback) in [
            ("127.0.0.1", false, false, true),
            ("127.9.9.9", false, false, true),
            ("::1", false, false, true),
            ("::ffff:127.0.0.1", false, false, true),
            ("10.0.0.7", false, true, false),
            ("172.31.0.1", false, true, false),
            ("192.168.1.2", false, true, false),
            ("::ffff:192.168.1.2", false, true, false),
            ("100.64.0.1", false, true, false),
            ("100.128.0.1", true, false, false),
            ("169.254.3.4", false, true, false),
            ("169.254.169.254", false, false, false),
            ("::ffff:169.254.169.254", false, false, false),
            ("fd7a:115c:a1e0::1", false, true, false),
            ("fe80::1", false, true, false),
            ("0.0.0.0", false, false, false),
            ("::", false, false, false),
            ("224.0.0.1", false, false, false),
            ("1.1.1.1", true, false, false),
            ("2606:4700::1111", true, false, false),
            ("2002:a00:1::1", false, true, false),
        ] {
            let address = text.parse().unwrap();
            let kinds = (is_public(address), is_private(address), is_loopback(address));
            assert_eq!(kinds, (public, private, loopback), "{text}");
        }
    }
}
