"""Trains the smoke model: a small Llama that really adds, on text that `lessons.py` makes.

    train.py tokenizer WORK          make WORK/tokenizer.json from the lessons
    train.py train WORK              train to the end, from the last checkpoint if there is one
    train.py export WORK MODEL       write the Hugging Face model folder (bf16) and MODEL-4bit beside it

`train` starts RANKS copies of itself, which average their gradients over MLX's ring backend with one BLAS thread
each: on the CPU most of a step does not use more than one thread, so two processes use two cores best.
Every batch is a function of (seed, stage, step, rank), so a run that stops and resumes sees the same text.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from random import Random

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import lessons

SEED = 20260
RANKS = 2
CHECKPOINT_EVERY = 250
SPECIALS = ["<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"]
PAD, BEGIN, END, USER, ASSISTANT = range(5)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": BEGIN,
    "eos_token_id": END,
    "pad_token_id": PAD,
    "torch_dtype": "bfloat16",
}

# `quantised` is the last part of a stage in which every second step computes with weights rounded to 4 bits, so
# that the 4-bit variant answers as well as the full one.
STAGES = [
    dict(name="short", rows=8, length=128, steps=4200, rate=2e-3, warmup=60, quantised=0.2, turns=4, count=20,
         mix=dict(sum=0.60, steps=0.10, day=0.14, count=0.03, fact=0.09, unknown=0.04)),
    dict(name="middle", rows=4, length=256, steps=1400, rate=1.2e-3, warmup=40, quantised=0.2, turns=8, count=40,
         mix=dict(sum=0.54, steps=0.14, day=0.16, count=0.05, fact=0.07, unknown=0.04)),
    dict(name="long", rows=2, length=512, steps=800, rate=5e-4, warmup=30, quantised=0.5, turns=16, count=100,
         mix=dict(sum=0.50, steps=0.13, day=0.18, count=0.04, fact=0.10, unknown=0.05)),
    dict(name="edges", rows=2, length=512, steps=900, rate=6e-4, warmup=30, quantised=0.5, turns=16, count=100, edges=0.5,
         mix=dict(sum=0.66, steps=0.08, day=0.12, fact=0.10, unknown=0.04)),
]


# ---------------------------------------------------------------------------------------------------- tokenizer

def make_tokenizer(path: Path) -> None:
    """Byte-level BPE in which every digit is a token of its own: what lets a model this small learn to add."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=CONFIG["vocab_size"], special_tokens=SPECIALS, min_frequency=1, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    rng = Random(SEED)
    text = [line for answer, questions in lessons.FACTS for line in (*questions, answer) for _ in range(20)]
    text += [line for _ in range(4000) for line in lessons.turn(rng, STAGES[0]["mix"], 10)]
    tokenizer.train_from_iterator(text, trainer)
    assert [tokenizer.token_to_id(s) for s in SPECIALS] == list(range(5))
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    print(f"{tokenizer.get_vocab_size()} tokens; a sum turn is", tokenizer.encode("What is 17 + 25?").tokens)


# ------------------------------------------------------------------------------------------------------ batches

class Batches:
    """Rows of packed conversations, and a mask that is one where the model must predict the assistant."""

    def __init__(self, tokenizer, stage: dict, rank: int):
        self.tokenizer, self.stage, self.rank = tokenizer, stage, rank

    def row(self, rng: Random) -> tuple[list[int], list[int]]:
        tokens, mask = [], []
        want = self.stage["length"] + 1
        while len(tokens) < want:
            turns = lessons.conversation(rng, self.stage["mix"], self.stage["turns"], self.stage["count"],
                                         self.stage.get("edges", 0.0))
            texts = self.tokenizer.encode_batch([text for turn in turns for text in turn], add_special_tokens=False)
            tokens.append(BEGIN)
            mask.append(0)
            for question, answer in zip(texts[::2], texts[1::2]):
                tokens += [USER, *question.ids, END, ASSISTANT, *answer.ids, END]
                mask += [0] * (len(question.ids) + 3) + [1] * (len(answer.ids) + 1)
        return tokens[:want], mask[:want]

    def at(self, step: int):
        import numpy as np

        rng = Random(f"{SEED} {self.stage['name']} {step} {self.rank}")
        rows = [self.row(rng) for _ in range(self.stage["rows"])]
        tokens, mask = (np.array(part, dtype=np.int32) for part in zip(*rows))
        return tokens[:, :-1], tokens[:, 1:], mask[:, 1:].astype(np.float32)


