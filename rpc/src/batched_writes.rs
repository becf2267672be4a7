//! A connection of HTTP/2 that many tasks send on: what all tasks have that run now goes out in one write. Without this each
//! message is a record of TLS and a call of the system of its own, because the connection's task runs after each of them.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, BufWriter, ReadBuf};
use tonic::transport::server::Connected;

/// Larger than the largest frame of HTTP/2 with its head, so that neither is written alone.
const BUFFER_BYTES: usize = 32 << 10;

/// A stream whose first write after each flush waits until the tasks that could run have run.
#[derive(Debug)]
pub struct BatchedWrites<S> {
    stream: BufWriter<S>,
    /// Whether they have, since the last flush.
    has_waited: bool,
}

impl<S: AsyncWrite> BatchedWrites<S> {
    /// Batches what is written to `stream`.
    pub fn new(stream: S) -> Self {
        Self { stream: BufWriter::with_capacity(BUFFER_BYTES, stream), has_waited: false }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for BatchedWrites<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for BatchedWrites<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if !self.has_waited {
            self.has_waited = true;
            // A task that wakes itself goes to the end of the queue.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    /// Frames of up to a kilobyte are gathered by HTTP/2 itself then; it would write each alone else.
    fn is_write_vectored(&self) -> bool {
        false
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        self.has_waited = false;
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl<S: Connected + AsyncWrite> Connected for BatchedWrites<S> {
    type ConnectInfo = S::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.get_ref().connect_info()
    }
}
