//! The addresses from which a key is accepted.

use std::net::IpAddr;

use ipnet::IpNet;

/// Ranges of addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SourceRanges {
    /// `None`: any address.
    ranges: Option<Vec<IpNet>>,
    /// One that is none.
    invalid: Option<String>,
}

impl SourceRanges {
    /// Those of a spec. What is no range has no address, so a typing error opens nothing.
    pub(super) fn parse(ranges: &[String]) -> Self {
        let parse =
            |text: &String| text.parse::<IpNet>().or_else(|_| text.parse().map(|one: IpAddr| one.into()));
        Self {
            ranges: (!ranges.is_empty()).then(|| ranges.iter().filter_map(|text| parse(text).ok()).collect()),
            invalid: ranges.iter().find(|text| parse(text).is_err()).cloned(),
        }
    }

    /// Whether an address is in one of them; an IPv4 address in its IPv6 form is itself.
    pub(super) fn contain(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.ranges.as_ref().is_none_or(|ranges| ranges.iter().any(|range| range.contains(&address)))
    }

    /// One that is no range.
    pub(super) fn invalid(&self) -> Option<&str> {
        self.invalid.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_in_their_ranges_and_in_no_others() {
        let ranges =
            |texts: &[&str]| SourceRanges::parse(&texts.iter().map(|&one| one.into()).collect::<Vec<_>>());
        for (texts, address, expected) in [
            (&[][..], "203.0.113.9", true),
            (&["192.168.0.0/16"], "192.168.9.1", true),
            (&["192.168.0.0/16"], "192.169.0.1", false),
            (&["192.168.0.0/16"], "::ffff:192.168.9.1", true),
            (&["10.0.0.7"], "10.0.0.7", true),
            (&["10.0.0.7"], "10.0.0.8", false),
            (&["fd00::/8", "127.0.0.1"], "fd12::1", true),
            (&["fd00::/8", "127.0.0.1"], "::1", false),
            (&["0.0.0.0/0"], "8.8.8.8", true),
            (&["0.0.0.0/0"], "2001::1", false),
            (&["192.168.0.0/33"], "192.168.0.1", false),
            (&["192.168.0"], "192.168.0.1", false),
        ] {
            assert_eq!(ranges(texts).contain(address.parse().unwrap()), expected, "{texts:?} {address}");
        }
        assert_eq!(ranges(&["10.0.0.0/8", "10.0.0.0/33"]).invalid(), Some("10.0.0.0/33"));
        assert_eq!(ranges(&["10.0.0.0/8"]).invalid(), None);
    }
}
