//! Predicted speed of a plan: the performance model applied to the machines and links of a view. Not here:
//! the machines' and links' figures (`speed`), and the decision (`place`).

use std::cmp::Reverse;

use russet_crds::{Backend, GroupMember, GroupPlan, LinkKind, PredictedThroughput};
use russet_model::shape::ModelShape;

use crate::in_memory;
use crate::memory_model::ServingCapacity;
use crate::performance_model::calibration::{Calibration, CalibrationKey, single_stream_rate};
use crate::performance_model::{
    EngineFamily, FenceMode, GpuProfile, GroupTopology, LinkProfile, Load, ModelProfile, Speed, StageProfile,
    predict,
};
use crate::snapshot::Snapshot;

/// Prompt length that is planned for, tokens.
const PLANNED_PROMPT_TOKENS: u32 = 1024;
/// Context length during decode that is planned for, tokens.
const PLANNED_CONTEXT_TOKENS: u32 = 2048;
/// Message size by which links are compared: the activations of a token of a large model.
const TYPICAL_MESSAGE_BYTES: f64 = 32768.0;
/// Profile of a machine with an unknown chip: an M4 Pro, in the middle of what people have. It serves only
/// for comparison; no rate is shown for it.
const UNKNOWN_GPU: GpuProfile = GpuProfile {
    bandwidth: 273e9,
    flops: 9.2e12,
    cores: 20.0,
    matmul_speedup: 1.0,
    emulates_bfloat16: false,
};

/// Predictions for one model.
#[derive(Clone, Debug)]
pub struct Predictor<'a> {
    view: &'a Snapshot,
    model: ModelProfile,
    capacity: ServingCapacity,
    calibration: Calibration,
}

impl<'a> Predictor<'a> {
    /// For a model with this capacity on the nodes of `view`.
    pub fn new(view: &'a Snapshot, shape: &ModelShape, room: ServingCapacity) -> Self {
        let mut predictor = Self {
            view,
            model: ModelProfile::from_shape(shape),
            capacity: room,
            calibration: Calibration::default(),
        };
        for ((namespace, _), group) in view.groups.iter() {
            let Some(measured) = &group.measured else { continue };
            let stored = view.models.get(&(namespace.clone(), group.model.clone()));
            let own = stored.and_then(|stored| in_memory::shape(&group.plan.engine, stored).ok());
            if own.as_deref() != Some(shape) {
                continue;
            }
            let context = measured.context_tokens;
            let load = Load { prompt: PLANNED_PROMPT_TOKENS.min(context), context, streams: 1 };
            let predicted =
                predictor.topology(&group.plan, None).and_then(|group| predictor.speed_under(&group, load));
            if let (Some(rate), Some(kind), Some(predicted)) =
                (single_stream_rate(measured), predictor.calibration_key(&group.plan), predicted)
            {
                predictor.calibration.add(kind, rate, predicted.decode);
            }
        }
        predictor
    }

    /// Tokens per second of one stream, to compare plans: as predicted, and calibrated with the measurements
    /// of running groups of the same kind. Machines with an unknown chip count as equal.
    pub fn rate(&self, plan: &GroupPlan) -> f64 {
        self.calibration_factor(plan)
            * self.speed(plan, 1, Some(UNKNOWN_GPU)).map_or(0.0, |speed| speed.decode)
    }

    fn calibration_factor(&self, plan: &GroupPlan) -> f64 {
        let kind = if self.calibration.is_empty() { None } else { self.calibration_key(plan) };
        kind.map_or(1.0, |kind| self.calibration.factor(&kind))
    }

    /// The key under which measurements apply; `None` if a chip is unknown.
    fn calibration_key(&self, plan: &GroupPlan) -> Option<CalibrationKey> {
        let machine = |member: &GroupMember| self.view.nodes.get(&member.node_name)?.gpu;
        let machines = plan.members.iter().map(machine).collect::<Option<_>>()?;
        Some(CalibrationKey { backend: plan.backend, tensor_size: plan.tensor_size.max(1), machines })
    }

