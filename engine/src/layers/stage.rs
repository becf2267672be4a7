//! The ranks that hold the same layers between them, as a layer sees them: somebody to add up with.

use mlx_rs::{Array, error::Exception};
use russet_mlx::distributed::Group;

/// The members of this rank's stage.
#[derive(Debug, Default)]
pub struct Stage {
    group: Option<Group>,
}

impl Stage {
    /// Several members; a stage of one is the default.
    pub fn of(group: Group) -> Self {
        Self { group: Some(group) }
    }

    /// Whether nothing is cut here.
    pub fn is_alone(&self) -> bool {
        self.group.is_none()
    }

    /// The sum of every member's `x`, the same bits on all of them.
    pub fn sum(&self, x: Array) -> Result<Array, Exception> {
        match &self.group {
            None => Ok(x),
            Some(group) => group.all_sum(&x).map_err(|error| Exception::custom(error.to_string())),
        }
    }
}
