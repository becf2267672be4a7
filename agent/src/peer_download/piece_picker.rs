//! Piece picker: which piece of which chunk each connection requests next. Pure: requester, peers' chunks and
//! time are arguments.
//!
//! Chunks are verified, pieces are requested. A connection requests the rarest piece, preferring chunks that
//! are already started. When no piece is left, it also requests those that another connection has been asked
//! for longest (endgame), so that the end is not as slow as the slowest path.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

/// Bytes of a piece. Small enough that the slowest of several paths does not delay a chunk, large enough that
/// the cost of a request does not matter.
pub(super) const PIECE_BYTES: u64 = 1 << 20;
/// Bytes of a piece of the last chunks, so that all paths finish at almost the same time: three connections
/// on a path of 400 Mbit/s take 60 ms for a normal piece, and four times as many requests cost a tenth of a
/// millisecond each.
const ENDGAME_PIECE_BYTES: u64 = 256 << 10;
/// Number of chunks that count as the last ones. With one alone, its pieces would be requested before the
/// large ones of the chunks before it have arrived.
const ENDGAME_CHUNKS: usize = 3;
/// Maximum age of the known chunks of a peer that does not have all of them.
const STALE_AFTER: Duration = Duration::from_millis(500);
/// Connections that may request the same piece.
const MAX_REQUESTS_PER_PIECE: usize = 2;

/// A piece of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// The chunk's number.
    pub chunk: usize,
    /// Index in the chunk.
    pub index: usize,
    /// Offset in the chunk.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

/// A connection that requests pieces, and the peer at its other end.
#[derive(Clone, Copy, Debug)]
pub(super) struct PieceRequester<'a> {
    pub connection: usize,
    pub peer: &'a str,
}

