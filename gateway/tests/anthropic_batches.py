"""Checks batches of messages with the real Anthropic SDK: created, retrieved, listed, cancelled, read and deleted.

    anthropic_batches.py BASE_URL

The model and what it answers are those of gateway/tests/gateway/sdk.rs.
Prints `passed` at the end; anything else is a failure.
"""

import sys
import time

from anthropic import Anthropic, BadRequestError, NotFoundError
from anthropic.types.messages import MessageBatch

client = Anthropic(base_url=sys.argv[1], api_key="any", timeout=60, max_retries=0)
batches = client.messages.batches


def request(id: str, content: str, **more) -> dict:
    params = dict(model="m", max_tokens=9, messages=[dict(role="user", content=content)], **more)
    return dict(custom_id=id, params=params)


def ended(id: str) -> MessageBatch:
    end = time.monotonic() + 60
    while True:
        raw = batches.with_raw_response.retrieve(id)
        batch = raw.parse()
        text = raw.text if isinstance(raw.text, str) else raw.text()
        # Times are texts there.
        assert MessageBatch.model_validate_json(text) == batch, text
        if batch.processing_status == "ended":
            return batch
        assert time.monotonic() < end, batch
        time.sleep(0.01)


made = batches.create(requests=[request("a", "hi"), request("b", "hi", temperature=9), request("c", "hi")])
assert made.processing_status == "in_progress" and made.request_counts.processing == 3, made
assert (made.expires_at - made.created_at).total_seconds() == 86_400, made
batch = ended(made.id)
counts = batch.request_counts
assert (counts.succeeded, counts.errored, counts.canceled, counts.expired) == (2, 1, 0, 0), counts
results = {result.custom_id: result.result for result in batches.results(made.id)}
assert results["a"].message.content[0].text == results["c"].message.content[0].text == "Hello there", results
assert results["b"].error.error.type == "invalid_request_error", results

hanging = batches.create(requests=[request("a", "hang")])
assert batches.cancel(hanging.id).cancel_initiated_at is not None
assert ended(hanging.id).request_counts.canceled == 1
assert [result.result.type for result in batches.results(hanging.id)] == ["canceled"]

assert [one.id for one in batches.list(limit=1)] == [hanging.id, made.id], "the SDK turns the pages"
assert [one.id for one in batches.list(before_id=made.id)] == [hanging.id]
assert batches.delete(made.id).type == "message_batch_deleted"
try:
    batches.retrieve(made.id)
    raise AssertionError("a batch that was deleted is there")
except NotFoundError as error:
    assert made.id in error.message, error
try:
    batches.create(requests=[request("a", "hi"), request("a", "hi")])
    raise AssertionError("two requests with one id were taken")
except BadRequestError as error:
    assert "requests.1.custom_id" in error.message, error
print("passed")
