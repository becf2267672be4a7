//! Which fields of config.json the keys of an architecture make, and what is refused. That llama.cpp's own files of every
//! architecture answer as their repositories is shown in `engine/tests/gguf`.

use serde_json::{Value, json};

use super::*;
use crate::gguf::tests::{GgufFile, config, rejection};

fn float(file: GgufFile, key: &str, number: f32) -> GgufFile {
    file.value(key, 6, &number.to_le_bytes())
}

/// A list of yes and no.
fn flags(file: GgufFile, key: &str, flags: &[u8]) -> GgufFile {
    let head = [&7_u32.to_le_bytes()[..], &(flags.len() as u64).to_le_bytes()];
    file.value(key, 9, &[&head.concat()[..], flags].concat())
}

/// A list of whole numbers.
fn numbers(file: GgufFile, key: &str, numbers: &[u32]) -> GgufFile {
    let head = [&4_u32.to_le_bytes()[..], &(numbers.len() as u64).to_le_bytes()];
    let numbers: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    file.value(key, 9, &[&head.concat()[..], &numbers].concat())
}

/// A file of an architecture with these keys of its own.
fn with(architecture: &str, keys: &[(&str, u32)]) -> GgufFile {
    let file = GgufFile::model(architecture, 64, 128, 8);
    keys.iter().fold(file, |file, (key, number)| file.whole(&format!("{architecture}.{key}"), *number))
}

const EXPERTS: [(&str, u32); 4] = [
    ("expert_count", 8),
    ("expert_used_count", 2),
    ("expert_feed_forward_length", 32),
    ("expert_gating_func", 2),
];
const LATENT: [(&str, u32); 6] = [
    ("attention.kv_lora_rank", 32),
    ("attention.q_lora_rank", 48),
    ("attention.key_length", 48),
    ("attention.value_length", 32),
    ("attention.key_length_mla", 40),
    ("attention.value_length_mla", 24),
];

fn check(found: &Value, expected: &[(&str, Value)]) {
    for (field, value) in expected {
        assert_eq!(&found[field], value, "{field} of {}", found["model_type"]);
    }
}

#[test]
fn keys_become_the_fields_of_their_family() {
    let deepseek =
        float(with("deepseek2", &[&LATENT[..], &EXPERTS].concat()), "deepseek2.rope.scaling.factor", 4.0)
            .text("deepseek2.rope.scaling.type", "yarn");
    let deepseek = float(deepseek, "deepseek2.rope.scaling.yarn_log_multiplier", 0.1);
    let found = config(&deepseek);
    check(
        &found,
        &[
            ("model_type", json!("deepseek_v3")),
            ("kv_lora_rank", json!(32)),
            ("q_lora_rank", json!(48)),
            ("qk_rope_head_dim", json!(16)),
            ("qk_nope_head_dim", json!(24)),
            ("v_head_dim", json!(24)),
            ("num_key_value_heads", json!(4)),
            ("n_routed_experts", json!(8)),
            ("n_group", json!(1)),
            ("norm_topk_prob", json!(false)),
        ],
    );
    assert!((found["rope_scaling"]["mscale_all_dim"].as_f64().unwrap() - 1.0).abs() < 1e-6);
    let glm = with(
        "glm4moe",
        &[&EXPERTS[..], &[("nextn_predict_layers", 1), ("attention.key_length", 32)]].concat(),
    );
    let expected = [
        ("num_hidden_layers", json!(0)),
        ("partial_rotary_factor", json!(0.5)),
        ("use_qk_norm", json!(false)),
    ];
    check(&config(&glm), &expected);
    let minimax = with("minimax-m2", &[&EXPERTS[..], &[("attention.key_length", 32)]].concat());
    check(&config(&minimax), &[("rotary_dim", json!(16)), ("partial_rotary_factor", Value::Null)]);
    let olmo = flags(
        with("olmo2", &[("attention.sliding_window", 8)]),
        "olmo2.attention.sliding_window_pattern",
        &[1],
    );
    check(&config(&olmo), &[("model_type", json!("olmo3")), ("layer_types", json!(["sliding_attention"]))]);
    check(&config(&with("olmo2", &[])), &[("model_type", json!("olmo2")), ("layer_types", Value::Null)]);
    let granite = float(with("granite", &[]), "granite.embedding_scale", 12.0);
    check(&config(&granite), &[("embedding_multiplier", json!(12.0)), ("rope_traditional", json!(true))]);
    let temperature = |file| float(file, "mistral3.attention.temperature_scale", 0.5);
    let yarn = with("mistral3", &[]).text("mistral3.rope.scaling.type", "yarn");
    let ministral = config(&temperature(float(yarn, "mistral3.rope.scaling.factor", 4.0)));
    check(&ministral, &[("model_type", json!("ministral3"))]);
    check(&ministral["rope_scaling"], &[("llama_4_scaling_beta", json!(0.5)), ("factor", json!(4.0))]);
    let delta = [
        ("ssm.group_count", 2),
        ("ssm.time_step_rank", 4),
        ("ssm.state_size", 16),
        ("ssm.inner_size", 128),
        ("ssm.conv_kernel", 4),
    ];
    let qwen = flags(with("qwen35", &delta), "qwen35.attention.recurrent_layers", &[1]);
    let expected = [
        ("model_type", json!("qwen3_5_text")),
        ("linear_value_head_dim", json!(32)),
        ("layer_types", json!(["linear_attention"])),
    ];
    check(&config(&qwen), &expected);
}

