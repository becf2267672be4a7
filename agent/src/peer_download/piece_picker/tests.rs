//! The piece picker step by step, and against simulated paths of given rates.

use super::*;
use crate::store::chunks::CHUNK_BYTES;

const A: PieceRequester<'_> = PieceRequester { connection: 0, peer: "a" };
const B: PieceRequester<'_> = PieceRequester { connection: 1, peer: "b" };

/// `count` chunks of two pieces, all available from these peers.
fn picker(count: usize, peers: &[&str]) -> PiecePicker {
    let mut board =
        PiecePicker::new(vec![2 * PIECE_BYTES; count], &vec![false; count], (0..count as u64).collect());
    // No endgame.
    board.endgame_chunks = 0;
    for peer in peers {
        board.mark_queried(peer, Instant::now());
        board.update_peer(peer, vec![true; count], vec![true; count]);
    }
    board
}

fn position(piece: Option<Piece>) -> Option<(usize, usize)> {
    piece.map(|piece| (piece.chunk, piece.index))
}

/// Delivers and writes a piece; returns the result if its chunk was complete.
fn deliver(
    board: &mut PiecePicker,
    piece: Piece,
    asker: PieceRequester<'_>,
    right: bool,
) -> Option<ChunkResult> {
    assert!(board.accept(piece, asker));
    board.mark_written(piece).then(|| board.chunk_checked(piece.chunk, right))
}

#[test]
fn started_chunk_completes_before_the_next_starts() {
    let mut board = picker(2, &["a", "b"]);
    let (first, second) = (board.next_piece(A).unwrap(), board.next_piece(B).unwrap());
    assert_eq!((position(Some(first)), position(Some(second))), (Some((0, 0)), Some((0, 1))));
    assert_eq!(deliver(&mut board, first, A, true), None);
    assert_eq!(position(board.next_piece(A)), Some((1, 0)));
    assert_eq!(deliver(&mut board, second, B, true), Some(ChunkResult::Valid));
    assert!(!board.is_whole());
}

#[test]
fn endgame_chunks_use_small_pieces() {
    let chunks = ENDGAME_CHUNKS + 1;
    let mut board = PiecePicker { endgame_chunks: ENDGAME_CHUNKS, ..picker(chunks, &["a"]) };
    let mut sizes = vec![BTreeMap::<u64, u64>::new(); chunks];
    while let Some(piece) = board.next_piece(A) {
        *sizes[piece.chunk].entry(piece.length).or_default() += 1;
        deliver(&mut board, piece, A, true);
    }
    assert!(board.is_whole());
    assert_eq!(sizes[0], [(PIECE_BYTES, 2)].into());
    assert!(
        sizes[1..]
            .iter()
            .all(|sizes| *sizes == [(ENDGAME_PIECE_BYTES, 2 * PIECE_BYTES / ENDGAME_PIECE_BYTES)].into()),
        "{sizes:?}"
    );
}

#[test]
fn rarest_chunk_comes_first() {
    let mut board = picker(3, &["a"]);
    board.mark_queried("b", Instant::now());
    board.update_peer("b", vec![true, true, false], vec![true, true, false]);
    assert_eq!(position(board.next_piece(A)), Some((2, 0)));
    assert_eq!(position(board.next_piece(B)), Some((0, 0)), "it does not have what was begun");
    board.remove_peer("a");
    assert_eq!(board.holders, [1, 1, 0]);
    assert_eq!(position(board.next_piece(A)), None, "it is gone");
}

#[test]
fn chunk_started_by_a_peer_comes_later() {
    let mut board = picker(2, &["a"]);
    board.mark_queried("b", Instant::now());
    board.update_peer("b", vec![], vec![true]);
    assert_eq!(position(board.next_piece(A)), Some((1, 0)));
    assert_eq!(position(board.next_piece(B)), None, "it does not have it yet");
}

#[test]
fn endgame_requests_a_piece_twice_and_accepts_it_once() {
    let mut board = picker(1, &["a", "b"]);
    let (first, second) = (board.next_piece(A).unwrap(), board.next_piece(A).unwrap());
    let again = board.next_piece(B).unwrap();
    assert_eq!(position(Some(again)), position(Some(first)), "what was asked for longest");
    assert_eq!(deliver(&mut board, again, B, true), None);
    assert!(!board.accept(first, A), "nothing is written over it");
    board.release(first, A.connection);
    assert_eq!(deliver(&mut board, second, A, true), Some(ChunkResult::Valid));
    assert!(board.is_whole() && board.next_piece(A).is_none() && !board.accept(second, A));
}

