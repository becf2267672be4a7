"""Checks messages with the real Anthropic SDK over TLS: responses, streams, tools, thoughts, errors and the list of models.

    anthropic_sdk.py BASE_URL

SSL_CERT_FILE names the CA; the keys and the models are those of gateway/tests/gateway/sdk.rs.
Prints `passed` at the end; anything else is a failure.
"""

import sys

from anthropic import (
    Anthropic,
    APIStatusError,
    AuthenticationError,
    BadRequestError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
)

URL = sys.argv[1]
USER = [dict(role="user", content="hi")]
WEATHER = dict(name="weather", input_schema=dict(type="object", properties=dict(city=dict(type="string"))))


def client(key: str, **more) -> Anthropic:
    # No retries: what happens once must be seen.
    return Anthropic(base_url=URL, timeout=60, max_retries=0, **{"api_key": key, **more})


def refused(kind: type, key: str, model: str = "m", **more):
    try:
        client(key).messages.create(**{"model": model, "max_tokens": 9, "messages": USER, **more})
    except kind as error:
        assert error.request_id == error.body["request_id"], error.body
        return error
    raise AssertionError(f"{key} and {model} were not refused with {kind.__name__}")


some = client("s-some")
answer = some.messages.create(model="m", max_tokens=9, messages=USER)
assert [block.text for block in answer.content] == ["Hello there"], answer
assert (answer.stop_reason, answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == ("end_turn", 5, 2)
assert answer._request_id.startswith("req_"), answer._request_id

# A bearer token in place of the key, as ANTHROPIC_AUTH_TOKEN has it.
bearer = client(None, auth_token="s-some")
assert bearer.messages.create(model="m", max_tokens=9, messages=USER).content[0].text == "Hello there"

with some.messages.stream(model="m", max_tokens=9, messages=USER) as stream:
    assert list(stream.text_stream) == ["Hello", " there"]
    assert stream.get_final_message().usage.output_tokens == 3

with some.messages.stream(model="agent", max_tokens=9, messages=USER, tools=[WEATHER]) as stream:
    kinds = [event.type for event in stream]
    answer = stream.get_final_message()
assert {"thinking", "signature", "text", "input_json"} <= set(kinds), kinds
assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"], answer
assert answer.content[0].signature and answer.content[0].thinking == "Look.", answer
assert [block.input for block in answer.content[2:]] == [{"city": "Zürich"}, {}], answer
assert answer.stop_reason == "tool_use", answer
whole = some.messages.create(model="agent", max_tokens=9, messages=USER, tools=[WEATHER])
shown = [block.to_dict() for block in answer.content]
assert [block.to_dict() for block in whole.content] == shown, (whole, answer)
# A response can be sent back as it came.
results = [dict(type="tool_result", tool_use_id=block.id, content="hot") for block in answer.content[2:]]
turn = [dict(role="assistant", content=answer.content), dict(role="user", content=results)]
assert some.messages.create(model="m", max_tokens=9, messages=USER + turn).stop_reason == "end_turn"

assert [model.id for model in some.models.list(limit=1)] == ["m", "agent", "broken"]
assert some.models.retrieve("m").created_at.year == 2023

assert refused(AuthenticationError, "s-wrong").type == "authentication_error"
assert refused(NotFoundError, "s-some", "nix").type == "not_found_error"
assert refused(PermissionDeniedError, "s-one", "agent").type == "permission_error"
image = [dict(role="user", content=[dict(type="image", source=dict(type="url", url="http://x"))])]
assert "messages[0].content[0].type" in str(refused(BadRequestError, "s-some", messages=image))
assert client("s-once").messages.create(model="m", max_tokens=9, messages=USER).stop_reason == "end_turn"
error = refused(RateLimitError, "s-once")
assert 0 < float(error.response.headers["retry-after"]) <= 60, error.response.headers
assert error.response.headers["anthropic-ratelimit-requests-remaining"] == "0", error.response.headers

text = ""
try:
    with some.messages.stream(model="broken", max_tokens=9, messages=USER) as stream:
        for text in stream.text_stream:
            pass
except APIStatusError as error:
    assert (text, error.body["error"]["type"]) == ("Hel", "api_error"), (text, error.body)
else:
    raise AssertionError("an error in the middle of a stream was not raised")

print("passed")
