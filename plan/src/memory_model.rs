//! The memory model: memory that a part of a model takes on its node. It reserves the whole KV cache up
//! front, so that full sequences never take memory that was not granted.
//!
//! ```text
//! rank = weights of its layers (+ embedding and what makes per-layer inputs, + head, + embedding again for a tied head
//!        elsewhere)
//!      + KV per token per layer in its format × its layers × capacity: context × sequences, or as set
//!        (of a tensor group: its share of projections and KV; norms, embedding and head are whole)
//!      + max(headroom % of the two, the engine itself + work)
//! rank 0 also = weights, KV as computed and work of the draft model, if there is one, at the same capacity
//! every rank also = all adapters, and what they add to the longest rows of a prefill chunk
//! work = hidden states, MLP and projections of a prefill chunk (the last two a share in a tensor group)
//!      + attention scores, bounded by the engine + the last step of every cache + growing caches + logits
//! ```

mod adapters;

use std::fmt;
use std::ops::Range;

use russet_crds::{Adapter, EngineOptions, KvCacheType};
use russet_model::cost::{Load, Widths, activation_bytes, quantised_kv_bytes};
use russet_model::partition::RankPart;
use russet_model::shape::{ExpertGroup, LayerGroup, ModelShape};
use russet_model::state::LayerState;

use crate::quantity::show;
use crate::search_budget::SearchBudget;

pub use adapters::{AdapterOverhead, DeployedAdapter};

/// Bytes that an engine takes before it loads a weight: its program, MLX, the tokenizer, gRPC buffers. An
/// engine on Linux with MLX's CPU backend stays below 150 MiB; the rest is for Metal's start.
pub const ENGINE_BASE_BYTES: u64 = 192 << 20;

/// KV-cache capacity, resolved against the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServingCapacity {
    /// Maximum context length in tokens, at most the model's own limit.
    pub context_tokens: u32,
    /// Maximum number of concurrent sequences.
    pub max_sequences: u32,
    /// Tokens of all sequences together, if less than the product.
    pub kv_tokens: Option<u64>,
    /// Additional reserve, percent.
    pub headroom_percent: u32,
    /// Engine options, which determine the bytes of a token.
    pub engine: EngineOptions,
}

impl ServingCapacity {
    /// Tokens for which KV cache is reserved, all sequences together.
    pub fn reserved_tokens(&self) -> u64 {
        let most = u64::from(self.context_tokens) * u64::from(self.max_sequences);
        self.kv_tokens.map_or(most, |tokens| tokens.min(most))
    }
}

/// A draft model; rank 0 holds all of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraftModelShape {
    /// Name of the Model, of the same namespace.
    pub name: String,
    /// Its sizes.
    pub shape: ModelShape,
}

/// Memory of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// Bytes of weights.
    pub weights: u64,
    /// Bytes of KV cache.
    pub kv: u64,
    /// Bytes of overhead.
    pub overhead: u64,
}

impl fmt::Display for MemoryEstimate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemoryEstimate { weights, kv, overhead } = *self;
        let parts = [weights, kv, overhead].map(show);
        write!(
            out,
            "{} on one node: {} weights + {} KV cache + {} workspace and headroom",
            show(self.total()),
            parts[0],
            parts[1],
            parts[2]
        )
    }
}

impl MemoryEstimate {
    /// The sum.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.overhead)
    }
}

/// Memory that a draft model adds on the node of rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftOverhead {
    /// Name of its Model.
    pub model: String,
    /// Bytes, as part of rank 0's.
    pub estimate: MemoryEstimate,
}

impl fmt::Display for DraftOverhead {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DraftOverhead { model, estimate: need } = self;
        write!(out, "{} for the draft model {model}, beside rank 0", show(need.total()))
    }
}

/// A model and its capacity, prepared so that any run of layers is summed at once.
#[derive(Clone, Debug)]
pub struct MemoryModel<'a> {
    shape: &'a ModelShape,
    capacity: ServingCapacity,
    /// `cumulative[i]` is the sum of the first `i` layers.
    cumulative: Vec<LayerCosts>,
    /// Runs of layers that one stage holds.
    kept_together: Vec<Range<u32>>,
    draft: Option<DraftOverhead>,
    adapters: &'a [DeployedAdapter],
    adapter_overhead: AdapterOverhead,
    search: SearchBudget,
}

