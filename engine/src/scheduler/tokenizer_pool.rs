//! Thread pool for tokenisation, separate from the serving threads. The threads start with the engine: under
//! memory pressure a new thread may fail to start, and a request waiting for it would hang.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};

use parking_lot::Mutex;

/// A long prompt occupies a thread for a while.
const TOKENIZER_THREADS: usize = 2;

type TokenizerTask = Box<dyn FnOnce() + Send>;

/// Job queue of the pool; the threads end with its last clone.
#[derive(Clone)]
pub(super) struct TokenizerPool(mpsc::Sender<TokenizerTask>);

impl TokenizerPool {
    /// Starts the threads.
    pub(super) fn start() -> io::Result<Self> {
        let (sender, inbox) = mpsc::channel::<TokenizerTask>();
        let inbox = Arc::new(Mutex::new(inbox));
        for _ in 0..TOKENIZER_THREADS {
            let inbox = inbox.clone();
            std::thread::Builder::new().name("tokens".into()).spawn(move || {
                // A thread holds the lock only while it waits for a job.
                while let Ok(work) = { inbox.lock().recv() } {
                    if catch_unwind(AssertUnwindSafe(work)).is_err() {
                        tracing::error!("a request could not be turned into tokens: a bug of this engine");
                    }
                }
            })?;
        }
        Ok(Self(sender))
    }

    /// Runs `work` on the next free thread.
    pub(super) fn spawn(&self, work: impl FnOnce() + Send + 'static) {
        // The threads live as long as this sender.
        let _ = self.0.send(Box::new(work));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokenizer_pool_survives_panicking_tasks() {
        let pool = TokenizerPool::start().unwrap();
        let (sender, done) = mpsc::channel();
        for number in 0..20 {
            let sender = sender.clone();
            pool.spawn(move || {
                assert!(number % 2 == 0, "every second one panics");
                sender.send(number).unwrap();
            });
        }
        drop((pool, sender));
        let mut all: Vec<i32> = done.iter().collect();
        all.sort_unstable();
        assert_eq!(all, (0..20).step_by(2).collect::<Vec<_>>());
    }
}
