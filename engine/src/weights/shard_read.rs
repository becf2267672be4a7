//! Which bytes of a stored tensor one rank needs, and how they are read: shards of the first dimension lie together,
//! shards of an inner one are a short run in every row.

use std::{io, ops::Range};

use russet_model::{safetensors::Entry, tensors::ShardAxis};

use crate::partition::TpShard;

/// A shard of a tensor: every `stride` bytes from `begin` on the same runs, `blocks` times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ShardRead {
    /// The shape of the shard.
    pub shape: Vec<u64>,
    begin: u64,
    stride: u64,
    blocks: u64,
    /// First byte of each run within a stride, and its bytes.
    runs: Vec<(u64, u64)>,
}

impl ShardRead {
    /// The shard of a stored tensor, or of some of its first rows, that is shared along `axis`. The segments are
    /// counted as in the whole, unpacked; an error is the length that cannot be shared evenly.
    pub fn new(
        entry: &Entry,
        rows: Option<Range<u64>>,
        axis: &ShardAxis,
        shard: TpShard,
    ) -> Result<Self, u64> {
        let mut shape = entry.shape.clone();
        let (mut begin, mut total) = (0, entry.bytes());
        if let (Some(rows), Some(first)) = (rows, shape.first_mut()) {
            let row = total / (*first).max(1);
            let count = rows.end.saturating_sub(rows.start);
            (begin, total, *first) = (row * rows.start, row * count, count);
        }
        let of = shard.count as u64;
        let (dim, segments) = match axis {
            ShardAxis::Axis { dim, segments } if of > 1 && *dim < shape.len() => (*dim, segments),
            _ => return Ok(Self { shape, begin, stride: total, blocks: 1, runs: vec![(0, total)] }),
        };
        let blocks: u64 = shape[..dim].iter().product();
        let (length, whole) = (shape[dim], segments.iter().sum::<u64>().max(1));
        let stride = total / blocks.max(1);
        let step = stride / length.max(1);
        let (mut runs, mut offset) = (Vec::with_capacity(segments.len()), 0);
        for segment in segments {
            // Packed, a dimension is shorter than it counts; what is stored of a segment has to divide as well.
            let stored = segment * length / whole;
            let fits = (segment * length).is_multiple_of(whole) && stored.is_multiple_of(of);
            if !fits {
                return Err(stored);
            }
            let share = stored / of;
            runs.push(((offset + share * shard.index as u64) * step, share * step));
            offset += stored;
        }
        shape[dim] = length / of;
        Ok(Self { shape, begin, stride, blocks, runs })
    }

    /// Bytes of the shard.
    pub fn bytes(&self) -> u64 {
        self.blocks * self.runs.iter().map(|run| run.1).sum::<u64>()
    }

