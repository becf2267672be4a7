"""Writes a small model of an MLX repository as GGUF, for the test `gguf` to hold the reader to.

    export.py FOLDER FILE

Names of tensors and of keys, and the format, are those of llama.cpp's own package `gguf`; which keys a model has, and in
which order rows lie, follows llama.cpp's converter. gpt-oss' experts are packed in MXFP4 by that package, and what they
were rounded to replaces them in FOLDER.
"""

import json
import sys
from pathlib import Path

import numpy as np
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
    TokenType,
    get_tensor_name_map,
)
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file

ARCHITECTURES = {
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "qwen3_next": MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": MODEL_ARCH.QWEN35MOE,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "seed_oss": MODEL_ARCH.SEED_OSS,
    "granite": MODEL_ARCH.GRANITE,
    "mistral": MODEL_ARCH.MISTRAL3,
    "ministral3": MODEL_ARCH.MISTRAL3,
    "olmo2": MODEL_ARCH.OLMO2,
    "olmo3": MODEL_ARCH.OLMO2,
    "phi3": MODEL_ARCH.PHI3,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
    "glm4_moe": MODEL_ARCH.GLM4_MOE,
    "deepseek_v3": MODEL_ARCH.DEEPSEEK2,
    "glm4_moe_lite": MODEL_ARCH.DEEPSEEK2,
    "minimax_m2": MODEL_ARCH.MINIMAXM2,
    "mistral4": MODEL_ARCH.MISTRAL4,
    "gemma4_text": MODEL_ARCH.GEMMA4,
    "nemotron_h": MODEL_ARCH.NEMOTRON_H,
    "lfm2": MODEL_ARCH.LFM2,
    "lfm2_moe": MODEL_ARCH.LFM2MOE,
}
# Whose rows of queries and keys the converter reorders, so that neighbours are rotated.
PERMUTED = ["smollm3", "granite", "mistral", "ministral3"]
# What is called otherwise in the exports that the names of the package are of.
EXPORTED = [
    *(
        (f".{module}.switch_mlp.{own}_proj.", f".{module}.experts.{theirs}.")
        for module in ["block_sparse_moe", "feed_forward"]
        for own, theirs in [("gate", "w1"), ("up", "w3"), ("down", "w2")]
    ),
    *((f".feed_forward.{own}_proj.", f".feed_forward.{theirs}.") for own, theirs in [("gate", "w1"), ("up", "w3"), ("down", "w2")]),
    (".mlp.switch_mlp.fc1.", ".mlp.experts.up_proj."),
    (".mlp.switch_mlp.fc2.", ".mlp.experts.down_proj."),
    (".switch_mlp.", ".experts."),
    (".switch_glu.", "."),
    (".embed_q.", ".k_b_proj."),
    (".unembed_out.", ".v_b_proj."),
    (".e_score_correction_bias", ".e_score_correction.bias"),
    (".expert_bias", ".expert_bias.bias"),
    (".dt_bias", ".dt_proj.bias"),
    (".sinks", ".sinks.weight"),
]


# What a configuration calls the release of Transformers that saved it, for files of DeepSeek as they were before latents
# were read directly: with what latents become, of keys and values in one matrix.
OLDER = "4.33.0"


def is_older(config):
    return config.get("transformers_version") == OLDER


