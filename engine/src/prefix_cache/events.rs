//! KV events: tells gateways which blocks are cached here, and at which of them the prompts' marks lie, for prefix-aware
//! routing. A snapshot first, then every change.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use russet_wire::prefix_mark::PrefixMark;
use tokio::sync::mpsc::{self, Receiver, Sender};

use super::block_hash::{BLOCK_TOKENS, BlockHash, block_hashes};
use super::block_index::BlockDelta;

/// Maximum events that a subscriber may lag behind; a slower one is disconnected and subscribes again.
const MAX_PENDING_EVENTS: usize = 256;
/// Maximum marks that a new subscriber gets, the latest ones. A turn of a conversation has a few that are new.
const MAX_MARKS: usize = 8192;

/// A mark of a prompt, and the block before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkedBlock {
    /// Key of the mark.
    pub key: u64,
    /// The last whole block before it.
    pub block: BlockHash,
    /// Tokens before it, estimated by bytes.
    pub tokens: u32,
}

/// The marks of a prompt whose blocks begin at `root`; those before its first block's end are left out.
pub fn marked_blocks(root: BlockHash, prompt: &[u32], marks: &[PrefixMark]) -> Vec<MarkedBlock> {
    if marks.is_empty() {
        return Vec::new();
    }
    let hashes = block_hashes(root, prompt);
    let marks = PrefixMark::tokens(marks, prompt.len() as u32);
    marks
        .filter_map(|(key, tokens)| {
            let index = (tokens / BLOCK_TOKENS).checked_sub(1)?;
            Some(MarkedBlock { key, block: *hashes.get(index as usize)?, tokens })
        })
        .collect()
}

/// An event for subscribers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockEvent {
    /// Whether this is a snapshot rather than a change.
    pub is_snapshot: bool,
    /// Blocks added and evicted.
    pub delta: BlockDelta,
    /// Marks of prompts that have arrived.
    pub marked: Vec<MarkedBlock>,
}

/// Subscribers and current state; clones share them.
#[derive(Clone, Debug, Default)]
pub struct BlockEvents(Arc<Mutex<BlockEventState>>);

#[derive(Debug, Default)]
struct BlockEventState {
    stored: BTreeSet<BlockHash>,
    /// The block and the tokens of each mark, and the marks in the order of their arrival.
    marks: HashMap<u64, (BlockHash, u32)>,
    arrivals: VecDeque<u64>,
    listeners: Vec<Sender<BlockEvent>>,
}

impl BlockEvents {
    /// Subscribes: a snapshot, then all changes.
    pub fn subscribe(&self) -> Receiver<BlockEvent> {
        let (sender, news) = mpsc::channel(MAX_PENDING_EVENTS);
        let mut state = self.0.lock();
        let added = state.stored.iter().copied().collect();
        let marks = state.marks.iter();
        let marked = marks.map(|(&key, &(block, tokens))| MarkedBlock { key, block, tokens }).collect();
        let delta = BlockDelta { added, removed: Vec::new() };
        // The channel has capacity for the first event.
        let _ = sender.try_send(BlockEvent { is_snapshot: true, delta, marked });
        state.listeners.push(sender);
        news
    }

    /// Sends the changes to all subscribers.
    pub fn publish(&self, changes: BlockDelta) {
        if changes == BlockDelta::default() {
            return;
        }
        let mut state = self.0.lock();
        state.stored.extend(&changes.added);
        for key in &changes.removed {
            state.stored.remove(key);
        }
        state.send(&BlockEvent { is_snapshot: false, delta: changes, marked: Vec::new() });
    }

    /// Sends the marks of a prompt to all subscribers, as far as they are news. The latest prompt with a mark says which
    /// block it is.
    pub fn publish_marks(&self, mut marked: Vec<MarkedBlock>) {
        let mut state = self.0.lock();
        marked.retain(|MarkedBlock { key, block, tokens }| {
            let before = state.marks.insert(*key, (*block, *tokens));
            if before.is_none() {
                state.arrivals.push_back(*key);
            }
            before.is_none_or(|(known, _)| known != *block)
        });
        while state.arrivals.len() > MAX_MARKS
            && let Some(oldest) = state.arrivals.pop_front()
        {
            state.marks.remove(&oldest);
        }
        if !marked.is_empty() {
            state.send(&BlockEvent { is_snapshot: false, delta: BlockDelta::default(), marked });
        }
    }
}

