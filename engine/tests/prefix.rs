//! Prefix cache in real engines: outputs do not depend on it, on one rank and in groups, in memory, from disk
//! after a restart, and with damaged files.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

#[path = "support/disk.rs"]
mod disk;
#[path = "support/engines.rs"]
mod engines;
#[path = "support/identities.rs"]
mod identities;
#[path = "support/model.rs"]
mod model;

use std::path::{Path, PathBuf};
use std::time::Duration;

use russet_rpc::engine::engine_client::EngineClient;
use russet_wire::engine_options::KvCacheType;
use russet_wire::event::GenerationEvent;
use russet_wire::request::GenerationRequest;
use rustix::process::Signal;
use tonic::transport::Channel;

use disk::TestDisk;
use engines::{EngineHarness, TestEngine, ask, collect, say, within};

/// Several prompts with one long prefix, then one with another.
fn questions() -> Vec<GenerationRequest> {
    let text: String = (0..120).map(|number| format!("{number} and ")).collect();
    let question = |text: &str, own: &str| GenerationRequest {
        max_tokens: Some(8),
        ignore_eos: true,
        ..say(&format!("{text}{own}"))
    };
    vec![
        question(&text, "how many?"),
        question(&text, "which is the largest?"),
        question("", "what is 17 + 25?"),
        question(&text[..text.len() / 3], "what comes next?"),
        question(&text, "and the smallest?"),
    ]
}

/// Tokens of the outputs, and the number of cached tokens of each prompt.
async fn answers(client: &mut EngineClient<Channel>) -> Vec<(Vec<u32>, u32)> {
    let mut all = Vec::new();
    for question in questions() {
        let mut events = ask(client, question).await;
        let (ids, _, end) = collect(&mut events).await;
        let GenerationEvent::Finished { usage, .. } = end else { panic!("{end:?}") };
        all.push((ids, usage.cached_tokens));
    }
    all
}

