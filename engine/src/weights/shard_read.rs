//! Which bytes of a stored tensor one rank needs, and how they are read: shards of the first dimension lie together,
//! shards of an inner one are a short run in every row.

use std::io;

use russet_model::{
    packings::layout::Runs,
    safetensors::{Dtype, Entry},
    tensors::ShardAxis,
};

use super::weight_file::piece_bytes;
use crate::partition::TpShard;

/// A shard of a tensor: every `stride` bytes from `begin` on the same runs, `blocks` times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ShardRead {
    /// The shape of the shard.
    pub shape: Vec<u64>,
    /// Whether bytes are read as numbers of 32 bits.
    pub is_viewed: bool,
    stride: u64,
    blocks: u64,
    /// First byte of each run within a stride, and its bytes.
    runs: Vec<(u64, u64)>,
}

/// Some of one dimension of a stored tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowRange {
    /// The dimension.
    pub dim: usize,
    /// The first.
    pub from: u64,
    /// From one to the next.
    pub step: u64,
    /// How many.
    pub count: u64,
}

impl ShardRead {
    /// The shard of a stored tensor, or of some of its rows, that is shared along `axis`. The segments are
    /// counted as in the whole, unpacked; an error is the length that cannot be shared evenly.
    pub fn new(entry: &Entry, rows: Option<RowRange>, axis: &ShardAxis, shard: TpShard) -> Result<Self, u64> {
        let mut shape = entry.shape.clone();
        let is_viewed = entry.dtype == Dtype::U32;
        let total = entry.bytes();
        // What is read of each dimension but the whole: runs of indices, as first and count.
        let mut picked: Vec<Option<Vec<(u64, u64)>>> = vec![None; shape.len()];
        if let Some(RowRange { dim, from, step, count }) = rows.filter(|rows| rows.dim < shape.len()) {
            picked[dim] = Some(match step {
                1 => vec![(from, count)],
                step => (0..count).map(|row| (from + row * step, 1)).collect(),
            });
            shape[dim] = count;
        }
        if let Some(dim) = axis.dim().filter(|dim| shard.count > 1 && *dim < shape.len()) {
            let runs = shares(axis, shape[dim], shard)?;
            shape[dim] = runs.iter().map(|run| run.1).sum();
            picked[dim] = Some(match picked[dim].take() {
                None => runs,
                Some(rows) => runs.into_iter().flat_map(|run| within(&rows, run)).collect(),
            });
        }
        // The outermost dimension that is picked from is a run of every stride; those within it pick of each run.
        let Some(outer) = picked.iter().position(Option::is_some) else {
            return Ok(Self { shape, is_viewed, stride: total, blocks: 1, runs: vec![(0, total)] });
        };
        let blocks: u64 = entry.shape[..outer].iter().product();
        let stride = total / blocks.max(1);
        let (mut runs, mut size) = (vec![(0, stride)], stride);
        for (dim, picks) in picked.iter().enumerate().skip(outer) {
            let length = entry.shape[dim].max(1);
            let step = size / length;
            if let Some(picks) = picks {
                runs = runs
                    .iter()
                    .flat_map(|(begin, bytes)| {
                        let pieces = bytes.checked_div(size).unwrap_or(0);
                        (0..pieces).flat_map(move |piece| {
                            let begin = begin + piece * size;
                            picks.iter().map(move |(from, count)| (begin + from * step, count * step))
                        })
                    })
                    .collect();
            }
            size = step;
        }
        Ok(Self { shape, is_viewed, stride, blocks, runs })
    }

    /// Bytes of the shard.
    pub fn bytes(&self) -> u64 {
        self.blocks * self.runs.iter().map(|run| run.1).sum::<u64>()
    }

