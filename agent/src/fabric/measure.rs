//! Link monitor: latency and bandwidth to other nodes. Every link is pinged once a second over its own
//! interface. Its bandwidth is probed when it is new or was down, unless that would disturb running engines.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use russet_crds::{FabricPort, Link, LinkMeasured};
use russet_rpc::ports::Egress;
use russet_rpc::tls::Connector;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::metrics::AgentMetrics;
use crate::peers::IdleGate;
use crate::peers::client::{DialError, PeerClient};

/// Between two pings of a link.
const PING_INTERVAL: Duration = Duration::from_secs(1);
/// Pings in the window for the median: one minute.
const WINDOW_PINGS: usize = 60;
/// Minimum number of pings for a median.
const MIN_PINGS: usize = 5;
/// A link without a reply for this long counts as down. Longer than the Lease of an agent that stopped.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);
/// Relative change of the median before it is published. With a full window that takes half a minute.
const CHANGE_THRESHOLD: f64 = 0.25;
/// Between two attempts of a bandwidth probe. Both ends probe, and each waits for the other.
const PROBE_RETRY_INTERVAL: Duration = Duration::from_secs(3);

/// Measurements, by this machine's interface.
pub(crate) type LinkMeasurements = BTreeMap<String, LinkMeasured>;

/// The agent's measurements, before its restart, of links that still exist.
pub(crate) fn restored(ports: &[FabricPort], links: &[Link]) -> LinkMeasurements {
    let there = |port: &&FabricPort| links.iter().any(|link| link.interface == port.interface);
    let measured = ports.iter().filter(there);
    measured.filter_map(|port| Some((port.interface.clone(), port.measured?))).collect()
}

/// Measures links.
#[derive(Clone)]
pub(crate) struct LinkMonitor {
    pub connector: Connector,
    pub links: watch::Receiver<Vec<Link>>,
    pub idle_gate: IdleGate,
    pub measurements: watch::Sender<LinkMeasurements>,
    pub metrics: AgentMetrics,
}

/// A path to another agent.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct LinkPath {
    interface: String,
    peer: String,
    from: IpAddr,
    to: SocketAddr,
}

impl LinkPath {
    /// The path of a link, if both ends have addresses and the other agent is new enough to answer.
    fn from_link(link: &Link) -> Option<Self> {
        let ip = |address: &Option<String>| address.as_ref()?.parse::<IpAddr>().ok();
        let port = u16::try_from(link.peer_port?).ok()?;
        Some(Self {
            interface: link.interface.clone(),
            peer: link.peer.clone(),
            from: ip(&link.address)?,
            to: SocketAddr::new(ip(&link.peer_address)?, port),
        })
    }

    /// Binds to this cable, whatever the routes say.
    fn egress(&self) -> Egress {
        Egress { address: self.from, interface: Some(self.interface.clone()) }
    }

    /// Whether it is the same cable. A restarted agent answers at another port.
    fn is_same_cable(&self, other: &Self) -> bool {
        self.interface == other.interface && self.peer == other.peer && self.from == other.from
    }
}

/// Measures all links until the agent exits.
pub(crate) async fn run(mut measuring: LinkMonitor) {
    let mut running: BTreeMap<LinkPath, JoinSet<()>> = BTreeMap::new();
    loop {
        let links = measuring.links.borrow_and_update().clone();
        let paths: Vec<LinkPath> = links.iter().filter_map(LinkPath::from_link).collect();
        let removed: Vec<LinkPath> = running.keys().filter(|path| !paths.contains(path)).cloned().collect();
        for path in removed {
            // Dropping the set aborts its task.
            running.remove(&path);
            let stays = paths.iter().any(|other| other.is_same_cable(&path));
            // The silence of an ended agent is not that of its successor.
            let over = |found: &LinkMeasured| !stays || found.round_trip_microseconds.is_none();
            measuring.measurements.send_if_modified(|found| {
                found.get(&path.interface).is_some_and(over) && found.remove(&path.interface).is_some()
            });
            if !stays {
                measuring.metrics.remove_link(&path.peer, &path.interface);
            }
        }
        for path in paths {
            running.entry(path.clone()).or_insert_with(|| {
                let mut task = JoinSet::new();
                task.spawn(measure(path, measuring.clone()));
                task
            });
        }
        if measuring.links.changed().await.is_err() {
            return;
        }
    }
}