impl BlockEventState {
    fn send(&mut self, news: &BlockEvent) {
        self.listeners.retain(|listener| listener.try_send(news.clone()).is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u8) -> BlockHash {
        BlockHash([number; 16])
    }

    #[test]
    fn subscriber_gets_each_event_once_and_a_slow_one_is_dropped() {
        let feed = BlockEvents::default();
        feed.publish(BlockDelta { added: vec![key(1), key(2)], removed: vec![] });
        let mut news = feed.subscribe();
        feed.publish(BlockDelta { added: vec![key(3)], removed: vec![key(1)] });
        feed.publish(BlockDelta::default());
        let first = BlockEvent {
            is_snapshot: true,
            delta: BlockDelta { added: vec![key(1), key(2)], removed: vec![] },
            marked: Vec::new(),
        };
        let second = BlockEvent {
            is_snapshot: false,
            delta: BlockDelta { added: vec![key(3)], removed: vec![key(1)] },
            marked: Vec::new(),
        };
        assert_eq!([news.try_recv().unwrap(), news.try_recv().unwrap()], [first, second]);
        assert!(news.try_recv().is_err());
        for number in 0..=MAX_PENDING_EVENTS {
            feed.publish(BlockDelta { added: vec![BlockHash([number as u8; 16])], removed: vec![] });
        }
        for _ in 0..MAX_PENDING_EVENTS {
            news.try_recv().unwrap();
        }
        assert_eq!(news.try_recv(), Err(mpsc::error::TryRecvError::Disconnected));
        assert!(feed.subscribe().try_recv().unwrap().delta.added.len() > 200);
    }
    #[test]
    fn marks_are_sent_once_with_the_block_before_them() {
        let (root, prompt): (_, Vec<u32>) = (BlockHash::root(b"model"), (0..200).collect());
        let marks = [(1, 100), (2, 700), (3, 1000)].map(|(key, bytes)| PrefixMark { key, bytes });
        let marked = marked_blocks(root, &prompt, &marks);
        let hashes = block_hashes(root, &prompt);
        let block = |key, index: usize, tokens| MarkedBlock { key, block: hashes[index], tokens };
        assert_eq!(marked, [block(2, 1, 140), block(3, 2, 200)], "20 tokens are no whole block");
        assert_eq!(marked_blocks(root, &prompt, &[]), []);

        let feed = BlockEvents::default();
        feed.publish_marks(marked[..1].to_vec());
        let mut news = feed.subscribe();
        feed.publish_marks(marked.clone());
        feed.publish_marks(marked.clone());
        let later = MarkedBlock { block: key(9), ..marked[0] };
        feed.publish_marks(vec![later]);
        let event = |is_snapshot, marked: &[MarkedBlock]| BlockEvent {
            is_snapshot,
            delta: BlockDelta::default(),
            marked: marked.to_vec(),
        };
        let expected = [event(true, &marked[..1]), event(false, &marked[1..]), event(false, &[later])];
        assert_eq!([(); 3].map(|()| news.try_recv().unwrap()), expected);
        assert!(news.try_recv().is_err());
    }

    #[test]
    fn the_latest_marks_are_kept() {
        let feed = BlockEvents::default();
        let mark = |number: u64| MarkedBlock { key: number, block: key(1), tokens: 64 };
        feed.publish_marks((0..=MAX_MARKS as u64).map(mark).collect());
        let marked = feed.subscribe().try_recv().unwrap().marked;
        assert_eq!(marked.len(), MAX_MARKS);
        assert!(marked.iter().all(|marked| marked.key > 0), "the oldest is gone");
    }
}
