//! Worker threads, each with a runtime of its own. A connection of a client stays on one, with the requests on it and the
//! connections to engines that they use, so that a request wakes no other thread: that was a fifth of what it cost. What blocks
//! runs elsewhere (`spawn_blocking`), or it would hold up all connections of its worker.

use std::cell::Cell;
use std::io;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// More serve no more: each serves more requests a second than engines answer, and has connections of its own to them.
const MAX_WORKERS: usize = 4;

thread_local! {
    static NUMBER: Cell<usize> = const { Cell::new(0) };
}

/// The number of the worker that runs this, from 1; 0 on all other threads.
pub(crate) fn current() -> usize {
    NUMBER.get()
}

/// The worker threads of a gateway, as many as cores. They end when this is dropped, with all that runs on them.
pub(crate) struct Workers {
    runtimes: Vec<Handle>,
    /// Connections so far.
    placed: AtomicUsize,
    ending: CancellationToken,
    /// Threads that run.
    threads: TaskTracker,
}

impl Workers {
    /// Starts them.
    ///
    /// # Errors
    ///
    /// Where the system gives no thread, or no file for what a runtime waits for.
    pub(crate) fn start() -> io::Result<Self> {
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        // Those that were started end where a later one fails.
        let mut started = Self {
            runtimes: Vec::new(),
            placed: AtomicUsize::new(0),
            ending: CancellationToken::new(),
            threads: TaskTracker::new(),
        };
        for number in 1..=cores.min(MAX_WORKERS) {
            let (ending, running) = (started.ending.clone(), started.threads.token());
            let (built, build) = mpsc::channel();
            thread::Builder::new().name(format!("gateway-{number}")).spawn(move || {
                NUMBER.set(number);
                // Built here: where no thread starts, nobody has to end it.
                match Builder::new_current_thread().enable_all().build() {
                    Ok(runtime) => {
                        let _ = built.send(Ok(runtime.handle().clone()));
                        runtime.block_on(ending.cancelled());
                        // What blocks may end when it likes.
                        runtime.shutdown_background();
                    }
                    Err(error) => drop(built.send(Err(error))),
                }
                drop(running);
            })?;
            started.runtimes.push(build.recv().map_err(io::Error::other)??);
        }
        Ok(started)
    }

    /// The worker of the next connection: one after the other, so that no client decides by its connections where those of
    /// others go.
    pub(crate) fn next(&self) -> &Handle {
        &self.runtimes[self.placed.fetch_add(1, Ordering::Relaxed) % self.runtimes.len()]
    }

    /// Ends them, and returns when all that ran on them is gone.
    pub(crate) async fn end(&self) {
        self.ending.cancel();
        self.threads.close();
        self.threads.wait().await;
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.ending.cancel();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn connections_are_spread_and_stay_on_their_worker() {
        assert_eq!(current(), 0);
        let workers = Workers::start().unwrap();
        let count = workers.runtimes.len();
        let mut numbers = Vec::new();
        for _ in 0..2 * count {
            let number = workers.next().spawn(async {
                let before = current();
                let nested = tokio::spawn(async { current() }).await.unwrap();
                tokio::task::yield_now().await;
                assert_eq!((before, before), (nested, current()));
                before
            });
            numbers.push(number.await.unwrap());
        }
        let twice: Vec<usize> = (1..=count).chain(1..=count).collect();
        assert_eq!(numbers, twice);
    }

    #[tokio::test]
    async fn all_ends_with_the_workers() {
        let workers = Workers::start().unwrap();
        let held = Arc::new(());
        let endless = workers.next().spawn({
            let held = held.clone();
            async move {
                std::future::pending::<()>().await;
                drop(held);
            }
        });
        workers.end().await;
        assert_eq!(Arc::strong_count(&held), 1, "it is gone when they have ended");
        assert!(endless.await.unwrap_err().is_cancelled());
        assert!(workers.next().spawn(async {}).await.unwrap_err().is_cancelled());
    }
}
