//! What a layer remembers of a sequence: what it takes in bytes, whether a tensor group shares it, and how far it can
//! be rewound. The engine's layer caches implement these kinds; scheduler, prefix cache and speculation ask them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    cost::{CACHE_STEP, PREFILL_TOKENS},
    description::{Attention, DeltaNet, Description, Latent, Mamba2, Mixer, ShortConv},
};

/// What one layer keeps, in bytes on all ranks of a tensor group together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LayerState {
    /// Bytes of a token, in the type the engine computes in; 0 where the state does not grow.
    #[serde(default)]
    pub per_token_bytes: u64,
    /// Tokens of a sequence that are kept at most; absent is all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window_tokens: Option<u32>,
    /// Bytes of a sequence, whatever its length.
    #[serde(default)]
    pub fixed_bytes: u64,
    /// Whether every rank of a tensor group keeps all of it.
    #[serde(default)]
    pub replicated: bool,
}

/// Positions before its window that a layer keeps: drafts that are rejected go back by less, and a block of the prefix
/// cache is as long.
pub const ROTATING_SLACK: u32 = 64;

/// States of fixed size that live at most for each sequence: its own, its snapshot's, and that of before a step that
/// verifies draft tokens.
pub const STATE_COPIES: u64 = 3;

/// How a layer's state can go back to an earlier position of its sequence; the least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rewind {
    /// To positions of which a snapshot was taken. The engine keeps one of before a step that verifies draft tokens.
    ToSnapshots,
    /// To the last positions.
    Recent {
        /// How many tokens back, at least.
        tokens: u32,
    },
    /// To any position: what lies behind it is written over.
    Anywhere,
}

/// The kind of a layer's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateKind {
    /// Keys and values of every position.
    KeyValue,
    /// Keys and values of the last positions.
    Rotating {
        /// How many.
        window: u32,
    },
    /// One latent of every position.
    Latent,
    /// A state of fixed size.
    Recurrent,
}

impl StateKind {
    /// The kind a mixer has, or the one that it reads of another layer.
    pub fn of(mixer: &Mixer) -> Self {
        match mixer {
            Mixer::Attention(Attention { window: Some(window), .. }) => Self::Rotating { window: *window },
            Mixer::Attention(Attention { window: None, .. }) => Self::KeyValue,
            Mixer::Latent(_) => Self::Latent,
            Mixer::DeltaNet(_) | Mixer::ShortConv(_) | Mixer::Mamba2(_) => Self::Recurrent,
        }
    }

    /// How far it can be rewound.
    pub fn rewind(self) -> Rewind {
        match self {
            Self::KeyValue | Self::Latent => Rewind::Anywhere,
            Self::Rotating { .. } => Rewind::Recent { tokens: ROTATING_SLACK },
            Self::Recurrent => Rewind::ToSnapshots,
        }
    }

    /// Whether a state after `length` tokens can surely be rewound to `to` without a snapshot.
    pub fn can_rewind(self, length: u32, to: u32) -> bool {
        to <= length
            && match self.rewind() {
                Rewind::Anywhere => true,
                Rewind::Recent { tokens } => length - to <= tokens,
                Rewind::ToSnapshots => to == length,
            }
    }
}

impl Description {
    /// How a sequence of this model can go back: as the least of its layers can.
    pub fn rewind(&self) -> Rewind {
        self.mixers().map(|mixer| StateKind::of(mixer).rewind()).min().unwrap_or(Rewind::Anywhere)
    }

    /// Whether every layer that keeps any keeps arrays of the same shape of a position.
    pub fn has_uniform_state(&self) -> bool {
        // With a window or without, a position's arrays have one shape.
        let shape = |mixer: &Mixer| match mixer {
            Mixer::Attention(Attention { kv_heads, key_dim, value_dim, .. }) => {
                (StateKind::KeyValue, [*kv_heads, *key_dim, *value_dim, 0])
            }
            Mixer::Latent(Latent { rank, rope_dim, .. }) => (StateKind::Latent, [*rank, *rope_dim, 0, 0]),
            Mixer::DeltaNet(DeltaNet { key_heads, value_heads, key_dim, value_dim, .. }) => {
                (StateKind::Recurrent, [*key_heads, *value_heads, *key_dim, *value_dim])
            }
            Mixer::ShortConv(ShortConv { channels, kernel, .. }) => {
                (StateKind::Recurrent, [*channels, *kernel, 0, 0])
            }
            Mixer::Mamba2(Mamba2 { heads, head_dim, groups, state_dim, .. }) => {
                (StateKind::Recurrent, [*heads, *head_dim, *groups, *state_dim])
            }
        };
        let mut shapes = self.mixers().map(shape);
        shapes.next().is_none_or(|first| shapes.all(|other| other == first))
    }
}

