//! Block store of one rank: copies of ranges of its layers' caches, one array per tensor of the KV format with all
//! layers of a block, in memory and, if there is a disk tier, on disk.

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
    cache::LayerCache,
    prefix_cache::disk::{BlockFile, BlockTensor, DiskCache},
    prefix_cache::{
        BlockCopy,
        block_hash::{BLOCK_TOKENS, BlockHash},
    },
};

/// Blocks copied at a time; more would raise peak memory.
pub const BLOCKS_PER_COPY: usize = 16;
/// Maximum bytes of blocks that exist only in the write queue.
const MAX_PENDING_WRITE_BYTES: usize = 256 << 20;

/// The tensors of a block, `[layers, heads, BLOCK_TOKENS, width]` each.
#[derive(Debug)]
struct BlockArrays {
    parts: Vec<Array>,
    /// The same tensors as bytes.
    bytes: Vec<Array>,
}

impl BlockArrays {
    fn to_file(&self) -> Option<BlockFile> {
        let part = |(part, bytes): (&Array, &Array)| {
            Some(BlockTensor {
                dtype: dtype_name(part.dtype())?.to_owned(),
                shape: part.shape().to_vec(),
                bytes: bytes.try_as_slice::<u8>().ok()?.to_vec(),
            })
        };
        let parts = self.parts.iter().zip(&self.bytes).map(part);
        Some(BlockFile { tensors: parts.collect::<Option<_>>()? })
    }

    fn bytes(&self) -> usize {
        self.bytes.iter().map(Array::nbytes).sum()
    }
}

/// The blocks of one rank.
#[derive(Debug, Default)]
pub struct BlockStore {
    // Locked because the disk cache's thread reads them.
    in_memory: HashMap<BlockHash, Arc<Mutex<BlockArrays>>>,
    disk: Option<Arc<DiskCache>>,
    pending_write_bytes: Arc<Mutex<usize>>,
}

impl BlockStore {
    /// An empty store, which writes to the disk tier if there is one.
    pub fn new(disk: Option<Arc<DiskCache>>) -> Self {
        Self { disk, ..Self::default() }
    }

    /// Evicts all blocks from memory; queued writes may still complete.
    pub fn clear(&mut self) {
        self.in_memory.clear();
    }

    /// Stores copies of blocks of a sequence if its results still count, which is checked after they are
    /// computed.
    pub fn store(
        &mut self,
        caches: &[LayerCache],
        blocks: &[BlockCopy],
        sound: impl Fn() -> bool,
    ) -> Result<(), Exception> {
        for blocks in blocks.chunks(BLOCKS_PER_COPY) {
            let copies = blocks.iter().map(|copy| copy_block(caches, copy.index));
            let copies = copies.collect::<Result<Vec<_>, _>>()?;
            // Evaluated now: MLX cannot write in place into a cache that a pending copy still reads.
            eval(copies.iter().flatten().flat_map(|block| block.parts.iter().chain(&block.bytes)))?;
            if !sound() {
                return Ok(());
            }
            for (copy, block) in blocks.iter().zip(copies) {
                let Some(block) = block else { continue };
                let block = Arc::new(Mutex::new(block));
                if copy.on_disk {
                    self.write_to_disk(copy, &block);
                }
                if copy.in_memory {
                    self.in_memory.insert(copy.hash, block);
                }
            }
        }
        Ok(())
    }

    /// Queues a block for writing; a block that is evicted from memory before that is not written.
    fn write_to_disk(&self, copy: &BlockCopy, block: &Arc<Mutex<BlockArrays>>) {
        let Some(disk) = &self.disk else { return };
        if copy.in_memory {
            let block: Weak<_> = Arc::downgrade(block);
            return disk.write(copy.hash, move || block.upgrade()?.lock().to_file());
        }
        let (block, bytes, waiting) = (block.clone(), block.lock().bytes(), self.pending_write_bytes.clone());
        if *waiting.lock() + bytes > MAX_PENDING_WRITE_BYTES {
            return disk.mark_lost(copy.hash);
        }
        *waiting.lock() += bytes;
        disk.write(copy.hash, move || {
            *waiting.lock() -= bytes;
            block.lock().to_file()
        });
    }

