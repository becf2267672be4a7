//! Balancing: how many consecutive layers each stage of an order of teams gets, so that the sum of squared times is
//! least and every stage fits. Not here: the orders of the teams (`stages`).
//!
//! ```text
//! first_fits[end]   the first layer of the longest run before `end` that a team has memory for
//! reached           (end, least cost of the layers before it) on the stages so far, ends ascending
//! next stage        for the middle end the best start; smaller ends start no later, larger ones no earlier
//! ```
//!
//! A square grows faster than what it is of, so the best start never moves back as the end moves on. That makes a
//! stage cost layers × log(layers) steps instead of their square.

use std::collections::BTreeMap;
use std::ops::Range;

use super::stages::TpTeam;
use crate::memory_model::MemoryModel;

/// Balances the layers of a model over orders of the same teams.
pub(super) struct Balancer<'a> {
    fit: &'a MemoryModel<'a>,
    teams: &'a [TpTeam<'a>],
    /// Of a team with or without embedding and head. It does not depend on the order.
    first_fits: BTreeMap<(usize, bool, bool), Vec<usize>>,
}

/// One stage: for each end of its layers, the least cost and where it starts.
struct Stage<'a> {
    fit: &'a MemoryModel<'a>,
    team: &'a TpTeam<'a>,
    head: bool,
    first_fits: &'a [usize],
    /// Ends of the stages before, ascending, each with its least cost.
    reached: &'a [(usize, u128)],
    /// By end: the least cost, and the place in `reached` that it continues.
    found: BTreeMap<usize, (u128, usize)>,
    steps: u64,
}

impl<'a> Balancer<'a> {
    /// Of these teams.
    pub(super) fn new(fit: &'a MemoryModel<'a>, teams: &'a [TpTeam<'a>]) -> Self {
        Self { fit, teams, first_fits: BTreeMap::new() }
    }

    /// Layers per stage for teams in this order, rank 0's first, within each node's memory, with the least sum of
    /// squared times; `None` if none fits. Squares make the slowest stage as fast as possible and keep the others
    /// even. Of equally good splits the last stages get the fewest layers. No stage begins within layers that stay together.
    pub(super) fn split(&mut self, order: &[usize]) -> Option<(u128, Vec<u32>)> {
        let (fit, teams) = (self.fit, self.teams);
        let (layers, size) = (fit.layers() as usize, order.len());
        if size == 0 || size > layers {
            return None;
        }
        let mut reached = vec![(0, 0)];
        let mut stages = Vec::new();
        for (stage, &place) in order.iter().rev().enumerate() {
            let (embedding, head) = (stage == 0, stage + 1 == size);
            let team = teams.get(place)?;
            let first_fits = self.first_fits(place, embedding, head)?;
            // Every later stage still needs a layer; the last one takes all that are left.
            let ends = if head { layers..layers + 1 } else { stage + 1..layers - (size - 1 - stage) + 1 };
            let found = BTreeMap::new();
            let mut next = Stage { fit, team, head, first_fits, reached: &reached, found, steps: 0 };
            next.search(ends, 0..reached.len());
            let Stage { found, steps, .. } = next;
            fit.search_budget().add(steps);
            // The next stage begins where this one ends.
            let may_end = |end: usize| fit.may_cut_before(end as u32);
            let ends = found.iter().filter(|(end, _)| may_end(**end));
            let ends = ends.map(|(&end, &(cost, _))| (end, cost)).collect();
            stages.push((std::mem::replace(&mut reached, ends), found));
        }
        let &(mut end, cost) = reached.last()?;
        let mut counts = Vec::new();
        for (before, found) in stages.iter().rev() {
            let start = before.get(found.get(&end)?.1)?.0;
            counts.push((end - start) as u32);
            end = start;
        }
        Some((cost, counts))
    }

    /// For every end the first start from which a team has memory for the layers; the end itself where it has none for
    /// one layer. More layers only need more memory, so neither ever moves back.
    fn first_fits(&mut self, place: usize, embedding: bool, head: bool) -> Option<&[usize]> {
        let (fit, team) = (self.fit, self.teams.get(place)?);
        let found = self.first_fits.entry((place, embedding, head)).or_insert_with(|| {
            let (mut start, mut steps) = (0, 0);
            let mut found = vec![0];
            for end in 1..=fit.layers() as usize {
                while start < end {
                    steps += 1;
                    if team.fits(fit, start as u32..end as u32, embedding, head) {
                        break;
                    }
                    start += 1;
                }
                found.push(start);
            }
            fit.search_budget().add(steps);
            found
        });
        Some(found)
    }
}

