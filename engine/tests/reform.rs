//! Re-forming: real engines over MLX's ring lose a rank, and the survivors become ranks of the next formation
//! with the weights they have.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

#[path = "support/engines.rs"]
mod engines;
#[path = "support/identities.rs"]
mod identities;
#[path = "support/model.rs"]
mod model;

use std::path::Path;
use std::time::{Duration, Instant};

use russet_rpc::engine as pb;
use russet_wire::engine_config::OverlapScheduling;
use russet_wire::event::GenerationEvent;
use russet_wire::request::GenerationRequest;
use rustix::process::Signal;
use tempfile::TempDir;
use tonic::Streaming;

use engines::{EngineHarness, Formation, TestEngine, ask, collect, next, say, within};

/// A copy of a folder.
fn copy_of(model: &Path) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(model).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    copy
}

fn question() -> GenerationRequest {
    GenerationRequest { ignore_eos: true, ..say("what is 17 + 25?") }
}

/// A prompt of several prefill chunks.
fn long_question() -> GenerationRequest {
    let text: String = (0..600).map(|number| format!("{number} and ")).collect();
    GenerationRequest { ignore_eos: true, max_tokens: Some(8), ..say(&text[..3600]) }
}

async fn answer(lab: &EngineHarness, engine: &TestEngine, question: GenerationRequest) -> Vec<u32> {
    let (ids, _, end) = collect(&mut ask(&mut lab.client(engine).await, question).await).await;
    assert!(matches!(end, GenerationEvent::Finished { .. }), "{end:?}");
    ids
}

/// The reuse state that a rank reports once MLX has left the group, or has not; the watch stays open.
async fn reuse_after_loss(watch: &mut Streaming<pb::EngineState>) -> pb::Reuse {
    within("a rank that has lost its group", async {
        while let Some(state) = watch.message().await.unwrap() {
            if state.phase() == pb::Phase::Failed && state.reuse() != pb::Reuse::Pending {
                return state.reuse();
            }
        }
        pb::Reuse::No
    })
    .await
}

/// Its state once it serves in a formation.
async fn wait_serving(engine: &TestEngine, epoch: u64) -> pb::EngineState {
    let state = engine.until(|state| state.epoch == epoch && state.phase() >= pb::Phase::Serving).await;
    assert_eq!((state.epoch, state.phase()), (epoch, pb::Phase::Serving), "{}", state.message);
    state
}

/// Bytes of loaded weights, once MLX holds nothing else. Memory of a request is freed a moment after its end.
async fn settled_weight_bytes(engine: &TestEngine) -> u64 {
    let rests = |state: &pb::EngineState| {
        state.loaded_bytes > 0 && state.running == 0 && state.memory_bytes <= state.loaded_bytes
    };
    let state = engine.until(rests).await;
    assert!(rests(&state), "{state:?} is not at rest");
    state.loaded_bytes
}

/// Number of entries in a folder of `/proc/PID`, if the system has it.
fn count(engine: &TestEngine, folder: &str) -> usize {
    let path = format!("/proc/{}/{folder}", engine.pid().as_raw_nonzero());
    std::fs::read_dir(path).map_or(0, Iterator::count)
}

/// When the other rank is lost.
#[derive(Clone, Copy, Debug, PartialEq)]
enum LossMoment {
    Idle,
    Decoding,
    Prefilling,
}

