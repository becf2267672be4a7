//! How long the ways to other nodes are and what they carry: every link is asked once a second, over itself, and is
//! tried with as much as it carries when it is new or was away, unless that would disturb what serves.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use russet_crds::{FabricPort, Link, LinkMeasured};
use russet_rpc::ports::Exit;
use russet_rpc::tls::Connector;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::metrics::Metrics;
use crate::peers::Idle;
use crate::peers::dial::{DialError, Peer};

/// Between two pings of a link.
const PERIOD: Duration = Duration::from_secs(1);
/// Pings whose median counts: a minute of them.
const WINDOW: usize = 60;
/// After so many there is a median worth showing.
const FEW: usize = 5;
/// Without any answer for so long, a link does not answer. Longer than the Lease of an agent that stopped.
const SILENCE: Duration = Duration::from_secs(30);
/// Share by which a median must move before another one is shown. It takes half a minute for that.
const MOVED: f64 = 0.25;
/// Between two attempts to try what a link carries. Both ends want to, and each waits for the other.
const TRIES: Duration = Duration::from_secs(3);

/// What was found out, by the interface of this machine.
pub(crate) type Found = BTreeMap<String, LinkMeasured>;

/// What this agent had found out about links that are still there, before it began anew.
pub(crate) fn before(ports: &[FabricPort], links: &[Link]) -> Found {
    let there = |port: &&FabricPort| links.iter().any(|link| link.interface == port.interface);
    let measured = ports.iter().filter(there);
    measured.filter_map(|port| Some((port.interface.clone(), port.measured?))).collect()
}

/// Measures links.
#[derive(Clone)]
pub(crate) struct Measuring {
    pub connector: Connector,
    pub links: watch::Receiver<Vec<Link>>,
    pub idle: Idle,
    pub found: watch::Sender<Found>,
    pub metrics: Metrics,
}

/// A way to another agent.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Way {
    interface: String,
    peer: String,
    from: IpAddr,
    to: SocketAddr,
}

impl Way {
    /// A link, where both of its ends have addresses and the other agent is new enough to answer.
    fn of(link: &Link) -> Option<Self> {
        let ip = |address: &Option<String>| address.as_ref()?.parse::<IpAddr>().ok();
        let port = u16::try_from(link.peer_port?).ok()?;
        Some(Self {
            interface: link.interface.clone(),
            peer: link.peer.clone(),
            from: ip(&link.address)?,
            to: SocketAddr::new(ip(&link.peer_address)?, port),
        })
    }

    /// What is measured is this cable, whatever the routes say.
    fn exit(&self) -> Exit {
        Exit { address: self.from, interface: Some(self.interface.clone()) }
    }

    /// Whether it is the same cable. An agent that begins anew answers at another port.
    fn is(&self, other: &Self) -> bool {
        self.interface == other.interface && self.peer == other.peer && self.from == other.from
    }
}

/// Measures for ever.
pub(crate) async fn keep(mut measuring: Measuring) {
    let mut running: BTreeMap<Way, JoinSet<()>> = BTreeMap::new();
    loop {
        let links = measuring.links.borrow_and_update().clone();
        let ways: Vec<Way> = links.iter().filter_map(Way::of).collect();
        let gone: Vec<Way> = running.keys().filter(|way| !ways.contains(way)).cloned().collect();
        for way in gone {
            // Its task goes with it.
            running.remove(&way);
            let stays = ways.iter().any(|other| other.is(&way));
            // Nor is the silence of an agent that ended that of the one that began.
            let over = |found: &LinkMeasured| !stays || found.round_trip_microseconds.is_none();
            measuring.found.send_if_modified(|found| {
                found.get(&way.interface).is_some_and(over) && found.remove(&way.interface).is_some()
            });
            if !stays {
                measuring.metrics.link_gone(&way.peer, &way.interface);
            }
        }
        for way in ways {
            running.entry(way.clone()).or_insert_with(|| {
                let mut task = JoinSet::new();
                task.spawn(measure(way, measuring.clone()));
                task
            });
        }
        if measuring.links.changed().await.is_err() {
            return;
        }
    }
}

