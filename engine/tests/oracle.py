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

Variants with "original" are in the layout of Hugging Face's exports, which mlx-lm turns into its own on loading; those
with "packing" have the weights of their layers packed as others pack them (packings.py). Variants with "convert" stay as
they are for the engine, which packs them while it reads them; mlx-lm answers from what its `convert` makes of them.

Variants with "adapter" have an adapter in FOLDER/adapter/, random LoRA or DoRA of some of its layers and modules, which
mlx-lm loads for its answers; "peft" writes it as PEFT does, which mlx-lm does not read.

With MEMBERS a variant that is there already is answered again by mlx-lm sharded over as many processes of MLX's ring on
loopback (`model.shard`), into FOLDER/tensor-<members>/: sums of slices round in another order than whole products, so
that is what a stage of several ranks has to equal. A family that mlx-lm does not shard has to equal itself whole.
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
from mlx_lm.models import switch_layers
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache
from mlx_lm.utils import _get_classes, load_model, quantize_model, save_config, save_model
from packings import pack_folder, read_by_mlx_lm

SEED = 11
VOCABULARY = 320
TOKENS = 64
# One position, several, around the cache's step of 256, and beyond one chunk of 2048.
LENGTHS = [1, 2, 3, 5, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 190, 230, 254, 255, 256, 257, 300, 2060]
# Members wait for each other actively, often on fewer cores than there are members: unless a variant says
# "thorough", stages of several are asked some of the prompts, and fewer tokens the more members there are.
FEWER = {2: ([1, 3, 16, 64, 190, 256, 257, 2060], 32), 4: ([3, 64, 257, 2060], 12)}


def heads_in_eight_bits(path, module):
    """Everything in four bits, head and first layer in eight: overrides per path, as mixed recipes have them."""
    if not hasattr(module, "to_quantized"):
        return False
    wide = path == "lm_head" or path.startswith("model.layers.0.")
    return {"group_size": 32, "bits": 8 if wide else 4}


def without_global_scale():
    """mlx-lm 0.32.2 hands `gather_qmm` an argument that mlx 0.32.2 does not have, and hands it nothing: it is left out."""
    gather = mx.gather_qmm

    def call(*args, global_scale=None, **kwargs):
        assert global_scale is None
        return gather(*args, **kwargs)

    switch_layers.mx = type("mx", (), {**vars(mx), "gather_qmm": staticmethod(call)})


def with_windows(model, config):
    """mlx-lm gives `mistral` no window; Transformers looks back by it in every layer, and so do mlx-lm's own masks."""
    if config["model_type"] != "mistral" or not config.get("sliding_window"):
        return model
    window = config["sliding_window"]
    model.model.sliding_window = window
    model.model.fa_idx = model.model.swa_idx = 0
    for layer in model.model.layers:
        layer.use_sliding = True
    # Of this model alone: the class is that of llama variants too, which this process may answer next.
    model.make_cache = lambda: [RotatingKVCache(max_size=window) for _ in model.layers]
    return model


def make(spec, folder):
    mx.random.seed(SEED)
    config = spec["config"]
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(dict(config)))
    # Norms of one, biases, sinks and corrections near nothing would hide mistakes in them.
    def shake(path, value):
        # As made, a state space forgets within a position or two.
        value = value - 4.0 if path.endswith("mixer.dt_bias") else value
        return value + 0.3 * mx.random.normal(value.shape) if value.ndim == 1 else value

    model.update(tree_map_with_path(shake, model.parameters()))
    model.set_dtype(getattr(mx, spec.get("dtype", "float32")))
    if "quantise" in spec:
        how = dict(spec["quantise"])
        if how.pop("heads", None) == 8:
            how["quant_predicate"] = heads_in_eight_bits
        if how.pop("experts", None) == "alone":
            how["quant_predicate"] = experts_alone
        model, config = quantize_model(model, config, **how)
    save_model(folder, model)
    save_config(dict(config), folder / "config.json")
    if spec.get("convert"):
        convert(model, config, folder / "converted", spec["convert"])
    if spec.get("original"):
        as_original(folder, config)
    if spec.get("packing"):
        pack_folder(folder, config, **spec["packing"])
    if spec.get("adapter"):
        make_adapter(folder, **spec["adapter"])
    if spec.get("index") is False:
        (folder / "model.safetensors.index.json").unlink()
    if spec.get("shards"):
        split(folder, spec["shards"])


