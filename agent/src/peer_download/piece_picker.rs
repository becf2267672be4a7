//! Which bytes are asked of whom next. Pure: who asks, who has what and what time it is are arguments.
//!
//! Chunks are the unit that is checked, pieces the unit that is asked for. A connection asks for what fewest have, of
//! that for a chunk that was begun, and where nothing is left for what another connection has been asked for longest,
//! so that the end is not as slow as the slowest way.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

/// Bytes of a piece. Small enough that the slowest way of several does not hold a chunk up, large enough that what
/// asking costs does not count.
pub(super) const PIECE_BYTES: u64 = 1 << 20;
/// Bytes of a piece of the last chunks, so that all ways are done at almost the same time: three connections of a way of
/// 400 Mbit/s take 60 ms for one of the others, and asking four times as often costs a tenth of a millisecond each time.
const ENDGAME_PIECE_BYTES: u64 = 256 << 10;
/// Chunks that are the last ones: of one alone the pieces would be asked for before the large ones of those before it
/// have come.
const ENDGAME_CHUNKS: usize = 3;
/// How old what is known of a machine may be that has not everything yet.
const STALE_AFTER: Duration = Duration::from_millis(500);
/// Connections that may be asked for one piece.
const MAX_REQUESTS_PER_PIECE: usize = 2;

/// A piece of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// The chunk's number.
    pub chunk: usize,
    /// Its place in the chunk.
    pub index: usize,
    /// Where it begins in the chunk.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// Who asks: a connection, and the machine at its other end.
#[derive(Clone, Copy, Debug)]
pub(super) struct PieceRequester<'a> {
    pub connection: usize,
    pub peer: &'a str,
}

