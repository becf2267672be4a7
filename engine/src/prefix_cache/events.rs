//! KV events: tells gateways which blocks are cached here, for cache-aware routing. A snapshot first, then
//! every change.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::mpsc::{self, Receiver, Sender};

use super::block_hash::BlockHash;
use super::block_index::BlockDelta;

/// Maximum events that a subscriber may lag behind; a slower one is disconnected and subscribes again.
const MAX_PENDING_EVENTS: usize = 256;

/// An event for subscribers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockEvent {
    /// Whether this is a snapshot rather than a change.
    pub is_snapshot: bool,
    /// Blocks added and evicted.
    pub delta: BlockDelta,
}

/// Subscribers and current state; clones share them.
#[derive(Clone, Debug, Default)]
pub struct BlockEvents(Arc<Mutex<BlockEventState>>);

#[derive(Debug, Default)]
struct BlockEventState {
    stored: BTreeSet<BlockHash>,
    listeners: Vec<Sender<BlockEvent>>,
}

impl BlockEvents {
    /// Subscribes: a snapshot, then all changes.
    pub fn subscribe(&self) -> Receiver<BlockEvent> {
        let (sender, news) = mpsc::channel(MAX_PENDING_EVENTS);
        let mut state = self.0.lock();
        let added = state.stored.iter().copied().collect();
        // The channel has capacity for the first event.
        let _ = sender
            .try_send(BlockEvent { is_snapshot: true, delta: BlockDelta { added, removed: Vec::new() } });
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
        let news = BlockEvent { is_snapshot: false, delta: changes };
        state.listeners.retain(|listener| listener.try_send(news.clone()).is_ok());
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
        };
        let second = BlockEvent {
            is_snapshot: false,
            delta: BlockDelta { added: vec![key(3)], removed: vec![key(1)] },
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
}
