//! One connection of a transfer: asks, writes, checks, and connects again where that fails.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::StatusCode;
use russet_rpc::tls::Connector;
use tokio::time::Instant;

use super::board::{Asker, Piece, Verdict};
use super::{Transfer, Way, locked};
use crate::peers::dial::{DialError, Peer};
use crate::peers::models;
use crate::store::StoreError;

/// First and longest pause after a way failed.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Between two looks whether there is something to ask for, where nothing tells.
const IDLE: Duration = Duration::from_millis(100);

/// Asks over one way until this is dropped.
pub(super) async fn keep(number: usize, way: Way, connector: Connector, transfer: Arc<Transfer>) {
    let mut pause = PAUSES.0;
    loop {
        if way.spare && transfer.is_answered(&way.peer) {
            tokio::time::sleep(PAUSES.0).await;
            continue;
        }
        let mut gave = false;
        match Peer::connect(&connector, &way.peer, &way.from, way.to).await {
            Ok(peer) => {
                let connection = Connection { number, way: &way, peer, transfer: &transfer, gave: &mut gave };
                match connection.work().await {
                    Ok(()) => continue,
                    Err(error) => transfer.failed(&way, &error),
                }
            }
            Err(error) => transfer.failed(&way, &error),
        }
        // A way that carries something is worth another try at once.
        if gave {
            pause = PAUSES.0;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSES.1);
    }
}

struct Connection<'t> {
    number: usize,
    way: &'t Way,
    peer: Peer,
    transfer: &'t Arc<Transfer>,
    /// Whether anything came over it.
    gave: &'t mut bool,
}

/// A piece that was asked for; given back where the connection ends before it is there.
struct Asked<'t> {
    transfer: &'t Transfer,
    piece: Piece,
    connection: usize,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.transfer.board().lost(self.piece, self.connection);
        self.transfer.changed.notify_waiters();
    }
}

/// A piece that is on its way to the disk. Dropped where it is there, or will never be.
struct Writing {
    transfer: Arc<Transfer>,
    piece: Piece,
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.transfer.board().unwritten(self.piece);
    }
}

/// That a way which is not spare answers, for as long as it does.
struct Answering<'t>(&'t Transfer, &'t str);

impl Drop for Answering<'_> {
    fn drop(&mut self) {
        if let Some(count) = locked(&self.0.answering).get_mut(self.1) {
            *count = count.saturating_sub(1);
        }
    }
}

impl Transfer {
    fn is_answered(&self, peer: &str) -> bool {
        locked(&self.answering).get(peer).is_some_and(|count| *count > 0)
    }

    fn answering<'t>(&'t self, peer: &'t str) -> Answering<'t> {
        *locked(&self.answering).entry(peer.to_owned()).or_default() += 1;
        Answering(self, peer)
    }
}

impl Connection<'_> {
    /// Asks until the connection fails, or until another way makes this one needless.
    async fn work(mut self) -> Result<(), DialError> {
        let (transfer, way) = (self.transfer, self.way);
        let _answering = (!way.spare).then(|| transfer.answering(&way.peer));
        loop {
            if way.spare && transfer.is_answered(&way.peer) {
                return Ok(());
            }
            if self.is_to_look() {
                self.look().await?;
            }
            let changed = transfer.changed.notified();
            let asker = Asker { connection: self.number, peer: &way.peer };
            let next = transfer.board().next(asker);
            let Some(piece) = next else {
                tokio::time::timeout(IDLE, changed).await.ok();
                continue;
            };
            let asked = Asked { transfer, piece, connection: self.number };
            transfer.pace.take(piece.length).await;
            let path = models::bytes(&transfer.id, piece.chunk, piece.offset, piece.length);
            let parts = match self.peer.get(&path, piece.length as usize).await {
                // It had it a moment ago.
                Err(DialError::Answered(StatusCode::NOT_FOUND)) => {
                    drop(asked);
                    self.look().await?;
                    continue;
                }
                other => other?,
            };
            let length = parts.iter().map(Bytes::len).sum::<usize>() as u64;
            if length != piece.length {
                return Err(DialError::Short(piece.length - length));
            }
            let wanted = transfer.board().came(piece, asker);
            drop(asked);
            *self.gave = true;
            if wanted {
                locked(&transfer.trouble).heard = Instant::now();
                self.keep(piece, parts).await;
            }
        }
    }

    fn is_to_look(&self) -> bool {
        let (mut board, now) = (self.transfer.board(), Instant::now());
        let stale = board.is_stale(&self.way.peer, now);
        if stale {
            board.asking(&self.way.peer, now);
        }
        stale
    }

    /// Asks the machine what it has.
    async fn look(&mut self) -> Result<(), DialError> {
        let bytes = self.transfer.receiving.held().chunks().len().div_ceil(8);
        let (has, begun) = match self.peer.get(&models::chunks(&self.transfer.id), 2 * bytes).await {
            Ok(bits) => {
                let bits = bits.concat();
                let (has, begun) = bits.split_at(bytes.min(bits.len()));
                (models::unpack(has), models::unpack(begun))
            }
            Err(DialError::Answered(StatusCode::NOT_FOUND)) => (Vec::new(), Vec::new()),
            Err(error) => return Err(error),
        };
        self.transfer.board().has(&self.way.peer, has, begun);
        // Its other connections wait for that.
        self.transfer.changed.notify_waiters();
        Ok(())
    }

    /// Writes a piece and, if it was the last one of its chunk, reads the chunk again.
    async fn keep(&self, piece: Piece, parts: Vec<Bytes>) {
        let (transfer, peer) = (self.transfer.clone(), self.way.peer.clone());
        let kept = tokio::task::spawn_blocking(move || {
            if let Err(error) = transfer.write(piece, &parts, &peer) {
                transfer.broken(error);
            }
        });
        // What was begun is ended, whether somebody waits for it or not.
        kept.await.ok();
    }
}

impl Transfer {
    /// Blocks.
    fn write(self: &Arc<Self>, piece: Piece, parts: &[Bytes], peer: &str) -> Result<(), StoreError> {
        let writing = Writing { transfer: self.clone(), piece };
        self.receiving.write(piece.chunk, piece.offset, parts)?;
        let check = self.board().written(piece);
        drop(writing);
        self.progress.send_modify(|state| {
            state.done += piece.length;
            state.trouble = None;
            if !state.from.contains(peer) {
                state.from.insert(peer.to_owned());
            }
        });
        if check {
            let right = self.receiving.check(piece.chunk)?;
            let verdict = self.board().checked(piece.chunk, right);
            if verdict != Verdict::Whole {
                let length = self.receiving.held().chunks()[piece.chunk].length;
                self.progress.send_modify(|state| state.done = state.done.saturating_sub(length));
            }
            if let Verdict::Lied(peer) = verdict {
                self.lied(peer);
            }
            self.changed.notify_waiters();
        }
        Ok(())
    }
}