    /// The shard of the tensor that begins at `start` of its file, in pieces, each with the part of `out` that it fills:
    /// as many as there are threads for an array of `total` bytes.
    pub fn pieces<'a>(
        &'a self,
        start: u64,
        out: &'a mut [u8],
        total: usize,
    ) -> impl Iterator<Item = (ReadPiece<'a>, &'a mut [u8])> {
        let (mut pieces, mut out) = (Vec::new(), out);
        let piece_bytes = piece_bytes(total);
        let mut add = |piece: ReadPiece<'a>| {
            let (own, others) = std::mem::take(&mut out).split_at_mut(piece.bytes() as usize);
            out = others;
            pieces.push((piece, own));
        };
        let block_bytes = self.runs.iter().map(|run| run.1).sum::<u64>();
        if let &[(from, length)] = &self.runs[..] {
            let runs = Runs { begin: start + from, length, stride: self.stride, count: self.blocks };
            cut(runs, piece_bytes).for_each(|runs| add(ReadPiece::Runs(runs)));
        } else if let (Some(first), Some(last)) = (self.runs.first(), self.runs.last()) {
            // Short runs that lie close are read in one go and taken apart: a call for each would take longer.
            let span = last.0 + last.1 - first.0;
            let mean = block_bytes / self.runs.len() as u64;
            let scattered = mean < SHORT_RUN_BYTES && self.runs.len() > 8 && span <= MAX_SPAN_BYTES;
            for number in 0..self.blocks {
                let begin = start + number * self.stride;
                if scattered {
                    add(ReadPiece::Scattered { begin, runs: &self.runs });
                } else {
                    let each = alike(&self.runs, begin).flat_map(|runs| cut(runs, piece_bytes));
                    each.for_each(|runs| add(ReadPiece::Runs(runs)));
                }
            }
        }
        pieces.into_iter()
    }
}

/// A part of a shard that one thread reads.
#[derive(Debug)]
pub(super) enum ReadPiece<'a> {
    /// Runs of equal length.
    Runs(Runs),
    /// Short runs, counted from `begin`, that are read with what lies between them.
    Scattered { begin: u64, runs: &'a [(u64, u64)] },
}

impl ReadPiece<'_> {
    /// Bytes of it.
    fn bytes(&self) -> u64 {
        match self {
            Self::Runs(runs) => runs.length * runs.count,
            Self::Scattered { runs, .. } => runs.iter().map(|run| run.1).sum(),
        }
    }

    /// Fills `out` by what `read_at` reads.
    pub fn read(
        &self,
        mut out: &mut [u8],
        read_at: &dyn Fn(&mut [u8], Runs) -> io::Result<()>,
    ) -> io::Result<()> {
        match self {
            Self::Runs(runs) => read_at(out, *runs),
            Self::Scattered { begin, runs } => {
                let (first, end) =
                    (runs.first().map_or(0, |run| run.0), runs.last().map_or(0, |run| run.0 + run.1));
                let mut span = vec![0; (end - first) as usize];
                read_at(&mut span, Runs::one(begin + first, end - first))?;
                for (from, length) in *runs {
                    let (run, rest) = out.split_at_mut(*length as usize);
                    let from = (from - first) as usize;
                    run.copy_from_slice(&span[from..from + *length as usize]);
                    out = rest;
                }
                Ok(())
            }
        }
    }
}

/// The runs, counted from `begin`, in as few as there are of equal lengths and distances.
fn alike(runs: &[(u64, u64)], begin: u64) -> impl Iterator<Item = Runs> {
    let mut alike: Vec<Runs> = Vec::new();
    for &(from, length) in runs.iter().filter(|run| run.1 > 0) {
        let start = begin + from;
        match alike.last_mut() {
            Some(last) if last.length == length && last.count == 1 => {
                (last.stride, last.count) = (start - last.begin, 2);
            }
            Some(last) if last.length == length && last.begin + last.count * last.stride == start => {
                last.count += 1;
            }
            _ => alike.push(Runs::one(start, length)),
        }
    }
    alike.into_iter()
}

/// The runs in pieces of about so many bytes.
fn cut(runs: Runs, piece: u64) -> impl Iterator<Item = Runs> {
    let Runs { begin, length, stride, count } = runs;
    // A single run is cut anywhere, at a whole number of elements; several between them.
    let (unit, units) = if count == 1 { (1, length) } else { (length.max(1), count) };
    let step = (piece.next_multiple_of(PIECE_ALIGNMENT) / unit).max(1);
    (0..units).step_by(step as usize).map(move |first| {
        let own = step.min(units - first);
        if count == 1 {
            Runs::one(begin + first, own)
        } else {
            Runs { begin: begin + first * stride, count: own, ..runs }
        }
    })
}

