//! Rotating KV cache of one layer and one sequence, for attention with a window: the last positions alone, and some more
//! before them, so that rejected drafts can be taken back and blocks of the prefix cache can be copied. It grows like a
//! whole cache, and drops what lies behind the window when it would have to grow: most tokens are written in place.

use std::ops::Range;

use mlx_rs::{Array, error::Exception};
use russet_model::{cost::CACHE_STEP, state::ROTATING_SLACK};

use super::{
    Rewound,
    format::{KvFormat, KvView},
    positions::PositionCache,
};

/// Keys and values of the last positions.
#[derive(Clone, Debug)]
pub struct RotatingCache {
    format: KvFormat,
    /// Tokens that a position sees, itself included.
    window: i32,
    positions: PositionCache,
    /// Position of the sequence that lies first in `positions`.
    first: i32,
}

impl RotatingCache {
    /// An empty cache.
    pub fn new(format: KvFormat, window: i32) -> Self {
        Self { format, window: window.max(1), positions: PositionCache::default(), first: 0 }
    }

    /// Format of its keys and values.
    pub fn format(&self) -> KvFormat {
        self.format
    }

    /// Positions of the sequence that it has seen.
    pub fn offset(&self) -> i32 {
        self.first + self.positions.offset()
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        self.positions.bytes()
    }

    /// Appends keys and values, `[batch, heads, positions, width]`; returns a view of the last `window - 1` positions
    /// before them and of them all. The caller masks what lies before a position's own window.
    pub fn append(&mut self, keys: &Array, values: &Array) -> Result<KvView, Exception> {
        self.append_raw(self.format.encode(keys, values)?)?;
        self.view(keys.dim(2))
    }

    /// A view of the last `count` positions and of `window - 1` before them.
    pub fn view(&self, count: i32) -> Result<KvView, Exception> {
        let held = self.positions.offset();
        let visible = held.min(count + self.window - 1);
        self.format.view(&self.positions.tensors()?)?.range(held - visible..held)
    }

    /// Appends positions in the form in which they are stored.
    pub fn append_raw(&mut self, new: Vec<Array>) -> Result<(), Exception> {
        let count = new.first().map_or(0, |part| part.dim(2));
        let (held, retained) = (self.positions.offset(), self.window - 1 + ROTATING_SLACK as i32);
        // The rest of a long piece of prompt goes with the next position.
        let is_full = held + count > self.positions.capacity() || held > retained + CACHE_STEP as i32;
        if held > retained && is_full {
            let dropped = held - retained;
            self.positions.drop_first(dropped)?;
            self.first += dropped;
        }
        self.positions.append(new)
    }

    /// Copies of some positions of each array; `None` where not all of them are there.
    pub fn slice(&self, positions: Range<i32>) -> Result<Option<Vec<Array>>, Exception> {
        if positions.start < self.first || positions.end > self.offset() {
            return Ok(None);
        }
        self.positions.slice(positions.start - self.first..positions.end - self.first)
    }

    /// Goes back to the first `to` positions, as long as everything the next one sees is there.
    pub fn rewind(&mut self, to: i32) -> Rewound {
        if to < 0 || to > self.offset() || self.first > (to - (self.window - 1)).max(0) {
            return Rewound::Impossible;
        }
        self.positions.truncate(to - self.first);
        Rewound::Rewound
    }

    /// An element of each array that is evaluated once the whole cache is.
    pub fn readiness_probe(&self) -> Result<Vec<Array>, Exception> {
        self.positions.readiness_probe()
    }
}
