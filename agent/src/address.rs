//! The address at which other machines reach this node, updated while the agent runs: a DHCP lease ends, a
//! cable moves, a laptop changes networks. Not here: what happens to ranks at a lost address.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use tokio::sync::watch;

use crate::hardware;

/// Poll interval.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Consecutive polls that confirm a change: a renewed lease removes an address for a moment.
const CONFIRMATIONS: u32 = 2;

/// The current address.
pub(crate) type Address = watch::Receiver<IpAddr>;

/// The initial address: configured or discovered.
pub(crate) async fn initial(configured: Option<IpAddr>, server: &str) -> IpAddr {
    match configured {
        Some(configured) => configured,
        None => hardware::source_address(resolve(server).await),
    }
}

/// Updates `address` until the agent exits.
pub(crate) async fn run(configured: Option<IpAddr>, server: String, address: watch::Sender<IpAddr>) {
    let mut seen = Confirmation::default();
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        let found = hardware::source_address(resolve(&server).await);
        let now = *address.borrow();
        let best = choose(configured, now, found, is_here);
        if best != now && seen.confirm(best) {
            tracing::info!(from = %now, to = %best, "this machine has another address");
            address.send_replace(best);
        } else if best == now {
            seen = Confirmation::default();
        }
    }
}

/// The address to use. A configured address is kept while the machine has it. A discovered address follows
/// the route to the API server, and is kept while there is no route.
fn choose(
    configured: Option<IpAddr>,
    current: IpAddr,
    found: IpAddr,
    is_here: impl Fn(IpAddr) -> bool,
) -> IpAddr {
    match configured {
        Some(configured) if is_here(configured) => configured,
        _ if found.is_loopback() && is_here(current) => current,
        _ => found,
    }
}

/// Whether this machine has the address.
pub(crate) fn is_here(address: IpAddr) -> bool {
    // Binding a UDP socket sends nothing.
    match UdpSocket::bind(SocketAddr::new(address, 0)) {
        Ok(_) => true,
        // Other errors, such as exhausted file descriptors, say nothing about the address.
        Err(error) => error.kind() != std::io::ErrorKind::AddrNotAvailable,
    }
}

/// Published addresses of ranks that the machine has lost.
#[derive(Debug, Default)]
pub(crate) struct LostAddresses(BTreeMap<IpAddr, u32>);

impl LostAddresses {
    /// Checks the addresses of ranks, once a tick; returns whether one is newly lost.
    pub fn update(&mut self, used: impl Iterator<Item = IpAddr>, is_here: impl Fn(IpAddr) -> bool) -> bool {
        let mut missing = BTreeMap::new();
        for address in used.filter(|address| !is_here(*address)) {
            let before = self.0.get(&address).copied().unwrap_or(0);
            missing.insert(address, before.saturating_add(1));
        }
        self.0 = missing;
        self.0.values().any(|&times| times == CONFIRMATIONS)
    }

    /// Whether an address, given as `ip:port`, is lost.
    pub fn contains(&self, address: &str) -> bool {
        let ip = ip_of(address);
        ip.is_some_and(|ip| self.0.get(&ip).is_some_and(|&times| times >= CONFIRMATIONS))
    }
}

/// The IP of `ip:port`.
pub(crate) fn ip_of(address: &str) -> Option<IpAddr> {
    address.parse::<SocketAddr>().ok().map(|address| address.ip())
}

/// An address, and how many times in a row it was seen.
#[derive(Debug, Default)]
struct Confirmation(Option<(IpAddr, u32)>);

impl Confirmation {
    fn confirm(&mut self, address: IpAddr) -> bool {
        let times = match self.0 {
            Some((seen, times)) if seen == address => times + 1,
            _ => 1,
        };
        self.0 = Some((address, times));
        times >= CONFIRMATIONS
    }
}

async fn resolve(server: &str) -> Option<SocketAddr> {
    let url = reqwest::Url::parse(server).ok()?;
    let host = url.host_str()?.trim_matches(['[', ']']).to_owned();
    let port = url.port_or_known_default()?;
    tokio::net::lookup_host((host, port)).await.ok()?.next()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([192, 168, 0, last])
    }

    #[test]
    fn configured_address_is_preferred_else_the_route_decides() {
        let loopback = IpAddr::from([127, 0, 0, 1]);
        for (story, configured, now, found, here, expected) in [
            ("nothing changed", None, ip(1), ip(1), vec![ip(1)], ip(1)),
            ("another lease", None, ip(1), ip(2), vec![ip(2)], ip(2)),
            ("another cable", None, ip(1), ip(2), vec![ip(1), ip(2)], ip(2)),
            ("no network for a while, the address stays", None, ip(1), loopback, vec![ip(1)], ip(1)),
            ("no network at all", None, ip(1), loopback, vec![], loopback),
            ("configured, and there", Some(ip(9)), ip(9), ip(1), vec![ip(1), ip(9)], ip(9)),
            ("configured, and gone", Some(ip(9)), ip(9), ip(1), vec![ip(1)], ip(1)),
            ("configured, and back", Some(ip(9)), ip(1), ip(1), vec![ip(1), ip(9)], ip(9)),
        ] {
            assert_eq!(
                choose(configured, now, found, |address| here.contains(&address)),
                expected,
                "{story}"
            );
        }
    }

    #[test]
    fn address_is_lost_after_two_missed_checks() {
        let mut lost = LostAddresses::default();
        let used = [ip(1), ip(2)];
        for (here, newly, gone) in [
            (vec![ip(1), ip(2)], false, vec![]),
            (vec![ip(1)], false, vec![]),
            (vec![ip(1), ip(2)], false, vec![]),
            (vec![ip(1)], false, vec![]),
            (vec![ip(1)], true, vec![ip(2)]),
            (vec![ip(1)], false, vec![ip(2)]),
            (vec![ip(1), ip(2)], false, vec![]),
        ] {
            assert_eq!(lost.update(used.into_iter(), |address| here.contains(&address)), newly, "{here:?}");
            for address in used {
                assert_eq!(lost.contains(&format!("{address}:80")), gone.contains(&address), "{here:?}");
            }
        }
        assert!(!lost.contains("nonsense"));
    }

    #[test]
    fn loopback_is_local_and_documentation_addresses_are_not() {
        assert!(is_here([127, 0, 0, 1].into()));
        assert!(!is_here([192, 0, 2, 1].into()));
    }
}