/// Measures one link for as long as it exists.
async fn measure(path: LinkPath, mut measuring: LinkMonitor) {
    let before = measuring.measurements.borrow().get(&path.interface).copied();
    let mut window = PingWindow::new(before.unwrap_or_default(), Instant::now());
    let mut peer: Option<PeerClient> = None;
    let mut next_try = Instant::now();
    let mut ticks = tokio::time::interval(PING_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let pinged = ping(&mut peer, &path, &measuring.connector).await;
        let now = Instant::now();
        measuring.metrics.link_pinged(&path.peer, &path.interface, pinged.as_ref().ok().copied());
        match pinged {
            Ok(took) => window.record_reply(took, now),
            Err(error) => {
                peer = None;
                tracing::debug!(peer = path.peer, interface = path.interface, %error, "no answer over a link");
                window.record_loss(now);
            }
        }
        if window.needs_bandwidth_probe() && peer.is_some() && now >= next_try {
            next_try = now + PROBE_RETRY_INTERVAL.mul_f64(rand::random_range(0.7..1.5));
            match probe_bandwidth(&path, &mut measuring).await {
                Ok(Some(bits)) => {
                    tracing::info!(
                        peer = path.peer,
                        interface = path.interface,
                        bits,
                        "measured what a link carries"
                    );
                    measuring.metrics.link_bandwidth(&path.peer, &path.interface, bits);
                    window.record_bandwidth(bits);
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(peer = path.peer, %error, "what a link carries could not be measured");
                }
            }
        }
        if let Some(shown) = window.publish(now) {
            measuring
                .measurements
                .send_if_modified(|found| found.insert(path.interface.clone(), shown) != Some(shown));
        }
    }
}

async fn ping(
    peer: &mut Option<PeerClient>,
    path: &LinkPath,
    connector: &Connector,
) -> Result<Duration, DialError> {
    let connected = match peer {
        Some(peer) => peer,
        None => peer.insert(PeerClient::connect(connector, &path.peer, &path.egress(), path.to).await?),
    };
    connected.ping().await
}

/// Probes the bandwidth of a link, unless one of the machines is busy.
async fn probe_bandwidth(path: &LinkPath, measuring: &mut LinkMonitor) -> Result<Option<u64>, DialError> {
    let Some(_permit) = measuring.idle_gate.try_acquire() else { return Ok(None) };
    let flooding = async {
        PeerClient::connect(&measuring.connector, &path.peer, &path.egress(), path.to)
            .await?
            .measure_bandwidth()
            .await
    };
    let mut idle = measuring.idle_gate.clone();
    tokio::select! {
        bits = flooding => bits,
        () = idle.wait_busy() => Ok(None),
    }
}

/// The last replies of a link, and the published values. Pure: times are arguments.
#[derive(Debug)]
struct PingWindow {
    round_trips: VecDeque<Duration>,
    /// Time of the last reply, or of the start.
    last_reply: Instant,
    bits_per_second: Option<u64>,
    published: Option<LinkMeasured>,
}

impl PingWindow {
    /// A window that starts with the agent's earlier measurement.
    fn new(before: LinkMeasured, now: Instant) -> Self {
        Self {
            round_trips: VecDeque::new(),
            last_reply: now,
            bits_per_second: before.bits_per_second,
            published: None,
        }
    }

