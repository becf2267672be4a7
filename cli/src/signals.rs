//! Shutdown of a process: on a signal, or when the process that started it ends.

use tokio::io::AsyncReadExt as _;
use tokio::signal::unix::{SignalKind, signal};

/// Why the process stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopSignal {
    /// Ctrl-C: the processes started here stop as well.
    Interrupted,
    /// A supervisor stops or restarts only this process; engines that outlive it may continue.
    Terminated,
}

/// Resolves at Ctrl-C, at SIGTERM and, with `with_parent`, when standard input closes: a child whose
/// supervisor was killed must not keep running.
pub async fn stop_signal(with_parent: bool) -> StopSignal {
    let (Ok(mut interrupt), Ok(mut terminate)) =
        (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
    else {
        // Without handlers the defaults apply: both signals end the process at once.
        return std::future::pending().await;
    };
    tokio::select! {
        // If a supervisor interrupts its child and then closes the pipe, the interrupt counts.
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