/// Starts the work that the loss interrupts.
async fn begin_load(
    lab: &EngineHarness,
    engine: &TestEngine,
    moment: LossMoment,
) -> Vec<Streaming<pb::GenerateEvent>> {
    let mut client = lab.client(engine).await;
    let mut running = Vec::new();
    match moment {
        LossMoment::Idle => {}
        // Two requests, so that a pipeline has a batch in every stage.
        LossMoment::Decoding => {
            for _ in 0..2 {
                let request = GenerationRequest { max_tokens: Some(2000), ..question() };
                running.push(ask(&mut client, request).await);
            }
            for events in &mut running {
                while !matches!(next(events).await, Some(GenerationEvent::Token { .. })) {}
            }
        }
        LossMoment::Prefilling => {
            running.push(ask(&mut client, long_question()).await);
            assert!(matches!(next(&mut running[0]).await, Some(GenerationEvent::Started { .. })));
        }
    }
    running
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn surviving_rank_reforms_its_group_without_loading_weights() {
    let model = model::random_model_dir();
    for (layers, members) in [(&[1, 3][..], 1), (&[model::LAYERS], 2)] {
        let own = copy_of(model.path());
        let mut lab = EngineHarness::new();
        // Cached prefixes would take memory too; and batches are in flight behind the failed one, as on Macs.
        lab.config.prefix_cache = false;
        lab.config.overlap_scheduling = OverlapScheduling::On;
        let mut formation = Formation::first(layers, members);
        let mut rank0 = lab.begin(own.path(), &formation, 0);
        let mut rank1 = lab.begin(model.path(), &formation, 1);
        let expected = answer(&lab, &rank0, question()).await;
        let loaded = settled_weight_bytes(&rank0).await;
        // Loading them again would fail now.
        std::fs::remove_file(own.path().join("model.safetensors")).unwrap();
        let mut open: Option<(usize, usize)> = None;
        for moment in
            [LossMoment::Idle, LossMoment::Decoding, LossMoment::Prefilling].into_iter().cycle().take(9)
        {
            let mut watch = rank0.watch().await;
            let running = begin_load(&lab, &rank0, moment).await;
            let struck = Instant::now();
            rank1.signal(Signal::KILL);
            let reuse = reuse_after_loss(&mut watch).await;
            assert_eq!(reuse, pb::Reuse::Yes, "{layers:?} by {members}, {moment:?}");
            for mut events in running {
                while !matches!(
                    next(&mut events).await.expect("a stream never just ends"),
                    GenerationEvent::Failed(_)
                ) {}
            }
            formation = formation.next();
            lab.form(&mut rank0, own.path(), &formation, 0).await.unwrap();
            rank1 = lab.begin(model.path(), &formation, 1);
            let state = wait_serving(&rank0, formation.epoch).await;
            eprintln!("{layers:?} by {members}, {moment:?}: serves again after {:?}", struck.elapsed());
            assert_eq!(state.loaded_bytes, loaded);
            let again = answer(&lab, &rank0, question()).await;
            assert_eq!(again, expected, "{layers:?} by {members}, {moment:?}");
            assert_eq!(settled_weight_bytes(&rank0).await, loaded);
            // Connections and reader threads of the earlier formation are gone, or soon will be.
            let now = || (count(&rank0, "fd"), count(&rank0, "task"));
            let most = *open.get_or_insert_with(now);
            within("as many descriptors and threads as before", async {
                while now().0 > most.0 || now().1 > most.1 {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            })
            .await;
        }
    }
}

/// While a rank leaves a lost group, MLX gets arbitrary data in its neighbour's name. Results computed from
/// it must not be cached, least of all on disk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_computed_without_a_neighbour_is_cached() {
    let model = model::random_model_dir();
    let mut lab = EngineHarness::new();
    lab.config.overlap_scheduling = OverlapScheduling::On;
    let alone = lab.start(model.path(), &[model::LAYERS]);
    let expected = answer(&lab, &alone[0], long_question()).await;
    drop(alone);
    for (layers, members) in [(&[1, 3][..], 1), (&[model::LAYERS], 2)] {
        let folder = tempfile::tempdir().unwrap();
        lab.prefix_dir = Some(folder.path().to_owned());
        let mut formation = Formation::first(layers, members);
        let mut rank0 = lab.begin(model.path(), &formation, 0);
        let mut rank1 = lab.begin(model.path(), &formation, 1);
        for round in 0..5 {
            let mut watch = rank0.watch().await;
            let running = begin_load(&lab, &rank0, LossMoment::Prefilling).await;
            rank1.signal(Signal::KILL);
            assert_eq!(
                reuse_after_loss(&mut watch).await,
                pb::Reuse::Yes,
                "{layers:?} by {members}, round {round}"
            );
            drop(running);
            formation = formation.next();
            lab.form(&mut rank0, model.path(), &formation, 0).await.unwrap();
            rank1 = lab.begin(model.path(), &formation, 1);
            wait_serving(&rank0, formation.epoch).await;
            let again = answer(&lab, &rank0, long_question()).await;
            assert_eq!(again, expected, "{layers:?} by {members}, round {round}");
        }
    }
}
