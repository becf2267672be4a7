"""Checks Ollama's own Python client: what models are, how they are pulled, and how long they stay.

    ollama_models.py URL

The models are those of gateway/tests/gateway/sdk.rs. Prints `passed` at the end; anything else is a failure.
"""

import sys
from datetime import datetime, timedelta, timezone

from ollama import Client
from ollama_refusals import check_refusals

client = Client(host=sys.argv[1], timeout=60)

first, second = client.list().models
assert (first.model, second.model) == ("m", "waiting"), first
assert first.size == 695283921 and first.digest == "ab" * 32, first
assert first.modified_at == datetime(2023, 11, 14, 22, 13, 20, tzinfo=timezone.utc), first
details = first.details
assert (details.format, details.family, details.families) == ("safetensors", "llama", ["llama"]), details
assert (details.parameter_size, details.quantization_level) == ("1.2B", "4bit"), details

shown = client.show("m")
assert shown.details == details and shown.modelinfo["llama.context_length"] == 8192, shown
assert shown.capabilities == ["completion", "tools", "thinking"], shown

(loaded,) = client.ps().models
assert (loaded.model, loaded.size, loaded.size_vram) == ("m", 900000000, 900000000), loaded
assert loaded.context_length == 8192 and loaded.digest == first.digest, loaded


def left() -> timedelta:
    (loaded,) = client.ps().models
    return loaded.expires_at - datetime.now(timezone.utc)


answer = client.generate("m", "hi", keep_alive="1h")
assert answer.response == "Hello there" and answer.done_reason == "stop", answer
assert timedelta(minutes=30) < left() <= timedelta(hours=1), left()
answer = client.generate("m", keep_alive=0)
assert answer.done_reason == "unload" and left() <= timedelta(0), left()
assert client.chat("m", keep_alive=-1).done_reason == "load" and left() > timedelta(hours=1), left()

steps = list(client.pull("m", stream=True))
assert (steps[0].status, steps[-1].status) == ("pulling manifest", "success"), steps
assert client.pull("m").status == "success"
# It goes on until its client leaves.
for number, step in enumerate(client.pull("waiting", stream=True)):
    if number == 1:
        assert step.status == "waiting: copying 3 of 9 GiB", step
        break
check_refusals([
    (lambda: client.pull("nix"), 400, "russet run nix"),
    (lambda: list(client.pull("nix", stream=True)), 400, "russet run nix"),
    (lambda: client.delete("m"), 400, "russet delete"),
    (lambda: client.copy("m", "n"), 400, "ModelRoute"),
    (lambda: client.create("n", from_="m"), 400, "kubectl"),
])
print("passed")