/// Bytes of some layers, on all ranks of a tensor group together.
#[derive(Clone, Copy, Debug, Default)]
struct LayerCosts {
    /// Weights.
    weights: u64,
    /// Weights that every rank holds.
    replicated: u64,
    /// Weights that make keys and values.
    kv_weights: u64,
    /// Weights of experts that a token does not activate.
    inactive: u64,
    /// Keys and values of the sequences.
    kv_state: u64,
    /// State that the ranks share whatever the KV heads.
    state: u64,
    /// State that every rank holds.
    replicated_state: u64,
}

impl<'a> MemoryModel<'a> {
    /// Prepares `shape`; its `layer_bytes` must be one per layer, which validation ensures.
    pub fn new(shape: &'a ModelShape, capacity: ServingCapacity) -> Self {
        let mut cumulative = vec![LayerCosts::default()];
        let mut last = LayerCosts::default();
        for group in shape.groups() {
            let LayerGroup {
                count,
                weight_bytes,
                replicated_bytes,
                kv_bytes,
                state,
                experts,
                // A layer that reads the cache of another keeps no state.
                shares_cache_of: _,
            } = group;
            let per_token_bytes = cached_bytes(shape, &capacity, state.per_token_bytes, state.replicated);
            let state_bytes = LayerState { per_token_bytes, ..state }.bytes(
                capacity.reserved_tokens(),
                u64::from(capacity.max_sequences),
                1,
            );
            let inactive = experts.map_or(0, |ExpertGroup { count, used, weight_bytes }| {
                weight_bytes / u64::from(count.max(1)) * u64::from(count.saturating_sub(used))
            });
            for _ in 0..count {
                last.weights = last.weights.saturating_add(weight_bytes);
                last.replicated = last.replicated.saturating_add(replicated_bytes.min(weight_bytes));
                last.inactive = last.inactive.saturating_add(inactive.min(weight_bytes));
                let own = weight_bytes.saturating_sub(replicated_bytes);
                last.kv_weights = last.kv_weights.saturating_add(kv_bytes.min(own));
                let sum = match state {
                    LayerState { replicated: true, .. } => &mut last.replicated_state,
                    LayerState { per_token_bytes: 0, .. } => &mut last.state,
                    _ => &mut last.kv_state,
                };
                *sum = sum.saturating_add(state_bytes);
                cumulative.push(last);
            }
        }
        let kept_together = shape.kept_together();
        Self {
            shape,
            capacity,
            cumulative,
            kept_together,
            draft: None,
            adapters: &[],
            adapter_overhead: AdapterOverhead::default(),
            search: SearchBudget::default(),
        }
    }

    /// The same with a draft model, which rank 0 holds too.
    pub fn with_draft(self, draft: Option<&DraftModelShape>) -> Self {
        let addition = |DraftModelShape { name, shape }: &DraftModelShape| {
            // Engines keep the draft model's cache as computed, whatever the format of the model's.
            let room =
                ServingCapacity { engine: EngineOptions::default(), headroom_percent: 0, ..self.capacity };
            let MemoryEstimate { weights, kv, overhead } = MemoryModel::new(shape, room).whole_model();
            // One engine process has both.
            let need = MemoryEstimate { weights, kv, overhead: overhead.saturating_sub(ENGINE_BASE_BYTES) };
            DraftOverhead { model: name.clone(), estimate: need }
        };
        let draft = draft.map(addition);
        Self { draft, ..self }
    }

    /// The same with adapters.
    pub fn with_adapters(self, adapters: &'a [DeployedAdapter]) -> Self {
        Self { adapters, adapter_overhead: AdapterOverhead::of(adapters), ..self }
    }

    /// The adapters, by name.
    pub fn adapters(&self) -> impl Iterator<Item = &Adapter> {
        self.adapters.iter().map(|deployed| &deployed.adapter)
    }

