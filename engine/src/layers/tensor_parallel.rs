//! Tensor parallel group: the ranks that share the layers of a stage, as a layer sees them.

use std::time::Instant;

use mlx_rs::{Array, error::Exception, ops::zeros_like};
use russet_mlx::distributed::ProcessGroup;

use crate::step_profiler::{Collective, StepPhase, StepProfiler};

/// The tensor parallel group of this rank.
#[derive(Debug, Default)]
pub struct TpGroup {
    group: Option<ProcessGroup>,
    profiler: StepProfiler,
    /// Whether the first rank chooses experts for all.
    broadcasts_routing: bool,
}

impl TpGroup {
    /// A group of several tensor ranks; the default is a group of one. The profiler counts its traffic.
    pub fn new(group: ProcessGroup, profiler: StepProfiler) -> Self {
        Self { group: Some(group), profiler, broadcasts_routing: false }
    }

    /// The same with a first rank that chooses experts for all, or without.
    pub fn with_routing_broadcast(self, broadcasts_routing: bool) -> Self {
        Self { broadcasts_routing, ..self }
    }

    /// Whether the first rank chooses experts for all.
    pub fn broadcasts_routing(&self) -> bool {
        self.broadcasts_routing && !self.is_single_rank()
    }

    /// The first rank's `x`, on all ranks.
    pub fn broadcast(&self, x: Array) -> Result<Array, Exception> {
        let is_first = self.group.as_ref().is_none_or(|group| group.rank() == 0);
        // A sum to which the others add nothing: MLX has no collective for it.
        self.all_sum(if is_first { x } else { zeros_like(&x)? })
    }

    /// Whether there is only one tensor rank, so that nothing is sharded.
    pub fn is_single_rank(&self) -> bool {
        self.group.is_none()
    }

    /// Number of tensor ranks.
    pub fn size(&self) -> usize {
        self.group.as_ref().map_or(1, ProcessGroup::size)
    }

    /// All-sum of every rank's `x`, with the same bits on all of them.
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

/// Counts the bytes of a collective; in a timed batch, also evaluates its result and records the time.
pub fn profiled(
    meter: &StepProfiler,
    collective: Collective,
    operation: impl FnOnce() -> Result<Array, Exception>,
) -> Result<Array, Exception> {
    let started = Instant::now();
    let array = operation()?;
    meter.count_bytes(collective, array.nbytes());
    if meter.is_timing() {
        array.eval()?;
        meter.record_time(StepPhase::Collective, started.elapsed());
    }
    Ok(array)
}
