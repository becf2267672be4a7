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
pub(super) const PIECE: u64 = 1 << 20;
/// Bytes of a piece of the last chunks, so that all ways are done at almost the same time: three connections of a way of
/// 400 Mbit/s take 60 ms for one of the others, and asking four times as often costs a tenth of a millisecond each time.
const LAST_PIECE: u64 = 256 << 10;
/// Chunks that are the last ones: of one alone the pieces would be asked for before the large ones of those before it
/// have come.
const ENDING: usize = 3;
/// How old what is known of a machine may be that has not everything yet.
const STALE: Duration = Duration::from_millis(500);
/// Connections that may be asked for one piece.
const ASKED: usize = 2;

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
pub(super) struct Asker<'a> {
    pub connection: usize,
    pub peer: &'a str,
}

/// What a chunk that came turned out to be.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Right.
    Whole,
    /// Wrong, and nobody knows whose fault it is: it is asked for again, of one machine alone.
    Again,
    /// Wrong, and all of it came from one machine.
    Lied(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Slot {
    Missing,
    /// Asked of these connections, at first at this count.
    Asked(Vec<usize>, u64),
    /// On its way to the disk; bytes that come for it now are of no use.
    Writing,
    Here,
}

#[derive(Debug)]
enum State {
    Missing,
    Begun(Begun),
    Whole,
}

#[derive(Debug)]
struct Begun {
    slots: Vec<Slot>,
    /// Bytes of a piece.
    piece: u64,
    givers: BTreeSet<String>,
    /// Where it was wrong before: the only one who is asked.
    only: Option<String>,
}

#[derive(Debug)]
struct Peer {
    has: Vec<bool>,
    /// With what it has.
    begun: Vec<bool>,
    asked: Instant,
}

/// All chunks of a model, and who has them.
#[derive(Debug)]
pub(super) struct Board {
    lengths: Vec<u64>,
    states: Vec<State>,
    /// Chunks that were begun, oldest first.
    begun: Vec<usize>,
    /// Which of chunks that equally many have comes first; another order on every machine, so that they begin with
    /// different ones and have something to give each other.
    order: Vec<u64>,
    /// Chunks that were wrong once.
    wrong: BTreeSet<usize>,
    peers: BTreeMap<String, Peer>,
    /// Machines that have each chunk, or soon will.
    holders: Vec<u32>,
    asked: u64,
    /// So many missing chunks are the last ones; most tests have so few that they would have no others.
    ending: usize,
}

impl Board {
    /// Chunks of these lengths, some of which are `whole`, in an order of the caller's.
    pub fn new(lengths: Vec<u64>, whole: &[bool], order: Vec<u64>) -> Self {
        let states = whole.iter().map(|whole| if *whole { State::Whole } else { State::Missing }).collect();
        let holders = vec![0; lengths.len()];
        Self {
            lengths,
            states,
            begun: Vec::new(),
            order,
            wrong: BTreeSet::new(),
            peers: BTreeMap::new(),
            holders,
            asked: 0,
            ending: ENDING,
        }
    }

    /// Whether every chunk is here.
    pub fn is_whole(&self) -> bool {
        self.states.iter().all(|state| matches!(state, State::Whole))
    }

    /// Machines that were asked what they have.
    pub fn peers(&self) -> impl Iterator<Item = &String> {
        self.peers.keys()
    }

    /// Whether a machine should be asked what it has.
    pub fn is_stale(&self, peer: &str, now: Instant) -> bool {
        self.peers.get(peer).is_none_or(|it| now >= it.asked + STALE && !it.has.iter().all(|has| *has))
    }

    /// Notes that a machine is being asked what it has, so that others do not ask too.
    pub fn asking(&mut self, peer: &str, now: Instant) {
        let none = || {
            let none = vec![false; self.lengths.len()];
            Peer { has: none.clone(), begun: none, asked: now }
        };
        self.peers.entry(peer.to_owned()).or_insert_with(none).asked = now;
    }

    /// Takes what a machine says it has and has begun to receive; nothing where it says too little.
    pub fn has(&mut self, peer: &str, mut has: Vec<bool>, mut begun: Vec<bool>) {
        has.resize(self.lengths.len(), false);
        begun.resize(self.lengths.len(), false);
        let Some(known) = self.peers.get_mut(peer) else { return };
        for (number, (before, now)) in known.begun.iter().zip(&begun).enumerate() {
            self.holders[number] = self.holders[number] + u32::from(*now) - u32::from(*before);
        }
        (known.has, known.begun) = (has, begun);
    }

    /// Forgets a machine.
    pub fn gone(&mut self, peer: &str) {
        self.has(peer, Vec::new(), Vec::new());
        self.peers.remove(peer);
        // Others go on with what it alone was asked for. What of it is being written stays until it is checked.
        for state in &mut self.states {
            if let State::Begun(begun) = state
                && begun.only.as_deref() == Some(peer)
            {
                begun.only = None;
            }
        }
    }

    fn reset(&mut self, number: usize) {
        self.states[number] = State::Missing;
        self.begun.retain(|begun| *begun != number);
    }

    /// What to ask for next; nothing where the machine has nothing that is missing.
    pub fn next(&mut self, asker: Asker<'_>) -> Option<Piece> {
        let has = &self.peers.get(asker.peer)?.has;
        let begun = self.begun.iter().copied().filter(|&number| has[number]);
        let missing = |number: usize| {
            let slots = self.open_to(number, asker.peer)?;
            Some((number, slots.iter().position(|slot| *slot == Slot::Missing)?))
        };
        let rarity = |number: usize| self.holders[number];
        let begun_first = begun.clone().filter_map(missing).min_by_key(|(number, _)| rarity(*number));
        let numbers = (0..self.states.len()).filter(|&number| has[number]);
        let fresh = numbers.filter(|&number| matches!(self.states[number], State::Missing));
        let fresh =
            fresh.min_by_key(|&number| (rarity(number), self.order[number])).map(|number| (number, 0));
        // What others have too, others can give.
        let found = match (begun_first, fresh) {
            (Some(begun), Some(fresh)) if rarity(fresh.0) < rarity(begun.0) => Some(fresh),
            (begun, fresh) => begun.or(fresh),
        };
        let found = found.or_else(|| {
            let slots = begun.filter_map(|number| Some((number, self.open_to(number, asker.peer)?)));
            let asked = slots.flat_map(|(number, slots)| {
                slots.iter().enumerate().filter_map(move |(index, slot)| match slot {
                    Slot::Asked(who, since) if who.len() < ASKED && !who.contains(&asker.connection) => {
                        Some((*since, number, index))
                    }
                    _ => None,
                })
            });
            asked.min().map(|(_, number, index)| (number, index))
        });
        let (number, index) = found?;
        self.begin(number, asker.peer);
        self.asked += 1;
        let asked = self.asked;
        match self.slot(number, index)? {
            Slot::Asked(who, _) => who.push(asker.connection),
            slot => *slot = Slot::Asked(vec![asker.connection], asked),
        }
        let State::Begun(Begun { piece, .. }) = self.states[number] else { return None };
        let offset = index as u64 * piece;
        Some(Piece { chunk: number, index, offset, length: piece.min(self.lengths[number] - offset) })
    }

    /// The pieces of a chunk that was begun, where this machine may be asked for them.
    fn open_to(&self, number: usize, peer: &str) -> Option<&[Slot]> {
        match &self.states[number] {
            State::Begun(begun) if begun.only.as_deref().is_none_or(|only| only == peer) => {
                Some(&begun.slots)
            }
            _ => None,
        }
    }

    fn begin(&mut self, number: usize, peer: &str) {
        if matches!(self.states[number], State::Missing) {
            let missing = self.states.iter().filter(|state| matches!(state, State::Missing)).count();
            let piece = if missing > self.ending { PIECE } else { LAST_PIECE };
            let slots = vec![Slot::Missing; self.lengths[number].div_ceil(piece) as usize];
            let only = self.wrong.contains(&number).then(|| peer.to_owned());
            self.states[number] = State::Begun(Begun { slots, piece, givers: BTreeSet::new(), only });
            self.begun.push(number);
        }
    }

    fn slot(&mut self, number: usize, index: usize) -> Option<&mut Slot> {
        match &mut self.states[number] {
            State::Begun(begun) => begun.slots.get_mut(index),
            State::Missing | State::Whole => None,
        }
    }

    /// Whether bytes that came are to be written: nobody else's for the same piece are then, nor were they.
    pub fn came(&mut self, piece: Piece, asker: Asker<'_>) -> bool {
        let Some(slot @ Slot::Asked(..)) = self.slot(piece.chunk, piece.index) else { return false };
        // What was begun anew meanwhile was not asked of this one.
        if !matches!(slot, Slot::Asked(who, _) if who.contains(&asker.connection)) {
            return false;
        }
        *slot = Slot::Writing;
        if let State::Begun(begun) = &mut self.states[piece.chunk] {
            begun.givers.insert(asker.peer.to_owned());
        }
        true
    }

    /// Notes that a piece was written; whether its chunk is to be checked now.
    pub fn written(&mut self, piece: Piece) -> bool {
        match self.slot(piece.chunk, piece.index) {
            Some(slot @ Slot::Writing) => *slot = Slot::Here,
            _ => return false,
        }
        match &self.states[piece.chunk] {
            State::Begun(begun) => begun.slots.iter().all(|slot| *slot == Slot::Here),
            State::Missing | State::Whole => false,
        }
    }

    /// Notes that a piece does not come from there.
    pub fn lost(&mut self, piece: Piece, connection: usize) {
        let Some(slot) = self.slot(piece.chunk, piece.index) else { return };
        if let Slot::Asked(who, _) = slot {
            who.retain(|other| *other != connection);
            if who.is_empty() {
                *slot = Slot::Missing;
            }
        }
    }

    /// Notes that a piece could not be written.
    pub fn unwritten(&mut self, piece: Piece) {
        if let Some(slot @ Slot::Writing) = self.slot(piece.chunk, piece.index) {
            *slot = Slot::Missing;
        }
    }

    /// Takes what was found when a chunk was read again.
    pub fn checked(&mut self, number: usize, right: bool) -> Verdict {
        let State::Begun(begun) = &self.states[number] else { return Verdict::Again };
        let mut givers = begun.givers.clone();
        self.reset(number);
        if right {
            self.states[number] = State::Whole;
            return Verdict::Whole;
        }
        self.wrong.insert(number);
        match (givers.pop_first(), givers.is_empty()) {
            (Some(only), true) => Verdict::Lied(only),
            _ => Verdict::Again,
        }
    }
}

#[cfg(test)]
mod tests;