impl LayerState {
    /// What a mixer keeps where values take `value_bytes`.
    pub fn of(mixer: &Mixer, value_bytes: u64) -> Self {
        let product = |factors: &[u32]| {
            factors.iter().fold(value_bytes, |product, &factor| product.saturating_mul(u64::from(factor)))
        };
        let recurrent = |state: &[u32], channels: u32, kernel: u32| {
            // The state itself is in 32 bits whatever the model's type.
            let state = product(state) / value_bytes.max(1) * 4;
            let convolution = product(&[channels, kernel.saturating_sub(1)]);
            Self { fixed_bytes: state.saturating_add(convolution), ..Self::default() }
        };
        match mixer {
            Mixer::Attention(Attention { shares_cache_of: Some(_), .. }) => Self::default(),
            Mixer::Attention(Attention { kv_heads, key_dim, value_dim, window, .. }) => Self {
                per_token_bytes: product(&[*kv_heads, key_dim.saturating_add(*value_dim)]),
                window_tokens: window.map(|window| window.saturating_add(ROTATING_SLACK + CACHE_STEP)),
                fixed_bytes: 0,
                replicated: false,
            },
            Mixer::Latent(Latent { rank, rope_dim, .. }) => Self {
                per_token_bytes: product(&[rank.saturating_add(*rope_dim)]),
                window_tokens: None,
                fixed_bytes: 0,
                replicated: true,
            },
            Mixer::DeltaNet(DeltaNet { key_heads, value_heads, key_dim, value_dim, conv_kernel, .. }) => {
                let keys = key_heads.saturating_mul(*key_dim).saturating_mul(2);
                let channels = keys.saturating_add(value_heads.saturating_mul(*value_dim));
                recurrent(&[*value_heads, *key_dim, *value_dim], channels, *conv_kernel)
            }
            Mixer::Mamba2(Mamba2 { heads, head_dim, groups, state_dim, conv_kernel, .. }) => {
                let channels = heads
                    .saturating_mul(*head_dim)
                    .saturating_add(groups.saturating_mul(*state_dim).saturating_mul(2));
                recurrent(&[*heads, *head_dim, *state_dim], channels, *conv_kernel)
            }
            Mixer::ShortConv(ShortConv { channels, kernel, .. }) => {
                Self { fixed_bytes: product(&[*channels, kernel.saturating_sub(1)]), ..Self::default() }
            }
        }
    }

