//! Cost of messages between machines. Every number is published or measured, none is fitted.

use russet_crds::{Backend, LinkKind, LinkMeasured};

/// Maximum size of a message that is exchanged in one phase; larger ones among more than two ranks are
/// reduce-scattered and gathered.
const MAX_ONE_PHASE_BYTES: f64 = 32768.0;
/// Seconds per further peer of a mesh: one message of 4 KiB (perftest over Thunderbolt 5).
const PEER_SECONDS: f64 = 4.6e-6;

/// How MLX waits for a collective on Metal (`MLX_METAL_FAST_SYNCH`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum FenceMode {
    /// MLX's default.
    #[default]
    Default,
    /// Polled from the GPU: fast, and known to hang it.
    Fast,
}

impl FenceMode {
    /// Seconds per collective, as MLX's issues 4438 and 3142 give them.
    pub fn seconds(self) -> f64 {
        match self {
            FenceMode::Default => 180e-6,
            FenceMode::Fast => 4e-6,
        }
    }
}

/// A link between machines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkProfile {
    /// Seconds of a small all-reduce between two ranks.
    pub latency: f64,
    /// Bytes per second.
    pub bandwidth: f64,
    /// Seconds that a pipeline waits at each stage boundary.
    pub hop: f64,
    /// Whether every rank is directly connected to every other; else messages go around a ring.
    pub mesh: bool,
}

impl LinkProfile {
    /// RDMA over Thunderbolt 5, every pair cabled: 25.5 µs per 4 KB collective (mlx-jaccl-cluster, M4 Pro),
    /// 68.9 Gbit/s (perftest), 2 ms per token for three hops of a pipeline.
    pub const RDMA: LinkProfile = LinkProfile { latency: 25.5e-6, bandwidth: 8.6e9, hop: 0.7e-3, mesh: true };
    /// RDMA with only neighbours cabled.
    pub const RDMA_RING: LinkProfile = LinkProfile { mesh: false, ..LinkProfile::RDMA };
    /// TCP over Thunderbolt: 143 µs is MLX's ring of two ranks on one machine's loopback, which Thunderbolt's
    /// 0.3 ms round trips confirm; 26 Gbit/s; a pipeline of two loses 3.5 ms per token.
    pub const THUNDERBOLT: LinkProfile =
        LinkProfile { latency: 143e-6, bandwidth: 3.2e9, hop: 3.5e-3, mesh: false };
    /// Wired Ethernet of 10 Gbit/s through a switch or the Thunderbolt bridge: round trips of 0.38 ms.
    pub const ETHERNET: LinkProfile =
        LinkProfile { latency: 380e-6, bandwidth: 1.2e9, hop: 3.7e-3, mesh: false };
    /// A VPN or another routed network: round trips of 0.95 ms without other traffic.
    pub const ROUTED: LinkProfile =
        LinkProfile { latency: 950e-6, bandwidth: 0.1e9, hop: 4.3e-3, mesh: false };
    /// Wi-Fi: round trips of 4.9 ms at best.
    pub const WIFI: LinkProfile =
        LinkProfile { latency: 4.9e-3, bandwidth: 0.05e9, hop: 8.3e-3, mesh: false };

    /// The link for messages of `backend` between nodes connected by `kind` at a negotiated speed, as
    /// `measured` over TCP.
    pub fn for_backend(
        backend: Backend,
        kind: LinkKind,
        bits_per_second: Option<u64>,
        measured: Option<LinkMeasured>,
    ) -> LinkProfile {
        let link = match (backend, kind) {
            (Backend::Jaccl, _) => LinkProfile::RDMA,
            (Backend::JacclRing, _) => LinkProfile::RDMA_RING,
            (_, LinkKind::Thunderbolt) => LinkProfile::THUNDERBOLT,
            (_, LinkKind::Ethernet) => LinkProfile::ETHERNET,
            (_, LinkKind::Wifi) => LinkProfile::WIFI,
            (_, LinkKind::Other) => LinkProfile::ROUTED,
        };
        // The negotiated speed is an upper bound for software; on Thunderbolt software is the limit.
        let negotiated = bits_per_second.filter(|_| kind == LinkKind::Ethernet);
        let link = negotiated.map_or(link, |bits| LinkProfile { bandwidth: bits as f64 / 8.0, ..link });
        // RDMA bypasses the sockets that were measured.
        let over_tcp = !matches!(backend, Backend::Jaccl | Backend::JacclRing);
        measured.filter(|_| over_tcp).map_or(link, |measured| link.with_measured(measured))
    }

