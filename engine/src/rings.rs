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
use russet_wire::engine_config::{CableEnds, EngineConfig, Transport};

use crate::config::ConfigError;
use crate::executor::Addresses;
use crate::jaccl::{Devices, Topology};
use crate::lifecycle::{FailureReport, Lifecycle};
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

impl Rings {
    /// The groups of this rank. Fails if the fields contradict each other.
    pub fn of(config: &EngineConfig) -> Result<Self, ConfigError> {
        let (size, members) = (config.size(), config.tensor_size);
        if !size.is_multiple_of(members) {
            return Err(ConfigError::Members { ranks: size, members });
        }
        let (stages, stage, member) = (size / members, config.rank / members, config.rank % members);
        let mut rings = Self::default();
        if members > 1 {
            let name = format!("stage {stage}");
            let ranks = stage * members..(stage + 1) * members;
            rings.tensor = Some(ring(config, "tensorHosts", &config.tensor_hosts, name, ranks, member)?);
            if let Some(topology) = Topology::of(config.backend) {
                Devices(config.rdma_devices.clone()).check(topology, members as usize)?;
            }
        }
        if stages > 1 {
            let name = format!("member {member} of every stage");
            let ranks = (0..stages).map(|stage| stage * members + member);
            rings.pipeline = Some(ring(config, "ringHosts", &config.ring_hosts, name, ranks, stage)?);
        }
        Ok(rings)
    }
}

/// The group of `ranks` at `hosts`, which `field` names.
fn ring(
    config: &EngineConfig,
    field: &'static str,
    hosts: &[SocketAddr],
    name: String,
    ranks: impl Iterator<Item = u32> + Clone,
    own: u32,
) -> Result<Ring, ConfigError> {
    let EngineConfig { group_uid, epoch, peers, transport, .. } = config;
    let size = config.size();
    if hosts.len() != size as usize {
        return Err(ConfigError::Count { field, given: hosts.len(), size });
    }
    let hosts: Vec<SocketAddr> = ranks.clone().map(|rank| hosts[rank as usize]).collect();
    let mut nodes = Vec::new();
    if *transport == Transport::Direct {
        if let Some(address) = hosts.iter().find(|host| host.is_ipv6()) {
            return Err(ConfigError::Family { field, address: *address });
        }
    } else {
        for rank in ranks {
            let peer = peers.iter().find(|peer| peer.rank == rank);
            let given = peers.len();
            nodes.push(peer.ok_or(ConfigError::Count { field: "peers", given, size })?.node.clone());
        }
    }
    let label = format!("group {group_uid} epoch {epoch} {name}");
    Ok(Ring { label, hosts, nodes, own_index: own as usize })
}

/// The transports of this rank's groups; they carry traffic while they live.
#[derive(Debug, Default)]
pub struct RingTransports {
    tunnels: Vec<Tunnel>,
}

