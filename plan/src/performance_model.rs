//! The performance model: predicted speed of a group, from the bandwidth and compute of its machines, the
//! model's reads per token, and the cost of messages on their links. Prediction only: placement uses it, and
//! measurements of running groups calibrate it (`measured`). `docs/planner-speed.md` has the formula and its
//! errors; `tests/throughput.rs` checks both against published measurements.
//!
//! ```text
//! step(B) = Σ stages  max over members { bytes(B) / (0.85 bandwidth)           weights once, KV of B streams
//!                                      + extra products of B streams / flops
//!                                      + layers × cycles / clock                a chain of small kernels
//!                                      + attention over the context / flops }
//!                     + 2 × layers × (all-reduce + fence)                       where layers are cut
//!         + hop × (stages − 1)
//! decode = 1 / step(B)          total = B / step(B)          TTFT = prefill of the prompt + step(1)
//! ```

pub mod calibration;
pub mod engine;
pub mod link;
pub mod model;
mod prefill;

pub use calibration::Calibration;
pub use engine::{Coefficients, EngineFamily};
pub use link::{FenceMode, LinkProfile};
pub use model::{Experts, ModelProfile, WeightFormat, Window};

/// Share of the stated bandwidth that a long read reaches: 340 of 400 GB/s seen on GPUs of these chips.
/// Fitting it instead gives 0.85 for MLX as well.
const READ_EFFICIENCY: f64 = 0.85;
/// Rows of a tile of the matrix kernels: a product with fewer rows costs as much as one with this many.
const MATMUL_TILE_ROWS: u32 = 32;
/// Operations per quantised weight for each stream beyond the first, as the weights are unpacked again. On an
/// M3 Ultra a product of 2, 4 and 8 rows costs 1.8, 3.3 and 6.1 times that of one (MLX's issue 4265), which
/// is 13 with 60 cores and 17 with 80. Fitting it to batched rates gives 16.
const UNPACK_OPS: f64 = 15.0;
/// Flops per GPU core and cycle: 128 lanes that multiply and add.
const FLOPS_PER_CORE_CYCLE: f64 = 256.0;
/// Bytes of one value of the hidden state on a link.
const HIDDEN_VALUE_BYTES: f64 = 2.0;

/// Profile of a machine's GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuProfile {
    /// Memory bandwidth, bytes per second.
    pub bandwidth: f64,
    /// Flops of its shaders per second.
    pub flops: f64,
    /// Cores of its GPU.
    pub cores: f64,
    /// Speed of large matrix products relative to its shaders.
    pub matmul_speedup: f64,
    /// Whether its shaders compute BF16 in software.
    pub emulates_bfloat16: bool,
}

impl GpuProfile {
    /// Seconds for MLX to read `bytes` and run the kernels of `layers`, for one token.
    pub fn step(&self, bytes: f64, layers: u32) -> f64 {
        let by = EngineFamily::Mlx.coefficients();
        let cycles = by.layer + by.core * self.cores;
        bytes / (READ_EFFICIENCY * self.bandwidth) + f64::from(layers) * cycles / self.clock()
    }

    /// GPU cycles per second.
    pub fn clock(&self) -> f64 {
        self.flops / (self.cores * FLOPS_PER_CORE_CYCLE)
    }
}

/// Machines that hold the same layers, each an equal part of every layer.
#[derive(Clone, Debug, PartialEq)]
pub struct StageProfile {
    /// The members.
    pub gpus: Vec<GpuProfile>,
    /// Layers they hold.
    pub layers: u32,
}

/// Topology of a replica: one stage of one machine, a pipeline, a tensor group, or both.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupTopology {
    /// The stages; the first holds the head, as rank 0 does.
    pub stages: Vec<StageProfile>,
    /// The worst link between members of a stage.
    pub member_link: LinkProfile,
    /// The worst link between neighbouring stages.
    pub stage_link: LinkProfile,
    /// How MLX waits for a collective on Metal.
    pub fence: FenceMode,
}

/// Load on a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Prompt length, tokens.
    pub prompt: u32,
    /// Average context length during decode, tokens.
    pub context: u32,
    /// Concurrent streams.
    pub streams: u32,
}

/// Predicted speed of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// Decode tokens per second of each stream.
    pub decode: f64,
    /// Tokens per second of all streams together.
    pub total: f64,
    /// Seconds to the first token, without other load.
    pub ttft: f64,
    /// Prefill tokens per second, as the engine's programs count: MLX's divide the prompt by the time to the first
    /// token, the others by the time without the first step.
    pub prefill: f64,
}

impl GroupTopology {
    /// A replica on one machine.
    pub fn single(machine: GpuProfile, layers: u32) -> Self {
        Self::tensor(vec![machine], layers, LinkProfile::RDMA, FenceMode::Fast)
    }

    /// Machines that share every layer.
    pub fn tensor(machines: Vec<GpuProfile>, layers: u32, link: LinkProfile, fence: FenceMode) -> Self {
        Self {
            stages: vec![StageProfile { gpus: machines, layers }],
            member_link: link,
            stage_link: link,
            fence,
        }
    }

    /// A pipeline of machines, each with its number of layers.
    pub fn pipeline(stages: &[(GpuProfile, u32)], link: LinkProfile, fence: FenceMode) -> Self {
        let stages = stages
            .iter()
            .map(|(machine, layers)| StageProfile { gpus: vec![*machine], layers: *layers })
            .collect();
        Self { stages, member_link: link, stage_link: link, fence }
    }
}

