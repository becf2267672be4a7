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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::io::AsyncWriteExt as _;
    use tokio::sync::Mutex;

    use super::*;

    /// Remembers each write.
    #[derive(Default)]
    struct Writes(Vec<Vec<u8>>);

    impl AsyncWrite for Writes {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.0.push(bytes.to_vec());
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn what_tasks_that_can_run_send_is_one_write() {
        let (sender, mut messages) = tokio::sync::mpsc::unbounded_channel::<u8>();
        let stream = Arc::new(Mutex::new(BatchedWrites::new(Writes::default())));
        // As HTTP/2 does: it writes all that there is, then flushes.
        let connection = tokio::spawn({
            let stream = stream.clone();
            async move {
                while let Some(first) = messages.recv().await {
                    let mut stream = stream.lock().await;
                    let mut waiting = vec![first];
                    std::future::poll_fn(|cx| {
                        waiting.extend(std::iter::from_fn(|| messages.try_recv().ok()));
                        ready!(Pin::new(&mut *stream).poll_write(cx, &waiting)).map(|written| {
                            assert_eq!(written, waiting.len());
                        })?;
                        Pin::new(&mut *stream).poll_flush(cx)
                    })
                    .await
                    .unwrap();
                }
            }
        });
        for round in [[1, 2, 3], [4, 5, 6]] {
            let tasks = round.map(|message| {
                let sender = sender.clone();
                tokio::spawn(async move { sender.send(message).unwrap() })
            });
            for task in tasks {
                task.await.unwrap();
            }
            // The others have run.
            let sent = || {
                stream.try_lock().is_ok_and(|stream| stream.stream.get_ref().0.concat().contains(&round[2]))
            };
            while !sent() {
                tokio::task::yield_now().await;
            }
        }
        drop(sender);
        connection.await.unwrap();
        assert_eq!(stream.lock().await.stream.get_ref().0, [vec![1, 2, 3], vec![4, 5, 6]]);
    }

    #[tokio::test]
    async fn all_is_written_in_order_whatever_its_size() {
        let mut stream = BatchedWrites::new(Writes::default());
        let mut expected = Vec::new();
        for (number, size) in [9, 16_384, 1, 40_000, BUFFER_BYTES, 0, 7].into_iter().enumerate() {
            let bytes = vec![number as u8; size];
            stream.write_all(&bytes).await.unwrap();
            expected.extend(bytes);
            if number == 1 {
                stream.flush().await.unwrap();
                assert_eq!(stream.stream.get_ref().0.len(), 1, "a frame and its head");
            }
        }
        stream.shutdown().await.unwrap();
        assert_eq!(stream.stream.get_ref().0.concat(), expected);
    }
}