    fn record_reply(&mut self, took: Duration, now: Instant) {
        self.last_reply = now;
        self.round_trips.push_back(took);
        if self.round_trips.len() > WINDOW_PINGS {
            self.round_trips.pop_front();
        }
    }

    fn record_loss(&mut self, now: Instant) {
        if self.is_silent(now) {
            self.round_trips.clear();
            // A peer that returns may be on another cable.
            self.bits_per_second = None;
        }
    }

    fn is_silent(&self, now: Instant) -> bool {
        now.duration_since(self.last_reply) >= SILENCE_TIMEOUT
    }

    fn needs_bandwidth_probe(&self) -> bool {
        self.bits_per_second.is_none()
    }

    fn record_bandwidth(&mut self, bits: u64) {
        self.bits_per_second = Some(bits);
    }

    /// The values to publish now; `None` before anything is known.
    fn publish(&mut self, now: Instant) -> Option<LinkMeasured> {
        let median = self.median();
        if median.is_none() && !self.is_silent(now) {
            return self.published;
        }
        let bits = self.bits_per_second.map(|bits| rounded(bits as f64) as u64);
        let trip = median.map(|median| rounded(median.as_secs_f64() * 1e6).max(1.0) as u32);
        let shown = self.published.and_then(|shown| shown.round_trip_microseconds);
        let near =
            |shown: u32, trip: u32| (f64::from(trip) / f64::from(shown) - 1.0).abs() < CHANGE_THRESHOLD;
        let unchanged = shown.zip(trip).is_some_and(|(shown, trip)| near(shown, trip));
        let trip = if unchanged { shown } else { trip };
        self.published = Some(LinkMeasured { round_trip_microseconds: trip, bits_per_second: bits });
        self.published
    }

    fn median(&self) -> Option<Duration> {
        let mut trips: Vec<Duration> = self.round_trips.iter().copied().collect();
        trips.sort_unstable();
        trips.get(trips.len() / 2).copied().filter(|_| trips.len() >= MIN_PINGS)
    }
}

/// Rounds to two significant digits.
fn rounded(value: f64) -> f64 {
    let unit = 10_f64.powf(value.max(1.0).log10().floor() - 1.0).max(1.0);
    (value / unit).round() * unit
}

#[cfg(test)]
mod tests {
    use super::*;

