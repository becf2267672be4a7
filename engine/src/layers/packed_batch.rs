//! Packed batch: sequences that run together. Their positions are concatenated in one hidden state, `[1,
//! positions, width]`, so a weight is read once for all of them, and joining or leaving sequences copies
//! nothing. Only attention handles each sequence by itself, with its own cache.

use std::ops::Range;

use mlx_rs::Array;

use crate::cache::LayerCache;

/// The part of a batch that belongs to one sequence.
#[derive(Debug)]
pub struct SequenceSlice<'a> {
    /// Its positions in the batch.
    pub length: i32,
    /// Earlier positions, which are in the KV cache.
    pub offset: i32,
    /// Number of its adapter; 0 for none.
    pub adapter: u32,
    /// One cache per layer of this rank.
    pub caches: &'a mut [LayerCache],
}

/// A packed batch.
#[derive(Debug)]
pub struct PackedBatch<'a> {
    /// Decode rows with one position each, if there are several; they come first.
    pub decode_rows: Vec<SequenceSlice<'a>>,
    /// The remaining rows.
    pub prefill_rows: Vec<SequenceSlice<'a>>,
    /// Position of each row in its sequence, `[positions]`; `None` for a single row.
    pub positions: Option<Array>,
    /// Lengths of texts of which nothing is kept, in order: there are no other rows then.
    pub texts: Vec<i32>,
}

impl<'a> PackedBatch<'a> {
    /// Packs rows that are in position order: those with one position come first.
    pub fn new(rows: Vec<SequenceSlice<'a>>) -> Self {
        let (mut decode_rows, mut prefill_rows): (Vec<_>, Vec<_>) =
            rows.into_iter().partition(|row| row.length == 1);
        // A single decode row takes the path of longer rows, which a sequence alone takes too, bit by bit.
        if decode_rows.len() == 1 {
            prefill_rows.splice(0..0, decode_rows.drain(..));
        }
        let rows = || decode_rows.iter().chain(&prefill_rows);
        let positions = (rows().count() > 1).then(|| {
            let positions: Vec<i32> = rows().flat_map(|row| row.offset..row.offset + row.length).collect();
            Array::from_slice(&positions, &[positions.len() as i32])
        });
        Self { decode_rows, prefill_rows, positions, texts: Vec::new() }
    }

    /// Texts of these lengths, which are seen whole and of which nothing is kept.
    pub fn of_texts(lengths: Vec<i32>) -> Self {
        let positions: Vec<i32> = lengths.iter().flat_map(|&length| 0..length).collect();
        let positions = Array::from_slice(&positions, &[positions.len() as i32]);
        Self { decode_rows: Vec::new(), prefill_rows: Vec::new(), positions: Some(positions), texts: lengths }
    }

    /// Positions of each sequence, and the number of its adapter.
    pub fn adapters(&self) -> impl Iterator<Item = (i32, u32)> + Clone {
        self.decode_rows.iter().chain(&self.prefill_rows).map(|row| (row.length, row.adapter))
    }

    /// Every sequence and which positions of the batch are its own.
    pub fn sequences(&mut self) -> impl Iterator<Item = (Range<i32>, &mut SequenceSlice<'a>)> {
        let mut from = 0;
        self.decode_rows.iter_mut().chain(&mut self.prefill_rows).map(move |sequence| {
            let own = from..from + sequence.length;
            from = own.end;
            (own, sequence)
        })
    }
}