    /// What the adapters add to every rank.
    pub fn adapter_overhead(&self) -> AdapterOverhead {
        self.adapter_overhead
    }

    /// What the draft model adds to rank 0.
    pub fn draft(&self) -> Option<&DraftOverhead> {
        self.draft.as_ref()
    }

    /// What searches over this model have cost; a clone counts with it.
    pub fn search_budget(&self) -> &SearchBudget {
        &self.search
    }

    /// Layers of the model.
    pub fn layers(&self) -> u32 {
        self.cumulative.len() as u32 - 1
    }

    /// Whether a stage may begin with this layer.
    pub fn may_cut_before(&self, layer: u32) -> bool {
        !self.kept_together.iter().any(|run| run.start < layer && layer < run.end)
    }

    /// Most stages of a pipeline.
    pub fn max_stages(&self) -> u32 {
        self.shape.max_stages()
    }

    /// The capacity this was prepared for.
    pub fn capacity(&self) -> ServingCapacity {
        self.capacity
    }

    /// Memory of a single rank with the whole model.
    pub fn whole_model(&self) -> MemoryEstimate {
        self.estimate(0..self.layers(), true, true)
    }

    /// Memory of a rank that holds these layers alone.
    pub fn estimate(&self, layers: Range<u32>, embedding: bool, head: bool) -> MemoryEstimate {
        self.sharded_estimate(layers, embedding, head, 1)
    }

    /// Memory of `part`.
    pub fn rank_estimate(&self, part: &RankPart) -> MemoryEstimate {
        let RankPart {
            rank: _,
            size: _,
            stage: _,
            stages: _,
            tensor_index: _,
            tensor_size,
            layers,
            embedding,
            head,
        } = part;
        self.sharded_estimate(layers.clone(), *embedding, *head, *tensor_size)
    }

    /// Memory of one of `size` ranks that share these layers, with or without embedding and head.
    pub fn sharded_estimate(
        &self,
        layers: Range<u32>,
        embedding: bool,
        head: bool,
        size: u32,
    ) -> MemoryEstimate {
        let count = u64::from(layers.end.saturating_sub(layers.start));
        let ranks = self.ranks(size);
        let own = self.layer_costs(layers);
        let mut weights = own.share_of(own.weights, ranks);
        if embedding || (head && self.shape.tied) {
            weights = weights.saturating_add(self.shape.embedding_bytes);
        }
        if embedding {
            weights = weights.saturating_add(self.shape.per_layer_input_bytes);
        }
        if head {
            weights = weights.saturating_add(self.shape.head_bytes);
        }
        let kv = own
            .replicated_state
            .saturating_add(own.state.div_ceil(ranks.size))
            .saturating_add(own.kv_state.div_ceil(ranks.kv));
        // The rank that has the head is rank 0.
        let draft = self.draft.as_ref().filter(|_| head).map(|draft| draft.estimate).unwrap_or_default();
        let need = MemoryEstimate {
            weights: weights.saturating_add(draft.weights).saturating_add(self.adapter_overhead.weights),
            kv: kv.saturating_add(draft.kv),
            overhead: 0,
        };
        let work = self.base_overhead(count, head, ranks).saturating_add(draft.overhead);
        let work = work.saturating_add(self.adapter_overhead.work());
        MemoryEstimate { overhead: self.headroom(&need).max(work), ..need }
    }

    /// The requested headroom on top of weights and KV cache.
    pub fn headroom(&self, need: &MemoryEstimate) -> u64 {
        let both = u128::from(need.weights.saturating_add(need.kv));
        u64::try_from(both * u128::from(self.capacity.headroom_percent) / 100).unwrap_or(u64::MAX)
    }

    /// Bytes that one of `size` ranks sharing these layers reads per token: the cost of a pipeline stage. The
    /// embedding is a look-up and costs nothing; the head is a product with the whole vocabulary.
    pub fn bytes_read_per_token(&self, layers: Range<u32>, head: bool, size: u32) -> u64 {
        let own = self.layer_costs(layers);
        let active = own.weights.saturating_sub(own.inactive);
        let mut bytes = own.share_of(active, self.ranks(size));
        if head {
            bytes = bytes.saturating_add(self.shape.head_bytes);
            if self.shape.tied {
                bytes = bytes.saturating_add(self.shape.embedding_bytes);
            }
        }
        bytes
    }