    /// Reads the shard of the tensor that begins at `start` of what `read_at` reads.
    pub fn read(
        &self,
        read_at: &dyn Fn(&mut [u8], u64) -> io::Result<()>,
        start: u64,
        mut bytes: &mut [u8],
    ) -> io::Result<()> {
        for block in 0..self.blocks {
            for (first, length) in self.runs.iter().filter(|run| run.1 > 0) {
                let (run, rest) = bytes.split_at_mut(*length as usize);
                read_at(run, start + self.begin + block * self.stride + first)?;
                bytes = rest;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, os::unix::fs::FileExt as _};

    use russet_model::safetensors::Dtype;

    use super::*;

    /// Every member's shape and bytes.
    type Members = Vec<(Vec<u64>, Vec<u8>)>;

    fn along(dim: usize, segments: &[u64]) -> ShardAxis {
        ShardAxis::Axis { dim, segments: segments.to_vec() }
    }

    /// What each of `of` members reads of a file that holds ten bytes of something else and then `0, 1, 2, …`.
    fn read(
        shape: &[u64],
        item: u64,
        rows: Option<Range<u64>>,
        axis: &ShardAxis,
        of: usize,
    ) -> Result<Members, u64> {
        let size = shape.iter().product::<u64>() * item;
        let entry = Entry { file: 0, dtype: Dtype::U32, shape: shape.to_vec(), begin: 4, end: 4 + size };
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[255; 10]).unwrap();
        file.write_all(&(0..size as u8).collect::<Vec<u8>>()).unwrap();
        (0..of)
            .map(|index| {
                let read = ShardRead::new(&entry, rows.clone(), axis, TpShard { index, count: of })?;
                let mut bytes = vec![0; read.bytes() as usize];
                read.read(&|bytes, offset| file.read_exact_at(bytes, offset), 10, &mut bytes).unwrap();
                Ok((read.shape, bytes))
            })
            .collect()
    }

    #[test]
    fn every_member_reads_its_own_bytes() {
        for (shape, item, axis, expected) in [
            (
                vec![4, 2],
                1,
                along(0, &[4]),
                vec![(vec![2, 2], vec![0, 1, 2, 3]), (vec![2, 2], vec![4, 5, 6, 7])],
            ),
            (vec![4], 2, along(0, &[4]), vec![(vec![2], vec![0, 1, 2, 3]), (vec![2], vec![4, 5, 6, 7])]),
            (
                vec![2, 4],
                1,
                along(1, &[4]),
                vec![(vec![2, 2], vec![0, 1, 4, 5]), (vec![2, 2], vec![2, 3, 6, 7])],
            ),
            (
                vec![2, 2],
                2,
                along(1, &[2]),
                vec![(vec![2, 1], vec![0, 1, 4, 5]), (vec![2, 1], vec![2, 3, 6, 7])],
            ),
            // Packed: 64 values in two stored ones.
            (vec![2, 2], 1, along(1, &[64]), vec![(vec![2, 1], vec![0, 2]), (vec![2, 1], vec![1, 3])]),
            // Of experts, each is shared, not their number.
            (
                vec![2, 2, 2],
                1,
                along(1, &[2]),
                vec![(vec![2, 1, 2], vec![0, 1, 4, 5]), (vec![2, 1, 2], vec![2, 3, 6, 7])],
            ),
            // Two projections in one tensor: a share of each.
            (
                vec![6, 1],
                1,
                along(0, &[2, 4]),
                vec![(vec![3, 1], vec![0, 2, 3]), (vec![3, 1], vec![1, 4, 5])],
            ),
            (vec![2], 1, ShardAxis::Replicated, vec![(vec![2], vec![0, 1]), (vec![2], vec![0, 1])]),
            (vec![0, 4], 1, along(1, &[4]), vec![(vec![0, 2], vec![]), (vec![0, 2], vec![])]),
        ] {
            assert_eq!(read(&shape, item, None, &axis, 2), Ok(expected), "{shape:?} {axis:?}");
        }
        assert_eq!(read(&[3, 3], 1, None, &along(0, &[3]), 1).unwrap()[0].1.len(), 9);
        assert_eq!(read(&[3, 4], 1, None, &along(0, &[3]), 2), Err(3));
        assert_eq!(read(&[3, 4], 1, None, &along(1, &[4]), 3), Err(4));
        assert_eq!(read(&[2, 3], 1, None, &along(1, &[192]), 2), Err(3));
    }

    #[test]
    fn some_rows_of_a_tensor_are_read_like_a_tensor_of_them() {
        let rows = || Some(2..4);
        for (axis, of, expected) in [
            (ShardAxis::Replicated, 1, vec![(vec![2, 2], vec![4, 5, 6, 7])]),
            (along(0, &[2]), 2, vec![(vec![1, 2], vec![4, 5]), (vec![1, 2], vec![6, 7])]),
            (along(1, &[2]), 2, vec![(vec![2, 1], vec![4, 6]), (vec![2, 1], vec![5, 7])]),
        ] {
            assert_eq!(read(&[5, 2], 1, rows(), &axis, of), Ok(expected), "{axis:?}");
        }
    }
}