/// Measures one link for as long as it is there.
async fn measure(way: Way, mut measuring: Measuring) {
    let before = measuring.found.borrow().get(&way.interface).copied();
    let mut window = Window::new(before.unwrap_or_default(), Instant::now());
    let mut peer: Option<Peer> = None;
    let mut next_try = Instant::now();
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let pinged = ping(&mut peer, &way, &measuring.connector).await;
        let now = Instant::now();
        measuring.metrics.link_pinged(&way.peer, &way.interface, pinged.as_ref().ok().copied());
        match pinged {
            Ok(took) => window.answered(took, now),
            Err(error) => {
                peer = None;
                tracing::debug!(peer = way.peer, interface = way.interface, %error, "no answer over a link");
                window.missed(now);
            }
        }
        if window.wants_flood() && peer.is_some() && now >= next_try {
            next_try = now + TRIES.mul_f64(rand::random_range(0.7..1.5));
            match flood(&way, &mut measuring).await {
                Ok(Some(bits)) => {
                    tracing::info!(
                        peer = way.peer,
                        interface = way.interface,
                        bits,
                        "measured what a link carries"
                    );
                    measuring.metrics.link_carries(&way.peer, &way.interface, bits);
                    window.flooded(bits);
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(peer = way.peer, %error, "what a link carries could not be measured");
                }
            }
        }
        if let Some(shown) = window.shown(now) {
            measuring
                .found
                .send_if_modified(|found| found.insert(way.interface.clone(), shown) != Some(shown));
        }
    }
}

async fn ping(peer: &mut Option<Peer>, way: &Way, connector: &Connector) -> Result<Duration, DialError> {
    let connected = match peer {
        Some(peer) => peer,
        None => peer.insert(Peer::connect(connector, &way.peer, &way.exit(), way.to).await?),
    };
    connected.ping().await
}

/// What comes over a link, unless somebody needs one of both machines.
async fn flood(way: &Way, measuring: &mut Measuring) -> Result<Option<u64>, DialError> {
    let Some(_permit) = measuring.idle.take() else { return Ok(None) };
    let flooding =
        async { Peer::connect(&measuring.connector, &way.peer, &way.exit(), way.to).await?.flood().await };
    let mut idle = measuring.idle.clone();
    tokio::select! {
        bits = flooding => bits,
        () = idle.ends() => Ok(None),
    }
}

/// The last answers of a link, and what of them is shown. Pure: times are arguments.
#[derive(Debug)]
struct Window {
    trips: VecDeque<Duration>,
    /// When an answer came last, or this began.
    heard: Instant,
    bits: Option<u64>,
    shown: Option<LinkMeasured>,
}

impl Window {
    /// After what was found out `before` by this agent.
    fn new(before: LinkMeasured, now: Instant) -> Self {
        Self { trips: VecDeque::new(), heard: now, bits: before.bits_per_second, shown: None }
    }

    fn answered(&mut self, took: Duration, now: Instant) {
        self.heard = now;
        self.trips.push_back(took);
        if self.trips.len() > WINDOW {
            self.trips.pop_front();
        }
    }

    fn missed(&mut self, now: Instant) {
        if self.is_silent(now) {
            self.trips.clear();
            // Whoever comes back may come back over another cable.
            self.bits = None;
        }
    }

    fn is_silent(&self, now: Instant) -> bool {
        now.duration_since(self.heard) >= SILENCE
    }

    fn wants_flood(&self) -> bool {
        self.bits.is_none()
    }

    fn flooded(&mut self, bits: u64) {
        self.bits = Some(bits);
    }

    /// What to show now; nothing before anything is known.
    fn shown(&mut self, now: Instant) -> Option<LinkMeasured> {
        let median = self.median();
        if median.is_none() && !self.is_silent(now) {
            return self.shown;
        }
        let bits = self.bits.map(|bits| rounded(bits as f64) as u64);
        let trip = median.map(|median| rounded(median.as_secs_f64() * 1e6).max(1.0) as u32);
        let shown = self.shown.and_then(|shown| shown.round_trip_microseconds);
        let near = |shown: u32, trip: u32| (f64::from(trip) / f64::from(shown) - 1.0).abs() < MOVED;
        let kept = shown.zip(trip).is_some_and(|(shown, trip)| near(shown, trip));
        let trip = if kept { shown } else { trip };
        self.shown = Some(LinkMeasured { round_trip_microseconds: trip, bits_per_second: bits });
        self.shown
    }

    fn median(&self) -> Option<Duration> {
        let mut trips: Vec<Duration> = self.trips.iter().copied().collect();
        trips.sort_unstable();
        trips.get(trips.len() / 2).copied().filter(|_| trips.len() >= FEW)
    }
}

