//! Consecutive layers on each rank. Rank 0 holds the last layers and the head, the highest rank the
//! embedding and the first layers; stages below are counted the way activations flow, so stage 0 is
//! the highest rank.

use std::cmp::Reverse;

use super::{Candidate, Rank, Seat};
use crate::fit::Fit;
use crate::note::Note;

/// Up to so many ranks every order of the nodes is tried; 24 orders cost microseconds.
const ALL_ORDERS: usize = 4;
/// Up to so many ranks every choice of first and last node is tried; only those two differ in what
/// they hold besides layers.
const ALL_ENDS: usize = 12;

/// The most balanced split over `ranks` of the seats, or the numbers that forbid it. All seats have
/// equal engines.
pub fn balanced(fit: &Fit<'_>, seats: &[Seat<'_>], ranks: u32) -> Result<Candidate, Note> {
    let size = ranks as usize;
    if seats.len() < size || size == 0 || ranks > fit.layers() {
        return Err(Note::TooFewNodes { ranks, nodes: seats.len() });
    }
    // First the nodes without a replica of the same deployment, then simply the largest: when the
    // largest do not hold it, none do.
    let mut chosen = Vec::new();
    for spread in [true, false] {
        chosen = largest(seats, size, spread);
        if let Some(candidate) = best_order(fit, &chosen) {
            return Ok(candidate);
        }
    }
    Err(together(fit, &chosen))
}

/// A split with exactly these layers on each rank: the rank that needs most gets the node with most.
pub fn explicit(fit: &Fit<'_>, seats: &[Seat<'_>], layers: &[u32]) -> Result<Candidate, Note> {
    let size = layers.len();
    if seats.len() < size {
        return Err(Note::TooFewNodes { ranks: size as u32, nodes: seats.len() });
    }
    let mut end = fit.layers();
    let mut needs = Vec::new();
    for (rank, &count) in layers.iter().enumerate() {
        let start = end.saturating_sub(count);
        needs.push(fit.need(start..end, rank + 1 == size, rank == 0));
        end = start;
    }
    let mut by_need: Vec<usize> = (0..size).collect();
    by_need.sort_by_key(|&rank| (Reverse(needs[rank].total()), rank));
    let mut chosen = Vec::new();
    for spread in [true, false] {
        chosen = largest(seats, size, spread);
        chosen.sort_by_key(|seat| (Reverse(seat.free), seat.node));
        let mut ranks = vec![None; size];
        for (&rank, seat) in by_need.iter().zip(&chosen) {
            ranks[rank] = seat.free.checked_sub(needs[rank].total()).map(|left| Rank {
                node: seat.node.to_owned(),
                layers: layers[rank],
                need: needs[rank],
                left,
            });
        }
        if let Some(ranks) = ranks.into_iter().collect() {
            return Ok(Candidate { ranks, siblings: chosen.iter().map(|seat| seat.siblings).sum() });
        }
    }
    // Name the first pair that fails: that is the number to change.
    for (&rank, seat) in by_need.iter().zip(&chosen) {
        if seat.free < needs[rank].total() {
            return Err(Note::TooSmall {
                node: seat.node.to_owned(),
                what: format!("rank {rank} with {} layers", layers[rank]),
                needed: needs[rank].total(),
                free: seat.free,
                limit: seat.limit,
            });
        }
    }
    Err(together(fit, &chosen))
}

fn largest<'a>(seats: &[Seat<'a>], size: usize, spread: bool) -> Vec<Seat<'a>> {
    let mut chosen = seats.to_vec();
    chosen.sort_by_key(|seat| (if spread { seat.siblings } else { 0 }, Reverse(seat.free), seat.node));
    chosen.truncate(size);
    chosen.sort_by_key(|seat| seat.node);
    chosen
}

fn together(fit: &Fit<'_>, chosen: &[Seat<'_>]) -> Note {
    // Every split of the same size needs at least this: each rank brings its own engine.
    let whole = fit.whole();
    let engines = fit.need(0..0, false, false).overhead.saturating_mul(chosen.len() as u64 - 1);
    Note::Together {
        nodes: chosen.iter().map(|seat| seat.node.to_owned()).collect(),
        needed: whole.total().saturating_add(engines),
        free: chosen.iter().fold(0, |sum, seat| sum.saturating_add(seat.free)),
    }
}

