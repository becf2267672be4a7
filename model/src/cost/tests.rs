//! Today's numbers of activations and caches, and those of kinds that come.

use super::*;
use crate::description::{
    Activation, DeltaNet, Dense, Experts, Layer, Router, Scoring, SharedExpert, ShortConv,
};

#[test]
fn activations_are_what_a_piece_of_prompt_and_a_step_take() {
    // Llama 3 8B in 16 bits.
    let widths = Widths {
        hidden: 4096,
        heads: 32,
        queries: 4096,
        keys: 1024,
        mlp: 14336,
        routed: 0,
        expanded: 0,
        per_layer_inputs: 0,
        vocabulary: 128_256,
        value_bytes: 2,
        whole: false,
    };
    let work = |context: u64, head, tensor_size| {
        let tokens = context * 4;
        activation_bytes(
            &widths,
            &Load {
                context,
                sequences: 4,
                tokens,
                layers: 32,
                in_pipeline: false,
                head,
                tensor_size,
                kv_ranks: tensor_size.min(8),
                cached_bytes: 4096,
            },
        )
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
        // Eight KV heads on sixteen ranks.
        (8192, false, 16, hidden + shared / 16 + 2048 * 2 * 4 * 64 + scores + growing / 8),
        // One position sees a million, which is more than the bound on many.
        (1 << 20, false, 1, hidden + shared + 32 * 2 * (1 << 20) + growing * 128),
        // A conversation shorter than a piece of prompt: all of it at once, and caches of 256 positions.
        (64, false, 1, (hidden + shared) / 32 + 32 * 2 * 64 * 64 + 4096 * (192 * 32 * 4 + 2 * 64)),
    ] {
        assert_eq!(work(context, head, size), bytes, "{context} tokens, {size} ranks");
    }
    // A pipeline computes a quarter of such a piece at once.
    let load = Load { context: 8192, tensor_size: 1, kv_ranks: 1, in_pipeline: true, ..Load::default() };
    assert_eq!(activation_bytes(&widths, &load), (hidden + shared) / 4 + scores);
    // Inputs of the layers' own, which every rank has whole.
    let load = Load { context: 8192, tensor_size: 2, ..Load::default() };
    let with = activation_bytes(&Widths { per_layer_inputs: 35 * 256, ..widths }, &load);
    assert_eq!(with - activation_bytes(&widths, &load), 2048 * 2 * 5 * 35 * 256);
}

#[test]
fn quantised_keys_and_values_take_their_bits_and_scales() {
    for (numbers, value, head_dim, bits, bytes) in [
        // A byte each, and 32 groups with a scale and a bias of two bytes.
        (2048, 2, 128, 8, Some(2048 + 32 * 4)),
        (2048, 2, 128, 4, Some(1024 + 32 * 4)),
        (2048, 4, 128, 8, Some(2048 + 32 * 8)),
        // Heads of 96 have groups of 32; heads of 80 have none.
        (1536, 2, 96, 4, Some(768 + 48 * 4)),
        (1280, 2, 80, 8, None),
    ] {
        assert_eq!(quantised_kv_bytes(numbers, value, head_dim, bits), bytes, "{head_dim}, {bits} bits");
    }
}

#[test]
fn widest_layer_counts_whatever_its_kind() {
    let layer = |mixer, mlp| Layer::new(mixer, mlp, 1e-6);
    let latent = Mixer::Latent(crate::testing::latent(16, 512, 64, 128));
    let delta = Mixer::DeltaNet(DeltaNet {
        key_heads: 16,
        value_heads: 32,
        key_dim: 128,
        value_dim: 128,
        conv_kernel: 4,
        epsilon: 1e-6,
        merged_projections: false,
    });
    let shared = SharedExpert { intermediate: 512, module: "shared_expert", gate: None };
    let experts =
        Experts { shared: Some(shared), ..Experts::new(128, 8, 768, Router::new(Scoring::Softmax)) };
    let layers =
        vec![layer(latent, Mlp::Dense(Dense::new(4096))), layer(delta, Mlp::Experts(Box::new(experts)))];
    let description = Description { hidden_size: 2048, ..crate::testing::description(layers) };
    let widths = description.widths(2);
    assert_eq!(
        (widths.heads, widths.queries, widths.keys, widths.mlp),
        (32, 32 * (128 + 64) * 2, 2048, 8 * 768 + 512)
    );
    let conv = Mixer::ShortConv(ShortConv { channels: 2048, kernel: 3, bias: false });
    let convolved = Description {
        hidden_size: 2048,
        ..crate::testing::description(vec![layer(conv, Mlp::Dense(Dense::new(512)))])
    };
    let widths = convolved.widths(2);
    assert_eq!((widths.heads, widths.queries, widths.keys, widths.mlp), (0, 2048, 0, 512));
    assert_eq!(description.experts(0), None);
    assert_eq!(description.experts(1), Some(ExpertCounts { count: 128, used: 8 }));
}

#[test]
fn layers_of_one_block_count_what_they_have() {
    let layer =
        Layer::new(Mixer::Mamba2(crate::testing::mamba2(64, 64, 8, 128)), Mlp::Dense(Dense::new(1)), 1e-5);
    let experts = Experts {
        activation: Activation::SquaredRelu,
        latent: Some(1024),
        ..Experts::new(512, 22, 2688, Router::new(Scoring::Sigmoid))
    };
    let layers = vec![
        Layer { mlp: None, ..layer.clone() },
        Layer { mixer: None, mlp: Some(Mlp::Experts(Box::new(experts))), ..layer },
    ];
    let description = Description { hidden_size: 4096, ..crate::testing::description(layers) };
    let widths = description.widths(2);
    // What experts read and give is as wide as the latent.
    assert_eq!(
        (widths.heads, widths.queries, widths.keys, widths.mlp, widths.routed),
        (64, 64 * (128 + 64) * 2, 8 * 128, 22 * 2688, 22 * 1024)
    );
    assert!(description.state(0, 2).fixed_bytes > 0 && description.experts(0).is_none());
    assert_eq!(description.state(1, 2), LayerState::default());
    assert_eq!(description.experts(1), Some(ExpertCounts { count: 512, used: 22 }));
}

#[test]
fn tokens_that_choose_alone_read_more_experts() {
    let experts = ExpertCounts { count: 128, used: 8 };
    for (tokens, share) in [(1.0, 8.0 / 128.0), (4.0, 1.0 - (120.0_f64 / 128.0).powf(4.0)), (10_000.0, 1.0)] {
        assert!((active_expert_bytes(1000, experts, tokens) - 1000.0 * share).abs() < 1e-6, "{tokens}");
    }
    assert_eq!(active_expert_bytes(10, ExpertCounts { count: 0, used: 0 }, 1.0), 0.0);
}

#[test]
fn hostile_loads_saturate() {
    let most = u64::MAX;
    let widths = Widths {
        hidden: most,
        heads: most,
        queries: most,
        keys: most,
        mlp: most,
        routed: most,
        expanded: most,
        per_layer_inputs: most,
        vocabulary: most,
        value_bytes: most,
        whole: false,
    };
    let load = Load {
        context: most,
        sequences: most,
        tokens: most,
        layers: most,
        in_pipeline: true,
        head: true,
        tensor_size: 0,
        kv_ranks: 0,
        cached_bytes: most,
    };
    assert_eq!(activation_bytes(&widths, &load), most);
    assert_eq!(activation_bytes(&Widths::default(), &Load::default()), 0);
    assert_eq!(quantised_kv_bytes(most, most, 64, 8), Some(most));
}
