//! Command-line flags of an engine process, and the settings derived from them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Parser, ValueEnum};
use thiserror::Error;

use crate::jaccl::{Devices, DevicesError, Topology};
use crate::tunnel::dial::CableEnds;

/// One rank of a group that serves a model. The agent starts it; the flags hold its whole configuration.
#[derive(Clone, Debug, PartialEq, Eq, Parser)]
#[command(name = "russet-engine", version)]
pub struct Args {
    /// Model folder: config.json, safetensors, tokenizer.json and a chat template.
    #[arg(long)]
    pub model_dir: PathBuf,
    /// Name clients use for the model.
    #[arg(long)]
    pub served_model_name: String,
    /// This process's rank; 0 samples and answers requests.
    #[arg(long, default_value_t = 0)]
    pub rank: u32,
    /// Layers per pipeline stage, in rank order; without it, one stage holds all layers.
    #[arg(long, value_delimiter = ',')]
    pub layers_per_rank: Vec<u32>,
    /// Tensor parallel size: rank r is tensor rank r % N of stage r / N.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub tensor_size: u32,
    /// Transport for tensor parallel collectives.
    #[arg(long, value_enum, default_value_t = Backend::Ring)]
    pub backend: Backend,
    /// Epoch of the group: the number of this formation. A higher epoch replaces it.
    #[arg(long, default_value_t = 0)]
    pub epoch: u64,
    /// Uid of the ShardGroup.
    #[arg(long, default_value = "")]
    pub group_uid: String,
    /// Uid of the Shard.
    #[arg(long, default_value = "")]
    pub shard_uid: String,
    /// gRPC address at which gateways and rank 0 reach this rank.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Addresses of the pipeline ring, in rank order; omitted when there is one stage.
    #[arg(long, value_delimiter = ',')]
    pub ring_hosts: Vec<SocketAddr>,
    /// Addresses of the tensor parallel ring, in rank order; omitted when a stage has one rank.
    #[arg(long, value_delimiter = ',')]
    pub tensor_hosts: Vec<SocketAddr>,
    /// RDMA devices between the tensor ranks of this stage, for jaccl: a JSON matrix, each cell a list of
    /// device names.
    #[arg(long, default_value = "[]")]
    pub rdma_devices: Devices,
    /// Transport of connections between ranks.
    #[arg(long, value_enum, default_value_t = Transport::Tunnel)]
    pub transport: Transport,
    /// Cables to the nodes of other ranks, by the addresses at their ends: node=own>peer. Tunnels run over
    /// them.
    #[arg(long, value_delimiter = ',')]
    pub cables: Vec<CableEnds>,
    /// gRPC addresses and nodes of the ranks: rank=ip:port@node.
    #[arg(long, value_delimiter = ',')]
    pub peers: Vec<PeerRank>,
    /// Folder with the node's identity: tls.crt, tls.key, ca.crt.
    #[arg(long)]
    pub tls_dir: PathBuf,
    /// Unix socket of the Control service, which the agent uses.
    #[arg(long)]
    pub control_socket: PathBuf,
    /// Address of /metrics, /healthz and /readyz.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub metrics_listen: SocketAddr,
    /// Maximum tokens of one sequence, prompt and output together.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    pub context_tokens: u32,
    /// Maximum sequences that run at the same time.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub max_sequences: u32,
    /// Prefix cache: a prefix shared by several prompts is prefilled once. It uses memory that running
    /// requests do not need.
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub prefix_cache: Switch,
    /// Folder of the prefix cache's disk tier, which survives restarts; safe to delete. Without it, the
    /// prefix cache is in memory only.
    #[arg(long)]
    pub prefix_dir: Option<PathBuf>,
    /// Maximum size of that folder in bytes.
    #[arg(long, default_value_t = 8 << 30)]
    pub prefix_dir_bytes: u64,
    /// Speculative decoding: draft tokens are proposed and several of them verified in one batch. The output
    /// is the same.
    #[arg(long, value_enum, default_value_t = Speculation::PromptLookup)]
    pub speculation: Speculation,
    /// Folder of a draft model for speculative decoding: a smaller model with the same tokenizer. Only rank 0
    /// loads it.
    #[arg(long)]
    pub draft_dir: Option<PathBuf>,
    /// Overlap scheduling: a decode step starts before the tokens of the previous step are known.
    #[arg(long, value_enum, default_value_t = OverlapScheduling::Auto)]
    pub look_ahead: OverlapScheduling,
    /// How ranks on Metal wait for a collective; no effect with one rank or on Linux.
    #[arg(long, value_enum, default_value_t = Fence::Default)]
    pub fence: Fence,
    /// Whether the GPU keeps its memory resident, up to the driver's recommendation; macOS only.
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub wired_memory: Switch,
    /// KV-cache capacity in tokens, summed over all sequences; without it, enough for every sequence at full
    /// context.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub kv_tokens: Option<u64>,
    /// Format of the KV cache.
    #[arg(long, value_enum, default_value_t = KvCacheType::AsComputed)]
    pub kv_cache: KvCacheType,
    /// Element type of the weights in memory.
    #[arg(long, value_enum, default_value_t = Dtype::Auto)]
    pub dtype: Dtype,
    /// Log format.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log: LogFormat,
    /// Seconds without a watching agent after which the engine exits.
    #[arg(long, default_value_t = 60)]
    pub orphan_seconds: u64,
    /// Skip the smoke prompt: for random weights, which choose tokens that the tokenizer does not have.
    #[arg(long, hide = true)]
    pub no_smoke_prompt: bool,
    /// Seconds that running requests get to finish when the engine is asked to stop.
    #[arg(long, default_value_t = 30)]
    pub drain_seconds: u64,
}