    /// The prediction to show; `None` if a chip is unknown.
    pub fn predicted(&self, plan: &GroupPlan) -> Option<PredictedThroughput> {
        let alone = self.speed(plan, 1, None)?;
        // As many of them as the capacity allows at this length.
        let held = self.capacity.reserved_tokens()
            / u64::from(PLANNED_CONTEXT_TOKENS.min(self.capacity.context_tokens).max(1));
        let streams = u32::try_from(held).unwrap_or(u32::MAX).clamp(1, self.capacity.max_sequences.max(1));
        let full = self.speed(plan, streams, None)?;
        Some(PredictedThroughput {
            tokens_per_second: show_rate(alone.decode),
            total_tokens_per_second: show_rate(full.total),
            ttft_milliseconds: (alone.ttft * 1e3).round().min(f64::from(u32::MAX)) as u32,
            kv_tokens: self.capacity.reserved_tokens(),
        })
    }

    fn speed(&self, plan: &GroupPlan, streams: u32, unknown: Option<GpuProfile>) -> Option<Speed> {
        let load = Load {
            prompt: PLANNED_PROMPT_TOKENS.min(self.capacity.context_tokens),
            context: PLANNED_CONTEXT_TOKENS.min(self.capacity.context_tokens),
            streams,
        };
        self.speed_under(&self.topology(plan, unknown)?, load)
    }

    fn speed_under(&self, group: &GroupTopology, load: Load) -> Option<Speed> {
        predict(EngineFamily::Mlx, &self.model, group, load)
    }

    fn topology(&self, plan: &GroupPlan, unknown: Option<GpuProfile>) -> Option<GroupTopology> {
        let machine = |node: &String| self.view.nodes.get(node).and_then(|node| node.gpu).or(unknown);
        let stages: Option<Vec<StageProfile>> = stage_members(plan)
            .map(|team| {
                let machines = team.iter().map(|member| machine(&member.node_name)).collect::<Option<_>>()?;
                Some(StageProfile { gpus: machines, layers: team.first()?.layers })
            })
            .collect();
        Some(GroupTopology {
            stages: stages?,
            member_link: self.slowest_link(plan.backend, pairs_within_stages(plan), |link| {
                link.all_reduce(2, TYPICAL_MESSAGE_BYTES)
            }),
            stage_link: self.slowest_link(Backend::Ring, pairs_between_stages(plan), |link| {
                link.hop(TYPICAL_MESSAGE_BYTES)
            }),
            fence: match plan.engine.fence {
                russet_crds::Fence::Fast => FenceMode::Fast,
                russet_crds::Fence::Default | russet_crds::Fence::Unknown => FenceMode::Default,
            },
        })
    }

    /// Whether ranks communicate over Wi-Fi, because no better link joins their nodes.
    pub fn over_wifi(&self, plan: &GroupPlan) -> bool {
        let tcp = plan.backend == Backend::Ring;
        let mut pairs = pairs_between_stages(plan).chain(pairs_within_stages(plan).filter(|_| tcp));
        pairs.any(|(a, b)| {
            a != b && self.best_reported_link(a, b).is_some_and(|link| link.kind == LinkKind::Wifi)
        })
    }

    /// The slowest link among pairs of nodes, for messages of `backend` and by `cost`.
    fn slowest_link<'n>(
        &self,
        backend: Backend,
        pairs: impl Iterator<Item = (&'n str, &'n str)>,
        cost: impl Fn(&LinkProfile) -> f64,
    ) -> LinkProfile {
        let links = pairs.filter(|(a, b)| a != b).map(|(a, b)| self.best_link(backend, a, b));
        let slower = |a: LinkProfile, b: LinkProfile| if cost(&b) > cost(&a) { b } else { a };
        links.reduce(slower).unwrap_or(LinkProfile::RDMA)
    }

    /// The best link that two nodes report; a wired network if they report none, as most have one.
    fn best_link(&self, backend: Backend, a: &str, b: &str) -> LinkProfile {
        self.best_reported_link(a, b)
            .map_or(LinkProfile::for_backend(backend, LinkKind::Ethernet, None, None), |link| {
                LinkProfile::for_backend(backend, link.kind, link.bits_per_second, link.measured)
            })
    }

    fn best_reported_link(&self, a: &str, b: &str) -> Option<&russet_crds::Link> {
        let rank = |kind: LinkKind| match kind {
            LinkKind::Thunderbolt => 0,
            LinkKind::Ethernet => 1,
            LinkKind::Other => 2,
            LinkKind::Wifi => 3,
        };
        let reported = [(a, b), (b, a)].into_iter().flat_map(|(node, peer)| {
            let links = self.view.nodes.get(node).map(|node| node.links.as_slice()).unwrap_or_default();
            links.iter().filter(move |link| link.peer == peer)
        });
        // Of several cables the engine also takes the fastest.
        let carries = |link: &russet_crds::Link| link.measured.and_then(|measured| measured.bits_per_second);
        reported.min_by_key(|link| (rank(link.kind), Reverse(carries(link)), Reverse(link.bits_per_second)))
    }
}

