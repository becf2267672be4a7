//! The memory model: what a part of a model takes on the node that runs it. It reserves the whole
//! KV cache up front, so that a full house of conversations never takes memory nobody granted.
//!
//! ```text
//! rank = weights of its layers (+ embedding, + head, + embedding again for a tied head elsewhere)
//!      + KV per token per layer × its layers × context × sequences
//!        (of a tensor group: its share of projections and KV; norms, embedding and head are whole)
//!      + max(headroom % of the two, buffers + the engine itself)
//! ```

use std::ops::Range;

use russet_wire::partition::Part;
use russet_wire::shape::ModelShape;

/// Bytes an engine takes before it holds a weight: its program, MLX, the tokenizer, gRPC buffers.
/// An engine on Linux with MLX's CPU backend stays below 150 MiB; the rest is for Metal's start.
const ENGINE_BASE: u64 = 192 << 20;
/// Tokens of a prompt that are computed at once (the engine's `PROMPT_STEP`); it bounds the activations.
const PREFILL_TOKENS: u64 = 2048;
/// Hidden states alive at the same time in one layer, MLP included, four bytes a value. A Llama MLP
/// is 3.5 times as wide as the hidden state and keeps gate, up and their product.
const LIVE_STATES: u64 = 16;

/// Room for conversations, resolved against the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Longest conversation, tokens; never more than the model's own limit.
    pub context_tokens: u32,
    /// Conversations at once.
    pub max_sequences: u32,
    /// Reserved on top, percent.
    pub headroom_percent: u32,
}

/// What one rank takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Bytes of weights.
    pub weights: u64,
    /// Bytes of KV cache.
    pub kv: u64,
    /// Bytes on top.
    pub overhead: u64,
}

impl Need {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.overhead)
    }
}

/// A model and its room, prepared so that any run of layers is summed at once.
#[derive(Clone, Debug)]
pub struct Fit<'a> {
    shape: &'a ModelShape,
    room: Room,
    /// `sums[i]` is the bytes of the first `i` layers.
    sums: Vec<u64>,
}

impl<'a> Fit<'a> {
    /// Prepares `shape`; its `layer_bytes` must be one per layer, which validation ensures.
    pub fn new(shape: &'a ModelShape, room: Room) -> Self {
        let mut sums = vec![0_u64];
        for bytes in &shape.layer_bytes {
            sums.push(sums.last().copied().unwrap_or(0).saturating_add(*bytes));
        }
        Self { shape, room, sums }
    }

    /// Layers of the model.
    pub fn layers(&self) -> u32 {
        self.sums.len() as u32 - 1
    }

    /// The room this was prepared for.
    pub fn room(&self) -> Room {
        self.room
    }

    /// What one rank with everything takes.
    pub fn whole(&self) -> Need {
        self.need(0..self.layers(), true, true)
    }

    /// What a rank with these layers takes that shares them with nobody.
    pub fn need(&self, layers: Range<u32>, embedding: bool, head: bool) -> Need {
        self.share(layers, embedding, head, 1)
    }

