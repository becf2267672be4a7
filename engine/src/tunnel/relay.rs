//! Relays bytes in both directions between MLX and the neighbour until either closes; then closes the other
//! one too, the neighbour's at once and MLX's as described in [`super::peer_stub`].

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, split};
use tokio::net::TcpStream;

use super::peer_stub::{StubSignal, run_stub};

/// Buffer size per direction. A step of a large model is tens of KiB, a prefill chunk some MiB. The kernel's
/// socket buffers keep their defaults: setting a size disables auto-tuning.
pub(super) const BUFFER_BYTES: usize = 256 << 10;

/// Runs until either side ends or the group is lost; returns which side ended it, or the error.
pub(super) async fn run<S>(mut local: TcpStream, remote: S, mut stub_signal: StubSignal) -> String
where
    S: AsyncRead + AsyncWrite,
{
    let (from_local, to_local) = local.split();
    let (from_remote, mut to_remote) = split(remote);
    // Both directions notice a lost neighbour: the one that reads from it and the one that writes to it.
    let (reason, lost) = tokio::select! {
        ended = pump(from_local, &mut to_remote) => match ended {
            RelayEnd::Source(result) => (end_reason("this process", result), false),
            RelayEnd::Sink(error) => (super::error_chain(error), true),
        },
        ended = pump(from_remote, to_local) => match ended {
            RelayEnd::Source(result) => (end_reason("the other side", result), true),
            RelayEnd::Sink(error) => (super::error_chain(error), false),
        },
        () = stub_signal.wait_active() => ("the group is lost".to_owned(), true),
    };
    if lost {
        tokio::spawn(run_stub(local, stub_signal));
    } else {
        // The neighbour sees an orderly end.
        let _ = to_remote.shutdown().await;
    }
    reason
}

/// Which side of a direction ended it.
enum RelayEnd {
    /// The reading side.
    Source(io::Result<()>),
    /// The writing side.
    Sink(io::Error),
}

fn end_reason(side: &str, result: io::Result<()>) -> String {
    match result {
        Ok(()) => format!("{side} closed it"),
        Err(error) => super::error_chain(error),
    }
}

/// One direction. Every chunk is flushed, because TLS may buffer part of its input.
async fn pump(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) -> RelayEnd {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let length = match from.read(&mut buffer).await {
            Ok(0) => return RelayEnd::Source(Ok(())),
            Ok(length) => length,
            Err(error) => return RelayEnd::Source(Err(error)),
        };
        let written = async {
            to.write_all(&buffer[..length]).await?;
            to.flush().await
        };
        if let Err(error) = written.await {
            return RelayEnd::Sink(error);
        }
    }
}