/// The order of the nodes whose best split is the most balanced; ties go to the order of names.
fn best_order(fit: &Fit<'_>, seats: &[Seat<'_>]) -> Option<Candidate> {
    // Without limits the order would not matter; no order can do better than this.
    let boundless: Vec<Seat<'_>> = seats.iter().map(|seat| Seat { free: u64::MAX, ..seat.clone() }).collect();
    let floor = cut(fit, &boundless.iter().collect::<Vec<_>>()).map(|(cost, _)| cost);
    let mut best: Option<(u128, Vec<&Seat<'_>>, Vec<u32>)> = None;
    for order in orders(seats) {
        let Some((cost, layers)) = cut(fit, &order) else { continue };
        if best.as_ref().is_none_or(|(least, _, _)| cost < *least) {
            best = Some((cost, order, layers));
        }
        if Some(cost) == floor {
            break;
        }
    }
    let (_, order, layers) = best?;
    let size = order.len();
    let mut end = fit.layers();
    let mut ranks = Vec::new();
    for (rank, (seat, &count)) in order.iter().zip(&layers).enumerate() {
        let start = end - count;
        let need = fit.need(start..end, rank + 1 == size, rank == 0);
        ranks.push(Rank {
            node: seat.node.to_owned(),
            layers: count,
            need,
            left: seat.free.checked_sub(need.total())?,
        });
        end = start;
    }
    Some(Candidate { ranks, siblings: order.iter().map(|seat| seat.siblings).sum() })
}

/// Orders worth trying, rank 0 first, the order of names before all others.
fn orders<'s, 'a>(seats: &'s [Seat<'a>]) -> Vec<Vec<&'s Seat<'a>>> {
    let named: Vec<&Seat<'a>> = seats.iter().collect();
    let size = named.len();
    let mut orders = vec![named.clone()];
    if size <= ALL_ORDERS {
        permute(&named, &mut Vec::new(), &mut orders);
    } else {
        let mut sorted = named.clone();
        sorted.sort_by_key(|seat| (Reverse(seat.free), seat.node));
        let ends: Vec<(usize, usize)> = if size <= ALL_ENDS {
            (0..size)
                .flat_map(|first| (0..size).map(move |last| (first, last)))
                .filter(|(a, b)| a != b)
                .collect()
        } else {
            // The two largest, either way round, carry head and embedding.
            vec![(0, 1), (1, 0)]
        };
        for (first, last) in ends {
            let middle = sorted.iter().enumerate().filter(|(index, _)| *index != first && *index != last);
            let mut order = vec![sorted[first]];
            order.extend(middle.map(|(_, seat)| *seat));
            order.push(sorted[last]);
            orders.push(order);
        }
    }
    orders
}

fn permute<'s, 'a>(rest: &[&'s Seat<'a>], head: &mut Vec<&'s Seat<'a>>, out: &mut Vec<Vec<&'s Seat<'a>>>) {
    if rest.is_empty() {
        out.push(head.clone());
        return;
    }
    for index in 0..rest.len() {
        let mut others = rest.to_vec();
        head.push(others.remove(index));
        permute(&others, head, out);
        head.pop();
    }
}

/// Layers per rank for nodes in this order, within each node's memory, with the least sum of
/// squared work; `None` when no cut fits. Squares make the slowest stage as fast as it can be
/// without leaving the others uneven.
///
/// Stage by stage: `least[end]` is the least cost of putting the first `end` layers on the stages so
/// far; every stage takes at least one layer.
fn cut(fit: &Fit<'_>, order: &[&Seat<'_>]) -> Option<(u128, Vec<u32>)> {
    let layers = fit.layers() as usize;
    let size = order.len();
    let mut least: Vec<Option<u128>> = vec![None; layers + 1];
    least[0] = Some(0);
    let mut starts: Vec<Vec<usize>> = Vec::new();
    for (stage, seat) in order.iter().rev().enumerate() {
        let (embedding, head) = (stage == 0, stage + 1 == size);
        let mut next: Vec<Option<u128>> = vec![None; layers + 1];
        let mut from = vec![0; layers + 1];
        // Every later stage still needs a layer.
        let last_end = layers - (size - 1 - stage);
        for end in stage + 1..=last_end {
            if head && end != layers {
                continue;
            }
            // Taking more layers only needs more memory: stop at the first start that does not fit.
            for start in (stage..end).rev() {
                let range = start as u32..end as u32;
                if fit.need(range.clone(), embedding, head).total() > seat.free {
                    break;
                }
                let Some(before) = least[start] else { continue };
                let work = u128::from(fit.work(range, head));
                let cost = before.saturating_add(work.saturating_mul(work));
                if next[end].is_none_or(|known| cost < known) {
                    next[end] = Some(cost);
                    from[end] = start;
                }
            }
        }
        least = next;
        starts.push(from);
    }
    let cost = least[layers]?;
    let mut end = layers;
    let mut counts = Vec::new();
    for from in starts.iter().rev() {
        counts.push((end - from[end]) as u32);
        end = from[end];
    }
    Some((cost, counts))
}

