//! What a layer remembers of one sequence, by the [`StateKind`] of its mixer. All kinds share the verbs of this module:
//! rewind, snapshot, restore and their size in bytes; how a layer appends is its own. Which verbs a whole model has,
//! scheduler, prefix cache and speculative decoding learn from [`CacheSupport`](crate::executor::CacheSupport).

pub mod format;
pub mod kv;
pub mod latent;
mod positions;
pub mod recurrent;
pub mod rotating;

use std::ops::Range;

use mlx_rs::{Array, error::Exception};
use russet_model::state::StateKind;

use format::{KvFormat, KvView};
use kv::KvCache;
use latent::{LATENT_TENSORS, LatentCache};
use recurrent::RecurrentCache;
use rotating::RotatingCache;

/// What one layer remembers of one sequence.
#[derive(Clone, Debug)]
pub enum LayerCache {
    /// Keys and values of every position.
    Kv(KvCache),
    /// Keys and values of the last positions.
    Rotating(RotatingCache),
    /// One latent of every position.
    Latent(LatentCache),
    /// A state of fixed size.
    Recurrent(RecurrentCache),
}

/// Whether a cache is back at an earlier position.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rewound {
    /// It is: it equals a cache that never saw the positions behind.
    Rewound,
    /// It no longer has that position, and is unchanged.
    Impossible,
}

/// A cache at one position, to be restored later. It shares its arrays with the cache it was taken of: the next append
/// copies what it would have written in place, so where a cache can be rewound, that is cheaper.
#[derive(Clone, Debug)]
pub struct CacheSnapshot(LayerCache);

impl CacheSnapshot {
    /// The position.
    pub fn offset(&self) -> i32 {
        self.0.offset()
    }

    /// Bytes of the arrays that it keeps alive.
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }
}

impl LayerCache {
    /// An empty cache of this kind. Keys and values are kept in `format`; a latent and a state are kept as computed.
    pub fn new(kind: StateKind, format: KvFormat) -> Self {
        match kind {
            StateKind::KeyValue => Self::Kv(KvCache::new(format)),
            StateKind::Rotating { window } => Self::Rotating(RotatingCache::new(format, window as i32)),
            StateKind::Latent => Self::Latent(LatentCache::default()),
            StateKind::Recurrent => Self::Recurrent(RecurrentCache::default()),
        }
    }

    /// Positions of the sequence that it has seen.
    pub fn offset(&self) -> i32 {
        match self {
            Self::Kv(KvCache { positions, .. }) | Self::Latent(LatentCache { positions }) => {
                positions.offset()
            }
            Self::Rotating(cache) => cache.offset(),
            Self::Recurrent(cache) => cache.offset(),
        }
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Kv(KvCache { positions, .. }) | Self::Latent(LatentCache { positions }) => {
                positions.bytes()
            }
            Self::Rotating(cache) => cache.bytes(),
            Self::Recurrent(cache) => cache.bytes(),
        }
    }

    /// Appends keys and values, `[batch, heads, positions, width]`; returns a view of those that the new positions
    /// attend to.
    pub fn append(&mut self, keys: &Array, values: &Array) -> Result<KvView, Exception> {
        match self {
            Self::Kv(cache) => cache.append(keys, values),
            Self::Rotating(cache) => cache.append(keys, values),
            Self::Latent(_) | Self::Recurrent(_) => {
                Err(Exception::custom("attention was given the cache of another kind of layer"))
            }
        }
    }

    /// The view that the last append of `count` positions returned, for a layer that reads the cache of another.
    pub fn last_view(&self, count: i32) -> Result<KvView, Exception> {
        match self {
            Self::Kv(cache) => cache.view(),
            Self::Rotating(cache) => cache.view(count),
            Self::Latent(_) | Self::Recurrent(_) => {
                Err(Exception::custom("attention was given the cache of another kind of layer"))
            }
        }
    }

    /// The state of a layer that keeps one of fixed size.
    pub fn recurrent(&mut self) -> Result<&mut RecurrentCache, Exception> {
        match self {
            Self::Recurrent(cache) => Ok(cache),
            Self::Kv(_) | Self::Rotating(_) | Self::Latent(_) => {
                Err(Exception::custom("a recurrent layer was given the cache of another kind of layer"))
            }
        }
    }

    /// Goes back to the first `to` positions, if they are all there.
    pub fn rewind(&mut self, to: i32) -> Rewound {
        if to > self.offset() {
            return Rewound::Impossible;
        }
        match self {
            Self::Kv(KvCache { positions, .. }) | Self::Latent(LatentCache { positions }) => {
                positions.truncate(to);
                Rewound::Rewound
            }
            Self::Rotating(cache) => cache.rewind(to),
            Self::Recurrent(cache) => cache.rewind(to),
        }
    }

    /// Whether it goes back to any earlier position, so that it needs no snapshot.
    pub fn rewinds_anywhere(&self) -> bool {
        match self {
            Self::Kv(_) | Self::Latent(_) => true,
            Self::Rotating(_) | Self::Recurrent(_) => false,
        }
    }

    /// Whether it goes back to every position of a step that verifies draft tokens.
    pub fn takes_back_drafts(&self) -> bool {
        match self {
            Self::Kv(_) | Self::Latent(_) | Self::Rotating(_) => true,
            Self::Recurrent(_) => false,
        }
    }

    /// The cache as it is now.
    pub fn snapshot(&self) -> CacheSnapshot {
        CacheSnapshot(self.clone())
    }

    /// Goes back to a snapshot of this cache, wherever it is now.
    pub fn restore(&mut self, snapshot: &CacheSnapshot) {
        *self = snapshot.0.clone();
    }

    /// Arrays of a block of positions; 0 where positions cannot be told apart.
    pub fn block_tensors(&self) -> usize {
        match self {
            Self::Kv(cache) => cache.format().tensor_count(),
            Self::Rotating(cache) => cache.format().tensor_count(),
            Self::Latent(_) => LATENT_TENSORS,
            Self::Recurrent(_) => 0,
        }
    }

    /// Copies of some positions of each array; `None` if the cache does not have them all, or cannot tell positions
    /// apart.
    pub fn slice(&self, positions: Range<i32>) -> Result<Option<Vec<Array>>, Exception> {
        match self {
            Self::Kv(KvCache { positions: held, .. }) | Self::Latent(LatentCache { positions: held }) => {
                held.slice(positions)
            }
            Self::Rotating(cache) => cache.slice(positions),
            Self::Recurrent(_) => Ok(None),
        }
    }

    /// Appends positions as [`Self::slice`] returns them.
    pub fn append_raw(&mut self, new: Vec<Array>) -> Result<(), Exception> {
        match self {
            Self::Kv(KvCache { positions, .. }) | Self::Latent(LatentCache { positions }) => {
                positions.append(new)
            }
            Self::Rotating(cache) => cache.append_raw(new),
            Self::Recurrent(_) => Err(Exception::custom(
                "blocks cannot be loaded into a cache that does not tell positions apart",
            )),
        }
    }

    /// An element of each array that is evaluated once the whole cache is.
    pub fn readiness_probe(&self) -> Result<Vec<Array>, Exception> {
        match self {
            Self::Kv(KvCache { positions, .. }) | Self::Latent(LatentCache { positions }) => {
                positions.readiness_probe()
            }
            Self::Rotating(cache) => cache.readiness_probe(),
            Self::Recurrent(cache) => cache.readiness_probe(),
        }
    }
}

#[cfg(test)]
mod tests;
