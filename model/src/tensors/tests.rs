//! Names, roles, axes and packings.

use super::*;
use crate::testing::{headers, llama, packed, qwen3, tensors};

fn axis(dim: usize, length: u64) -> ShardAxis {
    ShardAxis::Axis { dim, segments: vec![length] }
}

fn table(config: &serde_json::Value) -> Vec<Tensor> {
    let all = headers(&tensors(config, "BF16", None, true));
    let model = crate::read(config.to_string().as_bytes(), &all).unwrap();
    model.tensors.into_iter().map(|(tensor, _)| tensor).collect()
}

#[test]
fn projections_are_sharded_and_everything_else_is_replicated() {
    let mut config = llama(1);
    config["attention_bias"] = true.into();
    config["mlp_bias"] = true.into();
    let tensors = table(&config);
    for (name, shape, expected) in [
        ("model.layers.0.self_attn.q_proj.weight", vec![64, 64], axis(0, 64)),
        ("model.layers.0.self_attn.k_proj.weight", vec![32, 64], ShardAxis::Heads { dim: 0, heads: 2 }),
        ("model.layers.0.self_attn.k_proj.bias", vec![32], ShardAxis::Heads { dim: 0, heads: 2 }),
        ("model.layers.0.self_attn.o_proj.weight", vec![64, 64], axis(1, 64)),
        ("model.layers.0.self_attn.o_proj.bias", vec![64], ShardAxis::Replicated),
        ("model.layers.0.mlp.up_proj.weight", vec![128, 64], ShardAxis::Parts { dim: 0, parts: 128 }),
        ("model.layers.0.mlp.down_proj.weight", vec![64, 128], ShardAxis::Parts { dim: 1, parts: 128 }),
        ("model.layers.0.mlp.down_proj.bias", vec![64], ShardAxis::Replicated),
        ("model.layers.0.input_layernorm.weight", vec![64], ShardAxis::Replicated),
        ("model.embed_tokens.weight", vec![100, 64], ShardAxis::Replicated),
        ("model.norm.weight", vec![64], ShardAxis::Replicated),
        ("lm_head.weight", vec![100, 64], ShardAxis::Replicated),
    ] {
        let tensor = tensors.iter().find(|tensor| tensor.name == name).unwrap();
        assert_eq!((&tensor.shape, &tensor.axis), (&shape, &expected), "{name}");
        assert_eq!(tensor_role(name), Some(tensor.role), "{name}");
    }
    assert_eq!(tensors.len(), 3 + 9 + 7);
}

#[test]
fn head_norms_are_of_one_head_and_replicated() {
    let tensors = table(&qwen3(2));
    let norms: Vec<&Tensor> =
        tensors.iter().filter(|tensor| tensor.name.contains("self_attn.q_norm")).collect();
    assert_eq!(norms.len(), 2);
    assert!(norms.iter().all(|norm| norm.shape == [32] && norm.axis == ShardAxis::Replicated));
}

#[test]
fn tensors_have_the_role_their_name_says() {
    for (name, role) in [
        ("model.embed_tokens.weight", Some(Role::Embedding)),
        ("model.embed_tokens.scales", Some(Role::Embedding)),
        ("model.layers.17.self_attn.q_proj.weight", Some(Role::Layer(17))),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ("model.layers.x.mlp.up_proj.weight", None),
        ("model.layers.99999999999.w", None),
        ("model.embed_tokens_per_layer.weight", Some(Role::PerLayerInputs)),
        ("model.language_model.per_layer_model_projection.scales", Some(Role::PerLayerInputs)),
        ("language_model.model.per_layer_projection_norm.weight", Some(Role::PerLayerInputs)),
        ("model.layers.3.per_layer_projection.weight", Some(Role::Layer(3))),
        ("model.norm.weight", Some(Role::Head)),
        ("lm_head.weight", Some(Role::Head)),
        ("vision_tower.blocks.0.weight", None),
    ] {
        assert_eq!(tensor_role(name), role, "{name}");
    }
}

