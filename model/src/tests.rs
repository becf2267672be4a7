//! Whole models: what is missing, stray, of another shape or type, and what is hostile.

use serde_json::{Value, json};

use super::*;
use crate::{
    shape::ModelShape,
    testing::{Tensors, header, headers, llama, packed, qwen3, tensors},
};

fn text(config: &Value, tensors: &Tensors) -> String {
    match read(config.to_string().as_bytes(), &headers(tensors)) {
        Ok(_) => "supported".to_owned(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn weights_that_do_not_fit_the_configuration_are_refused() {
    let all = tensors(&llama(2), "BF16", None, true);
    let without = |name: &str| all.iter().filter(|tensor| tensor.0 != name).cloned().collect::<Tensors>();
    let instead = |name: &str, dtype, shape: &[u64]| {
        let mut tensors = without(name);
        tensors.push((name.to_owned(), dtype, shape.to_vec()));
        tensors
    };
    let untied = json!({"tie_word_embeddings": false});
    let mut config = llama(2);
    config.as_object_mut().unwrap().extend(untied.as_object().unwrap().clone());
    for (tensors, said) in [
        (all.clone(), "supported"),
        (without("lm_head.weight"), "tensor lm_head.weight is missing"),
        (without("model.layers.1.mlp.up_proj.weight"), "tensor model.layers.1.mlp.up_proj.weight is missing"),
        (instead("model.norm.weight", "BF16", &[63]), "has shape [63], but config.json calls for [64]"),
        (
            instead("model.norm.weight", "F8_E4M3", &[64]),
            "tensor model.norm.weight: its element type F8_E4M3",
        ),
        (instead("model.norm.weight", "U32", &[64]), "its element type U32"),
        (
            instead("model.layers.2.mlp.up_proj.weight", "BF16", &[1]),
            "is of layer 2, but num_hidden_layers is 2",
        ),
        (
            instead("model.layers.0.self_attn.q_proj.bias", "BF16", &[64]),
            "q_proj.bias: llama models have no such tensor",
        ),
        (
            instead("model.layers.0.self_attn.q_norm.weight", "BF16", &[16]),
            "q_norm.weight: llama models have no such",
        ),
        (instead("model.layers.0.self_attn.rotary_emb.inv_freq", "F32", &[8]), "supported"),
        (instead("vision.patch", "F64", &[8]), "supported"),
    ] {
        let error = text(&config, &tensors);
        assert!(error.contains(said), "{said}: {error}");
    }
}

#[test]
fn packed_matrices_need_scales_and_biases_that_fit() {
    let all = tensors(&llama(1), "F16", Some(32), true);
    let name = "model.layers.0.mlp.up_proj";
    let without: Tensors = all.iter().filter(|tensor| !tensor.0.starts_with(name)).cloned().collect();
    let weight = format!("{name}.weight");
    for (own, said) in [
        (packed(&weight, &[128, 64], 4, 32, "F16"), "supported"),
        (packed(&weight, &[128, 64], 8, 64, "BF16"), "supported"),
        (vec![(weight.clone(), "BF16", vec![128, 64])], "supported"),
        (
            packed(&weight, &[128, 64], 4, 16, "F16"),
            "it is quantised as U32 [128, 8] with scales F16 [128, 4]",
        ),
        (packed(&weight, &[128, 64], 4, 32, "U8"), "supported"),
        (packed(&weight, &[128, 64], 6, 32, "U8"), "with scales U8"),
        (packed(&weight, &[128, 64], 4, 32, "F16")[..2].to_vec(), "up_proj.biases is missing"),
        (packed(&weight, &[128, 64], 4, 32, "F16")[..1].to_vec(), "its element type U32"),
    ] {
        let mut tensors = without.clone();
        tensors.extend(own);
        let error = text(&llama(1), &tensors);
        assert!(error.contains(said), "{said}: {error}");
    }
}

#[test]
fn head_beside_a_tied_embedding_is_not_loaded() {
    let mut config = llama(1);
    config["tie_word_embeddings"] = json!(true);
    let all = tensors(&llama(1), "BF16", None, true);
    let model = read(config.to_string().as_bytes(), &headers(&all)).unwrap();
    assert!(model.description.tied);
    assert!(!model.tensors.iter().any(|(tensor, _)| tensor.name.contains("lm_head")));
    let shape = ModelShape::of(&model);
    assert_eq!((shape.tied, shape.head_bytes), (true, 64 * 2));
}

/// Numbers that no exporter writes, from a seed.
struct Hostile(u64);

impl Hostile {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    fn value(&mut self) -> Value {
        match self.below(14) {
            0 => json!(null),
            1 => json!(0),
            2 => json!(-1),
            3 => json!(u64::MAX),
            4 => json!(1_u64 << 31),
            5 => json!((1_u64 << 24) - 1),
            6 => json!(1e308),
            7 => json!("text"),
            8 => json!([1, [2]]),
            9 => json!({"mode": "affine", "type": "llama3", "factor": 1e-40}),
            10 => json!(true),
            11 => json!(1000),
            12 => json!(65_536),
            _ => json!(self.below(300)),
        }
    }
}

#[test]
fn hostile_configurations_end_in_an_answer() {
    let fields: Vec<String> = qwen3(2)
        .as_object()
        .unwrap()
        .keys()
        .cloned()
        .chain(
            [
                "head_dim",
                "rope_theta",
                "rope_scaling",
                "rope_parameters",
                "layer_types",
                "sliding_window",
                "use_sliding_window",
                "max_window_layers",
                "quantization",
                "quantization_config",
                "tie_word_embeddings",
                "attention_bias",
                "hidden_act",
                "rms_norm_eps",
            ]
            .map(str::to_owned),
        )
        .collect();
    let all = headers(&tensors(&llama(2), "BF16", None, true));
    for seed in 0..3000 {
        let mut hostile = Hostile(seed);
        let mut config = if seed % 2 == 0 { llama(2) } else { qwen3(2) };
        for _ in 0..=hostile.below(4) {
            let field = &fields[hostile.below(fields.len() as u64) as usize];
            config[field] = hostile.value();
        }
        // Whatever it is: no panic, and texts that fit a condition.
        match ModelShape::read(config.to_string().as_bytes(), &all) {
            Ok(shape) => {
                assert!(shape.unsupported.as_ref().is_none_or(|why| why.len() < 1000), "{config}");
                let _ =
                    (shape.total_bytes(), shape.kv_bytes_per_token(), shape.tensor_sizes(), shape.groups());
            }
            Err(error) => assert!(error.to_string().len() < 1000, "{config}: {error}"),
        }
    }
}

#[test]
fn damaged_headers_end_in_an_answer() {
    let (good, size) = header(&tensors(&llama(1), "BF16", Some(32), true));
    for seed in 0..3000 {
        let mut hostile = Hostile(seed);
        let mut bytes = good.clone().into_bytes();
        for _ in 0..=hostile.below(3) {
            let at = hostile.below(bytes.len() as u64) as usize;
            match hostile.below(3) {
                0 => bytes[at] = hostile.below(256) as u8,
                1 => bytes.truncate(at.max(1)),
                _ => bytes[at] = b"0123456789[]{},:\"-eE."[hostile.below(21) as usize],
            }
        }
        let mut headers = Headers::default();
        if headers.add("x", &bytes, size).is_ok() {
            let _ = ModelShape::read(llama(1).to_string().as_bytes(), &headers);
        }
    }
}