def make_adapter(folder, kind, layers, rank, scale, keys=None, peft=False):
    """An adapter with every weight at random: as it is made, one of its two matrices is nothing."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model, _ = load_model(read_by_mlx_lm(folder))
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0} | ({"keys": keys} if keys else {})
    linear_to_lora_layers(model, layers, parameters, use_dora=kind == "dora")
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        end = name.rsplit(".", 1)[-1]
        if end in ("lora_a", "lora_b"):
            weights[name] = 0.1 * mx.random.normal(value.shape)
        elif end == "m" and name.removesuffix("m") + "lora_a" in dict(tree_flatten(model.parameters())):
            weights[name] = value * (1.0 + 0.2 * mx.random.normal(value.shape))
    own = folder / "adapter"
    own.mkdir(exist_ok=True)
    config = {"fine_tune_type": kind, "num_layers": layers, "lora_parameters": parameters}
    (folder / "adapter-mlx").mkdir(exist_ok=True)
    for place in (own, folder / "adapter-mlx"):
        (place / "adapter_config.json").write_text(json.dumps(config))
        mx.save_safetensors(str(place / "adapters.safetensors"), weights)
    if not peft:
        return
    (own / "adapters.safetensors").unlink()
    named = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
    made = {}
    for name, value in weights.items():
        module, end = name.rsplit(".", 1)
        value = value if end == "m" else mx.contiguous(value.T)
        made[f"base_model.model.{module}.{named[end]}"] = value
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "bias": "none", "use_dora": kind == "dora"}
    (own / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(own / "adapter_model.safetensors"), made, {"format": "pt"})


def convert(model, config, folder, how):
    """As `mlx_lm.convert --quantize` writes it; the model is not what it was afterwards."""
    folder.mkdir(exist_ok=True)
    model, config = quantize_model(model, config, **how)
    save_model(folder, model)
    save_config(dict(config), folder / "config.json")


def tree_map_with_path(function, tree):
    from mlx.utils import tree_map_with_path as upstream

    return upstream(function, tree)


def as_original(folder, config):
    """The same weights as Hugging Face exports them, which mlx-lm's `sanitize` turns into its own layout."""
    path = str(folder / "model.safetensors")
    weights, made = mx.load(path), {}
    # Read now: the file is written over.
    mx.eval(list(weights.values()))
    text = config.get("text_config", config)
    kind = text["model_type"]
    named = {"minimax_m2": ("w1", "w3", "w2"), "lfm2_moe": ("w1", "w3", "w2")}
    experts = named.get(kind, ("gate_proj", "up_proj", "down_proj"))
    each = dict(zip(("gate_proj", "up_proj", "down_proj"), experts)) | {"fc1": "up_proj", "fc2": "down_proj"}
    for name, value in weights.items():
        parts = name.split(".")
        if "switch_mlp" in parts:
            module, projection = name.split(".switch_mlp.")
            for expert, own in enumerate(value):
                made[f"{module}.experts.{expert}.{each[projection.removesuffix('.weight')]}.weight"] = own
        elif "switch_glu" in parts:
            module, projection = name.split(".switch_glu.")
            if projection == "gate_proj.weight":
                up = weights[name.replace("gate_proj", "up_proj")]
                made[f"{module}.gate_up_proj"] = mx.concatenate([value, up], axis=1)
            elif projection == "down_proj.weight":
                made[f"{module}.down_proj"] = value
        elif name.endswith("embed_q.weight"):
            values = weights[name.replace("embed_q", "unembed_out")]
            both = mx.concatenate([value.swapaxes(-1, -2), values], axis=1)
            made[name.replace("embed_q", "kv_b_proj")] = both.reshape(-1, both.shape[-1])
        elif name.endswith("unembed_out.weight"):
            pass
        elif ".mlp.experts." in name:
            gpt_oss_experts(name, value, weights, made)
        elif name.endswith(("conv1d.weight", "conv.conv.weight")):
            made[name] = value.moveaxis(2, 1)
        elif ".feed_forward." in name and parts[-2] in each:
            made[name.replace(parts[-2], each[parts[-2]])] = value
        elif "linear_num_key_heads" in text and value.ndim == 1 and parts[-2].endswith("norm") and parts[-3] != "linear_attn":
            made[name] = value - 1.0
        else:
            made[name] = value
    if "text_config" in config:
        made = {
            name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head", "lm_head"): value
            for name, value in made.items()
        }
        seeing = ["model.visual.patch_embed.weight", "mtp.fc.weight"]
        for name in ["model.vision_tower.patch_embed.weight"] if kind == "gemma4_text" else seeing:
            made[name] = mx.ones((4, 4))
    # Exports have them of layers that read the keys and values of others, too, and nothing reads them.
    layers = text.get("num_hidden_layers") or 0
    for layer in range(layers - (text.get("num_kv_shared_layers") or 0), layers):
        module = f"model.language_model.layers.{layer}.self_attn"
        made |= {f"{module}.{name}.weight": mx.ones((4, 4)) for name in ("k_proj", "v_proj", "k_norm")}
    if kind == "nemotron_h":
        made["mtp.layers.0.norm.weight"] = mx.ones((4,))
    if text.get("num_nextn_predict_layers"):
        made[f"model.layers.{text['num_hidden_layers']}.input_layernorm.weight"] = mx.ones((4,))
    mx.save_safetensors(path, {name: mx.contiguous(value) for name, value in made.items()}, {"format": "pt"})
    (folder / "model.safetensors.index.json").unlink()
    if config.pop("quantization", None):
        config["quantization_config"] = {"quant_method": "mxfp4"}
        save_config(dict(config), folder / "config.json")
        saved = json.loads((folder / "config.json").read_text())
        saved.pop("quantization", None)
        (folder / "config.json").write_text(json.dumps(saved))