#[test]
fn packing_follows_from_the_shapes() {
    let entry = |dtype, shape: &[u64]| Entry { file: 0, dtype, shape: shape.to_vec(), begin: 0, end: 0 };
    for (packed, scales, expected) in [
        (vec![8, 16], vec![8, 2], Some((64, 4))),
        (vec![8, 32], vec![8, 4], Some((32, 8))),
        (vec![8, 12], vec![8, 1], Some((128, 3))),
        (vec![8, 16], vec![8, 8], None),
        (vec![9, 16], vec![8, 2], None),
        (vec![8, 17], vec![8, 2], None),
        (vec![8, 16], vec![8, 0], None),
        (vec![8], vec![8], None),
        (vec![], vec![], None),
        (vec![8, u64::MAX], vec![8, 1], None),
    ] {
        let (weight, scales) = (entry(Dtype::U32, &packed), entry(Dtype::F16, &scales));
        let found = packing("w", &weight, &scales, &[8, 128]).ok();
        assert_eq!(found.map(|found| (found.group_size, found.bits)), expected, "{packed:?} {scales:?}");
    }
    // Of experts, the outer dimension is theirs.
    let (weight, scales) = (entry(Dtype::U32, &[4, 8, 16]), entry(Dtype::BF16, &[4, 8, 2]));
    assert_eq!(
        packing("w", &weight, &scales, &[4, 8, 128]),
        Ok(Packing { mode: PackingMode::Affine, group_size: 64, bits: 4 })
    );
    for (packed, scales, expected) in [
        (vec![8, 16], vec![8, 4], Some((PackingMode::Mxfp4, 32, 4))),
        (vec![8, 32], vec![8, 4], Some((PackingMode::Mxfp8, 32, 8))),
        (vec![8, 16], vec![8, 8], Some((PackingMode::Nvfp4, 16, 4))),
        (vec![8, 16], vec![8, 2], None),
    ] {
        let scales = entry(BYTE, &scales);
        let found = packing("w", &entry(Dtype::U32, &packed), &scales, &[8, 128]).ok();
        assert_eq!(found.map(|found| (found.mode, found.group_size, found.bits)), expected, "{scales:?}");
    }
    // As gpt-oss has it: a group's bytes along a dimension of their own.
    let found = packing("w", &entry(BYTE, &[4, 8, 4, 16]), &entry(BYTE, &[4, 8, 4]), &[4, 8, 128]);
    assert_eq!(found, Ok(Packing { mode: PackingMode::Mxfp4, group_size: 32, bits: 4 }));
    let wrong = packing("w", &entry(Dtype::U32, &[8, 16]), &entry(Dtype::Other("I8", 1), &[8, 4]), &[8, 128]);
    assert!(wrong.unwrap_err().to_string().contains("tensor w: it is quantised as U32"));
}

#[test]
fn recipes_say_what_is_stored_and_what_of_it_counts() {
    let each = |name: &str| (name.to_owned(), "BF16", vec![8, 64]);
    let mut all = vec![each("a.weight"), each("b.weight")];
    all.extend(packed("c.weight", &[24, 64], 4, 32, "F16"));
    let headers = headers(&all);
    let tensor = |shape: &[u64], sources: &[&str], recipe| Tensor {
        name: "a.weight".into(),
        role: Role::Layer(0),
        shape: shape.to_vec(),
        axis: ShardAxis::Replicated,
        sources: sources.iter().map(|&name| name.to_owned()).collect(),
        recipe,
        packs_to: None,
        is_matrix: true,
        is_auxiliary: false,
    };
    let (a, c) = (&["a.weight"][..], &["c.weight"][..]);
    let both = &["a.weight", "b.weight"];
    let rows = Recipe::Rows(Rows { dim: 0, of: 24, from: 8, step: 1 });
    let heads = Recipe::HeadRows { of: 12, from: 0, transposed: false };
    for (tensor, bytes, group) in [
        (tensor(&[8, 64], a, Recipe::AsIs), 8 * 64 * 2, None),
        (tensor(&[8, 64], a, Recipe::AddOne), 8 * 64 * 2, None),
        (tensor(&[2, 8, 64], both, Recipe::Stack), 2 * 8 * 64 * 2, None),
        // A third of 24 rows of 64 values in 4 bits, and a scale and a bias for every 32.
        (tensor(&[8, 64], c, rows), 8 * (32 + 2 * 2 * 2), Some(32)),
        // Of two heads of 12 rows, four each.
        (tensor(&[2, 4, 64], c, heads), 8 * (32 + 2 * 2 * 2), Some(32)),
    ] {
        let stored = tensor.stored(&headers).unwrap();
        assert_eq!(
            (stored.bytes, stored.packing.map(|packing| packing.group_size)),
            (bytes, group),
            "{tensor:?}"
        );
    }
    let wrong = tensor(&[3, 8, 64], &["a.weight", "z.weight"], Recipe::Stack);
    assert!(wrong.stored(&headers).unwrap_err().to_string().contains("tensor z.weight is missing"));
}

#[test]
fn a_backbone_has_names_of_its_own() {
    let backbone = headers(&[("backbone.embeddings.weight".to_owned(), "BF16", vec![100, 64])]);
    let layout = Layout::of(&backbone);
    for (name, stored) in [
        ("model.embed_tokens.weight", "backbone.embeddings.weight"),
        ("model.layers.7.norm.weight", "backbone.layers.7.norm.weight"),
        ("model.layers.7.mamba.norm.weight", "backbone.layers.7.mixer.norm.weight"),
        ("model.layers.7.self_attn.q_proj.bias", "backbone.layers.7.mixer.q_proj.bias"),
        ("model.layers.7.mlp.switch_mlp.fc1.weight", "backbone.layers.7.mixer.switch_mlp.fc1.weight"),
        ("model.norm.weight", "backbone.norm_f.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ] {
        assert_eq!(layout.name(name), stored);
        assert_eq!(tensor_role(stored), tensor_role(name), "{name}");
    }
    // Layers that predict further tokens are not of the model.
    assert_eq!(tensor_role("mtp.layers.0.norm.weight"), None);
}
