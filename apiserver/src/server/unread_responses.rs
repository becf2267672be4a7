//! Responses of one connection, and pieces of them, that its client has not read: an HTTP/2 client that grants no window
//! keeps each of them in memory for as long as it answers pings. Not here: who closes the connection, see `connection_limit.rs`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// They by number, each with the time since which its client has taken nothing of it.
#[derive(Debug, Default)]
pub struct UnreadResponses(Mutex<Numbered>);

#[derive(Debug, Default)]
struct Numbered {
    next: u64,
    touched: HashMap<u64, Instant>,
}

/// One of them, until it was sent.
#[derive(Debug)]
pub struct UnreadResponse {
    all: Arc<UnreadResponses>,
    number: u64,
}

impl UnreadResponses {
    /// Counts one.
    pub fn begin(self: &Arc<Self>) -> UnreadResponse {
        let mut responses = self.responses();
        let number = responses.next;
        responses.next += 1;
        responses.touched.insert(number, Instant::now());
        drop(responses);
        UnreadResponse { all: self.clone(), number }
    }

    /// Whether the client has taken nothing of one of them for this long.
    pub fn is_stalled(&self, timeout: Duration) -> bool {
        self.responses().touched.values().any(|touched| touched.elapsed() >= timeout)
    }

    fn responses(&self) -> MutexGuard<'_, Numbered> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UnreadResponse {
    /// The client takes the next part.
    pub fn touch(&self) {
        self.all.responses().touched.insert(self.number, Instant::now());
    }
}

impl Drop for UnreadResponse {
    fn drop(&mut self) {
        self.all.responses().touched.remove(&self.number);
    }
}
