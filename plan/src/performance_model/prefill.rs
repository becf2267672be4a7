//! Prefill: the seconds of a prompt's chunks. Not here: the step that gives the first token.
//!
//! A product runs in tiles: a tile loads its weights once, and computes all its rows even if few are used. Rows of an
//! expert that do not fill a tile cost a whole one, so experts with few tokens each are slow.

use super::{Estimator, Experts, GpuProfile, MATMUL_TILE_ROWS, READ_EFFICIENCY, UNPACK_OPS};

/// Tokens of a chunk.
const CHUNK_TOKENS: u32 = 2048;
/// Rows of a tile of MLX's kernel for experts whose tokens are sorted, on shaders (`gather_qmm_rhs`).
const EXPERT_TILE_ROWS: u32 = 16;
/// Rows of a tile of MLX's kernels on matrix units, with and without experts (`qmm_t_nax`, `gather_qmm_rhs_nax`).
const MATRIX_UNIT_TILE_ROWS: u32 = 64;
/// Mean tokens of an expert from which MLX sorts them; fewer are products of vectors (`GatherQMM`).
const MIN_SORTED_TOKENS: f64 = 4.0;
/// Operations of MLX's kernels per weight that a tile loads. Tiles of 16 rows are 6 to 13 % slower than those of 32 by
/// the row (MLX's issues 4246 and 3918, M3), which is 5 to 11 operations; the number of bits makes no difference (its
/// pull request 2946).
const LOAD_OPS: f64 = 8.0;
/// The same where a tile unpacks quantised weights in BF16 and the GPU emulates it: an M2 Pro reaches 0.6 of its F16
/// products (Rapid-MLX's issue 3058), and an M2 Max prefills a 27B of 4 bits at 133 tokens per second (3154).
const EMULATED_LOAD_OPS: f64 = 54.0;

impl Estimator<'_> {
    /// Seconds to prefill the prompt, of at least one token.
    pub(super) fn prefill(&self, prompt: u32) -> f64 {
        let caches_only = self.engine.evaluates_caches_only();
        let prompt = if caches_only { prompt - 1 } else { prompt };
        let (whole, rest) = (prompt / CHUNK_TOKENS, prompt % CHUNK_TOKENS);
        let chunks = whole + u32::from(rest > 0);
        // Every token attends to those before it, half the prompt on average.
        let attended = self.model.attention * f64::from(prompt) * f64::from(prompt) / 2.0;
        let stages = self.stages(|stage, machine, first| {
            let part = self.member_share(stage);
            let chunk = |tokens: u32| {
                self.weights(f64::from(tokens), part, first && !caches_only)
                    / (READ_EFFICIENCY * machine.bandwidth)
                    + self.product_ops(tokens, machine) * part / machine.flops
                    + self.latency(stage, machine)
            };
            f64::from(whole) * chunk(CHUNK_TOKENS)
                + if rest > 0 { chunk(rest) } else { 0.0 }
                + 2.0 * attended * part / (self.coefficients.gemm * machine.flops)
        });
        let messages = if chunks > 0 { self.message_seconds(prompt, chunks) } else { 0.0 };
        self.coefficients.start + stages + messages
    }

    /// Operations of the products of a chunk with all weights.
    fn product_ops(&self, tokens: u32, machine: &GpuProfile) -> f64 {
        let model = self.model;
        if !self.engine.evaluates_caches_only() {
            let rows = tokens.div_ceil(MATMUL_TILE_ROWS) * MATMUL_TILE_ROWS;
            return 2.0 * f64::from(rows) * model.active / (self.coefficients.gemm * machine.matmul_speedup);
        }
        let (tile, expert_tile) = if machine.matmul_speedup > 1.0 {
            (MATRIX_UNIT_TILE_ROWS, MATRIX_UNIT_TILE_ROWS)
        } else {
            (MATMUL_TILE_ROWS, EXPERT_TILE_ROWS)
        };
        // Of the last layer with a cache only keys and values are needed.
        let needed = f64::from(model.cache_layers.min(model.layers - 1)) / f64::from(model.layers);
        let routed = model.experts.map_or(0.0, |experts| experts.active);
        let dense = (model.active - model.head - routed).max(0.0);
        let tokens = f64::from(tokens);
        let vectors = UNPACK_OPS * tokens / machine.matmul_speedup;
        let tiles = |count: f64, rows: u32| {
            let matrix = 2.0 / (self.coefficients.gemm * machine.matmul_speedup);
            count * (matrix * f64::from(rows) + self.load_ops(machine))
        };
        let mut each = tiles((tokens / f64::from(tile)).ceil(), tile);
        if model.quantised {
            each = each.min(vectors);
        }
        let sorted = |experts: Experts| {
            let tokens_each = tokens * f64::from(experts.used) / f64::from(experts.count.max(1));
            if model.quantised && tokens_each < MIN_SORTED_TOKENS {
                return vectors;
            }
            // A tile with rows of several experts is computed once for each.
            tiles(tokens / f64::from(expert_tile) + experts.read_factor(tokens), expert_tile)
        };
        needed * (dense * each + routed * model.experts.map_or(0.0, sorted))
    }

    /// Operations per weight that a tile loads; in other engines their share of the peak includes it.
    pub(super) fn load_ops(&self, machine: &GpuProfile) -> f64 {
        if !self.engine.evaluates_caches_only() {
            0.0
        } else if machine.emulates_bfloat16 && self.model.bfloat16 && self.model.quantised {
            EMULATED_LOAD_OPS
        } else {
            LOAD_OPS
        }
    }
}
