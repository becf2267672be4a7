//! What each family takes from config.json, and what it refuses.

use serde_json::{Value, json};

use super::*;
use crate::description::{Activation, Attention, Mixer, Mlp, QkNorm, RopeScaling, Scoring, Yarn};
use crate::testing::{headers, llama, qwen3, tensors};

fn read(config: &Value) -> Result<crate::Model, Error> {
    // The tensors are those of a plain model of these sizes: what is refused is refused by the configuration.
    let mut plain = llama(2);
    if let Some(known) = config["model_type"].as_str().filter(|name| is_known(name)) {
        plain["model_type"] = json!(known);
    }
    plain["head_dim"] = json!(32);
    plain["rope_theta"] = json!(1e6);
    crate::read(config.to_string().as_bytes(), &headers(&tensors(&plain, "BF16", None, true)))
}

fn refusal(config: &Value) -> String {
    match read(config) {
        Err(Error::Unsupported(why)) => why.to_string(),
        other => panic!("{config}: {other:?}"),
    }
}

fn with(mut config: Value, fields: Value) -> Value {
    config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    config
}

#[test]
fn what_the_engine_lacks_is_refused_with_place_and_remedy() {
    let mistral = || with(llama(2), json!({"model_type": "mistral"}));
    for (config, said) in [
        (
            with(llama(2), json!({"model_type": "qwen3_moee"})),
            "is not supported; supported are bert, deepseek_v3, gemma3, gemma3_text,",
        ),
        (
            with(llama(2), json!({"quantization": {"group_size": 32, "bits": 4, "mode": "fp2"}})),
            "config.json quantization.mode: quantization mode \"fp2\"",
        ),
        (
            with(
                llama(2),
                json!({"quantization": {"group_size": 64, "bits": 4, "lm_head": {"mode": "fp2"}}}),
            ),
            "config.json quantization \"lm_head\": quantization mode \"fp2\"",
        ),
        (with(llama(2), json!({"model_type": "mixtral"})), "the nearest name is mistral"),
        (
            with(llama(2), json!({"quantization_config": {"quant_method": "bitnet"}})),
            "quantization method \"bitnet\" is not supported; supported are mxfp4, fp8, compressed-tensors, awq, gptq",
        ),
        (
            with(llama(2), json!({"quantization_config": {"quant_method": "awq", "bits": 3}})),
            "quantization_config.bits: it is 3, which is not supported; supported is 4",
        ),
        (
            with(mistral(), json!({"layer_types": ["sliding_attention", "full_attention"]})),
            "layer type \"sliding_attention\"",
        ),
        (
            with(llama(2), json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})),
            "rope scaling \"dynamic\" is not supported",
        ),
        (
            with(llama(2), json!({"rope_scaling": {"type": "linear"}})),
            "rope scaling \"linear\" needs a positive factor, which is absent",
        ),
        (
            with(llama(2), json!({"rope_scaling": {"type": "llama3", "factor": -1}})),
            "positive factor, which is -1",
        ),
        (with(llama(2), json!({"hidden_act": "gelu"})), "activation \"gelu\""),
        (with(llama(2), json!({"head_dim": 33})), "head_dim is 33"),
        (with(llama(2), json!({"model_type": "qwen3"})), "head_dim is missing"),
        (with(llama(2), json!({"model_type": "qwen3", "head_dim": 16})), "rope_theta is missing"),
        (with(qwen3(2), json!({"attention_bias": true})), "attention_bias of a qwen3 model"),
        (with(qwen3(2), json!({"mlp_bias": true})), "mlp_bias of a qwen3 model"),
    ] {
        let text = refusal(&config);
        assert!(text.contains(said), "{config}: {text}");
        let [place, rest] = text.splitn(2, ": ").collect::<Vec<_>>()[..] else { panic!("{text}") };
        assert!(place.starts_with("config.json ") && rest.contains("; "), "place and remedy: {text}");
    }
}

