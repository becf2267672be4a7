//! The board by hand, and against lines that carry so much.

use super::*;
use crate::store::chunks::CHUNK;

const A: Asker<'_> = Asker { connection: 0, peer: "a" };
const B: Asker<'_> = Asker { connection: 1, peer: "b" };

/// `count` chunks of two pieces, all of which these machines have.
fn board(count: usize, peers: &[&str]) -> Board {
    let mut board = Board::new(vec![2 * PIECE; count], &vec![false; count], (0..count as u64).collect());
    // None of them is the last one.
    board.ending = 0;
    for peer in peers {
        board.asking(peer, Instant::now());
        board.has(peer, vec![true; count], vec![true; count]);
    }
    board
}

fn place(piece: Option<Piece>) -> Option<(usize, usize)> {
    piece.map(|piece| (piece.chunk, piece.index))
}

/// A piece comes and is written; the verdict where its chunk was complete.
fn bring(board: &mut Board, piece: Piece, asker: Asker<'_>, right: bool) -> Option<Verdict> {
    assert!(board.came(piece, asker));
    board.written(piece).then(|| board.checked(piece.chunk, right))
}

#[test]
fn a_chunk_that_was_begun_is_ended_before_another_one_begins() {
    let mut board = board(2, &["a", "b"]);
    let (first, second) = (board.next(A).unwrap(), board.next(B).unwrap());
    assert_eq!((place(Some(first)), place(Some(second))), (Some((0, 0)), Some((0, 1))));
    assert_eq!(bring(&mut board, first, A, true), None);
    assert_eq!(place(board.next(A)), Some((1, 0)));
    assert_eq!(bring(&mut board, second, B, true), Some(Verdict::Whole));
    assert!(!board.is_whole());
}

#[test]
fn the_last_chunks_come_in_small_pieces() {
    let chunks = ENDING + 1;
    let mut board = Board { ending: ENDING, ..board(chunks, &["a"]) };
    let mut sizes = vec![BTreeMap::<u64, u64>::new(); chunks];
    while let Some(piece) = board.next(A) {
        *sizes[piece.chunk].entry(piece.length).or_default() += 1;
        bring(&mut board, piece, A, true);
    }
    assert!(board.is_whole());
    assert_eq!(sizes[0], [(PIECE, 2)].into());
    assert!(
        sizes[1..].iter().all(|sizes| *sizes == [(LAST_PIECE, 2 * PIECE / LAST_PIECE)].into()),
        "{sizes:?}"
    );
}

#[test]
fn what_fewest_have_comes_first() {
    let mut board = board(3, &["a"]);
    board.asking("b", Instant::now());
    board.has("b", vec![true, true, false], vec![true, true, false]);
    assert_eq!(place(board.next(A)), Some((2, 0)));
    assert_eq!(place(board.next(B)), Some((0, 0)), "it does not have what was begun");
    board.gone("a");
    assert_eq!(board.holders, [1, 1, 0]);
    assert_eq!(place(board.next(A)), None, "it is gone");
}

#[test]
fn what_another_one_has_begun_comes_later() {
    let mut board = board(2, &["a"]);
    board.asking("b", Instant::now());
    board.has("b", vec![], vec![true]);
    assert_eq!(place(board.next(A)), Some((1, 0)));
    assert_eq!(place(board.next(B)), None, "it does not have it yet");
}

#[test]
fn at_the_end_a_piece_is_asked_for_twice_and_taken_once() {
    let mut board = board(1, &["a", "b"]);
    let (first, second) = (board.next(A).unwrap(), board.next(A).unwrap());
    let again = board.next(B).unwrap();
    assert_eq!(place(Some(again)), place(Some(first)), "what was asked for longest");
    assert_eq!(bring(&mut board, again, B, true), None);
    assert!(!board.came(first, A), "nothing is written over it");
    board.lost(first, A.connection);
    assert_eq!(bring(&mut board, second, A, true), Some(Verdict::Whole));
    assert!(board.is_whole() && board.next(A).is_none() && !board.came(second, A));
}

