//! Recurrent state of one layer and one sequence: arrays of a fixed size that every position replaces, such as the
//! state of a delta net and the last inputs of its convolution. It goes back only to snapshots and to the beginning.

use mlx_rs::{Array, error::Exception};

use super::Rewound;

/// A state of fixed size.
#[derive(Clone, Debug, Default)]
pub struct RecurrentCache {
    /// Empty before the first position.
    state: Vec<Array>,
    offset: i32,
}

impl RecurrentCache {
    /// Positions that the state has seen.
    pub fn offset(&self) -> i32 {
        self.offset
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        self.state.iter().map(Array::nbytes).sum()
    }

    /// The state; empty before the first position.
    pub fn state(&self) -> &[Array] {
        &self.state
    }

    /// Replaces the state by that after `positions` more.
    pub fn advance(&mut self, state: Vec<Array>, positions: i32) {
        self.state = state;
        self.offset += positions;
    }

    /// Goes back to the first `to` positions: to none, or to those it has.
    pub fn rewind(&mut self, to: i32) -> Rewound {
        match to {
            0 => *self = Self::default(),
            to if to == self.offset => {}
            _ => return Rewound::Impossible,
        }
        Rewound::Rewound
    }

    /// An element of each array that is evaluated once the whole state is.
    pub fn readiness_probe(&self) -> Result<Vec<Array>, Exception> {
        self.state.iter().map(|array| array.sum(None)).collect()
    }
}
