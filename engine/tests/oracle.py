"""Writes what mlx-lm answers, for the test `exactness` to hold the engine to.

    oracle.py JOB...                    each is a folder, or FOLDER:MEMBERS
    oracle.py shard FOLDER              one rank of a sharded model, started by the first form

A folder holds spec.json, one variant of exactness/variants.json with the whole config. It becomes a Hugging Face folder
with random weights made by mlx-lm's own class, and in it oracle.json (prompts, greedy tokens, the gap between the two
most probable tokens) and oracle.f32 (log-probabilities of every position, little-endian float32, [prompts, tokens,
vocabulary]). mlx-lm loads the folder and generates as it does for anyone: `load_model`, then `generate_step`. Nothing
here knows the engine.

Variants with "kv" keep their caches quantised from the first token on. (generate_step's own `kv_bits` quantises a cache
after the first piece of a prompt has read it as computed, so an answer would depend on where prompts are cut.)

With MEMBERS a variant that is there already is answered again by mlx-lm sharded over as many processes of MLX's ring on
loopback (`model.shard`), into FOLDER/tensor-<members>/: sums of slices round in another order than whole products, so
that is what a stage of several ranks has to equal.
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


def heads_in_eight_bits(path, module):
    """Everything in four bits, head and first layer in eight: overrides per path, as mixed recipes have them."""
    if not hasattr(module, "to_quantized"):
        return False
    wide = path == "lm_head" or path.startswith("model.layers.0.")
    return {"group_size": 32, "bits": 8 if wide else 4}


def make(spec, folder):
    mx.random.seed(SEED)
    config = spec["config"]
    architecture = qwen3 if config["model_type"] == "qwen3" else llama
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    # Norms of one and biases near nothing would hide mistakes in them.
    def shake(path, value):
        return value + 0.3 * mx.random.normal(value.shape) if value.ndim == 1 else value

    model.update(tree_map_with_path(shake, model.parameters()))
    model.set_dtype(getattr(mx, spec.get("dtype", "float32")))
    if "quantise" in spec:
        how = dict(spec["quantise"])
        if how.pop("heads", None) == 8:
            how["quant_predicate"] = heads_in_eight_bits
        model, config = quantize_model(model, config, **how)
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
                dtype="float32" if spec.get("widen") else spec.get("dtype", "float32"),
                kv_bits=spec.get("kv", {}).get("bits"),
                prompts=prompts,
                tokens=tokens,
                gaps=gaps,
            )
        )
    )


def answer_sharded(model, members):
    """The same by `members` processes; only the first one's answers are written."""
    folder = model / f"tensor-{members}"
    folder.mkdir(exist_ok=True)
    hosts = folder / "hosts.json"
    # MLX binds its ports a moment after they are chosen here; nobody else asks for any meanwhile.
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(members)]
    hosts.write_text(json.dumps([["127.0.0.1:%d" % one.getsockname()[1]] for one in held]))
    for one in held:
        one.close()
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "shard", str(model)],
            env=os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
        )
        for rank in range(members)
    ]
    try:
        for rank in ranks:
            if rank.wait(timeout=600) != 0:
                raise SystemExit(f"oracle: a rank of {model.name} by {members} ended with {rank.returncode}")
    finally:
        for rank in ranks:
            rank.kill()


def be_a_shard(folder):
    group = mx.distributed.init(strict=True, backend="ring")
    model, _ = load_model(folder, lazy=True)
    model.shard(group)
    mx.eval(model.parameters())
    spec = read(folder)
    thorough = spec.get("thorough") and group.size() == 2
    answers = generate(model, spec) if thorough else generate(model, spec, *FEWER[group.size()])
    if group.rank() == 0:
        write(folder / f"tensor-{group.size()}", spec, answers)


def read(folder):
    return json.loads((folder / "spec.json").read_text())


def main():
    mx.set_default_device(mx.cpu)
    if sys.argv[1] == "shard":
        return be_a_shard(Path(sys.argv[2]))
    for job in sys.argv[1:]:
        folder, _, members = job.partition(":")
        folder = Path(folder)
        if members:
            answer_sharded(folder, int(members))
        else:
            make(read(folder), folder)
            answer(folder, read(folder))
        print(f"oracle: {folder.name}{' by ' * bool(members)}{members}", flush=True)


if __name__ == "__main__":
    main()