impl Stage<'_> {
    /// Finds the best start of every end, among these places of `reached`.
    fn search(&mut self, ends: Range<usize>, from: Range<usize>) {
        if ends.is_empty() {
            return;
        }
        let end = ends.start + (ends.end - ends.start) / 2;
        let reached = self.reached;
        let below = |bound: usize| reached.partition_point(|&(start, _)| start < bound);
        let first = self.first_fits.get(end).copied().unwrap_or(end);
        let (least, most) = (below(first).max(from.start), below(end).min(from.end));
        let mut best: Option<(u128, usize)> = None;
        // Backwards: of equal costs the last start wins.
        for place in (least..most).rev() {
            let (start, before) = reached[place];
            self.steps += 1;
            let time = u128::from(self.team.time(self.fit, start as u32..end as u32, self.head));
            let square = time.saturating_mul(time);
            let cost = before.saturating_add(square);
            if best.is_none_or(|(known, _)| cost < known) {
                best = Some((cost, place));
            }
            // An earlier start only takes longer.
            if best.is_some_and(|(known, _)| square >= known) {
                break;
            }
        }
        // Where no start reaches this end, smaller ends have only those before it, and larger ones those from it on.
        let (until, since) = best.map_or((most, least), |(_, place)| (place + 1, place));
        if let Some(best) = best {
            self.found.insert(end, best);
        }
        self.search(ends.start..end, from.start..until);
        self.search(end + 1..ends.end, since..from.end);
    }
}

#[cfg(test)]
mod tests {
    use russet_model::shape::{LayerGroup, ModelShape};

    use super::*;
    use crate::memory_model::ServingCapacity;
    use crate::performance_model::GpuProfile;
    use crate::shard::NodeSlot;
    use crate::test_rng::TestRng;

    const MIB: u64 = 1 << 20;