def main(folder, file):
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    kind = config["model_type"]
    architecture = ARCHITECTURES[kind]
    if kind == "nemotron_h" and "n_routed_experts" in config:
        architecture = MODEL_ARCH.NEMOTRON_H_MOE
    writer = GGUFWriter(file, MODEL_ARCH_NAMES[architecture])
    add_keys(writer, config, kind, weights)
    add_tokenizer(writer, config, kind)
    if is_older(config):
        together(weights, writer, config)
    names = get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, value in exported(weights, config, kind):
        if is_older(config) and name.endswith((".embed_q.weight", ".unembed_out.weight")):
            continue
        exported_name = nemotron(name) if kind == "nemotron_h" else name
        for own, other in EXPORTED:
            exported_name = exported_name.replace(own, other)
        suffixes = (".weight", ".bias", ".scale")
        # Stacked experts of an LFM2 are known without the beginning.
        theirs = names.get_name(exported_name, suffixes) or names.get_name(exported_name.removeprefix("model."), suffixes)
        assert theirs is not None, f"the package has no name for {exported_name}"
        if kind == "gpt_oss" and "_exps.weight" in theirs:
            packed = quantize(value, GGMLQuantizationType.MXFP4)
            weights[name] = dequantize(packed, GGMLQuantizationType.MXFP4).astype(np.float32)
            writer.add_tensor(theirs, packed, raw_dtype=GGMLQuantizationType.MXFP4)
        else:
            writer.add_tensor(theirs, value)
    for length in ["long", "short"]:
        if factors := (config.get("rope_scaling") or {}).get(f"{length}_factor"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(factors, dtype=np.float32))
    if kind == "gpt_oss":
        save_file(weights, folder / "model.safetensors", {"format": "mlx"})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def together(weights, writer, config):
    """Writes what latents become, head by head: the rows of its keys, then those of its values."""
    for layer in range(config["num_hidden_layers"]):
        keys, values = (weights[f"model.layers.{layer}.self_attn.{own}.weight"] for own in ["embed_q", "unembed_out"])
        both = np.concatenate([keys.swapaxes(1, 2), values], 1)
        writer.add_tensor(f"blk.{layer}.attn_kv_b.weight", np.ascontiguousarray(both.reshape(-1, both.shape[-1])))


def exported(weights, config, kind):
    """The tensors as the converter writes them, without dimensions of one."""
    if "linear_num_key_heads" in config:
        weights = dict(delta_nets(weights, config, kind))
    if kind in ["gemma4_text", "mistral4"]:
        weights = dict(merged_experts(weights))
    if kind == "gemma4_text":
        weights = dict(gemma4(weights, config))
    for name, value in in_file_order(weights, config, kind):
        value = np.atleast_1d(value.squeeze())
        if kind == "nemotron_h":
            # The converter makes columns of what is one number a head, and rows of what is normalised together.
            if name.endswith((".A_log", ".D")):
                value = (-np.exp(value) if name.endswith(".A_log") else value).reshape(-1, 1)
            elif name.endswith(".mamba.norm.weight"):
                value = value.reshape(config["n_groups"], -1)
        yield name, np.ascontiguousarray(value)


def merged_experts(weights):
    """Gate and up of each expert in one tensor."""
    for name, value in weights.items():
        if "_glu.up_proj" in name or "switch_mlp.up_proj" in name:
            continue
        if "_glu.gate_proj" in name or "switch_mlp.gate_proj" in name:
            up = weights[name.replace("gate_proj", "up_proj")]
            yield name.replace("gate_proj", "gate_up_proj"), np.concatenate([value, up], 1)
        else:
            yield name, value


def gemma4(weights, config):
    """Names that the package has otherwise, and what nothing reads: keys and values of layers that read others'."""
    for name, value in weights.items():
        if name.endswith("layer_scalar"):
            yield name + ".weight", value
        elif name.endswith("router.scale"):
            yield name.replace("router.scale", "router.proj.scale"), value
        elif name.endswith("router.per_expert_scale"):
            yield name.replace("router.per_expert_scale", "experts.down_proj.scale"), value
        else:
            yield name, value
    layers = config["num_hidden_layers"]
    for layer in range(layers - config["num_kv_shared_layers"], layers):
        for own in ["k_proj", "v_proj", "k_norm"]:
            yield f"model.layers.{layer}.self_attn.{own}.weight", weights["model.norm.weight"]
    if config["num_kv_shared_layers"] == 0:
        assert "model.layers.1.self_attn.v_proj.weight" not in weights, "values are keys there"
    width = config["global_head_dim"]
    share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    rotated = int(width * share / 2)
    yield "rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (width // 2 - rotated), dtype=np.float32)


