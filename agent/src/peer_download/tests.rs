//! Downloads between agents on loopback: each test has agents of nodes `a`, `b`, … and downloads to node `z`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use russet_rpc::tls::Protocol;

use super::*;
use crate::peers::tests::{PeerAgent, TestCa, agent};
use crate::store::Context;
use crate::store::chunks::CHUNK_BYTES;

const PATIENCE: Duration = Duration::from_secs(120);

fn store(folder: &Path) -> Store {
    rustls::crypto::ring::default_provider().install_default().ok();
    let context = Context::new("https://huggingface.co", vec!["/".into()]).unwrap();
    Store::open(folder.to_owned(), context).unwrap()
}

/// The source of the downloading node, which it could not fetch.
fn source_spec() -> SourceSpec {
    SourceSpec { uri: "https://models.example/big".into(), ..SourceSpec::default() }
}

/// Number of rounds, by default one.
fn iterations() -> u64 {
    std::env::var("RUSSET_FAULT_ROUNDS").map_or(1, |rounds| rounds.parse().unwrap())
}

/// Prints a figure for `cargo xtask proof store`.
fn log(what: &str) {
    println!("{}", serde_json::json!({"what": what, "ours": iterations(), "unit": "times"}));
}

fn progress() -> watch::Sender<TransferProgress> {
    watch::Sender::new(TransferProgress::default())
}

/// A model of a small file and one of two and a half chunks.
fn model(folder: &Path) {
    let data = 2 * CHUNK_BYTES as usize + CHUNK_BYTES as usize / 2;
    let header = serde_json::json!({
        "model.embed_tokens.weight": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
        "model.layers.0.w.weight": {"dtype": "F32", "shape": [data / 4], "data_offsets": [32, 32 + data]},
    });
    let header = header.to_string();
    let mut weights = (header.len() as u64).to_le_bytes().to_vec();
    weights.extend(header.as_bytes());
    weights.extend((0..32 + data).map(|index| (index % 251 + index / 65_536) as u8));
    let config = r#"{"model_type":"llama","num_hidden_layers":1,"hidden_size":4,"num_attention_heads":2,"vocab_size":2}"#;
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("config.json"), config).unwrap();
    std::fs::write(folder.join("model.safetensors"), weights).unwrap();
}

/// Nodes that have the model, and one that needs it.
struct TransferLab {
    folder: tempfile::TempDir,
    agents: Vec<(String, Store, PeerAgent)>,
    authority: TestCa,
    id: String,
}

impl TransferLab {
    async fn new(nodes: &[&str]) -> (Self, PeerDownloader) {
        let folder = tempfile::tempdir().unwrap();
        model(&folder.path().join("source"));
        let authority = TestCa::new(folder.path());
        let spec = SourceSpec {
            uri: format!("file://{}", folder.path().join("source").display()),
            ..SourceSpec::default()
        };
        let (mut agents, mut id) = (Vec::new(), String::new());
        for node in nodes {
            let store = store(&folder.path().join(format!("models-{node}")));
            id = store.fetch(&spec, &progress()).await.unwrap().id;
            agents.push(((*node).to_owned(), store.clone(), agent(authority.node(node), store)));
        }
        let connector = authority.node("z").connector(Protocol::Agents).unwrap();
        let puller = PeerDownloader {
            store: store(&folder.path().join("models-z")),
            connector,
            limiter: TransferLimiter::default(),
        };
        (Self { folder, agents, authority, id }, puller)
    }