    /// Every start of every end, in the order and with the ties of the search above.
    fn exhaustive(fit: &MemoryModel<'_>, order: &[&TpTeam<'_>]) -> Option<(u128, Vec<u32>)> {
        let (layers, size) = (fit.layers() as usize, order.len());
        if size == 0 || size > layers {
            return None;
        }
        let mut least: Vec<Option<u128>> = vec![None; layers + 1];
        least[0] = Some(0);
        let mut starts: Vec<Vec<usize>> = Vec::new();
        for (stage, team) in order.iter().rev().enumerate() {
            let (embedding, head) = (stage == 0, stage + 1 == size);
            let mut next: Vec<Option<u128>> = vec![None; layers + 1];
            let mut from = vec![0; layers + 1];
            for end in stage + 1..=layers - (size - 1 - stage) {
                if head && end != layers {
                    continue;
                }
                for start in (stage..end).rev() {
                    if !fit.may_cut_before(start as u32) {
                        continue;
                    }
                    let range = start as u32..end as u32;
                    if !team.fits(fit, range.clone(), embedding, head) {
                        break;
                    }
                    let Some(before) = least[start] else { continue };
                    let time = u128::from(team.time(fit, range, head));
                    let cost = before.saturating_add(time.saturating_mul(time));
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

    fn team(rng: &mut TestRng, members: u64, most: u64) -> TpTeam<'static> {
        let slot = |rng: &mut TestRng| NodeSlot {
            node: "n",
            index: 0,
            free: 200 * MIB + rng.below(most),
            limit: u64::MAX,
            siblings: 0,
            domain_siblings: 0,
            supports_tensor: true,
            gpu: (rng.below(4) > 0).then(|| GpuProfile {
                bandwidth: (100 + 100 * rng.below(8)) as f64 * 1e9,
                flops: (4 + rng.below(20)) as f64 * 1e12,
                cores: (10 + 10 * rng.below(7)) as f64,
                matmul_speedup: 1.0,
                emulates_bfloat16: false,
            }),
        };
        TpTeam { slots: (0..members).map(|_| slot(rng)).collect() }
    }

    /// The same where some layers read the keys and values of others.
    fn with_shared_caches(shape: ModelShape, rng: &mut TestRng) -> ModelShape {
        let layers = shape.layer_bytes.iter().zip(0_u64..).map(|(&weight_bytes, layer)| LayerGroup {
            count: 1,
            weight_bytes,
            shares_cache_of: (rng.below(8) == 0).then(|| rng.below(layer + 1) as u32),
            ..LayerGroup::default()
        });
        ModelShape { layer_groups: layers.collect(), ..shape }
    }

    #[test]
    fn fast_balance_equals_that_of_every_start() {
        let (mut split, mut refused) = (0, 0);
        for seed in 0..1000 {
            let mut rng = TestRng(seed);
            let layers = 1 + rng.below(40) as usize;
            let size = 1 + rng.below(6);
            // Alike, of a few kinds, or all different, and now and then one that fits hardly anywhere.
            let kinds = [1, 3, 1000][rng.below(3) as usize];
            let mut layer_bytes: Vec<u64> = (0..layers).map(|_| MIB * (1 + rng.below(kinds))).collect();
            if rng.below(3) == 0 {
                let at = rng.below(layers as u64) as usize;
                layer_bytes[at] *= 1 + rng.below(8);
            }
            let sum: u64 = layer_bytes.iter().sum();
            let shape = ModelShape {
                layers: layers as u32,
                layer_bytes,
                embedding_bytes: rng.below(sum),
                head_bytes: rng.below(sum),
                tied: rng.below(2) == 0,
                replicated_layer_bytes: rng.below(MIB),
                kv_bytes_per_token_per_layer: rng.below(1 << 14),
                ..ModelShape::default()
            };
            let shape = if rng.below(3) == 0 { with_shared_caches(shape, &mut rng) } else { shape };
            let capacity =
                ServingCapacity { context_tokens: 64, max_sequences: 1, ..ServingCapacity::default() };
            let fit = MemoryModel::new(&shape, capacity);
            let members = 1 + rng.below(2);
            let room = [sum / size, sum, 4 * sum][rng.below(3) as usize] + 1;
            let teams: Vec<TpTeam<'_>> = (0..size).map(|_| team(&mut rng, members, 2 * room)).collect();
            let mut balancer = Balancer::new(&fit, &teams);
            let mut order: Vec<usize> = (0..teams.len()).collect();
            for turn in 0..2 {
                order.rotate_left(turn);
                let found = balancer.split(&order);
                let teams: Vec<&TpTeam<'_>> = order.iter().map(|&place| &teams[place]).collect();
                assert_eq!(found, exhaustive(&fit, &teams), "seed {seed}, order {order:?}");
                *(if found.is_some() { &mut split } else { &mut refused }) += 1;
            }
        }
        assert!(split > 300 && refused > 300, "{split} split, {refused} refused");
    }

    #[test]
    fn steps_of_a_stage_grow_hardly_faster_than_layers() {
        let mut before = 0;
        for layers in [250, 500, 1000] {
            let shape = ModelShape {
                layers,
                layer_bytes: (0..u64::from(layers)).map(|layer| MIB * (1 + layer % 7)).collect(),
                ..ModelShape::default()
            };
            let fit = MemoryModel::new(&shape, ServingCapacity::default());
            let mut rng = TestRng(7);
            let teams: Vec<TpTeam<'_>> = (0..5).map(|_| team(&mut rng, 1, 1 << 40)).collect();
            Balancer::new(&fit, &teams).split(&[0, 1, 2, 3, 4]).unwrap();
            let steps = fit.search_budget().steps();
            println!("{layers} layers over 5 stages: {steps} steps");
            let halves = u64::from(layers) * u64::from(layers) / 2;
            assert!(steps < 5 * halves / 8, "{steps} of {} for every start", 3 * halves);
            assert!(before == 0 || steps < before * 5 / 2, "{before}, then {steps}");
            before = steps;
        }
    }
}
