//! Reads what an engine has computed for a request, as its events say, until the engine has no more to do with it:
//! because it has answered, was lost, or the client has left. Then it is recorded, and charged to Budgets. Not here: what it
//! makes in joules and money, see `energy`.

use std::sync::Arc;
use std::time::Duration;

use russet_crds::GroupEnergy;
use russet_wire::event::{EngineEvent, GenerationEvent};
use tokio::time::Instant;

use crate::budgets::EnergyCharge;
use crate::energy::EnginePart;
use crate::metrics::Metrics;
use crate::request_log::EngineRecorder;

/// The meter of one request at one engine; dropped, it is read.
pub(super) struct EngineMeter {
    metrics: Arc<Metrics>,
    /// The model as the client named it.
    model: String,
    recorder: EngineRecorder,
    /// When it was made: before the engine got the request.
    began: Instant,
    part: EnginePart,
    /// The Budgets that limit its energy.
    charge: Option<EnergyCharge>,
}

impl EngineMeter {
    /// Of a request to an engine of a group with this power.
    pub(super) fn new(
        metrics: Arc<Metrics>,
        model: String,
        recorder: EngineRecorder,
        power: Option<GroupEnergy>,
        charge: Option<EnergyCharge>,
    ) -> Self {
        let part = EnginePart { engine_microseconds: None, has_answered: false, power };
        Self { metrics, model, recorder, began: Instant::now(), part, charge }
    }

    /// Reads an event, which has what was computed up to it.
    pub(super) fn read(&mut self, event: &EngineEvent) {
        let EngineEvent { event, engine_microseconds } = event;
        self.part.has_answered |=
            matches!(event, GenerationEvent::Token { .. } | GenerationEvent::Finished { .. });
        self.set(*engine_microseconds);
    }

    /// An engine has answered all at once.
    pub(super) fn answered(&mut self, engine_microseconds: Option<u64>) {
        self.part.has_answered = true;
        self.set(engine_microseconds);
    }

    fn set(&mut self, engine_microseconds: Option<u64>) {
        let said = engine_microseconds.map(|said| credible(said, self.began.elapsed()));
        self.part.engine_microseconds = said.or(self.part.engine_microseconds);
    }
}

/// Of the microseconds that an engine says it has computed for a request, as many as have passed since it got it: a
/// request has at most all of a group's time.
fn credible(microseconds: u64, elapsed: Duration) -> u64 {
    microseconds.min(u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX))
}

impl Drop for EngineMeter {
    fn drop(&mut self) {
        self.recorder.computed(self.part);
        self.metrics.energy(&self.model, self.part);
        if let (Some(charge), Some(millijoules)) = (&self.charge, self.part.millijoules()) {
            charge.charge(millijoules);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_computes_no_longer_than_it_had_the_request() {
        let second = Duration::from_secs(1);
        for (said, elapsed, expected) in [
            (0, second, 0),
            (999_999, second, 999_999),
            (1_000_000, second, 1_000_000),
            (1_000_001, second, 1_000_000),
            (u64::MAX, second, 1_000_000),
            (u64::MAX, Duration::ZERO, 0),
            (u64::MAX, Duration::MAX, u64::MAX),
        ] {
            assert_eq!(credible(said, elapsed), expected, "{said} µs in {elapsed:?}");
        }
    }
}
