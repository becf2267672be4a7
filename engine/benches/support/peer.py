"""mlx-lm at the same work as the benches, on one line of standard input after another:

    generate PROMPT_TOKENS TOKENS     seconds to the first token, seconds from it to the last
    layers PROMPT_TOKENS TOKENS       the same for the bare model: no sampling, no look-ahead
    load PROMPT_TOKENS TOKENS FOLDER  seconds to load another model, and until it has answered; it is dropped then
    serve AT:PROMPT_TOKENS:TOKENS …   for each request that arrives AT seconds: when each of its tokens came

With MLX_RANK set it is a rank of a sharded model, and every rank gets the same lines.
"""

import json
import os
import sys
import time

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from pathlib import Path


def generate(model, prompt, count):
    times = []
    begun = time.perf_counter()
    for _ in generate_step(prompt, model, max_tokens=count):
        times.append(time.perf_counter())
    return times[0] - begun, times[-1] - times[0]


def layers(model, prompt, count):
    cache = make_prompt_cache(model)
    begun = time.perf_counter()
    mx.eval(model(prompt[None], cache=cache)[:, -1])
    first = time.perf_counter()
    for _ in range(count - 1):
        mx.eval(model(prompt[:1][None], cache=cache))
    return first - begun, time.perf_counter() - first


def load(prompt, count, folder):
    begun = time.perf_counter()
    model, _ = load_model(Path(folder), lazy=True)
    mx.eval(model.parameters())
    loaded = time.perf_counter() - begun
    generate(model, mx.array(prompt_of(int(prompt))), int(count))
    return loaded, time.perf_counter() - begun


def prompt_of(length):
    return [97 + place % 26 for place in range(length)]


def serve(model, requests):
    waiting = [(float(at), int(prompt), int(count)) for at, prompt, count in requests]
    times = [[] for _ in waiting]
    generator = BatchGenerator(model)
    asked, index_of, left = 0, {}, len(waiting)
    begun = time.perf_counter()
    while left:
        now = time.perf_counter() - begun
        while asked < len(waiting) and waiting[asked][0] <= now:
            _, prompt, count = waiting[asked]
            (uid,) = generator.insert([prompt_of(prompt)], [count])
            index_of[uid] = asked
            asked += 1
        if len(index_of) == 0:
            time.sleep(0.0005)
            continue
        _, responses = generator.next()
        now = time.perf_counter() - begun
        for response in responses:
            times[index_of[response.uid]].append(now)
            if response.finish_reason is not None:
                del index_of[response.uid]
                left -= 1
    generator.close()
    return json.dumps(times)


def main():
    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(sys.argv[1]), lazy=True)
    if "MLX_RANK" in os.environ:
        model.shard(mx.distributed.init(strict=True, backend="ring"))
    mx.eval(model.parameters())
    print("ready", flush=True)
    for line in sys.stdin:
        if line.startswith("serve "):
            print(serve(model, [request.split(":") for request in line.split()[1:]]), flush=True)
            continue
        if line.startswith("load "):
            print(*load(*line.strip().split(maxsplit=3)[1:]), flush=True)
            mx.clear_cache()
            continue
        what, prompt, count = line.split()
        prompt = mx.array(prompt_of(int(prompt)))
        work = generate if what == "generate" else layers
        print(*work(model, prompt, int(count)), flush=True)


if __name__ == "__main__":
    main()
