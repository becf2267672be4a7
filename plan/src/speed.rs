//! The performance model: how fast a group will answer, from what its machines read and compute, what the
//! model makes them read, and what a message costs on their links. Prediction only: placing uses it, and what
//! running groups measure corrects it (`measured`). `docs/planner-speed.md` holds the formula and its
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

pub mod engine;
pub mod link;
pub mod measured;
pub mod model;

pub use engine::{Coefficients, Engine};
pub use link::{Fence, Link};
pub use measured::Corrections;
pub use model::{Experts, Model, Weights, Window};

/// Share of the stated bandwidth that a long read reaches: 340 of 400 GB/s seen on GPUs of these chips.
/// Fitting it instead gives 0.85 for MLX as well.
const READ: f64 = 0.85;
/// Rows of a tile of the matrix kernels: a product with fewer rows costs as much as one with this many.
const TILE: u32 = 32;
/// Tokens of a prompt that engines compute at once.
const CHUNK: u32 = 2048;
/// Operations for one quantised weight and one stream beyond the first, which unpacks the weights anew: on an
/// M3 Ultra a product of 2, 4 and 8 rows costs 1.8, 3.3 and 6.1 times that of one (MLX's issue 4265), which is
/// 13 with 60 cores and 17 with 80. Fitting it to batched rates gives 16.
const STREAM: f64 = 15.0;
/// Flops a core of the GPU does in a cycle: 128 lanes that multiply and add.
const FLOPS: f64 = 256.0;
/// Bytes of one value of the hidden state on a link.
const VALUE: f64 = 2.0;

/// What a machine's GPU can do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// Bytes it reads in a second at best.
    pub bandwidth: f64,
    /// Flops of its shaders in a second.
    pub flops: f64,
    /// Cores of its GPU.
    pub cores: f64,
    /// How much faster than its shaders it multiplies large matrices.
    pub neural: f64,
}

impl Machine {
    /// Seconds in which MLX reads `bytes` and runs the kernels of `layers`, for one token.
    pub fn step(&self, bytes: f64, layers: u32) -> f64 {
        let by = Engine::Mlx.coefficients();
        let cycles = by.layer + by.core * self.cores;
        bytes / (READ * self.bandwidth) + f64::from(layers) * cycles / self.clock()
    }

    /// Cycles of the GPU in a second.
    pub fn clock(&self) -> f64 {
        self.flops / (self.cores * FLOPS)
    }
}

/// Machines that hold the same layers, each an equal part of every one.
#[derive(Clone, Debug, PartialEq)]
pub struct Stage {
    /// The members.
    pub machines: Vec<Machine>,
    /// Layers they hold.
    pub layers: u32,
}

/// A replica as it is spread: one stage of one machine, a pipeline, a tensor group, or both.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// The stages; the first holds the head, as rank 0 does.
    pub stages: Vec<Stage>,
    /// The worst link between members of a stage.
    pub members: Link,
    /// The worst link between neighbouring stages.
    pub neighbours: Link,
    /// How MLX waits for a collective on Metal.
    pub fence: Fence,
}

/// What is asked of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Tokens in the cache while answering, on average.
    pub context: u32,
    /// Streams answered at once.
    pub streams: u32,
}

/// How fast a group answers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// Tokens a second of every stream.
    pub decode: f64,
    /// Tokens a second of all streams together.
    pub total: f64,
    /// Seconds from the prompt to the first token, nobody else being served.
    pub ttft: f64,
    /// Tokens of the prompt computed in a second.
    pub prefill: f64,
}

impl Group {
    /// A replica on one machine.
    pub fn single(machine: Machine, layers: u32) -> Self {
        Self::tensor(vec![machine], layers, Link::RDMA, Fence::Fast)
    }

    /// Machines that share every layer.
    pub fn tensor(machines: Vec<Machine>, layers: u32, link: Link, fence: Fence) -> Self {
        Self { stages: vec![Stage { machines, layers }], members: link, neighbours: link, fence }
    }

    /// A pipeline of machines, each with its number of layers.
    pub fn pipeline(stages: &[(Machine, u32)], link: Link, fence: Fence) -> Self {
        let stages = stages
            .iter()
            .map(|(machine, layers)| Stage { machines: vec![*machine], layers: *layers })
            .collect();
        Self { stages, members: link, neighbours: link, fence }
    }
}

/// How fast `group` runs `model` under `load`; `None` for a group without machines or a model without layers.
pub fn predict(engine: Engine, model: &Model, group: &Group, load: Load) -> Option<Speed> {
    predict_with(engine, &engine.coefficients(), model, group, load)
}

/// What `predict` does, with other coefficients, which is how they are fitted.
pub fn predict_with(
    engine: Engine,
    coefficients: &Coefficients,
    model: &Model,
    group: &Group,
    load: Load,
) -> Option<Speed> {
    let empty = group.stages.is_empty() || group.stages.iter().any(|stage| stage.machines.is_empty());
    if empty || model.layers == 0 {
        return None;
    }
    let run = Run { engine, by: coefficients, model, group };
    let streams = load.streams.max(1);
    let step = run.step(load.context, streams);
    let prefill = run.prefill(load.prompt.max(1));
    Some(Speed {
        decode: 1.0 / step,
        total: f64::from(streams) / step,
        ttft: prefill + run.step(load.prompt, 1),
        prefill: f64::from(load.prompt.max(1)) / prefill,
    })
}