/// A file without the sizes that differ from layer to layer, which a key may have once.
fn by_layer(architecture: &str, layers: u32) -> GgufFile {
    let key = |key: &str| format!("{architecture}.{key}");
    let file = GgufFile::new()
        .text("general.architecture", architecture)
        .whole(&key("block_count"), layers)
        .whole(&key("context_length"), 128)
        .whole(&key("embedding_length"), 64)
        .whole(&key("attention.head_count"), 4)
        .text("tokenizer.ggml.model", "gpt2")
        .matrix("token_embd.weight", 64, 6, 8);
    float(float(file, &key("attention.layer_norm_rms_epsilon"), 1e-5), &key("rope.freq_base"), 1e6)
}

const WIDTHS: [(&str, u32); 7] = [
    ("attention.key_length", 32),
    ("attention.value_length", 32),
    ("attention.key_length_swa", 16),
    ("attention.value_length_swa", 16),
    ("attention.sliding_window", 8),
    ("rope.dimension_count", 32),
    ("attention.shared_kv_layers", 1),
];

/// A Gemma 4 of three layers.
fn gemma(widths: [u32; 3], heads: [u32; 3]) -> GgufFile {
    let file = WIDTHS
        .iter()
        .fold(by_layer("gemma4", 3), |file, (key, number)| file.whole(&format!("gemma4.{key}"), *number));
    let file = flags(file, "gemma4.attention.sliding_window_pattern", &[1, 0, 1]);
    let file = numbers(file, "gemma4.attention.head_count_kv", &heads);
    numbers(file, "gemma4.feed_forward_length", &widths)
}

#[test]
fn sizes_that_differ_by_layer_become_those_of_its_kind() {
    let expected = [
        ("layer_types", json!(["sliding_attention", "full_attention", "sliding_attention"])),
        ("head_dim", json!(16)),
        ("global_head_dim", json!(32)),
        ("num_key_value_heads", json!(2)),
        ("num_global_key_value_heads", json!(1)),
        ("attention_k_eq_v", json!(true)),
        ("num_kv_shared_layers", json!(1)),
        ("intermediate_size", json!(96)),
        ("use_double_wide_mlp", json!(true)),
        ("final_logit_softcapping", json!(0.0)),
    ];
    let found = config(&gemma([96, 96, 192], [2, 1, 2]));
    check(&found, &expected);
    let full = &found["rope_parameters"]["full_attention"];
    check(full, &[("partial_rotary_factor", json!(1.0)), ("rope_theta", json!(1e6))]);
    check(&config(&gemma([96, 96, 96], [2, 1, 2])), &[("use_double_wide_mlp", json!(false))]);
    for (file, said) in [
        (gemma([96, 96, 96], [2, 1, 1]), "head_count_kv: it differs between layers of one kind"),
        (gemma([96, 96, 128], [2, 1, 2]), "feed_forward_length: 128 where others have 96 is not supported"),
        (by_layer("gemma4", 1), "gemma4.attention.sliding_window_pattern is missing"),
    ] {
        let error = rejection(&file);
        assert!(error.contains(said), "{said}: {error}");
    }
    let states =
        [("ssm.inner_size", 64), ("ssm.time_step_rank", 4), ("ssm.group_count", 2), ("ssm.state_size", 8)];
    let nemotron = states.iter().fold(by_layer("nemotron_h", 3), |file, (key, number)| {
        file.whole(&format!("nemotron_h.{key}"), *number)
    });
    let nemotron = numbers(
        nemotron.whole("nemotron_h.ssm.conv_kernel", 4),
        "nemotron_h.attention.head_count_kv",
        &[0, 2, 0],
    );
    let nemotron = numbers(nemotron, "nemotron_h.feed_forward_length", &[0, 0, 96]);
    let expected = [
        ("hybrid_override_pattern", json!("M*-")),
        ("intermediate_size", json!(96)),
        ("mamba_head_dim", json!(16)),
        ("use_conv_bias", json!(false)),
    ];
    check(&config(&nemotron), &expected);
}

