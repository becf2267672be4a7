//! Byte ranges of a tensor's shard: a shard of rows is contiguous, a shard of columns is a short run in every
//! row.

use std::{fs::File, io, os::unix::fs::FileExt};

use russet_wire::shape::ShardAxis;

use super::Entry;
use crate::partition::TpShard;

/// A shard of a tensor: a number of equally long runs of bytes, the first one at an offset, one per stride.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ShardRead {
    /// Shape of the shard.
    pub shape: Vec<usize>,
    first_byte: u64,
    run_bytes: u64,
    stride_bytes: u64,
    runs: u64,
}

impl ShardRead {
    /// The shard of a tensor along this axis; the error is the length that cannot be divided evenly.
    pub fn new(entry: &Entry, cut: ShardAxis, slice: TpShard) -> Result<Self, usize> {
        let total = entry.end - entry.begin;
        let mut shape = entry.shape.clone();
        let (outer, axis) = match cut {
            ShardAxis::Columns => {
                (shape.iter().rev().skip(1).product::<usize>(), shape.len().saturating_sub(1))
            }
            ShardAxis::Rows | ShardAxis::Replicated => (1, 0),
        };
        let Some(length) = shape.get_mut(axis).filter(|_| cut != ShardAxis::Replicated && slice.count > 1)
        else {
            return Ok(Self { shape, first_byte: 0, run_bytes: total, stride_bytes: total, runs: 1 });
        };
        if !length.is_multiple_of(slice.count) {
            return Err(*length);
        }
        *length /= slice.count;
        let runs = outer as u64;
        let stride = total / runs.max(1);
        let run = stride / slice.count as u64;
        Ok(Self { shape, first_byte: run * slice.index as u64, run_bytes: run, stride_bytes: stride, runs })
    }

    /// Size of the shard in bytes.
    pub fn bytes(&self) -> u64 {
        self.run_bytes * self.runs
    }

    /// Reads the shard of the tensor that begins at `begin` in the file.
    pub fn read(&self, file: &File, begin: u64, bytes: &mut [u8]) -> io::Result<()> {
        if self.run_bytes == 0 {
            return Ok(());
        }
        let runs = bytes.chunks_exact_mut(self.run_bytes as usize);
        runs.enumerate().try_for_each(|(index, run)| {
            file.read_exact_at(run, begin + self.first_byte + index as u64 * self.stride_bytes)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    /// The shape and bytes that each tensor rank reads from a file with ten other bytes followed by `0, 1, 2,
    /// …`.
    type MemberReads = Vec<(Vec<usize>, Vec<u8>)>;

    fn read(shape: &[usize], item: u64, cut: ShardAxis, of: usize) -> Result<MemberReads, usize> {
        let size = shape.iter().product::<usize>() as u64 * item;
        let entry = Entry { dtype: "any".into(), shape: shape.to_vec(), begin: 4, end: 4 + size };
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[255; 10]).unwrap();
        file.write_all(&(0..size as u8).collect::<Vec<u8>>()).unwrap();
        (0..of)
            .map(|index| {
                let piece = ShardRead::new(&entry, cut, TpShard { index, count: of })?;
                let mut bytes = vec![0; piece.bytes() as usize];
                piece.read(&file, 10, &mut bytes).unwrap();
                Ok((piece.shape, bytes))
            })
            .collect()
    }

    #[test]
    fn every_rank_reads_the_bytes_of_its_shard() {
        for (shape, item, cut, expected) in [
            (
                vec![4, 2],
                1,
                ShardAxis::Rows,
                vec![(vec![2, 2], vec![0, 1, 2, 3]), (vec![2, 2], vec![4, 5, 6, 7])],
            ),
            (vec![4], 2, ShardAxis::Rows, vec![(vec![2], vec![0, 1, 2, 3]), (vec![2], vec![4, 5, 6, 7])]),
            (
                vec![2, 4],
                1,
                ShardAxis::Columns,
                vec![(vec![2, 2], vec![0, 1, 4, 5]), (vec![2, 2], vec![2, 3, 6, 7])],
            ),
            (
                vec![2, 2],
                2,
                ShardAxis::Columns,
                vec![(vec![2, 1], vec![0, 1, 4, 5]), (vec![2, 1], vec![2, 3, 6, 7])],
            ),
            (vec![2], 1, ShardAxis::Replicated, vec![(vec![2], vec![0, 1]), (vec![2], vec![0, 1])]),
            (vec![0, 4], 1, ShardAxis::Columns, vec![(vec![0, 2], vec![]), (vec![0, 2], vec![])]),
        ] {
            assert_eq!(read(&shape, item, cut, 2), Ok(expected), "{shape:?} {cut:?}");
        }
        assert_eq!(read(&[3, 3], 1, ShardAxis::Rows, 1).unwrap()[0].1.len(), 9);
        assert_eq!(read(&[3, 4], 1, ShardAxis::Rows, 2), Err(3));
        assert_eq!(read(&[3, 4], 1, ShardAxis::Columns, 3), Err(4));
    }
}
