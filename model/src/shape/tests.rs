//! Shapes of models that are and are not supported, of older objects, and of hostile ones.

use serde_json::{Value, json};

use super::*;
use crate::testing::{Tensors, headers, llama, packed, qwen3, tensors};

fn read(config: &Value, tensors: &[(String, &'static str, Vec<u64>)]) -> Result<ModelShape, FileError> {
    ModelShape::read(config.to_string().as_bytes(), &headers(tensors))
}

#[test]
fn layers_are_shared_in_whole_heads_and_whole_groups() {
    for (heads, kv, mlp, group, sizes, size, why) in [
        (32, 8, 14336, 0, vec![1, 2, 4, 8], 3, "8 KV heads cannot be cut into 3"),
        (32, 8, 14336, 64, vec![1, 2, 4, 8], 16, "8 KV heads cannot be cut into 16"),
        (28, 4, 18944, 0, vec![1, 2, 4], 8, "4 KV heads cannot be cut into 8"),
        (30, 4, 4096, 0, vec![1, 2], 4, "30 attention heads cannot be cut into 4"),
        (8, 8, 1001, 0, vec![1], 2, "1001 columns of the MLP cannot be cut into 2"),
        (4, 2, 192, 64, vec![1], 2, "3 groups of 64 quantised MLP columns cannot be cut into 2"),
        (4, 2, 256, 0, vec![1, 2], 0, "2 KV heads cannot be cut into 0"),
        (4, 2, 0, 0, vec![1], 2, "create the Model anew"),
    ] {
        let shape = ModelShape {
            attention_heads: heads,
            key_value_heads: kv,
            head_dim: 64,
            intermediate_size: mlp,
            quantization_group_size: group,
            ..ModelShape::default()
        };
        assert_eq!(shape.tensor_sizes(), sizes, "{shape:?}");
        assert!(shape.why_indivisible(size).is_some_and(|text| text.contains(why)), "{shape:?}");
        assert_eq!(shape.why_indivisible(1), None);
    }
}

#[test]
fn groups_of_each_projection_decide_not_the_largest() {
    let mut config = llama(1);
    config["hidden_size"] = json!(256);
    config["num_key_value_heads"] = json!(4);
    config["intermediate_size"] = json!(512);
    let mut all = tensors(&config, "F16", Some(32), true);
    for (module, shape, group) in [("self_attn.o_proj", [256, 256], 64), ("mlp.down_proj", [256, 512], 128)] {
        let path = format!("model.layers.0.{module}");
        all.retain(|tensor| !tensor.0.starts_with(&path));
        all.extend(packed(&format!("{path}.weight"), &shape, 4, group, "F16"));
    }
    let shape = read(&config, &all).unwrap();
    assert_eq!((shape.unsupported.clone(), shape.quantization_group_size), (None, 128));
    assert_eq!((shape.tensor_sizes(), shape.why_indivisible(4)), (vec![1, 2, 4], None));
}

#[test]
fn supported_shapes_round_trip_and_older_ones_are_read() {
    let shape = read(&qwen3(3), &tensors(&qwen3(3), "BF16", Some(32), true)).unwrap();
    let json = serde_json::to_value(&shape).unwrap();
    assert_eq!(serde_json::from_value::<ModelShape>(json.clone()).unwrap(), shape);
    assert_eq!(json["layerGroups"].as_array().unwrap().len(), 1);
    assert_eq!(json["wholeLayerBytes"], json!(shape.replicated_layer_bytes));
    let mut older = json;
    for field in ["layerGroups", "shardUnits"] {
        older.as_object_mut().unwrap().remove(field);
    }
    let older: ModelShape = serde_json::from_value(older).unwrap();
    assert_eq!(older.groups(), without_keys(shape.groups()));
    // Older engines repeat no KV heads.
    assert_eq!((older.tensor_sizes(), shape.tensor_sizes()), (vec![1, 2], vec![1, 2, 4]));
}

#[test]
fn shared_caches_and_inputs_by_layer_are_counted_once() {
    let mut config = llama(6);
    let kinds =
        ["sliding", "full", "sliding", "sliding", "full", "sliding"].map(|kind| format!("{kind}_attention"));
    let own = json!({"model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32, "layer_types": kinds,
                     "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 100,
                     "sliding_window": 8});
    config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    let shape = read(&config, &tensors(&config, "BF16", None, false)).unwrap();
    assert_eq!(shape.unsupported, None);
    // A table of 16 for each of six layers, as much of a projection of 64, and a norm; the tied head has none of it.
    assert_eq!(shape.per_layer_input_bytes, (100 * 96 + 64 * 96 + 16) * 2);
    assert_eq!((shape.embedding_bytes, shape.head_bytes), (100 * 64 * 2, 64 * 2));
    assert_eq!(shape.widths.unwrap().per_layer_inputs, 96);
    // Two heads of 16 and twice, and one layer with two of 32.
    assert_eq!(shape.kv_bytes_per_token(), (2 * 2 * 2 * 16 + 2 * 2 * 32) * 2);
    // Gate, its way back and norms are whole on every rank.
    let replicated = |heads: u64, norms: u64| (2 * 64 * 16 + 64 + 4 * 64 + 1 + norms * heads) * 2;
    let groups = shape.groups();
    assert_eq!(
        groups.iter().map(|group| group.replicated_bytes).collect::<Vec<_>>(),
        [
            replicated(16, 2),
            replicated(32, 2),
            replicated(16, 2),
            replicated(16, 1),
            replicated(32, 1),
            replicated(16, 1)
        ]
    );
    assert!(groups[3..].iter().all(|group| group.kv_bytes == 0 && group.state == LayerState::default()));
    assert_eq!(shape.kept_together(), std::slice::from_ref(&(1..6)));
    assert_eq!((shape.max_stages(), shape.tensor_sizes()), (2, vec![1, 2, 4]));
    let json = serde_json::to_value(&shape).unwrap();
    assert_eq!(json["layerGroups"][4]["sharesCacheOf"], json!(1));
    assert_eq!(serde_json::from_value::<ModelShape>(json).unwrap(), shape);
    // A status may hold any number.
    let mut hostile = shape;
    hostile.layer_groups[0].shares_cache_of = Some(u32::MAX);
    hostile.layer_groups[5].shares_cache_of = Some(5);
    assert_eq!(hostile.kept_together(), std::slice::from_ref(&(1..5)));
    assert_eq!(hostile.max_stages(), 3);
}

/// As the sizes of layers alone say it.
fn without_keys(groups: Vec<LayerGroup>) -> Vec<LayerGroup> {
    groups.into_iter().map(|group| LayerGroup { kv_bytes: 0, ..group }).collect()
}

#[test]
fn groups_that_contradict_the_layers_are_ignored() {
    let shape = read(&llama(3), &tensors(&llama(3), "BF16", None, false)).unwrap();
    let good = without_keys(shape.groups());
    for change in [
        |groups: &mut Vec<LayerGroup>| groups[0].count = 2,
        |groups: &mut Vec<LayerGroup>| groups[0].count = u32::MAX,
        |groups: &mut Vec<LayerGroup>| groups[0].weight_bytes += 1,
        |groups: &mut Vec<LayerGroup>| groups.insert(0, LayerGroup::default()),
    ] {
        let mut wrong = shape.clone();
        change(&mut wrong.layer_groups);
        assert_eq!(wrong.groups(), good);
    }
}

#[test]
fn unsupported_model_has_a_size_and_says_why() {
    let mut dynamic = llama(2);
    dynamic["rope_scaling"] = json!({"rope_type": "dynamic", "factor": 4.0});
    let all = tensors(&llama(2), "BF16", None, true);
    let (supported, refused) = (read(&llama(2), &all).unwrap(), read(&dynamic, &all).unwrap());
    assert!(refused.unsupported.as_ref().unwrap().contains("rope scaling \"dynamic\""));
    assert_eq!(
        (refused.total_bytes(), refused.layers, refused.parameters),
        (supported.total_bytes(), 2, supported.parameters)
    );
    let mamba = json!({"model_type": "mamba", "text_config": {"hidden_size": 8}});
    let shape = read(&mamba, &[("backbone.x".to_owned(), "F32", vec![10])]).unwrap();
    assert_eq!((shape.architecture.as_str(), shape.layers, shape.total_bytes()), ("mamba", 0, 40));
    assert!(shape.unsupported.unwrap().contains("supported are bert, deepseek_v3, gemma3,"));
    // A tensor of a sound model that is missing is said in the same way.
    let less: Vec<_> = all.iter().filter(|tensor| !tensor.0.contains("q_proj")).cloned().collect();
    assert!(read(&llama(2), &less).unwrap().unsupported.unwrap().contains("q_proj.weight is missing"));
}

#[test]
fn unsupported_quantised_model_counts_its_parameters_unpacked() {
    let mut config = llama(2);
    config["quantization"] = json!({"group_size": 32, "bits": 4});
    let packed = tensors(&config, "BF16", Some(32), true);
    let supported = read(&config, &packed).unwrap();
    config["rope_scaling"] = json!({"rope_type": "dynamic", "factor": 4.0});
    let refused = read(&config, &packed).unwrap();
    assert!(refused.unsupported.is_some());
    assert_eq!(refused.parameters, supported.parameters);
    assert_eq!((refused.reader, supported.reader), (READER, READER));
}

#[test]
fn hostile_texts_do_not_fill_a_status() {
    let long = "a".repeat(1 << 20);
    let all = tensors(&llama(2), "BF16", None, true);
    for config in [json!(long), json!({"model_type": long}), json!({"model_type": [long]})] {
        let error = read(&config, &all).unwrap_err().to_string();
        assert!(error.len() < 1024, "{}", error.len());
    }
    for header in
        [json!(long), json!({"t": long}), json!({"t": {"dtype": [long]}}), json!({"t": {"shape": long}})]
    {
        let mut headers = Headers::default();
        let header = header.to_string();
        let size = header.len() as u64 + 8;
        let error = headers.add("model.safetensors", header.as_bytes(), size).unwrap_err().to_string();
        assert!(error.len() < 1024, "{}", error.len());
    }
    let index = json!({"weight_map": long}).to_string();
    assert!(crate::index::index_files(index.as_bytes()).unwrap_err().to_string().len() < 1024);
}

#[test]
fn damaged_models_are_errors() {
    let all = tensors(&llama(2), "BF16", None, true);
    let without =
        |part: &str| all.iter().filter(|tensor| !tensor.0.contains(part)).cloned().collect::<Vec<_>>();
    for (tensors, said) in [
        (without("layers.1."), "layer 1 has no tensors"),
        (without("embed_tokens"), "no token embedding"),
        (tensors(&llama(3), "BF16", None, true), "is of layer 2, but num_hidden_layers is 2"),
    ] {
        assert!(read(&llama(2), &tensors).unwrap_err().to_string().contains(said), "{said}");
    }
}

#[test]
fn sizes_that_no_machine_has_are_added_up_without_overflow() {
    let shape = ModelShape {
        layer_bytes: vec![u64::MAX; 4],
        embedding_bytes: u64::MAX,
        kv_bytes_per_token_per_layer: u64::MAX,
        key_value_heads: u32::MAX,
        attention_heads: u32::MAX,
        head_dim: u32::MAX,
        intermediate_size: u32::MAX,
        quantization_group_size: 64,
        ..ModelShape::default()
    };
    assert_eq!((shape.total_bytes(), shape.kv_bytes_per_token()), (u64::MAX, u64::MAX));
    assert_eq!(
        shape.tensor_sizes(),
        [1, 3, 5, 15, 17, 51]
            .iter()
            .copied()
            .filter(|size| shape.why_indivisible(*size).is_none())
            .collect::<Vec<_>>()
    );
}

/// Played models whose numbers were taken from the reader that the agent had before.
fn golden() -> Vec<(&'static str, Value, Tensors)> {
    let with = |mut config: Value, fields: Value| {
        config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        config
    };
    let biased = with(llama(2), json!({"attention_bias": true, "mlp_bias": true}));
    let mistral = with(llama(3), json!({"model_type": "mistral", "max_position_embeddings": 4096}));
    let grouped = with(llama(2), json!({"quantization": {"group_size": 32, "bits": 4}}));
    let mut mixed = tensors(&grouped, "F16", Some(32), true);
    mixed.retain(|tensor| !tensor.0.starts_with("model.layers.1.mlp.down_proj"));
    mixed.extend(packed("model.layers.1.mlp.down_proj.weight", &[64, 128], 8, 64, "F16"));
    let overridden = with(
        llama(2),
        json!({"quantization": {"group_size": 32, "bits": 4, "model.layers.1.mlp.down_proj": {"group_size": 64, "bits": 8}}}),
    );
    vec![
        ("llama", llama(4), tensors(&llama(4), "BF16", None, true)),
        ("llama, tied", llama(4), tensors(&llama(4), "F16", None, false)),
        ("llama, biases, 32 bits", biased.clone(), tensors(&biased, "F32", None, true)),
        ("llama, quantised", grouped.clone(), tensors(&grouped, "BF16", Some(32), true)),
        ("llama, mixed", overridden, mixed),
        ("mistral", mistral.clone(), tensors(&mistral, "BF16", None, true)),
        ("qwen3", qwen3(3), tensors(&qwen3(3), "BF16", None, true)),
        (
            "qwen3, tied, quantised",
            with(qwen3(3), json!({"quantization": {"group_size": 64, "bits": 4}})),
            tensors(&qwen3(3), "BF16", Some(64), false),
        ),
    ]
}

#[test]
fn numbers_are_those_of_the_reader_before() {
    type Row = (u64, u64, u64, bool, Vec<u64>, u64, u32, u64, Vec<u32>, u32, u32, u32);
    let expected: Vec<(&str, Row)> = vec![
        ("llama", (160832, 12800, 12928, false, vec![73984; 4], 128, 0, 256, vec![1, 2, 4], 16, 128, 128)),
        ("llama, tied", (154432, 12800, 128, true, vec![73984; 4], 128, 0, 256, vec![1, 2, 4], 16, 128, 128)),
        (
            "llama, biases, 32 bits",
            (87872, 25600, 25856, false, vec![150016; 2], 256, 0, 1024, vec![1, 2, 4], 16, 128, 128),
        ),
        (
            "llama, quantised",
            (86848, 4000, 4128, false, vec![23296; 2], 128, 32, 256, vec![1, 2], 16, 128, 128),
        ),
        // The reader before took the largest group of any projection for all of them, and allowed no split.
        (
            "llama, mixed",
            (86848, 4000, 4128, false, vec![23296, 26880], 128, 64, 256, vec![1, 2], 16, 128, 128),
        ),
        ("mistral", (123840, 12800, 12928, false, vec![73984; 3], 128, 0, 256, vec![1, 2, 4], 16, 4096, 128)),
        ("qwen3", (160896, 12800, 12928, false, vec![98688; 3], 256, 0, 384, vec![1, 2, 4], 32, 128, 128)),
        (
            "qwen3, tied, quantised",
            (154496, 3600, 128, true, vec![28032; 3], 256, 64, 384, vec![1, 2], 32, 128, 128),
        ),
    ];
    // But for the number of ranks: four can share two KV heads now.
    for ((story, config, tensors), (name, row)) in golden().into_iter().zip(expected) {
        let shape = read(&config, &tensors).unwrap();
        assert_eq!((shape.unsupported.as_deref(), story), (None, name));
        let sizes = shape.tensor_sizes();
        let ModelShape {
            parameters,
            embedding_bytes,
            head_bytes,
            tied,
            layer_bytes,
            kv_bytes_per_token_per_layer,
            quantization_group_size,
            replicated_layer_bytes,
            head_dim,
            context_length,
            intermediate_size,
            ..
        } = shape;
        let found = (
            parameters,
            embedding_bytes,
            head_bytes,
            tied,
            layer_bytes,
            kv_bytes_per_token_per_layer,
            quantization_group_size,
            replicated_layer_bytes,
            sizes,
            head_dim,
            context_length,
            intermediate_size,
        );
        assert_eq!(found, row, "{story}");
    }
}

/// A mixture of experts in which rows of each kind have other bits, or none.
#[test]
fn packed_while_read_is_added_up_as_convert_packs_it() {
    let config = json!({"model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": 128, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 10,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": true,
        "rope_theta": 10000.0, "rms_norm_eps": 1e-6});
    let shape = read(&config, &tensors(&config, "BF16", None, true)).unwrap();
    let packed = |values: u64, bits: u64| values * bits / 8 + values / 64 * 4;
    let attention = 2 * 128 * 128 + 2 * 64 * 128;
    let norms = 2 * (2 * 128 + 2 * 32);
    for (quantization, bits) in [(LoadQuantization::Int4, 4), (LoadQuantization::Int8, 8)] {
        let own = shape.quantised(quantization).unwrap();
        assert_eq!((own.embedding_bytes, own.head_bytes), (packed(1280, bits), packed(1280, bits) + 256));
        // The router has 8 bits, and rows of 96 do not divide into groups of 64.
        let experts = packed(2 * 4 * 96 * 128, bits) + 2 * 4 * 128 * 96;
        assert_eq!(own.layer_bytes, [packed(attention, bits) + packed(4 * 128, 8) + norms + experts]);
        assert_eq!((own.quantization_group_size, own.tensor_sizes()), (64, vec![1, 2]));
        assert_eq!(own.groups()[0].experts.unwrap().weight_bytes, experts);
    }
    assert!(shape.total_bytes() > shape.quantised(LoadQuantization::Int8).unwrap().total_bytes());
}

#[test]
fn packed_files_are_not_packed_again() {
    let packed = read(&qwen3(1), &tensors(&qwen3(1), "BF16", Some(32), true)).unwrap();
    let refused = packed.quantised(LoadQuantization::Int4).unwrap_err();
    assert!(packed.quantized.is_empty() && refused.contains("packed already"), "{refused}");
    let older = ModelShape { reader: READER - 1, ..packed };
    assert!(older.quantised(LoadQuantization::Int8).unwrap_err().contains("older release"));
    let config = qwen3(1).to_string();
    let headers = headers(&tensors(&qwen3(1), "BF16", Some(32), true));
    let error = crate::read_as(config.as_bytes(), &headers, Some(LoadQuantization::Int8)).unwrap_err();
    let said =
        "as affine with 4 bits, and spec.engine.quantization is Int8; leave spec.engine.quantization out";
    assert!(error.to_string().contains(said), "{error}");
}

#[test]
fn projections_that_a_family_keeps_in_more_bits_are_kept() {
    let bits = |config: &Value, path: &str| {
        let headers = headers(&tensors(config, "BF16", None, true));
        let model =
            crate::read_as(config.to_string().as_bytes(), &headers, Some(LoadQuantization::Int4)).unwrap();
        let found = model.tensors.iter().find(|(tensor, _)| tensor.name.contains(path));
        let (_, stored) = found.unwrap_or_else(|| panic!("no {path}"));
        (stored.packing.map(|packing| packing.bits), stored.packs)
    };
    let mut granite = llama(1);
    granite["model_type"] = json!("granite");
    let latents = json!({"model_type": "deepseek_v3", "num_hidden_layers": 1, "hidden_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 256, "vocab_size": 10,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1,
        "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "kv_lora_rank": 64, "q_lora_rank": 96,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "rms_norm_eps": 1e-6});
    for (config, path, expected) in [
        (&granite, "o_proj.weight", (Some(8), true)),
        (&granite, "down_proj.weight", (Some(8), true)),
        (&granite, "lm_head", (Some(8), true)),
        (&granite, "q_proj.weight", (Some(4), true)),
        (&latents, "mlp.gate.weight", (None, false)),
        (&latents, "embed_q", (None, false)),
        (&latents, "unembed_out", (Some(4), true)),
        (&latents, "switch_mlp.down_proj", (Some(4), true)),
        (&latents, "input_layernorm", (None, false)),
    ] {
        assert_eq!(bits(config, path), expected, "{path}");
    }
}
