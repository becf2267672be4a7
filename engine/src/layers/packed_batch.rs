//! Sequences that run together. Their positions lie one behind the other in one hidden state,
//! `[1, positions, width]`, so a weight is read once for all of them, and who joins or leaves copies nothing. Only
//! attention looks at each sequence by itself, with its own cache.

use mlx_rs::Array;

use crate::cache::KvCache;

/// The part of a batch that belongs to one sequence.
#[derive(Debug)]
pub struct SequenceSlice<'a> {
    /// Its positions in the batch.
    pub length: i32,
    /// Positions before them, which the cache holds.
    pub offset: i32,
    /// A cache for each layer held.
    pub caches: &'a mut [KvCache],
}

/// Sequences that run together.
#[derive(Debug)]
pub struct PackedBatch<'a> {
    /// Several rows with one position; the first ones.
    pub decode_rows: Vec<SequenceSlice<'a>>,
    /// The rows behind them.
    pub prefill_rows: Vec<SequenceSlice<'a>>,
    /// Where in its sequence each position of the batch stands, `[positions]`; `None` of a single row.
    pub positions: Option<Array>,
}

impl<'a> PackedBatch<'a> {
    /// Of rows in the order of their positions: those with one position come first.
    pub fn new(rows: Vec<SequenceSlice<'a>>) -> Self {
        let (mut decode_rows, mut prefill_rows): (Vec<_>, Vec<_>) = rows.into_iter().partition(|row| row.length == 1);
        // One by itself takes the way of longer ones, which is what a sequence alone takes, bit by bit.
        if decode_rows.len() == 1 {
            prefill_rows.splice(0..0, decode_rows.drain(..));
        }
        let rows = || decode_rows.iter().chain(&prefill_rows);
        let positions = (rows().count() > 1).then(|| {
            let places: Vec<i32> = rows().flat_map(|row| row.offset..row.offset + row.length).collect();
            Array::from_slice(&places, &[places.len() as i32])
        });
        Self { decode_rows, prefill_rows, positions }
    }
}