#[test]
fn what_does_not_come_is_asked_for_again() {
    let mut board = board(1, &["a", "b"]);
    let piece = board.next(A).unwrap();
    board.lost(piece, A.connection);
    assert_eq!(place(board.next(B)), Some((0, 0)));
    assert!(!board.came(piece, A), "it was asked of another one since");
    assert!(board.came(piece, B));
    board.unwritten(piece);
    assert_eq!(place(board.next(A)), Some((0, 0)), "the disk did not take it");
}

#[test]
fn a_wrong_chunk_is_asked_of_one_machine_until_it_is_known_who_lies() {
    let mut board = board(1, &["a", "b"]);
    let (first, second) = (board.next(A).unwrap(), board.next(B).unwrap());
    bring(&mut board, first, A, true);
    assert_eq!(bring(&mut board, second, B, false), Some(Verdict::Again), "either of them");
    let first = board.next(A).unwrap();
    assert_eq!(board.next(B), None, "only one is asked now");
    let second = board.next(A).unwrap();
    bring(&mut board, first, A, true);
    assert_eq!(bring(&mut board, second, A, false), Some(Verdict::Lied("a".into())));
    // The one who is asked alone goes away in the middle.
    let first = board.next(B).unwrap();
    bring(&mut board, first, B, true);
    board.gone("b");
    assert_eq!(place(board.next(A)), Some((0, 1)));
}

#[test]
fn a_machine_is_asked_again_until_it_has_everything() {
    let (start, mut board) = (Instant::now(), board(2, &[]));
    assert!(board.is_stale("a", start));
    board.asking("a", start);
    assert!(!board.is_stale("a", start + STALE / 2) && board.is_stale("a", start + STALE));
    board.has("a", vec![true], vec![true]);
    assert_eq!((place(board.next(A)), board.is_stale("a", start + STALE)), (Some((0, 0)), true));
    board.has("a", vec![true; 9], vec![true; 9]);
    assert!(!board.is_stale("a", start + 9 * STALE), "it has all there is");
}

/// A way that carries so many bytes a second, first come, first served.
struct Line {
    rate: f64,
    free: f64,
}

/// Seconds that a model of `count` chunks takes over lines of these rates, three connections each.
fn simulated(rates: &[f64], count: usize) -> f64 {
    let peers: Vec<String> = (0..rates.len()).map(|line| format!("line {line}")).collect();
    let mut board = Board::new(vec![CHUNK; count], &vec![false; count], (0..count as u64).collect());
    for peer in &peers {
        board.asking(peer, Instant::now());
        board.has(peer, vec![true; count], vec![true; count]);
    }
    let mut lines: Vec<Line> = rates.iter().map(|&rate| Line { rate, free: 0.0 }).collect();
    let mut coming: Vec<(f64, usize, Piece)> = Vec::new();
    let mut idle: Vec<usize> = (0..rates.len() * 3).collect();
    let mut now = 0.0;
    while !board.is_whole() {
        idle.retain(|&connection| {
            let asker = Asker { connection, peer: &peers[connection / 3] };
            let Some(piece) = board.next(asker) else { return true };
            let line = &mut lines[connection / 3];
            line.free = line.free.max(now) + piece.length as f64 / line.rate;
            coming.push((line.free, connection, piece));
            false
        });
        let first = coming.iter().enumerate().min_by(|a, b| a.1.0.total_cmp(&b.1.0)).unwrap().0;
        let (at, connection, piece) = coming.swap_remove(first);
        now = at;
        let asker = Asker { connection, peer: &peers[connection / 3] };
        if board.came(piece, asker) && board.written(piece) {
            board.checked(piece.chunk, true);
        }
        idle.push(connection);
    }
    now
}

#[test]
fn unequal_ways_together_carry_what_each_of_them_can() {
    for rates in [[100e6, 100e6, 100e6], [100e6, 50e6, 25e6], [1000e6, 1e6, 1e6]] {
        let count = 40;
        let ideal = (count as f64 * CHUNK as f64) / rates.iter().sum::<f64>();
        let taken = simulated(&rates, count);
        let share = ideal / taken;
        assert!(share > 0.97, "{rates:?}: {share:.3} of the ideal");
    }
}
