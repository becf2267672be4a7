//! What an LFM2's layers are, from either export, and what the planner sees of them.

use serde_json::{Value, json};

use crate::{
    Model,
    description::{Activation, Dense, Experts, Mixer, Mlp, QkNorm, Router, Scoring, ShortConv},
    error::Error,
    shape::{ExpertGroup, ModelShape},
    state::{LayerState, Rewind},
    tensors::ShardAxis,
    testing::{Tensors, headers, tensors},
};

fn lfm2(fields: Value) -> Value {
    let mut config = json!({
        "model_type": "lfm2", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "block_ff_dim": 300, "block_multiple_of": 64, "vocab_size": 100, "norm_eps": 1e-5,
        "conv_bias": false, "conv_L_cache": 3, "full_attn_idxs": [2], "max_position_embeddings": 128,
    });
    config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    config
}

fn lfm2_moe() -> Value {
    lfm2(json!({
        "model_type": "lfm2_moe", "intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "num_dense_layers": 2, "use_expert_bias": true, "norm_topk_prob": true,
        "full_attn_idxs": null, "layer_types": ["conv", "conv", "full_attention", "conv"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
    }))
}

/// The same tensors as the original export has them.
fn original(converted: &Tensors) -> Tensors {
    let mut all = Tensors::new();
    for (name, dtype, shape) in converted {
        let mut name = name.clone();
        for (own, other) in [("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")] {
            name = name.replace(own, other);
        }
        match shape[..] {
            [count, rows, columns] if name.contains(".switch_mlp.") => {
                let each = |expert: u64| name.replace("switch_mlp", &format!("experts.{expert}"));
                all.extend((0..count).map(|expert| (each(expert), *dtype, vec![rows, columns])));
            }
            [channels, kernel, 1] => all.push((name, dtype, vec![channels, 1, kernel])),
            _ => all.push((name, dtype, shape.clone())),
        }
    }
    all
}

fn read(config: &Value, tensors: &Tensors) -> Result<Model, Error> {
    crate::read(config.to_string().as_bytes(), &headers(tensors))
}

#[test]
fn layers_are_convolutions_but_those_that_are_named() {
    let config = lfm2(json!({"conv_bias": true}));
    let description = read(&config, &tensors(&config, "BF16", None, false)).unwrap().description;
    let conv = Mixer::ShortConv(ShortConv { channels: 64, kernel: 3, bias: true });
    for (index, layer) in description.layers.iter().enumerate() {
        assert_eq!(layer.mixer.as_ref() == Some(&conv), index != 2, "{index}: {:?}", layer.mixer);
        assert_eq!(
            (layer.norms.before_mixer, layer.norms.before_mlp),
            (Some("operator_norm"), Some("ffn_norm"))
        );
    }
    let attention = description.attention().unwrap();
    assert_eq!((attention.qk_norm, attention.output), (Some(QkNorm::Head { epsilon: 1e-5 }), "out_proj"));
    assert_eq!(attention.rope.as_ref().unwrap().base, 1e6);
    assert_eq!(
        (description.norm, description.norm_epsilon, description.tied),
        (Some("embedding_norm"), 1e-5, true)
    );
    assert_eq!(description.rewind(), Rewind::ToSnapshots);
}

#[test]
fn dense_width_is_adjusted_as_the_configuration_says() {
    for (fields, width) in [
        // 350M, 700M and 1.2B as published.
        (json!({"block_ff_dim": 6656, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}), 4608),
        (json!({"block_ff_dim": 10_240, "block_multiple_of": 256}), 6912),
        (json!({"block_ff_dim": 12_288, "block_multiple_of": null, "intermediate_size": 5}), 8192),
        (
            json!({"block_ff_dim": null, "intermediate_size": 10_752, "block_auto_adjust_ff_dim": false}),
            10_752,
        ),
        (json!({"block_ffn_dim_multiplier": 1.3}), 320),
        // In 64 bits this is 13 exactly, in 32 a little less.
        (json!({"block_ff_dim": 15, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 1}), 13),
    ] {
        let config = lfm2(fields);
        let description = read(&config, &tensors(&config, "BF16", None, false)).unwrap().description;
        let Some(Mlp::Dense(Dense { intermediate, .. })) = description.layers[0].mlp else {
            panic!("{config}")
        };
        assert_eq!(intermediate, width, "{config}");
    }
}

#[test]
fn experts_begin_after_the_dense_layers() {
    let config = lfm2_moe();
    let description = read(&config, &tensors(&config, "BF16", None, false)).unwrap().description;
    let router = Router {
        correction: Some("expert_bias"),
        renormalise: true,
        epsilon: 1e-6,
        ..Router::new(Scoring::NarrowSigmoid)
    };
    let experts = Experts {
        module: "feed_forward",
        originals: ["w1", "w3", "w2"],
        activation: Activation::Silu,
        ..Experts::new(4, 2, 32, router)
    };
    for (index, layer) in description.layers.iter().enumerate() {
        match &layer.mlp {
            Some(Mlp::Dense(dense)) => assert!(index < 2 && dense.intermediate == 128, "{index}: {dense:?}"),
            Some(Mlp::Experts(own)) => assert!(index >= 2 && **own == experts, "{index}: {own:?}"),
            None => panic!("layer {index} has no MLP"),
        }
    }
    assert_eq!(description.attention().unwrap().rope.as_ref().unwrap().base, 5e6);
}

#[test]
fn planner_reads_the_same_of_either_export() {
    let config = lfm2_moe();
    let converted = tensors(&config, "BF16", None, false);
    let model = read(&config, &converted).unwrap();
    let shape = ModelShape::of(&model);
    assert_eq!(ModelShape::of(&read(&config, &original(&converted)).unwrap()), shape);
    let conv = LayerState { fixed_bytes: 64 * 2 * 2, ..LayerState::default() };
    let attention = LayerState { per_token_bytes: 2 * 2 * 16 * 2, ..LayerState::default() };
    let experts = Some(ExpertGroup { count: 4, used: 2, weight_bytes: 4 * 3 * 32 * 64 * 2 });
    let groups: Vec<_> =
        shape.groups().iter().map(|group| (group.count, group.state, group.experts)).collect();
    assert_eq!(groups, [(2, conv, None), (1, attention, experts), (1, conv, experts)]);
    // Two KV heads bound a group, whatever the convolution would bear.
    assert_eq!(shape.tensor_sizes(), [1, 2, 4]);
    assert_eq!(shape.unsupported, None);
    let axis = |field: &str| {
        let own = model
            .tensors
            .iter()
            .find(|(tensor, _)| tensor.name == format!("model.layers.0.conv.{field}.weight"));
        own.map(|(tensor, _)| tensor.axis.clone())
    };
    let along = |dim, segments: &[u64]| Some(ShardAxis::Axis { dim, segments: segments.to_vec() });
    assert_eq!(axis("in_proj"), along(0, &[64; 3]));
    assert_eq!(axis("conv"), along(0, &[64]));
    assert_eq!(axis("out_proj"), along(1, &[64]));
}

#[test]
fn what_an_lfm2_cannot_be_is_refused_by_name() {
    for (fields, said) in [
        (json!({"conv_L_cache": null}), "conv_L_cache"),
        (json!({"full_attn_idxs": []}), "full_attn_idxs is missing"),
        (json!({"layer_types": ["conv", "conv", "sliding_attention", "conv"]}), "\"sliding_attention\""),
        (json!({"block_dim": 32}), "32, but hidden_size is 64"),
        (json!({"block_ffn_dim_multiplier": 1e300}), "block_ffn_dim_multiplier"),
        (json!({"block_ffn_dim_multiplier": "x"}), "block_ffn_dim_multiplier"),
        (json!({"block_use_swiglu": false}), "block_use_swiglu"),
        (json!({"attention_bias": true}), "attention_bias"),
        (json!({"conv_bias": true}), "conv.in_proj.bias is missing"),
        (json!({"tie_embedding": false}), "lm_head.weight is missing"),
    ] {
        let all = tensors(&lfm2(json!({})), "BF16", None, false);
        let error = read(&lfm2(fields), &all).unwrap_err().to_string();
        assert!(error.contains(said), "{said}: {error}");
    }
    // As published: the same again under other names, and how it was trained.
    let published = json!({
        "block_dim": 64, "block_use_swiglu": true, "block_norm_eps": 1e-5, "block_mlp_init_scale": 1.0,
        "block_out_init_scale": 1.0, "block_use_xavier_init": true, "conv_dim": 64, "conv_dim_out": 64,
        "conv_use_xavier_init": true, "num_heads": 4, "theta": 1e6, "rope_theta": 1e6, "use_pos_enc": true,
        "tie_embedding": true, "block_auto_adjust_ff_dim": true,
    });
    assert!(read(&lfm2(published), &tensors(&lfm2(json!({})), "BF16", None, false)).is_ok());
}
