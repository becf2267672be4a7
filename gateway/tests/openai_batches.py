"""Checks files and batches with the real OpenAI SDK: uploaded, created, retrieved, listed, cancelled, read and deleted.

    openai_batches.py BASE_URL

The model and what it answers are those of gateway/tests/gateway/sdk.rs.
Prints `passed` at the end; anything else is a failure.
"""

import json
import sys
import time

from openai import BadRequestError, NotFoundError, OpenAI
from openai.types import Batch, FileObject
from pydantic import BaseModel

client = OpenAI(base_url=sys.argv[1], api_key="any", timeout=60, max_retries=0)


def check(model: BaseModel, text: str) -> BaseModel:
    """What the SDK reads is what its types demand; by itself it takes anything."""
    return type(model).model_validate_json(text, strict=True)


def line(id: str, content: str, **more) -> str:
    body = dict(model="m", messages=[dict(role="user", content=content)], **more)
    return json.dumps(dict(custom_id=id, method="POST", url="/v1/chat/completions", body=body))


def upload(*lines: str) -> FileObject:
    return client.files.create(file=("requests.jsonl", "\n".join(lines).encode()), purpose="batch")


def ended(id: str) -> Batch:
    end = time.monotonic() + 60
    while True:
        raw = client.batches.with_raw_response.retrieve(id)
        batch = raw.parse()
        assert check(batch, raw.text) == batch, raw.text
        if batch.status in ("completed", "failed", "cancelled", "expired"):
            return batch
        assert time.monotonic() < end, batch
        time.sleep(0.01)


file = upload(line("a", "hi"), line("b", "hi", n=99999), line("c", "hi"))
assert (file.filename, file.purpose, file.status) == ("requests.jsonl", "batch", "processed"), file
raw = client.files.with_raw_response.retrieve(file.id)
assert check(raw.parse(), raw.text) == file, raw.text
short = client.files.create(file=b"{}", purpose="batch", expires_after=dict(anchor="created_at", seconds=3600))
assert short.expires_at - short.created_at == 3600, short
assert client.files.content(short.id).read() == b"{}"
assert [one.id for one in client.files.list(purpose="batch", order="asc", limit=1)] == [file.id, short.id]

made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h",
    metadata=dict(a="b"), output_expires_after=dict(anchor="created_at", seconds=7200))
assert (made.status, made.metadata) == ("validating", dict(a="b")), made
batch = ended(made.id)
counts = batch.request_counts
assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 3, 2, 1), batch
output = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
assert [line["custom_id"] for line in output] == ["a", "c"], output
assert output[0]["response"]["body"]["choices"][0]["message"]["content"] == "Hello there", output
errors = [json.loads(line) for line in client.files.content(batch.error_file_id).iter_lines()]
assert [(line["custom_id"], line["response"]["status_code"]) for line in errors] == [("b", 400)], errors
kept = client.files.retrieve(batch.output_file_id)
assert (kept.purpose, kept.expires_at - kept.created_at) == ("batch_output", 7200), kept

hanging = client.batches.create(input_file_id=upload(line("a", "hang")).id, endpoint="/v1/chat/completions",
    completion_window="24h")
assert client.batches.cancel(hanging.id).status in ("cancelling", "cancelled")
assert ended(hanging.id).status == "cancelled"

bad = client.batches.create(input_file_id=short.id, endpoint="/v1/embeddings", completion_window="24h")
bad = ended(bad.id)
assert (bad.status, bad.errors.data[0].line) == ("failed", 1), bad
assert [one.id for one in client.batches.list(limit=1)] == [bad.id, hanging.id, made.id], "the SDK turns the pages"

assert client.files.delete(file.id).deleted
for lost in (lambda: client.files.retrieve(file.id), lambda: client.files.content(file.id),
             lambda: client.batches.retrieve("batch_nix")):
    try:
        lost()
        raise AssertionError("what was deleted is there")
    except NotFoundError as error:
        assert error.code in ("file_not_found", "batch_not_found"), error
try:
    client.files.create(file=b"x", purpose="fine-tune")
    raise AssertionError("a file of another purpose was taken")
except BadRequestError as error:
    assert error.param == "purpose" and "fine-tune" in error.message, error
print("passed")