#[cfg(test)]
mod tests {
    use russet_wire::shape::ModelShape;

    use super::*;
    use crate::fit::Room;

    const GIB: u64 = 1 << 30;

    fn shape(layers: u32, layer: u64, embedding: u64) -> ModelShape {
        ModelShape {
            architecture: "llama".to_owned(),
            layers,
            layer_bytes: vec![layer; layers as usize],
            embedding_bytes: embedding,
            head_bytes: embedding,
            ..ModelShape::default()
        }
    }

    fn seats(free: &[u64]) -> Vec<Seat<'static>> {
        const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
        free.iter()
            .zip(NAMES)
            .map(|(&free, node)| Seat { node, free: free * GIB, limit: free * GIB, siblings: 0 })
            .collect()
    }

    fn show(result: Result<Candidate, Note>) -> String {
        match result {
            Ok(candidate) => candidate
                .ranks
                .iter()
                .map(|rank| format!("{}{}", rank.node, rank.layers))
                .collect::<Vec<_>>()
                .join(" "),
            Err(_) => "-".to_owned(),
        }
    }

    #[test]
    fn layers_are_even_where_memory_allows_and_follow_memory_where_not() {
        let room = Room { context_tokens: 16, max_sequences: 1, headroom_percent: 0 };
        for (layers, layer, embedding, free, ranks, want) in [
            (4, GIB, 0, vec![16, 16], 2, "a2 b2"),
            (5, GIB, 0, vec![16, 16, 16], 3, "a1 b2 c2"), // ties leave rank 0, which samples, the least
            (8, GIB, 0, vec![16, 4], 2, "a5 b3"),         // b has room for three and the engine
            (8, GIB, 0, vec![4, 16], 2, "a3 b5"),
            (8, GIB, 4 * GIB, vec![32, 32], 2, "a2 b6"), // the head works as much as four layers
            (8, GIB, 4 * GIB, vec![6, 9], 2, "-"),       // neither end has room enough
            (8, GIB, 4 * GIB, vec![7, 11], 2, "a2 b6"),
            (8, GIB, 4 * GIB, vec![11, 7], 2, "b2 a6"), // the smaller node takes the head
            (2, GIB, 0, vec![16, 16, 16], 3, "-"),
            (6, GIB, 0, vec![3, 3, 3, 3, 3, 3], 6, "a1 b1 c1 d1 e1 f1"),
            (12, GIB, 0, vec![3, 3, 3, 3, 3, 3], 6, "a2 b2 c2 d2 e2 f2"),
            (13, GIB, 0, vec![3, 3, 3, 3, 3, 3], 6, "-"),
        ] {
            let shape = shape(layers, layer, embedding);
            let fit = Fit::new(&shape, room);
            assert_eq!(show(balanced(&fit, &seats(&free), ranks)), want, "{layers} layers over {free:?}");
        }
    }

    #[test]
    fn an_explicit_split_is_honoured_and_its_largest_rank_gets_the_largest_node() {
        let room = Room { context_tokens: 16, max_sequences: 1, headroom_percent: 0 };
        let shape = shape(5, GIB, 0);
        let fit = Fit::new(&shape, room);
        for (free, layers, want) in [
            (vec![8, 8, 8], vec![2, 2, 1], "a2 b2 c1"),
            (vec![2, 8, 8], vec![2, 2, 1], "b2 c2 a1"),
            (vec![2, 2, 8], vec![2, 2, 1], "-"),
            (vec![8, 8], vec![2, 2, 1], "-"),
        ] {
            assert_eq!(show(explicit(&fit, &seats(&free), &layers)), want, "{layers:?} over {free:?}");
        }
    }
}