#[test]
fn windows_are_of_the_layers_that_have_them() {
    let mistral = |fields| {
        with(
            with(
                llama(2),
                json!({"model_type": "mistral", "max_position_embeddings": 32768, "head_dim": 32}),
            ),
            fields,
        )
    };
    let qwen3 = |fields| with(with(qwen3(2), json!({"max_position_embeddings": 32768})), fields);
    let windows = |list: &[u32]| {
        list.iter().map(|&window| Some(window).filter(|&window| window > 0)).collect::<Vec<_>>()
    };
    for (config, expected) in [
        (mistral(json!({})), vec![0, 0]),
        (mistral(json!({"sliding_window": null})), vec![0, 0]),
        (mistral(json!({"sliding_window": 4096})), vec![4096, 4096]),
        (mistral(json!({"sliding_window": 40000})), vec![0, 0]),
        (qwen3(json!({"sliding_window": 4096})), vec![0, 0]),
        (qwen3(json!({"sliding_window": 4096, "use_sliding_window": false})), vec![0, 0]),
        (qwen3(json!({"sliding_window": 4096, "use_sliding_window": true})), vec![4096, 4096]),
        (
            qwen3(json!({"sliding_window": 4096, "use_sliding_window": true, "max_window_layers": 1})),
            vec![0, 4096],
        ),
        (
            qwen3(json!({"sliding_window": 4096, "use_sliding_window": true, "max_window_layers": 2})),
            vec![0, 0],
        ),
        // Transformers reads no window of a Llama.
        (
            with(llama(2), json!({"sliding_window": 64, "max_position_embeddings": 32768, "head_dim": 32})),
            vec![0, 0],
        ),
    ] {
        let description = read(&config).unwrap().description;
        let found: Vec<_> = description
            .mixers()
            .map(|mixer| match mixer {
                Mixer::Attention(attention) => attention.window,
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!((found, description.context_length), (windows(&expected), 32768), "{config}");
    }
}

#[test]
fn families_differ_in_what_is_their_own() {
    let head = |epsilon| Some(QkNorm::Head { epsilon });
    for (config, head_dim, norm, bias) in [
        (llama(3), 16, None, false),
        (with(llama(3), json!({"attention_bias": true, "mlp_bias": true})), 16, None, true),
        (with(llama(3), json!({"model_type": "mistral"})), 16, None, false),
        (qwen3(3), 32, head(1e-5), false),
    ] {
        let all = headers(&tensors(&config, "F16", None, true));
        let description = crate::read(config.to_string().as_bytes(), &all).unwrap().description;
        let attention = description.attention().unwrap();
        assert_eq!(
            (description.layers.len(), description.model_type.as_str()),
            (3, config["model_type"].as_str().unwrap())
        );
        assert_eq!(
            (attention.key_dim, attention.value_dim, attention.qk_norm, attention.output_bias),
            (head_dim, head_dim, norm, bias)
        );
        assert_eq!(attention.scale, (head_dim as f32).powf(-0.5));
    }
}

#[test]
fn scalings_are_read_from_either_place() {
    let llama3 = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 };
    for (fields, scaling) in [
        (json!({}), RopeScaling::None),
        (json!({"rope_scaling": {"rope_type": "default"}}), RopeScaling::None),
        (json!({"rope_scaling": {"type": "linear", "factor": 2}}), RopeScaling::Linear { factor: 2.0 }),
        (
            json!({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
            RopeScaling::Linear { factor: 2.0 },
        ),
        (json!({"rope_scaling": {"rope_type": "llama3", "factor": 8}}), llama3.clone()),
        (
            json!({"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}}),
            RopeScaling::Yarn(Yarn {
                factor: 4.0,
                original: 64.0,
                beta_fast: 32.0,
                beta_slow: 1.0,
                scale: (0.1 * 4.0_f64.ln() + 1.0) as f32,
            }),
        ),
        (
            json!({"rope_parameters": {"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 8192}}),
            llama3,
        ),
    ] {
        let config = with(llama(1), fields.clone());
        let all = headers(&tensors(&config, "F16", None, true));
        let model = crate::read(config.to_string().as_bytes(), &all).unwrap();
        assert_eq!(
            model.description.attention().unwrap().rope.as_ref().unwrap().scaling,
            scaling,
            "{fields}"
        );
    }
}

#[test]
fn field_that_may_change_the_numbers_is_refused_by_name() {
    for (fields, place, value) in [
        (json!({"attn_logit_softcapping": 50.0}), "attn_logit_softcapping", "50.0"),
        (json!({"residual_multiplier": 0.22}), "residual_multiplier", "0.22"),
        (json!({"no_rope_layers": [1, 1, 1, 0]}), "no_rope_layers", "a list of 4"),
        (json!({"rope_interleaved": true}), "rope_interleaved", "true"),
        (json!({"norm_type": "layernorm"}), "norm_type", "\"layernorm\""),
        (json!({"moe": {"experts": {"count": 8}}}), "moe", "an object of 1"),
        (
            json!({"rope_parameters": {"rope_type": "linear", "factor": 2, "twist": 1.2}}),
            "rope_parameters.twist",
            "1.2",
        ),
    ] {
        let text = refusal(&with(llama(2), fields));
        let said = format!("config.json {place}: this release does not know the field");
        assert!(text.starts_with(&said) && text.contains(&format!("(it is {value})")), "{text}");
    }
}

#[test]
fn fields_of_published_files_that_change_nothing_pass() {
    for fields in [
        // As Transformers 4 and 5 write Llama, Mistral and Qwen3, and mlx-lm and others on top of them.
        json!({"_name_or_path": "x", "architectures": ["LlamaForCausalLM"], "attention_dropout": 0.1, "bos_token_id": 128_000,
               "eos_token_id": [128_001, 128_009], "initializer_range": 0.02, "pretraining_tp": 2, "torch_dtype": "bfloat16",
               "transformers_version": "4.43.0", "use_cache": true, "hidden_act": "silu", "mlp_bias": false}),
        json!({"dtype": "bfloat16", "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "chunk_size_feed_forward": 0,
               "is_encoder_decoder": false, "output_attentions": false, "problem_type": null, "return_dict": true,
               "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
        json!({"max_window_layers": 2, "use_sliding_window": false, "sliding_window": null, "layer_types": ["full_attention", "full_attention"]}),
        json!({"is_llama_config": true, "rope_interleaved": false, "transformers.js_config": {"dtype": "q4"}}),
        json!({"quantization": {"group_size": 64, "bits": 4, "model.layers.0.mlp.up_proj": {"group_size": 32, "bits": 8}, "lm_head": false},
               "quantization_config": {"group_size": 64, "bits": 4}, "unsloth_fixed": true, "_attn_implementation_autoset": true}),
        json!({"tokenizer_class": "LlamaTokenizerFast", "pad_token_id": 0, "max_length": 4096, "temperature": 0.9, "top_p": 0.6,
               "num_experts": 0, "mamba_config": {}, "notes": "", "clip_qkv": null}),
    ] {
        let config = with(with(llama(2), json!({"head_dim": 32, "rope_theta": 10_000.0})), fields);
        let model = read(&config);
        assert!(model.is_ok(), "{config}: {}", model.unwrap_err());
    }
}

/// A configuration of another family, of the same sizes.
fn of(model_type: &str, fields: Value) -> Value {
    with(with(llama(2), json!({"model_type": model_type, "head_dim": 32, "rope_theta": 1e6})), fields)
}

fn describe(config: &Value) -> Result<crate::Model, Error> {
    let all = headers(&tensors(config, "BF16", None, true));
    crate::read(config.to_string().as_bytes(), &all)
}

#[test]
fn published_fields_of_families_are_read_or_refused() {
    // Each family has another of the two counts; one of the other family asks for nothing.
    let experts = json!({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_local_experts": 4});
    for (model_type, fields, refused) in [
        ("phi3", json!({"full_attn_mod": 1, "interpolate_factor": 1, "head_dim": null}), None),
        ("phi3", json!({"interpolate_factor": 2}), Some("interpolate_factor")),
        ("seed_oss", json!({"residual_dropout": 0.1}), None),
        (
            "minimax_m2",
            json!({"layernorm_mlp_beta": 1.0, "mlp_intermediate_size": 8192, "shared_moe_mode": "sigmoid", "rotary_dim": 16, "num_experts": 0, "moe_intermediate_size": 0}),
            None,
        ),
        (
            "minimax_m2",
            json!({"num_experts": 0, "moe_intermediate_size": 0, "layernorm_mlp_beta": 3.5}),
            Some("layernorm_mlp_beta"),
        ),
        ("qwen3_moe", json!({"use_qk_norm": true, "num_local_experts": 0}), None),
        ("qwen3_moe", json!({"num_local_experts": 0, "num_experts_per_tok": 5}), Some("5 of 4 experts")),
        ("gemma3_text", json!({"hidden_activation": null}), None),
        (
            "gemma4_text",
            json!({"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision",
                   "attention_k_eq_v": true, "num_global_key_value_heads": 1, "global_head_dim": 64}),
            None,
        ),
        // What the smallest ones leave out.
        ("gemma4_text", json!({"hidden_size_per_layer_input": 0}), Some("num_kv_shared_layers")),
        (
            "gemma4_text",
            json!({"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": true}),
            Some("use_bidirectional_attention"),
        ),
        ("deepseek_v3", json!({"num_experts": 0, "num_local_experts": 0}), Some("qk_rope_head_dim")),
        ("mistral", json!({"sliding_window": 0}), Some("sliding_window")),
    ] {
        let of_experts = matches!(model_type, "qwen3_moe" | "minimax_m2" | "deepseek_v3");
        let own = if of_experts { experts.clone() } else { json!({}) };
        let config = with(of(model_type, own), fields);
        let error = match refused {
            None => describe(&config).err(),
            // Refused by the configuration, whatever the tensors are.
            Some(_) => {
                let all = headers(&tensors(&llama(2), "BF16", None, true));
                crate::read(config.to_string().as_bytes(), &all).err()
            }
        };
        let said = error.map(|error| error.to_string());
        assert_eq!(said.is_some(), refused.is_some(), "{config}: {said:?}");
        assert!(said.unwrap_or_default().contains(refused.unwrap_or_default()), "{config}");
    }
    // The first Gemmas say nothing of their activation, and mean this one.
    let model = describe(&of("gemma3_text", json!({}))).unwrap();
    let Some(Mlp::Dense(dense)) = model.description.mlps().next() else { panic!("{model:?}") };
    assert_eq!(dense.activation, Activation::GeluTanh);
}

#[test]
fn a_gemma_4_has_heads_of_two_widths_and_a_state_for_each() {
    let config = of(
        "gemma4_text",
        json!({"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": true,
               "num_global_key_value_heads": 1, "global_head_dim": 64, "sliding_window": 8,
               "layer_types": ["sliding_attention", "full_attention"]}),
    );
    let model = describe(&config).unwrap();
    let attention: Vec<_> = model
        .description
        .mixers()
        .map(|mixer| match mixer {
            Mixer::Attention(attention) => attention,
            other => panic!("{other:?}"),
        })
        .collect();
    let of = |attention: &Attention| {
        (attention.key_dim, attention.kv_heads, attention.window, attention.values_are_keys)
    };
    assert_eq!([of(attention[0]), of(attention[1])], [(32, 2, Some(8), false), (64, 1, None, true)]);
    let quarter = RopeScaling::Proportional { rotated: 16, factor: 1.0 };
    assert_eq!(attention[1].rope.as_ref().unwrap().scaling, quarter);
    assert!(!model.tensors.iter().any(|(tensor, _)| tensor.name == "model.layers.1.self_attn.v_proj.weight"));
}

/// A Gemma 4 E: six layers, of which the last three read the keys and values of others.
fn gemma4_e(fields: Value) -> Value {
    let kinds =
        ["sliding", "full", "sliding", "sliding", "full", "sliding"].map(|kind| format!("{kind}_attention"));
    with(
        of(
            "gemma4_text",
            json!({"num_hidden_layers": 6, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 16,
                   "vocab_size_per_layer_input": 100, "global_head_dim": 64, "sliding_window": 8, "layer_types": kinds}),
        ),
        fields,
    )
}

#[test]
fn a_gemma_4_e_shares_caches_and_has_inputs_by_layer() {
    let model = describe(&gemma4_e(json!({}))).unwrap();
    let description = &model.description;
    let owners: Vec<_> = (0..6).map(|layer| description.shares_cache_of(layer)).collect();
    assert_eq!(owners, [None, None, None, Some(2), Some(1), Some(2)]);
    assert_eq!(description.kept_together(), std::slice::from_ref(&(1..6)));
    let mlps: Vec<u32> = description.mlps().map(Mlp::width).collect();
    assert_eq!(mlps, [128, 128, 128, 256, 256, 256]);
    let inputs = description.per_layer_inputs.unwrap();
    assert_eq!((inputs.width, inputs.vocab_size, inputs.activation), (16, 100, Activation::GeluTanh));
    assert_eq!((inputs.embedding_scale, inputs.projection_scale), (4.0, 0.125));
    assert_eq!([0, 1, 6].map(|first| description.stage_width(first)), [64 + 96, 64 + 80, 64]);
    let names =
        |wanted: &str| model.tensors.iter().filter(|(tensor, _)| tensor.name.contains(wanted)).count();
    assert_eq!([names("q_proj"), names("k_proj"), names("v_proj")], [6, 3, 3]);
    assert_eq!([names("q_norm"), names("k_norm"), names("per_layer_input_gate")], [6, 3, 6]);
    let narrow = describe(&gemma4_e(json!({"use_double_wide_mlp": false}))).unwrap();
    assert!(narrow.description.mlps().all(|mlp| mlp.width() == 128));
}

#[test]
fn a_gemma_4_e_is_the_same_in_either_layout() {
    let config = gemma4_e(json!({}));
    let described = |prefix: &str, rest: &[String]| {
        let mut all = tensors(&config, "BF16", None, false);
        for (name, ..) in &mut all {
            *name = name.replacen("model.", prefix, 1);
        }
        // What the original export has, and nothing reads: projections of layers that read those of others, and a tower.
        all.extend(rest.iter().map(|name| (format!("{prefix}{name}"), "BF16", vec![64, 64])));
        all.push(("model.vision_tower.x.weight".to_owned(), "BF16", vec![64, 64]));
        crate::read(config.to_string().as_bytes(), &headers(&all)).unwrap()
    };
    let dropped =
        ["k_proj.weight", "v_proj.weight", "k_norm.weight"].map(|name| format!("layers.5.self_attn.{name}"));
    let converted = described("language_model.model.", &[]);
    let original = described("model.language_model.", &dropped);
    assert_eq!(converted.description, original.description);
    let stored = |model: &crate::Model| model.tensors.iter().map(|(_, stored)| *stored).collect::<Vec<_>>();
    assert_eq!(stored(&converted), stored(&original));
}

#[test]
fn a_gemma_4_e_without_an_owner_of_each_kind_is_refused() {
    for (fields, said) in [
        (json!({"num_kv_shared_layers": 6}), "num_kv_shared_layers"),
        (json!({"num_kv_shared_layers": 5}), "5 of 6 layers, before which there is none of the same kind"),
        (json!({"vocab_size_per_layer_input": 99}), "99, fewer than the 100 tokens"),
        (json!({"vocab_size_per_layer_input": 0}), "vocab_size_per_layer_input"),
        (json!({"hidden_size_per_layer_input": 1 << 20}), "hidden_size_per_layer_input"),
    ] {
        let all = headers(&tensors(&gemma4_e(json!({})), "BF16", None, false));
        let config = gemma4_e(fields);
        let found = crate::read(config.to_string().as_bytes(), &all).unwrap_err().to_string();
        assert!(found.contains(said), "{config}: {found}");
    }
}

/// A Nemotron-H of all four kinds of layers.
fn nemotron_h(fields: Value) -> Value {
    with(
        of(
            "nemotron_h",
            json!({"num_hidden_layers": 4, "hybrid_override_pattern": "M*-E", "layer_norm_epsilon": 1e-5, "mamba_num_heads": 8,
                   "mamba_head_dim": 16, "mamba_proj_bias": false, "mamba_hidden_act": "silu", "ssm_state_size": 32,
                   "n_groups": 4, "conv_kernel": 4, "use_conv_bias": true, "use_bias": false, "mlp_hidden_act": "relu2",
                   "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                   "moe_shared_expert_intermediate_size": 96, "n_group": 2, "topk_group": 1, "norm_topk_prob": true,
                   "routed_scaling_factor": 2.5, "chunk_size": 128, "expand": 2, "norm_eps": 1e-5, "num_logits_to_keep": 1,
                   "mamba_ssm_cache_dtype": "float32", "residual_in_fp32": false, "time_step_floor": 1e-4,
                   "time_step_max": 0.1, "time_step_min": 0.001, "use_mamba_kernels": true, "partial_rotary_factor": 1.0,
                   "rescale_prenorm_residual": true, "rope_theta": 10000}),
        ),
        fields,
    )
}

#[test]
fn a_nemotron_h_has_layers_of_one_block_each() {
    let model = describe(&nemotron_h(json!({"moe_latent_size": 32}))).unwrap();
    let layers = &model.description.layers;
    let Some(Mixer::Mamba2(mamba)) = &layers[0].mixer else { panic!("{layers:?}") };
    assert_eq!((mamba.heads, mamba.groups, mamba.step_limits), (8, 4, [0.0, f32::INFINITY]));
    let Some(Mixer::Attention(attention)) = &layers[1].mixer else { panic!("{layers:?}") };
    assert_eq!((attention.kv_heads, attention.key_dim, &attention.rope), (2, 32, &None));
    let Some(Mlp::Dense(dense)) = &layers[2].mlp else { panic!("{layers:?}") };
    assert_eq!((dense.intermediate, dense.activation), (128, Activation::SquaredRelu));
    let Some(Mlp::Experts(experts)) = &layers[3].mlp else { panic!("{layers:?}") };
    assert_eq!((experts.latent, experts.shared_width(), experts.router.scale), (Some(32), 96, 2.5));
    assert_eq!((experts.router.scoring, experts.router.groups), (Scoring::Sigmoid, 2));
    let blocks = layers.iter().map(|layer| (layer.mixer.is_some(), layer.mlp.is_some()));
    assert!(blocks.eq([(true, false), (true, false), (false, true), (false, true)]));
    assert!(layers.iter().all(|layer| layer.norms.names().eq(["norm"])));
    let shared: Vec<_> = crate::divisibility::shard_units(&model.description, &model.tensors);
    assert!(shared.iter().any(|unit| (unit.count, unit.unit.as_str()) == (4, "groups of the state space")));
}

#[test]
fn a_nemotron_h_names_its_layers_in_either_way() {
    let list = |names: [&str; 4]| json!({"hybrid_override_pattern": null, "num_hidden_layers": null, "layers_block_type": names});
    for (fields, said) in [
        (list(["mamba", "attention", "mlp", "moe"]), None),
        (list(["linear_attention", "full_attention", "mlp", "moe"]), None),
        (json!({"hybrid_override_pattern": ["M", "*", "-", "E"], "num_hidden_layers": null}), None),
        (json!({"time_step_limit": [0.0, "Infinity"], "num_nextn_predict_layers": 1}), None),
        (list(["mamba", "attention", "mlp", "sparse"]), Some("layer kind \"sparse\"")),
        (json!({"hybrid_override_pattern": "M*-O"}), Some("layer kind \"O\"")),
        (json!({"hybrid_override_pattern": "M*-"}), Some("3 kinds for 4 layers")),
        (json!({"hybrid_override_pattern": "M".repeat(1001)}), Some("hybrid_override_pattern")),
        (json!({"mlp_hidden_act": "silu"}), Some("activation \"silu\" is not supported; supported is relu2")),
        (json!({"mlp_bias": true}), Some("mlp_bias of a nemotron_h model")),
        (json!({"n_groups": 3}), Some("3 groups of 8 heads")),
        (json!({"time_step_limit": [0.1, 0.01]}), Some("time_step_limit")),
        (json!({"ssm_cfg": {"expand": 2}}), Some("ssm_cfg")),
    ] {
        let config = nemotron_h(fields);
        let all = headers(&tensors(&nemotron_h(json!({})), "BF16", None, true));
        let said_now = crate::read(config.to_string().as_bytes(), &all).err().map(|error| error.to_string());
        assert_eq!(said_now.is_some(), said.is_some(), "{config}: {said_now:?}");
        assert!(said_now.unwrap_or_default().contains(said.unwrap_or_default()), "{config}");
    }
}

#[test]
fn experts_are_named_as_far_as_they_are_there() {
    let config = of(
        "qwen3_moe",
        json!({"num_experts": 65_536, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hidden_layers": 1000}),
    );
    let mut all = tensors(&llama(2), "BF16", None, true);
    for layer in 0..1000 {
        for projection in ["gate_proj", "up_proj", "down_proj"] {
            all.push((format!("model.layers.{layer}.mlp.experts.0.{projection}.weight"), "BF16", vec![1, 1]));
        }
    }
    let said = crate::read(config.to_string().as_bytes(), &headers(&all)).unwrap_err().to_string();
    assert!(said.contains("is missing") || said.contains("has shape"), "{said}");
}