#[test]
fn relatives_that_compute_otherwise_are_refused() {
    let without_gating: Vec<_> = LATENT.into_iter().chain(EXPERTS.into_iter().take(3)).collect();
    let softmax: Vec<_> = EXPERTS.into_iter().take(3).chain([("expert_gating_func", 1)]).collect();
    let linear = with("llama", &[]).text("llama.rope.scaling.type", "linear");
    let linear = float(linear, "llama.rope.scaling.factor", 4.0);
    let yarn =
        float(with("qwen3", &[]).text("qwen3.rope.scaling.type", "yarn"), "qwen3.rope.scaling.factor", 4.0);
    for (file, said) in [
        (
            float(linear.clone(), "llama.rope.scaling.yarn_attn_factor", 0.5),
            "yarn_attn_factor: this release does not",
        ),
        (float(linear, "llama.attention.temperature_scale", 0.5), "temperature_scale: this release does not"),
        (
            float(yarn, "qwen3.rope.scaling.yarn_log_multiplier", 0.1),
            "yarn_log_multiplier: this release does not",
        ),
        (
            float(with("mistral3", &[]), "mistral3.attention.temperature_scale", 0.5),
            "temperature_scale: it counts from the original context of YaRN",
        ),
        (
            with("deepseek2", &without_gating),
            "deepseek2.expert_gating_func: it is missing, as in files of DeepSeek V2",
        ),
        (
            with("mistral4", &[&LATENT[..], &EXPERTS].concat()),
            "mistral4.expert_gating_func: 2 is not supported; supported is 1, a softmax",
        ),
        (with("glm4moe", &softmax), "glm4moe.expert_gating_func: 1 is not supported; supported is 2"),
        (
            with("qwen3", &[("rope.scaling.attn_factor", 1)]),
            "qwen3.rope.scaling.attn_factor: this release does not know",
        ),
        (
            with("granite", &[("rope.dimension_count_swa", 8)]),
            "dimension_count_swa: this release does not know it",
        ),
    ] {
        let error = rejection(&file);
        assert!(error.contains(said), "{said}: {error}");
    }
}

#[test]
fn what_a_file_scales_by_beside_its_factors_is_refused() {
    let ones: Vec<u8> = [1_f32; 8].into_iter().flat_map(f32::to_le_bytes).collect();
    let read = |file: &GgufFile| crate::gguf::tests::with(file, |gguf| gguf.configuration(Some(&ones)));
    assert!(read(&with("llama", &[])).is_ok());
    let both = float(with("llama", &[]), "llama.rope.scaling.factor", 4.0);
    let error = read(&both).unwrap_err().to_string();
    assert!(error.contains("llama.rope.scaling.factor: this release does not know it"), "{error}");
}

#[test]
fn names_are_those_of_an_mlx_repository_or_none() {
    for (name, expected) in [
        ("token_embd.weight", Some("model.embed_tokens.weight")),
        ("output.weight", Some("lm_head.weight")),
        ("blk.17.attn_q.bias", Some("model.layers.17.self_attn.q_proj.bias")),
        ("blk.0.ffn_down_exps.weight", Some("model.layers.0.mlp.switch_mlp.down_proj.weight")),
        ("blk.3.exp_probs_b.bias", Some("model.layers.3.mlp.gate.e_score_correction_bias")),
        ("blk.00.attn_q.weight", None),
        ("blk.+1.attn_q.weight", None),
        ("blk.0.ssm_in.weight", None),
        ("blk.0.attn_q", None),
        ("v.blk.0.attn_q.weight", None),
        ("output", None),
    ] {
        assert_eq!(mlx_name(&ARCHITECTURES[0], name).as_deref(), expected, "{name}");
    }
    for (architecture, name, expected) in [
        ("gemma3", "blk.0.ffn_norm.weight", "model.layers.0.pre_feedforward_layernorm.weight"),
        ("gpt-oss", "blk.2.attn_sinks.weight", "model.layers.2.self_attn.sinks"),
        ("gpt-oss", "blk.2.ffn_gate_inp.bias", "model.layers.2.mlp.router.bias"),
    ] {
        let own = ARCHITECTURES.iter().find(|own| own.name == architecture).unwrap();
        assert_eq!(mlx_name(own, name).as_deref(), Some(expected), "{name}");
    }
}
