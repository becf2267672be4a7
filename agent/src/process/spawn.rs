//! Starts an engine: arguments, addresses, log. The engine leads its own process group and is not killed with
//! the agent, so that it outlives it.

use std::cmp::Reverse;
use std::fs::{File, Permissions};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use russet_crds::{
    Backend, EngineOptions, Fence, KvCacheType, Link, LinkKind, Peer, Rendezvous, ShardSpec, Speculation,
    Transport,
};
use russet_rpc::ports;
use tokio::net::TcpSocket;
use tokio::process::{Child, Command};

use super::stop;

/// Maximum bytes of one rank's prefix cache on disk.
const MAX_PREFIX_CACHE_BYTES: u64 = 8 << 30;

/// Directory, beside those of the engines, in which MLX on a CPU caches its compiled kernels. By default MLX
/// uses the system's temporary directory, and would run what another user has put there under the right name.
const KERNEL_CACHE_DIR: &str = ".kernels";

/// All inputs of an engine's start.
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

/// Reserved addresses: bound, but not listened on, until the engine binds them.
#[derive(Debug)]
pub struct ReservedAddresses {
    rendezvous: Rendezvous,
    sockets: [TcpSocket; 3],
}

impl ReservedAddresses {
    /// Reserves three free ports of `address`.
    pub fn allocate(address: IpAddr) -> io::Result<Self> {
        Self::from_sockets([
            ports::bind_free(address)?,
            ports::bind_free(address)?,
            ports::bind_free(address)?,
        ])
    }

    /// Reserves the ports that an earlier run of the agent published, if they are still free.
    pub fn rebind(rendezvous: &Rendezvous) -> io::Result<Self> {
        let parse = |text: &str| text.parse::<SocketAddr>().map_err(io::Error::other);
        let bind = |address: SocketAddr| {
            let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
            socket.bind(address).map_err(|error| {
                io::Error::new(error.kind(), format!("{address} cannot be taken: {error}"))
            })?;
            Ok::<_, io::Error>(socket)
        };
        let [rpc, ring, tensor] =
            [parse(&rendezvous.rpc)?, parse(&rendezvous.ring)?, parse(&rendezvous.tensor)?];
        Self::from_sockets([bind(rpc)?, bind(ring)?, bind(tensor)?])
    }

    fn from_sockets(sockets: [TcpSocket; 3]) -> io::Result<Self> {
        let rendezvous = Rendezvous {
            rpc: sockets[0].local_addr()?.to_string(),
            ring: sockets[1].local_addr()?.to_string(),
            tensor: sockets[2].local_addr()?.to_string(),
        };
        Ok(Self { rendezvous, sockets })
    }

    /// Addresses at which other ranks reach this one.
    pub fn rendezvous(&self) -> &Rendezvous {
        &self.rendezvous
    }

    /// Frees the ports; the engine binds them immediately afterwards.
    pub fn release(self) {
        drop(self.sockets);
    }
}

