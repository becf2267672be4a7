//! When a process should end: a signal, or the end of the process that started it.

use tokio::io::AsyncReadExt as _;
use tokio::signal::unix::{SignalKind, signal};

/// Why the process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopSignal {
    /// A person pressed Ctrl-C: everything started here should end as well.
    Interrupted,
    /// A supervisor stops or restarts this process alone; what outlives it may go on.
    Terminated,
}

/// Resolves at Ctrl-C, at SIGTERM and, when `with_parent` is set, when standard input closes: a
/// child whose supervisor was killed must not live on unseen.
pub async fn stop_signal(with_parent: bool) -> StopSignal {
    let (Ok(mut interrupt), Ok(mut terminate)) =
        (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
    else {
        // Without handlers the defaults hold: both signals end the process at once.
        return std::future::pending().await;
    };
    tokio::select! {
        // A supervisor that interrupts its child and then closes the pipe means the interrupt.
        biased;
        _ = interrupt.recv() => StopSignal::Interrupted,
        _ = terminate.recv() => StopSignal::Terminated,
        () = parent_ended(), if with_parent => StopSignal::Terminated,
    }
}

async fn parent_ended() {
    let mut input = tokio::io::stdin();
    let mut buffer = [0_u8; 64];
    while matches!(input.read(&mut buffer).await, Ok(count) if count > 0) {}
}
