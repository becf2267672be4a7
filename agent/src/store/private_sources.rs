//! Which addresses a source may be at. A Model is written by people who may not reach the networks of the nodes, so an
//! agent connects for them to public addresses alone: after DNS, after each redirect, and for each server that a registry
//! or a Secret names. The owner of the machine allows others. Not here: requests (`source_client`).

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

use reqwest::Url;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use russet_rpc::addresses::{is_public, plain};
use thiserror::Error;

/// Addresses with a common prefix, as `10.0.0.0/8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    address: IpAddr,
    bits: u8,
}

/// A text is no CIDR.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0:?} is no range of addresses; write it as 10.0.0.0/8, fd00::/8 or 192.168.1.20")]
pub struct CidrError(String);

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let bad = || CidrError(text.to_owned());
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| bad())?;
        let longest = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.map_or(Ok(longest), |bits| bits.parse().map_err(|_| bad()))?;
        (bits <= longest).then_some(Self { address, bits }).ok_or_else(bad)
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.address, self.bits)
    }
}

impl Cidr {
    fn contains(&self, address: IpAddr) -> bool {
        let shift = |longest: u8| u32::from(longest - self.bits);
        match (self.address, address) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                let difference = u32::from(own) ^ u32::from(other);
                difference.checked_shr(shift(32)).unwrap_or(0) == 0
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                let difference = u128::from(own) ^ u128::from(other);
                difference.checked_shr(shift(128)).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

/// The addresses that requests may go to.
#[derive(Debug, Default)]
pub(super) struct AddressFilter {
    /// Ranges that the machine's owner allows beside the public addresses.
    allowed: Vec<Cidr>,
    /// Names that the machine's owner chose: they may be at any address.
    owners: BTreeSet<String>,
}

/// An address is not allowed.
#[derive(Debug, Error)]
#[error("its address is not a public one")]
pub(super) struct AddressRefused;

impl AddressFilter {
    pub fn new(allowed: Vec<Cidr>, owners: BTreeSet<String>) -> Self {
        Self { allowed, owners }
    }

    pub fn permits(&self, address: IpAddr) -> bool {
        let address = plain(address);
        is_public(address) || self.allowed.iter().any(|range| range.contains(address))
    }

    /// Checks a URL before it is resolved: an address in it, or the name of a server that only the machine's owner may
    /// send requests to.
    pub fn check(&self, url: &Url) -> Result<(), AddressRefused> {
        let host = url.host_str().unwrap_or_default();
        let permitted = match host.trim_matches(['[', ']']).parse() {
            Ok(address) => self.permits(address),
            Err(_) => !host.is_empty() && !self.owners.contains(&normal(host)),
        };
        if permitted { Ok(()) } else { Err(AddressRefused) }
    }
}

/// A name as names are compared.
pub(super) fn normal(name: &str) -> String {
    name.trim_end_matches('.').to_ascii_lowercase()
}

/// A resolver that leaves out the addresses that are not permitted.
#[derive(Clone, Debug)]
pub(super) struct FilteringResolver(pub Arc<AddressFilter>);

impl Resolve for FilteringResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let filter = self.0.clone();
        Box::pin(async move {
            let owners = filter.owners.contains(&normal(name.as_str()));
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let permitted: Vec<SocketAddr> =
                found.filter(|found| owners || filter.permits(found.ip())).collect();
            match permitted.is_empty() {
                true => Err(AddressRefused.into()),
                false => Ok(Box::new(permitted.into_iter()) as Addrs),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(allowed: &[&str]) -> AddressFilter {
        AddressFilter::new(allowed.iter().map(|text| text.parse().unwrap()).collect(), BTreeSet::new())
    }

    #[test]
    fn addresses_of_own_networks_are_refused_in_every_form() {
        let closed = filter(&[]);
        for text in [
            "0.0.0.0",
            "10.1.2.3",
            "100.64.0.1",
            "100.127.255.255",
            "127.0.0.1",
            "127.255.255.254",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.8",
            "192.168.0.1",
            "198.18.0.1",
            "224.0.0.1",
            "239.255.255.250",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::7f00:1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::ffff:10.0.0.1",
            "64:ff9b::a00:1",
            "64:ff9b:1::1",
            "2002:a00:1::1",
            "2001::1",
            "2001:db8::1",
            "fe80::1",
            "fec0::1",
            "fc00::1",
            "fd12:3456::1",
            "ff02::1",
        ] {
            assert!(!closed.permits(text.parse().unwrap()), "{text}");
        }
        for text in [
            "1.1.1.1",
            "100.63.0.1",
            "100.128.0.1",
            "172.32.0.1",
            "192.1.0.1",
            "223.255.255.255",
            "2606:4700::1",
            "2a00::1",
            "::ffff:8.8.8.8",
        ] {
            assert!(closed.permits(text.parse().unwrap()), "{text}");
        }
    }

    #[test]
    fn allowed_ranges_open_exactly_their_addresses() {
        for (range, address, open) in [
            ("10.0.0.0/8", "10.255.0.1", true),
            ("10.0.0.0/8", "11.0.0.1", true),
            ("10.0.0.0/8", "192.168.0.1", false),
            ("10.0.0.0/8", "::ffff:10.0.0.1", true),
            ("192.168.1.20", "192.168.1.20", true),
            ("192.168.1.20", "192.168.1.21", false),
            ("0.0.0.0/0", "127.0.0.1", true),
            ("0.0.0.0/0", "::1", false),
            ("::/0", "fd00::1", true),
            ("fd00::/8", "fd12::1", true),
            ("fd00::/8", "fe80::1", false),
            ("::1", "::1", true),
        ] {
            assert_eq!(filter(&[range]).permits(address.parse().unwrap()), open, "{range} {address}");
        }
        for bad in ["", "10.0.0.0/33", "::/129", "10/8", "localhost", "10.0.0.0/-1", "10.0.0.0/"] {
            bad.parse::<Cidr>().unwrap_err();
        }
        assert_eq!("10.0.0.0/8".parse::<Cidr>().unwrap().to_string(), "10.0.0.0/8");
    }

    #[test]
    fn addresses_in_urls_are_read_as_clients_read_them() {
        let closed = filter(&[]);
        for (text, open) in [
            ("https://127.0.0.1/", false),
            ("https://2130706433/", false),
            ("https://0x7f.1/", false),
            ("https://0177.0.0.1/", false),
            ("https://127.1/", false),
            ("https://[::1]/", false),
            ("https://[::ffff:127.0.0.1]/", false),
            ("https://8.8.8.8/", true),
            // Names are looked at once they are resolved.
            ("https://localhost/", true),
        ] {
            assert_eq!(closed.check(&Url::parse(text).unwrap()).is_ok(), open, "{text}");
        }
    }

    #[tokio::test]
    async fn names_of_own_networks_resolve_to_nothing() {
        let resolve = async |filter: AddressFilter| {
            let resolver = FilteringResolver(Arc::new(filter));
            resolver.resolve("localhost".parse().unwrap()).await.map(Iterator::count)
        };
        let refused = resolve(filter(&[])).await.unwrap_err();
        assert!(refused.is::<AddressRefused>(), "{refused}");
        assert!(resolve(filter(&["127.0.0.0/8", "::1"])).await.unwrap() > 0);
        let owned = AddressFilter::new(Vec::new(), BTreeSet::from(["localhost".to_owned()]));
        assert!(owned.check(&Url::parse("http://LOCALHOST.:1/").unwrap()).is_err(), "it is not the author's");
        assert!(resolve(owned).await.unwrap() > 0);
    }
}
