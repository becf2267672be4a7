//! The blocks of one rank: copies of spans of its caches, all layers of a span in one array each of keys and
//! values, in memory and, where there is a shelf, on disk.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use mlx_rs::{
    Array, Dtype,
    error::Exception,
    ops::{concatenate, indexing::TryIndexOp},
    transforms::eval,
};
use parking_lot::Mutex;

use crate::{
    cache::KvCache,
    kept::{
        Kept,
        chain::{BLOCK, Key},
    },
    shelf::{Record, Shelf},
};

/// Blocks that are copied at a time: more would need more memory for a moment.
pub const AT_ONCE: usize = 16;
/// Bytes of blocks that are nowhere but on their way to disk.
const MOST_ON_THEIR_WAY: usize = 256 << 20;

/// Keys and values of a block, `[layers, heads, BLOCK, width]` each.
#[derive(Debug)]
struct Block {
    parts: [Array; 2],
    /// The same, byte by byte.
    bytes: [Array; 2],
}

impl Block {
    fn record(&self) -> Option<Record> {
        let dtype = self.parts.iter().map(Array::dtype).next().and_then(word_of)?.to_owned();
        let parts = self.bytes.iter().map(|part| part.try_as_slice::<u8>().map(<[u8]>::to_vec));
        Some(Record {
            dtype,
            shape: self.parts[0].shape().to_vec(),
            parts: parts.collect::<Result<_, _>>().ok()?,
        })
    }

    fn bytes(&self) -> usize {
        self.bytes.iter().map(Array::nbytes).sum()
    }
}

/// The blocks of one rank.
#[derive(Debug, Default)]
pub struct Blocks {
    // Locked because the shelf reads them on a thread of its own.
    held: HashMap<Key, Arc<Mutex<Block>>>,
    shelf: Option<Arc<Shelf>>,
    on_their_way: Arc<Mutex<usize>>,
}

impl Blocks {
    /// None yet; written to this shelf, if there is one.
    pub fn new(shelf: Option<Arc<Shelf>>) -> Self {
        Self { shelf, ..Self::default() }
    }

    /// Copies blocks of a sequence.
    pub fn keep(&mut self, caches: &[KvCache], blocks: &[Kept]) -> Result<(), Exception> {
        for blocks in blocks.chunks(AT_ONCE) {
            let copies = blocks.iter().map(|kept| copy(caches, kept.index));
            let copies = copies.collect::<Result<Vec<_>, _>>()?;
            // At once: a cache that somebody still has to read cannot be written into.
            eval(copies.iter().flatten().flat_map(|block| block.parts.iter().chain(&block.bytes)))?;
            for (kept, block) in blocks.iter().zip(copies) {
                let Some(block) = block else { continue };
                let block = Arc::new(Mutex::new(block));
                if kept.shelved {
                    self.shelve(kept, &block);
                }
                if kept.held {
                    self.held.insert(kept.key, block);
                }
            }
        }
        Ok(())
    }

    /// What is dropped from memory before it is written is not written.
    fn shelve(&self, kept: &Kept, block: &Arc<Mutex<Block>>) {
        let Some(shelf) = &self.shelf else { return };
        if kept.held {
            let block: Weak<_> = Arc::downgrade(block);
            return shelf.write(kept.key, move || block.upgrade()?.lock().record());
        }
        let (block, bytes, waiting) = (block.clone(), block.lock().bytes(), self.on_their_way.clone());
        if *waiting.lock() + bytes > MOST_ON_THEIR_WAY {
            return shelf.give_up(kept.key);
        }
        *waiting.lock() += bytes;
        shelf.write(kept.key, move || {
            *waiting.lock() -= bytes;
            block.lock().record()
        });
    }

    /// Appends blocks to the caches of a sequence: those in memory, else what was read from disk. How many of the
    /// first ones there were.
    pub fn fill(&self, caches: &mut [KvCache], blocks: Vec<(Key, Option<Record>)>) -> Result<u32, Exception> {
        let mut found = Vec::with_capacity(blocks.len());
        for (key, record) in blocks {
            let parts = match (self.held.get(&key), record) {
                (Some(block), _) => block.lock().parts.clone(),
                (None, Some(record)) => match arrays(&record, caches.len()) {
                    Some(parts) => parts,
                    None => break,
                },
                (None, None) => break,
            };
            found.push(parts);
        }
        for blocks in found.chunks(AT_ONCE) {
            for (layer, cache) in (0..).zip(caches.iter_mut()) {
                let joined = |part: usize| {
                    let layers = blocks.iter().map(|parts| parts[part].try_index(layer..layer + 1));
                    concatenate(&layers.collect::<Result<Vec<_>, _>>()?, 2)
                };
                cache.append(&joined(0)?, &joined(1)?)?;
                // Layer by layer, so that no more than one is there twice.
                eval(&cache.witness()?)?;
            }
        }
        Ok(found.len() as u32)
    }

    /// Drops blocks.
    pub fn forget(&mut self, held: &[Key], shelved: &[Key]) {
        held.iter().for_each(|key| drop(self.held.remove(key)));
        if let Some(shelf) = &self.shelf {
            shelf.remove(shelved);
        }
    }
}