    /// Paths to a node, each from another local address.
    fn paths(&self, node: &str, count: u8) -> BTreeSet<PeerPath> {
        let agent = self.agents.iter().find(|(name, ..)| name == node).unwrap();
        let to = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), agent.2.port);
        // Linux has all of 127/8; elsewhere one address must do.
        let last = |number| if cfg!(target_os = "linux") { number } else { 1 };
        let from = (1..=count).map(|number| IpAddr::from([127, 0, 0, last(number)]));
        from.map(|from| PeerPath { peer: node.to_owned(), egress: from.into(), to, fallback: false })
            .collect()
    }

    async fn download(&self, puller: &PeerDownloader, nodes: &[&str]) -> Result<Published, StoreError> {
        let paths: BTreeSet<PeerPath> = nodes.iter().flat_map(|node| self.paths(node, 2)).collect();
        self.download_over(puller, move || paths.clone(), &progress()).await
    }

    /// Retries at first: agents begin to listen a moment after their start.
    async fn download_over(
        &self,
        puller: &PeerDownloader,
        paths: impl Fn() -> BTreeSet<PeerPath> + Send + Clone,
        progress: &watch::Sender<TransferProgress>,
    ) -> Result<Published, StoreError> {
        let pulled = async {
            loop {
                match puller.download(&source_spec(), &self.id, paths.clone(), progress).await {
                    Err(StoreError::Peers { detail, .. }) if detail.contains("cannot be reached") => {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    other => return other,
                }
            }
        };
        tokio::time::timeout(PATIENCE, pulled).await.unwrap()
    }

    fn assert_identical(&self, published: &Published) {
        for name in ["config.json", "model.safetensors"] {
            let [source, here] = [&self.folder.path().join("source"), &published.path]
                .map(|folder| std::fs::read(folder.join(name)).unwrap());
            assert!(source == here, "{name}");
        }
        assert_eq!((published.id.as_str(), published.manifest.shape.layers), (self.id.as_str(), 1));
    }

    /// Changes a byte of a node's published weights.
    fn corrupt(&self, node: &str, at: u64) {
        let store = &self.agents.iter().find(|(name, ..)| name == node).unwrap().1;
        let path = store.local_chunks(&self.id).unwrap().folder().join("model.safetensors");
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
        flip(&file, at);
    }
}

fn flip(file: &std::fs::File, at: u64) {
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x40], at).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn peer_download_uses_all_paths_and_publishes_for_source() {
    let (lab, puller) = TransferLab::new(&["a", "b"]).await;
    // This node had started to fetch it from the source.
    let partial = lab.folder.path().join("models-z/.partial");
    std::fs::create_dir(partial.join(puller.store.key(&source_spec()).unwrap())).unwrap();
    let published = lab.download(&puller, &["a", "b"]).await.unwrap();
    lab.assert_identical(&published);
    assert_eq!(std::fs::read_dir(partial).unwrap().count(), 0, "nothing is left over");
    assert_eq!(puller.store.published(&source_spec()), Some(published.clone()));
    assert_eq!(published.manifest.uri, source_spec().uri);
    let manifest = puller.store.local_chunks(&lab.id).unwrap().manifest().clone();
    assert_eq!(manifest.sha256(), published.manifest.sha256());
    // Files that exist here under another source need no peer.
    let other = SourceSpec { uri: "https://mirror.example/big".into(), ..SourceSpec::default() };
    let again = puller.download(&other, &lab.id, BTreeSet::new, &progress()).await.unwrap();
    assert_eq!(again.path, published.path);
}

