//! Rotating KV cache of one layer and one sequence, for attention with a window: the last positions alone. It keeps
//! one position less than the window of what was there before an append, since each new position sees itself.

use mlx_rs::{
    Array,
    error::Exception,
    ops::{concatenate, indexing::TryIndexOp},
};

use super::{
    Rewound,
    format::{KvFormat, KvView, prefix},
    positions::probe,
};

/// Keys and values of the last positions.
#[derive(Clone, Debug)]
pub struct RotatingCache {
    format: KvFormat,
    /// Tokens that a position sees, itself included.
    window: i32,
    /// Arrays of `[batch, heads, positions, width]`: the last ones up to `offset`.
    tensors: Vec<Array>,
    offset: i32,
}

impl RotatingCache {
    /// An empty cache.
    pub fn new(format: KvFormat, window: i32) -> Self {
        Self { format, window: window.max(1), tensors: Vec::new(), offset: 0 }
    }

    /// Positions of the sequence that it has seen.
    pub fn offset(&self) -> i32 {
        self.offset
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(Array::nbytes).sum()
    }

    fn retained(&self) -> i32 {
        self.tensors.first().map_or(0, |tensor| tensor.dim(2))
    }

    /// Appends keys and values, `[batch, heads, positions, width]`; returns a view of the last `window - 1` positions
    /// before them and of them all. The caller masks what lies before a position's own window.
    pub fn append(&mut self, keys: &Array, values: &Array) -> Result<KvView, Exception> {
        let new = self.format.encode(keys, values)?;
        let retained = self.retained();
        let from = (retained - (self.window - 1)).max(0);
        let tensors = if retained == from {
            new
        } else {
            let join = |(old, new): (&Array, Array)| {
                concatenate(&[old.try_index((.., .., from..retained, ..))?, new], 2)
            };
            self.tensors.iter().zip(new).map(join).collect::<Result<_, _>>()?
        };
        self.offset += keys.dim(2);
        self.tensors = tensors;
        self.format.view(&self.tensors)
    }

    /// Goes back to the first `to` positions, as long as everything the next one sees is there.
    pub fn rewind(&mut self, to: i32) -> Rewound {
        let first = self.offset - self.retained();
        if to < 0 || to > self.offset || first > (to - (self.window - 1)).max(0) {
            return Rewound::Impossible;
        }
        let shortened: Result<Vec<_>, _> =
            self.tensors.iter().map(|tensor| prefix(tensor, to - first)).collect();
        match shortened {
            Ok(tensors) => {
                self.tensors = if to == first { Vec::new() } else { tensors };
                self.offset = to;
                Rewound::Rewound
            }
            Err(_) => Rewound::Impossible,
        }
    }

    /// An element of each array that is evaluated once the whole cache is.
    pub fn readiness_probe(&self) -> Result<Vec<Array>, Exception> {
        self.tensors.iter().map(probe).collect()
    }
}
