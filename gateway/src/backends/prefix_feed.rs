//! What an engine says of itself, for the choice of a replica: which beginnings of prompts it has cached, and how much it
//! has to do. Pure; `follow` reads the stream.

use std::collections::{HashMap, HashSet, VecDeque};

use russet_rpc::engine as pb;
use russet_wire::prefix_mark::PrefixMark;

/// Most blocks of an engine that are remembered: those of 16 million tokens, 8 MiB. Of more the rest is unknown here.
const MAX_BLOCKS: usize = 262_144;
/// Most marks of an engine that are remembered; of more the oldest is forgotten.
const MAX_MARKS: usize = 16_384;

/// The latest state of one engine.
#[derive(Debug, Default)]
pub(crate) struct PrefixFeed {
    blocks: HashSet<Box<[u8]>>,
    /// The block before each mark and the tokens before it; and the marks in the order of their arrival.
    marks: HashMap<u64, (Box<[u8]>, u32)>,
    arrivals: VecDeque<u64>,
    load: pb::EngineLoad,
}

/// The longest beginning of a prompt that an engine has cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CachedPrefix {
    /// Its tokens, as the engine estimates them.
    pub(crate) tokens: u32,
    /// Bytes of its texts.
    pub(crate) bytes: u64,
}

impl PrefixFeed {
    /// Takes in an event of the engine.
    pub(crate) fn apply(&mut self, event: pb::PrefixesEvent) {
        let pb::PrefixesEvent { reset, block_tokens: _, root: _, added, evicted, marked, load } = event;
        if reset {
            *self = Self { load: self.load, ..Self::default() };
        }
        for block in evicted {
            self.blocks.remove(block.as_slice());
        }
        let room = MAX_BLOCKS.saturating_sub(self.blocks.len());
        self.blocks.extend(added.into_iter().take(room).map(Vec::into_boxed_slice));
        for pb::MarkedBlock { key, block, tokens } in marked {
            if self.marks.insert(key, (block.into_boxed_slice(), tokens)).is_none() {
                self.arrivals.push_back(key);
            }
        }
        while self.arrivals.len() > MAX_MARKS
            && let Some(oldest) = self.arrivals.pop_front()
        {
            self.marks.remove(&oldest);
        }
        self.load = load.unwrap_or(self.load);
    }

    /// What the engine has to do.
    pub(crate) fn load(&self) -> pb::EngineLoad {
        self.load
    }

    /// The longest beginning of a prompt with these marks that is cached.
    pub(crate) fn cached_prefix(&self, marks: &[PrefixMark]) -> CachedPrefix {
        let cached = |mark: &PrefixMark| {
            let (block, tokens) = self.marks.get(&mark.key)?;
            self.blocks.contains(block).then_some(CachedPrefix { tokens: *tokens, bytes: mark.bytes })
        };
        marks.iter().rev().find_map(cached).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marked(key: u64, block: u8, tokens: u32) -> pb::MarkedBlock {
        pb::MarkedBlock { key, block: vec![block], tokens }
    }

    fn event(added: &[u8], evicted: &[u8], marked: &[pb::MarkedBlock]) -> pb::PrefixesEvent {
        let blocks = |blocks: &[u8]| blocks.iter().map(|block| vec![*block]).collect();
        let (added, evicted) = (blocks(added), blocks(evicted));
        pb::PrefixesEvent { added, evicted, marked: marked.to_vec(), ..Default::default() }
    }

    #[test]
    fn the_longest_prefix_whose_block_is_there_counts() {
        let marks = [(1, 100), (2, 400), (3, 1000)].map(|(key, bytes)| PrefixMark { key, bytes });
        let mut feed = PrefixFeed::default();
        assert_eq!(feed.cached_prefix(&marks), CachedPrefix::default());
        feed.apply(event(&[], &[], &[marked(1, 10, 64), marked(3, 30, 250)]));
        assert_eq!(feed.cached_prefix(&marks), CachedPrefix::default(), "read, and not cached yet");
        feed.apply(event(&[10, 20, 30], &[], &[]));
        assert_eq!(feed.cached_prefix(&marks), CachedPrefix { tokens: 250, bytes: 1000 });
        assert_eq!(feed.cached_prefix(&marks[..2]), CachedPrefix { tokens: 64, bytes: 100 });
        feed.apply(event(&[], &[30], &[]));
        assert_eq!(feed.cached_prefix(&marks), CachedPrefix { tokens: 64, bytes: 100 });
        feed.apply(event(&[], &[], &[marked(3, 20, 240)]));
        assert_eq!(feed.cached_prefix(&marks).tokens, 240, "another prompt with the mark");
        let load = pb::EngineLoad { running: 3, ..Default::default() };
        feed.apply(pb::PrefixesEvent { load: Some(load), ..Default::default() });
        feed.apply(pb::PrefixesEvent { reset: true, ..event(&[20], &[], &[]) });
        assert_eq!((feed.cached_prefix(&marks), feed.load()), (CachedPrefix::default(), load));
    }

    #[test]
    fn a_feed_takes_bounded_memory() {
        let mut feed = PrefixFeed::default();
        let number = |number: usize| (number as u64).to_le_bytes().to_vec();
        let added = (0..MAX_BLOCKS + 9).map(number).collect();
        feed.apply(pb::PrefixesEvent { added, ..Default::default() });
        let marks: Vec<_> = (0..MAX_MARKS as u64 + 9).map(|key| marked(key, 1, 64)).collect();
        feed.apply(event(&[], &[], &marks));
        assert_eq!(
            (feed.blocks.len(), feed.marks.len(), feed.arrivals.len()),
            (MAX_BLOCKS, MAX_MARKS, MAX_MARKS)
        );
        assert!(!feed.marks.contains_key(&8) && feed.marks.contains_key(&9));
    }
}