/// With two digits.
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

    /// A ping a second: microseconds, or none where none came back.
    fn seconds(window: &mut Window, from: Instant, pings: &[Option<u64>]) -> (Option<LinkMeasured>, Instant) {
        let (mut now, mut shown) = (from, None);
        for ping in pings {
            now += PERIOD;
            match ping {
                Some(took) => window.answered(micros(*took), now),
                None => window.missed(now),
            }
            shown = window.shown(now);
        }
        (shown, now)
    }

    fn trip(shown: Option<LinkMeasured>) -> Option<u32> {
        shown.and_then(|shown| shown.round_trip_microseconds)
    }

    #[test]
    fn a_median_is_shown_soon_and_moves_seldom() {
        let start = Instant::now();
        let mut window = Window::new(LinkMeasured::default(), start);
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
    fn a_link_that_is_silent_says_so_and_is_tried_anew() {
        let start = Instant::now();
        let mut window = Window::new(LinkMeasured::default(), start);
        assert!(window.wants_flood());
        window.flooded(25_912_345_678);
        let (shown, now) = seconds(&mut window, start, &[Some(300); 10]);
        assert_eq!(shown.and_then(|shown| shown.bits_per_second), Some(26_000_000_000));
        assert!(!window.wants_flood());
        let (shown, now) = seconds(&mut window, now, &[None; 29]);
        assert_eq!(trip(shown), Some(300), "it may come back");
        let (shown, now) = seconds(&mut window, now, &[None]);
        assert_eq!(shown, Some(LinkMeasured::default()));
        assert!(window.wants_flood(), "it may be another cable then");
        let (shown, _) = seconds(&mut window, now, &[Some(300); 5]);
        assert_eq!(trip(shown), Some(300), "at once");
    }

    #[test]
    fn a_link_that_never_answered_says_so_and_one_of_before_keeps_what_it_carries() {
        let start = Instant::now();
        let mut window = Window::new(LinkMeasured::default(), start);
        assert_eq!(seconds(&mut window, start, &[None; 29]).0, None);
        assert_eq!(seconds(&mut window, start, &[None; 30]).0, Some(LinkMeasured::default()));
        let before =
            LinkMeasured { round_trip_microseconds: Some(200), bits_per_second: Some(16_000_000_000) };
        let mut window = Window::new(before, start);
        assert!(!window.wants_flood());
        let shown = seconds(&mut window, start, &[Some(200); 5]).0;
        assert_eq!(shown, Some(before));
    }

    #[test]
    fn an_agent_that_begins_anew_knows_what_it_had_measured() {
        let port = |interface: &str, bits| FabricPort {
            interface: interface.to_owned(),
            measured: Some(LinkMeasured { bits_per_second: bits, ..LinkMeasured::default() }),
            ..FabricPort::default()
        };
        let link = Link { interface: "en3".to_owned(), ..Link::default() };
        let bare = FabricPort { interface: "en3".to_owned(), ..FabricPort::default() };
        let found = before(&[port("en3", Some(7)), port("en4", Some(8))], std::slice::from_ref(&link));
        assert_eq!(
            found.into_iter().collect::<Vec<_>>(),
            [("en3".to_owned(), port("", Some(7)).measured.unwrap())]
        );
        assert!(before(&[bare], &[link]).is_empty());
    }

    #[test]
    fn figures_have_two_digits() {
        for (value, shown) in [(0.4, 0.0), (7.0, 7.0), (94.6, 95.0), (143.0, 140.0), (25_912_345_678.0, 26e9)]
        {
            assert_eq!(rounded(value), shown, "{value}");
        }
    }

    #[test]
    fn a_link_is_a_way_once_both_ends_have_addresses_and_the_other_agent_answers() {
        let link = Link {
            peer: "b".to_owned(),
            interface: "en3".to_owned(),
            address: Some("192.0.2.1".to_owned()),
            peer_address: Some("192.0.2.2".to_owned()),
            peer_port: Some(20_001),
            ..Link::default()
        };
        let way = Way::of(&link).unwrap();
        assert_eq!(way.to.to_string(), "192.0.2.2:20001");
        let later = Way::of(&Link { peer_port: Some(20_002), ..link.clone() }).unwrap();
        assert!(way.is(&later) && way != later);
        for lacking in [
            Link { peer_port: None, ..link.clone() },
            Link { address: None, ..link.clone() },
            Link { peer_address: None, ..link },
        ] {
            assert_eq!(Way::of(&lacking), None, "{lacking:?}");
        }
    }
}
