//! Sequences that run together. Their positions lie one behind the other in one hidden state,
//! `[1, positions, width]`, so a weight is read once for all of them, and who joins or leaves copies nothing. Only
//! attention looks at each sequence by itself, with its own cache.

use mlx_rs::Array;

use crate::cache::KvCache;

/// The part of a batch that belongs to one sequence.
#[derive(Debug)]
pub struct Row<'a> {
    /// Its positions in the batch.
    pub length: i32,
    /// Positions before them, which the cache holds.
    pub offset: i32,
    /// A cache for each layer held.
    pub caches: &'a mut [KvCache],
}

/// Sequences that run together.
#[derive(Debug)]
pub struct Batch<'a> {
    /// Several rows with one position; the first ones.
    pub singles: Vec<Row<'a>>,
    /// The rows behind them.
    pub longer: Vec<Row<'a>>,
    /// Where in its sequence each position of the batch stands, `[positions]`; `None` of a single row.
    pub places: Option<Array>,
}

impl<'a> Batch<'a> {
    /// Of rows in the order of their positions: those with one position come first.
    pub fn new(rows: Vec<Row<'a>>) -> Self {
        let (mut singles, mut longer): (Vec<_>, Vec<_>) = rows.into_iter().partition(|row| row.length == 1);
        // One by itself takes the way of longer ones, which is what a sequence alone takes, bit by bit.
        if singles.len() == 1 {
            longer.splice(0..0, singles.drain(..));
        }
        let rows = || singles.iter().chain(&longer);
        let places = (rows().count() > 1).then(|| {
            let places: Vec<i32> = rows().flat_map(|row| row.offset..row.offset + row.length).collect();
            Array::from_slice(&places, &[places.len() as i32])
        });
        Self { singles, longer, places }
    }
}
