//! The keys and values one layer keeps of one sequence. It grows in steps, so that most tokens are
//! written into room that is already there; what is read of it has the shape that mlx-lm's has, and so do the
//! kernels that read it.

use std::ops::Range;

use mlx_rs::{
    Array,
    error::Exception,
    ops::{concatenate, indexing::TryIndexMutOp, indexing::TryIndexOp, zeros_dtype},
};

use crate::kept;

/// Room is a multiple of so many positions.
const STEP: i32 = kept::STEP as i32;

/// One layer's cache: `[batch, heads, positions, width]`, of which `offset` positions are in use.
#[derive(Debug, Default)]
pub struct KvCache {
    /// Keys and values, once there are any.
    parts: Option<[Array; 2]>,
    offset: i32,
}

impl KvCache {
    /// Tokens held.
    pub fn offset(&self) -> i32 {
        self.offset
    }

    /// Appends and returns everything held so far, keys first.
    pub fn append(&mut self, keys: &Array, values: &Array) -> Result<(Array, Array), Exception> {
        let from = self.offset;
        let to = from + keys.dim(2);
        let [held_keys, held_values] = self.parts.take().map_or([None, None], |parts| parts.map(Some));
        let mut all_keys = grown(held_keys, from, keys)?;
        let mut all_values = grown(held_values, from, values)?;
        all_keys.try_index_mut((.., .., from..to, ..), keys)?;
        all_values.try_index_mut((.., .., from..to, ..), values)?;
        let held = (used(&all_keys, to)?, used(&all_values, to)?);
        self.parts = Some([all_keys, all_values]);
        self.offset = to;
        Ok(held)
    }

    /// Forgets all but the first `length` positions; the room stays.
    pub fn trim(&mut self, length: i32) {
        self.offset = self.offset.min(length);
    }

    /// Copies of the keys and the values of some positions.
    pub fn cut(&self, positions: Range<i32>) -> Result<Option<[Array; 2]>, Exception> {
        let Some([keys, values]) = &self.parts else { return Ok(None) };
        let cut = |held: &Array| held.try_index((.., .., positions.clone(), ..));
        Ok(Some([cut(keys)?, cut(values)?]))
    }

    /// A number each of keys and values that is there once all held is: whoever waits for it holds none of the
    /// cache itself, which the next step may then write into.
    pub fn witness(&self) -> Result<Vec<Array>, Exception> {
        let number = |held: &Array| held.try_index((0..1, 0..1, 0..1, 0..1))?.add(Array::from_int(0));
        self.parts.iter().flatten().map(number).collect()
    }
}

/// `room` with place for `new` after the first `offset` positions.
fn grown(room: Option<Array>, offset: i32, new: &Array) -> Result<Array, Exception> {
    let (batch, heads, count, width) = (new.dim(0), new.dim(1), new.dim(2), new.dim(3));
    match room {
        Some(room) if offset + count <= room.dim(2) => Ok(room),
        room => {
            let positions = (offset + count + STEP - 1) / STEP * STEP - offset;
            let more = zeros_dtype(&[batch, heads, positions, width], new.dtype())?;
            match room {
                None => Ok(more),
                Some(room) => concatenate(&[used(&room, offset)?, more], 2),
            }
        }
    }
}

fn used(room: &Array, count: i32) -> Result<Array, Exception> {
    if count == room.dim(2) { Ok(room.clone()) } else { room.try_index((.., .., 0..count, ..)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(from: i32, count: i32) -> Array {
        let values: Vec<f32> = (from..from + count).flat_map(|value| [value as f32, -value as f32]).collect();
        Array::from_slice(&values, &[1, 1, count, 2])
    }

    #[test]
    fn what_was_appended_comes_back_in_order_across_growth() {
        for pieces in [vec![1, 1, 1], vec![255, 1, 1], vec![256, 1], vec![300, 300, 7], vec![2048, 1, 1]] {
            let mut cache = KvCache::default();
            let mut total = 0;
            for &count in &pieces {
                let new = numbers(total, count);
                let (keys, values) = cache.append(&new, &new).unwrap();
                total += count;
                assert_eq!(keys.shape(), [1, 1, total, 2], "{pieces:?}");
                let expected = numbers(0, total);
                let same = |array: &Array| {
                    array.contiguous().unwrap().as_slice::<f32>() == expected.as_slice::<f32>()
                };
                assert!(same(&keys) && same(&values), "{pieces:?} after {total}");
            }
            assert_eq!(cache.offset(), total);
        }
    }
}
