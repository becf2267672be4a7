"""Checks keys with the real OpenAI SDK over TLS: what each refusal is to a client that knows nothing of Russet.

    openai_keys.py BASE_URL

SSL_CERT_FILE names the CA; the keys and the models are those of gateway/tests/gateway/sdk.rs.
Prints `passed` at the end; anything else is a failure.
"""

import sys

from openai import AuthenticationError, NotFoundError, OpenAI, PermissionDeniedError, RateLimitError

URL = sys.argv[1]
USER = [dict(role="user", content="hi")]


def client(key: str) -> OpenAI:
    # No retries: what happens once must be seen.
    return OpenAI(base_url=URL, api_key=key, timeout=60, max_retries=0)


def refused(kind: type, key: str, model: str = "m", **more):
    try:
        client(key).chat.completions.create(model=model, messages=USER, **more)
    except kind as error:
        return error
    raise AssertionError(f"{key} and {model} were not refused with {kind.__name__}")


answer = client("s-some").chat.completions.create(model="m", messages=USER)
assert answer.choices[0].message.content == "Hello there", answer
chunks = client("s-some").chat.completions.create(model="m", messages=USER, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
assert text == "Hello there", text
assert [model.id for model in client("s-some").models.list()] == ["m"]

error = refused(AuthenticationError, "s-wrong")
assert (error.status_code, error.code, error.type) == (401, "invalid_api_key", "invalid_request_error"), error.body
assert "s-wrong" not in str(error), error
refused(AuthenticationError, "s-wrong", stream=True)
error = refused(PermissionDeniedError, "s-some", "large")
assert (error.status_code, error.code, error.param) == (403, "model_not_found", "model"), error.body
refused(NotFoundError, "s-all", "nix")

headers = client("s-once").chat.completions.with_raw_response.create(model="m", messages=USER).headers
assert headers["x-ratelimit-limit-requests"] == "1", headers
assert headers["x-ratelimit-remaining-requests"] == "0", headers
error = refused(RateLimitError, "s-once")
assert (error.status_code, error.code, error.type) == (429, "rate_limit_exceeded", "requests"), error.body
assert 0 < int(error.response.headers["retry-after"]) <= 60, error.response.headers
print("passed")
