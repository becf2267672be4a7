//! One connection of a peer download: requests, writes and verifies pieces, and reconnects after failures.

use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBuilder};
use bytes::Bytes;
use hyper::StatusCode;
use russet_rpc::tls::Connector;
use tokio::time::Instant;

use super::piece_picker::{ChunkResult, Piece, PieceRequester};
use super::{PeerPath, Transfer, lock};
use crate::peers::client::{DialError, PeerClient};
use crate::peers::models;
use crate::store::StoreError;

/// Initial backoff of a path, and the poll interval of a fallback while another path of its peer is in use.
const INITIAL_BACKOFF: Duration = Duration::from_millis(100);
/// Maximum backoff of a path.
const MAX_BACKOFF: Duration = Duration::from_secs(5);
/// Backoff of a path; it doubles.
const BACKOFF: ExponentialBuilder =
    ExponentialBuilder::new().with_min_delay(INITIAL_BACKOFF).with_max_delay(MAX_BACKOFF).without_max_times();
/// Poll interval while there is nothing to request and no notification.
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Downloads over one path until this is dropped.
pub(super) async fn run(number: usize, path: PeerPath, connector: Connector, transfer: Arc<Transfer>) {
    let mut delays = BACKOFF.build();
    loop {
        if path.fallback && transfer.has_active_connection(&path.peer) {
            tokio::time::sleep(INITIAL_BACKOFF).await;
            continue;
        }
        let mut gave = false;
        match PeerClient::connect(&connector, &path.peer, &path.egress, path.to).await {
            Ok(peer) => {
                let connection = PeerConnection {
                    number,
                    path: &path,
                    client: peer,
                    transfer: &transfer,
                    received_any: &mut gave,
                };
                match connection.run().await {
                    Ok(()) => continue,
                    Err(error) => transfer.record_failure(&path, &error),
                }
            }
            Err(error) => transfer.record_failure(&path, &error),
        }
        // A path that delivered bytes is retried at once.
        if gave {
            delays = BACKOFF.build();
        }
        tokio::time::sleep(delays.next().unwrap_or(MAX_BACKOFF)).await;
    }
}

struct PeerConnection<'t> {
    number: usize,
    path: &'t PeerPath,
    client: PeerClient,
    transfer: &'t Arc<Transfer>,
    /// Whether any bytes were received over it.
    received_any: &'t mut bool,
}

/// A requested piece; released if the connection ends before it arrives.
struct RequestedPiece<'t> {
    transfer: &'t Transfer,
    piece: Piece,
    connection: usize,
}

impl Drop for RequestedPiece<'_> {
    fn drop(&mut self) {
        self.transfer.picker().release(self.piece, self.connection);
        self.transfer.changed.notify_waiters();
    }
}

/// A piece being written. Dropped when it is on disk, or will never be.
struct WritingPiece {
    transfer: Arc<Transfer>,
    piece: Piece,
}

impl Drop for WritingPiece {
    fn drop(&mut self) {
        self.transfer.picker().write_failed(self.piece);
    }
}

/// Marks a non-fallback path as active while its connection works.
struct ActiveConnection<'t>(&'t Transfer, &'t str);

impl Drop for ActiveConnection<'_> {
    fn drop(&mut self) {
        if let Some(count) = lock(&self.0.active_connections).get_mut(self.1) {
            *count = count.saturating_sub(1);
        }
    }
}

impl Transfer {
    fn has_active_connection(&self, peer: &str) -> bool {
        lock(&self.active_connections).get(peer).is_some_and(|count| *count > 0)
    }

    fn mark_active<'t>(&'t self, peer: &'t str) -> ActiveConnection<'t> {
        *lock(&self.active_connections).entry(peer.to_owned()).or_default() += 1;
        ActiveConnection(self, peer)
    }
}