/// Predicts the speed of `group` with `model` under `load`; `None` for a group without machines or a model
/// without layers.
pub fn predict(
    engine: EngineFamily,
    model: &ModelProfile,
    group: &GroupTopology,
    load: Load,
) -> Option<Speed> {
    predict_with(engine, &engine.coefficients(), model, group, load)
}

/// The same as `predict` with other coefficients, for fitting.
pub fn predict_with(
    engine: EngineFamily,
    coefficients: &Coefficients,
    model: &ModelProfile,
    group: &GroupTopology,
    load: Load,
) -> Option<Speed> {
    let empty = group.stages.is_empty() || group.stages.iter().any(|stage| stage.gpus.is_empty());
    if empty || model.layers == 0 {
        return None;
    }
    let run = Estimator { engine, coefficients, model, group };
    let streams = load.streams.max(1);
    let step = run.step(load.context, streams);
    let prompt = load.prompt.max(1);
    let prefill = run.prefill(prompt);
    let ttft = prefill + run.step(load.prompt, 1);
    Some(Speed {
        decode: 1.0 / step,
        total: f64::from(streams) / step,
        ttft,
        prefill: f64::from(prompt) / if engine.evaluates_caches_only() { ttft } else { prefill },
    })
}

/// One prediction's arguments.
struct Estimator<'a> {
    engine: EngineFamily,
    coefficients: &'a Coefficients,
    model: &'a ModelProfile,
    group: &'a GroupTopology,
}

impl Estimator<'_> {
    /// Seconds of one decode step for `streams` streams.
    fn step(&self, context: u32, streams: u32) -> f64 {
        let read = self.model.kv_read(context) * f64::from(streams);
        let attended = self.model.attention * f64::from(context) * f64::from(streams);
        self.stages(|stage, machine, first| {
            let part = self.member_share(stage);
            let bytes = self.weights(f64::from(streams), part, first) + read * part;
            bytes / (READ_EFFICIENCY * machine.bandwidth)
                + self.extra_products(streams, machine) * self.model.active * part / machine.flops
                + self.latency(stage, machine)
                + self.coefficients.attention * 2.0 * attended * part / machine.flops
        }) + self.message_seconds(streams, 1)
    }

    /// Sum over the stages, each as slow as its slowest member. `cost` gets whether the stage is the first.
    fn stages(&self, cost: impl Fn(&StageProfile, &GpuProfile, bool) -> f64) -> f64 {
        let stages = self.group.stages.iter().enumerate();
        stages
            .map(|(index, stage)| {
                stage.gpus.iter().map(|machine| cost(stage, machine, index == 0)).fold(0.0, f64::max)
            })
            .sum()
    }

    /// One member's share of the layers.
    fn member_share(&self, stage: &StageProfile) -> f64 {
        f64::from(stage.layers) / f64::from(self.model.layers) / stage.gpus.len() as f64
    }

    /// Bytes of weights that one member reads for `tokens` computed together. Different tokens choose
    /// different experts; the head is not sharded.
    fn weights(&self, tokens: f64, part: f64, first: bool) -> f64 {
        let model = self.model;
        let head = if first { model.head_bytes } else { 0.0 };
        let experts =
            model.experts.map_or(0.0, |experts| experts.bytes * (experts.read_factor(tokens) - 1.0));
        (model.bytes - model.head_bytes + experts) * part + head
    }

    /// Operations per weight of the products for streams beyond the first. A few rows run as that many vector
    /// products, each unpacking the weights again, until a tile of the matrix kernel is cheaper.
    fn extra_products(&self, streams: u32, machine: &GpuProfile) -> f64 {
        let rows = f64::from(MATMUL_TILE_ROWS);
        let matrix = 2.0 / self.coefficients.gemm + self.load_ops(machine) / rows;
        let each = if self.model.quantised { UNPACK_OPS } else { matrix };
        let tiles = matrix * rows * f64::from(streams.div_ceil(MATMUL_TILE_ROWS));
        (each * f64::from(streams - 1)).min(tiles) / machine.matmul_speedup
    }

    /// Seconds of the kernel chain of every layer, whatever it reads.
    fn latency(&self, stage: &StageProfile, machine: &GpuProfile) -> f64 {
        let expert = if self.model.experts.is_some() { self.coefficients.expert } else { 0.0 };
        let cycles = self.coefficients.layer + expert + self.coefficients.core * machine.cores;
        f64::from(stage.layers) * cycles / machine.clock()
    }

    /// Seconds of messages for `tokens` computed together in `passes`.
    fn message_seconds(&self, tokens: u32, passes: u32) -> f64 {
        let (tokens, passes) = (f64::from(tokens), f64::from(passes));
        let bytes = |values: u32| f64::from(values) * HIDDEN_VALUE_BYTES * tokens / passes;
        let state = bytes(self.model.hidden);
        let fence = self.engine.fence(self.group.fence);
        let reduces = self.group.stages.iter().filter(|stage| stage.gpus.len() > 1).map(|stage| {
            let ranks = stage.gpus.len() as u32;
            2.0 * f64::from(stage.layers) * (self.group.member_link.all_reduce(ranks, state) + fence)
        });
        // Every stage but the last receives, with the inputs of the layers from its own on.
        let receivers = self.group.stages.iter().take(self.group.stages.len().saturating_sub(1));
        let mut ahead = 0_u32;
        let hops = receivers.map(|stage| {
            ahead = ahead.saturating_add(stage.layers);
            let received = self.model.hidden.saturating_add(self.model.per_layer_input.saturating_mul(ahead));
            self.group.stage_link.hop(bytes(received)) + self.coefficients.hop
        });
        passes * (reduces.sum::<f64>() + hops.sum::<f64>())
    }
}

#[cfg(test)]
mod tests;
