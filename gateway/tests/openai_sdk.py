"""Checks a running gateway with the real OpenAI SDK: what a client that knows nothing of Russet sees.

    openai_sdk.py BASE_URL MODEL [PROMPTS.jsonl ...]

MODEL must be the smoke model, whose answers are known; PROMPTS are prompts.jsonl and conversations.jsonl of
engine/smoke when none is given.
Prints one line a check that fails, then `N passed, N failed`; the exit code is 0 only when all passed.
"""

import asyncio
import json
import os
import sys
import traceback
import urllib.error
import urllib.request
from pathlib import Path

from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

QUESTION = "What is 17 + 25?"
ANSWER = "17 + 25 = 42."


def base_url(given: str) -> str:
    given = given.rstrip("/")
    return given if given.endswith("/v1") else given + "/v1"


def user(text: str) -> list[dict]:
    return [dict(role="user", content=text)]


class Checks:
    """One method a check; what it promises is its name and its asserts."""

    def __init__(self, url: str, model: str, prompts: list[dict]):
        self.url, self.model, self.prompts = url, model, prompts
        self.key = os.environ.get("OPENAI_API_KEY", "unused")
        # No retries: a request that fails once must be seen to fail.
        self.client = OpenAI(base_url=url, api_key=self.key, timeout=120, max_retries=0)

    def ask(self, messages=None, **more):
        more = dict(dict(model=self.model, temperature=0), **more)
        return self.client.chat.completions.create(messages=user(QUESTION) if messages is None else messages, **more)

    def streamed(self, messages=None, **more) -> tuple[str, list]:
        """The text put together, and every chunk."""
        chunks = list(self.ask(messages, stream=True, **more))
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks

    def post(self, body: bytes) -> tuple[int, dict]:
        """What the SDK cannot send."""
        request = urllib.request.Request(
            self.url + "/chat/completions", body,
            {"content-type": "application/json", "authorization": f"Bearer {self.key}"})
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    # ------------------------------------------------------------------------------------------------- models

    def check_the_model_is_listed(self):
        models = list(self.client.models.list())
        assert self.model in [m.id for m in models], [m.id for m in models]
        assert all(m.object == "model" and isinstance(m.created, int) and m.owned_by for m in models), models

    # ------------------------------------------------------------------------------------------ whole answers

    def check_an_answer_has_every_field_clients_read(self):
        got = self.ask()
        assert got.object == "chat.completion" and got.id and got.created > 1_600_000_000 and got.model == self.model, got
        assert [c.index for c in got.choices] == [0], got.choices
        assert got.choices[0].message.role == "assistant" and got.choices[0].message.content == ANSWER, got.choices[0]
        assert got.choices[0].finish_reason == "stop", got.choices[0]

    def check_usage_counts_tokens(self):
        usage = self.ask().usage
        assert usage.prompt_tokens > 5 and usage.completion_tokens >= 10, usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage

    def check_content_may_be_a_list_of_text_parts(self):
        got = self.ask([dict(role="user", content=[dict(type="text", text=QUESTION)])])
        assert got.choices[0].message.content == ANSWER, got.choices[0]

    def check_a_system_message_is_accepted(self):
        got = self.ask([dict(role="system", content="Be brief."), *user(QUESTION)])
        assert got.choices[0].message.content == ANSWER, got.choices[0]

    # ------------------------------------------------------------------------------------------------ streams

    def check_a_stream_says_the_same_as_the_whole_answer(self):
        text, chunks = self.streamed()
        assert text == ANSWER, text
        assert all(c.object == "chat.completion.chunk" and c.model == self.model for c in chunks), chunks
        assert len({c.id for c in chunks}) == 1, "one id for a whole stream"
        assert chunks[0].choices[0].delta.role == "assistant", chunks[0]

    def check_a_stream_comes_in_pieces(self):
        _, chunks = self.streamed()
        assert len([c for c in chunks if c.choices and c.choices[0].delta.content]) > 3, chunks

    def check_a_stream_ends_with_one_finish_reason(self):
        _, chunks = self.streamed()
        reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
        assert reasons[-1] == "stop" and not any(reasons[:-1]), reasons

    def check_usage_comes_last_when_it_is_asked_for(self):
        _, chunks = self.streamed(stream_options=dict(include_usage=True))
        assert chunks[-1].choices == [] and chunks[-1].usage, chunks[-1]
        assert all(c.usage is None for c in chunks[:-1]), chunks
        whole = self.ask().usage
        assert chunks[-1].usage.prompt_tokens == whole.prompt_tokens, (chunks[-1].usage, whole)
        assert chunks[-1].usage.completion_tokens == whole.completion_tokens, (chunks[-1].usage, whole)

    def check_no_chunk_is_without_choices_unasked(self):
        # Simple clients read choices[0] of every chunk.
        _, chunks = self.streamed()
        assert all(c.choices for c in chunks), chunks

    def check_a_client_that_leaves_does_not_block_the_next(self):
        for _ in range(4):
            with self.ask(user("How does Russet serve a model?"), stream=True) as stream:
                next(iter(stream))
        assert self.ask().choices[0].message.content == ANSWER

    def check_requests_at_once_do_not_mix(self):
        pairs = [(17, 25), (123, 456), (48, 52), (260, 417), (99, 1), (4, 9)]

        async def all_at_once():
            async with AsyncOpenAI(base_url=self.url, api_key=self.key, timeout=120, max_retries=0) as client:
                return await asyncio.gather(*(
                    client.chat.completions.create(model=self.model, temperature=0, messages=user(f"What is {a} + {b}?"))
                    for a, b in pairs))

        for (a, b), got in zip(pairs, asyncio.run(all_at_once())):
            assert got.choices[0].message.content == f"{a} + {b} = {a + b}.", (a, b, got.choices[0])

    # ------------------------------------------------------------------------------------------- when to stop

    def check_a_stop_string_ends_the_answer_before_itself(self):
        for stop, left in (("=", "17 + 25 "), (["#", " = 4"], "17 + 25"), (["25 = 42"], "17 + ")):
            got = self.ask(stop=stop).choices[0]
            assert (got.message.content, got.finish_reason) == (left, "stop"), (stop, got)

    def check_a_stop_string_over_several_tokens_never_leaks_into_a_stream(self):
        text, chunks = self.streamed(stop=["25 = 42"])
        assert text == "17 + ", text
        assert chunks[-1].choices[0].finish_reason == "stop", chunks[-1]

    def check_a_stop_string_that_never_comes_loses_nothing(self):
        text, _ = self.streamed(stop=["42!", "= 43"])
        assert text == ANSWER, text

    def check_max_tokens_cuts_and_says_so(self):
        for limit in (dict(max_tokens=3), dict(max_completion_tokens=3)):
            got = self.ask(**limit)
            assert got.usage.completion_tokens == 3 and got.choices[0].finish_reason == "length", (limit, got)
            assert ANSWER.startswith(got.choices[0].message.content), got.choices[0]
            text, chunks = self.streamed(**limit)
            assert text == got.choices[0].message.content and chunks[-1].choices[0].finish_reason == "length", chunks

    # --------------------------------------------------------------------------------------------- randomness

    def check_no_temperature_gives_the_same_answer_each_time(self):
        story = user("How does Russet serve a model?")
        assert self.ask(story).choices[0].message.content == self.ask(story).choices[0].message.content

    def check_one_seed_gives_one_answer(self):
        # So hot that two unseeded answers would differ.
        hot = lambda seed: self.ask(user("Hello"), temperature=2, seed=seed, max_tokens=40).choices[0].message.content
        assert hot(7) == hot(7)
        assert len({hot(seed) for seed in range(1, 6)}) > 1, "the seed changes nothing"

    def check_a_narrow_top_p_is_greedy(self):
        got = self.ask(temperature=1, top_p=0.000001, seed=1).choices[0].message.content
        assert got == ANSWER, got

    # ------------------------------------------------------------------------------------------------- errors

    def check_an_unknown_model_is_not_found(self):
        for more in ({}, dict(stream=True)):
            try:
                self.ask(model="no-such-model", **more)
            except NotFoundError as error:
                assert error.status_code == 404 and error.code == "model_not_found", (error.code, error.body)
                assert "no-such-model" in error.body["message"] and error.body["type"], error.body
            else:
                raise AssertionError("an unknown model was answered")

    def check_a_bad_request_names_what_is_wrong(self):
        for more, field in (
            (dict(messages=[]), "messages"), (dict(temperature=9), "temperature"), (dict(temperature=-1), "temperature"),
            (dict(top_p=2), "top_p"), (dict(max_tokens=-1), "max_tokens"),
            (dict(extra_body=dict(messages="hello")), "messages"),
            (dict(messages=[dict(role="wizard", content="hello")]), "role"),
        ):
            try:
                self.ask(**more)
            except BadRequestError as error:
                assert error.body["type"] == "invalid_request_error", error.body
                said = f"{error.body['message']} {error.body.get('param')}"
                assert field in said, f"{more}: {field} is not named in {error.body}"
            else:
                raise AssertionError(f"{more} was answered")

    def check_what_is_no_json_gets_the_same_shape(self):
        status, body = self.post(b"{not json")
        assert status == 400, status
        assert set(body["error"]) >= {"message", "type", "param", "code"}, body

    # ------------------------------------------------------------------------------------------------ answers

    def check_every_prompt_is_answered_right(self):
        wrong = []
        for index, prompt in enumerate(self.prompts):
            # Alternate, so that both ways are held to every kind of answer.
            if index % 2:
                got, _ = self.streamed(prompt["messages"])
            else:
                got = self.ask(prompt["messages"]).choices[0].message.content
            if got != prompt["expect"]:
                wrong.append(f"{prompt['name']}: {got!r}, not {prompt['expect']!r}")
        assert not wrong, "\n".join(wrong)


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    here = Path(__file__).resolve().parents[2] / "engine/smoke"
    files = [Path(name) for name in sys.argv[3:]] or [here / "prompts.jsonl", here / "conversations.jsonl"]
    prompts = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    checks = Checks(base_url(sys.argv[1]), sys.argv[2], prompts)
    passed = failed = 0
    for name in [n for n in dir(Checks) if n.startswith("check_")]:
        try:
            getattr(checks, name)()
            passed += 1
        except Exception:
            failed += 1
            print(f"FAILED {name[6:].replace('_', ' ')}\n{traceback.format_exc(limit=-1)}", flush=True)
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