/// Transport for tensor parallel collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// MLX's ring over TCP.
    Ring,
    /// RDMA over Thunderbolt, full mesh.
    Jaccl,
    /// RDMA over Thunderbolt, ring of neighbours.
    JacclRing,
}

impl Backend {
    /// Cable topology of the tensor ranks; `None` without RDMA.
    pub fn topology(self) -> Option<Topology> {
        match self {
            Self::Ring => None,
            Self::Jaccl => Some(Topology::Mesh),
            Self::JacclRing => Some(Topology::Ring),
        }
    }
}

/// Transport of connections between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// Mutual TLS.
    Tunnel,
    /// MLX's own connections, unauthenticated.
    Direct,
}

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}

/// Source of draft tokens, apart from a draft model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Speculation {
    /// None.
    Off,
    /// Prompt lookup: the tokens that followed the same n-gram earlier in the prompt or output.
    PromptLookup,
}

/// Overlap scheduling: whether a decode step starts before the tokens of the previous step are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OverlapScheduling {
    /// On where it pays: on a GPU, and on a CPU with a single rank. With several ranks on a CPU, starting a
    /// batch means computing it, which would delay the output of the previous batch.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// How ranks on Metal wait for a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Fence {
    /// MLX's default fence: safe, about 180 µs for each collective.
    Default,
    /// The GPU polls for the result: about 4 µs for each collective; known to wedge GPUs occasionally.
    Fast,
}

/// Format of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum KvCacheType {
    /// The element type that the model computes.
    #[default]
    AsComputed,
    /// 8 bits per element, with a scale and a bias per group.
    Int8,
    /// 4 bits per element, with a scale and a bias per group.
    Int4,
}

/// Element type of the weights in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// The type stored in the files.
    Auto,
    /// 32-bit floats, faster than 16-bit ones on a CPU.
    F32,
}

/// Log format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// JSON, for log collectors.
    Json,
    /// Text, for people.
    Text,
}

/// A rank of the group, as the other ranks reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerRank {
    /// Its rank.
    pub rank: u32,
    /// Its gRPC address, `ip:port`.
    pub address: String,
    /// The node it runs on, which its certificate must name.
    pub node: String,
}

/// Flags that contradict each other.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ArgsError {
    /// The number of ranks is no multiple of the tensor parallel size.
    #[error(
        "{ranks} ranks do not make stages of {members}; give --layers-per-rank a multiple of --tensor-size entries"
    )]
    Members {
        /// Ranks of the group.
        ranks: u32,
        /// Ranks per stage.
        members: u32,
    },
    /// An address family that MLX's ring does not support.
    #[error("{address} of {flag} is IPv6, which MLX's ring does not speak; use --transport tunnel or IPv4")]
    Family {
        /// The flag.
        flag: &'static str,
        /// The address.
        address: SocketAddr,
    },
    /// RDMA devices that do not connect the tensor ranks.
    #[error(transparent)]
    Devices(#[from] DevicesError),
    /// A `--cables` value that is not `node=own>peer`.
    #[error("{0:?} is no cable; write node=own>peer, such as mac-2=192.0.2.1>192.0.2.2")]
    Cable(String),
    /// A `--peers` value that is not `rank=ip:port@node`.
    #[error("{0:?} is no peer; write rank=ip:port@node, such as 1=192.0.2.7:4100@mac-2")]
    Peer(String),
    /// A rank outside the group.
    #[error("--rank {rank} is outside a group of {size}; ranks count from 0")]
    Rank {
        /// The rank.
        rank: u32,
        /// Ranks of the group.
        size: u32,
    },
    /// A flag that does not have one address per rank.
    #[error("{flag} names {given} ranks, but --layers-per-rank has {size}; name each rank once")]
    Count {
        /// The flag.
        flag: &'static str,
        /// Addresses given.
        given: usize,
        /// Ranks of the group.
        size: u32,
    },
}