def nemotron(name):
    """As exports of Nemotron have it; stacked experts have the usual name."""
    if ".switch_mlp." in name:
        return name
    for own, other in [
        ("model.layers.", "backbone.layers."),
        ("model.embed_tokens.", "backbone.embeddings."),
        ("model.norm.", "backbone.norm_f."),
        (".mamba.", ".mixer."),
        (".self_attn.", ".mixer."),
        (".mlp.", ".mixer."),
        (".mixer.dt_bias", ".mixer.dt.bias"),
    ]:
        name = name.replace(own, other)
    return name


def delta_nets(weights, config, kind):
    """Value heads in the order of the file, merged projections apart, and the decay as a factor."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    each, key_dim, value_dim = values // keys, config["linear_key_head_dim"], config["linear_value_head_dim"]
    before = 2 * keys * key_dim

    def tiled(value, rows):
        """The first value head of every key head, then the second ones."""
        if kind == "qwen3_next":
            return value
        return value.reshape(keys, each, rows, *value.shape[1:]).swapaxes(0, 1).reshape(value.shape)

    for name, value in weights.items():
        field = name.split(".linear_attn.")[-1]
        if field == "in_proj_qkvz.weight":
            parts = np.split(value.reshape(keys, -1, value.shape[-1]), np.cumsum([key_dim, key_dim, each * value_dim]), 1)
            q, k, v, z = (part.reshape(-1, value.shape[-1]) for part in parts)
            yield name.replace("qkvz", "qkv"), np.concatenate([q, k, v])
            yield name.replace("qkvz", "z"), z
        elif field in ["in_proj_qkv.weight", "conv1d.weight"]:
            yield name, np.concatenate([value[:before], tiled(value[before:], value_dim)])
        elif field == "in_proj_z.weight":
            yield name, tiled(value, value_dim)
        elif field in ["in_proj_a.weight", "in_proj_b.weight", "dt_bias"]:
            yield name, tiled(value, 1)
        elif field == "A_log":
            yield name, -np.exp(tiled(value, 1))
        elif field == "out_proj.weight":
            yield name, tiled(value.T, value_dim).T
        else:
            yield name, value


def in_file_order(weights, config, kind):
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for name, value in weights.items():
        if kind == "phi3" and (name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight"))):
            continue
        if kind == "phi3" and name.endswith("q_proj.weight"):
            parts = [weights[name.replace("q_proj", f"{own}_proj")] for own in "qkv"]
            yield name.replace("q_proj", "qkv_proj"), np.concatenate(parts)
        elif kind == "phi3" and name.endswith("gate_proj.weight"):
            parts = [value, weights[name.replace("gate_proj", "up_proj")]]
            yield name.replace("gate_proj", "gate_up_proj"), np.concatenate(parts)
        elif kind in PERMUTED and name.endswith(("q_proj.weight", "k_proj.weight")):
            own = heads if name.endswith("q_proj.weight") else kv_heads
            halves = value.reshape(own, 2, value.shape[0] // own // 2, *value.shape[1:])
            yield name, halves.swapaxes(1, 2).reshape(value.shape)
        else:
            yield name, value


def add_keys(writer, config, kind, weights):
    heads = config["num_attention_heads"]
    latent = "kv_lora_rank" in config
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if kind not in ["gemma4_text", "nemotron_h"]:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    older = is_older(config)
    kv_heads = 1 if latent and not older else config["num_key_value_heads"]
    if "full_attn_idxs" in config:
        layers = range(config["num_hidden_layers"])
        kv_heads = [kv_heads if layer in config["full_attn_idxs"] else 0 for layer in layers]
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if kind == "gemma4_text":
        add_kinds_of_layers(writer, config)
    elif kind == "nemotron_h":
        add_states(writer, config)
    else:
        writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_file_type(0)
    writer.add_vocab_size(config["vocab_size"])
    if kind != "gemma4_text" and not latent and head_dim * heads != config["hidden_size"]:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.get("rope_scaling") or {}
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if "llama_4_scaling_beta" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    elif "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if kind == "gemma4_text":
        writer.add_rope_dimension_count(config["global_head_dim"])
        writer.add_rope_dimension_count_swa(head_dim)
        writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    elif kind == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        writer.add_rope_dimension_count(int(head_dim * config.get("partial_rotary_factor", 1)))
        writer.add_sliding_window(0)
    elif latent:
        rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
        writer.add_rope_dimension_count(rotated)
        writer.add_kv_lora_rank(rank)
        widths = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
        if older:
            writer.add_key_length(widths[0])
            writer.add_value_length(widths[1])
        else:
            writer.add_key_length(rank + rotated)
            writer.add_value_length(rank)
            writer.add_key_length_mla(widths[0])
            writer.add_value_length_mla(widths[1])
        if config.get("q_lora_rank"):
            writer.add_q_lora_rank(config["q_lora_rank"])
    else:
        rotated = config.get("rotary_dim", head_dim * config.get("partial_rotary_factor", 1))
        writer.add_rope_dimension_count(int(rotated))
    if "linear_num_key_heads" in config:
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
        writer.add_full_attention_interval(config["full_attention_interval"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if kind == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if kind in ["gpt_oss", "olmo3"]:
        writer.add_sliding_window(config["sliding_window"])
    if kind == "olmo3":
        writer.add_sliding_window_pattern([(layer + 1) % 4 != 0 for layer in range(config["num_hidden_layers"])])
    for field in ["num_experts", "num_local_experts", "n_routed_experts"]:
        if field in config:
            writer.add_expert_count(config[field])
            writer.add_expert_used_count(config.get("num_experts_per_tok") or config["top_k_experts"])
            width = config.get("moe_intermediate_size", config["intermediate_size"])
            writer.add_expert_feed_forward_length(width)
    if "n_group" in config:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    for field in ["first_k_dense_replace", "num_dense_layers"]:
        if config.get(field) is not None:
            writer.add_leading_dense_block_count(config[field])
    if "n_shared_experts" in config:
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    for field, add in [("moe_shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length), ("moe_latent_size", writer.add_moe_latent_size)]:
        if field in config:
            add(config[field])
    if kind != "nemotron_h" and any(name.endswith(("e_score_correction_bias", "expert_bias")) for name in weights):
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def add_kinds_of_layers(writer, config):
    """Of a Gemma 4, whose layers differ."""
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    full, local = config["num_global_key_value_heads"] or config["num_key_value_heads"], config["num_key_value_heads"]
    writer.add_head_count_kv([local if is_local else full for is_local in windowed])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(windowed)
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_key_length(config["global_head_dim"])
    writer.add_value_length(config["global_head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    width, own = config["intermediate_size"], len(windowed) - config["num_kv_shared_layers"]
    doubled = [width if layer < own else 2 * width for layer in range(len(windowed))]
    writer.add_feed_forward_length(doubled if config["use_double_wide_mlp"] else width)


def add_states(writer, config):
    """Of a Nemotron-H, whose layers are one block each."""
    pattern = config["hybrid_override_pattern"]
    width = config["moe_intermediate_size"] if "E" in pattern else config["intermediate_size"]
    writer.add_head_count_kv([config["num_key_value_heads"] if kind == "*" else 0 for kind in pattern])
    writer.add_feed_forward_length([width if kind in "-E" else 0 for kind in pattern])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    writer.add_rope_scaling_finetuned(False)


def add_tokenizer(writer, config, kind):
    count = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("glm4" if kind.startswith("glm4") else "gpt-4o")
    writer.add_token_list([f"t{token}" for token in range(count)])
    writer.add_token_types([TokenType.NORMAL] * count)
    writer.add_eos_token_id(config["eos_token_id"])


main(Path(sys.argv[1]), Path(sys.argv[2]))
