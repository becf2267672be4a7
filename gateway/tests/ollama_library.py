"""Checks Ollama's own Python client: models that it pulls, copies and deletes with a key that may, and one that may not.

    ollama_library.py URL

The keys are those of gateway/tests/gateway/ollama_library.rs. Prints `passed` at the end; anything else is a failure.
"""

import sys

from ollama import Client
from ollama_refusals import check_refusals


def client(key: str) -> Client:
    return Client(host=sys.argv[1], headers={"Authorization": f"Bearer {key}"}, timeout=60)


may = client("may")
assert may.list().models == []
steps = [step.status for step in may.pull("qwen3:4b", stream=True)]
assert (steps[0], steps[-1]) == ("pulling manifest", "success"), steps
assert may.pull("qwen3:4b").status == "success"
names = {model.model for model in may.list().models}
assert names == {"qwen3:4b", "qwen3-4b-4bit"}, names
answer = may.chat("qwen3:4b", [{"role": "user", "content": "hi"}])
assert answer.message.content == "Hello there", answer

assert may.copy("qwen3:4b", "fast").status == "success"
assert may.chat("fast", [{"role": "user", "content": "hi"}]).message.content == "Hello there"
assert may.delete("fast").status == "success"

other = client("may-not")
check_refusals([
    (lambda: other.pull("hf.co/o/n"), 403, "modelManagement"),
    (lambda: list(other.pull("hf.co/o/n", stream=True)), 403, "modelManagement"),
    (lambda: other.delete("qwen3:4b"), 403, "modelManagement"),
    (lambda: other.copy("qwen3:4b", "mine"), 403, "modelManagement"),
    (lambda: may.pull("nix"), 400, "hf.co/OWNER/NAME"),
    (lambda: may.delete("fast"), 404, "model 'fast' not found"),
    (lambda: may.copy("nix", "mine"), 404, "model 'nix' not found"),
    (lambda: may.create("mine", from_="qwen3:4b"), 400, "Modelfiles"),
])
assert may.delete("qwen3:4b").status == "success"
assert may.list().models == []
print("passed")