impl Rings {
    /// Opens the transports; returns them with the addresses for MLX.
    pub async fn open(
        self,
        config: &EngineConfig,
        tls: &TlsFiles,
    ) -> Result<(RingTransports, Addresses), TunnelError> {
        let Self { tensor, pipeline } = self;
        let mut carriers = RingTransports::default();
        // RDMA has no sockets to tunnel. Its coordinator exchanges queue keys, and MLX binds that address.
        let tensor_transport = match Topology::of(config.backend) {
            Some(_) => Transport::Direct,
            None => config.transport,
        };
        let addresses = Addresses {
            tensor: carriers.open(tensor, tensor_transport, tls, &config.cables).await?,
            pipeline: carriers.open(pipeline, config.transport, tls, &config.cables).await?,
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
            // A configuration with an unknown transport is refused.
            (Some(Ring { label, hosts, nodes, own_index: own }), Transport::Tunnel | Transport::Unknown) => {
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
                let mut path = tunnel.path();
                let reached = async {
                    // A tunnel that ends before that reports the reason itself.
                    if let Ok(path) = path.wait_for(Option::is_some).await.map(|path| path.clone()) {
                        path.into_iter().for_each(|path| life.add_path(path));
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
    use russet_wire::engine_config::{Backend, PeerRank};

    use super::*;

    fn addresses(first: u16, ranks: u16) -> Vec<SocketAddr> {
        (0..ranks).map(|rank| ([127, 0, 0, 1], first + rank).into()).collect()
    }

    /// A rank of a group with these layers, without addresses.
    fn config(layers: &[u32], tensor_size: u32, rank: u32) -> EngineConfig {
        EngineConfig {
            layers_per_rank: layers.to_owned(),
            tensor_size,
            rank,
            group_uid: "g".into(),
            epoch: 3,
            ..EngineConfig::default()
        }
    }

    /// The same rank with four ranks' peers, ring and tensor addresses.
    fn of_four(layers: &[u32], tensor_size: u32, rank: u32) -> EngineConfig {
        let peers = ["a", "b", "c", "d"].into_iter().zip(0..).map(|(node, rank)| PeerRank {
            rank,
            address: ([127, 0, 0, 1], 1).into(),
            node: node.into(),
        });
        EngineConfig {
            peers: peers.collect(),
            ring_hosts: addresses(20, 4),
            tensor_hosts: addresses(10, 4),
            ..config(layers, tensor_size, rank)
        }
    }

    fn ports(ring: &Option<Ring>) -> (Vec<u16>, usize, String) {
        let ring = ring.as_ref().unwrap();
        let ports = ring.hosts.iter().map(SocketAddr::port).collect();
        (ports, ring.own_index, format!("{} {}", ring.label, ring.nodes.join("")))
    }

    #[test]
    fn rank_joins_its_tensor_and_pipeline_rings() {
        let rings = Rings::of(&of_four(&[3, 3, 2, 2], 2, 3)).unwrap();
        assert_eq!(ports(&rings.tensor), (vec![12, 13], 1, "group g epoch 3 stage 1 cd".into()));
        let expected = (vec![21, 23], 1, "group g epoch 3 member 1 of every stage bd".into());
        assert_eq!(ports(&rings.pipeline), expected);
        let rings = Rings::of(&of_four(&[3, 3, 2, 2], 2, 0)).unwrap();
        assert_eq!(ports(&rings.tensor), (vec![10, 11], 0, "group g epoch 3 stage 0 ab".into()));

        let one_stage = EngineConfig { ring_hosts: vec![], ..of_four(&[5; 4], 4, 2) };
        let rings = Rings::of(&one_stage).unwrap();
        assert_eq!((ports(&rings.tensor).1, rings.pipeline), (2, None));
        let pipeline = EngineConfig { tensor_hosts: vec![], ..of_four(&[2, 1, 1, 1], 1, 2) };
        let rings = Rings::of(&pipeline).unwrap();
        assert_eq!((rings.tensor, ports(&rings.pipeline).0), (None, vec![20, 21, 22, 23]));
        assert_eq!(Rings::of(&config(&[], 1, 0)), Ok(Rings::default()));
    }

    #[test]
    fn fields_that_do_not_make_groups_say_why() {
        let cell = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let two = EngineConfig {
            tensor_hosts: addresses(1, 2),
            transport: Transport::Direct,
            ..config(&[5, 5], 2, 0)
        };
        let (unidirectional, bidirectional) = (
            vec![vec![cell(&[]), cell(&["a"])], vec![cell(&[]), cell(&[])]],
            vec![vec![cell(&[]), cell(&["a"])], vec![cell(&["b"]), cell(&[])]],
        );
        for (config, said) in [
            (config(&[2, 2, 1], 2, 0), "3 ranks do not make stages of 2"),
            (config(&[], 2, 0), "1 ranks do not make stages of 2"),
            (config(&[5, 5], 2, 0), "tensorHosts names 0 ranks"),
            (EngineConfig { ring_hosts: vec![], ..of_four(&[3, 3, 2, 2], 2, 0) }, "ringHosts names 0 ranks"),
            (EngineConfig { peers: vec![], ..of_four(&[5; 4], 4, 0) }, "peers names 0 ranks"),
            (
                EngineConfig {
                    ring_hosts: vec!["127.0.0.1:1".parse().unwrap(), "[::1]:2".parse().unwrap()],
                    transport: Transport::Direct,
                    ..config(&[5, 5], 1, 0)
                },
                "[::1]:2 of ringHosts is IPv6",
            ),
            (EngineConfig { backend: Backend::Jaccl, ..two.clone() }, "rdmaDevices has 0 rows"),
            (
                EngineConfig { backend: Backend::JacclRing, rdma_devices: unidirectional, ..two.clone() },
                "names 0 devices from member 1 to member 0",
            ),
        ] {
            let error = Rings::of(&config).unwrap_err().to_string();
            assert!(error.contains(said), "{said}: {error}");
        }
        let jaccl = EngineConfig { backend: Backend::Jaccl, rdma_devices: bidirectional, ..two };
        assert!(Rings::of(&jaccl).is_ok());
    }
}