    /// The link with measured values instead of defaults. A short round trip between agents does not prove
    /// short waits within MLX; a long one does prove long waits.
    fn with_measured(self, measured: LinkMeasured) -> LinkProfile {
        let bandwidth = measured.bits_per_second.map_or(self.bandwidth, |bits| bits as f64 / 8.0);
        let there = measured.round_trip_microseconds.map_or(0.0, |trip| f64::from(trip) / 2.0 * 1e-6);
        let more = (there - self.latency).max(0.0);
        LinkProfile { bandwidth, latency: self.latency + more, hop: self.hop + more, ..self }
    }

    /// Seconds of an all-reduce of `bytes` among `ranks`.
    pub(crate) fn all_reduce(&self, ranks: u32, bytes: f64) -> f64 {
        let others = f64::from(ranks.saturating_sub(1));
        if others == 0.0 {
            return 0.0;
        }
        let parts = 2.0 * others / f64::from(ranks) * bytes / self.bandwidth;
        match (self.mesh, bytes > MAX_ONE_PHASE_BYTES && ranks > 2) {
            (true, false) => self.latency + PEER_SECONDS * (others - 1.0) + others * bytes / self.bandwidth,
            (true, true) => 2.0 * (self.latency + PEER_SECONDS * (others - 1.0)) + parts,
            (false, _) => self.latency * others + parts,
        }
    }

    /// Seconds to send `bytes` to the next stage.
    pub(crate) fn hop(&self, bytes: f64) -> f64 {
        self.hop + bytes / self.bandwidth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_backend_decides_and_else_the_cable() {
        for (backend, kind, bits, link) in [
            (Backend::Jaccl, LinkKind::Thunderbolt, Some(80_000_000_000), LinkProfile::RDMA),
            (Backend::JacclRing, LinkKind::Thunderbolt, None, LinkProfile::RDMA_RING),
            (Backend::Ring, LinkKind::Thunderbolt, Some(80_000_000_000), LinkProfile::THUNDERBOLT),
            (Backend::Ring, LinkKind::Ethernet, None, LinkProfile::ETHERNET),
            (
                Backend::Ring,
                LinkKind::Ethernet,
                Some(1_000_000_000),
                LinkProfile { bandwidth: 125e6, ..LinkProfile::ETHERNET },
            ),
            (Backend::Ring, LinkKind::Other, None, LinkProfile::ROUTED),
        ] {
            assert_eq!(
                LinkProfile::for_backend(backend, kind, bits, None),
                link,
                "{backend:?} {kind:?} {bits:?}"
            );
        }
    }

    #[test]
    fn tcp_measurements_apply_to_tcp_backends_only() {
        let measured = |trip, bits| LinkMeasured { round_trip_microseconds: trip, bits_per_second: bits };
        let of = |backend, measured| {
            LinkProfile::for_backend(backend, LinkKind::Thunderbolt, Some(80_000_000_000), Some(measured))
        };
        let slow = of(Backend::Ring, measured(Some(400), Some(8_000_000_000)));
        assert_eq!((slow.bandwidth, slow.mesh), (1e9, false));
        assert!((slow.latency - 200e-6).abs() < 1e-12, "{slow:?}");
        assert!((slow.hop - LinkProfile::THUNDERBOLT.hop - 57e-6).abs() < 1e-12, "{slow:?}");
        assert_eq!(of(Backend::Ring, measured(Some(90), None)), LinkProfile::THUNDERBOLT);
        assert_eq!(of(Backend::Ring, measured(None, None)), LinkProfile::THUNDERBOLT);
        assert_eq!(of(Backend::Jaccl, measured(Some(400), Some(8_000_000_000))), LinkProfile::RDMA);
    }

    #[test]
    fn worse_links_and_more_ranks_take_longer() {
        let links = [
            LinkProfile::RDMA,
            LinkProfile::THUNDERBOLT,
            LinkProfile::ETHERNET,
            LinkProfile::ROUTED,
            LinkProfile::WIFI,
        ];
        for bytes in [8192.0, 1e6] {
            for pair in links.windows(2) {
                if let [better, worse] = pair {
                    assert!(better.all_reduce(2, bytes) < worse.all_reduce(2, bytes), "{worse:?}");
                    assert!(better.hop(bytes) < worse.hop(bytes), "{worse:?}");
                }
            }
            for link in links {
                assert_eq!(link.all_reduce(1, bytes), 0.0);
                assert!(link.all_reduce(2, bytes) < link.all_reduce(4, bytes), "{link:?}");
            }
        }
        assert!(LinkProfile::RDMA.all_reduce(4, 8192.0) < LinkProfile::RDMA_RING.all_reduce(4, 8192.0));
    }
}
