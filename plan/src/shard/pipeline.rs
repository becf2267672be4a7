//! Pipelines: consecutive layers on each rank, with single nodes as stages.

use russet_crds::Backend;

use super::stages::{self, TpTeam};
use super::{NodeSlot, RankAssignment, SplitCandidate};
use crate::memory_model::MemoryModel;
use crate::note::Note;

/// The most balanced split over `ranks` of the nodes, or the numbers of the failure. All nodes have equal
/// engines.
pub fn balanced(fit: &MemoryModel<'_>, slots: &[NodeSlot<'_>], ranks: u32) -> Result<SplitCandidate, Note> {
    if ranks == 0 || ranks > fit.max_stages() {
        return Err(Note::TooFewNodes { ranks, nodes: slots.len() });
    }
    choose(slots, ranks, |teams| stages::balanced(fit, teams))
}

/// A split with exactly these layers on each rank.
pub fn explicit(
    fit: &MemoryModel<'_>,
    slots: &[NodeSlot<'_>],
    layers: &[u32],
) -> Result<SplitCandidate, Note> {
    choose(slots, layers.len() as u32, |teams| stages::explicit(fit, teams, layers))
}

/// First the nodes without a replica of the same deployment, then simply the largest: if the largest do not
/// hold it, none do.
fn choose<'a>(
    slots: &[NodeSlot<'a>],
    ranks: u32,
    split: impl Fn(&[TpTeam<'a>]) -> Result<Vec<RankAssignment>, Note>,
) -> Result<SplitCandidate, Note> {
    let mut refusal = Note::TooFewNodes { ranks, nodes: slots.len() };
    if slots.len() < ranks as usize {
        return Err(refusal);
    }
    for &spread in stages::spread_orders(slots) {
        let chosen = stages::largest(slots, ranks as usize, spread);
        let siblings = chosen.iter().map(|slot| slot.siblings).sum();
        let teams: Vec<TpTeam<'a>> = chosen.into_iter().map(|slot| TpTeam { slots: vec![slot] }).collect();
        match split(&teams) {
            Ok(ranks) => {
                let backend = if ranks.len() == 1 { Backend::None } else { Backend::Ring };
                return Ok(SplitCandidate { ranks, siblings, tensor_size: 1, backend, backend_reason: None });
            }
            Err(note) => refusal = note,
        }
    }
    Err(refusal)
}

#[cfg(test)]
mod tests {
    use russet_model::shape::ModelShape;

    use super::*;
    use crate::memory_model::ServingCapacity;

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

    fn slots(free: &[u64]) -> Vec<NodeSlot<'static>> {
        const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
        free.iter()
            .zip(NAMES)
            .enumerate()
            .map(|(place, (&free, node))| NodeSlot {
                node,
                index: place,
                free: free * GIB,
                limit: free * GIB,
                siblings: 0,
                domain_siblings: 0,
                supports_tensor: true,
                gpu: None,
            })
            .collect()
    }

    fn show(result: Result<SplitCandidate, Note>) -> String {
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
    fn layers_are_even_unless_memory_forces_otherwise() {
        let room = ServingCapacity {
            context_tokens: 16,
            max_sequences: 1,
            headroom_percent: 0,
            ..ServingCapacity::default()
        };
        for (layers, layer, embedding, free, ranks, expected) in [
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
            let fit = MemoryModel::new(&shape, room);
            assert_eq!(show(balanced(&fit, &slots(&free), ranks)), expected, "{layers} layers over {free:?}");
        }
    }

    #[test]
    fn explicit_split_gives_its_largest_rank_the_largest_node() {
        let room = ServingCapacity {
            context_tokens: 16,
            max_sequences: 1,
            headroom_percent: 0,
            ..ServingCapacity::default()
        };
        let shape = shape(5, GIB, 0);
        let fit = MemoryModel::new(&shape, room);
        for (free, layers, expected) in [
            (vec![8, 8, 8], vec![2, 2, 1], "a2 b2 c1"),
            (vec![2, 8, 8], vec![2, 2, 1], "b2 c2 a1"),
            (vec![2, 2, 8], vec![2, 2, 1], "-"),
            (vec![8, 8], vec![2, 2, 1], "-"),
        ] {
            assert_eq!(show(explicit(&fit, &slots(&free), &layers)), expected, "{layers:?} over {free:?}");
        }
    }
}