    /// Appends blocks to the KV caches of a sequence, from memory or else from the disk records. Returns the
    /// number of leading blocks that were found.
    pub fn load(
        &self,
        caches: &mut [LayerCache],
        blocks: Vec<(BlockHash, Option<BlockFile>)>,
    ) -> Result<u32, Exception> {
        let mut found = Vec::with_capacity(blocks.len());
        for (key, record) in blocks {
            let parts = match (self.in_memory.get(&key), record) {
                (Some(block), _) => block.lock().parts.clone(),
                (None, Some(record)) => match to_arrays(&record, caches) {
                    Some(parts) => parts,
                    None => break,
                },
                (None, None) => break,
            };
            found.push(parts);
        }
        for blocks in found.chunks(BLOCKS_PER_COPY) {
            for (layer, cache) in (0..).zip(caches.iter_mut()) {
                let joined = |part: usize| {
                    let layers = blocks.iter().map(|parts| parts[part].try_index(layer..layer + 1));
                    concatenate(&layers.collect::<Result<Vec<_>, _>>()?, 2)
                };
                cache.append_raw((0..cache.block_tensors()).map(joined).collect::<Result<_, _>>()?)?;
                // Layer by layer, so that only one layer exists twice.
                eval(&cache.readiness_probe()?)?;
            }
        }
        Ok(found.len() as u32)
    }

    /// Evicts blocks.
    pub fn evict(&mut self, in_memory: &[BlockHash], on_disk: &[BlockHash]) {
        in_memory.iter().for_each(|key| drop(self.in_memory.remove(key)));
        if let Some(disk) = &self.disk {
            disk.remove(on_disk);
        }
    }
}

/// Copies one block of all layers; `None` if a layer lacks it.
fn copy_block(caches: &[LayerCache], index: u32) -> Result<Option<BlockArrays>, Exception> {
    let from = (index * BLOCK_TOKENS) as i32;
    let positions = from..from + BLOCK_TOKENS as i32;
    let layers = caches.iter().map(|cache| cache.slice(positions.clone()));
    let Some(layers) = layers.collect::<Result<Option<Vec<_>>, _>>()? else { return Ok(None) };
    // With a single layer, joining would not copy.
    let joined = |part: usize| {
        let layers = layers.iter().map(|parts| &parts[part]);
        concatenate(&layers.collect::<Vec<_>>(), 0)?.contiguous()
    };
    let count = layers.first().map_or(0, Vec::len);
    let parts = (0..count).map(joined).collect::<Result<Vec<_>, _>>()?;
    let bytes = parts.iter().map(|part| part.view_dtype(Dtype::Uint8)).collect::<Result<_, _>>()?;
    Ok(Some(BlockArrays { bytes, parts }))
}

/// The arrays of a disk record; `None` if it does not fit this model.
fn to_arrays(record: &BlockFile, caches: &[LayerCache]) -> Option<Vec<Array>> {
    let array = |BlockTensor { dtype, shape, bytes }: &BlockTensor| {
        let dtype = DTYPES.iter().find(|(_, word)| word == dtype).map(|(dtype, _)| *dtype)?;
        let fits =
            shape.first() == Some(&(caches.len() as i32)) && shape.get(2) == Some(&(BLOCK_TOKENS as i32));
        fits.then(|| russet_mlx::array::from_bytes(bytes, shape, dtype).ok())?
    };
    let fits = caches.iter().all(|cache| cache.block_tensors() == record.tensors.len());
    fits.then(|| record.tensors.iter().map(array).collect())?
}

/// Element types of KV caches, and their names in files.
const DTYPES: [(Dtype, &str); 4] = [
    (Dtype::Float32, "float32"),
    (Dtype::Float16, "float16"),
    (Dtype::Bfloat16, "bfloat16"),
    (Dtype::Uint32, "uint32"),
];

fn dtype_name(dtype: Dtype) -> Option<&'static str> {
    DTYPES.iter().find(|(other, _)| *other == dtype).map(|(_, word)| *word)
}

#[cfg(test)]
mod tests {
    use russet_model::state::StateKind;
    use russet_wire::engine_options::KvCacheType;

    use super::*;
    use crate::cache::format::KvFormat;

    const LAYERS: i32 = 3;

    const WIDTH: i32 = 32;

    /// Element type of the computation, and format of the KV cache.
    const KINDS: [(Dtype, KvCacheType); 4] = [
        (Dtype::Float32, KvCacheType::AsComputed),
        (Dtype::Bfloat16, KvCacheType::AsComputed),
        (Dtype::Float32, KvCacheType::Int8),
        (Dtype::Bfloat16, KvCacheType::Int4),
    ];

