//! The statuses of Shards and ModelCopies as pure functions of the agent's state. Not here: when they are
//! written.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{
    Backend, CopyMode, MeasuredThroughput, ModelCopyStatus, Rendezvous, ShardSpec, ShardStatus, Transport,
};
use russet_model::partition::Partition;
use russet_plan::quantity;
use russet_rpc::engine as pb;

use crate::process::ProcessState;
use crate::store::{Headers, Published, TransferProgress, TransferStage};
use crate::throughput_report::update;

/// State of a rank.
#[derive(Clone, Debug, Default)]
pub struct RankReport<'a> {
    /// Epoch.
    pub epoch: i64,
    /// Rendezvous addresses of the rank, once claimed.
    pub rendezvous: Option<&'a Rendezvous>,
    /// Why the claim was refused.
    pub refusal: Option<(Reason, &'a str)>,
    /// Whether the model's files are published on this node.
    pub files: bool,
    /// The engine's process and state.
    pub engine: Option<(u32, &'a ProcessState)>,
    /// The engine's last report.
    pub report: Option<&'a pb::EngineState>,
    /// The group's throughput as last published.
    pub measured: Option<&'a MeasuredThroughput>,
    /// Why the rank cannot serve any more.
    pub failure: Option<(Reason, &'a str)>,
    /// Nodes with a cable that can carry a ring, with the address at the other end.
    pub cabled: &'a [(String, IpAddr)],
    /// Returns the interface of this machine that has an address.
    pub interface: Option<fn(IpAddr) -> Option<String>>,
}

/// The status of a Shard. `before` are its conditions so far; transition times stay where nothing changed.
pub fn shard(
    spec: &ShardSpec,
    rank: &RankReport<'_>,
    before: &[Condition],
    generation: Option<i64>,
    now: Timestamp,
) -> ShardStatus {
    let mut all = before.to_vec();
    let mut set = |kind, status, reason, message: &str| {
        conditions::set(&mut all, kind, status, reason, message, generation, now);
    };
    match (rank.refusal, rank.rendezvous) {
        (Some((reason, refusal)), _) => set(Type::Claimed, false, reason, refusal),
        (None, Some(_)) => {
            let granted = quantity::write(spec.reserved_bytes());
            set(Type::Claimed, true, Reason::MemoryGranted, &format!("{granted} granted"));
        }
        (None, None) => set(Type::Claimed, false, Reason::InProgress, "being claimed"),
    }
    for (kind, (status, reason, message)) in
        [Type::Loaded, Type::Joined, Type::Serving, Type::Ready].into_iter().zip(progress(spec, rank))
    {
        set(kind, status, reason, &message);
    }
    let report = rank.report.cloned().unwrap_or_default();
    let serves = matches!(rank.engine, Some((_, ProcessState::Serving)));
    let over = over_cables(&report.paths, rank.interface)
        .or_else(|| serves.then(|| not_over_known_cables(spec, rank.cabled))?);
    match over {
        Some((over, reason, message)) => {
            conditions::set(&mut all, Type::OverCables, over, reason, message, generation, now);
        }
        None => all.retain(|condition| condition.type_ != format!("{:?}", Type::OverCables)),
    }
    ShardStatus {
        observed_epoch: Some(rank.epoch),
        rendezvous: rank.rendezvous.cloned(),
        layers: layers(spec),
        engine_pid: rank.engine.map(|(pid, _)| i64::from(pid)),
        loaded_bytes: report.loaded_bytes,
        total_bytes: report.total_bytes,
        memory_bytes: report.memory_bytes,
        measured: update(rank.measured, &report),
        metrics_address: (!report.metrics_address.is_empty()).then_some(report.metrics_address),
        failure: rank.failure.map(|(_, message)| message.to_owned()),
        conditions: all,
    }
}

type ConditionValue = (bool, Reason, String);

/// Loaded, Joined, Serving and Ready.
fn progress(spec: &ShardSpec, rank: &RankReport<'_>) -> [ConditionValue; 4] {
    let no = |reason, message: &str| (false, reason, message.to_owned());
    let yes = |message: &str| (true, Reason::Serving, message.to_owned());
    let all = |verdict: ConditionValue| [verdict.clone(), verdict.clone(), verdict.clone(), verdict];
    if let Some((reason, message)) = rank.failure {
        return all(no(reason, message));
    }
    if let Some((reason, refusal)) = rank.refusal {
        return all(no(reason, refusal));
    }
    let Some((_, state)) = rank.engine else {
        let (reason, message) = match (rank.files, spec.peers.len() < spec.layers_per_rank.len()) {
            (_, true) => (Reason::WaitingForRanks, "waiting until every rank is claimed"),
            (false, _) => (Reason::WaitingForCopies, "waiting for the model's files"),
            (true, false) => (Reason::InProgress, "the engine is about to start"),
        };
        return all(no(reason, message));
    };
    let loading = || no(Reason::Loading, "the engine reads its weights");
    // The engine's message names the unreachable peer and the cause: users find a closed firewall by it.
    let reported = rank.report.map(|report| report.message.as_str()).filter(|message| !message.is_empty());
    let joining = || no(Reason::Joining, reported.unwrap_or("the engine waits for its peers"));
    match state {
        ProcessState::Starting | ProcessState::Loading => all(loading()),
        ProcessState::Loaded => [yes("weights are in memory"), joining(), joining(), joining()],
        ProcessState::Serving => {
            let role = if spec.rank == 0 { "answers requests" } else { "follows rank 0" };
            [yes("weights are in memory"), yes("joined its group"), yes(role), yes(role)]
        }
        ProcessState::Failed(reason, message) => all(no(*reason, message)),
        ProcessState::Exited(message) => all(no(Reason::EngineExited, message)),
    }
}

/// Condition of a group that runs beside cables which were unknown when it formed.
fn not_over_known_cables(spec: &ShardSpec, cabled: &[(String, IpAddr)]) -> Option<ConditionValue> {
    let met = next_ranks(spec).filter_map(|rank| spec.peers.iter().find(|peer| peer.rank == rank));
    let beside = met.filter(|peer| {
        let published = peer.ring.parse::<SocketAddr>().ok().map(|address| address.ip());
        let mut leads = cabled.iter().filter(|(node, _)| *node == peer.node_name).peekable();
        // If the other machine is published at its end of the cable, the ring uses the cable.
        leads.peek().is_some() && leads.all(|(_, end)| Some(*end) != published)
    });
    let late: BTreeSet<&str> = beside.map(|peer| peer.node_name.as_str()).collect();
    let late: Vec<&str> = late.into_iter().collect();
    (!late.is_empty()).then(|| {
        let message = format!(
            "node {} is reached over the network, because the group formed before its cable was known; delete this Shard to re-form the group over the cable",
            late.join(", node ")
        );
        (false, Reason::PathFallback, message)
    })
}

/// The next ranks in the rings of this rank: none for a single rank, or where RDMA carries them.
fn next_ranks(spec: &ShardSpec) -> impl Iterator<Item = u32> {
    let size = spec.layers_per_rank.len() as u32;
    let members = spec.tensor_size.max(1);
    let (stages, stage, member) = (size / members, spec.rank / members, spec.rank % members);
    let tunnelled = spec.transport == Transport::Tunnel;
    let pipeline = (tunnelled && stages > 1).then(|| (stage + 1) % stages * members + member);
    let sums = tunnelled && members > 1 && spec.backend == Backend::Ring;
    let tensor = sums.then(|| stage * members + (member + 1) % members);
    pipeline.into_iter().chain(tensor)
}

/// Whether the next ranks are reached over the cables to their nodes; `None` where no cable leads there.
fn over_cables(
    paths: &[pb::Path],
    interface: Option<fn(IpAddr) -> Option<String>>,
) -> Option<ConditionValue> {
    let named = |from: &str| {
        let name = interface?(from.parse::<SocketAddr>().ok()?.ip())?;
        Some(format!(" over {name}"))
    };
    let say = |path: &pb::Path| {
        let pb::Path { node, from, to, fallback } = path;
        match fallback.as_str() {
            "" => format!("node {node} is reached over a cable, {from} to {to}"),
            why => format!(
                "node {node} is reached{} from {from} at {to} and not over the cable that leads there ({why}); fix that, and delete this Shard to re-form the group",
                named(from).unwrap_or_default()
            ),
        }
    };
    let fallen: Vec<String> = paths.iter().filter(|path| !path.fallback.is_empty()).map(say).collect();
    match (paths, fallen.as_slice()) {
        ([], _) => None,
        (paths, []) => Some((true, Reason::CablesUsed, paths.iter().map(say).collect::<Vec<_>>().join("; "))),
        (_, fallen) => Some((false, Reason::PathFallback, fallen.join("; "))),
    }
}

/// `3-4 of 5`: indices into the model, as the engine loads them.
fn layers(spec: &ShardSpec) -> Option<String> {
    let size = spec.tensor_size.max(1);
    let stages = spec.layers_per_rank.iter().step_by(size as usize);
    let total: u32 = stages.fold(0, |sum, &count| sum.saturating_add(count));
    let partition = Partition::with_tensor(spec.layers_per_rank.clone(), size, total).ok()?;
    let part = partition.part(spec.rank)?;
    let share = if size > 1 { format!("1/{size} of ") } else { String::new() };
    Some(format!("{share}{}-{} of {total}", part.layers.start, part.layers.end - 1))
}

/// State of a copy.
#[derive(Clone, Debug)]
pub enum CopyState<'a> {
    /// Another node fetches the same files.
    Waiting,
    /// In progress, at this many bytes per second.
    Transferring(&'a TransferProgress, u64),
    /// Failed for now.
    Failed(Reason, &'a str),
    /// The headers were read.
    HeadersRead(&'a Headers),
    /// Every file is published.
    Published(&'a Published),
}

/// The status of a ModelCopy; `before` is its status so far.
pub fn copy(
    copy: &CopyState<'_>,
    mode: CopyMode,
    before: &ModelCopyStatus,
    generation: Option<i64>,
    now: Timestamp,
) -> ModelCopyStatus {
    let mut status = ModelCopyStatus {
        observed_generation: generation,
        bytes_per_second: 0,
        rate: None,
        eta: None,
        ..before.clone()
    };
    let mut all = std::mem::take(&mut status.conditions);
    let mut set = |kinds: &[Type], verdict: bool, reason, message: &str| {
        for &kind in kinds {
            conditions::set(&mut all, kind, verdict, reason, message, generation, now);
        }
    };
    const FILES: &[Type] = &[Type::Downloaded, Type::Verified];
    match copy {
        CopyState::Waiting => {
            let message = "another node fetches these files and then sends them to this one";
            set(&[Type::Downloaded, Type::Ready], false, Reason::WaitingForPeer, message);
        }
        CopyState::Transferring(progress, rate) => {
            if let Some(shape) = &progress.shape {
                status.shape = Some(shape.clone());
                status.commit = progress.commit.clone().or(status.commit);
                set(&[Type::Resolved], true, Reason::HeadersRead, "headers were read");
            } else if status.shape.is_none() {
                set(&[Type::Resolved], false, Reason::InProgress, "the source is being read");
            }
            if progress.total > 0 {
                (status.bytes_done, status.bytes_total) = (progress.done, progress.total);
                status.bytes_per_second = *rate;
                let left = progress.total.saturating_sub(progress.done);
                status.rate = (*rate > 0).then(|| format!("{}/s", quantity::write(*rate)));
                status.eta = left.checked_div(*rate).filter(|_| left > 0).map(duration);
                let nodes: Vec<&str> = progress.from.iter().map(String::as_str).collect();
                status.from = Some(if nodes.is_empty() { "source".to_owned() } else { nodes.join(",") });
                let (done, total) = (quantity::write(progress.done), quantity::write(progress.total));
                status.progress = Some(format!("{done} / {total}"));
            }
            match (progress.stage, &progress.last_error) {
                (_, Some((reason, message))) => {
                    set(&[Type::Downloaded, Type::Ready], false, *reason, message)
                }
                (TransferStage::Resolving, None) => {
                    set(
                        &[Type::Downloaded, Type::Ready],
                        false,
                        Reason::InProgress,
                        "the source is being read",
                    );
                }
                (TransferStage::Downloading, None) => {
                    set(
                        &[Type::Downloaded, Type::Ready],
                        false,
                        Reason::Downloading,
                        "files are being fetched",
                    );
                }
                (TransferStage::Verifying, None) => {
                    set(&[Type::Downloaded], true, Reason::Settled, "every byte arrived");
                    set(
                        &[Type::Verified, Type::Ready],
                        false,
                        Reason::Verifying,
                        "every byte is being verified",
                    );
                }
            }
        }
        CopyState::Failed(reason, message) => {
            if status.shape.is_none() {
                set(&[Type::Resolved], false, *reason, message);
            }
            if mode == CopyMode::Files {
                set(FILES, false, *reason, message);
            }
            set(&[Type::Ready], false, *reason, message);
        }
        CopyState::HeadersRead(headers) => {
            let Headers { shape, commit, bytes_total } = headers;
            status.shape = Some(shape.clone());
            status.commit = commit.clone();
            status.bytes_total = *bytes_total;
            set(&[Type::Resolved, Type::Ready], true, Reason::HeadersRead, "headers were read");
        }
        CopyState::Published(published) => {
            let manifest = &published.manifest;
            status.shape = Some(manifest.shape.clone());
            status.commit = manifest.commit.clone();
            status.sha256 = Some(manifest.sha256());
            status.content = Some(published.id.clone());
            (status.bytes_done, status.bytes_total) = (manifest.bytes(), manifest.bytes());
            status.progress = Some(quantity::write(manifest.bytes()));
            set(&[Type::Resolved], true, Reason::HeadersRead, "headers were read");
            set(&[Type::Downloaded], true, Reason::Settled, "every byte arrived");
            set(&[Type::Verified, Type::Ready], true, Reason::Verified, "every byte matches");
        }
    }
    status.conditions = all;
    status
}

/// A duration for users: `4m10s`.
fn duration(seconds: u64) -> String {
    let (hours, minutes, rest) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes) {
        (0, 0) => format!("{rest}s"),
        (0, minutes) => format!("{minutes}m{rest:02}s"),
        (hours, minutes) => format!("{hours}h{minutes:02}m"),
    }
}

#[cfg(test)]
mod tests {
    use russet_crds::Peer;

    use super::*;

    #[test]
    fn group_formed_before_its_cable_reports_path_fallback() {
        let peers = ["a", "b", "c", "d"].iter().enumerate().map(|(rank, node)| Peer {
            rank: rank as u32,
            node_name: (*node).to_owned(),
            ring: format!("10.0.0.{rank}:20000"),
            ..Peer::default()
        });
        let spec = ShardSpec {
            rank: 1,
            layers_per_rank: vec![2; 4],
            tensor_size: 2,
            backend: Backend::Ring,
            peers: peers.collect(),
            ..ShardSpec::default()
        };
        let ends = |nodes: &str, end: &str| -> Vec<(String, IpAddr)> {
            nodes.chars().map(|node| (node.to_string(), end.parse().unwrap())).collect()
        };
        let note = |spec: &ShardSpec, nodes| {
            not_over_known_cables(spec, &ends(nodes, "192.0.2.1")).map(|(.., words)| words)
        };
        // Rank 1 is followed by rank 0 in its stage, and by rank 3 of the next stage.
        assert!(note(&spec, "ac").unwrap().starts_with("node a is reached over the network"));
        assert!(note(&spec, "abcd").unwrap().starts_with("node a, node d is reached"));
        assert_eq!(note(&spec, "bc"), None, "no ring of its runs there");
        assert_eq!(
            not_over_known_cables(&spec, &ends("a", "10.0.0.0")),
            None,
            "it is known by its end of the cable"
        );
        let rdma = ShardSpec { backend: Backend::Jaccl, ..spec.clone() };
        assert!(note(&rdma, "abcd").unwrap().starts_with("node d is reached"));
        assert_eq!(note(&ShardSpec { transport: Transport::Direct, ..spec.clone() }, "abcd"), None);
        let alone = ShardSpec { layers_per_rank: vec![4], tensor_size: 1, rank: 0, ..spec };
        assert_eq!(note(&alone, "abcd"), None);
    }

    #[test]
    fn peer_reached_without_its_cable_is_named_with_reason() {
        let path = |node: &str, fallback: &str| pb::Path {
            node: node.to_owned(),
            from: "10.0.0.1:5000".to_owned(),
            to: "10.0.0.2:20001".to_owned(),
            fallback: fallback.to_owned(),
        };
        assert_eq!(over_cables(&[], None), None);
        let (over, reason, words) = over_cables(&[path("b", ""), path("c", "")], None).unwrap();
        assert_eq!((over, reason), (true, Reason::CablesUsed));
        assert!(
            words.starts_with("node b is reached over a cable, 10.0.0.1:5000 to 10.0.0.2:20001; node c"),
            "{words}"
        );
        let (over, reason, words) =
            over_cables(&[path("b", ""), path("c", "no route")], Some(|_| Some("en0".to_owned()))).unwrap();
        assert_eq!((over, reason), (false, Reason::PathFallback));
        assert!(
            words.starts_with("node c is reached over en0 from 10.0.0.1:5000 at 10.0.0.2:20001 and not over"),
            "{words}"
        );
        assert!(words.contains("(no route)"), "{words}");
    }

    fn spec(peers: usize) -> ShardSpec {
        ShardSpec {
            layers_per_rank: vec![2, 3],
            rank: 1,
            peers: vec![Peer::default(); peers],
            ..ShardSpec::default()
        }
    }

    fn words(status: &ShardStatus) -> String {
        let words = status.conditions.iter().map(|condition| {
            let sign = if condition.status == "True" { '+' } else { '-' };
            format!("{sign}{}:{}", condition.type_, condition.reason)
        });
        words.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_rank_shows_what_it_waits_for_and_why_it_failed() {
        let rendezvous = Rendezvous { rpc: "a:1".into(), ring: "a:2".into(), tensor: "a:3".into() };
        let claimed = RankReport { epoch: 3, rendezvous: Some(&rendezvous), ..RankReport::default() };
        let serving = ProcessState::Serving;
        for (peers, rank, expected) in [
            (
                0,
                RankReport { refusal: Some((Reason::MemoryRefused, "too little")), ..RankReport::default() },
                "-Claimed:MemoryRefused -Loaded:MemoryRefused -Joined:MemoryRefused -Serving:MemoryRefused -Ready:MemoryRefused",
            ),
            (
                0,
                claimed.clone(),
                "+Claimed:MemoryGranted -Loaded:WaitingForRanks -Joined:WaitingForRanks -Serving:WaitingForRanks -Ready:WaitingForRanks",
            ),
            (
                2,
                claimed.clone(),
                "+Claimed:MemoryGranted -Loaded:WaitingForCopies -Joined:WaitingForCopies -Serving:WaitingForCopies -Ready:WaitingForCopies",
            ),
            (
                2,
                RankReport { engine: Some((7, &ProcessState::Loaded)), ..claimed.clone() },
                "+Claimed:MemoryGranted +Loaded:Serving -Joined:Joining -Serving:Joining -Ready:Joining",
            ),
            (
                2,
                RankReport { engine: Some((7, &serving)), ..claimed.clone() },
                "+Claimed:MemoryGranted +Loaded:Serving +Joined:Serving +Serving:Serving +Ready:Serving",
            ),
            (
                2,
                RankReport { failure: Some((Reason::EngineExited, "signal 9")), ..claimed.clone() },
                "+Claimed:MemoryGranted -Loaded:EngineExited -Joined:EngineExited -Serving:EngineExited -Ready:EngineExited",
            ),
        ] {
            let status = shard(&spec(peers), &rank, &[], Some(1), Timestamp::UNIX_EPOCH);
            assert_eq!(words(&status), expected);
            assert_eq!(status.layers.as_deref(), Some("0-2 of 5"));
            assert_eq!(status.failure.is_some(), rank.failure.is_some());
        }
        let report =
            pb::EngineState { message: "waiting for rank 0 at a:1: refused".into(), ..Default::default() };
        let rank = RankReport { engine: Some((7, &ProcessState::Loaded)), report: Some(&report), ..claimed };
        let status = shard(&spec(2), &rank, &[], Some(1), Timestamp::UNIX_EPOCH);
        assert_eq!(conditions::get(&status.conditions, Type::Joined).unwrap().message, report.message);
    }

    #[test]
    fn members_of_a_stage_show_their_share() {
        let spec = ShardSpec { layers_per_rank: vec![3, 3, 2, 2], tensor_size: 2, rank: 1, ..spec(4) };
        let status = shard(&spec, &RankReport::default(), &[], None, Timestamp::UNIX_EPOCH);
        assert_eq!(status.layers.as_deref(), Some("1/2 of 2-4 of 5"));
    }

    #[test]
    fn a_copy_keeps_its_shape_when_the_source_goes_away() {
        let shape = russet_model::shape::ModelShape { layers: 4, ..Default::default() };
        let progress = TransferProgress {
            from: ["b".to_owned()].into(),
            stage: TransferStage::Downloading,
            done: 1 << 20,
            total: 4 << 20,
            commit: Some("c".into()),
            shape: Some(shape.clone()),
            last_error: None,
        };
        let (files, now) = (CopyMode::Files, Timestamp::UNIX_EPOCH);
        let working =
            copy(&CopyState::Transferring(&progress, 9), files, &ModelCopyStatus::default(), Some(1), now);
        assert_eq!(working.progress.as_deref(), Some("1Mi / 4Mi"));
        assert_eq!(working.bytes_per_second, 9);
        assert_eq!(
            [working.rate.as_deref(), working.eta.as_deref(), working.from.as_deref()],
            [Some("9/s"), Some("97h05m"), Some("b")]
        );
        let slowed = copy(&CopyState::Transferring(&progress, 30_000), files, &working, Some(1), now);
        assert_eq!(slowed.eta.as_deref(), Some("1m44s"));
        let waits = copy(&CopyState::Waiting, files, &working, Some(1), now);
        assert_eq!((waits.rate, waits.eta), (None, None));
        assert_eq!(conditions::get(&waits.conditions, Type::Ready).unwrap().reason, "WaitingForPeer");
        let failed = copy(&CopyState::Failed(Reason::DiskFull, "full"), files, &working, Some(1), now);
        assert_eq!((failed.shape, failed.commit.as_deref()), (Some(shape), Some("c")));
        assert!(conditions::is_true(&failed.conditions, Type::Resolved));
        assert_eq!(conditions::get(&failed.conditions, Type::Ready).unwrap().reason, "DiskFull");
    }
}
