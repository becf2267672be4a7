//! The configuration of an engine: what its Shard, this node and the agent say, as the one struct that the
//! engine reads. It is written to a file for a new process and sent to a running one that joins the next
//! formation of its group.

use std::cmp::Reverse;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use russet_crds::{Backend, Link, LinkKind, Peer, Rendezvous, ShardSpec, Transport};
use russet_wire::engine_config::{AdapterDir, CableEnds, EngineConfig, PeerRank};
use thiserror::Error;

use super::stop;
use crate::join::identity::{self, IdentityError};

/// The file, in the engine's directory, from which its process reads its configuration.
const CONFIG_FILE: &str = "engine.json";

/// Maximum bytes of one rank's prefix cache on disk.
const MAX_PREFIX_CACHE_BYTES: u64 = 8 << 30;

/// All inputs of an engine's configuration, and its program.
#[derive(Clone, Debug)]
pub struct Launch<'a> {
    /// The engine's program.
    pub binary: &'a Path,
    /// The Shard.
    pub spec: &'a ShardSpec,
    /// UID of the Shard.
    pub shard_uid: &'a str,
    /// Listen addresses of this rank.
    pub rendezvous: &'a Rendezvous,
    /// Published directory of the model.
    pub model_dir: &'a Path,
    /// Published directory of the draft model.
    pub draft_dir: Option<&'a Path>,
    /// Published directories of the adapters, in the order of the Shard's.
    pub adapter_dirs: &'a [PathBuf],
    /// Directory with the node's certificate, key and CA.
    pub tls_dir: &'a Path,
    /// Control socket.
    pub socket: &'a Path,
    /// Links of the node.
    pub links: &'a [Link],
    /// Directory of its prefix cache.
    pub prefix_cache: PrefixCacheDir,
}

/// Directory of a prefix cache, with its size limit.
#[derive(Clone, Debug)]
pub struct PrefixCacheDir {
    /// The directory.
    pub folder: PathBuf,
    /// Maximum bytes in it.
    pub max_bytes: u64,
}

impl PrefixCacheDir {
    /// A subdirectory for each rank of groups of this size, so that a rank finds its own blocks again. It
    /// uses at most a sixteenth of the free space, because models need the space more.
    pub fn for_rank(folder: &Path, spec: &ShardSpec, free: u64) -> Self {
        let folder = folder.join(format!("{}-of-{}", spec.rank, spec.layers_per_rank.len()));
        Self { folder, max_bytes: (free / 16).min(MAX_PREFIX_CACHE_BYTES) }
    }
}

