//! MLX's process groups of a rank, and the addresses given to MLX. A rank is in up to two groups: the tensor
//! group, with the other tensor ranks of its stage, and the pipeline group, with the same tensor rank of
//! every other stage.
//!
//! ```text
//! 2 stages of 2:    ranks 2 ── 3      stage 1      tensor groups {0, 1}, {2, 3}
//!                         │    │
//!                   ranks 0 ── 1      stage 0      pipeline groups {0, 2}, {1, 3}
//! ```

use std::convert::Infallible;
use std::net::SocketAddr;

use russet_rpc::tls::TlsFiles;

use crate::args::{Args, ArgsError, Backend, Transport};
use crate::executor::Addresses;
use crate::lifecycle::{FailureReport, Lifecycle};
use crate::tunnel::dial::CableEnds;
use crate::tunnel::{StubSwitch, Tunnel, TunnelError};

/// One of MLX's groups, from the view of one member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ring {
    /// Names the group and its formation; equal on all members.
    pub label: String,
    /// Published addresses, in group order.
    pub hosts: Vec<SocketAddr>,
    /// The members' nodes; empty where they are not needed.
    pub nodes: Vec<String>,
    /// Index of this rank.
    pub own_index: usize,
}

/// The groups of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rings {
    /// Tensor group.
    pub tensor: Option<Ring>,
    /// Pipeline group.
    pub pipeline: Option<Ring>,
}

impl Args {
    /// The groups of this rank. Fails if the flags contradict each other.
    pub fn rings(&self) -> Result<Rings, ArgsError> {
        let (size, members) = (self.size(), self.tensor_size);
        if !size.is_multiple_of(members) {
            return Err(ArgsError::Members { ranks: size, members });
        }
        let (stages, stage, member) = (size / members, self.rank / members, self.rank % members);
        let mut rings = Rings::default();
        if members > 1 {
            let name = format!("stage {stage}");
            let ranks = stage * members..(stage + 1) * members;
            rings.tensor = Some(self.ring("--tensor-hosts", &self.tensor_hosts, name, ranks, member)?);
            if let Some(topology) = self.backend.topology() {
                self.rdma_devices.check(topology, members as usize)?;
            }
        }
        if stages > 1 {
            let name = format!("member {member} of every stage");
            let ranks = (0..stages).map(|stage| stage * members + member);
            rings.pipeline = Some(self.ring("--ring-hosts", &self.ring_hosts, name, ranks, stage)?);
        }
        Ok(rings)
    }

    fn ring(
        &self,
        flag: &'static str,
        hosts: &[SocketAddr],
        name: String,
        ranks: impl Iterator<Item = u32> + Clone,
        own: u32,
    ) -> Result<Ring, ArgsError> {
        let size = self.size();
        if hosts.len() != size as usize {
            return Err(ArgsError::Count { flag, given: hosts.len(), size });
        }
        let hosts: Vec<SocketAddr> = ranks.clone().map(|rank| hosts[rank as usize]).collect();
        let mut nodes = Vec::new();
        if self.transport == Transport::Tunnel {
            for rank in ranks {
                let peer = self.peers.iter().find(|peer| peer.rank == rank);
                let given = self.peers.len();
                nodes.push(peer.ok_or(ArgsError::Count { flag: "--peers", given, size })?.node.clone());
            }
        } else if let Some(address) = hosts.iter().find(|host| host.is_ipv6()) {
            return Err(ArgsError::Family { flag, address: *address });
        }
        let label = format!("group {} epoch {} {name}", self.group_uid, self.epoch);
        Ok(Ring { label, hosts, nodes, own_index: own as usize })
    }
}

/// The transports of this rank's groups; they carry traffic while they live.
#[derive(Debug, Default)]
pub struct RingTransports {
    tunnels: Vec<Tunnel>,
}

impl Rings {
    /// Opens the transports; returns them with the addresses for MLX.
    pub async fn open(self, args: &Args, tls: &TlsFiles) -> Result<(RingTransports, Addresses), TunnelError> {
        let Self { tensor, pipeline } = self;
        let mut carriers = RingTransports::default();
        // RDMA has no sockets to tunnel. Its coordinator exchanges queue keys, and MLX binds that address.
        let tensor_transport = if args.backend == Backend::Ring { args.transport } else { Transport::Direct };
        let addresses = Addresses {
            tensor: carriers.open(tensor, tensor_transport, tls, &args.cables).await?,
            pipeline: carriers.open(pipeline, args.transport, tls, &args.cables).await?,
        };
        Ok((carriers, addresses))
    }
}

impl RingTransports {
    async fn open(
        &mut self,
        ring: Option<Ring>,
        transport: Transport,
        tls: &TlsFiles,
        cables: &[CableEnds],
    ) -> Result<Vec<SocketAddr>, TunnelError> {
        match (ring, transport) {
            (None, _) => Ok(Vec::new()),
            (Some(Ring { hosts, .. }), Transport::Direct) => Ok(hosts),
            (Some(Ring { label, hosts, nodes, own_index: own }), Transport::Tunnel) => {
                let (tunnel, addresses) = Tunnel::open(tls, &label, &hosts, &nodes, own, cables).await?;
                self.tunnels.push(tunnel);
                Ok(addresses)
            }
        }
    }

    /// Handles that declare the group lost.
    pub fn stub_switches(&self) -> Vec<StubSwitch> {
        self.tunnels.iter().map(Tunnel::stub_switch).collect()
    }

