//! Ranks whose group is lost: what they report to their agent, what it may ask of them, and their end without
//! one.

use serde_json::{Value, json};

use super::*;
use crate::lifecycle::Reuse;

type AgentClient = ControlClient<Channel>;

fn agent(lab: &RankHarness, node: &str) -> AgentClient {
    ControlClient::new(tls::unix_channel(lab.sockets.path().join(node)))
}

async fn watch(agent: &mut AgentClient) -> Streaming<pb::EngineState> {
    within("a watch", agent.watch(pb::WatchRequest {})).await.unwrap().into_inner()
}

/// The reuse states it reports, up to the last one; where MLX replies at once, that is all.
async fn reuse_states(states: &mut Streaming<pb::EngineState>) -> Vec<pb::Reuse> {
    let mut reported: Vec<pb::Reuse> = Vec::new();
    while let Some(state) = within("a state", states.message()).await.unwrap() {
        if state.phase() == pb::Phase::Failed && reported.last() != Some(&state.reuse()) {
            reported.push(state.reuse());
        }
        if matches!(reported.last(), Some(pb::Reuse::Yes | pb::Reuse::No)) {
            break;
        }
    }
    reported
}

/// The configuration of a rank's next formation, as the agent sends it, with other fields.
fn next_formation(lab: &RankHarness, node: &str, more: Value) -> String {
    let mut config = serde_json::to_value(lab.config(node, pipeline_of(2, short()))).unwrap();
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config.to_string()
}

async fn form(agent: &mut AgentClient, config: String) -> Result<(), tonic::Status> {
    within("an answer to Form", agent.form(pb::FormRequest { config })).await.map(|_| ())
}

/// Two serving ranks, and the agent of the first.
async fn group(lab: &RankHarness, mood: FakeBehaviour) -> (RankProcess, RankProcess, AgentClient) {
    let fakes = [FakeExecutor::new(), FakeExecutor::new()];
    let config = pipeline_of(2, short());
    let follower = lab.start("n1", EngineConfig { rank: 1, ..config.clone() }, fakes[1].clone()).await;
    let leader = EngineConfig { peers: vec![follower.peer(1)], ..config };
    let leader = lab.start_unwatched("n0", leader, fakes[0].clone()).await;
    leader.serving().await;
    fakes[0].set_behaviour(mood);
    (leader, follower, agent(lab, "n0"))
}

#[tokio::test]
async fn rank_rejoins_once_and_only_with_a_compatible_config() {
    let lab = RankHarness::new();
    let (mut leader, mut follower, mut agent) = group(&lab, FakeBehaviour::Normal).await;
    let next = next_formation(&lab, "n0", json!({"epoch": 1}));
    let early = form(&mut agent, next.clone()).await.unwrap_err();
    assert_eq!(early.code(), Code::FailedPrecondition, "it serves: {early}");
    assert_eq!(leader.life.status().phase, Phase::Serving);

    let mut states = watch(&mut agent).await;
    follower.kill();
    assert_eq!(reuse_states(&mut states).await.last(), Some(&pb::Reuse::Yes));
    for (more, said) in [
        (json!({"epoch": 1, "rank": 1}), "rank is 1, but this process was started with 0"),
        (json!({"epoch": 1, "options": {"kvCache": "Int8"}}), "options.kvCache is \"Int8\""),
        (json!({"epoch": 0}), "epoch 0 does not follow epoch 0"),
        (json!({"epoch": 1, "ofANewerRelease": "x"}), "ofANewerRelease"),
    ] {
        let refused = form(&mut agent, next_formation(&lab, "n0", more.clone())).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{more}");
        assert!(refused.message().contains(said), "{more}: {}", refused.message());
    }
    // An agent of the release before sends the arguments of a new process, in a field of its own.
    let refused = form(&mut agent, String::new()).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().contains("the agent sent no configuration"), "{}", refused.message());
    form(&mut agent, next).await.unwrap();
    // The watch ends without a message: the next formation reports from here on.
    while let Some(state) = within("the end of the watch", states.message()).await.unwrap() {
        assert_eq!(state.reuse(), pb::Reuse::Yes);
    }
    let ExitOutcome::Reform(config) = leader.outcome().await else { panic!("it ended") };
    assert_eq!((config.epoch, config.rank), (1, 0));
    assert_eq!(leader.life.status().reuse, Reuse::Taken);
}

#[tokio::test]
async fn rank_that_cannot_rejoin_or_is_not_claimed_exits() {
    // (MLX's behaviour, the agent's action, reported states)
    type AgentAction = fn(AgentClient) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;
    let watches: AgentAction = |_| Box::pin(async {});
    let stops: AgentAction =
        |mut agent| Box::pin(async move { drop(agent.stop(pb::StopRequest {}).await.unwrap()) });
    for (mood, then, reported) in [
        (FakeBehaviour::Hanging, watches, &[pb::Reuse::Pending, pb::Reuse::No][..]),
        (FakeBehaviour::Normal, stops, &[pb::Reuse::Yes]),
    ] {
        let lab = RankHarness::new();
        let (mut leader, mut follower, mut agent) = group(&lab, mood).await;
        let mut states = watch(&mut agent).await;
        // Without a tunnel, MLX gets only a moment to leave while a batch runs.
        let running = if mood == FakeBehaviour::Hanging {
            Some(ask(&mut lab.client(&leader), say("x")).await)
        } else {
            None
        };
        while running.is_some()
            && within("a batch", states.message()).await.unwrap().unwrap().batch_estimate_seconds == 0.0
        {
        }
        follower.kill();
        let uses = reuse_states(&mut states).await;
        assert!(uses.ends_with(reported), "{mood:?}: {uses:?}");
        then(agent).await;
        let ExitOutcome::Failed(reason) = leader.outcome().await else { panic!("{mood:?}: it did not fail") };
        assert!(reason.contains("rank 1 on n1"), "{mood:?}: {reason}");
    }
    // No watcher.
    let lab = RankHarness::new();
    let (mut leader, mut follower, _) = group(&lab, FakeBehaviour::Normal).await;
    follower.kill();
    assert!(matches!(leader.outcome().await, ExitOutcome::Failed(_)));
}

#[tokio::test]
async fn disband_makes_a_rank_leave_its_group() {
    let lab = RankHarness::new();
    let (leader, _follower, mut agent) = group(&lab, FakeBehaviour::Normal).await;
    let mut states = watch(&mut agent).await;
    let reason = "the group has a higher epoch".to_owned();
    agent.disband(pb::DisbandRequest { reason: reason.clone() }).await.unwrap();
    assert_eq!(reuse_states(&mut states).await.last(), Some(&pb::Reuse::Yes));
    assert_eq!(leader.life.status().message, reason);

    // A single rank has no group to lose.
    let mut alone = lab.start("n2", short(), FakeExecutor::new()).await;
    alone.serving().await;
    self::agent(&lab, "n2").disband(pb::DisbandRequest { reason }).await.unwrap();
    assert!(matches!(alone.outcome().await, ExitOutcome::Failed(_)));
    assert_eq!(alone.states().await.pop().unwrap().reuse(), pb::Reuse::No);
}
