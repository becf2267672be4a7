//! Thread pool for tokenisation, separate from the serving threads. Long prompts have a thread of their own, so that
//! they hold up no short one. The threads start with the engine: under memory pressure a new thread may fail to
//! start, and a request waiting for it would hang.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};

use parking_lot::Mutex;

use super::byte_budget::{ByteBudget, ByteReservation};

/// Threads for short prompts. One of [`SHORT_BYTES`] takes some ten milliseconds.
const SHORT_THREADS: usize = 2;
/// One thread for long prompts: what is held while one of them is tokenised is held once.
const LONG_THREADS: usize = 1;
/// Bytes of the longest short prompt, some 16,000 tokens.
const SHORT_BYTES: usize = 64 << 10;
/// Bytes of all prompts that wait to be tokenised: two requests of the largest size, or some hundred of usual long
/// ones. They are no part of the memory that was granted to the engine.
const MAX_QUEUED_BYTES: usize = 64 << 20;

type TokenizerTask = Box<dyn FnOnce() + Send>;

/// Job queues of the pool; the threads end with its last clone.
#[derive(Clone)]
pub(crate) struct TokenizerPool {
    short: mpsc::Sender<TokenizerTask>,
    long: mpsc::Sender<TokenizerTask>,
    queued: ByteBudget,
}

impl TokenizerPool {
    /// Starts the threads.
    pub(crate) fn start() -> io::Result<Self> {
        Ok(Self {
            short: start_threads("tokens", SHORT_THREADS)?,
            long: start_threads("long-tokens", LONG_THREADS)?,
            queued: ByteBudget::new(MAX_QUEUED_BYTES),
        })
    }

    /// Reserves room for a prompt of these bytes; the error is what waits already.
    pub(crate) fn reserve(&self, bytes: usize) -> Result<ByteReservation, usize> {
        self.queued.reserve(bytes)
    }

    /// Runs `work` on the next free thread for prompts of this size, and then returns the room.
    pub(crate) fn spawn(&self, room: ByteReservation, work: impl FnOnce() + Send + 'static) {
        let queue = if room.bytes() <= SHORT_BYTES { &self.short } else { &self.long };
        // The threads live as long as these senders.
        let _ = queue.send(Box::new(move || {
            let _room = room;
            work();
        }));
    }
}

fn start_threads(name: &str, threads: usize) -> io::Result<mpsc::Sender<TokenizerTask>> {
    let (sender, inbox) = mpsc::channel::<TokenizerTask>();
    let inbox = Arc::new(Mutex::new(inbox));
    for _ in 0..threads {
        let inbox = inbox.clone();
        std::thread::Builder::new().name(name.into()).spawn(move || {
            // A thread holds the lock only while it waits for a job.
            while let Ok(work) = { inbox.lock().recv() } {
                if catch_unwind(AssertUnwindSafe(work)).is_err() {
                    tracing::error!("a request could not be turned into tokens: a bug of this engine");
                }
            }
        })?;
    }
    Ok(sender)
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
            pool.spawn(pool.reserve(1).ok().unwrap(), move || {
                assert!(number % 2 == 0, "every second one panics");
                sender.send(number).unwrap();
            });
        }
        let queued = pool.queued.clone();
        drop((pool, sender));
        let mut all: Vec<i32> = done.iter().collect();
        all.sort_unstable();
        assert_eq!(all, (0..20).step_by(2).collect::<Vec<_>>());
        assert!(queued.used() <= 2, "the last two may still be returned");
    }

    #[test]
    fn long_prompts_hold_up_no_short_one() {
        let pool = TokenizerPool::start().unwrap();
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        // More long ones than there are threads in all, none of which ends.
        for _ in 0..SHORT_THREADS + LONG_THREADS + 1 {
            let held = held.clone();
            pool.spawn(pool.reserve(SHORT_BYTES + 1).ok().unwrap(), move || {
                let _ = held.lock().recv();
            });
        }
        let (sender, done) = mpsc::channel();
        pool.spawn(pool.reserve(SHORT_BYTES).ok().unwrap(), move || sender.send(7).unwrap());
        assert_eq!(done.recv_timeout(std::time::Duration::from_secs(60)), Ok(7));
        drop(release);
    }

    #[test]
    fn prompts_that_wait_are_bounded_in_bytes() {
        let pool = TokenizerPool::start().unwrap();
        let half = pool.reserve(MAX_QUEUED_BYTES / 2).ok().unwrap();
        let rest = pool.reserve(MAX_QUEUED_BYTES / 2).ok().unwrap();
        assert_eq!(pool.reserve(1).err(), Some(MAX_QUEUED_BYTES));
        drop(half);
        assert!(pool.reserve(usize::MAX).is_err());
        assert!(pool.reserve(MAX_QUEUED_BYTES / 2).is_ok());
        drop(rest);
    }
}
