"""Checks responses that are kept with the real OpenAI SDK: continued, retrieved, listed, run in the background, resumed,
cancelled, compacted and deleted.

    openai_kept_responses.py BASE_URL

The model and what it answers are those of gateway/tests/gateway/sdk.rs.
Prints `passed` at the end; anything else is a failure.
"""

import sys
import time

from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.responses import CompactedResponse, Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

client = OpenAI(base_url=sys.argv[1], api_key="any", timeout=60, max_retries=0)
EVENT = TypeAdapter(ResponseStreamEvent)


def check(model: BaseModel, text: str) -> BaseModel:
    """What the SDK reads is what its types demand; by itself it takes anything."""
    return type(model).model_validate_json(text, strict=True)


def retrieve(id: str) -> Response:
    raw = client.responses.with_raw_response.retrieve(id)
    response = raw.parse()
    assert check(response, raw.text) == response, raw.text
    return response


def polled(id: str, status: str) -> Response:
    end = time.monotonic() + 60
    while (response := retrieve(id)).status != status:
        assert time.monotonic() < end, response
        time.sleep(0.01)
    return response


def valid(events) -> list:
    events = list(events)
    for event in events:
        assert EVENT.validate_json(event.to_json(), strict=True).type == event.type, event
    return events


first = client.responses.create(model="m", input="hi", metadata=dict(a="b"))
assert (first.output_text, first.to_dict()["store"]) == ("Hello there", True), first
assert retrieve(first.id) == first

# The model says how many messages it got.
second = client.responses.create(model="m", input="count", previous_response_id=first.id)
assert (second.output_text, second.previous_response_id) == ("3", first.id), second
with client.responses.stream(model="m", input="count", previous_response_id=second.id) as stream:
    stream.until_done()
    third = stream.get_final_response()
assert third.output_text == "5" and retrieve(third.id).output_text == "5", third

items = client.responses.input_items.list(second.id)
assert [(item.type, item.role, item.content[0].text) for item in items] == [("message", "user", "count")], items
many = client.responses.create(model="m", input=[dict(role="user", content=str(n)) for n in range(5)])
listed = client.responses.input_items.list(many.id, order="asc", limit=2)
assert [item.content[0].text for item in listed] == ["0", "1", "2", "3", "4"], "the SDK turns the pages"

background = client.responses.create(model="m", input="hi", background=True)
assert background.status == "queued", background
assert polled(background.id, "completed").output_text == "Hello there"

whole = valid(client.responses.create(model="m", input="hi", background=True, stream=True))
assert [event.sequence_number for event in whole] == list(range(len(whole))), whole
assert whole[1].type == "response.queued", whole
rest = valid(client.responses.retrieve(whole[0].response.id, stream=True, starting_after=3))
assert rest == whole[4:], rest

hanging = client.responses.create(model="m", input="hang", background=True)
assert client.responses.cancel(hanging.id).status == "cancelled"
assert retrieve(hanging.id).status == "cancelled"

raw = client.responses.with_raw_response.compact(model="m", input=[
    dict(role="user", content="a"), dict(role="assistant", content="b")])
compacted = raw.parse()
assert isinstance(compacted, CompactedResponse) and compacted.object == "response.compaction", compacted
assert [item.type for item in compacted.output] == ["message", "compaction"], compacted
again = client.responses.create(model="m", input=[
    *[item.to_dict() for item in compacted.output], dict(role="user", content="count")])
assert again.output_text == "3", again

client.responses.delete(first.id)
for lost in (lambda: client.responses.retrieve(first.id), lambda: client.responses.delete(first.id)):
    try:
        lost()
        raise AssertionError("a response that was deleted is there")
    except NotFoundError as error:
        assert first.id in error.message, error
try:
    client.responses.create(model="m", input="hi", previous_response_id=second.id)
    raise AssertionError("a conversation without its beginning was continued")
except BadRequestError as error:
    assert (error.code, error.param) == ("previous_response_not_found", "previous_response_id"), error
print("passed")