/// Why an engine has no configuration.
#[derive(Debug, Error)]
pub enum LaunchError {
    /// An address of the Shard that is none.
    #[error(
        "{field} of the Shard is {value:?}, which is no ip:port; delete the Shard, and its group is formed again"
    )]
    Address {
        /// The field.
        field: String,
        /// Its value.
        value: String,
    },
    /// An epoch below 0.
    #[error(
        "spec.epoch of the Shard is {0}, but epochs count up from 1; delete the Shard, and its group is formed again"
    )]
    Epoch(i64),
    /// A path that JSON cannot hold.
    #[error("the configuration cannot be written as JSON; give the agent a --data-dir in UTF-8")]
    Json(#[from] serde_json::Error),
    /// The file cannot be written.
    #[error(transparent)]
    File(#[from] IdentityError),
}

impl Launch<'_> {
    /// The engine's configuration for this formation.
    pub fn config(&self) -> Result<EngineConfig, LaunchError> {
        let Self {
            binary: _,
            spec,
            shard_uid,
            rendezvous,
            model_dir,
            draft_dir,
            adapter_dirs,
            tls_dir,
            socket,
            links,
            prefix_cache,
        } = self;
        let ShardSpec {
            group_ref: _,
            group_uid,
            served_model_name,
            model_ref: _,
            node_name: _,
            rank,
            layers_per_rank,
            tensor_size,
            backend,
            transport,
            rdma_devices,
            weight_bytes: _,
            kv_bytes: _,
            overhead_bytes: _,
            context_tokens,
            max_sequences,
            kv_tokens,
            engine,
            draft_model_ref: _,
            adapters,
            epoch,
            peers,
        } = spec;
        // The order of the list is not reliable; ranks decide.
        let mut peers: Vec<&Peer> = peers.iter().collect();
        peers.sort_by_key(|peer| peer.rank);
        let tensor_size = (*tensor_size).max(1);
        let (tensor_group, group) = (tensor_size > 1, peers.len() > 1);
        let hosts = |needed: bool, field: &str, host: fn(&Peer) -> &str| -> Result<Vec<_>, LaunchError> {
            let peers = peers.iter().filter(|_| needed);
            peers.map(|peer| address(&format!("spec.peers[{}].{field}", peer.rank), host(peer))).collect()
        };
        let rpc = hosts(group, "rpc", |peer| &peer.rpc)?;
        let ranks = peers.iter().zip(rpc);
        Ok(EngineConfig {
            model_dir: model_dir.to_path_buf(),
            served_model_name: served_model_name.clone(),
            rank: *rank,
            layers_per_rank: layers_per_rank.clone(),
            tensor_size,
            // A pipeline is a TCP ring, and needs no word for it.
            backend: if tensor_group { *backend } else { Backend::None },
            epoch: u64::try_from(*epoch).map_err(|_| LaunchError::Epoch(*epoch))?,
            group_uid: group_uid.clone(),
            shard_uid: (*shard_uid).to_owned(),
            listen: address("status.rendezvous.rpc", &rendezvous.rpc)?,
            ring_hosts: hosts(peers.len() as u32 > tensor_size, "ring", |peer| &peer.ring)?,
            tensor_hosts: hosts(tensor_group, "tensor", |peer| &peer.tensor)?,
            rdma_devices: if tensor_group { rdma_devices.clone() } else { Vec::new() },
            transport: if group { *transport } else { Transport::default() },
            cables: if group { cables(links, &peers) } else { Vec::new() },
            peers: ranks
                .map(|(peer, address)| PeerRank { rank: peer.rank, address, node: peer.node_name.clone() })
                .collect(),
            tls_dir: tls_dir.to_path_buf(),
            control_socket: socket.to_path_buf(),
            context_tokens: *context_tokens,
            max_sequences: *max_sequences,
            kv_tokens: *kv_tokens,
            options: *engine,
            prefix_dir: Some(prefix_cache.folder.clone()),
            prefix_dir_bytes: prefix_cache.max_bytes,
            draft_dir: draft_dir.map(Path::to_path_buf),
            adapters: adapters
                .iter()
                .zip(*adapter_dirs)
                .map(|(adapter, dir)| AdapterDir { name: adapter.name.clone(), dir: dir.clone() })
                .collect(),
            drain_seconds: stop::DRAIN_TIMEOUT.as_secs(),
            // The agent leaves the others as they are. The log is text: people read it, and log collectors
            // read the agent's own.
            ..EngineConfig::default()
        })
    }

    /// The configuration as the engine gets it.
    pub fn config_json(&self) -> Result<String, LaunchError> {
        Ok(self.config()?.to_json()?)
    }
}

/// Writes a configuration to the engine's directory, atomically and readable by this user alone; returns its path.
pub fn write_config(folder: &Path, json: &str) -> Result<PathBuf, LaunchError> {
    let path = folder.join(CONFIG_FILE);
    std::fs::create_dir_all(folder)
        .map_err(|source| IdentityError::Io { path: folder.to_owned(), source })?;
    identity::write(&path, json)?;
    Ok(path)
}

fn address(field: &str, value: &str) -> Result<SocketAddr, LaunchError> {
    value.parse().map_err(|_| LaunchError::Address { field: field.to_owned(), value: value.to_owned() })
}

/// The cables to nodes of other ranks, the fastest first.
fn cables(links: &[Link], peers: &[&Peer]) -> Vec<CableEnds> {
    let leads = |link: &Link| peers.iter().any(|peer| peer.node_name == link.peer);
    let mut found: Vec<_> = carrying_ring(links).filter(|(link, ..)| leads(link)).collect();
    found.sort_by_key(|(link, ..)| {
        Reverse((link.measured.and_then(|measured| measured.bits_per_second), link.bits_per_second))
    });
    found.into_iter().map(|(link, own, peer)| CableEnds { node: link.peer.clone(), own, peer }).collect()
}

