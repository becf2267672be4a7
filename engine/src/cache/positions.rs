//! Arrays with one entry per position. They grow in steps, so that most tokens are written in place.

use std::ops::Range;

use mlx_rs::{
    Array,
    error::Exception,
    ops::{concatenate, indexing::TryIndexOp, zeros_dtype},
};
use russet_mlx::array::write_slice;

use super::format::range;
use crate::prefix_cache;

/// Allocation unit in positions.
const CACHE_STEP: i32 = prefix_cache::CACHE_STEP as i32;

/// Arrays of `[batch, heads, positions, width]`, with `offset` positions in use.
#[derive(Clone, Debug, Default)]
pub struct PositionCache {
    /// Empty before the first position.
    tensors: Vec<Array>,
    offset: i32,
}

impl PositionCache {
    /// Positions in use.
    pub fn offset(&self) -> i32 {
        self.offset
    }

    /// Bytes allocated, unused positions included.
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(Array::nbytes).sum()
    }

    /// Positions that fit without growing.
    pub fn capacity(&self) -> i32 {
        self.tensors.first().map_or(0, |tensor| tensor.dim(2))
    }

    /// Drops the first positions; the others are copied, and the cache has no room for more.
    pub fn drop_first(&mut self, count: i32) -> Result<(), Exception> {
        for tensor in &mut self.tensors {
            *tensor = range(tensor, &(count..self.offset))?;
        }
        self.offset -= count;
        Ok(())
    }

    /// Appends positions: one array for each that the cache has.
    pub fn append(&mut self, new: Vec<Array>) -> Result<(), Exception> {
        let positions = new.first().map_or(0, |part| part.dim(2));
        let (from, to) = (self.offset, self.offset + positions);
        let mut tensors = std::mem::take(&mut self.tensors).into_iter();
        for new in new {
            let tensor = grow(tensors.next(), from, &new)?;
            let written = write_slice(&tensor, &new, &[0, 0, from, 0]);
            self.tensors.push(written.map_err(|error| Exception::custom(error.to_string()))?);
        }
        self.offset = to;
        Ok(())
    }

    /// The positions in use.
    pub fn tensors(&self) -> Result<Vec<Array>, Exception> {
        self.tensors.iter().map(|tensor| range(tensor, &(0..self.offset))).collect()
    }

    /// Truncates to the first `length` positions; the allocation stays.
    pub fn truncate(&mut self, length: i32) {
        self.offset = self.offset.min(length);
    }

    /// Copies of some positions of each array; `None` if the cache is empty.
    pub fn slice(&self, positions: Range<i32>) -> Result<Option<Vec<Array>>, Exception> {
        let slice = |tensor: &Array| tensor.try_index((.., .., positions.clone(), ..));
        let slices = self.tensors.iter().map(slice).collect::<Result<Vec<_>, _>>()?;
        Ok((!slices.is_empty()).then_some(slices))
    }

    /// An element of each array that is evaluated once the whole cache is: waiting for it holds no reference
    /// to the cache itself, so the next step can write in place.
    pub fn readiness_probe(&self) -> Result<Vec<Array>, Exception> {
        self.tensors.iter().map(probe).collect()
    }
}

/// A number that is evaluated once `tensor` is.
pub(super) fn probe(tensor: &Array) -> Result<Array, Exception> {
    tensor.try_index((0..1, 0..1, 0..1, 0..1))?.add(Array::from_int(0))
}

/// The array with capacity for `new` after the first `offset` positions, reallocated if needed.
fn grow(tensor: Option<Array>, offset: i32, new: &Array) -> Result<Array, Exception> {
    let (batch, heads, count, width) = (new.dim(0), new.dim(1), new.dim(2), new.dim(3));
    match tensor {
        Some(tensor) if offset + count <= tensor.dim(2) => Ok(tensor),
        tensor => {
            let positions = (offset + count + CACHE_STEP - 1) / CACHE_STEP * CACHE_STEP - offset;
            let more = zeros_dtype(&[batch, heads, positions, width], new.dtype())?;
            match tensor {
                None => Ok(more),
                Some(tensor) => concatenate(&[range(&tensor, &(0..offset))?, more], 2),
            }
        }
    }
}
