//! Tells gateways which beginnings of prompts are kept here, so that they can send a conversation to where it is
//! known: all of them first, then every change.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::mpsc::{self, Receiver, Sender};

use super::blocks::Changes;
use super::chain::Key;

/// Changes that a listener may lag behind; one that is slower than that is cut off and asks again.
const MOST_BEHIND: usize = 256;

/// What a listener is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct News {
    /// Whether this is all there is, rather than what changed.
    pub all: bool,
    /// Which, and which no more.
    pub changes: Changes,
}

/// Who listens; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Feed(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    known: BTreeSet<Key>,
    listeners: Vec<Sender<News>>,
}

impl Feed {
    /// Everything that is known, and all that changes from now on.
    pub fn listen(&self) -> Receiver<News> {
        let (sender, news) = mpsc::channel(MOST_BEHIND);
        let mut state = self.0.lock();
        let added = state.known.iter().copied().collect();
        // There is room for the first one.
        let _ = sender.try_send(News { all: true, changes: Changes { added, dropped: Vec::new() } });
        state.listeners.push(sender);
        news
    }

    /// Tells everybody what changed.
    pub fn tell(&self, changes: Changes) {
        if changes == Changes::default() {
            return;
        }
        let mut state = self.0.lock();
        state.known.extend(&changes.added);
        for key in &changes.dropped {
            state.known.remove(key);
        }
        let news = News { all: false, changes };
        state.listeners.retain(|listener| listener.try_send(news.clone()).is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u8) -> Key {
        Key([number; 16])
    }

    #[test]
    fn a_listener_hears_of_everything_once_and_a_slow_one_is_cut_off() {
        let feed = Feed::default();
        feed.tell(Changes { added: vec![key(1), key(2)], dropped: vec![] });
        let mut news = feed.listen();
        feed.tell(Changes { added: vec![key(3)], dropped: vec![key(1)] });
        feed.tell(Changes::default());
        let first = News { all: true, changes: Changes { added: vec![key(1), key(2)], dropped: vec![] } };
        let second = News { all: false, changes: Changes { added: vec![key(3)], dropped: vec![key(1)] } };
        assert_eq!([news.try_recv().unwrap(), news.try_recv().unwrap()], [first, second]);
        assert!(news.try_recv().is_err());
        for number in 0..=MOST_BEHIND {
            feed.tell(Changes { added: vec![Key([number as u8; 16])], dropped: vec![] });
        }
        for _ in 0..MOST_BEHIND {
            news.try_recv().unwrap();
        }
        assert_eq!(news.try_recv(), Err(mpsc::error::TryRecvError::Disconnected));
        assert!(feed.listen().try_recv().unwrap().changes.added.len() > 200);
    }
}
