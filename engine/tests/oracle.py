"""Writes what mlx-lm answers, for the test `exactness` to hold the engine to.

    oracle.py OUT                       everything
    oracle.py shard OUT VARIANT         one rank of a sharded model, started by the first form

For every variant below: OUT/<variant>/ is a Hugging Face folder with random weights made by mlx-lm's own class, and in
it oracle.json (prompts, greedy tokens, the gap between the two most probable tokens) and oracle.f32 (log-probabilities
of every position, little-endian float32, [prompts, tokens, vocabulary]). mlx-lm loads the folder and generates as it
does for anyone: `load_model`, then `generate_step`. Nothing here knows the engine.

Variants with "kv" keep their caches quantised from the first token on. (generate_step's own `kv_bits` quantises a cache
after the first piece of a prompt has read it as computed, so an answer would depend on where prompts are cut.)

Variants with "members" are answered again by mlx-lm sharded over as many processes of MLX's ring on loopback (`model.shard`),
into OUT/<variant>/tensor-<members>/: sums of slices round in another order than whole products, so that is what a stage
of several ranks has to equal.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from random import Random

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models import llama, qwen3
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

SEED = 11
VOCABULARY = 320
TOKENS = 64
# One position, several, around the cache's step of 256, and beyond one chunk of 2048.
LENGTHS = [1, 2, 3, 5, 9, 15, 16, 17, 31, 33, 63, 64, 100, 190, 230, 254, 255, 256, 257, 300, 2060]
# Members wait for each other actively, often on fewer cores than there are members: unless a variant says
# "thorough", stages of several are asked some of the prompts, and fewer tokens the more members there are.
FEWER = {2: ([1, 3, 16, 64, 190, 256, 257, 2060], 32), 4: ([3, 64, 257, 2060], 12)}
# Layers per rank of the groups a variant is tried on; the last entry of a list holds the first layers.
ALONE, PAIR, THREE = [5], [3, 2], [2, 2, 1]
EVERY = [ALONE, PAIR, THREE, [1, 4], [1, 3, 1]]

BASE = dict(
    model_type="llama",
    hidden_size=64,
    num_hidden_layers=5,
    intermediate_size=160,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    vocab_size=VOCABULARY,
    max_position_embeddings=4096,
    rope_theta=10000.0,
    tie_word_embeddings=True,
)
# Four members can share it: whole heads, and whole groups of every row.
WIDE = dict(
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    intermediate_size=256,
)
# Heads of another width than hidden_size / num_attention_heads, as the real ones have.
QWEN3 = WIDE | dict(model_type="qwen3", head_dim=32, rope_theta=1000000.0)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128
)


def heads_in_eight_bits(path, module):
    """Everything in four bits, head and first layer in eight: overrides per path, as mixed recipes have them."""
    if not hasattr(module, "to_quantized"):
        return False
    wide = path == "lm_head" or path.startswith("model.layers.0.")
    return {"group_size": 32, "bits": 8 if wide else 4}


VARIANTS = {
    "tied-llama3": dict(config=dict(rope_scaling=LLAMA3, rope_theta=500000.0), splits=EVERY),
    "untied-biased": dict(
        config=dict(
            tie_word_embeddings=False,
            attention_bias=True,
            mlp_bias=True,
            head_dim=24,
            rope_scaling=dict(type="linear", factor=2.0),
        ),
        shards=3,
        splits=EVERY,
    ),
    "mistral-traditional": dict(
        config=dict(
            model_type="mistral", tie_word_embeddings=False, num_key_value_heads=1, rope_traditional=True,
            sliding_window=None,
        ),
        index=False,
        splits=[ALONE, THREE],
    ),
    "affine4": dict(config=dict(tie_word_embeddings=False), quantise=dict(group_size=32, bits=4)),
    "affine8-tied": dict(config=dict(num_key_value_heads=4), quantise=dict(group_size=64, bits=8)),
    "affine-mixed": dict(
        config=dict(tie_word_embeddings=False),
        quantise=dict(group_size=32, bits=4, quant_predicate=heads_in_eight_bits),
        splits=[ALONE],
    ),
    # The engine widens these while loading; the oracle does so after.
    "bfloat16-as-float32": dict(config=dict(), dtype=mx.bfloat16, widen=True, splits=[PAIR]),
    "affine4-float16-as-float32": dict(
        config=dict(tie_word_embeddings=False),
        dtype=mx.float16,
        widen=True,
        quantise=dict(group_size=64, bits=4),
        splits=[ALONE],
    ),
    # What a stage of several ranks holds. "stages" are layers per stage, for each number of members.
    "sharded": dict(
        config=WIDE | dict(rope_scaling=LLAMA3), splits=[[3]], stages={2: [[3], [2, 1]], 4: [[3]]}, thorough=True
    ),
    "sharded-biased": dict(
        config=WIDE | dict(tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
        shards=2,
        splits=[],
        stages={2: [[3], [1, 2]]},
    ),
    "sharded-affine4": dict(
        config=WIDE | dict(tie_word_embeddings=False),
        quantise=dict(group_size=32, bits=4),
        splits=[],
        stages={2: [[3], [2, 1]], 4: [[3]]},
    ),
    "sharded-affine8": dict(
        config=WIDE | dict(head_dim=32), quantise=dict(group_size=64, bits=8), splits=[], stages={2: [[3]]}
    ),
    "sharded-affine4-bfloat16": dict(
        config=WIDE | dict(head_dim=32),
        dtype=mx.bfloat16,
        quantise=dict(group_size=64, bits=4),
        splits=[],
        stages={2: [[3]]},
    ),
    "sharded-bfloat16": dict(
        config=WIDE | dict(tie_word_embeddings=False), dtype=mx.bfloat16, splits=[], stages={2: [[3], [2, 1]], 4: [[3]]}
    ),
    "qwen3": dict(
        config=QWEN3, splits=[[3], [2, 1], [1, 1, 1]], stages={2: [[3], [2, 1]], 4: [[3]]}, thorough=True
    ),
    "qwen3-affine4": dict(
        config=QWEN3, quantise=dict(group_size=64, bits=4), splits=[[3], [2, 1]], stages={2: [[3], [1, 2]]}
    ),
    "qwen3-affine8": dict(
        config=QWEN3 | dict(tie_word_embeddings=False),
        quantise=dict(group_size=32, bits=8),
        splits=[[3]],
        stages={2: [[3]], 4: [[3]]},
    ),
    "qwen3-bfloat16": dict(config=QWEN3, dtype=mx.bfloat16, splits=[[3]], stages={2: [[3], [2, 1]], 4: [[3]]}),
    # Quantised caches, of heads that are one group wide or several, alone and shared.
    "kv8": dict(
        config=dict(head_dim=64, num_hidden_layers=3), kv=dict(bits=8, group_size=64), splits=[[3], [2, 1], [1, 1, 1]]
    ),
    "kv4": dict(
        config=dict(head_dim=128, num_hidden_layers=2, num_attention_heads=2, tie_word_embeddings=False),
        kv=dict(bits=4, group_size=64),
        splits=[[2], [1, 1]],
    ),
    "kv4-bfloat16": dict(
        config=dict(head_dim=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1),
        dtype=mx.bfloat16,
        kv=dict(bits=4, group_size=64),
        splits=[[1]],
    ),
    "qwen3-kv8": dict(
        config=QWEN3, kv=dict(bits=8, group_size=32), splits=[[3], [2, 1]], stages={2: [[3], [2, 1]]}
    ),
    "qwen3-kv4": dict(config=QWEN3, kv=dict(bits=4, group_size=32), splits=[], stages={2: [[3]]}),
    # Slow on a CPU.
    "bfloat16": dict(config=dict(tie_word_embeddings=False), dtype=mx.bfloat16, splits=[ALONE, THREE]),
    "float16": dict(config=dict(), dtype=mx.float16, splits=[ALONE, PAIR]),
}


def make(variant, spec, folder):
    mx.random.seed(SEED)
    config = BASE | spec["config"]
    architecture = qwen3 if config["model_type"] == "qwen3" else llama
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    # Norms of one and biases near nothing would hide mistakes in them.
    def shake(path, value):
        return value + 0.3 * mx.random.normal(value.shape) if value.ndim == 1 else value

    model.update(tree_map_with_path(shake, model.parameters()))
    model.set_dtype(spec.get("dtype", mx.float32))
    if "quantise" in spec:
        model, config = quantize_model(model, config, **spec["quantise"])
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder, model)
    save_config(dict(config), folder / "config.json")
    if spec.get("index") is False:
        (folder / "model.safetensors.index.json").unlink()
    if spec.get("shards"):
        split(folder, spec["shards"])


def tree_map_with_path(function, tree):
    from mlx.utils import tree_map_with_path as upstream

    return upstream(function, tree)


def split(folder, count):
    """The same weights in several files with an index, tensors dealt in turn."""
    weights = sorted(mx.load(str(folder / "model.safetensors")).items())
    names = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    index = {name: names[place % count] for place, (name, _) in enumerate(weights)}
    for file in names:
        mx.save_safetensors(str(folder / file), {name: value for name, value in weights if index[name] == file})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def widened(model):
    """Every weight as float32, quantised ones unpacked first."""
    from mlx_lm.utils import dequantize_model

    if any(path.endswith("scales") for path, _ in tree_flatten(model.parameters())):
        model.update(
            tree_map(lambda value: value.astype(mx.float32) if value.dtype != mx.uint32 else value, model.parameters())
        )
        model = dequantize_model(model)
    model.set_dtype(mx.float32)
    return model


def answer(folder, spec):
    model, _ = load_model(folder)
    if spec.get("widen"):
        model = widened(model)
    write(folder, spec, generate(model, spec))


def generate(model, spec, lengths=LENGTHS, count=TOKENS):
    """Prompts, tokens, gaps, and the log-probabilities of every position."""
    prompts, tokens, gaps, everything = [], [], [], []
    for length in lengths:
        # Of its length alone, so that fewer lengths are fewer of the same prompts.
        random = Random(SEED * length)
        prompt = [random.randrange(VOCABULARY) for _ in range(length)]
        chosen, apart = [], []
        cache = [QuantizedKVCache(**spec["kv"]) for _ in model.layers] if "kv" in spec else None
        for token, logprobs in generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=cache):
            logprobs = np.array(logprobs.astype(mx.float32))
            second, first = np.partition(logprobs, -2)[-2:]
            chosen.append(int(token))
            apart.append(float(first - second))
            everything.append(logprobs)
        prompts.append(prompt)
        tokens.append(chosen)
        gaps.append(apart)
    return prompts, tokens, gaps, np.stack(everything).astype("<f4")


def write(folder, spec, answers):
    prompts, tokens, gaps, everything = answers
    everything.tofile(folder / "oracle.f32")
    # Written last: its presence says that the rest is whole.
    (folder / "oracle.json").write_text(
        json.dumps(
            dict(
                vocabulary=VOCABULARY,
                widen=bool(spec.get("widen")),
                dtype=str(spec.get("dtype", mx.float32)).rsplit(".", 1)[-1] if not spec.get("widen") else "float32",
                kv_bits=spec.get("kv", {}).get("bits"),
                splits=spec.get("splits", [ALONE, PAIR, THREE]),
                stages=spec.get("stages", {}),
                prompts=prompts,
                tokens=tokens,
                gaps=gaps,
            )
        )
    )


def answer_sharded(out, variant, members):
    """The same by `members` processes; only the first one's answers are written."""
    folder = out / variant / f"tensor-{members}"
    folder.mkdir()
    hosts = folder / "hosts.json"
    # MLX binds its ports a moment after they are chosen here; nobody else asks for any meanwhile.
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(members)]
    hosts.write_text(json.dumps([["127.0.0.1:%d" % one.getsockname()[1]] for one in held]))
    for one in held:
        one.close()
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "shard", str(out), variant],
            env=os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
        )
        for rank in range(members)
    ]
    try:
        for rank in ranks:
            if rank.wait(timeout=600) != 0:
                raise SystemExit(f"oracle: a rank of {variant} by {members} ended with {rank.returncode}")
    finally:
        for rank in ranks:
            rank.kill()


def be_a_shard(out, variant):
    group = mx.distributed.init(strict=True, backend="ring")
    model, _ = load_model(out / variant, lazy=True)
    model.shard(group)
    mx.eval(model.parameters())
    spec = VARIANTS[variant]
    thorough = spec.get("thorough") and group.size() == 2
    answers = generate(model, spec) if thorough else generate(model, spec, *FEWER[group.size()])
    if group.rank() == 0:
        write(out / variant / f"tensor-{group.size()}", spec, answers)


def main():
    mx.set_default_device(mx.cpu)
    if sys.argv[1] == "shard":
        return be_a_shard(Path(sys.argv[2]), sys.argv[3])
    out = Path(sys.argv[1])
    for variant, spec in VARIANTS.items():
        make(variant, spec, out / variant)
        answer(out / variant, spec)
        for members in spec.get("stages", {}):
            answer_sharded(out, variant, members)
        print(f"oracle: {variant}", flush=True)


if __name__ == "__main__":
    main()
