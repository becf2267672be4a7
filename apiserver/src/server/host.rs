//! The addresses and the name under which other machines reach this host.

use std::net::IpAddr;

use crate::object;

/// The addresses under which other machines can reach this host: neither loopback nor link-local IPv6.
pub fn host_addresses() -> Vec<IpAddr> {
    let mut addresses: Vec<IpAddr> = if_addrs::get_if_addrs()
        .unwrap_or_default()
        .into_iter()
        .map(|interface| interface.ip())
        .filter(|address| match address {
            IpAddr::V4(address) => !address.is_loopback() && !address.is_unspecified(),
            IpAddr::V6(address) => {
                !address.is_loopback() && !address.is_unspecified() && !address.is_unicast_link_local()
            }
        })
        .collect();
    addresses.sort();
    addresses.dedup();
    addresses
}

/// The name of this host, if a certificate can contain it.
pub fn host_name() -> Option<String> {
    let output = std::process::Command::new("hostname").output().ok()?;
    let name = String::from_utf8(output.stdout).ok()?.trim().to_ascii_lowercase();
    object::is_subdomain(&name).then_some(name)
}

/// The addresses in a server certificate: loopback and all of the host's.
pub fn certificate_addresses(host: &[IpAddr]) -> Vec<IpAddr> {
    let mut addresses = vec![IpAddr::from([127, 0, 0, 1]), IpAddr::from(std::net::Ipv6Addr::LOCALHOST)];
    addresses.extend(host.iter().filter(|address| !address.is_loopback()));
    addresses
}