#[tokio::test(flavor = "multi_thread")]
async fn peer_download_resumes_from_verified_chunks() {
    let (lab, puller) = TransferLab::new(&["a"]).await;
    let progress = progress();
    let mut state = progress.subscribe();
    let paths = lab.paths("a", 2);
    let pull = lab.download_over(&puller, || paths.clone(), &progress);
    // One chunk, and what the connections may have started besides.
    let started = state.wait_for(|state| state.done > CHUNK_BYTES + 8 * piece_picker::PIECE_BYTES);
    tokio::select! {
        pulled = pull => panic!("it ended too soon: {pulled:?}"),
        started = started => drop(started.unwrap()),
    }
    let partial = lab.folder.path().join("models-z/.partial").join(&lab.id);
    let journal = || std::fs::read(partial.join("JOURNAL")).unwrap();
    // A write in progress when the download was dropped completes by itself, and then releases the journal.
    let lock = std::fs::File::open(partial.join("JOURNAL")).unwrap();
    let released = async {
        while lock.try_lock().is_err() {
            tokio::task::yield_now().await
        }
    };
    tokio::time::timeout(PATIENCE, released).await.unwrap();
    drop(lock);
    let chunks: Vec<u64> =
        journal().chunks(16).map(|it| u64::from_le_bytes(it[..8].try_into().unwrap())).collect();
    assert!(!chunks.is_empty(), "{chunks:?}");

    // Journal records count where the disk agrees: chunk 0 is the small file, the others are the weights'.
    let spoiled = chunks.iter().copied().find(|&chunk| chunk > 0).unwrap();
    let weights = std::fs::OpenOptions::new().read(true).write(true).open(partial.join("model.safetensors"));
    flip(&weights.unwrap(), (spoiled - 1) * CHUNK_BYTES + 5);
    let manifest = lab.agents[0].1.local_chunks(&lab.id).unwrap().manifest().as_ref().clone();
    let receiving = puller.store.receive(&source_spec(), manifest).unwrap();
    let whole = receiving.local_chunks().complete();
    for (chunk, whole) in whole.iter().enumerate() {
        let claimed = chunks.contains(&(chunk as u64));
        assert_eq!(*whole, claimed && chunk as u64 != spoiled, "chunk {chunk}");
    }
    drop(receiving);
    lab.assert_identical(&lab.download(&puller, &["a"]).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn source_completes_what_a_frozen_peer_has_sent() {
    let (lab, puller) = TransferLab::new(&["a"]).await;
    let progress = progress();
    let mut state = progress.subscribe();
    let paths = lab.paths("a", 2);
    let pull = lab.download_over(&puller, || paths.clone(), &progress);
    let started = state.wait_for(|state| state.done > CHUNK_BYTES + 8 * piece_picker::PIECE_BYTES);
    tokio::select! {
        pulled = pull => panic!("it ended too soon: {pulled:?}"),
        started = started => drop(started.unwrap()),
    }
    let partial = lab.folder.path().join("models-z/.partial").join(&lab.id);
    let lock = std::fs::File::open(partial.join("JOURNAL")).unwrap();
    let released = async {
        while lock.try_lock().is_err() {
            tokio::task::yield_now().await
        }
    };
    tokio::time::timeout(PATIENCE, released).await.unwrap();
    drop(lock);
    // The source has the missing chunks alone; whatever is read of the others is wrong.
    let source = lab.folder.path().join("source/model.safetensors");
    let original = std::fs::read(&source).unwrap();
    let weights = std::fs::OpenOptions::new().write(true).open(&source).unwrap();
    let journal = std::fs::read(partial.join("JOURNAL")).unwrap();
    let received = journal.chunks(16).map(|it| u64::from_le_bytes(it[..8].try_into().unwrap()));
    let received: Vec<u64> = received.filter(|chunk| *chunk > 0).collect();
    assert!(!received.is_empty());
    for chunk in received {
        // Headers are read from the source again.
        let from = ((chunk - 1) * CHUNK_BYTES).max(1 << 16);
        let to = (chunk * CHUNK_BYTES).min(original.len() as u64);
        weights.write_all_at(&vec![0; (to - from) as usize], from).unwrap();
    }
    let spec = SourceSpec {
        uri: format!("file://{}", lab.folder.path().join("source").display()),
        received: Some(lab.id.clone()),
        ..SourceSpec::default()
    };
    let published = puller.store.fetch(&spec, &self::progress()).await.unwrap();
    assert_eq!(published.id, lab.id);
    assert!(std::fs::read(published.path.join("model.safetensors")).unwrap() == original);
    assert!(!partial.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn corrupt_bytes_are_detected_and_fetched_from_another_peer() {
    let (lab, puller) = TransferLab::new(&["a", "b"]).await;
    // Every chunk of the weights is corrupt, whichever is started first.
    for at in [9, CHUNK_BYTES + 9, 2 * CHUNK_BYTES + 9] {
        lab.corrupt("a", at);
    }
    let error = lab.download(&puller, &["a"]).await.unwrap_err();
    assert!(error.to_string().contains("node a sent bytes that do not match the model"), "{error}");
    assert_eq!(puller.store.published(&source_spec()), None);
    lab.assert_identical(&lab.download(&puller, &["a", "b"]).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn node_serves_chunks_before_its_download_completes() {
    let (lab, puller) = TransferLab::new(&["a", "b"]).await;
    // Node b lost its files, and has received one chunk again.
    let (_, b, _) = &lab.agents[1];
    let held = lab.agents[0].1.local_chunks(&lab.id).unwrap();
    b.collect(&BTreeSet::new()).unwrap();
    assert!(b.local_chunks(&lab.id).is_none());
    let receiving = b.receive(&source_spec(), held.manifest().as_ref().clone()).unwrap();
    let bytes = held.read(1, 0, CHUNK_BYTES).unwrap().unwrap();
    assert!(!receiving.check_chunk(1).unwrap(), "it is not there yet");
    receiving.write(1, 0, &[bytes]).unwrap();
    assert!(receiving.check_chunk(1).unwrap());
    assert_eq!(receiving.bytes_done(), CHUNK_BYTES);

    // Node a becomes known only after node b has sent something.
    let progress = progress();
    let (all, some) = (&lab.paths("a", 1) | &lab.paths("b", 1), lab.paths("b", 1));
    let paths = || if progress.borrow().from.contains("b") { all.clone() } else { some.clone() };
    lab.assert_identical(&lab.download_over(&puller, paths, &progress).await.unwrap());
    assert_eq!(progress.borrow().from.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn fallback_path_is_used_when_no_other_answers() {
    let (lab, puller) = TransferLab::new(&["a"]).await;
    let paths = lab.paths("a", 1);
    let spare: BTreeSet<PeerPath> =
        paths.iter().map(|path| PeerPath { fallback: true, ..path.clone() }).collect();
    // Nothing listens at this end of a cable.
    let dead = paths
        .iter()
        .map(|path| PeerPath { to: SocketAddr::new([127, 0, 0, 9].into(), path.to.port()), ..path.clone() });
    let both: BTreeSet<PeerPath> = spare.into_iter().chain(dead).collect();
    let progress = progress();
    let published = lab.download_over(&puller, move || both.clone(), &progress).await.unwrap();
    lab.assert_identical(&published);
}

/// Receives these chunks of a model on a node that lost it; the result keeps them.
fn incoming_with(lab: &TransferLab, node: usize, chunks: &[usize]) -> IncomingModel {
    let others = lab.agents.iter().enumerate().filter(|(other, _)| *other != node);
    let mut held = others.filter_map(|(_, (_, store, _))| store.local_chunks(&lab.id));
    let held = held.find(|held| held.complete().iter().all(|whole| *whole)).unwrap();
    let store = &lab.agents[node].1;
    store.collect(&BTreeSet::new()).unwrap();
    let receiving = store.receive(&source_spec(), held.manifest().as_ref().clone()).unwrap();
    for &chunk in chunks {
        let bytes = held.read(chunk, 0, held.chunks()[chunk].length).unwrap().unwrap();
        receiving.write(chunk, 0, &[bytes]).unwrap();
        assert!(receiving.check_chunk(chunk).unwrap());
    }
    receiving
}

#[tokio::test(flavor = "multi_thread")]
async fn two_partial_peers_complete_a_model_together() {
    let (lab, puller) = TransferLab::new(&["a", "b", "c"]).await;
    let (_one, _other) = (incoming_with(&lab, 0, &[0, 2]), incoming_with(&lab, 1, &[1, 3]));
    lab.assert_identical(&lab.download(&puller, &["a", "b"]).await.unwrap());
}

/// Two agents that request from each other: they fail in bounded time where neither has anything; with a
/// third one's help each gets what the other has.
#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_exchange_chunks_without_deadlock() {
    for _ in 0..iterations() {
        let (lab, _) = TransferLab::new(&["a", "b", "c"]).await;
        drop([incoming_with(&lab, 0, &[0, 2]), incoming_with(&lab, 1, &[1, 3])]);
        let both = async |others: [&[&str]; 2]| {
            let pulls = [0, 1].map(|index| {
                let (name, store, _) = &lab.agents[index];
                let connector = lab.authority.node(name).connector(Protocol::Agents).unwrap();
                let puller =
                    PeerDownloader { store: store.clone(), connector, limiter: TransferLimiter::default() };
                let lab = &lab;
                async move { lab.download(&puller, others[index]).await }
            });
            futures::future::join_all(pulls).await
        };
        let in_vain = both([&["b"], &["a"]]).await;
        assert!(in_vain.iter().all(|it| matches!(it, Err(StoreError::Peers { .. }))), "{in_vain:?}");
        for published in both([&["b", "c"], &["a", "c"]]).await {
            lab.assert_identical(&published.unwrap());
        }
    }
    log("two agents that ask each other, both whole");
}

#[tokio::test(flavor = "multi_thread")]
async fn chunks_removed_by_one_peer_come_from_another() {
    let (lab, puller) = TransferLab::new(&["a", "b"]).await;
    let progress = progress();
    let (first, both) = (lab.paths("a", 1), &lab.paths("a", 1) | &lab.paths("b", 1));
    let removed = std::sync::atomic::AtomicBool::new(false);
    let paths = || {
        // The model is removed from node a once it has sent some of it; node b is known from then on.
        if progress.borrow().from.contains("a") {
            if !removed.swap(true, std::sync::atomic::Ordering::SeqCst) {
                lab.agents[0].1.collect(&BTreeSet::new()).unwrap();
            }
            both.clone()
        } else {
            first.clone()
        }
    };
    // Paths are polled once a second, so node a may have sent everything before.
    lab.assert_identical(&lab.download_over(&puller, &paths, &progress).await.unwrap());
}

/// As when its ModelCopy is deleted: the download is dropped at any point, and the files are not wanted any
/// more.
#[tokio::test(flavor = "multi_thread")]
async fn model_deleted_mid_download_leaves_nothing_behind() {
    let (lab, puller) = TransferLab::new(&["a"]).await;
    let paths = lab.paths("a", 2);
    for round in 0..iterations().max(4) {
        let pieces = 1 + round * 7 % 31;
        let progress = progress();
        let mut state = progress.subscribe();
        let started = state.wait_for(|state| state.done >= pieces * piece_picker::PIECE_BYTES);
        tokio::select! {
            pulled = lab.download_over(&puller, || paths.clone(), &progress) => panic!("too soon: {pulled:?}"),
            started = started => drop(started.unwrap()),
        }
        // A write in progress when it was dropped completes by itself, maybe after the first check.
        let partial = lab.folder.path().join("models-z/.partial");
        let gone = async {
            loop {
                puller.store.collect(&BTreeSet::new()).unwrap();
                if std::fs::read_dir(&partial).unwrap().next().is_none() {
                    return;
                }
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, gone).await.unwrap();
        assert_eq!(puller.store.published(&source_spec()), None);
    }
    lab.assert_identical(&lab.download(&puller, &["a"]).await.unwrap());
    log("a model deleted in the middle, nothing left");
}

/// A node may claim the expected SHA-256 for any files. A pinned model is verified on each machine, whether
/// its files arrive now or came before for a model without a pin.
#[tokio::test]
async fn pinned_sha256_is_verified_against_peer_claims() {
    let (mut lab, puller) = TransferLab::new(&["a"]).await;
    let honest = lab.agents[0].1.local_chunks(&lab.id).unwrap();
    let mut other = (**honest.manifest()).clone();
    other.files.iter_mut().for_each(|file| file.sha256 = "5a".repeat(32));
    let (pin, folder) = (other.sha256(), honest.folder().to_owned());
    lab.id = other.id();
    std::fs::write(folder.join("MANIFEST.json"), serde_json::to_vec(&other).unwrap()).unwrap();
    std::fs::rename(&folder, folder.with_file_name(&lab.id)).unwrap();
    let pinned = SourceSpec { sha256: Some(pin), ..source_spec() };
    let paths = lab.paths("a", 2);
    let pull = async |spec: &SourceSpec, progress: &watch::Sender<TransferProgress>| loop {
        match puller.download(spec, &lab.id, || paths.clone(), progress).await {
            Err(StoreError::Peers { detail, .. }) if detail.contains("cannot be reached") => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            other => return other,
        }
    };
    let is_caught = |outcome: &Result<Published, StoreError>, story: &str| {
        let caught = matches!(outcome, Err(StoreError::Sha256Mismatch { file, id }) if file == "config.json" && *id == lab.id);
        assert!(caught, "{story}: {outcome:?}");
    };
    is_caught(&pull(&pinned, &progress()).await, "every byte came and is not what the pin says");
    let again = progress();
    is_caught(&pull(&pinned, &again).await, "asked again");
    assert_eq!(again.borrow().done, 0, "it is not fetched again in vain");
    // Without a pin the first node's statement counts; a later pin triggers the verification.
    let taken = pull(&source_spec(), &progress()).await.unwrap();
    assert!(!taken.manifest.own_sha256);
    let fresh = store(&lab.folder.path().join("models-z"));
    assert!(fresh.adopt(&source_spec(), &lab.id).await.unwrap().is_some());
    is_caught(
        &fresh.adopt(&pinned, &lab.id).await.map(Option::unwrap),
        "taken over from a model without a pin",
    );
}