/// The stages, each with its ranks.
fn stage_members(plan: &GroupPlan) -> impl Iterator<Item = &[GroupMember]> {
    plan.members.chunks(plan.tensor_size.max(1) as usize)
}

/// Pairs of nodes whose ranks communicate within a stage.
fn pairs_within_stages(plan: &GroupPlan) -> impl Iterator<Item = (&str, &str)> {
    stage_members(plan).flat_map(|team| team.iter().zip(team.iter().cycle().skip(1))).map(node_names)
}

/// Pairs of nodes whose ranks communicate between stages: over TCP, whatever backend their members use.
fn pairs_between_stages(plan: &GroupPlan) -> impl Iterator<Item = (&str, &str)> {
    stage_members(plan).zip(stage_members(plan).skip(1)).flat_map(|(a, b)| a.iter().zip(b)).map(node_names)
}

fn node_names<'p>((a, b): (&'p GroupMember, &'p GroupMember)) -> (&'p str, &'p str) {
    (a.node_name.as_str(), b.node_name.as_str())
}

/// A rate with its significant digits.
pub fn show_rate(rate: f64) -> String {
    match rate {
        rate if rate >= 99.95 => format!("{rate:.0}"),
        rate if rate >= 9.995 => format!("{rate:.1}"),
        rate => format!("{rate:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chips;
    use crate::snapshot::NodeInfo;

    /// Llama 3.3 70B in 4 bits: 80 layers of 855 million parameters.
    fn llama() -> ModelShape {
        let layer = 855_654_400_u64 * 9 / 16;
        let head = 8192 * 128_256 * 9 / 16;
        ModelShape {
            architecture: "llama".to_owned(),
            layers: 80,
            hidden_size: 8192,
            vocabulary: 128_256,
            parameters: 70_553_706_496,
            attention_heads: 64,
            key_value_heads: 8,
            head_dim: 128,
            intermediate_size: 28672,
            layer_bytes: vec![layer; 80],
            embedding_bytes: head,
            head_bytes: head,
            kv_bytes_per_token_per_layer: 4096,
            quantization_group_size: 64,
            ..ModelShape::default()
        }
    }

    fn view(chips: &[(&str, &str)]) -> Snapshot {
        let node = |chip: &str| NodeInfo {
            gpu: chips::find(chip, None, Some(512)).map(Into::into),
            ..NodeInfo::default()
        };
        Snapshot {
            nodes: chips.iter().map(|(name, chip)| ((*name).to_owned(), node(chip))).collect(),
            ..Snapshot::default()
        }
    }

    fn plan(backend: Backend, tensor_size: u32, members: &[(&str, u32)]) -> GroupPlan {
        let member = |(node, layers): &(&str, u32)| GroupMember {
            node_name: (*node).to_owned(),
            layers: *layers,
            ..GroupMember::default()
        };
        GroupPlan {
            backend,
            tensor_size,
            members: members.iter().map(member).collect(),
            ..GroupPlan::default()
        }
    }

    #[test]
    fn plans_are_as_fast_as_their_machines_and_links() {
        let view =
            view(&[("ultra", "M3 Ultra"), ("other", "M3 Ultra"), ("max", "M4 Max"), ("linux", "EPYC")]);
        let room = ServingCapacity {
            context_tokens: 8192,
            max_sequences: 4,
            headroom_percent: 5,
            ..ServingCapacity::default()
        };
        let shape = llama();
        let predictor = Predictor::new(&view, &shape, room);
        let single = plan(Backend::None, 1, &[("ultra", 80)]);
        let rate = |plan: &GroupPlan| predictor.rate(plan);
        let tensor = plan(Backend::Jaccl, 2, &[("ultra", 80), ("other", 80)]);
        let tcp = plan(Backend::Ring, 2, &[("ultra", 80), ("other", 80)]);
        let pipeline = plan(Backend::Ring, 1, &[("ultra", 40), ("other", 40)]);
        let mixed = plan(Backend::Ring, 1, &[("ultra", 40), ("max", 40)]);
        // 40 GB at 819 GB/s are 17.5 at most; 2 × 80 sums with MLX's own fence cost as much as the halves
        // save.
        assert!((11.0..16.0).contains(&rate(&single)), "{}", rate(&single));
        for (story, faster, slower) in [
            ("a pipeline answers no sooner than one machine", &single, &pipeline),
            ("the slower machine sets the pace", &pipeline, &mixed),
            ("RDMA beats TCP", &tensor, &tcp),
        ] {
            assert!(rate(faster) > rate(slower), "{story}: {} {}", rate(faster), rate(slower));
        }
        let predicted = predictor.predicted(&single).unwrap();
        assert_eq!(predicted.tokens_per_second, show_rate(rate(&single)));
        assert_eq!(predicted.kv_tokens, 32768);
        let total: f64 = predicted.total_tokens_per_second.parse().unwrap();
        assert!(total > rate(&single), "four streams share the reading of weights: {total}");
        assert!((1000..20_000).contains(&predicted.ttft_milliseconds), "{}", predicted.ttft_milliseconds);
        let nobody_knows = plan(Backend::None, 1, &[("linux", 80)]);
        assert!(predictor.predicted(&nobody_knows).is_none() && rate(&nobody_knows) > 0.0);
    }

    #[test]
    fn prediction_is_calibrated_by_a_similar_running_group() {
        let view =
            view(&[("a", "M3 Ultra"), ("b", "M3 Ultra"), ("c", "M4 Max"), ("d", "EPYC"), ("e", "EPYC")]);
        let room = ServingCapacity {
            context_tokens: 8192,
            max_sequences: 4,
            headroom_percent: 5,
            ..ServingCapacity::default()
        };
        let (shape, other) = (llama(), ModelShape { layers: 79, ..llama() });
        let runs = |node: &str, model: &str, share: f64, streams: u32| {
            let mut view = view.clone();
            view.models = [("m", &shape), ("n", &other)]
                .map(|(name, shape)| (("ns".to_owned(), name.to_owned()), shape.clone()))
                .into_iter()
                .collect::<std::collections::BTreeMap<_, _>>()
                .into();
            let plan = plan(Backend::None, 1, &[(node, 80)]);
            let rate = share * Predictor::new(&view, &shape, room).rate(&plan);
            let measured = russet_crds::MeasuredThroughput {
                tokens_per_second: format!("{rate:.6}"),
                streams,
                context_tokens: PLANNED_CONTEXT_TOKENS,
                prompt_tokens_per_second: None,
            };
            let group = crate::snapshot::GroupInfo {
                model: model.to_owned(),
                plan,
                measured: Some(measured),
                ..crate::snapshot::GroupInfo::default()
            };
            view.groups.insert(("ns".to_owned(), "g".to_owned()), group);
            view
        };
        let single = |node: &str| plan(Backend::None, 1, &[(node, 80)]);
        let string = plan(Backend::Ring, 1, &[("a", 40), ("b", 40)]);
        for (story, view, plan, factor) in [
            ("the node itself", runs("a", "m", 0.5, 1), single("a"), 0.5),
            ("another of its chip", runs("a", "m", 0.5, 1), single("b"), 0.5),
            ("another chip", runs("a", "m", 0.5, 1), single("c"), 1.0),
            ("another split", runs("a", "m", 0.5, 1), string.clone(), 1.0),
            ("another model", runs("a", "n", 0.5, 1), single("a"), 1.0),
            ("measured with others", runs("a", "m", 0.5, 4), single("a"), 1.0),
            ("faster than predicted", runs("a", "m", 1.5, 1), single("b"), 1.5),
            ("chips nobody knows are equal all the same", runs("d", "m", 0.1, 1), single("d"), 1.0),
        ] {
            let empty = Snapshot { groups: Default::default(), ..view.clone() };
            let before = Predictor::new(&empty, &shape, room);
            let (raw, shown) = (before.rate(&plan), before.predicted(&plan));
            let predictor = Predictor::new(&view, &shape, room);
            assert!(
                (predictor.rate(&plan) / raw - factor).abs() < 1e-3,
                "{story}: {}",
                predictor.rate(&plan)
            );
            assert_eq!(
                predictor.predicted(&plan),
                shown,
                "{story}: what is predicted stays beside what is measured"
            );
        }
    }

    #[test]
    fn rates_are_shown_with_three_digits() {
        for (rate, shown) in
            [(0.4567, "0.46"), (9.996, "10.0"), (41.26, "41.3"), (99.96, "100"), (128.4, "128")]
        {
            assert_eq!(show_rate(rate), shown);
        }
    }
}