    /// KV-cache bytes of one token in one layer, in the requested format; the largest of all layers.
    pub fn kv_bytes_per_token(&self) -> u64 {
        cached_bytes(self.shape, &self.capacity, self.shape.kv_bytes_per_token_per_layer, false)
    }

    fn ranks(&self, size: u32) -> Ranks {
        let size = size.max(1);
        let (parts, of) = self.shape.largest_share(size);
        Ranks {
            size: u64::from(size),
            kv: u64::from(self.shape.kv_ranks(size)),
            largest: (u64::from(parts), u64::from(of)),
        }
    }

    fn layer_costs(&self, layers: Range<u32>) -> LayerCosts {
        let at = |index: u32| {
            self.cumulative.get(index as usize).or(self.cumulative.last()).copied().unwrap_or_default()
        };
        let (from, to) = (at(layers.start), at(layers.end));
        LayerCosts {
            weights: to.weights.saturating_sub(from.weights),
            replicated: to.replicated.saturating_sub(from.replicated),
            inactive: to.inactive.saturating_sub(from.inactive),
            kv_weights: to.kv_weights.saturating_sub(from.kv_weights),
            kv_state: to.kv_state.saturating_sub(from.kv_state),
            state: to.state.saturating_sub(from.state),
            replicated_state: to.replicated_state.saturating_sub(from.replicated_state),
        }
    }

    /// The engine itself and its temporaries, on one of the ranks that share `count` layers.
    fn base_overhead(&self, count: u64, head: bool, ranks: Ranks) -> u64 {
        let ModelShape { hidden_size, attention_heads, key_value_heads, head_dim, vocabulary, .. } =
            *self.shape;
        let [hidden, heads, kv_heads, head_dim] =
            [hidden_size, attention_heads, key_value_heads, head_dim].map(u64::from);
        let of_older_headers = || Widths {
            hidden,
            heads,
            queries: heads.saturating_mul(head_dim),
            keys: kv_heads.saturating_mul(head_dim),
            // Headers read by an older release lack it; a Llama's is 3.5 times as wide as the state.
            mlp: match self.shape.intermediate_size {
                0 => hidden.saturating_mul(4),
                width => u64::from(width),
            },
            routed: 0,
            expanded: 0,
            per_layer_inputs: 0,
            vocabulary: u64::from(vocabulary),
            whole: false,
            value_bytes: self.shape.value_bytes(),
        };
        let mut widths = self.shape.widths.unwrap_or_else(of_older_headers);
        // What is computed is divided by the number of ranks.
        widths.mlp = ranks.largest(widths.mlp).saturating_mul(ranks.size);
        let load = Load {
            context: u64::from(self.capacity.context_tokens),
            sequences: u64::from(self.capacity.max_sequences),
            tokens: self.capacity.reserved_tokens(),
            layers: count,
            in_pipeline: count < u64::from(self.shape.layers),
            head,
            tensor_size: ranks.size,
            kv_ranks: ranks.kv,
            cached_bytes: self.kv_bytes_per_token(),
        };
        ENGINE_BASE_BYTES.saturating_add(activation_bytes(&widths, &load))
    }
}

/// Ranks of a tensor group.
#[derive(Clone, Copy, Debug)]
struct Ranks {
    size: u64,
    /// Those that have keys and values of their own.
    kv: u64,
    /// The largest share that one has of what they share unevenly: so many of so many parts.
    largest: (u64, u64),
}

impl Ranks {
    /// What the rank with the largest share has of `all`. Where a part is shared equally, that is too much by as much as
    /// the shares differ.
    fn largest(self, all: u64) -> u64 {
        let (parts, of) = self.largest;
        let share = (u128::from(all) * u128::from(parts)).div_ceil(u128::from(of.max(1)));
        u64::try_from(share).unwrap_or(u64::MAX)
    }
}

