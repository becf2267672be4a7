//! Chunks of 16 MiB, each a subtree of the file's BLAKE3 tree: a chunk is verified alone, and all chunks
//! together verify the file. Pure.

use blake3::hazmat::{self, ChainingValue, HasherExt as _, Mode};

use serde::{Deserialize, Serialize};

use super::model_dirs::Manifest;

/// Bytes of a chunk; the last one of a file is shorter. A power of two, so that chunks are subtrees.
pub const CHUNK_BYTES: u64 = 16 << 20;

/// Hash of a chunk: the file's hash if it is the only one, else the chaining value of its subtree.
pub type HashBytes = [u8; 32];

/// [`HashBytes`] in a manifest, in hexadecimal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ChunkHash(#[serde(with = "hex::serde")] pub HashBytes);

/// One chunk of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Index of its file in the manifest.
    pub file: usize,
    /// Its index in the file.
    pub index: usize,
    /// Its offset in the file.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Number of chunks in a file of this size.
pub fn count(size: u64) -> usize {
    size.div_ceil(CHUNK_BYTES) as usize
}

/// All chunks of a model, file by file.
pub fn split(manifest: &Manifest) -> Vec<Chunk> {
    let files = manifest.files.iter().enumerate();
    let chunks = files.flat_map(|(file, of)| {
        (0..count(of.size)).map(move |index| {
            let offset = index as u64 * CHUNK_BYTES;
            Chunk { file, index, offset, length: CHUNK_BYTES.min(of.size - offset) }
        })
    });
    chunks.collect()
}

/// Hashes the chunks of a file incrementally, in order.
pub struct TreeHasher {
    size: u64,
    seen: u64,
    current: Option<ChunkHasher>,
    hashes: Vec<HashBytes>,
}

impl TreeHasher {
    /// A hasher for a file of `size` bytes.
    pub fn new(size: u64) -> Self {
        Self { size, seen: 0, current: None, hashes: Vec::with_capacity(count(size)) }
    }

    /// Takes the next bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = CHUNK_BYTES - self.seen % CHUNK_BYTES;
            let (now, later) = bytes.split_at(bytes.len().min(room as usize));
            let (size, offset) = (self.size, self.seen);
            self.current.get_or_insert_with(|| ChunkHasher::new(size, offset)).update(now);
            self.seen += now.len() as u64;
            if self.seen.is_multiple_of(CHUNK_BYTES) {
                self.hashes.extend(self.current.take().map(ChunkHasher::finish));
            }
            bytes = later;
        }
    }

    /// The hashes of all chunks.
    pub fn finish(mut self) -> Vec<HashBytes> {
        self.hashes.extend(self.current.take().map(ChunkHasher::finish));
        self.hashes
    }
}

/// Hashes one chunk incrementally.
pub struct ChunkHasher {
    hasher: blake3::Hasher,
    only: bool,
}

impl ChunkHasher {
    /// A hasher for the chunk at `offset` in a file of `size` bytes.
    pub fn new(size: u64, offset: u64) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.set_input_offset(offset);
        Self { hasher, only: count(size) == 1 }
    }

    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
    }

    /// The chunk's hash.
    pub fn finish(self) -> HashBytes {
        match self.only {
            true => *self.hasher.finalize().as_bytes(),
            false => self.hasher.finalize_non_root(),
        }
    }
}

/// The BLAKE3 hash of a file with these chunk hashes.
pub fn root(values: &[HashBytes]) -> HashBytes {
    match values {
        [] => *blake3::hash(b"").as_bytes(),
        [only] => *only,
        values => {
            let (left, right) = halves(values);
            *hazmat::merge_subtrees_root(&subtree(left), &subtree(right), Mode::Hash).as_bytes()
        }
    }
}

fn subtree(values: &[HashBytes]) -> ChainingValue {
    match values {
        [only] => *only,
        values => {
            let (left, right) = halves(values);
            hazmat::merge_subtrees_non_root(&subtree(left), &subtree(right), Mode::Hash)
        }
    }
}

/// The left half of a BLAKE3 tree is the largest complete one that leaves something for the right.
fn halves(values: &[HashBytes]) -> (&[HashBytes], &[HashBytes]) {
    values.split_at(values.len().next_power_of_two() / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_hashes_combine_to_the_blake3_file_hash() {
        for size in
            [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, 5 * CHUNK_BYTES + 17]
        {
            let bytes: Vec<u8> = (0..size).map(|at| (at * at % 251) as u8).collect();
            let mut hasher = TreeHasher::new(size);
            // Pieces that do not end at chunk boundaries.
            bytes.chunks(3_000_001).for_each(|piece| hasher.update(piece));
            let values = hasher.finish();
            assert_eq!(
                (values.len(), root(&values)),
                (count(size), *blake3::hash(&bytes).as_bytes()),
                "{size}"
            );
            for (index, expected) in values.iter().enumerate() {
                let offset = index as u64 * CHUNK_BYTES;
                let value = |bytes: &[u8]| {
                    let mut valuer = ChunkHasher::new(size, offset);
                    valuer.update(bytes);
                    valuer.finish()
                };
                let part = &bytes[offset as usize..(offset + CHUNK_BYTES).min(size) as usize];
                assert_eq!(value(part), *expected, "{index} of {size}");
                let mut other = part.to_vec();
                other[0] ^= 1;
                assert_ne!(value(&other), *expected, "{index} of {size}");
            }
        }
    }
}
