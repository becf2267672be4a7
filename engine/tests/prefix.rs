//! Real engines that keep what prompts have in common: what they answer is what they would have answered without,
//! alone and in groups, in memory, from disk after a restart, and when the files on it are damaged.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

#[path = "support/engines.rs"]
mod engines;
#[path = "support/identities.rs"]
mod identities;
#[path = "support/model.rs"]
mod model;

use std::path::{Path, PathBuf};
use std::time::Duration;

use russet_rpc::engine::engine_client::EngineClient;
use russet_wire::event::Event;
use russet_wire::request::GenerationRequest;
use rustix::process::Signal;
use tonic::transport::Channel;

use engines::{Engine, Lab, ask, collect, say, within};

/// Questions on one long text, then one on another.
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

/// Tokens of the answers, and how many of each prompt were kept.
async fn answers(client: &mut EngineClient<Channel>) -> Vec<(Vec<u32>, u32)> {
    let mut all = Vec::new();
    for question in questions() {
        let mut events = ask(client, question).await;
        let (ids, _, end) = collect(&mut events).await;
        let Event::Finished { usage, .. } = end else { panic!("{end:?}") };
        all.push((ids, usage.cached_tokens));
    }
    all
}

async fn stop(mut engines: Vec<Engine>) {
    // Followers first, who stay until rank 0 leaves and know by then that it is no failure.
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
async fn what_was_kept_answers_as_what_is_read() {
    let narrow = model::random_model_dir();
    // Heads of a group of numbers.
    let wide = model::random_model(model::Shape {
        hidden: 128,
        intermediate: 128,
        heads: 4,
        kv_heads: 2,
        layers: model::LAYERS,
        spread: 0.3,
    });
    for (model, layers, members, kv_cache) in [
        (&narrow, &[model::LAYERS][..], 1, "as-computed"),
        (&narrow, &[1, 3], 1, "as-computed"),
        (&narrow, &[model::LAYERS], 2, "as-computed"),
        (&wide, &[model::LAYERS], 1, "int8"),
        (&wide, &[1, 3], 1, "int4"),
        (&wide, &[model::LAYERS], 2, "int8"),
    ] {
        let story = format!("{layers:?} by {members}, {kv_cache}");
        let mut lab = Lab::new();
        lab.flags = vec!["--kv-cache", kv_cache, "--prefix-cache", "off"];
        let engines = lab.start_stages(model.path(), layers, members);
        let mut client = lab.client(&engines[0]).await;
        let expected: Vec<Vec<u32>> = answers(&mut client)
            .await
            .into_iter()
            .map(|(ids, kept)| {
                assert_eq!(kept, 0, "{story}: it is switched off");
                ids
            })
            .collect();
        drop(client);
        stop(engines).await;

        let folder = tempfile::tempdir().unwrap();
        lab.flags = vec!["--kv-cache", kv_cache];
        lab.prefix_dir = Some(folder.path().to_owned());
        let of_rank = |rank: usize| folder.path().join(rank.to_string());
        let size = layers.len() * members;
        for (round, damaged) in [("cold", false), ("after a restart", false), ("with damaged files", true)] {
            if damaged {
                // Of the last rank alone: the others' are of no use without them.
                for path in files(&of_rank(size - 1)) {
                    let mut bytes = std::fs::read(&path).unwrap();
                    let middle = bytes.len() / 2;
                    bytes[middle] ^= 1;
                    std::fs::write(&path, bytes).unwrap();
                }
            }
            let engines = lab.start_stages(model.path(), layers, members);
            let mut client = lab.client(&engines[0]).await;
            let (said, kept): (Vec<Vec<u32>>, Vec<u32>) = answers(&mut client).await.into_iter().unzip();
            assert_eq!(said, expected, "{story}, {round}");
            eprintln!("{story}, {round}: {kept:?} tokens were kept");
            let first = round == "after a restart";
            assert_eq!(kept[0] > 512, first, "{story}, {round}: {kept:?}");
            assert!(kept[1] > 512 && kept[3] > 128 && kept[4] > 512, "{story}, {round}: {kept:?}");
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