impl LayerCosts {
    /// What one rank holds of `all` bytes of these layers' weights.
    fn share_of(&self, all: u64, ranks: Ranks) -> u64 {
        let replicated = self.replicated.min(all);
        let kv = self.kv_weights.min(all - replicated);
        let shared = all - replicated - kv;
        replicated.saturating_add(ranks.largest(shared)).saturating_add(kv.div_ceil(ranks.kv))
    }
}

/// Bytes of a token in a cache in the form that is asked for, which take `computed` as the model computes them.
fn cached_bytes(shape: &ModelShape, capacity: &ServingCapacity, computed: u64, is_latent: bool) -> u64 {
    let bits = match capacity.engine.kv_cache {
        _ if is_latent => return computed,
        KvCacheType::AsComputed | KvCacheType::Unknown => return computed,
        KvCacheType::Int8 => 8,
        KvCacheType::Int4 => 4,
    };
    let keys = u64::from(shape.key_value_heads).saturating_mul(u64::from(shape.head_dim));
    let value_bytes = shape.value_bytes();
    // Without widths, the size of a value follows from the keys.
    let numbers = match computed == shape.kv_bytes_per_token_per_layer && shape.widths.is_none() {
        true => keys.saturating_mul(2),
        false => computed.checked_div(value_bytes).unwrap_or(0),
    };
    // Validation lets no heads pass that have no groups.
    quantised_kv_bytes(numbers, value_bytes, shape.head_dim, bits).unwrap_or(computed)
}

#[cfg(test)]
mod tests {
    use russet_model::adapter::AdapterShape;
    use russet_model::divisibility::{ShardUnit, Sharing};

    use super::*;

    fn shape(tied: bool) -> ModelShape {
        ModelShape {
            architecture: "llama".to_owned(),
            layers: 4,
            hidden_size: 0,
            embedding_bytes: 1000,
            head_bytes: if tied { 10 } else { 1010 },
            tied,
            layer_bytes: vec![100, 200, 300, 400],
            kv_bytes_per_token_per_layer: 2,
            ..ModelShape::default()
        }
    }

    #[test]
    fn every_rank_pays_for_what_it_holds() {
        let room = ServingCapacity {
            context_tokens: 10,
            max_sequences: 3,
            headroom_percent: 0,
            ..ServingCapacity::default()
        };
        for (tied, layers, embedding, head, weights, kv) in [
            (false, 0..4, true, true, 3010, 240),
            (true, 0..4, true, true, 2010, 240), // a tied head costs nothing where the embedding is
            (true, 2..4, false, true, 1710, 120), // and the embedding again where it is not
            (false, 2..4, false, true, 1710, 120),
            (true, 0..2, true, false, 1300, 120),
            (true, 1..2, false, false, 200, 60),
        ] {
            let shape = shape(tied);
            let need = MemoryModel::new(&shape, room).estimate(layers.clone(), embedding, head);
            assert_eq!((need.weights, need.kv), (weights, kv), "tied {tied}, layers {layers:?}");
            // 246 more positions in each of three caches, and two layers of a growing cache.
            let count = u64::from(layers.end - layers.start);
            assert_eq!(need.overhead, ENGINE_BASE_BYTES + 2 * (246 * count * 3 + 10 * count.min(2)));
        }
    }

    #[test]
    fn tensor_ranks_hold_a_share_of_layers_and_the_rest_whole() {
        let room = ServingCapacity {
            context_tokens: 10,
            max_sequences: 3,
            headroom_percent: 0,
            ..ServingCapacity::default()
        };
        for (embedding, head, size, weights, kv) in [
            (true, true, 1, 1000 + 1000 + 1010, 240),
            (true, true, 2, 40 + 480 + 1000 + 1010, 120), // ten bytes of each layer are norms
            (true, false, 2, 40 + 480 + 1000, 120),
            (false, false, 4, 40 + 240, 60),
        ] {
            let shape = ModelShape { replicated_layer_bytes: 10, ..shape(false) };
            let need = MemoryModel::new(&shape, room).sharded_estimate(0..4, embedding, head, size);
            assert_eq!((need.weights, need.kv), (weights, kv), "{size} ranks");
        }
    }

