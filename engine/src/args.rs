//! What an agent tells an engine on its command line, and the settings that come of it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Parser, ValueEnum};
use thiserror::Error;

use crate::jaccl::{Devices, DevicesError, Topology};
use crate::tunnel::dial::CableEnds;

/// One rank of a group that serves a model. Agents start it; the flags say everything it knows.
#[derive(Clone, Debug, PartialEq, Eq, Parser)]
#[command(name = "russet-engine", version)]
pub struct Args {
    /// Folder of the model: config.json, safetensors, tokenizer.json and a chat template.
    #[arg(long)]
    pub model_dir: PathBuf,
    /// Name clients use for the model.
    #[arg(long)]
    pub served_model_name: String,
    /// This process's rank; 0 samples and answers requests.
    #[arg(long, default_value_t = 0)]
    pub rank: u32,
    /// Layers each rank holds, in rank order; left out, one rank holds all of them.
    #[arg(long, value_delimiter = ',')]
    pub layers_per_rank: Vec<u32>,
    /// Ranks that share every layer of a stage: rank r is member r % N of stage r / N.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub tensor_size: u32,
    /// How the members of a stage add up.
    #[arg(long, value_enum, default_value_t = Backend::Ring)]
    pub backend: Backend,
    /// Which formation of the group this is; a higher one replaces it.
    #[arg(long, default_value_t = 0)]
    pub epoch: u64,
    /// Uid of the ShardGroup.
    #[arg(long, default_value = "")]
    pub group_uid: String,
    /// Uid of the Shard.
    #[arg(long, default_value = "")]
    pub shard_uid: String,
    /// Where gateways and rank 0 reach this rank.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Addresses at which stages meet, in rank order; left out for one stage.
    #[arg(long, value_delimiter = ',')]
    pub ring_hosts: Vec<SocketAddr>,
    /// Addresses at which the members of a stage meet, in rank order; left out when stages have one.
    #[arg(long, value_delimiter = ',')]
    pub tensor_hosts: Vec<SocketAddr>,
    /// RDMA devices between the members of this rank's stage, for jaccl: JSON rows of cells of names.
    #[arg(long, default_value = "[]")]
    pub rdma_devices: Devices,
    /// How connections between ranks travel.
    #[arg(long, value_enum, default_value_t = Transport::Tunnel)]
    pub transport: Transport,
    /// Cables to nodes of other ranks, by the addresses at their ends: node=own>peer. Tunnels run over them.
    #[arg(long, value_delimiter = ',')]
    pub cables: Vec<CableEnds>,
    /// Where the ranks listen and on which nodes: rank=ip:port@node.
    #[arg(long, value_delimiter = ',')]
    pub peers: Vec<PeerRank>,
    /// Folder of this node's identity: tls.crt, tls.key, ca.crt.
    #[arg(long)]
    pub tls_dir: PathBuf,
    /// Unix socket for the agent.
    #[arg(long)]
    pub control_socket: PathBuf,
    /// Where /metrics, /healthz and /readyz are served.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub metrics_listen: SocketAddr,
    /// Tokens of one sequence, prompt and answer together.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    pub context_tokens: u32,
    /// Sequences answered at the same time.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub max_sequences: u32,
    /// Whether what prompts have in common is read once. It takes memory that running requests do not need.
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub prefix_cache: Switch,
    /// Folder in which this rank keeps that over restarts; safe to delete. Left out, it is kept in memory only.
    #[arg(long)]
    pub prefix_dir: Option<PathBuf>,
    /// Most bytes in that folder.
    #[arg(long, default_value_t = 8 << 30)]
    pub prefix_dir_bytes: u64,
    /// Who guesses the next tokens of answers, several of which are then checked at once. Answers are the same.
    #[arg(long, value_enum, default_value_t = Speculation::PromptLookup)]
    pub speculation: Speculation,
    /// Folder of a draft model, a smaller one with the same tokenizer, which guesses the next tokens of answers too. Rank
    /// 0 alone holds it.
    #[arg(long)]
    pub draft_dir: Option<PathBuf>,
    /// Whether the next tokens are begun before the last ones are known.
    #[arg(long, value_enum, default_value_t = OverlapScheduling::Auto)]
    pub look_ahead: OverlapScheduling,
    /// How ranks on Metal wait for what they add up; on one rank and on Linux it changes nothing.
    #[arg(long, value_enum, default_value_t = Fence::Default)]
    pub fence: Fence,
    /// Whether a GPU keeps its memory resident, as far as its driver recommends it; on Macs only.
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub wired_memory: Switch,
    /// Tokens of all sequences together, as far as there is memory for their keys and values; left out, as many as
    /// all of them may have.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub kv_tokens: Option<u64>,
    /// In what form keys and values of sequences are kept.
    #[arg(long, value_enum, default_value_t = KvCacheType::AsComputed)]
    pub kv_cache: KvCacheType,
    /// Element type of the weights in memory.
    #[arg(long, value_enum, default_value_t = Dtype::Auto)]
    pub dtype: Dtype,
    /// How the log is written.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log: LogFormat,
    /// Seconds after which an engine that no agent watches ends itself.
    #[arg(long, default_value_t = 60)]
    pub orphan_seconds: u64,
    /// Serve without the smoke prompt: for weights drawn at random, which choose tokens that no tokenizer has.
    #[arg(long, hide = true)]
    pub no_smoke_prompt: bool,
    /// Seconds that running requests get when the engine is asked to stop.
    #[arg(long, default_value_t = 30)]
    pub drain_seconds: u64,
}