impl FromStr for PeerRank {
    type Err = ArgsError;

    fn from_str(text: &str) -> Result<Self, ArgsError> {
        let parse = || {
            let (rank, rest) = text.split_once('=')?;
            let (address, node) = rest.split_once('@')?;
            let address: SocketAddr = address.parse().ok()?;
            (!node.is_empty()).then_some(Self {
                rank: rank.parse().ok()?,
                address: address.to_string(),
                node: node.to_owned(),
            })
        };
        parse().ok_or_else(|| ArgsError::Peer(text.to_owned()))
    }
}

impl Args {
    /// Number of ranks in the group.
    pub fn size(&self) -> u32 {
        self.layers_per_rank.len().max(1) as u32
    }

    /// KV-cache capacity in tokens, summed over all sequences.
    pub fn kv_tokens(&self) -> u64 {
        let most = u64::from(self.context_tokens) * u64::from(self.max_sequences);
        self.kv_tokens.map_or(most, |given| given.min(most))
    }

    /// The higher ranks, in rank order. Fails if the flags contradict each other.
    pub fn followers(&self) -> Result<Vec<PeerRank>, ArgsError> {
        let size = self.size();
        if self.rank >= size {
            return Err(ArgsError::Rank { rank: self.rank, size });
        }
        if size == 1 {
            return Ok(Vec::new());
        }
        let mut followers: Vec<PeerRank> = self.peers.iter().filter(|peer| peer.rank > 0).cloned().collect();
        followers.sort_by_key(|peer| peer.rank);
        if self.rank == 0 && !followers.iter().map(|peer| peer.rank).eq(1..size) {
            return Err(ArgsError::Count { flag: "--peers", given: self.peers.len(), size });
        }
        Ok(followers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(flags: &str) -> Args {
        let base = "russet-engine --model-dir /m --served-model-name m --tls-dir /t --control-socket /s";
        Args::try_parse_from(base.split(' ').chain(flags.split_whitespace())).unwrap()
    }

    #[test]
    fn a_group_needs_every_rank_once() {
        for (flags, expected) in [
            (String::new(), Ok(0)),
            ("--layers-per-rank 2,2 --peers 1=127.0.0.1:9@b,0=127.0.0.1:8@a".to_string(), Ok(1)),
            ("--layers-per-rank 2,2 --rank 1".to_string(), Ok(0)),
            ("--rank 1".into(), Err(ArgsError::Rank { rank: 1, size: 1 })),
            (
                "--layers-per-rank 2,2 --peers 0=127.0.0.1:8@a".to_string(),
                Err(ArgsError::Count { flag: "--peers", given: 1, size: 2 }),
            ),
            (
                "--layers-per-rank 2,2 --peers 1=127.0.0.1:8@a,1=127.0.0.1:9@a".to_string(),
                Err(ArgsError::Count { flag: "--peers", given: 2, size: 2 }),
            ),
        ] {
            assert_eq!(parse(&flags).followers().map(|followers| followers.len()), expected, "{flags}");
        }
    }

    #[test]
    fn kv_tokens_default_to_all_sequences_or_the_flag() {
        for (flags, expected) in [
            ("", 4 * 4096),
            ("--context-tokens 1000000 --max-sequences 1024", 1_024_000_000),
            ("--kv-tokens 5000", 5000),
            ("--kv-tokens 5000 --context-tokens 100", 400),
        ] {
            assert_eq!(parse(flags).kv_tokens(), expected, "{flags}");
        }
    }

    #[test]
    fn a_peer_names_rank_address_and_node() {
        let peer = PeerRank { rank: 1, address: "10.0.0.2:4100".into(), node: "mac-2".into() };
        assert_eq!("1=10.0.0.2:4100@mac-2".parse(), Ok(peer));
        for wrong in ["", "1", "1=10.0.0.2", "1=10.0.0.2:4100", "1=10.0.0.2:4100@", "x=10.0.0.2:4100@m"] {
            assert_eq!(wrong.parse::<PeerRank>(), Err(ArgsError::Peer(wrong.to_owned())));
        }
    }
}