/// What a chunk that came turned out to be.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ChunkResult {
    /// Right.
    Valid,
    /// Wrong, and nobody knows whose fault it is: it is asked for again, of one machine alone.
    Retry,
    /// Wrong, and all of it came from one machine.
    Corrupt(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum PieceState {
    Missing,
    /// Asked of these connections, at first at this count.
    Requested(Vec<usize>, u64),
    /// On its way to the disk; bytes that come for it now are of no use.
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
    /// Where it was wrong before: the only one who is asked.
    sole_peer: Option<String>,
}

#[derive(Debug)]
struct PeerChunks {
    complete: Vec<bool>,
    /// With what it has.
    started: Vec<bool>,
    last_queried: Instant,
}

/// All chunks of a model, and who has them.
#[derive(Debug)]
pub(super) struct PiecePicker {
    lengths: Vec<u64>,
    states: Vec<ChunkState>,
    /// Chunks that were begun, oldest first.
    started: Vec<usize>,
    /// Which of chunks that equally many have comes first; another order on every machine, so that they begin with
    /// different ones and have something to give each other.
    order: Vec<u64>,
    /// Chunks that were wrong once.
    failed: BTreeSet<usize>,
    peers: BTreeMap<String, PeerChunks>,
    /// Machines that have each chunk, or soon will.
    holders: Vec<u32>,
    request_count: u64,
    /// So many missing chunks are the last ones; most tests have so few that they would have no others.
    endgame_chunks: usize,
}

impl PiecePicker {
    /// Chunks of these lengths, some of which are `whole`, in an order of the caller's.
    pub fn new(lengths: Vec<u64>, whole: &[bool], order: Vec<u64>) -> Self {
        let states = whole.iter().map(|whole| if *whole { ChunkState::Complete } else { ChunkState::Missing }).collect();
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

    /// Whether every chunk is here.
    pub fn is_whole(&self) -> bool {
        self.states.iter().all(|state| matches!(state, ChunkState::Complete))
    }

    /// Machines that were asked what they have.
    pub fn peers(&self) -> impl Iterator<Item = &String> {
        self.peers.keys()
    }

    /// Whether a machine should be asked what it has.
    pub fn should_query(&self, peer: &str, now: Instant) -> bool {
        self.peers.get(peer).is_none_or(|it| now >= it.last_queried + STALE_AFTER && !it.complete.iter().all(|has| *has))
    }

    /// Notes that a machine is being asked what it has, so that others do not ask too.
    pub fn mark_queried(&mut self, peer: &str, now: Instant) {
        let none = || {
            let none = vec![false; self.lengths.len()];
            PeerChunks { complete: none.clone(), started: none, last_queried: now }
        };
        self.peers.entry(peer.to_owned()).or_insert_with(none).last_queried = now;
    }

    /// Takes what a machine says it has and has begun to receive; nothing where it says too little.
    pub fn update_peer(&mut self, peer: &str, mut has: Vec<bool>, mut begun: Vec<bool>) {
        has.resize(self.lengths.len(), false);
        begun.resize(self.lengths.len(), false);
        let Some(known) = self.peers.get_mut(peer) else { return };
        for (number, (before, now)) in known.started.iter().zip(&begun).enumerate() {
            self.holders[number] = self.holders[number] + u32::from(*now) - u32::from(*before);
        }
        (known.complete, known.started) = (has, begun);
    }

    /// Forgets a machine.
    pub fn remove_peer(&mut self, peer: &str) {
        self.update_peer(peer, Vec::new(), Vec::new());
        self.peers.remove(peer);
        // Others go on with what it alone was asked for. What of it is being written stays until it is checked.
        for state in &mut self.states {
            if let ChunkState::Started(begun) = state
                && begun.sole_peer.as_deref() == Some(peer)
            {
                begun.sole_peer = None;
            }
        }
    }

    fn reset_chunk(&mut self, number: usize) {
        self.states[number] = ChunkState::Missing;
        self.started.retain(|begun| *begun != number);
    }

    /// What to ask for next; nothing where the machine has nothing that is missing.
    pub fn next_piece(&mut self, asker: PieceRequester<'_>) -> Option<Piece> {
        let has = &self.peers.get(asker.peer)?.complete;
        let begun = self.started.iter().copied().filter(|&number| has[number]);
        let missing = |number: usize| {
            let slots = self.requestable_pieces(number, asker.peer)?;
            Some((number, slots.iter().position(|slot| *slot == PieceState::Missing)?))
        };
        let rarity = |number: usize| self.holders[number];
        let begun_first = begun.clone().filter_map(missing).min_by_key(|(number, _)| rarity(*number));
        let numbers = (0..self.states.len()).filter(|&number| has[number]);
        let fresh = numbers.filter(|&number| matches!(self.states[number], ChunkState::Missing));
        let fresh =
            fresh.min_by_key(|&number| (rarity(number), self.order[number])).map(|number| (number, 0));
        // What others have too, others can give.
        let found = match (begun_first, fresh) {
            (Some(begun), Some(fresh)) if rarity(fresh.0) < rarity(begun.0) => Some(fresh),
            (begun, fresh) => begun.or(fresh),
        };
        let found = found.or_else(|| {
            let slots = begun.filter_map(|number| Some((number, self.requestable_pieces(number, asker.peer)?)));
            let asked = slots.flat_map(|(number, slots)| {
                slots.iter().enumerate().filter_map(move |(index, slot)| match slot {
                    PieceState::Requested(who, since) if who.len() < MAX_REQUESTS_PER_PIECE && !who.contains(&asker.connection) => {
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
        let ChunkState::Started(PartialChunk { piece_bytes: piece, .. }) = self.states[number] else { return None };
        let offset = index as u64 * piece;
        Some(Piece { chunk: number, index, offset, length: piece.min(self.lengths[number] - offset) })
    }

    /// The pieces of a chunk that was begun, where this machine may be asked for them.
    fn requestable_pieces(&self, number: usize, peer: &str) -> Option<&[PieceState]> {
        match &self.states[number] {
            ChunkState::Started(begun) if begun.sole_peer.as_deref().is_none_or(|only| only == peer) => {
                Some(&begun.pieces)
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
            self.states[number] = ChunkState::Started(PartialChunk { pieces: slots, piece_bytes: piece, senders: BTreeSet::new(), sole_peer: only });
            self.started.push(number);
        }
    }

    fn piece_state(&mut self, number: usize, index: usize) -> Option<&mut PieceState> {
        match &mut self.states[number] {
            ChunkState::Started(begun) => begun.pieces.get_mut(index),
            ChunkState::Missing | ChunkState::Complete => None,
        }
    }

    /// Whether bytes that came are to be written: nobody else's for the same piece are then, nor were they.
    pub fn accept(&mut self, piece: Piece, asker: PieceRequester<'_>) -> bool {
        let Some(slot @ PieceState::Requested(..)) = self.piece_state(piece.chunk, piece.index) else { return false };
        // What was begun anew meanwhile was not asked of this one.
        if !matches!(slot, PieceState::Requested(who, _) if who.contains(&asker.connection)) {
            return false;
        }
        *slot = PieceState::Writing;
        if let ChunkState::Started(begun) = &mut self.states[piece.chunk] {
            begun.senders.insert(asker.peer.to_owned());
        }
        true
    }

    /// Notes that a piece was written; whether its chunk is to be checked now.
    pub fn mark_written(&mut self, piece: Piece) -> bool {
        match self.piece_state(piece.chunk, piece.index) {
            Some(slot @ PieceState::Writing) => *slot = PieceState::Written,
            _ => return false,
        }
        match &self.states[piece.chunk] {
            ChunkState::Started(begun) => begun.pieces.iter().all(|slot| *slot == PieceState::Written),
            ChunkState::Missing | ChunkState::Complete => false,
        }
    }

    /// Notes that a piece does not come from there.
    pub fn release(&mut self, piece: Piece, connection: usize) {
        let Some(slot) = self.piece_state(piece.chunk, piece.index) else { return };
        if let PieceState::Requested(who, _) = slot {
            who.retain(|other| *other != connection);
            if who.is_empty() {
                *slot = PieceState::Missing;
            }
        }
    }

    /// Notes that a piece could not be written.
    pub fn write_failed(&mut self, piece: Piece) {
        if let Some(slot @ PieceState::Writing) = self.piece_state(piece.chunk, piece.index) {
            *slot = PieceState::Missing;
        }
    }

    /// Takes what was found when a chunk was read again.
    pub fn chunk_checked(&mut self, number: usize, right: bool) -> ChunkResult {
        let ChunkState::Started(begun) = &self.states[number] else { return ChunkResult::Retry };
        let mut givers = begun.senders.clone();
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