# ----------------------------------------------------------------------------------------------------- training

def make_model():
    import mlx.core as mx
    from mlx_lm.models.llama import Model, ModelArgs

    mx.random.seed(SEED)
    model = Model(ModelArgs.from_dict(CONFIG))

    def start(name, value):
        if value.ndim == 1:
            return value
        deep = name.endswith(("o_proj.weight", "down_proj.weight"))
        return mx.random.normal(value.shape) * (0.02 if "embed" in name else value.shape[1] ** -0.5) * (8**-0.5 if deep else 1.0)

    from mlx.utils import tree_flatten, tree_unflatten
    model.update(tree_unflatten([(name, start(name, value)) for name, value in tree_flatten(model.parameters())]))
    mx.eval(model.parameters())
    return model


def rounded(parameters):
    """The weights as 4-bit groups of 64 would hold them; gradients pass straight through."""
    import mlx.core as mx
    from mlx.utils import tree_map

    def one(weight):
        if weight.ndim != 2:
            return weight
        held = mx.dequantize(*mx.quantize(mx.stop_gradient(weight), group_size=64, bits=4), group_size=64, bits=4)
        return weight + mx.stop_gradient(held - weight)

    return tree_map(one, parameters)


def fast_exp(x):
    """e to the x for |x| ≤ 20, as products and sums that a compiled CPU kernel runs eight at a time.

    MLX's own exp costs 16 ns an element on a CPU without Apple's library, a third of a whole step; this costs one
    tenth of it, and differs by less than one part in ten thousand.
    """
    import mlx.core as mx

    @mx.custom_function
    def exp(x):
        z = mx.clip(x, -20.0, 20.0) * (1 / 32)
        y = 1 + z * (1 + z * (1 / 2 + z * (1 / 6 + z * (1 / 24 + z * (1 / 120 + z / 720)))))
        for _ in range(5):
            y = y * y
        return y

    @exp.vjp
    def exp_vjp(primals, cotangent, output):
        return cotangent * output

    return exp(x)


