//! Block hashes: a hash identifies a block of tokens and the whole prefix before it. Two prompts share block
//! hashes exactly as far as their tokens are equal, block by block, on the same model and with the same salt.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// Tokens per block. Small enough that little of a shared prefix is prefilled again, large enough that a long
/// conversation has no more than some thousands of blocks.
pub const BLOCK_TOKENS: u32 = 64;

/// Requests that share cached prefixes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixScope<'a> {
    /// Identity of their adapter's files; empty where the model itself answers.
    pub adapter: &'a str,
    /// Their salt.
    pub salt: &'a str,
}

/// Identifies a block and the prefix before it: the first half of a SHA-256.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BlockHash(pub [u8; 16]);

impl BlockHash {
    /// The root hash of one model; `identity` names model, adapter and element type.
    pub fn root(identity: &[u8]) -> Self {
        Self::digest(&[b"russet prefix 1", identity])
    }

    /// The root hash of requests in this scope, below that of their model. Without adapter and salt it is the model's
    /// own, so that blocks which were stored before there were any stay valid.
    pub fn scoped(self, PrefixScope { adapter, salt }: PrefixScope<'_>) -> Self {
        let below = |root: Self, kind: &[u8], name: &str| match name {
            "" => root,
            name => Self::digest(&[kind, &root.0, name.as_bytes()]),
        };
        below(below(self, b"russet adapter 1", adapter), b"russet salt 1", salt)
    }

    /// `None` unless `bytes` has the length of a hash.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Parses the output of [`fmt::Display`].
    pub fn parse(text: &str) -> Option<Self> {
        let mut bytes = [0; 16];
        hex::decode_to_slice(text, &mut bytes).ok()?;
        Some(Self(bytes))
    }

    fn next(&self, tokens: &[u32]) -> Self {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        Self::digest(&[&self.0, &bytes])
    }

    fn digest(parts: &[&[u8]]) -> Self {
        let mut hash = Sha256::new();
        for part in parts {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let mut key = [0; 16];
        key.copy_from_slice(&hash.finalize()[..16]);
        Self(key)
    }
}

impl fmt::Display for BlockHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{self}")
    }
}

/// Hashes of the whole blocks of `tokens`, in order.
pub fn block_hashes(root: BlockHash, tokens: &[u32]) -> Vec<BlockHash> {
    let blocks = tokens.chunks_exact(BLOCK_TOKENS as usize);
    blocks
        .scan(root, |parent, block| {
            *parent = parent.next(block);
            Some(*parent)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_hashes_agree_as_far_as_the_tokens_do() {
        let root = BlockHash::root(b"model");
        let first: Vec<u32> = (0..300).collect();
        let mut second = first.clone();
        second[130] = 9;
        let (one, two) = (block_hashes(root, &first), block_hashes(root, &second));
        assert_eq!((one.len(), two.len()), (4, 4), "300 tokens are four whole blocks");
        assert_eq!(one[..2], two[..2]);
        assert!(one[2..].iter().all(|key| !two.contains(key)), "what follows a difference differs");
        assert_eq!(block_hashes(root, &first[..200]), one[..3]);
        assert_ne!(block_hashes(BlockHash::root(b"other"), &first)[0], one[0]);
        let scoped = |root: BlockHash, adapter, salt| root.scoped(PrefixScope { adapter, salt });
        assert_eq!(scoped(root, "", ""), root);
        let other = BlockHash::root(b"other");
        let names = [("", "a"), ("", "b"), ("a", ""), ("b", ""), ("a", "a"), ("a", "b")];
        let salts = names.map(|(adapter, salt)| scoped(root, adapter, salt));
        let salts = [&[root, scoped(other, "", "a"), scoped(other, "a", "")][..], &salts].concat();
        for (index, salt) in salts.iter().enumerate() {
            let hashes = block_hashes(*salt, &first);
            let others = salts[..index].iter().flat_map(|other| block_hashes(*other, &first));
            assert!(others.into_iter().all(|hash| !hashes.contains(&hash)), "salt {index} shares a block");
        }
        assert_eq!(BlockHash::parse(&one[0].to_string()), Some(one[0]));
        assert_eq!(BlockHash::parse("00"), None);
    }
}