/// The engine's arguments.
pub fn arguments(launch: &Launch<'_>) -> Vec<String> {
    let Launch {
        binary: _,
        spec,
        shard_uid,
        rendezvous,
        model_dir,
        draft_dir,
        tls_dir,
        socket,
        links,
        prefix_cache: prefixes,
    } = launch;
    let layers: Vec<String> = spec.layers_per_rank.iter().map(u32::to_string).collect();
    let mut peers = spec.peers.clone();
    peers.sort_by_key(|peer| peer.rank);
    let mut arguments = Vec::new();
    let mut flag = |name: &str, value: String| arguments.extend([format!("--{name}"), value]);
    flag("model-dir", model_dir.display().to_string());
    if let Some(draft_dir) = draft_dir {
        flag("draft-dir", draft_dir.display().to_string());
    }
    flag("served-model-name", spec.served_model_name.clone());
    flag("rank", spec.rank.to_string());
    flag("layers-per-rank", layers.join(","));
    flag("epoch", spec.epoch.to_string());
    flag("group-uid", spec.group_uid.clone());
    flag("shard-uid", (*shard_uid).to_owned());
    flag("listen", rendezvous.rpc.clone());
    let size = spec.tensor_size.max(1);
    let hosts = |address: fn(&Peer) -> &str| peers.iter().map(address).collect::<Vec<_>>().join(",");
    if size > 1 {
        flag("tensor-size", size.to_string());
        if let Some(backend) = backend(spec.backend) {
            flag("backend", backend.to_owned());
        }
        flag("tensor-hosts", hosts(|peer| &peer.tensor));
        if !spec.rdma_devices.is_empty() {
            flag("rdma-devices", serde_json::json!(spec.rdma_devices).to_string());
        }
    }
    if peers.len() as u32 > size {
        flag("ring-hosts", hosts(|peer| &peer.ring));
    }
    if peers.len() > 1 {
        if spec.transport == Transport::Direct {
            flag("transport", "direct".to_owned());
        }
        let cables = cables(links, &peers);
        if !cables.is_empty() {
            flag("cables", cables.join(","));
        }
        let peers: Vec<String> =
            peers.iter().map(|peer| format!("{}={}@{}", peer.rank, peer.rpc, peer.node_name)).collect();
        flag("peers", peers.join(","));
    }
    flag("tls-dir", tls_dir.display().to_string());
    flag("control-socket", socket.display().to_string());
    flag("metrics-listen", "127.0.0.1:0".to_owned());
    flag("context-tokens", spec.context_tokens.to_string());
    flag("max-sequences", spec.max_sequences.to_string());
    if let Some(tokens) = spec.kv_tokens {
        flag("kv-tokens", tokens.to_string());
    }
    let EngineOptions { kv_cache: cache_type, speculation: speculation_mode, fence: fence_mode } =
        spec.engine;
    if let Some(cache_type) = kv_cache(cache_type) {
        flag("kv-cache", cache_type.to_owned());
    }
    if let Some(speculation_mode) = speculation(speculation_mode) {
        flag("speculation", speculation_mode.to_owned());
    }
    if let Some(fence_mode) = fence(fence_mode) {
        flag("fence", fence_mode.to_owned());
    }
    flag("prefix-dir", prefixes.folder.display().to_string());
    flag("prefix-dir-bytes", prefixes.max_bytes.to_string());
    flag("drain-seconds", stop::DRAIN_TIMEOUT.as_secs().to_string());
    flag("dtype", "auto".to_owned());
    // People read this file; log collectors read the agent's own log.
    flag("log", "text".to_owned());
    arguments
}

/// The `--cables` arguments: cables to nodes of other ranks, the fastest first.
fn cables(links: &[Link], peers: &[Peer]) -> Vec<String> {
    let leads = |link: &Link| peers.iter().any(|peer| peer.node_name == link.peer);
    let mut found: Vec<_> = carrying_ring(links).filter(|(link, ..)| leads(link)).collect();
    found.sort_by_key(|(link, ..)| {
        Reverse((link.measured.and_then(|measured| measured.bits_per_second), link.bits_per_second))
    });
    found.into_iter().map(|(link, own, peer)| format!("{}={own}>{peer}", link.peer)).collect()
}

/// The cables that can carry a ring, with the addresses at their ends.
pub fn carrying_ring(links: &[Link]) -> impl Iterator<Item = (&Link, IpAddr, IpAddr)> {
    let cables = links.iter().filter(|link| link.kind == LinkKind::Thunderbolt);
    cables.filter_map(|link| Some((link, ip(&link.address)?, ip(&link.peer_address)?)))
}

fn ip(address: &Option<String>) -> Option<IpAddr> {
    address.as_ref()?.parse().ok()
}

/// The engine's argument for a backend; `None` if no engine of this release has it.
fn backend(backend: Backend) -> Option<&'static str> {
    match backend {
        Backend::None | Backend::Ring => Some("ring"),
        Backend::Jaccl => Some("jaccl"),
        Backend::JacclRing => Some("jaccl-ring"),
        Backend::Unknown => None,
    }
}

