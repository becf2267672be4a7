//! What a rank reads of a model's files and what memory it takes meanwhile: its own bytes, each once, and beside the
//! weights no more than two of its largest tensors. Not here: what the weights are (`exactness`), and how long it takes
//! (`cargo xtask bench engine`).

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

#[path = "support/model.rs"]
mod model;
#[path = "support/random_weights.rs"]
mod random_weights;

use mlx_rs::memory;
use random_weights::{Numbers, Tensor, tensors, write_tensors};
use russet_engine::{
    decoder::Decoder,
    partition::TpShard,
    weights::{Checkpoint, LoadDtype, Weights},
};
use russet_model::partition::Partition;
use serde_json::{Value, json};

/// Most bytes that are read for each that is held.
const MAX_READ: f64 = 1.02;
/// The same where gate and up of experts lie in turn, packed in 4 bits with a scale for 32: a row of scales is so short
/// that the rows of the other are read with it, and scales are a 17th of all.
const MAX_READ_IN_TURN: f64 = 1.0 + 1.0 / 17.0;

fn config(model_type: &str, own: &Value) -> Value {
    let mut config = json!({
        "model_type": model_type, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1000,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": false,
    });
    config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    config
}

/// The tensors under the names of Hugging Face's exports: experts one by one, or gate and up in turn; keys and values of
/// latents in one matrix; queries, keys and values in one.
fn originals(tensors: Vec<Tensor>) -> Vec<Tensor> {
    let mut originals: Vec<Tensor> = Vec::new();
    let mut merge =
        |name: String, kind, shape: Vec<usize>| match originals.iter_mut().find(|tensor| tensor.0 == name) {
            Some((_, _, merged)) => merged[0] += shape[0],
            None => originals.push((name, kind, shape)),
        };
    for (name, kind, shape) in tensors {
        let projection = ["gate_proj", "up_proj", "down_proj"].into_iter().find(|own| name.contains(own));
        match (name.split_once("switch_mlp."), projection) {
            (Some((module, _)), Some(projection)) => {
                for expert in 0..shape[0] {
                    let name = format!("{module}experts.{expert}.{projection}.weight");
                    merge(name, kind, shape[1..].to_vec());
                }
            }
            (None, Some("up_proj")) if name.contains(".experts.") => {}
            (None, Some(projection)) if name.contains(".experts.") => {
                let (module, field) = name.split_once(projection).unwrap();
                let rows = if projection == "gate_proj" { 2 * shape[1] } else { shape[1] };
                let name = format!(
                    "{module}{}",
                    if projection == "gate_proj" { "gate_up_proj" } else { projection }
                );
                if field == ".bias" {
                    merge(format!("{name}_bias"), kind, vec![shape[0], rows]);
                } else {
                    let groups = shape[2] / 32;
                    merge(format!("{name}_blocks"), "U8", vec![shape[0], rows, groups, 16]);
                    merge(format!("{name}_scales"), "U8", vec![shape[0], rows, groups]);
                }
            }
            _ if name.ends_with("embed_q.weight") => {
                merge(name.replace("embed_q", "kv_b_proj"), kind, vec![shape[0] * shape[2], shape[1]]);
            }
            _ if name.ends_with("unembed_out.weight") => {
                merge(name.replace("unembed_out", "kv_b_proj"), kind, vec![shape[0] * shape[1], shape[2]]);
            }
            _ => {
                let projections = [".q_proj.", ".k_proj.", ".v_proj."];
                let own = projections.into_iter().find(|own| name.contains(own)).unwrap_or(".qkv_proj.");
                let name = name.replace(own, ".qkv_proj.");
                merge(name, kind, shape);
            }
        }
    }
    originals
}

/// A model, and how many bytes may be read of it for each that is held.
fn models() -> Vec<(&'static str, Value, Vec<Tensor>, f64)> {
    let experts = json!({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
        "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": []});
    let latents = json!({"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "kv_lora_rank": 128,
        "q_lora_rank": 192, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64, "head_dim": null,
        "num_key_value_heads": 8});
    let windows = json!({"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128});
    let delta_nets = json!({"linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "num_experts": 0});
    let [llama, experts, latents, windows, delta_nets] = [
        ("llama", json!({})),
        ("qwen3_moe", experts),
        ("deepseek_v3", latents),
        ("gpt_oss", windows),
        ("qwen3_next", delta_nets),
    ]
    .map(|(kind, own)| config(kind, &own));
    let bf16 = |config: &Value| tensors(config, Numbers::Bf16);
    vec![
        ("a Llama in 16 bits", llama.clone(), bf16(&llama), MAX_READ),
        ("a Llama in 4 bits", llama.clone(), tensors(&llama, Numbers::Affine4), MAX_READ),
        ("experts in one tensor", experts.clone(), bf16(&experts), MAX_READ),
        ("experts one by one", experts.clone(), originals(bf16(&experts)), MAX_READ),
        ("latents in one matrix", latents.clone(), originals(bf16(&latents)), MAX_READ),
        ("experts in turn", windows.clone(), originals(bf16(&windows)), MAX_READ_IN_TURN),
        ("delta nets", delta_nets.clone(), bf16(&delta_nets), MAX_READ),
    ]
}

/// One test: MLX counts the memory of the whole process.
#[test]
fn rank_reads_its_own_bytes_once_and_holds_little_more() {
    for (what, config, tensors, most) in models() {
        let dir = write_tensors(&config, &tensors, 0.03);
        for (layers, members) in [(vec![2], 1), (vec![1, 1], 1), (vec![2, 2], 2)] {
            let partition = Partition::with_tensor(layers.clone(), members, 2).unwrap();
            for rank in 0..partition.size() {
                let what = format!("{what}, rank {rank} of {layers:?} by {members}");
                let part = partition.part(rank).unwrap();
                let checkpoint = Checkpoint::open(dir.path()).unwrap();
                let expected = checkpoint.bytes(&part).unwrap();
                let before = memory::active_memory().unwrap();
                memory::reset_peak_memory().unwrap();
                let (mut progress, mut largest) = (0, 0);
                let mut count = |bytes: u64| {
                    progress += bytes;
                    largest = largest.max(bytes);
                };
                let shard = TpShard::for_part(&part);
                let mut weights = Weights::new(&checkpoint, LoadDtype::AsStored, shard, &mut count);
                let decoder =
                    Decoder::load(&checkpoint.model().description, &part, &mut weights, dir.path()).unwrap();
                let held = memory::active_memory().unwrap() - before;
                let peak = memory::peak_memory().unwrap() - before;
                drop(decoder);
                memory::clear_cache().unwrap();

                assert_eq!(progress, expected, "{what}: progress ends at the bytes it began with");
                let read = checkpoint.bytes_read() as f64 / expected as f64;
                assert!((1.0..=most).contains(&read), "{what}: {read} bytes are read for each that is held");
                let bound = held + 2 * largest as usize;
                assert!(
                    peak <= bound,
                    "{what}: {peak} bytes at the most, {held} of weights, {largest} the largest"
                );
            }
        }
    }
}