/// A shard's runs of a dimension that has `length` stored: packed, it is shorter than it counts, and what is stored of
/// a segment or of a part has to divide as well.
pub(crate) fn shares(axis: &ShardAxis, length: u64, shard: TpShard) -> Result<Vec<(u64, u64)>, u64> {
    let of = shard.count as u64;
    match axis {
        ShardAxis::Replicated => Ok(vec![(0, length)]),
        ShardAxis::Heads { heads, .. } => parts(u64::from(*heads), length, shard.of_heads(*heads)),
        ShardAxis::Parts { parts: count, .. } => parts(*count, length, shard),
        ShardAxis::Axis { segments, .. } => {
            let whole = segments.iter().sum::<u64>().max(1);
            let (mut runs, mut offset) = (Vec::with_capacity(segments.len()), 0);
            for segment in segments {
                let stored = segment * length / whole;
                let fits = (segment * length).is_multiple_of(whole) && stored.is_multiple_of(of);
                if !fits {
                    return Err(stored);
                }
                let share = stored / of;
                runs.push((offset + share * shard.index as u64, share));
                offset += stored;
            }
            Ok(runs)
        }
    }
}

/// The run of a shard that gets some of `count` equal parts, as equally as they divide.
fn parts(count: u64, length: u64, shard: TpShard) -> Result<Vec<(u64, u64)>, u64> {
    let of = shard.count as u64;
    let each = length.checked_div(count).unwrap_or(0);
    if count < of || each * count != length {
        return Err(length);
    }
    let cut = |index: usize| count * index as u64 / of * each;
    Ok(vec![(cut(shard.index), cut(shard.index + 1) - cut(shard.index))])
}

/// Runs shorter than this take longer to ask for than to read with what lies between them.
const SHORT_RUN_BYTES: u64 = 256;
/// Most bytes that are read at once for runs that are scattered in them.
const MAX_SPAN_BYTES: u64 = 64 << 20;
/// Pieces begin at whole elements of any type, and at whole pages of the memory they fill.
const PIECE_ALIGNMENT: u64 = 4096;

/// The runs of a tensor that some runs of its picked rows are.
fn within(rows: &[(u64, u64)], (from, count): (u64, u64)) -> Vec<(u64, u64)> {
    let (mut runs, mut before) = (Vec::new(), 0);
    for (first, length) in rows {
        let (begin, end) = (from.max(before), (from + count).min(before + length));
        if begin < end {
            runs.push((first + begin - before, end - begin));
        }
        before += length;
    }
    runs
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, os::unix::fs::FileExt as _};

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
        rows: Option<RowRange>,
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
                let read = ShardRead::new(&entry, rows, axis, TpShard { index, count: of })?;
                let mut bytes = vec![0; read.bytes() as usize];
                let each = |bytes: &mut [u8], runs: Runs| {
                    let outs = bytes.chunks_mut(runs.length.max(1) as usize);
                    runs.starts().zip(outs).try_for_each(|(start, out)| file.read_exact_at(out, start))
                };
                let total = bytes.len();
                read.pieces(10, &mut bytes, total).for_each(|(piece, out)| piece.read(out, &each).unwrap());
                Ok((read.shape.clone(), bytes))
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
            // Three parts of a row of six; of two heads each has its own.
            (
                vec![1, 6],
                1,
                ShardAxis::Parts { dim: 1, parts: 3 },
                vec![(vec![1, 2], vec![0, 1]), (vec![1, 4], vec![2, 3, 4, 5])],
            ),
            (
                vec![4],
                1,
                ShardAxis::Heads { dim: 0, heads: 2 },
                vec![(vec![2], vec![0, 1]), (vec![2], vec![2, 3])],
            ),
            // Of one head both have the same.
            (
                vec![2],
                1,
                ShardAxis::Heads { dim: 0, heads: 1 },
                vec![(vec![2], vec![0, 1]), (vec![2], vec![0, 1])],
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
        assert_eq!(read(&[2, 3], 1, None, &ShardAxis::Parts { dim: 1, parts: 2 }, 2), Err(3));
        assert_eq!(read(&[2, 3], 1, None, &ShardAxis::Parts { dim: 1, parts: 3 }, 4), Err(3));
    }

    #[test]
    fn some_rows_of_a_tensor_are_read_like_a_tensor_of_them() {
        let rows = || Some(RowRange { dim: 0, from: 2, step: 1, count: 2 });
        for (axis, of, expected) in [
            (ShardAxis::Replicated, 1, vec![(vec![2, 2], vec![4, 5, 6, 7])]),
            (along(0, &[2]), 2, vec![(vec![1, 2], vec![4, 5]), (vec![1, 2], vec![6, 7])]),
            (along(1, &[2]), 2, vec![(vec![2, 1], vec![4, 6]), (vec![2, 1], vec![5, 7])]),
        ] {
            assert_eq!(read(&[5, 2], 1, rows(), &axis, of), Ok(expected), "{axis:?}");
        }
    }
}
