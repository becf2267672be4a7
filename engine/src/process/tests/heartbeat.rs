//! Ranks that hang, and networks that carry nothing: what the agent hears meanwhile, and when a group gives
//! up by itself.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;

#[tokio::test]
async fn engine_sends_heartbeats_while_the_executor_hangs() {
    let lab = RankHarness::new();
    let fake = FakeExecutor::with_timing(Duration::from_millis(5), None);
    let rank = lab.start_unwatched("n0", EngineConfig { max_sequences: 1, ..short() }, fake.clone()).await;
    rank.serving().await;
    let mut control = ControlClient::new(tls::unix_channel(lab.sockets.path().join("n0")));
    let mut watch = control.watch(pb::WatchRequest {}).await.unwrap().into_inner();
    let mut beat = async || within("a beat", watch.message()).await.unwrap().unwrap();
    let rests = beat().await;
    assert!(rests.batches_ended > 0 && rests.heartbeat_milliseconds > 0, "{rests:?}");
    assert_eq!(rests.batch_estimate_seconds, 0.0, "nothing runs");
    // No batch progresses, and heartbeats continue.
    let again = beat().await;
    assert_eq!((again.batches_ended, again.phase()), (rests.batches_ended, pb::Phase::Serving));
    fake.set_behaviour(FakeBehaviour::Hanging);
    let _events = ask(&mut lab.client(&rank), say("x")).await;
    let first = loop {
        let state = beat().await;
        if state.batch_estimate_seconds > 0.0 {
            break state;
        }
    };
    assert!(first.batch_estimate_seconds < 60.0, "the smoke prompt taught it nothing: {first:?}");
    for _ in 0..4 {
        let state = beat().await;
        assert_eq!(state.batches_ended, first.batches_ended);
        assert_eq!(state.batch_estimate_seconds, first.batch_estimate_seconds);
        assert_eq!(state.phase(), pb::Phase::Serving);
    }
}

/// A proxy to one rank; when cut, it carries nothing more and closes nothing.
async fn cable(to: String) -> (String, Arc<AtomicBool>) {
    async fn carry(
        from: &mut (impl AsyncReadExt + Unpin),
        to: &mut (impl AsyncWriteExt + Unpin),
        cut: &AtomicBool,
    ) {
        let mut bytes = vec![0; 4096];
        loop {
            match from.read(&mut bytes).await {
                Ok(length) if length > 0 && !cut.load(Ordering::SeqCst) => {
                    if to.write_all(&bytes[..length]).await.is_err() {
                        return;
                    }
                }
                Ok(length) if length > 0 => {}
                _ if cut.load(Ordering::SeqCst) => std::future::pending().await,
                _ => return,
            }
        }
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let cut = Arc::new(AtomicBool::new(false));
    let is_cut = cut.clone();
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let Ok(mut far) = TcpStream::connect(&to).await else { continue };
            let cut = is_cut.clone();
            tokio::spawn(async move {
                let ((mut near_in, mut near_out), (mut far_in, mut far_out)) = (near.split(), far.split());
                tokio::select! {
                    () = carry(&mut near_in, &mut far_out, &cut) => {}
                    () = carry(&mut far_in, &mut near_out, &cut) => {}
                }
            });
        }
    });
    (address, cut)
}

#[tokio::test]
async fn silent_peer_fails_a_busy_rank_soon_and_an_idle_one_later() {
    let lab = RankHarness::new();
    let fakes = [FakeExecutor::with_timing(Duration::from_millis(5), None), FakeExecutor::new()];
    let group = pipeline_of(2, EngineConfig { context_tokens: 100_000, ..EngineConfig::default() });
    let mut follower = lab.start("n1", EngineConfig { rank: 1, ..group.clone() }, fakes[1].clone()).await;
    let (address, cut) = cable(follower.address.clone()).await;
    let peers = vec![PeerRank { address: address.parse().unwrap(), ..follower.peer(1) }];
    let mut leader = lab.start("n0", EngineConfig { peers, ..group }, fakes[0].clone()).await;
    leader.serving().await;
    follower.serving().await;
    let mut events = ask(&mut lab.client(&leader), say_for("a", 90_000)).await;
    while !matches!(next(&mut events).await, Some(GenerationEvent::Token { .. })) {}
    // MLX hangs without its neighbour.
    fakes[0].set_behaviour(FakeBehaviour::Hanging);
    cut.store(true, Ordering::SeqCst);
    let failure = failure(collect(&mut events).await.1);
    assert_eq!(failure.kind, FailureKind::Unavailable);
    assert!(failure.message.contains("rank 1 on n1"), "{}", failure.message);
    assert!(failure.message.contains("is lost: it was silent for"), "{}", failure.message);
    assert!(matches!(leader.outcome().await, ExitOutcome::Failed(_)));
    let ExitOutcome::Failed(reason) = follower.outcome().await else { panic!("it stopped") };
    assert!(reason.starts_with("rank 0 is lost: it was silent for"), "{reason}");
}
