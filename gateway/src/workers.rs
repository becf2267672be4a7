//! Worker threads, each with a runtime of its own. A connection of a client stays on one, with the requests on it and the
//! connections to engines that they use: to serve a request wakes no other thread, which would cost as much as the request.

use std::cell::Cell;
use std::io;
use std::num::NonZero;
use std::sync::Arc;
use std::thread;

use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;

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
    workers: Vec<Worker>,
    ended: CancellationToken,
}

struct Worker {
    runtime: Handle,
    /// Held by each of its connections.
    connection: Arc<()>,
}

/// A connection's place on a worker.
pub(crate) struct Placement {
    /// What the worker runs tasks on.
    pub(crate) runtime: Handle,
    _connection: Arc<()>,
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
        let mut started = Self { workers: Vec::new(), ended: CancellationToken::new() };
        for number in 1..=cores.min(MAX_WORKERS) {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            let worker = Worker { runtime: runtime.handle().clone(), connection: Arc::default() };
            let ended = started.ended.clone();
            thread::Builder::new().name(format!("gateway-{number}")).spawn(move || {
                NUMBER.set(number);
                runtime.block_on(ended.cancelled());
                // What blocks may end when it likes.
                runtime.shutdown_background();
            })?;
            started.workers.push(worker);
        }
        Ok(started)
    }

    /// A place on the worker with the fewest connections.
    pub(crate) fn place(&self) -> Placement {
        let connections = |number: &usize| Arc::strong_count(&self.workers[*number].connection);
        // There is a core at least.
        let worker = &self.workers[(0..self.workers.len()).min_by_key(connections).unwrap_or(0)];
        Placement { runtime: worker.runtime.clone(), _connection: worker.connection.clone() }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.ended.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn connections_are_spread_and_stay_on_their_worker() {
        assert_eq!(current(), 0);
        let workers = Workers::start().unwrap();
        let count = workers.workers.len();
        let mut placements: Vec<Placement> = (0..2 * count).map(|_| workers.place()).collect();
        let mut numbers = Vec::new();
        for placement in &placements {
            let number = placement.runtime.spawn(async {
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

        // Who loses a connection gets the next one.
        placements.truncate(2 * count - 1);
        let next = workers.place();
        assert_eq!(next.runtime.spawn(async { current() }).await.unwrap(), count);

        // All ends with them.
        let (_held, waits) = tokio::sync::oneshot::channel::<()>();
        let endless = next.runtime.spawn(waits);
        drop(workers);
        assert!(endless.await.unwrap_err().is_cancelled());
    }
}