    fn empty(kind: KvCacheType) -> LayerCache {
        LayerCache::new(StateKind::KeyValue, KvFormat::new(kind, WIDTH as usize).unwrap())
    }

    /// KV caches of some layers in which every value encodes its position.
    fn caches(positions: i32, dtype: Dtype, kind: KvCacheType) -> Vec<LayerCache> {
        let numbers = |layer: i32, sign: f32| {
            let values: Vec<f32> = (0..2 * positions * WIDTH)
                .map(|place| sign * (layer * 1000 + place % (positions * WIDTH)) as f32)
                .collect();
            Array::from_slice(&values, &[1, 2, positions, WIDTH]).as_dtype(dtype).unwrap()
        };
        let cache = |layer| {
            let mut cache = empty(kind);
            cache.append(&numbers(layer, 1.0), &numbers(layer, -1.0)).unwrap();
            cache
        };
        (0..LAYERS).map(cache).collect()
    }

    fn copy(index: u32, in_memory: bool, on_disk: bool) -> BlockCopy {
        BlockCopy { index, hash: BlockHash([index as u8; 16]), in_memory, on_disk }
    }

    fn same(one: &[LayerCache], other: &[LayerCache], positions: i32) {
        for (one, other) in one.iter().zip(other) {
            assert_eq!((one.offset(), other.offset() >= positions), (positions, true));
            let bytes = |cache: &LayerCache| -> Vec<Vec<u8>> {
                let parts = cache.slice(0..positions).unwrap().unwrap().into_iter();
                let parts = parts.map(|part| part.contiguous().unwrap().view_dtype(Dtype::Uint8).unwrap());
                parts.map(|part| part.as_slice::<u8>().to_vec()).collect()
            };
            assert!(bytes(one) == bytes(other), "{one:?}");
        }
    }

    #[test]
    fn block_store_restores_blocks_from_memory_unchanged() {
        for (dtype, kind) in KINDS {
            let caches = caches(300, dtype, kind);
            let mut blocks = BlockStore::default();
            blocks
                .store(&caches, &(0..4).map(|index| copy(index, true, false)).collect::<Vec<_>>(), || true)
                .unwrap();
            let mut other: Vec<LayerCache> = (0..LAYERS).map(|_| empty(kind)).collect();
            let keys = |count: u32| (0..count).map(|index| (copy(index, true, false).hash, None)).collect();
            assert_eq!(blocks.load(&mut other, keys(4)).unwrap(), 4);
            same(&other, &caches, 256);
            blocks.evict(&[copy(2, true, false).hash], &[]);
            let mut third: Vec<LayerCache> = (0..LAYERS).map(|_| empty(kind)).collect();
            assert_eq!(blocks.load(&mut third, keys(4)).unwrap(), 2, "the third block is gone");
            same(&third, &caches, 128);
        }
    }

    #[test]
    fn block_store_restores_blocks_from_disk_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        for (dtype, kind) in KINDS {
            let caches = caches(300, dtype, kind);
            let disk = DiskCache::open(dir.path(), &format!("{dtype:?}-{kind:?}"), 1 << 30).unwrap();
            let mut blocks = BlockStore::new(Some(disk.clone()));
            // The last one exists only in the write queue.
            let all: Vec<BlockCopy> = (0..4).map(|index| copy(index, index < 3, true)).collect();
            blocks.store(&caches, &all, || true).unwrap();
            while disk.hashes().len() + disk.take_lost().len() < all.len() {
                std::thread::yield_now();
            }
            let read = all.iter().map(|copy| (copy.hash, Some(disk.read(copy.hash).unwrap()))).collect();
            let mut other: Vec<LayerCache> = (0..LAYERS).map(|_| empty(kind)).collect();
            assert_eq!(BlockStore::default().load(&mut other, read).unwrap(), 4);
            same(&other, &caches, 256);
            let foreign = || vec![(all[0].hash, Some(disk.read(all[0].hash).unwrap()))];
            let mut fewer: Vec<LayerCache> = vec![empty(kind)];
            assert_eq!(
                BlockStore::default().load(&mut fewer, foreign()).unwrap(),
                0,
                "another model's block"
            );
            let otherwise = match kind {
                KvCacheType::AsComputed => KvCacheType::Int8,
                _ => KvCacheType::AsComputed,
            };
            let mut others: Vec<LayerCache> = (0..LAYERS).map(|_| empty(otherwise)).collect();
            assert_eq!(
                BlockStore::default().load(&mut others, foreign()).unwrap(),
                0,
                "another form's block"
            );
        }
    }
}
