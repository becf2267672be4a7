"""Checks the Responses API with the real OpenAI SDK: every object and event is valid by the SDK's own types.

    openai_responses.py BASE_URL

The model and what it answers are those of gateway/tests/gateway/sdk.rs.
Prints `passed` at the end; anything else is a failure.
"""

import sys

from openai import BadRequestError, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

client = OpenAI(base_url=sys.argv[1], api_key="any", timeout=60, max_retries=0)
EVENT = TypeAdapter(ResponseStreamEvent)
TOOLS = [
    dict(type="function", name="add", description="Adds.", strict=False,
         parameters=dict(type="object", properties=dict(z={}, a={}))),
    dict(type="custom", name="patch", description="Edits."),
    dict(type="web_search"),
]


def check(model: BaseModel, text: str) -> BaseModel:
    """What the SDK reads is what its types demand; by itself it takes anything."""
    return type(model).model_validate_json(text, strict=True)


def whole(**more) -> Response:
    raw = client.responses.with_raw_response.create(model="m", **more)
    response = raw.parse()
    assert check(response, raw.text) == response, raw.text
    return response


def streamed(**more) -> list:
    events = list(client.responses.create(model="m", stream=True, **more))
    for number, event in enumerate(events):
        assert EVENT.validate_json(event.to_json(), strict=True).type == event.type, event
        assert event.sequence_number == number, event
    return events


def same(one: Response, other: Response) -> bool:
    def shown(response: Response) -> str:
        times = dict(created_at=0, completed_at=0)
        return response.model_copy(update=times).to_json().replace(response.id.removeprefix("resp_"), "ID")
    return shown(one) == shown(other)


QUESTIONS = [
    dict(input="hi", instructions="Be brief.", metadata=dict(a="b")),
    dict(input="agent", tools=TOOLS, reasoning=dict(effort="low", summary="auto")),
    dict(input="agent", tools=TOOLS, tool_choice=dict(type="function", name="add")),
    dict(input="agent", tools=TOOLS, tool_choice=dict(
        type="allowed_tools", mode="auto", tools=[dict(type="custom", name="patch")])),
    dict(input="long", max_output_tokens=16, truncation="auto", temperature=0.7),
    dict(input="logprobs", include=["message.output_text.logprobs"], top_logprobs=1),
    dict(input="empty", service_tier="flex", user="eve", text=dict(format=dict(
        type="json_schema", name="n", strict=True, schema=dict(type="object")))),
]
for question in QUESTIONS:
    response = whole(**question)
    events = streamed(**question)
    assert same(events[-1].response, response), (events[-1], response)
    assert [event.item.to_dict() for event in events if event.type == "response.output_item.done"] == [
        item.to_dict() for item in events[-1].response.output]

hello = whole(**QUESTIONS[0])
assert (hello.output_text, hello.status, hello.usage.total_tokens) == ("Hello there", "completed", 10), hello
agent = whole(**QUESTIONS[1])
assert [item.type for item in agent.output] == [
    "reasoning", "message", "function_call", "custom_tool_call"], agent
assert agent.output[3].input == "*** x\n", agent
long = whole(**QUESTIONS[4])
assert (long.status, long.incomplete_details.reason) == ("incomplete", "max_output_tokens"), long

# What was answered can be sent back as it came.
again = whole(tools=TOOLS, input=[
    dict(role="user", content="hi"), *[item.to_dict() for item in agent.output],
    dict(type="function_call_output", call_id="c1", output="42"),
    dict(type="custom_tool_call_output", call_id="c2", output="done"),
])
assert again.output_text == "Hello there", again

# The SDK puts a stream together by its own rules.
with client.responses.stream(model="m", input="agent", tools=TOOLS[:1]) as stream:
    kinds = {event.type for event in stream}
    assert "response.function_call_arguments.done" in kinds, kinds
    assert stream.get_final_response().output_text == "So:"

failed = streamed(input="fail")[-1]
assert (failed.type, failed.response.status) == ("response.failed", "failed"), failed
assert failed.response.error.code == "server_error", failed

try:
    client.responses.create(model="m", input="hi", previous_response_id="resp_1")
    raise AssertionError("a response that is not kept was found")
except BadRequestError as error:
    assert error.param == "previous_response_id", error
print("passed")
