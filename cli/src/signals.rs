//! Shutdown of a process: on a signal, or when the process that started it ends.

use std::io::{ErrorKind, Read as _};

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
    let (sender, ended) = tokio::sync::oneshot::channel();
    // A thread of its own: a read of standard input cannot be cancelled, and the runtime waits for its own threads.
    std::thread::spawn(move || {
        let (mut input, mut buffer) = (std::io::stdin(), [0_u8; 64]);
        loop {
            match input.read(&mut buffer) {
                Ok(count) if count > 0 => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                _ => break,
            }
        }
        let _ = sender.send(());
    });
    let _ = ended.await;
}
