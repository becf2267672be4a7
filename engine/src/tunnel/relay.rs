//! Bytes both ways between MLX and the neighbour, until either closes; then the other is closed too, the neighbour's at
//! once and MLX's as [`super::alone`] says.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, split};
use tokio::net::TcpStream;

use super::alone::{Told, outlast};

/// Per direction. A step of a large model is tens of KiB, a prompt's chunk some MiB. The sizes of the
/// kernel's buffers are left to it: a size that is set ends its own tuning.
pub(super) const BUFFER: usize = 256 << 10;

/// Runs until the end, or until the group is lost; returns who or what ended it.
pub(super) async fn run<S>(mut local: TcpStream, remote: S, mut told: Told) -> String
where
    S: AsyncRead + AsyncWrite,
{
    let (from_local, to_local) = local.split();
    let (from_remote, mut to_remote) = split(remote);
    let (reason, lost) = tokio::select! {
        result = pump(from_local, &mut to_remote) => (ended("this process", result), false),
        result = pump(from_remote, to_local) => (ended("the other side", result), true),
        () = told.said() => ("the group is lost".to_owned(), true),
    };
    if lost {
        tokio::spawn(outlast(local, told));
    } else {
        // The neighbour hears it as an end in good order.
        let _ = to_remote.shutdown().await;
    }
    reason
}

fn ended(side: &str, result: io::Result<()>) -> String {
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
            return Ok(());
        }
        to.write_all(&buffer[..length]).await?;
        to.flush().await?;
    }
}
