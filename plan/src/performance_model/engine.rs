//! Coefficients of measured engines: at most six numbers each, fitted on the rows of `throughput.csv` that
//! are not `claimed`, with the least Huber loss of the logarithm of predicted over measured.
//! `tests/throughput.rs` refits them and checks that these constants are the optimum.

use super::FenceMode;

/// A family of engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EngineFamily {
    /// MLX, with any front end: Russet's own, mlx-lm, exo, omlx, vllm-mlx, Rapid-MLX, ax-engine.
    Mlx,
    /// llama.cpp with Metal, and Ollama.
    LlamaCpp,
    /// ds4, which runs DeepSeek V4.
    Ds4,
}

/// Fitted coefficients of an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Coefficients {
    /// GPU cycles per layer regardless of its reads: launching its chain of kernels, filling and draining the
    /// cores.
    pub layer: f64,
    /// GPU cycles of that per core of the GPU.
    pub core: f64,
    /// Additional GPU cycles of a layer with experts: router, selection, gathered products.
    pub expert: f64,
    /// Shader operations per flop of attention over the cache.
    pub attention: f64,
    /// Share of the peak that products of large matrices reach; in MLX while no weights are loaded.
    pub gemm: f64,
    /// Seconds of a prompt whatever its length, before its first chunk.
    pub start: f64,
    /// Seconds of a hop between stages beyond the link's own.
    pub hop: f64,
}

/// Six fitted, on 97 rows of one stream on one node, 15 batched, 20 of clusters and 41 of prefill; the hop
/// is the link's.
const MLX: Coefficients = Coefficients {
    layer: 47_800.0,
    core: 999.0,
    expert: 166_000.0,
    attention: 3.01,
    gemm: 0.807,
    start: 0.027_5,
    hop: 0.0,
};

/// Five fitted, on 92 rows of one node, 70 of prefill and 4 of pipelines. More cores do not slow its layers:
/// that coefficient fits to zero.
const LLAMA_CPP: Coefficients = Coefficients {
    layer: 193_000.0,
    core: 0.0,
    expert: 73_000.0,
    attention: 15.0,
    gemm: 0.677,
    start: 0.0,
    hop: 0.004_6,
};

/// Four fitted, on 13 rows of one node, 10 of prefill and 4 of clusters, all of one model whose layers all
/// have experts, so the cycles of a layer are llama.cpp's and those of its experts are fitted.
const DS4: Coefficients = Coefficients {
    layer: LLAMA_CPP.layer,
    core: LLAMA_CPP.core,
    expert: 468_000.0,
    attention: 3.57,
    gemm: 0.515,
    start: 0.0,
    hop: 0.003_84,
};

impl EngineFamily {
    /// The fitted coefficients.
    pub fn coefficients(self) -> Coefficients {
        match self {
            EngineFamily::Mlx => MLX,
            EngineFamily::LlamaCpp => LLAMA_CPP,
            EngineFamily::Ds4 => DS4,
        }
    }

    /// Whether prefill evaluates the caches and nothing else. MLX is lazy: of a prompt's tokens it computes
    /// neither the head nor what follows the last cache, and the prompt's last token is the first step.
    pub(super) fn evaluates_caches_only(self) -> bool {
        self == EngineFamily::Mlx
    }

    /// Seconds that the GPU waits for the CPU around a collective. Only MLX runs collectives on the CPU
    /// between kernels.
    pub(super) fn fence(self, fence: FenceMode) -> f64 {
        match self {
            EngineFamily::Mlx => fence.seconds(),
            EngineFamily::LlamaCpp | EngineFamily::Ds4 => 0.0,
        }
    }
}
