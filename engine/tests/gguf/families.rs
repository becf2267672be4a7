//! Random weights of every architecture that is read as GGUF, written by llama.cpp's own package with its names, keys
//! and orders, answer as the MLX repository that they are of.

use std::path::Path;

use serde_json::{Value, json};

use super::{LoadDtype, answer, model, random_weights, runtime, script, share};
use crate::random_weights::Numbers;

/// A small model of each architecture, with every piece of it.
fn kinds() -> Vec<Value> {
    let merged = |parts: &[&Value]| {
        let fields = parts.iter().flat_map(|part| part.as_object().unwrap().clone());
        Value::Object(fields.collect())
    };
    let common = json!({
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 260, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false,
        "eos_token_id": model::END,
    });
    let of = |model_type: &str, own: Value| merged(&[&common, &json!({"model_type": model_type}), &own]);
    let sigmoids = json!({
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": true,
    });
    let with = |own: Value| merged(&[&sigmoids, &own]);
    let latent = json!({"n_group": 4, "topk_group": 2, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 8,
                        "qk_nope_head_dim": 32, "v_head_dim": 16, "num_key_value_heads": 4, "head_dim": null});
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0,
                      "mscale_all_dim": 1.0});
    let growing = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
                         "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.2});
    let convs = json!({"conv_L_cache": 3, "full_attn_idxs": [1, 3], "block_auto_adjust_ff_dim": false, "head_dim": 16,
                       "norm_eps": 1e-5});
    let delta = json!({"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
                       "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
                       "partial_rotary_factor": 0.25});
    let gated = json!({"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
                       "shared_expert_intermediate_size": 64, "norm_topk_prob": true});
    let by_kind = json!({
        "head_dim": 16, "global_head_dim": 32, "sliding_window": 24, "attention_k_eq_v": true,
        "num_global_key_value_heads": 1, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": false, "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "tie_word_embeddings": true, "rope_theta": 1000000.0,
    });
    let inputs = json!({"attention_k_eq_v": false, "num_global_key_value_heads": null, "num_kv_shared_layers": 2,
                        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 260,
                        "use_double_wide_mlp": true});
    let states = json!({"hybrid_override_pattern": "M*M-", "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
                        "ssm_state_size": 16, "conv_kernel": 4, "use_conv_bias": true, "layer_norm_epsilon": 1e-5});
    let factors: Vec<f64> = (0..16).map(|pair| 1.0 + f64::from(pair) / 4.0).collect();
    vec![
        of("qwen2", json!({"head_dim": 16})),
        of(
            "qwen3_moe",
            json!({"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": true}),
        ),
        of("qwen3_next", merged(&[&delta, &gated])),
        of("qwen3_5_moe_text", merged(&[&delta, &gated])),
        of("qwen3_5_text", delta),
        of("smollm3", json!({"head_dim": 16, "tie_word_embeddings": true})),
        of("seed_oss", json!({"attention_bias": true})),
        of(
            "granite",
            json!({"head_dim": 16, "attention_multiplier": 0.3, "embedding_multiplier": 3.0,
                             "residual_multiplier": 0.6, "logits_scaling": 2.0}),
        ),
        of("olmo2", json!({"head_dim": 16})),
        of("olmo3", json!({"head_dim": 16, "sliding_window": 24})),
        of("phi3", json!({"head_dim": 16, "original_max_position_embeddings": 4096})),
        of(
            "phi3",
            json!({"head_dim": 64, "hidden_size": 256, "partial_rotary_factor": 0.5,
                          "original_max_position_embeddings": 64, "rope_scaling": {"type": "longrope",
                          "long_factor": factors, "short_factor": factors}}),
        ),
        of(
            "gpt_oss",
            json!({"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 24, "attention_bias": true,
                             "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                              "original_max_position_embeddings": 64}}),
        ),
        of(
            "glm4_moe",
            with(json!({"attention_bias": true, "use_qk_norm": true, "partial_rotary_factor": 0.5,
                                   "n_group": 1, "topk_group": 1})),
        ),
        of("deepseek_v3", with(latent.clone())),
        of(
            "deepseek_v3",
            with(
                json!({"rope_scaling": yarn.clone(), "q_lora_rank": null, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
                                      "qk_nope_head_dim": 32, "v_head_dim": 16, "num_key_value_heads": 4, "head_dim": null}),
            ),
        ),
        // As files had it before latents were read directly.
        of("deepseek_v3", with(merged(&[&latent, &json!({"transformers_version": "4.33.0"})]))),
        of("glm4_moe_lite", with(latent.clone())),
        of(
            "minimax_m2",
            json!({"num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 16,
                                "scoring_func": "sigmoid", "use_qk_norm": true}),
        ),
        of("mistral", json!({})),
        of("ministral3", json!({"rope_scaling": growing})),
        of("mistral4", with(merged(&[&latent, &json!({"rope_scaling": yarn})]))),
        of("gemma4_text", by_kind.clone()),
        of("gemma4_text", merged(&[&by_kind, &inputs])),
        of(
            "gemma4_text",
            merged(&[
                &by_kind,
                &json!({"enable_moe_block": true, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32}),
            ]),
        ),
        of("nemotron_h", states.clone()),
        of(
            "nemotron_h",
            with(merged(&[
                &states,
                &json!({"hybrid_override_pattern": "ME*E", "moe_latent_size": 48, "n_group": 1, "topk_group": 1,
                        "moe_shared_expert_intermediate_size": 64, "first_k_dense_replace": null}),
            ])),
        ),
        of("lfm2", convs.clone()),
        of(
            "lfm2_moe",
            merged(&[
                &convs,
                &json!({"tie_word_embeddings": true, "num_dense_layers": 1, "num_experts": 8, "num_experts_per_tok": 3,
                                     "moe_intermediate_size": 32}),
            ]),
        ),
    ]
}

/// The file that llama.cpp's package makes of a folder; `None` without a Python to run it, which CI does not allow.
/// Experts that it packs are then in the folder as what they were rounded to.
fn export(folder: &Path, file: &Path) -> Option<()> {
    let status = script("export.py")?.arg(folder).arg(file).status().unwrap();
    assert!(status.success(), "export.py failed: {status}");
    Some(())
}

#[test]
fn every_architecture_answers_as_its_repository() {
    for config in share::of_this_run(kinds(), 4) {
        let kind = &config["model_type"];
        println!("{kind}");
        let repository = random_weights::write(&config, Numbers::F32, 0.3);
        let folder = tempfile::tempdir().unwrap();
        if export(repository.path(), &folder.path().join("model.gguf")).is_none() {
            return;
        }
        let answers = |dir: &Path| {
            let runtime = runtime(dir, LoadDtype::Float32);
            // Shorter and longer than windows and original contexts.
            let prompts =
                [1, 20, 150].map(|length| (0..length).map(|at| (at * 37 + 11) % 256).collect::<Vec<u32>>());
            prompts.iter().zip(0..).map(|(prompt, slot)| answer(&runtime, prompt, slot)).collect::<Vec<_>>()
        };
        let (expected, found) = (answers(repository.path()), answers(folder.path()));
        assert_eq!(found, expected, "{kind}");
        let distinct = expected.iter().flatten().collect::<std::collections::BTreeSet<_>>().len();
        assert!(distinct > 10, "{kind} says the same again and again: {expected:?}");
    }
}