    #[test]
    fn ranks_that_repeat_kv_heads_repeat_weights_and_cache() {
        let room = ServingCapacity {
            context_tokens: 10,
            max_sequences: 3,
            headroom_percent: 0,
            ..ServingCapacity::default()
        };
        let state = LayerState { per_token_bytes: 2, ..LayerState::default() };
        let layers = LayerGroup {
            count: 4,
            weight_bytes: 100,
            replicated_bytes: 10,
            kv_bytes: 30,
            state,
            ..LayerGroup::default()
        };
        let shape = ModelShape {
            layer_bytes: vec![100; 4],
            layer_groups: vec![layers],
            shard_units: vec![ShardUnit::kv_heads(2)],
            ..shape(false)
        };
        let of = |shape: &ModelShape, size| {
            let need = MemoryModel::new(shape, room).sharded_estimate(0..4, false, false, size);
            (need.weights, need.kv)
        };
        for (size, weights, kv) in [(1, 400, 240), (2, 40 + 120 + 60, 120), (4, 40 + 60 + 60, 120)] {
            assert_eq!(of(&shape, size), (weights, kv), "{size} ranks");
        }
        // Six parts for four ranks: one of them has two.
        let parts = ShardUnit { sharing: Sharing::Uneven, ..ShardUnit::new(6, "columns") };
        let uneven = ModelShape { shard_units: vec![ShardUnit::kv_heads(2), parts], ..shape };
        assert_eq!(of(&uneven, 2), (40 + 120 + 60, 120));
        assert_eq!(of(&uneven, 4), (40 + 240 / 3 + 60, 120));
    }

    #[test]
    fn the_stage_with_the_embedding_makes_inputs_by_layer() {
        let room = ServingCapacity { context_tokens: 10, max_sequences: 1, ..ServingCapacity::default() };
        let shape = ModelShape { per_layer_input_bytes: 5000, ..shape(true) };
        let fit = MemoryModel::new(&shape, room);
        // Every rank of a tensor group has them whole, and a tied head has none.
        for (layers, embedding, head, size, weights) in [
            (0..4, true, true, 1, 1000 + 1000 + 5000 + 10),
            (0..4, true, false, 2, 500 + 1000 + 5000),
            (2..4, false, true, 1, 700 + 1000 + 10),
            (0..2, true, false, 1, 300 + 1000 + 5000),
            (1..2, false, false, 1, 200),
        ] {
            let need = fit.sharded_estimate(layers.clone(), embedding, head, size);
            assert_eq!(need.weights, weights, "{layers:?} on {size}");
        }
        assert_eq!(shape.total_bytes(), 1000 + 1000 + 5000 + 10);
    }

    #[test]
    fn rank_0_pays_for_the_draft_model_and_one_engine_for_both() {
        let room = ServingCapacity {
            context_tokens: 10,
            max_sequences: 3,
            headroom_percent: 0,
            ..ServingCapacity::default()
        };
        let (shape, draft) = (shape(false), DraftModelShape { name: "d".to_owned(), shape: shape(true) });
        let alone = MemoryModel::new(&draft.shape, room).whole_model();
        for (kv_cache, kv_tokens) in
            [(KvCacheType::AsComputed, None), (KvCacheType::Int8, None), (KvCacheType::AsComputed, Some(12))]
        {
            let engine = EngineOptions { kv_cache, ..EngineOptions::default() };
            let room = ServingCapacity { engine, kv_tokens, ..room };
            let (without, with) =
                (MemoryModel::new(&shape, room), MemoryModel::new(&shape, room).with_draft(Some(&draft)));
            assert_eq!(with.estimate(0..2, true, false), without.estimate(0..2, true, false), "rank 1");
            let (before, after) = (without.estimate(2..4, false, true), with.estimate(2..4, false, true));
            assert_eq!(after.weights - before.weights, 2010);
            assert_eq!(
                after.kv - before.kv,
                2 * 4 * room.reserved_tokens(),
                "as computed, whatever is asked for"
            );
            assert_eq!(with.draft().unwrap().estimate.total() + before.total(), after.total());
            if kv_tokens.is_none() {
                assert_eq!(after.overhead - before.overhead, alone.overhead - ENGINE_BASE_BYTES);
            }
        }
        let roomy = ServingCapacity { headroom_percent: 1000, ..room };
        let need = MemoryModel::new(&shape, ServingCapacity { context_tokens: 1 << 20, ..roomy })
            .with_draft(Some(&draft))
            .whole_model();
        assert_eq!(need.overhead, 10 * (need.weights + need.kv), "headroom is asked for on both");
    }

