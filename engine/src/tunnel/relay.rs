//! Bytes both ways between MLX and the neighbour, until either closes; then both are closed at once,
//! because MLX notices a lost peer by nothing else.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, split};
use tokio::net::TcpStream;

/// Per direction. A step of a large model is tens of KiB, a prompt's chunk some MiB. The sizes of the
/// kernel's buffers are left to it: a size that is set ends its own tuning.
pub(super) const BUFFER: usize = 256 << 10;

/// Runs until the end; returns who or what ended it.
pub(super) async fn run<S>(mut local: TcpStream, remote: S) -> String
where
    S: AsyncRead + AsyncWrite,
{
    let (from_local, to_local) = local.split();
    let (from_remote, to_remote) = split(remote);
    let (side, result) = tokio::select! {
        result = pump(from_local, to_remote) => ("this process", result),
        result = pump(from_remote, to_local) => ("the other side", result),
    };
    match result {
        Ok(()) => format!("{side} closed it"),
        Err(error) => super::words(error),
    }
}

/// One direction. Every piece is flushed: TLS may hold back a part of what it was given.
async fn pump(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let length = from.read(&mut buffer).await?;
        if length == 0 {
            return to.shutdown().await;
        }
        to.write_all(&buffer[..length]).await?;
        to.flush().await?;
    }
}