    /// Keeps the tunnels open until it is cancelled. A neighbour that never connects fails this rank; a lost
    /// connection is only logged, because the control stream knows whether it was an orderly exit.
    pub async fn watch(self, life: Lifecycle) {
        let watches = self.tunnels.into_iter().map(|mut tunnel| {
            let life = life.clone();
            async move {
                let mut way = tunnel.path();
                let reached = async {
                    // A tunnel that ends before that reports the reason itself.
                    if let Ok(way) = way.wait_for(Option::is_some).await.map(|way| way.clone()) {
                        way.into_iter().for_each(|way| life.add_path(way));
                    }
                    std::future::pending::<Infallible>().await
                };
                let error = tokio::select! {
                    error = tunnel.wait_lost() => error,
                    never = reached => match never {},
                };
                if matches!(error, TunnelError::Lost { .. }) {
                    tracing::info!("{error}");
                } else {
                    life.fail_with(FailureReport::group(error.to_string()));
                }
                // The other direction may still carry data sent earlier.
                std::future::pending::<()>().await;
                drop(tunnel);
            }
        });
        futures::future::join_all(watches).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    fn args(flags: &str) -> Args {
        let base = "russet-engine --model-dir /m --served-model-name m --tls-dir /t --control-socket /s \
                    --group-uid g --epoch 3";
        Args::try_parse_from(base.split_whitespace().chain(flags.split_whitespace())).unwrap()
    }

    const TENSOR: &str = "--tensor-hosts 127.0.0.1:10,127.0.0.1:11,127.0.0.1:12,127.0.0.1:13";
    const RING: &str = "--ring-hosts 127.0.0.1:20,127.0.0.1:21,127.0.0.1:22,127.0.0.1:23";
    const PEERS: &str = "--peers 0=127.0.0.1:1@a,1=127.0.0.1:2@b,2=127.0.0.1:3@c,3=127.0.0.1:4@d";

    fn ports(ring: &Option<Ring>) -> (Vec<u16>, usize, String) {
        let ring = ring.as_ref().unwrap();
        let ports = ring.hosts.iter().map(SocketAddr::port).collect();
        (ports, ring.own_index, format!("{} {}", ring.label, ring.nodes.join("")))
    }

    #[test]
    fn rank_joins_its_tensor_and_pipeline_rings() {
        let hybrid = format!("--layers-per-rank 3,3,2,2 --tensor-size 2 {TENSOR} {RING} {PEERS}");
        let rings = args(&format!("{hybrid} --rank 3")).rings().unwrap();
        assert_eq!(ports(&rings.tensor), (vec![12, 13], 1, "group g epoch 3 stage 1 cd".into()));
        let expected = (vec![21, 23], 1, "group g epoch 3 member 1 of every stage bd".into());
        assert_eq!(ports(&rings.pipeline), expected);
        let rings = args(&format!("{hybrid} --rank 0")).rings().unwrap();
        assert_eq!(ports(&rings.tensor), (vec![10, 11], 0, "group g epoch 3 stage 0 ab".into()));

        let rings = args(&format!("--layers-per-rank 5,5,5,5 --tensor-size 4 {TENSOR} {PEERS} --rank 2"))
            .rings()
            .unwrap();
        assert_eq!((ports(&rings.tensor).1, rings.pipeline), (2, None));
        let rings = args(&format!("--layers-per-rank 2,1,1,1 {RING} {PEERS} --rank 2")).rings().unwrap();
        assert_eq!((rings.tensor, ports(&rings.pipeline).0), (None, vec![20, 21, 22, 23]));
        assert_eq!(args("").rings(), Ok(Rings::default()));
    }

    #[test]
    fn flags_that_do_not_make_groups_say_why() {
        let two =
            "--layers-per-rank 5,5 --tensor-size 2 --tensor-hosts 127.0.0.1:1,127.0.0.1:2 --transport direct";
        for (flags, said) in [
            ("--layers-per-rank 2,2,1 --tensor-size 2".to_owned(), "3 ranks do not make stages of 2"),
            ("--tensor-size 2".to_owned(), "1 ranks do not make stages of 2"),
            ("--layers-per-rank 5,5 --tensor-size 2".to_owned(), "--tensor-hosts names 0 ranks"),
            (
                format!("--layers-per-rank 3,3,2,2 --tensor-size 2 {TENSOR} {PEERS}"),
                "--ring-hosts names 0 ranks",
            ),
            (format!("--layers-per-rank 5,5,5,5 --tensor-size 4 {TENSOR}"), "--peers names 0 ranks"),
            (
                "--layers-per-rank 5,5 --ring-hosts 127.0.0.1:1,[::1]:2 --transport direct".to_owned(),
                "[::1]:2 of --ring-hosts is IPv6",
            ),
            (format!("{two} --backend jaccl"), "--rdma-devices has 0 rows"),
            (
                format!(r#"{two} --backend jaccl-ring --rdma-devices [[[],["a"]],[[],[]]]"#),
                "names 0 devices from member 1 to member 0",
            ),
        ] {
            let error = args(&flags).rings().unwrap_err().to_string();
            assert!(error.contains(said), "{said}: {error}");
        }
        let jaccl = format!(r#"{two} --backend jaccl --rdma-devices [[[],["a"]],[["b"],[]]]"#);
        assert!(args(&jaccl).rings().is_ok());
    }
}