impl PeerConnection<'_> {
    /// Requests pieces until the connection fails, or until another path makes it unnecessary.
    async fn run(mut self) -> Result<(), DialError> {
        let (transfer, path) = (self.transfer, self.path);
        let _answering = (!path.fallback).then(|| transfer.mark_active(&path.peer));
        loop {
            if path.fallback && transfer.has_active_connection(&path.peer) {
                return Ok(());
            }
            if self.should_query() {
                self.query_chunks().await?;
            }
            let changed = transfer.changed.notified();
            let asker = PieceRequester { connection: self.number, peer: &path.peer };
            let next = transfer.picker().next_piece(asker);
            let Some(piece) = next else {
                tokio::time::timeout(IDLE_POLL_INTERVAL, changed).await.ok();
                continue;
            };
            let request = RequestedPiece { transfer, piece, connection: self.number };
            transfer.limiter.acquire(piece.length).await;
            let path = models::bytes_path(&transfer.id, piece.chunk, piece.offset, piece.length);
            let parts = match self.client.get(&path, piece.length as usize).await {
                // The peer had it a moment ago.
                Err(DialError::Status(StatusCode::NOT_FOUND)) => {
                    drop(request);
                    self.query_chunks().await?;
                    continue;
                }
                other => other?,
            };
            let length = parts.iter().map(Bytes::len).sum::<usize>() as u64;
            if length != piece.length {
                return Err(DialError::Truncated(piece.length - length));
            }
            let accepted = transfer.picker().accept(piece, asker);
            drop(request);
            *self.received_any = true;
            if accepted {
                lock(&transfer.errors).last_received = Instant::now();
                self.store_piece(piece, parts).await;
            }
        }
    }

    fn should_query(&self) -> bool {
        let (mut board, now) = (self.transfer.picker(), Instant::now());
        let stale = board.should_query(&self.path.peer, now);
        if stale {
            board.mark_queried(&self.path.peer, now);
        }
        stale
    }

    /// Queries the peer for its chunks.
    async fn query_chunks(&mut self) -> Result<(), DialError> {
        let bytes = self.transfer.incoming.local_chunks().chunks().len().div_ceil(8);
        let (has, started) = match self.client.get(&models::chunks_path(&self.transfer.id), 2 * bytes).await {
            Ok(bits) => {
                let bits = bits.concat();
                let (has, started) = bits.split_at(bytes.min(bits.len()));
                (models::unpack(has), models::unpack(started))
            }
            Err(DialError::Status(StatusCode::NOT_FOUND)) => (Vec::new(), Vec::new()),
            Err(error) => return Err(error),
        };
        self.transfer.picker().update_peer(&self.path.peer, has, started);
        // Its other connections wait for the result.
        self.transfer.changed.notify_waiters();
        Ok(())
    }

    /// Writes a piece and, after the last one of its chunk, verifies the chunk.
    async fn store_piece(&self, piece: Piece, parts: Vec<Bytes>) {
        let (transfer, peer) = (self.transfer.clone(), self.path.peer.clone());
        let stored = tokio::task::spawn_blocking(move || {
            if let Err(error) = transfer.write(piece, &parts, &peer) {
                transfer.fail(error);
            }
        });
        // A started write is completed, whether this future is polled or not.
        stored.await.ok();
    }
}

impl Transfer {
    /// Blocks.
    fn write(self: &Arc<Self>, piece: Piece, parts: &[Bytes], peer: &str) -> Result<(), StoreError> {
        let writing = WritingPiece { transfer: self.clone(), piece };
        self.incoming.write(piece.chunk, piece.offset, parts)?;
        let check = self.picker().mark_written(piece);
        drop(writing);
        self.progress.send_modify(|state| {
            state.done += piece.length;
            state.last_error = None;
            if !state.from.contains(peer) {
                state.from.insert(peer.to_owned());
            }
        });
        if check {
            let right = self.incoming.check_chunk(piece.chunk)?;
            let verdict = self.picker().chunk_checked(piece.chunk, right);
            if verdict != ChunkResult::Valid {
                let length = self.incoming.local_chunks().chunks()[piece.chunk].length;
                self.progress.send_modify(|state| state.done = state.done.saturating_sub(length));
            }
            if let ChunkResult::Corrupt(peer) = verdict {
                self.reject_peer(peer);
            }
            self.changed.notify_waiters();
        }
        Ok(())
    }
}