    /// Bytes that `sequences` sequences of `tokens` tokens together keep on one of `tensor_size` ranks. What cannot go
    /// back to any position is there twice: the engine keeps a snapshot of every sequence. What cannot go back at all is
    /// there three times: while draft tokens are verified, as it was before them too. That counts without speculation as
    /// well; states are small beside the keys and values of the other layers.
    pub fn bytes(&self, tokens: u64, sequences: u64, tensor_size: u64) -> u64 {
        let retained = match self.window_tokens {
            // A piece of a prompt is there as a whole for as long as it is computed.
            Some(window) => {
                let windows = u64::from(window).saturating_mul(sequences);
                let running = tokens.min(windows.saturating_add(u64::from(PREFILL_TOKENS)));
                running.saturating_add(tokens.min(windows))
            }
            None => tokens,
        };
        let all = self
            .per_token_bytes
            .saturating_mul(retained)
            .saturating_add(self.fixed_bytes.saturating_mul(STATE_COPIES).saturating_mul(sequences));
        if self.replicated { all } else { all.div_ceil(tensor_size.max(1)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        description::{Dense, Layer, Mlp},
        testing::{description, latent, mamba2},
    };

    fn attention(window: Option<u32>) -> Mixer {
        Mixer::Attention(Attention { window, value_dim: 32, ..Attention::new(8, 2, 64, None) })
    }

    fn delta_net(key_heads: u32, value_heads: u32, width: u32) -> DeltaNet {
        DeltaNet {
            key_heads,
            value_heads,
            key_dim: width,
            value_dim: width,
            conv_kernel: 4,
            epsilon: 1e-6,
            merged_projections: false,
        }
    }

    fn short_conv(kernel: u32) -> Mixer {
        Mixer::ShortConv(ShortConv { channels: 2048, kernel, bias: true })
    }

    #[test]
    fn state_takes_bytes_by_token_window_or_sequence() {
        let latent = Mixer::Latent(latent(128, 512, 64, 128));
        let delta = Mixer::DeltaNet(delta_net(16, 32, 128));
        let conv = short_conv(3);
        let shared =
            Mixer::Attention(Attention { shares_cache_of: Some(0), ..Attention::new(8, 2, 64, None) });
        let delta_bytes = 32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2;
        // As Nemotron 3 Nano has them.
        let mamba = Mixer::Mamba2(mamba2(64, 64, 8, 128));
        let mamba_bytes = 64 * 64 * 128 * 4 + (64 * 64 + 2 * 8 * 128) * 3 * 2;
        for (mixer, tokens, sequences, size, bytes) in [
            (attention(None), 1000, 4, 1, 1000 * 2 * (64 + 32) * 2),
            (attention(None), 1000, 4, 2, 1000 * 2 * (64 + 32)),
            // A window, what is kept before it and a step, twice, and a piece of a prompt.
            (attention(Some(128)), 100_000, 4, 1, (2 * 4 * (128 + 64 + 256) + 2048) * 2 * (64 + 32) * 2),
            (attention(Some(128)), 100, 4, 1, 2 * 100 * 2 * (64 + 32) * 2),
            (shared.clone(), 1000, 4, 1, 0),
            (latent.clone(), 1000, 4, 1, 1000 * 576 * 2),
            // Every rank has the whole latent.
            (latent, 1000, 4, 8, 1000 * 576 * 2),
            // A state three times.
            (delta.clone(), 1000, 4, 1, 3 * 4 * delta_bytes),
            (delta, 1_000_000, 4, 2, 3 * 2 * delta_bytes),
            (conv.clone(), 1_000_000, 4, 1, 3 * 4 * 2048 * 2 * 2),
            (conv, 1000, 4, 4, 3 * 2048 * 2 * 2),
            (mamba.clone(), 10, 4, 1, 3 * 4 * mamba_bytes),
            (mamba, 1_000_000, 4, 8, 3 * mamba_bytes / 2),
        ] {
            let state = LayerState::of(&mixer, 2);
            assert_eq!(
                state.bytes(tokens, sequences, size),
                bytes,
                "{mixer:?}, {tokens} tokens, {size} ranks"
            );
        }
    }

    #[test]
    fn rewind_is_possible_where_nothing_was_overwritten() {
        let (delta, latent) = (delta_net(1, 1, 1), latent(1, 1, 0, 1));
        for (mixer, length, to, possible) in [
            (attention(None), 1000, 0, true),
            (attention(None), 10, 11, false),
            (attention(Some(128)), 1000, 1000 - 64, true),
            (attention(Some(128)), 1000, 1000 - 65, false),
            (attention(Some(128)), 129, 129, true),
            (Mixer::Latent(latent), 1000, 1, true),
            (Mixer::DeltaNet(delta.clone()), 10, 9, false),
            (Mixer::DeltaNet(delta), 10, 10, true),
            (short_conv(3), 10, 9, false),
            (Mixer::Mamba2(mamba2(1, 1, 1, 1)), 10, 9, false),
        ] {
            assert_eq!(StateKind::of(&mixer).can_rewind(length, to), possible, "{mixer:?}: {length} to {to}");
        }
    }

    #[test]
    fn a_model_goes_back_as_far_as_its_least_layer() {
        let delta = Mixer::DeltaNet(delta_net(1, 1, 1));
        let (short, longer) = (short_conv(3), short_conv(4));
        let recent = Rewind::Recent { tokens: ROTATING_SLACK };
        for (mixers, rewind, uniform) in [
            (vec![], Rewind::Anywhere, true),
            (vec![attention(None), attention(None)], Rewind::Anywhere, true),
            (vec![attention(None), attention(Some(128))], recent, true),
            (vec![attention(Some(128)), attention(Some(64))], recent, true),
            (vec![delta.clone(), attention(Some(64))], Rewind::ToSnapshots, false),
            (vec![attention(None), delta.clone()], Rewind::ToSnapshots, false),
            (vec![delta.clone(), delta.clone()], Rewind::ToSnapshots, true),
            (vec![short.clone(), short.clone()], Rewind::ToSnapshots, true),
            (vec![short.clone(), longer], Rewind::ToSnapshots, false),
            (vec![delta, short], Rewind::ToSnapshots, false),
            (vec![Mixer::Mamba2(mamba2(2, 1, 1, 1)), attention(None)], Rewind::ToSnapshots, false),
        ] {
            let layer = |mixer: &Mixer| Layer::new(mixer.clone(), Mlp::Dense(Dense::new(1)), 1e-5);
            // A layer that is an MLP alone remembers nothing.
            let alone = Layer { mixer: None, ..layer(&attention(None)) };
            let description = description(mixers.iter().map(layer).chain([alone]).collect());
            assert_eq!(description.rewind(), rewind, "{mixers:?}");
            assert_eq!(description.has_uniform_state(), uniform, "{mixers:?}");
        }
    }

    #[test]
    fn hostile_sizes_saturate() {
        let state = LayerState { per_token_bytes: u64::MAX, fixed_bytes: u64::MAX, ..LayerState::default() };
        assert_eq!(state.bytes(u64::MAX, u64::MAX, 0), u64::MAX);
        let delta = DeltaNet { conv_kernel: u32::MAX, ..delta_net(u32::MAX, u32::MAX, u32::MAX) };
        assert!(LayerState::of(&Mixer::DeltaNet(delta), 4).fixed_bytes > 1 << 60);
        let conv = ShortConv { channels: u32::MAX, kernel: u32::MAX, bias: false };
        assert!(LayerState::of(&Mixer::ShortConv(conv), 4).fixed_bytes > 1 << 60);
        let mamba = mamba2(u32::MAX, u32::MAX, u32::MAX, u32::MAX);
        assert!(LayerState::of(&Mixer::Mamba2(mamba), 4).fixed_bytes > 1 << 60);
    }
}
