//! Reads what an engine has computed for a request, as its events say, until the engine has no more to do with it:
//! because it has answered, was lost, or the client has left. Then it is recorded. Not here: what it makes in joules
//! and money, see `energy`.

use std::sync::Arc;

use russet_crds::GroupEnergy;
use russet_wire::event::{EngineEvent, GenerationEvent};

use crate::energy::EnginePart;
use crate::metrics::Metrics;
use crate::request_log::EngineRecorder;

/// The meter of one request at one engine; dropped, it is read.
pub(super) struct EngineMeter {
    metrics: Arc<Metrics>,
    /// The model as the client named it.
    model: String,
    recorder: EngineRecorder,
    part: EnginePart,
}

impl EngineMeter {
    /// Of a request to an engine of a group with this power.
    pub(super) fn new(
        metrics: Arc<Metrics>,
        model: String,
        recorder: EngineRecorder,
        power: Option<GroupEnergy>,
    ) -> Self {
        let part = EnginePart { engine_microseconds: None, has_answered: false, power };
        Self { metrics, model, recorder, part }
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
        self.part.engine_microseconds = engine_microseconds.or(self.part.engine_microseconds);
    }
}

impl Drop for EngineMeter {
    fn drop(&mut self) {
        self.recorder.computed(self.part);
        self.metrics.energy(&self.model, self.part);
    }
}