#[test]
fn lost_piece_is_requested_again() {
    let mut board = picker(1, &["a", "b"]);
    let piece = board.next_piece(A).unwrap();
    board.release(piece, A.connection);
    assert_eq!(position(board.next_piece(B)), Some((0, 0)));
    assert!(!board.accept(piece, A), "it was asked of another one since");
    assert!(board.accept(piece, B));
    board.write_failed(piece);
    assert_eq!(position(board.next_piece(A)), Some((0, 0)), "the disk did not take it");
}

#[test]
fn corrupt_chunk_is_retried_from_one_peer_to_find_the_liar() {
    let mut board = picker(1, &["a", "b"]);
    let (first, second) = (board.next_piece(A).unwrap(), board.next_piece(B).unwrap());
    deliver(&mut board, first, A, true);
    assert_eq!(deliver(&mut board, second, B, false), Some(ChunkResult::Retry), "either of them");
    let first = board.next_piece(A).unwrap();
    assert_eq!(board.next_piece(B), None, "only one is asked now");
    let second = board.next_piece(A).unwrap();
    deliver(&mut board, first, A, true);
    assert_eq!(deliver(&mut board, second, A, false), Some(ChunkResult::Corrupt("a".into())));
    // The sole peer leaves in the middle.
    let first = board.next_piece(B).unwrap();
    deliver(&mut board, first, B, true);
    board.remove_peer("b");
    assert_eq!(position(board.next_piece(A)), Some((0, 1)));
}

#[test]
fn incomplete_peer_is_queried_again() {
    let (start, mut board) = (Instant::now(), picker(2, &[]));
    assert!(board.should_query("a", start));
    board.mark_queried("a", start);
    assert!(
        !board.should_query("a", start + STALE_AFTER / 2) && board.should_query("a", start + STALE_AFTER)
    );
    board.update_peer("a", vec![true], vec![true]);
    assert_eq!(
        (position(board.next_piece(A)), board.should_query("a", start + STALE_AFTER)),
        (Some((0, 0)), true)
    );
    board.update_peer("a", vec![true; 9], vec![true; 9]);
    assert!(!board.should_query("a", start + 9 * STALE_AFTER), "it has all there is");
}

/// A path with this many bytes per second, first come, first served.
struct SimulatedPath {
    rate: f64,
    free: f64,
}

/// Seconds to download a model of `count` chunks over paths of these rates, three connections each.
fn simulate(rates: &[f64], count: usize) -> f64 {
    let peers: Vec<String> = (0..rates.len()).map(|line| format!("line {line}")).collect();
    let mut board =
        PiecePicker::new(vec![CHUNK_BYTES; count], &vec![false; count], (0..count as u64).collect());
    for peer in &peers {
        board.mark_queried(peer, Instant::now());
        board.update_peer(peer, vec![true; count], vec![true; count]);
    }
    let mut lines: Vec<SimulatedPath> = rates.iter().map(|&rate| SimulatedPath { rate, free: 0.0 }).collect();
    let mut coming: Vec<(f64, usize, Piece)> = Vec::new();
    let mut idle: Vec<usize> = (0..rates.len() * 3).collect();
    let mut now = 0.0;
    while !board.is_whole() {
        idle.retain(|&connection| {
            let asker = PieceRequester { connection, peer: &peers[connection / 3] };
            let Some(piece) = board.next_piece(asker) else { return true };
            let line = &mut lines[connection / 3];
            line.free = line.free.max(now) + piece.length as f64 / line.rate;
            coming.push((line.free, connection, piece));
            false
        });
        let first = coming.iter().enumerate().min_by(|a, b| a.1.0.total_cmp(&b.1.0)).unwrap().0;
        let (at, connection, piece) = coming.swap_remove(first);
        now = at;
        let asker = PieceRequester { connection, peer: &peers[connection / 3] };
        if board.accept(piece, asker) && board.mark_written(piece) {
            board.chunk_checked(piece.chunk, true);
        }
        idle.push(connection);
    }
    now
}

#[test]
fn unequal_paths_add_up_their_bandwidth() {
    for rates in [[100e6, 100e6, 100e6], [100e6, 50e6, 25e6], [1000e6, 1e6, 1e6]] {
        let count = 40;
        let ideal = (count as f64 * CHUNK_BYTES as f64) / rates.iter().sum::<f64>();
        let taken = simulate(&rates, count);
        let share = ideal / taken;
        assert!(share > 0.97, "{rates:?}: {share:.3} of the ideal");
    }
}