def forward(parameters, x):
    """The Llama that `CONFIG` describes, written out for speed: equal to mlx_lm's, which `evaluate.py` runs."""
    import mlx.core as mx

    model, eps = parameters["model"], CONFIG["rms_norm_eps"]
    rows, length = x.shape
    heads, groups, width = (CONFIG[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    causal = mx.triu(mx.full((length, length), -1e4), k=1)

    def split(y, count):
        return y.reshape(rows, length, count, width).transpose(0, 2, 1, 3)

    def rope(y):
        return mx.fast.rope(y, width, traditional=False, base=CONFIG["rope_theta"], scale=1.0, offset=0)

    h = model["embed_tokens"]["weight"][x].reshape(rows * length, -1)
    for layer in model["layers"]:
        attn, mlp = ({k: v["weight"] for k, v in layer[part].items() if "weight" in v} for part in ("self_attn", "mlp"))
        y = mx.fast.rms_norm(h, layer["input_layernorm"]["weight"], eps)
        q = rope(split(y @ attn["q_proj"].T, heads)).reshape(rows, groups, heads // groups * length, width)
        k = rope(split(y @ attn["k_proj"].T, groups))
        v = split(y @ attn["v_proj"].T, groups)
        scores = ((q * width**-0.5) @ k.swapaxes(-1, -2)).reshape(rows, heads, length, length) + causal
        weights = fast_exp(scores - mx.stop_gradient(scores.max(axis=-1, keepdims=True)))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        y = (weights.reshape(rows, groups, -1, length) @ v).reshape(rows, heads, length, width)
        h = h + y.transpose(0, 2, 1, 3).reshape(rows * length, -1) @ attn["o_proj"].T
        y = mx.fast.rms_norm(h, layer["post_attention_layernorm"]["weight"], eps)
        gate = y @ mlp["gate_proj"].T
        h = h + (gate / (1 + fast_exp(-gate)) * (y @ mlp["up_proj"].T)) @ mlp["down_proj"].T
    h = mx.fast.rms_norm(h, model["norm"]["weight"], eps)
    return h @ model["embed_tokens"]["weight"].T


def make_step(optimizer, group):
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim

    def loss(parameters, x, y, mask, quantise):
        logits = forward(rounded(parameters) if quantise else parameters, x)
        top = mx.stop_gradient(logits.max(axis=-1, keepdims=True))
        total = mx.log(fast_exp(logits - top).sum(axis=-1)) + top.squeeze(-1)
        each = (total - mx.take_along_axis(logits, y.reshape(-1, 1), axis=-1).squeeze(-1)) * mask.reshape(-1)
        return each.sum() / mx.maximum(mask.sum(), 1)

    compiled = {q: mx.compile(lambda p, x, y, m, q=q: mx.value_and_grad(loss)(p, x, y, m, q)) for q in (False, True)}

    @partial(mx.compile, inputs=optimizer.state, outputs=optimizer.state)
    def update(gradients, parameters):
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        return optimizer.apply_gradients(gradients, parameters)

    def step(parameters, batch, quantise):
        value, gradients = compiled[quantise](parameters, *(mx.array(part) for part in batch))
        gradients = nn.average_gradients(gradients, group)
        parameters = update(gradients, parameters)
        mx.eval(value, parameters, optimizer.state)
        return float(value), parameters

    return step


def rate_at(stage: dict, step: int) -> float:
    """Linear warm-up, then a cosine down to 2 %, by step count: the same however fast the machine is."""
    import math

    if step < stage["warmup"]:
        return stage["rate"] * (step + 1) / stage["warmup"]
    done = (step - stage["warmup"]) / max(1, stage["steps"] - stage["warmup"])
    return stage["rate"] * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def save(work: Path, parameters, optimizer, stage: int, step: int) -> None:
    """One folder, replaced by rename, so that a killed run never leaves half a checkpoint."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    fresh, kept, old = work / "checkpoint.new", work / "checkpoint", work / "checkpoint.old"
    for folder in (fresh, old):
        shutil.rmtree(folder, ignore_errors=True)
    fresh.mkdir(parents=True)
    mx.save_safetensors(str(fresh / "model.safetensors"), dict(tree_flatten(parameters)))
    mx.save_safetensors(str(fresh / "optimizer.safetensors"), dict(tree_flatten(optimizer.state)))
    (fresh / "progress.json").write_text(json.dumps(dict(stage=stage, step=step)))
    if kept.exists():
        kept.rename(old)
    fresh.rename(kept)


def train_rank(work: Path) -> None:
    import mlx.core as mx
    import mlx.optimizers as optim
    from mlx.utils import tree_flatten, tree_unflatten
    from tokenizers import Tokenizer

    mx.set_default_device(mx.cpu)
    group = mx.distributed.init(strict=RANKS > 1, backend="ring" if RANKS > 1 else "any")
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    parameters = make_model().parameters()
    first_stage, first_step, state = 0, 0, None
    if (work / "checkpoint" / "progress.json").exists():
        progress = json.loads((work / "checkpoint" / "progress.json").read_text())
        first_stage, first_step = progress["stage"], progress["step"]
        parameters = tree_unflatten(list(mx.load(str(work / "checkpoint" / "model.safetensors")).items()))
        state = tree_unflatten(list(mx.load(str(work / "checkpoint" / "optimizer.safetensors")).items()))
    if group.rank() == 0:
        count = sum(value.size for _, value in tree_flatten(parameters))
        print(f"{count} parameters, {group.size()} ranks, from stage {first_stage} step {first_step}", flush=True)

    steps_left = sum(s["steps"] for s in STAGES[first_stage:]) - first_step
    begun, done = time.time(), 0
    for index in range(first_stage, len(STAGES)):
        stage = STAGES[index]
        optimizer = optim.AdamW(learning_rate=stage["rate"], betas=[0.9, 0.98], weight_decay=0.05)
        optimizer.init(parameters)
        if state is not None and first_step > 0:
            optimizer.state = state
        step_once = make_step(optimizer, group)
        batches = Batches(tokenizer, stage, group.rank())
        recent = []
        for step in range(first_step, stage["steps"]):
            optimizer.learning_rate = rate_at(stage, step)
            quantise = step >= stage["steps"] * (1 - stage["quantised"]) and step % 2 == 1
            value, parameters = step_once(parameters, batches.at(step), quantise)
            recent = (recent + [value])[-25:]
            done += 1
            if group.rank() == 0 and (step + 1) % 25 == 0:
                pace = (time.time() - begun) / done
                tokens = stage["rows"] * stage["length"] * group.size() / pace
                print(f"{time.strftime('%H:%M:%S')} stage {index} step {step + 1}/{stage['steps']} loss {sum(recent) / len(recent):.4f} "
                      f"{tokens:.0f} tok/s, {(steps_left - done) * pace / 60:.1f} min left", flush=True)
            if group.rank() == 0 and ((step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == stage["steps"]):
                last = step + 1 == stage["steps"]
                save(work, parameters, optimizer, index + last, 0 if last else step + 1)
        first_step, state = 0, None


def train(work: Path) -> None:
    """Starts the ranks and waits; one that fails takes the others with it, since a ring cannot go on without it."""
    import socket

    sockets = [socket.socket() for _ in range(RANKS)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    hosts = work / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{s.getsockname()[1]}"] for s in sockets]))
    for s in sockets:
        s.close()
    ranks = [subprocess.Popen([sys.executable, __file__, "rank", str(work)],
                              env={**os.environ, "MLX_RANK": str(r), "MLX_HOSTFILE": str(hosts), "OPENBLAS_NUM_THREADS": "1"})
             for r in range(RANKS)]
    try:
        while any(r.poll() is None for r in ranks) and not any(r.poll() for r in ranks):
            time.sleep(0.5)
    finally:
        for r in ranks:
            if r.poll() is None:
                r.kill()
    if any(r.wait() for r in ranks):
        sys.exit("a rank failed; run the same command again to go on from the last checkpoint")


# ------------------------------------------------------------------------------------------------------- export

def export(work: Path, target: Path) -> None:
    import mlx.core as mx

    target.mkdir(parents=True, exist_ok=True)
    weights = mx.load(str(work / "checkpoint" / "model.safetensors"))
    mx.save_safetensors(str(target / "model.safetensors"), {k: v.astype(mx.bfloat16) for k, v in weights.items()}, {"format": "pt"})
    write = lambda name, value: (target / name).write_text(json.dumps(value, indent=2) + "\n")
    write("config.json", CONFIG)
    write("generation_config.json", dict(bos_token_id=BEGIN, eos_token_id=END, pad_token_id=PAD, do_sample=False))
    write("tokenizer_config.json", dict(
        tokenizer_class="PreTrainedTokenizerFast", model_max_length=CONFIG["max_position_embeddings"],
        bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|pad|>", clean_up_tokenization_spaces=False,
        chat_template=(HERE / "chat_template.jinja").read_text().strip()))
    shutil.copy(work / "tokenizer.json", target / "tokenizer.json")

    small = target.with_name(target.name + "-4bit")
    shutil.rmtree(small, ignore_errors=True)
    from mlx_lm import convert
    convert(str(target), str(small), quantize=True, q_group_size=64, q_bits=4)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(target / name, small / name)
    for extra in set(p.name for p in small.iterdir()) - {"tokenizer.json", "tokenizer_config.json", "generation_config.json",
                                                         "config.json", "model.safetensors", "model.safetensors.index.json"}:
        (small / extra).unlink()


def main() -> None:
    verb, work, *rest = sys.argv[1:]
    work = Path(work)
    if verb == "tokenizer":
        make_tokenizer(work / "tokenizer.json")
    elif verb == "train":
        if not (work / "tokenizer.json").exists():
            make_tokenizer(work / "tokenizer.json")
        train(work)
    elif verb == "rank":
        train_rank(work)
    elif verb == "export":
        export(work, Path(rest[0]))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