/// One prediction's arguments.
struct Run<'a> {
    engine: Engine,
    by: &'a Coefficients,
    model: &'a Model,
    group: &'a Group,
}

impl Run<'_> {
    /// Seconds of one step that gives each of `streams` a token.
    fn step(&self, context: u32, streams: u32) -> f64 {
        let read = self.model.kv_read(context) * f64::from(streams);
        let attended = self.model.attention * f64::from(context) * f64::from(streams);
        self.stages(|stage, machine, first| {
            let part = self.part(stage);
            let bytes = self.weights(f64::from(streams), part, first) + read * part;
            bytes / (READ * machine.bandwidth)
                + self.extra_products(streams, machine) * self.model.active * part / machine.flops
                + self.latency(stage, machine)
                + self.by.attention * 2.0 * attended * part / machine.flops
        }) + self.between(streams, 1)
    }

    /// Seconds until the whole prompt is in the cache.
    fn prefill(&self, prompt: u32) -> f64 {
        let (whole, rest) = (prompt / CHUNK, prompt % CHUNK);
        let tokens = f64::from(prompt);
        let products = f64::from(whole * CHUNK + rest.div_ceil(TILE) * TILE);
        // Every token attends to those before it, half the prompt on average.
        let attended = self.model.attention * tokens * tokens / 2.0;
        let chunks = whole + u32::from(rest > 0);
        self.stages(|stage, machine, first| {
            let part = self.part(stage);
            let reads = f64::from(whole) * self.weights(f64::from(CHUNK), part, first)
                + if rest > 0 { self.weights(f64::from(rest), part, first) } else { 0.0 };
            reads / (READ * machine.bandwidth)
                + 2.0 * products * self.model.active * part / (self.by.gemm * machine.neural * machine.flops)
                + 2.0 * attended * part / (self.by.gemm * machine.flops)
                + f64::from(chunks) * self.latency(stage, machine)
        }) + self.between(prompt, chunks)
    }

    /// The stages one after another, each as slow as its slowest member. `cost` is told whether the
    /// stage is the first.
    fn stages(&self, cost: impl Fn(&Stage, &Machine, bool) -> f64) -> f64 {
        let stages = self.group.stages.iter().enumerate();
        stages
            .map(|(index, stage)| {
                stage.machines.iter().map(|machine| cost(stage, machine, index == 0)).fold(0.0, f64::max)
            })
            .sum()
    }

    /// What one member holds of the whole body.
    fn part(&self, stage: &Stage) -> f64 {
        f64::from(stage.layers) / f64::from(self.model.layers) / stage.machines.len() as f64
    }

    /// Bytes of weights one member reads for `tokens` computed together. Different tokens choose different
    /// experts; the head is not cut.
    fn weights(&self, tokens: f64, part: f64, first: bool) -> f64 {
        let model = self.model;
        let head = if first { model.head_bytes } else { 0.0 };
        let experts = model.experts.map_or(0.0, |experts| experts.bytes * (experts.spread(tokens) - 1.0));
        (model.bytes - model.head_bytes + experts) * part + head
    }

    /// Operations for each weight of the products that streams beyond the first add. A few rows run as
    /// many vector products, each unpacking the weights anew, until a tile of the matrix kernel is cheaper.
    fn extra_products(&self, streams: u32, machine: &Machine) -> f64 {
        let matrix = 2.0 / self.by.gemm;
        let each = if self.model.quantised { STREAM } else { matrix };
        let tiles = matrix * f64::from(streams.div_ceil(TILE) * TILE);
        (each * f64::from(streams - 1)).min(tiles) / machine.neural
    }

    /// Seconds of the chain of kernels that every layer is, whatever they read.
    fn latency(&self, stage: &Stage, machine: &Machine) -> f64 {
        let expert = if self.model.experts.is_some() { self.by.expert } else { 0.0 };
        let cycles = self.by.layer + expert + self.by.core * machine.cores;
        f64::from(stage.layers) * cycles / machine.clock()
    }

    /// Seconds of messages for `tokens` computed together in `passes`.
    fn between(&self, tokens: u32, passes: u32) -> f64 {
        let (tokens, passes) = (f64::from(tokens), f64::from(passes));
        let state = f64::from(self.model.hidden) * VALUE * tokens / passes;
        let fence = self.engine.fence(self.group.fence);
        let reduces = self.group.stages.iter().filter(|stage| stage.machines.len() > 1).map(|stage| {
            let ranks = stage.machines.len() as u32;
            2.0 * f64::from(stage.layers) * (self.group.members.all_reduce(ranks, state) + fence)
        });
        let hop = self.group.neighbours.hop(state) + self.by.hop;
        passes * (reduces.sum::<f64>() + hop * (self.group.stages.len() as f64 - 1.0))
    }
}

#[cfg(test)]
mod tests;
