//! The ranks that hold the same layers between them, as a layer sees them: somebody to add up with.

use std::time::Instant;

use mlx_rs::{Array, error::Exception};
use russet_mlx::distributed::ProcessGroup;

use crate::step_profiler::{Collective, StepProfiler, StepPhase};

/// The members of this rank's stage.
#[derive(Debug, Default)]
pub struct TpGroup {
    group: Option<ProcessGroup>,
    profiler: StepProfiler,
}

impl TpGroup {
    /// Several members; a stage of one is the default. What travels between them is counted by `meter`.
    pub fn new(group: ProcessGroup, profiler: StepProfiler) -> Self {
        Self { group: Some(group), profiler }
    }

    /// Whether nothing is cut here.
    pub fn is_single_rank(&self) -> bool {
        self.group.is_none()
    }

    /// The sum of every member's `x`, the same bits on all of them.
    pub fn all_sum(&self, x: Array) -> Result<Array, Exception> {
        let Some(group) = &self.group else { return Ok(x) };
        if self.profiler.is_timing() {
            x.eval()?;
        }
        profiled(&self.profiler, Collective::AllSum, || {
            group.all_sum(&x).map_err(|error| Exception::custom(error.to_string()))
        })
    }
}

/// What came of an operation between ranks, counted, and timed where that is wanted: then it is waited for.
pub fn profiled(
    meter: &StepProfiler,
    collective: Collective,
    operation: impl FnOnce() -> Result<Array, Exception>,
) -> Result<Array, Exception> {
    let begun = Instant::now();
    let array = operation()?;
    meter.count_bytes(collective, array.nbytes());
    if meter.is_timing() {
        array.eval()?;
        meter.record_time(StepPhase::Collective, begun.elapsed());
    }
    Ok(array)
}