/// The engine's argument for a KV cache type; `None` if no engine of this release has it.
fn kv_cache(cache_type: KvCacheType) -> Option<&'static str> {
    match cache_type {
        KvCacheType::AsComputed => Some("as-computed"),
        KvCacheType::Int8 => Some("int8"),
        KvCacheType::Int4 => Some("int4"),
        KvCacheType::Unknown => None,
    }
}

/// The engine's argument for a speculation mode; `None` if no engine of this release has it.
fn speculation(mode: Speculation) -> Option<&'static str> {
    match mode {
        Speculation::PromptLookup => Some("prompt-lookup"),
        Speculation::Off => Some("off"),
        Speculation::Unknown => None,
    }
}

/// The engine's argument for a fence mode (how ranks wait for sums); `None` if no engine of this release has
/// it.
fn fence(mode: Fence) -> Option<&'static str> {
    match mode {
        Fence::Default => Some("default"),
        Fence::Fast => Some("fast"),
        Fence::Unknown => None,
    }
}

/// Why this release cannot run a Shard: a field has a value that only newer releases know.
pub fn unsupported_field(spec: &ShardSpec) -> Option<String> {
    let words = [
        ("spec.backend", backend(spec.backend).is_some()),
        ("spec.transport", spec.transport != Transport::Unknown),
        ("spec.engine.kvCache", kv_cache(spec.engine.kv_cache).is_some()),
        ("spec.engine.speculation", speculation(spec.engine.speculation).is_some()),
        ("spec.engine.fence", fence(spec.engine.fence).is_some()),
    ];
    let (unknown, _) = words.into_iter().find(|(_, known)| !known)?;
    let version = env!("CARGO_PKG_VERSION");
    Some(format!("{unknown} has a value of a newer release than this agent's {version}; update this node"))
}

/// Starts the engine with its output appended to `<folder>/engine.log`.
pub fn start(launch: &Launch<'_>, folder: &Path) -> io::Result<Child> {
    std::fs::create_dir_all(folder)?;
    // A stale socket of an earlier engine would make the new bind fail.
    std::fs::remove_file(launch.socket).ok();
    let output = russet_telemetry::logfile::open(&log_path(folder))?;
    let kernels = folder.with_file_name(KERNEL_CACHE_DIR);
    std::fs::create_dir_all(&kernels)?;
    std::fs::set_permissions(&kernels, Permissions::from_mode(0o700))?;
    Command::new(launch.binary)
        .args(arguments(launch))
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        .current_dir(folder)
        .env("TMPDIR", kernels)
        // Signals for the agent's terminal must not reach the engine.
        .process_group(0)
        .kill_on_drop(false)
        .spawn()
}

/// The engine's log file.
pub fn log_path(folder: &Path) -> PathBuf {
    folder.join("engine.log")
}

/// The last line that an engine logged, for the message about its exit.
pub fn last_log_line(folder: &Path) -> String {
    use std::io::{Read as _, Seek as _, SeekFrom};
    let Ok(mut file) = File::open(log_path(folder)) else { return String::new() };
    let length = file.metadata().map_or(0, |metadata| metadata.len());
    file.seek(SeekFrom::Start(length.saturating_sub(2048))).ok();
    let mut bytes = Vec::new();
    file.take(2048).read_to_end(&mut bytes).ok();
    let text = String::from_utf8_lossy(&bytes);
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    last.chars().take(400).collect()
}

/// The engine's program: as configured, by `RUSSET_ENGINE`, or beside the running program.
pub fn binary(configured: Option<&Path>) -> PathBuf {
    if let Some(path) = configured {
        return path.to_owned();
    }
    if let Some(path) = std::env::var_os("RUSSET_ENGINE") {
        return path.into();
    }
    let beside = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.join("russet-engine")));
    beside.unwrap_or_else(|| "russet-engine".into())
}