    #[test]
    fn every_rank_pays_for_all_adapters_and_one_products_values() {
        let room = ServingCapacity { context_tokens: 1000, max_sequences: 1, ..ServingCapacity::default() };
        let adapter = |bytes, widest| DeployedAdapter {
            shape: AdapterShape { bytes, widest, ..AdapterShape::default() },
            ..DeployedAdapter::default()
        };
        let adapters = [adapter(70, 3), adapter(30, 5)];
        let shape = shape(false);
        let (without, with) =
            (MemoryModel::new(&shape, room), MemoryModel::new(&shape, room).with_adapters(&adapters));
        for (layers, embedding, head, size) in
            [(0..4, true, true, 1), (0..4, true, true, 2), (0..2, true, false, 1)]
        {
            let [before, after] =
                [&without, &with].map(|fit| fit.sharded_estimate(layers.clone(), embedding, head, size));
            assert_eq!((after.weights - before.weights, after.kv - before.kv), (100, 0));
            assert_eq!(after.overhead - before.overhead, 5 * 8 * 2048, "{layers:?}");
        }
        assert_eq!(with.adapter_overhead().share(), ", of it 100 B for 2 adapters, on every rank");
    }

    #[test]
    fn work_memory_covers_prefill_decode_and_growing_caches() {
        // Llama 3 8B in 16 bits.
        let shape = ModelShape {
            hidden_size: 4096,
            attention_heads: 32,
            key_value_heads: 8,
            head_dim: 128,
            intermediate_size: 14336,
            vocabulary: 128_256,
            layer_bytes: vec![1; 32],
            kv_bytes_per_token_per_layer: 4096,
            ..ModelShape::default()
        };
        let work = |context_tokens, head, size| {
            let room = ServingCapacity {
                context_tokens,
                max_sequences: 4,
                headroom_percent: 0,
                ..ServingCapacity::default()
            };
            MemoryModel::new(&shape, room).sharded_estimate(0..32, false, head, size).overhead
                - ENGINE_BASE_BYTES
        };
        let hidden = 2048 * 4096 * 11 * 4;
        let shared = 2048 * 2 * (4 * 14336 + 7 * 4096 + 4 * 1024);
        let growing = 2 * 4096 * 8192;
        let scores = 64 << 20;
        let logits = 64 * 4 * 128_256;
        for (context, head, size, bytes) in [
            (8192, true, 1, hidden + shared + scores + growing + logits),
            (8192, false, 1, hidden + shared + scores + growing),
            (8192, false, 2, hidden + shared / 2 + scores + growing / 2),
            // One position attends to a million, which is more than the bound for many.
            (1 << 20, false, 1, hidden + shared + 32 * 2 * (1 << 20) + growing * 128),
            // A context shorter than a prefill chunk: all of it at once, and caches of 256 positions.
            (64, false, 1, (hidden + shared) / 32 + 32 * 2 * 64 * 64 + 4096 * (192 * 32 * 4 + 2 * 64)),
        ] {
            assert_eq!(work(context, head, size), bytes, "{context} tokens, {size} ranks");
        }
    }

