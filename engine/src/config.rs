//! Whether the fields of a configuration describe a group, and the other ranks that they name. The fields are
//! declared in [`russet_wire::engine_config`].

use std::net::SocketAddr;

use russet_wire::engine_config::{EngineConfig, PeerRank};
use thiserror::Error;

use crate::jaccl::DevicesError;

/// Fields that contradict each other.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ConfigError {
    /// The number of ranks is no multiple of the tensor parallel size.
    #[error(
        "{ranks} ranks do not make stages of {members}; give layersPerRank a multiple of tensorSize entries"
    )]
    Members {
        /// Ranks of the group.
        ranks: u32,
        /// Ranks per stage.
        members: u32,
    },
    /// An address family that MLX's ring does not support.
    #[error("{address} of {field} is IPv6, which MLX's ring does not speak; use transport Tunnel or IPv4")]
    Family {
        /// The field.
        field: &'static str,
        /// The address.
        address: SocketAddr,
    },
    /// RDMA devices that do not connect the tensor ranks.
    #[error(transparent)]
    Devices(#[from] DevicesError),
    /// A rank outside the group.
    #[error("rank {rank} is outside a group of {size}; ranks count from 0")]
    Rank {
        /// The rank.
        rank: u32,
        /// Ranks of the group.
        size: u32,
    },
    /// A higher rank that does not know who leads it.
    #[error(
        "peers does not name rank 0, whose node alone may lead rank {rank}; name every rank of the group"
    )]
    Leader {
        /// The rank.
        rank: u32,
    },
    /// A field that does not have one address per rank.
    #[error("{field} names {given} ranks, but layersPerRank has {size}; name each rank once")]
    Count {
        /// The field.
        field: &'static str,
        /// Addresses given.
        given: usize,
        /// Ranks of the group.
        size: u32,
    },
}

/// The higher ranks, in rank order. Fails if the fields contradict each other.
pub fn followers(config: &EngineConfig) -> Result<Vec<PeerRank>, ConfigError> {
    let (rank, size) = (config.rank, config.size());
    if rank >= size {
        return Err(ConfigError::Rank { rank, size });
    }
    if size == 1 {
        return Ok(Vec::new());
    }
    let mut followers: Vec<PeerRank> = config.peers.iter().filter(|peer| peer.rank > 0).cloned().collect();
    followers.sort_by_key(|peer| peer.rank);
    if rank == 0 && !followers.iter().map(|peer| peer.rank).eq(1..size) {
        return Err(ConfigError::Count { field: "peers", given: config.peers.len(), size });
    }
    if rank > 0 && !config.peers.iter().any(|peer| peer.rank == 0) {
        return Err(ConfigError::Leader { rank });
    }
    Ok(followers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_needs_every_rank_once() {
        let peers = |ranks: &[u32]| -> Vec<PeerRank> {
            let peer = |&rank| PeerRank { rank, address: ([127, 0, 0, 1], 8).into(), node: "a".into() };
            ranks.iter().map(peer).collect()
        };
        for (layers, rank, ranks, expected) in [
            (&[][..], 0, &[][..], Ok(0)),
            (&[2, 2], 0, &[1, 0], Ok(1)),
            (&[2, 2], 1, &[0], Ok(0)),
            (&[2, 2], 1, &[1], Err(ConfigError::Leader { rank: 1 })),
            (&[], 1, &[], Err(ConfigError::Rank { rank: 1, size: 1 })),
            (&[2, 2], 0, &[0], Err(ConfigError::Count { field: "peers", given: 1, size: 2 })),
            (&[2, 2], 0, &[1, 1], Err(ConfigError::Count { field: "peers", given: 2, size: 2 })),
        ] {
            let config = EngineConfig {
                layers_per_rank: layers.to_owned(),
                rank,
                peers: peers(ranks),
                ..EngineConfig::default()
            };
            assert_eq!(followers(&config).map(|followers| followers.len()), expected, "{config:?}");
        }
    }
}