    /// What `part` takes.
    pub fn part(&self, part: &Part) -> Need {
        let Part {
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
        self.share(layers.clone(), *embedding, *head, *tensor_size)
    }

    /// What one of `size` ranks that share these layers takes, with or without embedding and head.
    pub fn share(&self, layers: Range<u32>, embedding: bool, head: bool, size: u32) -> Need {
        let count = u64::from(layers.end.saturating_sub(layers.start));
        let size = u64::from(size.max(1));
        let mut weights = self.shared_bytes(layers, size);
        if embedding || (head && self.shape.tied) {
            weights = weights.saturating_add(self.shape.embedding_bytes);
        }
        if head {
            weights = weights.saturating_add(self.shape.head_bytes);
        }
        let kv = self
            .shape
            .kv_bytes_per_token_per_layer
            .saturating_mul(count)
            .saturating_mul(u64::from(self.room.context_tokens))
            .saturating_mul(u64::from(self.room.max_sequences))
            .div_ceil(size);
        let percent = u128::from(weights.saturating_add(kv)) * u128::from(self.room.headroom_percent) / 100;
        let headroom = u64::try_from(percent).unwrap_or(u64::MAX);
        Need { weights, kv, overhead: headroom.max(self.base(head)) }
    }

    /// Bytes one of `size` ranks that share these layers reads for every token: what a stage of a
    /// pipeline is slow by. The embedding is a look-up and costs nothing; the head is a product with
    /// the whole vocabulary.
    pub fn work(&self, layers: Range<u32>, head: bool, size: u32) -> u64 {
        let mut bytes = self.shared_bytes(layers, u64::from(size.max(1)));
        if head {
            bytes = bytes.saturating_add(self.shape.head_bytes);
            if self.shape.tied {
                bytes = bytes.saturating_add(self.shape.embedding_bytes);
            }
        }
        bytes
    }

    fn layer_bytes(&self, layers: Range<u32>) -> u64 {
        let at = |index: u32| self.sums.get(index as usize).or(self.sums.last()).copied().unwrap_or(0);
        at(layers.end).saturating_sub(at(layers.start))
    }

    /// What one of `size` ranks holds of these layers: norms whole, the rest in equal parts.
    fn shared_bytes(&self, layers: Range<u32>, size: u64) -> u64 {
        let count = u64::from(layers.end.saturating_sub(layers.start));
        let all = self.layer_bytes(layers);
        let whole = self.shape.whole_layer_bytes.saturating_mul(count).min(all);
        whole.saturating_add((all - whole).div_ceil(size))
    }

    fn base(&self, head: bool) -> u64 {
        let states = u64::from(self.shape.hidden_size).saturating_mul(PREFILL_TOKENS * LIVE_STATES * 4);
        // Logits: four bytes a word of the vocabulary, for every sequence, before and after sampling.
        let logits = if head {
            u64::from(self.shape.vocabulary)
                .saturating_mul(u64::from(self.room.max_sequences))
                .saturating_mul(8)
        } else {
            0
        };
        ENGINE_BASE.saturating_add(states).saturating_add(logits)
    }
}

#[cfg(test)]
mod tests {
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
        let room = Room { context_tokens: 10, max_sequences: 3, headroom_percent: 0 };
        for (tied, layers, embedding, head, weights, kv) in [
            (false, 0..4, true, true, 3010, 240),
            (true, 0..4, true, true, 2010, 240), // a tied head costs nothing where the embedding is
            (true, 2..4, false, true, 1710, 120), // and the embedding again where it is not
            (false, 2..4, false, true, 1710, 120),
            (true, 0..2, true, false, 1300, 120),
            (true, 1..2, false, false, 200, 60),
        ] {
            let shape = shape(tied);
            let need = Fit::new(&shape, room).need(layers.clone(), embedding, head);
            assert_eq!((need.weights, need.kv), (weights, kv), "tied {tied}, layers {layers:?}");
            assert_eq!(need.overhead, ENGINE_BASE);
        }
    }

    #[test]
    fn members_of_a_tensor_group_hold_their_share_of_layers_and_the_rest_whole() {
        let room = Room { context_tokens: 10, max_sequences: 3, headroom_percent: 0 };
        for (embedding, head, size, weights, kv) in [
            (true, true, 1, 1000 + 1000 + 1010, 240),
            (true, true, 2, 40 + 480 + 1000 + 1010, 120), // ten bytes of each layer are norms
            (true, false, 2, 40 + 480 + 1000, 120),
            (false, false, 4, 40 + 240, 60),
        ] {
            let shape = ModelShape { whole_layer_bytes: 10, ..shape(false) };
            let need = Fit::new(&shape, room).share(0..4, embedding, head, size);
            assert_eq!((need.weights, need.kv), (weights, kv), "{size} ranks");
        }
    }

    #[test]
    fn headroom_counts_once_it_exceeds_the_engine_itself() {
        let mut shape = shape(false);
        shape.layer_bytes = vec![1 << 33; 4];
        let fit = Fit::new(&shape, Room { context_tokens: 16, max_sequences: 1, headroom_percent: 5 });
        let need = fit.whole();
        assert_eq!(need.overhead, (need.weights + need.kv) / 20);
    }

    #[test]
    fn absurd_sizes_saturate_instead_of_wrapping() {
        let mut shape = shape(true);
        shape.layer_bytes = vec![u64::MAX; 4];
        shape.kv_bytes_per_token_per_layer = u64::MAX;
        let fit = Fit::new(&shape, Room { context_tokens: 1, max_sequences: 1, headroom_percent: 100 });
        assert_eq!(fit.whole().total(), u64::MAX);
    }
}