    #[test]
    fn kv_tokens_below_the_maximum_limit_the_reservation() {
        let taken = |kv_tokens| {
            let shape = shape(false);
            let room = ServingCapacity {
                context_tokens: 1000,
                max_sequences: 8,
                kv_tokens,
                ..ServingCapacity::default()
            };
            let need = MemoryModel::new(&shape, room).whole_model();
            // Beside the growing cache: two layers of one sequence.
            (need.kv, (need.overhead - ENGINE_BASE_BYTES) / 2 - 2 * 1000)
        };
        for (kv_tokens, tokens, unused) in [
            // 24 positions of each sequence in each of four layers, its cache being 1,024 long.
            (None, 8000, 4 * 8 * 24),
            (Some(9000), 8000, 4 * 8 * 24),
            // Three can be at full length, and the last step of another reaches beyond.
            (Some(3500), 3500, 4 * (3 * 24 + 255)),
            (Some(1000), 1000, 4 * (24 + 255)),
        ] {
            assert_eq!(taken(kv_tokens), (2 * 4 * tokens, unused), "{kv_tokens:?}");
        }
    }

    #[test]
    fn fewer_kv_bits_fit_more_context_in_the_same_memory() {
        // Llama 3 8B: 8 heads of 128, so 2,048 keys and values of a token, in 16 or 32 bits.
        let kv_bytes = |kv_cache, head_dim, value| {
            let shape = ModelShape {
                key_value_heads: 8,
                head_dim,
                kv_bytes_per_token_per_layer: u64::from(2 * 8 * head_dim * value),
                layer_bytes: vec![1; 32],
                ..ModelShape::default()
            };
            let room = ServingCapacity {
                context_tokens: 1000,
                max_sequences: 2,
                engine: EngineOptions { kv_cache, ..EngineOptions::default() },
                ..ServingCapacity::default()
            };
            let fit = MemoryModel::new(&shape, room);
            assert_eq!(
                fit.sharded_estimate(0..32, false, false, 2).kv,
                fit.kv_bytes_per_token() * 32 * 1000 * 2 / 2
            );
            fit.kv_bytes_per_token()
        };
        for (kv_cache, head_dim, value, bytes) in [
            (KvCacheType::AsComputed, 128, 2, 4096),
            // A byte each, and 32 groups with a scale and a bias of two bytes.
            (KvCacheType::Int8, 128, 2, 2048 + 32 * 4),
            (KvCacheType::Int4, 128, 2, 1024 + 32 * 4),
            (KvCacheType::Int8, 128, 4, 2048 + 32 * 8),
            // Heads of 96 have groups of 32.
            (KvCacheType::Int4, 96, 2, 768 + 48 * 4),
        ] {
            assert_eq!(kv_bytes(kv_cache, head_dim, value), bytes, "{kv_cache:?}, {head_dim}, {value}");
        }
    }

    #[test]
    fn headroom_counts_once_it_exceeds_the_engine_itself() {
        let mut shape = shape(false);
        shape.layer_bytes = vec![1 << 33; 4];
        let fit = MemoryModel::new(
            &shape,
            ServingCapacity {
                context_tokens: 16,
                max_sequences: 1,
                headroom_percent: 5,
                ..ServingCapacity::default()
            },
        );
        let need = fit.whole_model();
        assert_eq!(need.overhead, (need.weights + need.kv) / 20);
    }

    #[test]
    fn absurd_sizes_saturate_instead_of_wrapping() {
        let mut shape = shape(true);
        shape.layer_bytes = vec![u64::MAX; 4];
        shape.kv_bytes_per_token_per_layer = u64::MAX;
        let fit = MemoryModel::new(
            &shape,
            ServingCapacity {
                context_tokens: 1,
                max_sequences: 1,
                headroom_percent: 100,
                ..ServingCapacity::default()
            },
        );
        assert_eq!(fit.whole_model().total(), u64::MAX);
        (shape.key_value_heads, shape.head_dim) = (u32::MAX, u32::MAX - 63);
        let engine = EngineOptions { kv_cache: KvCacheType::Int8, ..EngineOptions::default() };
        let room = ServingCapacity {
            context_tokens: 1,
            max_sequences: 1,
            kv_tokens: None,
            headroom_percent: 100,
            engine,
        };
        assert_eq!(MemoryModel::new(&shape, room).whole_model().total(), u64::MAX);
    }
}
