"""What mlx-lm answers with the weights of a GGUF file, for the test `gguf` to hold the engine to.

    answers.py FILE < {"config": …, "prompts": [[…]], "tokens": 24}

MLX's own reader of GGUF loads the file and unpacks its blocks, so nothing here knows Russet's. Of Russet's is the
configuration alone. Of blocks that MLX does not read the test gives the numbers, as 32 bits in FILE.safetensors. Writes {"tokens": [[…]], "gaps": [[…]]}, the gap between the two most probable tokens of each.
"""

import json
import sys

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.utils import _get_classes

MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}


def path(name):
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{MODULES[parts[2]]}"
    return MODULES[parts[0]]


def unpacked(weights, name):
    """A weight as float32."""
    module = name.removesuffix(".weight")
    weight, scales = weights[name], weights.get(f"{module}.scales")
    if scales is None:
        return weight.astype(mx.float32)
    biases = weights[f"{module}.biases"]
    bits = weight.shape[-1] // scales.shape[-1]
    return mx.dequantize(weight, scales.astype(mx.float32), biases.astype(mx.float32), group_size=32, bits=bits)


def from_gguf(weights, config):
    model = llama.Model(llama.ModelArgs.from_dict(config))
    names = [name for name in weights if name.endswith(".weight")]
    model.load_weights([(f"{path(name)}.weight", unpacked(weights, name)) for name in names])
    return model


def from_numbers(weights, config):
    """A model whose norms multiply by their weight, where mlx-lm's multiply by one more."""
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    weights = {name: weight - 1 if "norm" in name else weight for name, weight in weights.items()}
    model.load_weights(list(model.sanitize(weights).items()))
    return model


def main():
    given = json.load(sys.stdin)
    read = from_numbers if sys.argv[1].endswith(".safetensors") else from_gguf
    model = read(mx.load(sys.argv[1]), given["config"])
    tokens, gaps = [], []
    for prompt in given["prompts"]:
        chosen, apart = [], []
        for token, logprobs in generate_step(mx.array(prompt), model, max_tokens=given["tokens"]):
            second, first = np.partition(np.array(logprobs), -2)[-2:]
            chosen.append(int(token))
            apart.append(float(first - second))
        tokens.append(chosen)
        gaps.append(apart)
    json.dump({"tokens": tokens, "gaps": gaps}, sys.stdout)


main()