#[cfg(test)]
mod tests {
    use russet_crds::LinkMeasured;

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
            // The order of the list is not reliable; ranks decide.
            peers: (0..ranks).rev().map(peer).collect(),
            context_tokens: 512,
            max_sequences: 2,
            ..ShardSpec::default()
        }
    }

    fn line(ranks: u32) -> String {
        line_of(&spec(ranks))
    }

    fn line_of(spec: &ShardSpec) -> String {
        launched(Path::new("e"), spec, |launch| arguments(launch).join(" "))
    }

    #[test]
    fn rank_0_arguments_name_the_draft_model() {
        let flags = |draft_dir| {
            launched(Path::new("e"), &spec(2), |launch| arguments(&Launch { draft_dir, ..launch.clone() }))
        };
        assert!(
            flags(Some(Path::new("/d"))).join(" ").starts_with("--model-dir /m --draft-dir /d --served-")
        );
        assert!(!flags(None).join(" ").contains("draft"));
    }

    fn launched<T>(binary: &Path, spec: &ShardSpec, act: impl FnOnce(&Launch<'_>) -> T) -> T {
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
            tls_dir: Path::new("/t"),
            socket: Path::new("/s"),
            links: &[],
            prefix_cache: PrefixCacheDir::for_rank(Path::new("/p"), spec, 64 << 30),
        })
    }

    #[tokio::test]
    async fn kernel_cache_is_private_to_the_user() {
        let engines = tempfile::tempdir().unwrap();
        let program = engines.path().join("engine");
        std::fs::write(&program, "#!/bin/sh\nstat -c '%a %n' \"$TMPDIR\"\n").unwrap();
        std::fs::set_permissions(&program, Permissions::from_mode(0o700)).unwrap();
        let folder = engines.path().join("u");
        let mut child = launched(&program, &spec(1), |launch| start(launch, &folder)).unwrap();
        assert!(child.wait().await.unwrap().success());
        let said = std::fs::read_to_string(log_path(&folder)).unwrap();
        assert_eq!(said.trim(), format!("700 {}", engines.path().join(".kernels").display()));
    }

    #[test]
    fn engine_arguments_list_layers_and_peers_in_rank_order() {
        assert_eq!(
            line(2),
            "--model-dir /m --served-model-name chat --rank 0 --layers-per-rank 2,2 --epoch 4 --group-uid g \
             --shard-uid u --listen 10.0.0.0:1 --ring-hosts 10.0.0.0:2,10.0.0.1:2 \
             --peers 0=10.0.0.0:1@n0,1=10.0.0.1:1@n1 --tls-dir /t --control-socket /s --metrics-listen 127.0.0.1:0 \
             --context-tokens 512 --max-sequences 2 --kv-cache as-computed --speculation prompt-lookup --fence default --prefix-dir /p/0-of-2 --prefix-dir-bytes 4294967296 --drain-seconds 30 \
             --dtype auto --log text"
        );
        assert!(!line(1).contains("--ring-hosts"), "one rank needs no ring");
        let less = line_of(&ShardSpec { kv_tokens: Some(700), ..spec(2) });
        assert!(less.contains("--max-sequences 2 --kv-tokens 700 "), "{less}");
    }

    #[test]
    fn engine_arguments_list_cables_fastest_first() {
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
        let flags = |ranks| {
            let spec = spec(ranks);
            launched(Path::new("e"), &spec, |launch| arguments(&Launch { links: &links, ..launch.clone() }))
                .join(" ")
        };
        let cables = "--cables n1=192.0.2.9>192.0.2.10,n1=192.0.2.5>192.0.2.6,n1=192.0.2.1>192.0.2.2 --peers";
        assert!(flags(2).contains(cables), "{}", flags(2));
        assert!(!flags(1).contains("--cables"));
    }

    #[test]
    fn engine_arguments_describe_the_tensor_group() {
        const TENSOR: &str = "--tensor-hosts 10.0.0.0:3,10.0.0.1:3";
        let cell = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let matrix = vec![vec![cell(&[]), cell(&["rdma_en4"])], vec![cell(&["rdma_en5"]), cell(&[])]];
        for (ranks, backend, devices, transport, there, absent) in [
            (
                2,
                Backend::Ring,
                vec![],
                Transport::Tunnel,
                vec!["--tensor-size 2 --backend ring", TENSOR],
                vec!["--ring-hosts", "--rdma", "--transport"],
            ),
            (
                2,
                Backend::Jaccl,
                matrix.clone(),
                Transport::Direct,
                vec![
                    "--backend jaccl ",
                    r#"--rdma-devices [[[],["rdma_en4"]],[["rdma_en5"],[]]]"#,
                    "--transport direct",
                ],
                vec!["--ring-hosts"],
            ),
            (
                4,
                Backend::JacclRing,
                matrix,
                Transport::Tunnel,
                vec![
                    "--backend jaccl-ring ",
                    "--ring-hosts 10.0.0.0:2,10.0.0.1:2,10.0.0.2:2,10.0.0.3:2",
                    "--tensor-hosts 10.0.0.0:3,10.0.0.1:3,10.0.0.2:3,10.0.0.3:3",
                ],
                vec![],
            ),
        ] {
            let spec = ShardSpec { tensor_size: 2, backend, rdma_devices: devices, transport, ..spec(ranks) };
            assert_eq!(unsupported_field(&spec), None);
            let line = line_of(&spec);
            for text in there {
                assert!(line.contains(text), "{line} lacks {text}");
            }
            for text in absent {
                assert!(!line.contains(text), "{line} has {text}");
            }
        }
    }

    #[test]
    fn engine_arguments_carry_compute_options() {
        for (kv_cache, speculation, fence, words) in [
            (
                KvCacheType::AsComputed,
                Speculation::Off,
                Fence::Default,
                "as-computed --speculation off --fence default",
            ),
            (
                KvCacheType::Int8,
                Speculation::PromptLookup,
                Fence::Fast,
                "int8 --speculation prompt-lookup --fence fast",
            ),
            (KvCacheType::Int4, Speculation::Off, Fence::Fast, "int4 --speculation off --fence fast"),
        ] {
            let engine = EngineOptions { kv_cache, speculation, fence };
            let line = line_of(&ShardSpec { engine, ..spec(1) });
            assert!(line.contains(&format!(" --kv-cache {words} ")), "{line}");
        }
    }

    #[test]
    fn unknown_enum_values_are_refused_by_field_name() {
        let kept = |kv_cache| EngineOptions { kv_cache, ..EngineOptions::default() };
        let unheard = EngineOptions { speculation: Speculation::Unknown, ..EngineOptions::default() };
        let electric = EngineOptions { fence: Fence::Unknown, ..EngineOptions::default() };
        for (backend, transport, engine, field) in [
            (Backend::Unknown, Transport::Tunnel, kept(KvCacheType::Int8), "spec.backend"),
            (Backend::Ring, Transport::Unknown, kept(KvCacheType::Int8), "spec.transport"),
            (Backend::Ring, Transport::Direct, kept(KvCacheType::Unknown), "spec.engine.kvCache"),
            (Backend::Ring, Transport::Direct, unheard, "spec.engine.speculation"),
            (Backend::Ring, Transport::Direct, electric, "spec.engine.fence"),
        ] {
            let why = unsupported_field(&ShardSpec { backend, transport, engine, ..spec(2) }).unwrap();
            assert!(why.starts_with(field) && why.ends_with("update this node"), "{why}");
        }
    }

    #[tokio::test]
    async fn reserved_addresses_hold_until_release_and_rebind() {
        let addresses = ReservedAddresses::allocate([127, 0, 0, 1].into()).unwrap();
        let rendezvous = addresses.rendezvous().clone();
        assert_ne!(rendezvous.rpc, rendezvous.ring);
        let error = ReservedAddresses::rebind(&rendezvous).unwrap_err();
        assert!(error.to_string().contains(&rendezvous.rpc), "{error}");
        addresses.release();
        assert_eq!(ReservedAddresses::rebind(&rendezvous).unwrap().rendezvous(), &rendezvous);
    }
}