/// How the members of a stage add up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// MLX's ring over TCP.
    Ring,
    /// RDMA over Thunderbolt, everybody with everybody.
    Jaccl,
    /// RDMA over Thunderbolt, each with its neighbours.
    JacclRing,
}

impl Backend {
    /// How the members are cabled, if over RDMA.
    pub fn topology(self) -> Option<Topology> {
        match self {
            Self::Ring => None,
            Self::Jaccl => Some(Topology::Mesh),
            Self::JacclRing => Some(Topology::Ring),
        }
    }
}

/// How connections between ranks travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// Inside mutual TLS.
    Tunnel,
    /// As MLX makes them, unauthenticated.
    Direct,
}

/// Whether something is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// It is.
    On,
    /// It is not.
    Off,
}

/// Who guesses the next tokens of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Speculation {
    /// Nobody.
    Off,
    /// What followed in the prompt or the answer when it had the same tokens before.
    PromptLookup,
}

/// Whether tokens are begun before those that they follow are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OverlapScheduling {
    /// Where it pays: on GPUs, and on a CPU where no other rank waits for this one. There to begin a batch is to compute
    /// it, and what came of the one before would be told that much later.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// How ranks on Metal wait for a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Fence {
    /// As MLX comes: safe, and about 180 µs for each.
    Default,
    /// The GPU looks for it itself: about 4 µs for each, and known to wedge GPUs now and then.
    Fast,
}

/// In what form keys and values of sequences are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum KvCacheType {
    /// As the model computes them.
    #[default]
    AsComputed,
    /// 8 bits each, with a scale and a bias for every group.
    Int8,
    /// 4 bits each, with a scale and a bias for every group.
    Int4,
}

/// Element type of the weights in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// As the files hold them.
    Auto,
    /// 32-bit floats, faster than 16-bit ones on a CPU.
    F32,
}

/// How the log is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For collectors.
    Json,
    /// For people.
    Text,
}

/// One rank of the group, as the others reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerRank {
    /// Its rank.
    pub rank: u32,
    /// Its gRPC address, `ip:port`.
    pub address: String,
    /// The node it runs on, whose certificate it shows.
    pub node: String,
}

/// Flags that contradict each other.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ArgsError {
    /// Ranks that do not fill the stages.
    #[error(
        "{ranks} ranks do not make stages of {members}; give --layers-per-rank a multiple of --tensor-size entries"
    )]
    Members {
        /// Ranks of the group.
        ranks: u32,
        /// Members of a stage.
        members: u32,
    },
    /// An address MLX cannot use by itself.
    #[error("{address} of {flag} is IPv6, which MLX's ring does not speak; use --transport tunnel or IPv4")]
    Family {
        /// The flag.
        flag: &'static str,
        /// The address.
        address: SocketAddr,
    },
    /// RDMA devices that do not connect the members.
    #[error(transparent)]
    Devices(#[from] DevicesError),
    /// Not `node=own>peer`.
    #[error("{0:?} is no cable; write node=own>peer, such as mac-2=192.0.2.1>192.0.2.2")]
    Cable(String),
    /// Not `rank=ip:port@node`.
    #[error("{0:?} is no peer; write rank=ip:port@node, such as 1=192.0.2.7:4100@mac-2")]
    Peer(String),
    /// The rank is outside the group.
    #[error("--rank {rank} is outside a group of {size}; ranks count from 0")]
    Rank {
        /// The rank.
        rank: u32,
        /// Ranks of the group.
        size: u32,
    },
    /// Every rank needs one address of each kind.
    #[error("{flag} names {given} ranks, but --layers-per-rank has {size}; name each rank once")]
    Count {
        /// The flag.
        flag: &'static str,
        /// Ranks it names.
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
    /// Ranks of the group.
    pub fn size(&self) -> u32 {
        self.layers_per_rank.len().max(1) as u32
    }

    /// Tokens of all sequences together.
    pub fn kv_tokens(&self) -> u64 {
        let most = u64::from(self.context_tokens) * u64::from(self.max_sequences);
        self.kv_tokens.map_or(most, |given| given.min(most))
    }

    /// The ranks above this one, in order, after a check that the flags fit each other.
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
