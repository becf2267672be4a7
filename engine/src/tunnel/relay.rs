//! Bytes both ways between MLX and the neighbour, until either closes; then the other is closed too, the neighbour's at
//! once and MLX's as [`super::alone`] says.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, split};
use tokio::net::TcpStream;

use super::peer_stub::{StubSignal, run_stub};

/// Per direction. A step of a large model is tens of KiB, a prompt's chunk some MiB. The sizes of the
/// kernel's buffers are left to it: a size that is set ends its own tuning.
pub(super) const BUFFER_BYTES: usize = 256 << 10;

/// Runs until the end, or until the group is lost; returns who or what ended it.
pub(super) async fn run<S>(mut local: TcpStream, remote: S, mut told: StubSignal) -> String
where
    S: AsyncRead + AsyncWrite,
{
    let (from_local, to_local) = local.split();
    let (from_remote, mut to_remote) = split(remote);
    // A neighbour that is gone is noticed by whoever is first: who reads from it, or who writes to it.
    let (reason, lost) = tokio::select! {
        ended = pump(from_local, &mut to_remote) => match ended {
            RelayEnd::Source(result) => (end_reason("this process", result), false),
            RelayEnd::Sink(error) => (super::error_chain(error), true),
        },
        ended = pump(from_remote, to_local) => match ended {
            RelayEnd::Source(result) => (end_reason("the other side", result), true),
            RelayEnd::Sink(error) => (super::error_chain(error), false),
        },
        () = told.wait_active() => ("the group is lost".to_owned(), true),
    };
    if lost {
        tokio::spawn(run_stub(local, told));
    } else {
        // The neighbour hears it as an end in good order.
        let _ = to_remote.shutdown().await;
    }
    reason
}

/// Which end of a direction ended it.
enum RelayEnd {
    /// Where the bytes come from.
    Source(io::Result<()>),
    /// Where they go.
    Sink(io::Error),
}

fn end_reason(side: &str, result: io::Result<()>) -> String {
    match result {
        Ok(()) => format!("{side} closed it"),
        Err(error) => super::error_chain(error),
    }
}

/// One direction. Every piece is flushed: TLS may hold back a part of what it was given.
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