def gpt_oss_experts(name, value, weights, made):
    """Gate and up in turn in one tensor, packed values as bytes."""
    module, projection, field = name.rsplit(".", 2)
    field = {"weight": "_blocks", "scales": "_scales", "bias": "_bias"}[field]
    if projection == "up_proj":
        return
    if projection == "gate_proj":
        up = weights[name.replace("gate_proj", "up_proj")]
        value = mx.stack([value, up], axis=2).reshape(value.shape[0], -1, *value.shape[2:])
        projection = "gate_up_proj"
    if field == "_blocks":
        value = value.view(mx.uint8).reshape(*value.shape[:2], -1, 16)
    made[f"{module}.{projection}{field}"] = value


def experts_alone(path, module):
    """Only experts are packed, as in gpt-oss."""
    return hasattr(module, "to_quantized") and ".mlp.experts." in path


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
    model, _ = load_model(read_by_mlx_lm(folder))
    model = with_windows(model, spec["config"])
    if spec.get("adapter"):
        from mlx_lm.tuner.utils import load_adapters

        model = load_adapters(model, str(folder / "adapter-mlx"))
        model.eval()
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
                load_bits=spec.get("convert", {}).get("bits"),
                adapter="adapter" in spec,
                prompts=prompts,
                tokens=tokens,
                gaps=gaps,
            )
        )
    )


def answer_whole(model, members):
    """Of a model that mlx-lm does not shard so, some of what it answers whole."""
    whole = json.loads((model / "oracle.json").read_text())
    logprobs = np.fromfile(model / "oracle.f32", dtype="<f4").reshape(len(whole["prompts"]), -1, VOCABULARY)
    lengths, count = FEWER[members]
    some = [place for place, prompt in enumerate(whole["prompts"]) if len(prompt) in lengths]
    folder = model / f"tensor-{members}"
    logprobs[some, :count].tofile(folder / "oracle.f32")
    fewer = {"prompts": [whole["prompts"][place] for place in some]}
    fewer |= {field: [whole[field][place][:count] for place in some] for field in ("tokens", "gaps")}
    (folder / "oracle.json").write_text(json.dumps(whole | fewer))


def is_sharded(spec, members):
    """Whether mlx-lm shards the family, and gives each rank KV heads of its own and as much of every MLP."""
    config = dict(spec["config"])
    text = config.get("text_config", config)
    group = (spec.get("quantise") or spec.get("convert") or {}).get("group_size", 1)
    widths = [text.get(name) or 0 for name in ("intermediate_size", "moe_intermediate_size")]
    return (
        # Not what an adapter is around.
        "adapter" not in spec
        and hasattr(_get_classes(config)[0], "shard")
        and (text.get("num_key_value_heads") or members) >= members
        and all(width % (group * members) == 0 for width in widths)
    )


def answer_sharded(model, members):
    """The same by `members` processes; only the first one's answers are written."""
    folder = model / f"tensor-{members}"
    folder.mkdir(exist_ok=True)
    if not is_sharded(read(model), members):
        return answer_whole(model, members)
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
    spec = read(folder)
    model, _ = load_model(read_by_mlx_lm(folder), lazy=True)
    model = with_windows(model, spec["config"])
    if spec.get("widen"):
        model = widened(model)
    model.shard(group)
    mx.eval(model.parameters())
    thorough = spec.get("thorough") and group.size() == 2
    answers = generate(model, spec) if thorough else generate(model, spec, *FEWER[group.size()])
    if group.rank() == 0:
        write(folder / f"tensor-{group.size()}", spec, answers)


def read(folder):
    return json.loads((folder / "spec.json").read_text())


def main():
    mx.set_default_device(mx.cpu)
    without_global_scale()
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