/// One block of every layer; `None` where a layer has nothing.
fn copy(caches: &[KvCache], index: u32) -> Result<Option<Block>, Exception> {
    let from = (index * BLOCK) as i32;
    let positions = from..from + BLOCK as i32;
    let layers = caches.iter().map(|cache| cache.cut(positions.clone()));
    let Some(layers) = layers.collect::<Result<Option<Vec<_>>, _>>()? else { return Ok(None) };
    let (keys, values): (Vec<Array>, Vec<Array>) =
        layers.into_iter().map(|[keys, values]| (keys, values)).unzip();
    // Of one layer it would be no copy.
    let joined = |parts: &[Array]| concatenate(parts, 0)?.contiguous();
    let parts = [joined(&keys)?, joined(&values)?];
    let bytes = |part: &Array| part.view_dtype(Dtype::Uint8);
    Ok(Some(Block { bytes: [bytes(&parts[0])?, bytes(&parts[1])?], parts }))
}

/// A block as it was, unless it belongs to another model.
fn arrays(record: &Record, layers: usize) -> Option<[Array; 2]> {
    let dtype = DTYPES.iter().find(|(_, word)| *word == record.dtype).map(|(dtype, _)| *dtype)?;
    let fits = record.shape.first() == Some(&(layers as i32)) && record.shape.get(2) == Some(&(BLOCK as i32));
    let array = |part: &Vec<u8>| russet_mlx::array::from_bytes(part, &record.shape, dtype).ok();
    match record.parts.as_slice() {
        [keys, values] if fits => Some([array(keys)?, array(values)?]),
        _ => None,
    }
}

/// Element types of caches, and their words in files.
const DTYPES: [(Dtype, &str); 3] =
    [(Dtype::Float32, "float32"), (Dtype::Float16, "float16"), (Dtype::Bfloat16, "bfloat16")];

fn word_of(dtype: Dtype) -> Option<&'static str> {
    DTYPES.iter().find(|(other, _)| *other == dtype).map(|(_, word)| *word)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYERS: i32 = 3;

    /// Caches of some layers in which every number says where it is.
    fn caches(positions: i32, dtype: Dtype) -> Vec<KvCache> {
        let numbers = |layer: i32, sign: f32| {
            let values: Vec<f32> = (0..2 * positions * 4)
                .map(|place| sign * (layer * 1000 + place % (positions * 4)) as f32)
                .collect();
            Array::from_slice(&values, &[1, 2, positions, 4]).as_dtype(dtype).unwrap()
        };
        let cache = |layer| {
            let mut cache = KvCache::default();
            cache.append(&numbers(layer, 1.0), &numbers(layer, -1.0)).unwrap();
            cache
        };
        (0..LAYERS).map(cache).collect()
    }

    fn kept(index: u32, held: bool, shelved: bool) -> Kept {
        Kept { index, key: Key([index as u8; 16]), held, shelved }
    }

    fn same(one: &[KvCache], other: &[KvCache], positions: i32) {
        for (one, other) in one.iter().zip(other) {
            assert_eq!((one.offset(), other.offset() >= positions), (positions, true));
            let numbers = |cache: &KvCache| {
                cache
                    .cut(0..positions)
                    .unwrap()
                    .unwrap()
                    .map(|part| part.as_dtype(Dtype::Float32).unwrap().contiguous().unwrap())
                    .map(|part| part.as_slice::<f32>().to_vec())
            };
            assert_eq!(numbers(one), numbers(other));
        }
    }

    #[test]
    fn what_was_kept_is_what_was_there() {
        for dtype in [Dtype::Float32, Dtype::Bfloat16] {
            let caches = caches(300, dtype);
            let mut blocks = Blocks::default();
            blocks.keep(&caches, &(0..4).map(|index| kept(index, true, false)).collect::<Vec<_>>()).unwrap();
            let mut other: Vec<KvCache> = (0..LAYERS).map(|_| KvCache::default()).collect();
            let keys = |count: u32| (0..count).map(|index| (kept(index, true, false).key, None)).collect();
            assert_eq!(blocks.fill(&mut other, keys(4)).unwrap(), 4);
            same(&other, &caches, 256);
            blocks.forget(&[kept(2, true, false).key], &[]);
            let mut third: Vec<KvCache> = (0..LAYERS).map(|_| KvCache::default()).collect();
            assert_eq!(blocks.fill(&mut third, keys(4)).unwrap(), 2, "the third block is gone");
            same(&third, &caches, 128);
        }
    }

    #[test]
    fn what_was_on_disk_is_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        for dtype in [Dtype::Float32, Dtype::Bfloat16] {
            let caches = caches(300, dtype);
            let shelf = Shelf::open(dir.path(), word_of(dtype).unwrap(), 1 << 30).unwrap();
            let mut blocks = Blocks::new(Some(shelf.clone()));
            // The last one is nowhere but on its way to disk.
            let all: Vec<Kept> = (0..4).map(|index| kept(index, index < 3, true)).collect();
            blocks.keep(&caches, &all).unwrap();
            while shelf.keys().len() + shelf.lost().len() < all.len() {
                std::thread::yield_now();
            }
            let read = all.iter().map(|kept| (kept.key, Some(shelf.read(kept.key).unwrap()))).collect();
            let mut other: Vec<KvCache> = (0..LAYERS).map(|_| KvCache::default()).collect();
            assert_eq!(Blocks::default().fill(&mut other, read).unwrap(), 4);
            same(&other, &caches, 256);
            let mut fewer: Vec<KvCache> = vec![KvCache::default()];
            let foreign = vec![(all[0].key, Some(shelf.read(all[0].key).unwrap()))];
            assert_eq!(Blocks::default().fill(&mut fewer, foreign).unwrap(), 0, "another model's block");
        }
    }
}
