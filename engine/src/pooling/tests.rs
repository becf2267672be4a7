//! Requests for vectors with a fake executor: what their time is charged to.

use super::*;
use crate::fixture::{self, FakeBehaviour, FakeExecutor, eventually};

/// How long a batch takes, at least.
const BATCH_TIME: Duration = Duration::from_millis(2);

/// An intake of a model that embeds, whose batches take a while and then behave like this.
fn intake(behaviour: FakeBehaviour) -> (PoolingIntake, EngineMetrics) {
    let fake = FakeExecutor::with_timing(BATCH_TIME, None);
    fake.set_behaviour(behaviour);
    let folder = fixture::model_dir();
    let metrics = EngineMetrics::new("m", 0, 100, 100).unwrap();
    let life = Lifecycle::default();
    life.advance(Phase::Serving, "");
    let model = PooledModel { task: Task::Embed, width: 1, token_types: 1, vocabulary: 100 };
    let tokenizer = TextTokenizer::load(folder.path()).unwrap();
    let intake = PoolingIntake::new(fake, model, tokenizer, 100, life, metrics.clone()).unwrap();
    (intake, metrics)
}

fn request() -> pb::EmbedRequest {
    let ids = pb::TokenIds { ids: vec![1, 2, 3] };
    let input = pb::EmbedInput { input: Some(pb::embed_input::Input::TokenIds(ids)) };
    pb::EmbedRequest { inputs: vec![input; 2], ..pb::EmbedRequest::default() }
}

/// A batch has run for a while.
async fn computes(metrics: &EngineMetrics) {
    eventually("a batch", || metrics.running.get() == 1).await;
    tokio::time::sleep(BATCH_TIME).await;
}

#[tokio::test]
async fn time_of_requests_that_fail_is_charged_to_none() {
    use FakeBehaviour::{Failing, Hanging, Normal, NotFiniteOn};
    for (behaviour, is_answered) in [
        (Normal, true),
        (NotFiniteOn(1), false),
        (Failing, false),
        // Its client leaves while the batch is computed.
        (Hanging, false),
    ] {
        let (intake, metrics) = intake(behaviour);
        let answered = tokio::select! {
            answered = intake.embed(request()) => answered.ok(),
            () = computes(&metrics), if behaviour == Hanging => None,
        };
        assert_eq!(answered.is_some(), is_answered, "{behaviour:?}");
        let (charged, uncharged) = metrics.engine_microseconds();
        let (time, other) = if is_answered { (charged, uncharged) } else { (uncharged, charged) };
        assert!(u128::from(time) >= BATCH_TIME.as_micros() && other == 0, "{behaviour:?}: {time}, {other}");
        if let Some((_, pooled)) = answered {
            assert_eq!(pooled.engine_microseconds, charged, "its client is told of it");
        }
    }
}