async fn stop(mut engines: Vec<TestEngine>) {
    // Followers first: they stay until rank 0 leaves, and know by then that it is an orderly exit.
    for engine in engines.iter().rev() {
        engine.signal(Signal::TERM);
        if engine.node != engines[0].node {
            engine.until(|state| state.message.starts_with("stopping")).await;
        }
    }
    for engine in &mut engines {
        assert_eq!(engine.exit().await.code(), Some(0), "{}", engine.node);
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let below = |folder: &Path| -> Vec<PathBuf> {
        std::fs::read_dir(folder).map_or(Vec::new(), |all| all.map(|entry| entry.unwrap().path()).collect())
    };
    let all = below(folder).into_iter().flat_map(|number| below(&number));
    let all = all.flat_map(|identity| below(&identity));
    all.filter(|path| path.extension().is_some_and(|extension| extension == "kv")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cached_prefixes_give_the_same_answers_as_prefill() {
    let narrow = model::random_model_dir();
    // Heads as wide as a quantisation group.
    let wide = model::random_model(model::Shape {
        hidden: 128,
        intermediate: 128,
        heads: 4,
        kv_heads: 2,
        layers: model::LAYERS,
        spread: 0.3,
    });
    for (model, layers, members, kv_cache) in [
        (&narrow, &[model::LAYERS][..], 1, KvCacheType::AsComputed),
        (&narrow, &[1, 3], 1, KvCacheType::AsComputed),
        (&narrow, &[model::LAYERS], 2, KvCacheType::AsComputed),
        (&wide, &[model::LAYERS], 1, KvCacheType::Int8),
        (&wide, &[1, 3], 1, KvCacheType::Int4),
        (&wide, &[model::LAYERS], 2, KvCacheType::Int8),
    ] {
        let story = format!("{layers:?} by {members}, {kv_cache:?}");
        let mut lab = EngineHarness::new();
        lab.config.options.kv_cache = kv_cache;
        lab.config.prefix_cache = false;
        let engines = lab.start_stages(model.path(), layers, members);
        let mut client = lab.client(&engines[0]).await;
        let expected: Vec<Vec<u32>> = answers(&mut client)
            .await
            .into_iter()
            .map(|(ids, cached)| {
                assert_eq!(cached, 0, "{story}: it is switched off");
                ids
            })
            .collect();
        drop(client);
        stop(engines).await;

        let folder = tempfile::tempdir().unwrap();
        lab.config.prefix_cache = true;
        lab.prefix_dir = Some(folder.path().to_owned());
        let of_rank = |rank: usize| folder.path().join(rank.to_string());
        let size = layers.len() * members;
        for (round, damaged) in [("cold", false), ("after a restart", false), ("with damaged files", true)] {
            if damaged {
                // On the last rank only: the blocks of the other ranks are useless without its own.
                for path in files(&of_rank(size - 1)) {
                    let mut bytes = std::fs::read(&path).unwrap();
                    let middle = bytes.len() / 2;
                    bytes[middle] ^= 1;
                    std::fs::write(&path, bytes).unwrap();
                }
            }
            let engines = lab.start_stages(model.path(), layers, members);
            let mut client = lab.client(&engines[0]).await;
            let (said, cached): (Vec<Vec<u32>>, Vec<u32>) = answers(&mut client).await.into_iter().unzip();
            assert_eq!(said, expected, "{story}, {round}");
            eprintln!("{story}, {round}: {cached:?} tokens were kept");
            let first = round == "after a restart";
            assert_eq!(cached[0] > 512, first, "{story}, {round}: {cached:?}");
            assert!(cached[1] > 512 && cached[3] > 128 && cached[4] > 512, "{story}, {round}: {cached:?}");
            drop(client);
            let written = async {
                while (0..size).any(|rank| files(&of_rank(rank)).len() < 13) {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            };
            within("writing the blocks", written).await;
            stop(engines).await;
        }
    }
}

/// An engine with memory for one conversation, so that blocks of others are on disk only; and two prompts
/// that are sent in turn.
struct SmallCacheEngine {
    lab: EngineHarness,
    engine: TestEngine,
    client: EngineClient<Channel>,
    log: tempfile::TempDir,
    /// Its expected outputs.
    expected: Vec<Vec<u32>>,
}

impl SmallCacheEngine {
    fn questions() -> [GenerationRequest; 2] {
        ["and", "or"].map(|word| {
            let text: String = (0..120).map(|number| format!("{number} {word} ")).collect();
            GenerationRequest { max_tokens: Some(8), ignore_eos: true, ..say(&text) }
        })
    }

    async fn start(model: &Path, folder: &Path) -> Self {
        let mut lab = EngineHarness::new();
        let log = tempfile::tempdir().unwrap();
        lab.log_dir = Some(log.path().to_owned());
        lab.config.context_tokens = 1200;
        lab.config.max_sequences = 1;
        lab.config.prefix_cache = false;
        let mut alone = lab.start(model, &[model::LAYERS]);
        let mut client = lab.client(&alone[0]).await;
        let mut expected = Vec::new();
        for question in Self::questions() {
            expected.push(collect(&mut ask(&mut client, question).await).await.0);
        }
        stop(vec![alone.remove(0)]).await;
        lab.config.prefix_cache = true;
        lab.config.kv_tokens = Some(1200);
        lab.prefix_dir = Some(folder.to_owned());
        let engine = lab.start(model, &[model::LAYERS]).remove(0);
        let client = lab.client(&engine).await;
        Self { lab, engine, client, log, expected }
    }

    /// Sends both prompts and checks the outputs; returns the number of cached tokens of each.
    async fn ask(&mut self, story: &str) -> Vec<u32> {
        let mut cached = Vec::new();
        for (question, expected) in Self::questions().into_iter().zip(&self.expected) {
            let (ids, _, end) = collect(&mut ask(&mut self.client, question).await).await;
            let GenerationEvent::Finished { usage, .. } = end else { panic!("{story}: {end:?}") };
            assert_eq!(&ids, expected, "{story}");
            cached.push(usage.cached_tokens);
        }
        eprintln!("{story}: {cached:?} tokens were kept");
        cached
    }

    /// Sends both prompts until both are found on disk: blocks are written in the background.
    async fn ask_until_cached(&mut self, story: &str) {
        let asked = async {
            while self.ask(story).await.iter().any(|cached| *cached < 512) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        within("blocks on disk", asked).await;
    }

    /// Waits until the log contains a text; returns how often it does.
    async fn wait_for_log(&self, words: &str) -> usize {
        let path = self.log.path().join("0");
        let said = async {
            loop {
                let times = std::fs::read_to_string(&path).unwrap().matches(words).count();
                if times > 0 {
                    return times;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        within(words, said).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_or_missing_blocks_are_prefilled_again_and_logged() {
    let model = model::random_model_dir();
    let folder = tempfile::tempdir().unwrap();
    let mut narrow = SmallCacheEngine::start(model.path(), folder.path()).await;
    narrow.ask_until_cached("whole files").await;
    for (story, damage, said) in [
        ("one bit", (|bytes| bytes[100] ^= 1) as fn(&mut Vec<u8>), "its checksum is another"),
        ("cut", |bytes| bytes.truncate(bytes.len() / 3), "its checksum is another"),
        ("empty", Vec::clear, "it is too short"),
        ("gone", |_| {}, "cannot read"),
    ] {
        for path in files(&folder.path().join("0")) {
            let mut bytes = std::fs::read(&path).unwrap();
            damage(&mut bytes);
            match story {
                "gone" => std::fs::remove_file(&path).unwrap(),
                _ => std::fs::write(&path, bytes).unwrap(),
            }
        }
        narrow.ask(story).await;
        narrow.wait_for_log(said).await;
        // Tokens that were prefilled again are cached again.
        narrow.ask_until_cached(story).await;
    }
    // Removes the folder itself, with the files that would be written.
    std::fs::remove_dir_all(folder.path().join("0")).unwrap();
    for _ in 0..3 {
        narrow.ask("without a folder").await;
    }
    narrow.wait_for_log("are not kept on disk").await;
    stop(vec![narrow.engine]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_disk_stores_fewer_blocks_and_fails_no_answer() {
    let Some(disk) = TestDisk::mount(32 << 20) else { return };
    let model = model::random_model_dir();
    let mut narrow = SmallCacheEngine::start(model.path(), &disk.path()).await;
    // Less than a block.
    let ballast = disk.fill_except(8 << 10);
    for _ in 0..4 {
        narrow.ask("a full disk").await;
    }
    // Dozens of blocks were not written.
    assert_eq!(narrow.wait_for_log("blocks of the prefix cache are not kept on disk").await, 1);
    let left = files(&disk.path().join("0"));
    assert!(left.is_empty(), "{left:?} is on a disk that was full");
    std::fs::remove_file(ballast).unwrap();
    narrow.ask_until_cached("room again").await;
    assert_eq!(narrow.wait_for_log("blocks of the prefix cache are kept on disk again").await, 1);
    stop(vec![narrow.engine]).await;
    // And the disk fills up while blocks are on it.
    narrow.engine = narrow.lab.start(model.path(), &[model::LAYERS]).remove(0);
    narrow.client = narrow.lab.client(&narrow.engine).await;
    narrow.ask_until_cached("after a restart").await;
    disk.fill_except(0);
    for _ in 0..3 {
        narrow.ask("filled meanwhile").await;
    }
    stop(vec![narrow.engine]).await;
}