    fn micros(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    /// One ping per second: microseconds, or `None` without a reply.
    fn seconds(
        window: &mut PingWindow,
        from: Instant,
        pings: &[Option<u64>],
    ) -> (Option<LinkMeasured>, Instant) {
        let (mut now, mut shown) = (from, None);
        for ping in pings {
            now += PING_INTERVAL;
            match ping {
                Some(took) => window.record_reply(micros(*took), now),
                None => window.record_loss(now),
            }
            shown = window.publish(now);
        }
        (shown, now)
    }

    fn trip(shown: Option<LinkMeasured>) -> Option<u32> {
        shown.and_then(|shown| shown.round_trip_microseconds)
    }

    #[test]
    fn round_trip_median_appears_early_and_changes_rarely() {
        let start = Instant::now();
        let mut window = PingWindow::new(LinkMeasured::default(), start);
        let (shown, now) = seconds(&mut window, start, &[Some(311), Some(299), Some(9_000), Some(305)]);
        assert_eq!(shown, None, "four are no median");
        let (shown, now) = seconds(&mut window, now, &[Some(301)]);
        assert_eq!(trip(shown), Some(310));
        let (shown, now) = seconds(&mut window, now, &[Some(340); 60]);
        assert_eq!(trip(shown), Some(310), "a tenth more is the same");
        let (shown, now) = seconds(&mut window, now, &[Some(600); 60]);
        assert_eq!(trip(shown), Some(600));
        let (shown, now) = seconds(&mut window, now, &[Some(300); 30]);
        assert_eq!(trip(shown), Some(600), "half a minute is no change yet");
        let (shown, _) = seconds(&mut window, now, &[Some(300); 1]);
        assert_eq!(trip(shown), Some(300));
    }

    #[test]
    fn silent_link_is_reported_and_probed_again() {
        let start = Instant::now();
        let mut window = PingWindow::new(LinkMeasured::default(), start);
        assert!(window.needs_bandwidth_probe());
        window.record_bandwidth(25_912_345_678);
        let (shown, now) = seconds(&mut window, start, &[Some(300); 10]);
        assert_eq!(shown.and_then(|shown| shown.bits_per_second), Some(26_000_000_000));
        assert!(!window.needs_bandwidth_probe());
        let (shown, now) = seconds(&mut window, now, &[None; 29]);
        assert_eq!(trip(shown), Some(300), "it may come back");
        let (shown, now) = seconds(&mut window, now, &[None]);
        assert_eq!(shown, Some(LinkMeasured::default()));
        assert!(window.needs_bandwidth_probe(), "it may be another cable then");
        let (shown, _) = seconds(&mut window, now, &[Some(300); 5]);
        assert_eq!(trip(shown), Some(300), "at once");
    }

    #[test]
    fn unanswered_link_is_reported_and_known_bandwidth_is_kept() {
        let start = Instant::now();
        let mut window = PingWindow::new(LinkMeasured::default(), start);
        assert_eq!(seconds(&mut window, start, &[None; 29]).0, None);
        assert_eq!(seconds(&mut window, start, &[None; 30]).0, Some(LinkMeasured::default()));
        let before =
            LinkMeasured { round_trip_microseconds: Some(200), bits_per_second: Some(16_000_000_000) };
        let mut window = PingWindow::new(before, start);
        assert!(!window.needs_bandwidth_probe());
        let shown = seconds(&mut window, start, &[Some(200); 5]).0;
        assert_eq!(shown, Some(before));
    }

    #[test]
    fn restarted_agent_restores_link_measurements() {
        let port = |interface: &str, bits| FabricPort {
            interface: interface.to_owned(),
            measured: Some(LinkMeasured { bits_per_second: bits, ..LinkMeasured::default() }),
            ..FabricPort::default()
        };
        let link = Link { interface: "en3".to_owned(), ..Link::default() };
        let bare = FabricPort { interface: "en3".to_owned(), ..FabricPort::default() };
        let found = restored(&[port("en3", Some(7)), port("en4", Some(8))], std::slice::from_ref(&link));
        assert_eq!(
            found.into_iter().collect::<Vec<_>>(),
            [("en3".to_owned(), port("", Some(7)).measured.unwrap())]
        );
        assert!(restored(&[bare], &[link]).is_empty());
    }

    #[test]
    fn figures_have_two_digits() {
        for (value, shown) in [(0.4, 0.0), (7.0, 7.0), (94.6, 95.0), (143.0, 140.0), (25_912_345_678.0, 26e9)]
        {
            assert_eq!(rounded(value), shown, "{value}");
        }
    }

    #[test]
    fn link_path_needs_both_addresses_and_a_peer_port() {
        let link = Link {
            peer: "b".to_owned(),
            interface: "en3".to_owned(),
            address: Some("192.0.2.1".to_owned()),
            peer_address: Some("192.0.2.2".to_owned()),
            peer_port: Some(20_001),
            ..Link::default()
        };
        let path = LinkPath::from_link(&link).unwrap();
        assert_eq!(path.to.to_string(), "192.0.2.2:20001");
        let later = LinkPath::from_link(&Link { peer_port: Some(20_002), ..link.clone() }).unwrap();
        assert!(path.is_same_cable(&later) && path != later);
        for lacking in [
            Link { peer_port: None, ..link.clone() },
            Link { address: None, ..link.clone() },
            Link { peer_address: None, ..link },
        ] {
            assert_eq!(LinkPath::from_link(&lacking), None, "{lacking:?}");
        }
    }
}