/// Result of a chunk's verification.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ChunkResult {
    /// The hash matches.
    Valid,
    /// The hash differs and several peers sent pieces: the chunk is requested again from one peer alone.
    Retry,
    /// The hash differs and one peer sent all of it.
    Corrupt(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum PieceState {
    Missing,
    /// Requested from these connections, first at this request count.
    Requested(Vec<usize>, u64),
    /// Being written to disk; further bytes for it are discarded.
    Writing,
    Written,
}

#[derive(Debug)]
enum ChunkState {
    Missing,
    Started(PartialChunk),
    Complete,
}

#[derive(Debug)]
struct PartialChunk {
    pieces: Vec<PieceState>,
    /// Bytes of a piece.
    piece_bytes: u64,
    senders: BTreeSet<String>,
    /// The only peer to request it from, after a failed verification.
    sole_peer: Option<String>,
}

#[derive(Debug)]
struct PeerChunks {
    complete: Vec<bool>,
    /// Chunks that the peer is receiving.
    started: Vec<bool>,
    last_queried: Instant,
}

/// All chunks of a model, and which peers have them.
#[derive(Debug)]
pub(super) struct PiecePicker {
    lengths: Vec<u64>,
    states: Vec<ChunkState>,
    /// Started chunks, oldest first.
    started: Vec<usize>,
    /// Tie-break among equally rare chunks. It differs on every machine, so that machines start with
    /// different chunks and can exchange them.
    order: Vec<u64>,
    /// Chunks that failed verification once.
    failed: BTreeSet<usize>,
    peers: BTreeMap<String, PeerChunks>,
    /// Number of peers that have each chunk or are receiving it.
    holders: Vec<u32>,
    request_count: u64,
    /// Missing chunks at which the endgame starts; most tests have so few that they would have no others.
    endgame_chunks: usize,
}

impl PiecePicker {
    /// A picker for chunks of these lengths, of which `whole` are complete, with the caller's tie-break
    /// order.
    pub fn new(lengths: Vec<u64>, whole: &[bool], order: Vec<u64>) -> Self {
        let states = whole
            .iter()
            .map(|whole| if *whole { ChunkState::Complete } else { ChunkState::Missing })
            .collect();
        let holders = vec![0; lengths.len()];
        Self {
            lengths,
            states,
            started: Vec::new(),
            order,
            failed: BTreeSet::new(),
            peers: BTreeMap::new(),
            holders,
            request_count: 0,
            endgame_chunks: ENDGAME_CHUNKS,
        }
    }

    /// Whether all chunks are complete.
    pub fn is_whole(&self) -> bool {
        self.states.iter().all(|state| matches!(state, ChunkState::Complete))
    }

    /// Peers that were queried for their chunks.
    pub fn peers(&self) -> impl Iterator<Item = &String> {
        self.peers.keys()
    }

    /// Whether to query a peer for its chunks.
    pub fn should_query(&self, peer: &str, now: Instant) -> bool {
        self.peers
            .get(peer)
            .is_none_or(|it| now >= it.last_queried + STALE_AFTER && !it.complete.iter().all(|has| *has))
    }

    /// Marks a peer as queried, so that other connections do not query it too.
    pub fn mark_queried(&mut self, peer: &str, now: Instant) {
        let none = || {
            let none = vec![false; self.lengths.len()];
            PeerChunks { complete: none.clone(), started: none, last_queried: now }
        };
        self.peers.entry(peer.to_owned()).or_insert_with(none).last_queried = now;
    }

    /// Records the chunks that a peer has and is receiving; lists that are too short are padded with "no".
    pub fn update_peer(&mut self, peer: &str, mut has: Vec<bool>, mut started: Vec<bool>) {
        has.resize(self.lengths.len(), false);
        started.resize(self.lengths.len(), false);
        let Some(known) = self.peers.get_mut(peer) else { return };
        for (number, (before, now)) in known.started.iter().zip(&started).enumerate() {
            self.holders[number] = self.holders[number] + u32::from(*now) - u32::from(*before);
        }
        (known.complete, known.started) = (has, started);
    }

    /// Removes a peer.
    pub fn remove_peer(&mut self, peer: &str) {
        self.update_peer(peer, Vec::new(), Vec::new());
        self.peers.remove(peer);
        // Other connections take over the pieces requested from it alone. Pieces being written stay until the
        // check.
        for state in &mut self.states {
            if let ChunkState::Started(started) = state
                && started.sole_peer.as_deref() == Some(peer)
            {
                started.sole_peer = None;
            }
        }
    }

    fn reset_chunk(&mut self, number: usize) {
        self.states[number] = ChunkState::Missing;
        self.started.retain(|started| *started != number);
    }

    /// The next piece to request; `None` where the peer has no missing one.
    pub fn next_piece(&mut self, asker: PieceRequester<'_>) -> Option<Piece> {
        let has = &self.peers.get(asker.peer)?.complete;
        let started = self.started.iter().copied().filter(|&number| has[number]);
        let missing = |number: usize| {
            let slots = self.requestable_pieces(number, asker.peer)?;
            Some((number, slots.iter().position(|slot| *slot == PieceState::Missing)?))
        };
        let rarity = |number: usize| self.holders[number];
        let rarest_started = started.clone().filter_map(missing).min_by_key(|(number, _)| rarity(*number));
        let numbers = (0..self.states.len()).filter(|&number| has[number]);
        let fresh = numbers.filter(|&number| matches!(self.states[number], ChunkState::Missing));
        let fresh =
            fresh.min_by_key(|&number| (rarity(number), self.order[number])).map(|number| (number, 0));
        // Pieces that more peers have can come from them.
        let found = match (rarest_started, fresh) {
            (Some(started), Some(fresh)) if rarity(fresh.0) < rarity(started.0) => Some(fresh),
            (started, fresh) => started.or(fresh),
        };
        let found = found.or_else(|| {
            let slots =
                started.filter_map(|number| Some((number, self.requestable_pieces(number, asker.peer)?)));
            let asked = slots.flat_map(|(number, slots)| {
                slots.iter().enumerate().filter_map(move |(index, slot)| match slot {
                    PieceState::Requested(who, since)
                        if who.len() < MAX_REQUESTS_PER_PIECE && !who.contains(&asker.connection) =>
                    {
                        Some((*since, number, index))
                    }
                    _ => None,
                })
            });
            asked.min().map(|(_, number, index)| (number, index))
        });
        let (number, index) = found?;
        self.start_chunk(number, asker.peer);
        self.request_count += 1;
        let asked = self.request_count;
        match self.piece_state(number, index)? {
            PieceState::Requested(who, _) => who.push(asker.connection),
            slot => *slot = PieceState::Requested(vec![asker.connection], asked),
        }
        let ChunkState::Started(PartialChunk { piece_bytes: piece, .. }) = self.states[number] else {
            return None;
        };
        let offset = index as u64 * piece;
        Some(Piece { chunk: number, index, offset, length: piece.min(self.lengths[number] - offset) })
    }

    /// The pieces of a started chunk, if this peer may be asked for them.
    fn requestable_pieces(&self, number: usize, peer: &str) -> Option<&[PieceState]> {
        match &self.states[number] {
            ChunkState::Started(started) if started.sole_peer.as_deref().is_none_or(|only| only == peer) => {
                Some(&started.pieces)
            }
            _ => None,
        }
    }

    fn start_chunk(&mut self, number: usize, peer: &str) {
        if matches!(self.states[number], ChunkState::Missing) {
            let missing = self.states.iter().filter(|state| matches!(state, ChunkState::Missing)).count();
            let piece = if missing > self.endgame_chunks { PIECE_BYTES } else { ENDGAME_PIECE_BYTES };
            let slots = vec![PieceState::Missing; self.lengths[number].div_ceil(piece) as usize];
            let only = self.failed.contains(&number).then(|| peer.to_owned());
            self.states[number] = ChunkState::Started(PartialChunk {
                pieces: slots,
                piece_bytes: piece,
                senders: BTreeSet::new(),
                sole_peer: only,
            });
            self.started.push(number);
        }
    }

    fn piece_state(&mut self, number: usize, index: usize) -> Option<&mut PieceState> {
        match &mut self.states[number] {
            ChunkState::Started(started) => started.pieces.get_mut(index),
            ChunkState::Missing | ChunkState::Complete => None,
        }
    }

    /// Whether received bytes are to be written. Bytes for a piece are accepted from one connection only.
    pub fn accept(&mut self, piece: Piece, asker: PieceRequester<'_>) -> bool {
        let Some(slot @ PieceState::Requested(..)) = self.piece_state(piece.chunk, piece.index) else {
            return false;
        };
        // After a restart of the chunk, this connection was not asked for the piece.
        if !matches!(slot, PieceState::Requested(who, _) if who.contains(&asker.connection)) {
            return false;
        }
        *slot = PieceState::Writing;
        if let ChunkState::Started(started) = &mut self.states[piece.chunk] {
            started.senders.insert(asker.peer.to_owned());
        }
        true
    }

    /// Marks a piece as written; returns whether its chunk is to be verified now.
    pub fn mark_written(&mut self, piece: Piece) -> bool {
        match self.piece_state(piece.chunk, piece.index) {
            Some(slot @ PieceState::Writing) => *slot = PieceState::Written,
            _ => return false,
        }
        match &self.states[piece.chunk] {
            ChunkState::Started(started) => started.pieces.iter().all(|slot| *slot == PieceState::Written),
            ChunkState::Missing | ChunkState::Complete => false,
        }
    }

    /// Releases a piece that does not come over a connection.
    pub fn release(&mut self, piece: Piece, connection: usize) {
        let Some(slot) = self.piece_state(piece.chunk, piece.index) else { return };
        if let PieceState::Requested(who, _) = slot {
            who.retain(|other| *other != connection);
            if who.is_empty() {
                *slot = PieceState::Missing;
            }
        }
    }

    /// Releases a piece that could not be written.
    pub fn write_failed(&mut self, piece: Piece) {
        if let Some(slot @ PieceState::Writing) = self.piece_state(piece.chunk, piece.index) {
            *slot = PieceState::Missing;
        }
    }

    /// Records the result of a chunk's verification.
    pub fn chunk_checked(&mut self, number: usize, right: bool) -> ChunkResult {
        let ChunkState::Started(started) = &self.states[number] else { return ChunkResult::Retry };
        let mut givers = started.senders.clone();
        self.reset_chunk(number);
        if right {
            self.states[number] = ChunkState::Complete;
            return ChunkResult::Valid;
        }
        self.failed.insert(number);
        match (givers.pop_first(), givers.is_empty()) {
            (Some(only), true) => ChunkResult::Corrupt(only),
            _ => ChunkResult::Retry,
        }
    }
}

#[cfg(test)]
mod tests;
