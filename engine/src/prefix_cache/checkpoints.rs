//! Where the prefill of a prompt pauses for a copy of its slot, for layers that cannot go back. Pure.

use std::collections::{HashSet, VecDeque};

use super::block_hash::{BLOCK_TOKENS, BlockHash};

/// Hashes of prompts that are remembered: a million tokens.
const MAX_SEEN_BLOCKS: usize = 16_384;

/// Tokens of a prompt at which its prefill pauses, because its slot is copied as it is then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checkpoints {
    /// After these, its slot is copied for prompts that begin alike: [`PrefixCache::fork`](super::PrefixCache::fork).
    pub fork_at: Option<u32>,
    /// After these, its slot keeps a snapshot: [`PrefixCache::snapshot`](super::PrefixCache::snapshot).
    pub snapshot_at: Option<u32>,
}

impl Checkpoints {
    /// Tokens from the first `cached` ones to the next checkpoint.
    pub fn tokens_to_next(self, cached: u32) -> Option<u32> {
        let ahead = [self.fork_at, self.snapshot_at].into_iter().flatten().filter(|at| *at > cached);
        ahead.min().map(|at| at - cached)
    }

    /// Those after the first `cached` tokens, once.
    pub fn take(&mut self, cached: u32) -> Self {
        let here = |at: &mut Option<u32>| at.take_if(|at| *at == cached);
        Self { fork_at: here(&mut self.fork_at), snapshot_at: here(&mut self.snapshot_at) }
    }
}

/// How prompts have begun lately: what two have in common, such as a system prompt, a third is likely to have.
#[derive(Debug, Default)]
pub(super) struct SeenPrefixes {
    blocks: HashSet<BlockHash>,
    oldest_first: VecDeque<BlockHash>,
}

impl SeenPrefixes {
    /// Tokens with which this prompt begins as an earlier one did; it is one of the earlier ones from now on.
    pub fn note(&mut self, prompt: &[BlockHash]) -> u32 {
        let common = prompt.iter().take_while(|block| self.blocks.contains(block)).count();
        for block in &prompt[common..] {
            if self.blocks.insert(*block) {
                self.oldest_first.push_back(*block);
            }
        }
        while self.oldest_first.len() > MAX_SEEN_BLOCKS
            && let Some(block) = self.oldest_first.pop_front()
        {
            self.blocks.remove(&block);
        }
        common as u32 * BLOCK_TOKENS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefix_cache::block_hash::block_hashes;

    #[test]
    fn prefill_pauses_at_each_checkpoint_once() {
        let mut both = Checkpoints { fork_at: Some(64), snapshot_at: Some(100) };
        for (cached, left, fork, snapshot) in [
            (0, Some(64), false, false),
            (64, Some(36), true, false),
            (64, Some(36), false, false),
            (100, None, false, true),
        ] {
            assert_eq!(both.tokens_to_next(cached), left, "{cached}");
            let here = both.take(cached);
            assert_eq!((here.fork_at.is_some(), here.snapshot_at.is_some()), (fork, snapshot), "{cached}");
        }
        assert_eq!(both, Checkpoints::default());
    }

    #[test]
    fn beginnings_that_two_prompts_share_are_known() {
        let root = BlockHash::root(b"m");
        let prompt = |own: u32| block_hashes(root, &[vec![1; 200], vec![own; 200]].concat());
        let mut seen = SeenPrefixes::default();
        assert_eq!([prompt(2), prompt(3), prompt(3)].map(|prompt| seen.note(&prompt)), [0, 192, 384]);
        for own in 4..6000 {
            seen.note(&prompt(own));
        }
        assert_eq!((seen.blocks.len(), seen.oldest_first.len()), (MAX_SEEN_BLOCKS, MAX_SEEN_BLOCKS));
    }
}
