//! Transfers between agents on loopback: each test has agents of nodes `a`, `b`, … and receives on node `z`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use russet_rpc::tls::Protocol;

use super::*;
use crate::peers::tests::{Agent, Authority, agent};
use crate::store::Context;
use crate::store::chunks::CHUNK;

const PATIENCE: Duration = Duration::from_secs(120);

fn store(folder: &Path) -> Store {
    rustls::crypto::ring::default_provider().install_default().ok();
    let context = Context::new("https://huggingface.co", vec!["/".into()]).unwrap();
    Store::open(folder.to_owned(), context).unwrap()
}

/// What is asked for by the receiving node, which could not fetch it.
fn wanted() -> Wanted {
    Wanted { uri: "https://models.example/big".into(), ..Wanted::default() }
}

/// One where it is not said.
fn rounds() -> u64 {
    std::env::var("RUSSET_FAULT_ROUNDS").map_or(1, |rounds| rounds.parse().unwrap())
}

/// A figure, for `cargo xtask proof store`.
fn tell(what: &str) {
    println!("{}", serde_json::json!({"what": what, "ours": rounds(), "unit": "times"}));
}

fn progress() -> watch::Sender<Progress> {
    watch::Sender::new(Progress::default())
}

/// A model of a small file and one of two chunks and a half.
fn model(folder: &Path) {
    let data = 2 * CHUNK as usize + CHUNK as usize / 2;
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

/// Nodes that have the model, and one that wants it.
struct Lab {
    folder: tempfile::TempDir,
    agents: Vec<(String, Store, Agent)>,
    authority: Authority,
    id: String,
}

impl Lab {
    async fn new(nodes: &[&str]) -> (Self, Puller) {
        let folder = tempfile::tempdir().unwrap();
        model(&folder.path().join("source"));
        let authority = Authority::new(folder.path());
        let wanted =
            Wanted { uri: format!("file://{}", folder.path().join("source").display()), ..Wanted::default() };
        let (mut agents, mut id) = (Vec::new(), String::new());
        for node in nodes {
            let store = store(&folder.path().join(format!("models-{node}")));
            id = store.fetch(&wanted, &progress()).await.unwrap().id;
            agents.push(((*node).to_owned(), store.clone(), agent(authority.node(node), store)));
        }
        let connector = authority.node("z").connector(Protocol::Agents).unwrap();
        let puller =
            Puller { store: store(&folder.path().join("models-z")), connector, pace: Pace::default() };
        (Self { folder, agents, authority, id }, puller)
    }

    /// Ways to a node, each out of another address.
    fn ways(&self, node: &str, count: u8) -> BTreeSet<Way> {
        let agent = self.agents.iter().find(|(name, ..)| name == node).unwrap();
        let to = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), agent.2.port);
        // Linux has all of 127/8; elsewhere one address has to do.
        let last = |number| if cfg!(target_os = "linux") { number } else { 1 };
        let from = (1..=count).map(|number| IpAddr::from([127, 0, 0, last(number)]));
        from.map(|from| Way { peer: node.to_owned(), from: from.into(), to, spare: false }).collect()
    }

    async fn pull(&self, puller: &Puller, nodes: &[&str]) -> Result<Published, StoreError> {
        let ways: BTreeSet<Way> = nodes.iter().flat_map(|node| self.ways(node, 2)).collect();
        self.pull_over(puller, move || ways.clone(), &progress()).await
    }

    /// Agents begin to listen a moment after they are there.
    async fn pull_over(
        &self,
        puller: &Puller,
        ways: impl Fn() -> BTreeSet<Way> + Send + Clone,
        progress: &watch::Sender<Progress>,
    ) -> Result<Published, StoreError> {
        let pulled = async {
            loop {
                match puller.pull(&wanted(), &self.id, ways.clone(), progress).await {
                    Err(StoreError::Peers { detail, .. }) if detail.contains("not to be reached") => {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    other => return other,
                }
            }
        };
        tokio::time::timeout(PATIENCE, pulled).await.unwrap()
    }

    fn is_same(&self, published: &Published) {
        for name in ["config.json", "model.safetensors"] {
            let [source, here] = [&self.folder.path().join("source"), &published.path]
                .map(|folder| std::fs::read(folder.join(name)).unwrap());
            assert!(source == here, "{name}");
        }
        assert_eq!((published.id.as_str(), published.manifest.shape.layers), (self.id.as_str(), 1));
    }

    /// Changes a byte of a node's published weights.
    fn spoil(&self, node: &str, at: u64) {
        let store = &self.agents.iter().find(|(name, ..)| name == node).unwrap().1;
        let path = store.held(&self.id).unwrap().folder().join("model.safetensors");
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
async fn a_model_comes_over_several_ways_and_is_published_for_its_source() {
    let (lab, puller) = Lab::new(&["a", "b"]).await;
    // This node had begun to fetch it itself.
    let partial = lab.folder.path().join("models-z/.partial");
    std::fs::create_dir(partial.join(puller.store.key(&wanted()).unwrap())).unwrap();
    let published = lab.pull(&puller, &["a", "b"]).await.unwrap();
    lab.is_same(&published);
    assert_eq!(std::fs::read_dir(partial).unwrap().count(), 0, "nothing is left over");
    assert_eq!(puller.store.published(&wanted()), Some(published.clone()));
    assert_eq!(published.manifest.uri, wanted().uri);
    let manifest = puller.store.held(&lab.id).unwrap().manifest().clone();
    assert_eq!(manifest.sha256(), published.manifest.sha256());
    // What is here under another name needs nobody.
    let other = Wanted { uri: "https://mirror.example/big".into(), ..Wanted::default() };
    let again = puller.pull(&other, &lab.id, BTreeSet::new, &progress()).await.unwrap();
    assert_eq!(again.path, published.path);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transfer_goes_on_from_the_chunks_that_the_disk_still_has() {
    let (lab, puller) = Lab::new(&["a"]).await;
    let progress = progress();
    let mut state = progress.subscribe();
    let ways = lab.ways("a", 2);
    let pull = lab.pull_over(&puller, || ways.clone(), &progress);
    // One chunk's worth and what the connections may have begun besides.
    let begun = state.wait_for(|state| state.done > CHUNK + 8 * board::PIECE);
    tokio::select! {
        pulled = pull => panic!("it ended too soon: {pulled:?}"),
        begun = begun => drop(begun.unwrap()),
    }
    let partial = lab.folder.path().join("models-z/.partial").join(&lab.id);
    let journal = || std::fs::read(partial.join("JOURNAL")).unwrap();
    // What was being written when the transfer was dropped ends by itself, and lets the journal go then.
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

    // The journal is believed where the disk agrees: chunk 0 is the small file, the others are the weights'.
    let spoiled = chunks.iter().copied().find(|&chunk| chunk > 0).unwrap();
    let weights = std::fs::OpenOptions::new().read(true).write(true).open(partial.join("model.safetensors"));
    flip(&weights.unwrap(), (spoiled - 1) * CHUNK + 5);
    let manifest = lab.agents[0].1.held(&lab.id).unwrap().manifest().as_ref().clone();
    let receiving = puller.store.receive(&wanted(), manifest).unwrap();
    let whole = receiving.held().whole();
    for (chunk, whole) in whole.iter().enumerate() {
        let claimed = chunks.contains(&(chunk as u64));
        assert_eq!(*whole, claimed && chunk as u64 != spoiled, "chunk {chunk}");
    }
    drop(receiving);
    lab.is_same(&lab.pull(&puller, &["a"]).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_are_not_the_models_are_found_and_come_from_another_node() {
    let (lab, puller) = Lab::new(&["a", "b"]).await;
    // Both of its chunks that nobody else will be asked for alone are wrong, whoever begins them.
    for at in [9, CHUNK + 9, 2 * CHUNK + 9] {
        lab.spoil("a", at);
    }
    let error = lab.pull(&puller, &["a"]).await.unwrap_err();
    assert!(error.to_string().contains("node a gave bytes that are not those of the model"), "{error}");
    assert_eq!(puller.store.published(&wanted()), None);
    lab.is_same(&lab.pull(&puller, &["a", "b"]).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_gives_what_it_has_before_it_has_everything() {
    let (lab, puller) = Lab::new(&["a", "b"]).await;
    // Node b lost what it had, and has received one chunk of it again.
    let (_, b, _) = &lab.agents[1];
    let held = lab.agents[0].1.held(&lab.id).unwrap();
    b.collect(&BTreeSet::new()).unwrap();
    assert!(b.held(&lab.id).is_none());
    let receiving = b.receive(&wanted(), held.manifest().as_ref().clone()).unwrap();
    let bytes = held.read(1, 0, CHUNK).unwrap().unwrap();
    assert!(!receiving.check(1).unwrap(), "it is not there yet");
    receiving.write(1, 0, &[bytes]).unwrap();
    assert!(receiving.check(1).unwrap());
    assert_eq!(receiving.done(), CHUNK);

    // Node a is known only once node b has given something.
    let progress = progress();
    let (all, some) = (&lab.ways("a", 1) | &lab.ways("b", 1), lab.ways("b", 1));
    let ways = || if progress.borrow().from.contains("b") { all.clone() } else { some.clone() };
    lab.is_same(&lab.pull_over(&puller, ways, &progress).await.unwrap());
    assert_eq!(progress.borrow().from.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spare_way_is_used_where_no_other_one_answers() {
    let (lab, puller) = Lab::new(&["a"]).await;
    let ways = lab.ways("a", 1);
    let spare: BTreeSet<Way> = ways.iter().map(|way| Way { spare: true, ..way.clone() }).collect();
    // Nobody listens at this end of a cable.
    let dead = ways
        .iter()
        .map(|way| Way { to: SocketAddr::new([127, 0, 0, 9].into(), way.to.port()), ..way.clone() });
    let both: BTreeSet<Way> = spare.into_iter().chain(dead).collect();
    let progress = progress();
    let published = lab.pull_over(&puller, move || both.clone(), &progress).await.unwrap();
    lab.is_same(&published);
}

/// Receives these chunks of a model on a node that lost it, and goes on holding them.
fn receives(lab: &Lab, node: usize, chunks: &[usize]) -> Receiving {
    let others = lab.agents.iter().enumerate().filter(|(other, _)| *other != node);
    let mut held = others.filter_map(|(_, (_, store, _))| store.held(&lab.id));
    let held = held.find(|held| held.whole().iter().all(|whole| *whole)).unwrap();
    let store = &lab.agents[node].1;
    store.collect(&BTreeSet::new()).unwrap();
    let receiving = store.receive(&wanted(), held.manifest().as_ref().clone()).unwrap();
    for &chunk in chunks {
        let bytes = held.read(chunk, 0, held.chunks()[chunk].length).unwrap().unwrap();
        receiving.write(chunk, 0, &[bytes]).unwrap();
        assert!(receiving.check(chunk).unwrap());
    }
    receiving
}

#[tokio::test(flavor = "multi_thread")]
async fn two_that_each_have_a_part_have_all_of_it_together() {
    let (lab, puller) = Lab::new(&["a", "b", "c"]).await;
    let (_one, _other) = (receives(&lab, 0, &[0, 2]), receives(&lab, 1, &[1, 3]));
    lab.is_same(&lab.pull(&puller, &["a", "b"]).await.unwrap());
}

/// Two agents that ask each other: in vain where neither has anything, and not for ever; with a third one's help each
/// gets what the other one has.
#[tokio::test(flavor = "multi_thread")]
async fn two_that_ask_each_other_do_not_wait_for_each_other() {
    for _ in 0..rounds() {
        let (lab, _) = Lab::new(&["a", "b", "c"]).await;
        drop([receives(&lab, 0, &[0, 2]), receives(&lab, 1, &[1, 3])]);
        let both = async |others: [&[&str]; 2]| {
            let pulls = [0, 1].map(|index| {
                let (name, store, _) = &lab.agents[index];
                let connector = lab.authority.node(name).connector(Protocol::Agents).unwrap();
                let puller = Puller { store: store.clone(), connector, pace: Pace::default() };
                let lab = &lab;
                async move { lab.pull(&puller, others[index]).await }
            });
            futures::future::join_all(pulls).await
        };
        let in_vain = both([&["b"], &["a"]]).await;
        assert!(in_vain.iter().all(|it| matches!(it, Err(StoreError::Peers { .. }))), "{in_vain:?}");
        for published in both([&["b", "c"], &["a", "c"]]).await {
            lab.is_same(&published.unwrap());
        }
    }
    tell("two agents that ask each other, both whole");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_node_removes_in_the_middle_comes_from_another_one() {
    let (lab, puller) = Lab::new(&["a", "b"]).await;
    let progress = progress();
    let (first, both) = (lab.ways("a", 1), &lab.ways("a", 1) | &lab.ways("b", 1));
    let removed = std::sync::atomic::AtomicBool::new(false);
    let ways = || {
        // The model goes from node a once it has given some of it; node b is known from then on.
        if progress.borrow().from.contains("a") {
            if !removed.swap(true, std::sync::atomic::Ordering::SeqCst) {
                lab.agents[0].1.collect(&BTreeSet::new()).unwrap();
            }
            both.clone()
        } else {
            first.clone()
        }
    };
    // Looks come each second, so that node a may have given everything before.
    lab.is_same(&lab.pull_over(&puller, &ways, &progress).await.unwrap());
}

/// As when its ModelCopy is deleted: who pulls is dropped wherever it is, and nobody wants the files.
#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_is_deleted_in_the_middle_leaves_nothing_and_may_come_again() {
    let (lab, puller) = Lab::new(&["a"]).await;
    let ways = lab.ways("a", 2);
    for round in 0..rounds().max(4) {
        let pieces = 1 + round * 7 % 31;
        let progress = progress();
        let mut state = progress.subscribe();
        let begun = state.wait_for(|state| state.done >= pieces * board::PIECE);
        tokio::select! {
            pulled = lab.pull_over(&puller, || ways.clone(), &progress) => panic!("too soon: {pulled:?}"),
            begun = begun => drop(begun.unwrap()),
        }
        // What was being written when it was dropped ends by itself, and may come after the first look.
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
        assert_eq!(puller.store.published(&wanted()), None);
    }
    lab.is_same(&lab.pull(&puller, &["a"]).await.unwrap());
    tell("a model deleted in the middle, nothing left");
}

/// A node may say of files that they have the SHA-256 that everybody expects; a pinned model is held against it on
/// each machine, whether the files come now or came before for a model that nobody pinned.
#[tokio::test]
async fn a_pin_holds_whatever_the_node_says_that_fetched_first() {
    let (mut lab, puller) = Lab::new(&["a"]).await;
    let honest = lab.agents[0].1.held(&lab.id).unwrap();
    let mut told = (**honest.manifest()).clone();
    told.files.iter_mut().for_each(|file| file.sha256 = "5a".repeat(32));
    let (pin, folder) = (told.sha256(), honest.folder().to_owned());
    lab.id = told.id();
    std::fs::write(folder.join("MANIFEST.json"), serde_json::to_vec(&told).unwrap()).unwrap();
    std::fs::rename(&folder, folder.with_file_name(&lab.id)).unwrap();
    let pinned = Wanted { sha256: Some(pin), ..wanted() };
    let ways = lab.ways("a", 2);
    let pull = async |wanted: &Wanted, progress: &watch::Sender<Progress>| loop {
        match puller.pull(wanted, &lab.id, || ways.clone(), progress).await {
            Err(StoreError::Peers { detail, .. }) if detail.contains("not to be reached") => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            other => return other,
        }
    };
    let is_caught = |outcome: &Result<Published, StoreError>, story: &str| {
        let caught = matches!(outcome, Err(StoreError::Mistold { file, id }) if file == "config.json" && *id == lab.id);
        assert!(caught, "{story}: {outcome:?}");
    };
    is_caught(&pull(&pinned, &progress()).await, "every byte came and is not what the pin says");
    let again = progress();
    is_caught(&pull(&pinned, &again).await, "asked again");
    assert_eq!(again.borrow().done, 0, "it is not fetched again in vain");
    // Of a model without a pin the first node's word counts; who pins it later does not get it unseen.
    let taken = pull(&wanted(), &progress()).await.unwrap();
    assert!(!taken.manifest.own_sha256);
    let fresh = store(&lab.folder.path().join("models-z"));
    assert!(fresh.adopt(&wanted(), &lab.id).await.unwrap().is_some());
    is_caught(
        &fresh.adopt(&pinned, &lab.id).await.map(Option::unwrap),
        "taken over from a model without a pin",
    );
}