/// The cables that can carry a ring, with the addresses at their ends.
pub fn carrying_ring(links: &[Link]) -> impl Iterator<Item = (&Link, IpAddr, IpAddr)> {
    let cables = links.iter().filter(|link| link.kind == LinkKind::Thunderbolt);
    cables.filter_map(|link| Some((link, ip(&link.address)?, ip(&link.peer_address)?)))
}

fn ip(address: &Option<String>) -> Option<IpAddr> {
    address.as_ref()?.parse().ok()
}

/// Why this release cannot run a Shard: a field has a value that only newer releases know.
pub fn unsupported_field(spec: &ShardSpec) -> Option<String> {
    let unknown = match spec {
        ShardSpec { backend: Backend::Unknown, .. } => "spec.backend".to_owned(),
        ShardSpec { transport: Transport::Unknown, .. } => "spec.transport".to_owned(),
        _ => format!("spec.engine.{}", spec.engine.unknown()?),
    };
    let version = env!("CARGO_PKG_VERSION");
    Some(format!("{unknown} has a value of a newer release than this agent's {version}; update this node"))
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use russet_crds::{
        ADAPTERS, Adapter, DRAFT_MODEL, ENGINE_OPTIONS, EngineOptions, Fence, KvCacheType, LinkMeasured,
        Speculation,
    };
    use serde_json::{Value, json};

    use super::*;

    fn spec(ranks: u32) -> ShardSpec {
        let peer = |rank: u32| Peer {
            rank,
            node_name: format!("n{rank}"),
            rpc: format!("10.0.0.{rank}:1"),
            ring: format!("10.0.0.{rank}:2"),
            tensor: format!("10.0.0.{rank}:3"),
        };
        ShardSpec {
            group_uid: "g".into(),
            served_model_name: "chat".into(),
            rank: 0,
            layers_per_rank: vec![2; ranks as usize],
            epoch: 4,
            // Not in rank order.
            peers: (0..ranks).rev().map(peer).collect(),
            context_tokens: 512,
            max_sequences: 2,
            ..ShardSpec::default()
        }
    }

    /// Acts on the launch of a single rank.
    pub fn launched<T>(binary: &Path, act: impl FnOnce(&Launch<'_>) -> T) -> T {
        launched_with(binary, &spec(1), &[], act)
    }

    fn launched_with<T>(
        binary: &Path,
        spec: &ShardSpec,
        links: &[Link],
        act: impl FnOnce(&Launch<'_>) -> T,
    ) -> T {
        act(&Launch {
            binary,
            spec,
            shard_uid: "u",
            rendezvous: &Rendezvous {
                rpc: "10.0.0.0:1".into(),
                ring: "10.0.0.0:2".into(),
                tensor: "10.0.0.0:3".into(),
            },
            model_dir: Path::new("/m"),
            draft_dir: None,
            adapter_dirs: &[],
            tls_dir: Path::new("/t"),
            socket: Path::new("/s"),
            links,
            prefix_cache: PrefixCacheDir::for_rank(Path::new("/p"), spec, 64 << 30),
        })
    }

    fn config(spec: &ShardSpec) -> EngineConfig {
        launched_with(Path::new("e"), spec, &[], |launch| launch.config()).unwrap()
    }

    /// A pipeline of two, as an agent has written it.
    const PIPELINE: &str = r#"{
  "modelDir": "/m",
  "servedModelName": "chat",
  "rank": 0,
  "layersPerRank": [
    2,
    2
  ],
  "tensorSize": 1,
  "backend": "None",
  "epoch": 4,
  "groupUid": "g",
  "shardUid": "u",
  "listen": "10.0.0.0:1",
  "ringHosts": [
    "10.0.0.0:2",
    "10.0.0.1:2"
  ],
  "tensorHosts": [],
  "rdmaDevices": [],
  "transport": "Tunnel",
  "cables": [],
  "peers": [
    {
      "rank": 0,
      "address": "10.0.0.0:1",
      "node": "n0"
    },
    {
      "rank": 1,
      "address": "10.0.0.1:1",
      "node": "n1"
    }
  ],
  "tlsDir": "/t",
  "controlSocket": "/s",
  "metricsListen": "127.0.0.1:0",
  "contextTokens": 512,
  "maxSequences": 2,
  "kvTokens": null,
  "options": {},
  "prefixCache": true,
  "prefixDir": "/p/0-of-2",
  "prefixDirBytes": 4294967296,
  "draftDir": null,
  "adapters": [],
  "overlapScheduling": "Auto",
  "wiredMemory": true,
  "dtype": "Auto",
  "log": "Text",
  "orphanSeconds": 60,
  "smokePrompt": true,
  "drainSeconds": 30
}
"#;

    #[test]
    fn engine_config_is_a_private_file_in_the_engines_directory() {
        let engines = tempfile::tempdir().unwrap();
        let folder = engines.path().join("u");
        let json = |spec: &ShardSpec| {
            launched_with(Path::new("e"), spec, &[], |launch| launch.config_json().unwrap())
        };
        let path = write_config(&folder, &json(&spec(2))).unwrap();
        assert_eq!(path, folder.join("engine.json"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), PIPELINE);
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        // The next formation replaces it.
        let next = json(&ShardSpec { epoch: 5, ..spec(2) });
        assert_eq!(write_config(&folder, &next).unwrap(), path);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), next);
        assert_eq!(EngineConfig::from_json(&next).unwrap().epoch, 5);
    }

    #[test]
    fn engine_config_has_every_option_of_the_shard() {
        // Every option, by the kind's own names.
        let engine = json!({
            "kvCache": "Int4", "quantization": "Int8", "speculation": "Off", "fence": "Fast",
            "routerBroadcast": "On", "maxWaitingRequests": 3,
        });
        let options: EngineOptions = serde_json::from_value(engine.clone()).unwrap();
        let tried = |option: &&str| [ADAPTERS, DRAFT_MODEL].contains(option) || engine.get(*option).is_some();
        assert_eq!(ENGINE_OPTIONS.iter().find(|option| !tried(option)), None, "an option is not tried");
        let asked = ShardSpec { engine: options, kv_tokens: Some(700), ..spec(2) };
        let json = config(&asked).to_json().unwrap();
        assert_eq!(serde_json::from_str::<Value>(&json).unwrap()["options"], engine);
        let read = EngineConfig::from_json(&json).unwrap();
        assert_eq!((read.options, read.kv_tokens), (options, Some(700)));
    }

    #[test]
    fn rank_0_config_names_the_draft_model() {
        let draft = |draft_dir| {
            let spec = spec(2);
            launched_with(Path::new("e"), &spec, &[], |launch| {
                Launch { draft_dir, ..launch.clone() }.config().unwrap().draft_dir
            })
        };
        assert_eq!(draft(Some(Path::new("/d"))), Some("/d".into()));
        assert_eq!(draft(None), None);
    }

    #[test]
    fn every_rank_has_the_folders_of_its_adapters() {
        let adapter = |name: &str| Adapter { name: name.to_owned(), ..Adapter::default() };
        let spec = ShardSpec { adapters: vec![adapter("pirate"), adapter("clerk")], ..spec(2) };
        let dirs = [PathBuf::from("/a"), PathBuf::from("/b")];
        let config = launched_with(Path::new("e"), &spec, &[], |launch| {
            Launch { adapter_dirs: &dirs, ..launch.clone() }.config().unwrap()
        });
        let dir = |name: &str, dir: &str| AdapterDir { name: name.to_owned(), dir: dir.into() };
        assert_eq!(config.adapters, [dir("pirate", "/a"), dir("clerk", "/b")]);
    }

    #[test]
    fn engine_config_lists_cables_fastest_first() {
        let link = |peer: &str, number: u32, bits: Option<u64>| Link {
            peer: peer.to_owned(),
            kind: LinkKind::Thunderbolt,
            address: Some(format!("192.0.2.{number}")),
            peer_address: Some(format!("192.0.2.{}", number + 1)),
            measured: bits
                .map(|bits| LinkMeasured { bits_per_second: Some(bits), ..LinkMeasured::default() }),
            ..Link::default()
        };
        let lacking = Link { address: None, ..link("n1", 21, None) };
        let ethernet = Link { kind: LinkKind::Ethernet, ..link("n1", 25, None) };
        let links = [
            link("n1", 1, None),
            link("n1", 5, Some(7)),
            link("n1", 9, Some(8)),
            link("n7", 13, None),
            lacking,
            ethernet,
        ];
        let cables = |ranks| {
            launched_with(Path::new("e"), &spec(ranks), &links, |launch| launch.config()).unwrap().cables
        };
        let cable = |number: u8| CableEnds {
            node: "n1".into(),
            own: [192, 0, 2, number].into(),
            peer: [192, 0, 2, number + 1].into(),
        };
        assert_eq!(cables(2), [9, 5, 1].map(cable));
        assert_eq!(cables(1), []);
    }

    #[test]
    fn engine_config_describes_the_tensor_group() {
        let cell = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let matrix = vec![vec![cell(&[]), cell(&["rdma_en4"])], vec![cell(&["rdma_en5"]), cell(&[])]];
        let hosts = |port: u16, ranks: u8| -> Vec<SocketAddr> {
            (0..ranks).map(|rank| ([10, 0, 0, rank], port).into()).collect()
        };
        for (ranks, backend, devices, transport, ring_hosts) in [
            (2, Backend::Ring, vec![], Transport::Tunnel, vec![]),
            (2, Backend::Jaccl, matrix.clone(), Transport::Direct, vec![]),
            (4, Backend::JacclRing, matrix, Transport::Tunnel, hosts(2, 4)),
        ] {
            let rdma_devices = devices.clone();
            let spec = ShardSpec { tensor_size: 2, backend, rdma_devices, transport, ..spec(ranks) };
            assert_eq!(unsupported_field(&spec), None);
            let config = config(&spec);
            assert_eq!((config.tensor_size, config.backend, config.transport), (2, backend, transport));
            assert_eq!((config.rdma_devices, config.ring_hosts), (devices, ring_hosts));
            assert_eq!(config.tensor_hosts, hosts(3, ranks as u8));
        }
        let alone = config(&ShardSpec { transport: Transport::Direct, ..spec(1) });
        assert_eq!((alone.ring_hosts, alone.tensor_hosts, alone.peers), (vec![], vec![], vec![]));
    }

    #[test]
    fn shard_without_usable_addresses_is_refused_by_field() {
        let mut holed = spec(2);
        holed.peers[0].ring = "n1:2".into();
        for (spec, said) in [
            (holed, "spec.peers[1].ring of the Shard is \"n1:2\", which is no ip:port"),
            (ShardSpec { epoch: -1, ..spec(1) }, "spec.epoch of the Shard is -1"),
        ] {
            let error = launched_with(Path::new("e"), &spec, &[], |launch| launch.config()).unwrap_err();
            assert!(error.to_string().starts_with(said), "{error}");
        }
    }

    #[test]
    fn unknown_enum_values_are_refused_by_field_name() {
        let with_kv_cache = |kv_cache| EngineOptions { kv_cache, ..EngineOptions::default() };
        let unheard = EngineOptions { speculation: Speculation::Unknown, ..EngineOptions::default() };
        let electric = EngineOptions { fence: Fence::Unknown, ..EngineOptions::default() };
        for (backend, transport, engine, field) in [
            (Backend::Unknown, Transport::Tunnel, with_kv_cache(KvCacheType::Int8), "spec.backend"),
            (Backend::Ring, Transport::Unknown, with_kv_cache(KvCacheType::Int8), "spec.transport"),
            (Backend::Ring, Transport::Direct, with_kv_cache(KvCacheType::Unknown), "spec.engine.kvCache"),
            (Backend::Ring, Transport::Direct, unheard, "spec.engine.speculation"),
            (Backend::Ring, Transport::Direct, electric, "spec.engine.fence"),
        ] {
            let why = unsupported_field(&ShardSpec { backend, transport, engine, ..spec(2) }).unwrap();
            assert!(why.starts_with(field) && why.ends_with("update this node"), "{why}");
        }
    }
}
