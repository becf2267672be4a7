//! The ranks that hold the same layers between them, as a layer sees them: somebody to add up with.

use std::time::Instant;

use mlx_rs::{Array, error::Exception};
use russet_mlx::distributed::Group;

use crate::meter::{Collective, Meter, Phase};

/// The members of this rank's stage.
#[derive(Debug, Default)]
pub struct Stage {
    group: Option<Group>,
    meter: Meter,
}

impl Stage {
    /// Several members; a stage of one is the default. What travels between them is counted by `meter`.
    pub fn of(group: Group, meter: Meter) -> Self {
        Self { group: Some(group), meter }
    }

    /// Whether nothing is cut here.
    pub fn is_alone(&self) -> bool {
        self.group.is_none()
    }

    /// The sum of every member's `x`, the same bits on all of them.
    pub fn sum(&self, x: Array) -> Result<Array, Exception> {
        let Some(group) = &self.group else { return Ok(x) };
        if self.meter.timing() {
            x.eval()?;
        }
        metered(&self.meter, Collective::AllSum, || {
            group.all_sum(&x).map_err(|error| Exception::custom(error.to_string()))
        })
    }
}

/// What came of an operation between ranks, counted, and timed where that is wanted: then it is waited for.
pub fn metered(
    meter: &Meter,
    collective: Collective,
    operation: impl FnOnce() -> Result<Array, Exception>,
) -> Result<Array, Exception> {
    let begun = Instant::now();
    let array = operation()?;
    meter.count(collective, array.nbytes());
    if meter.timing() {
        array.eval()?;
        meter.took(Phase::Collective, begun.elapsed());
    }
    Ok(array)
}
