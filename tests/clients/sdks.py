"""Clients of Python, and requests of programs that cannot run here, against a scripted model.

    sdks.py CLIENT URL MODEL

Prints JSON: the client's version, and the checks that passed and failed. The model calls `add` with 17 and 25, answers when
the result has 42, and greets where there are no tools.
"""
import concurrent.futures
import importlib.metadata
import json
import sys
import time
import traceback

HELLO, ANSWER, RESULT = "Hello, client: 日本 🙂.", "The sum is 42.", "42"
ARGUMENTS = {"a": 17, "b": 25}
QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
RESPONSES_TOOLS = [{"type": "function", **FUNCTION}]
CASES = {}


def case(client, package=None):
    """Registers a check of a client, whose version is that of a package."""
    def register(function):
        CASES.setdefault(client, (package, []))[1].append(function)
        return function
    return register


def same(found, expected):
    assert found == expected, f"{found!r}, not {expected!r}"


def until(is_so):
    """Waits for what the gateway does by itself, a minute at most."""
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end, "it does not end"
        time.sleep(0.05)


# The OpenAI SDK

def openai_client():
    import openai
    return openai.OpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0, timeout=120)


@case("openai-python", "openai")
def models():
    assert MODEL in [model.id for model in openai_client().models.list()]
    same(openai_client().models.retrieve(MODEL).id, MODEL)


@case("openai-python")
def chat():
    answer = openai_client().chat.completions.create(model=MODEL, messages=QUESTION)
    same((answer.choices[0].message.content, answer.choices[0].finish_reason), (HELLO, "stop"))


@case("openai-python")
def chat_stream():
    chunks = list(openai_client().chat.completions.create(
        model=MODEL, messages=QUESTION, stream=True, stream_options={"include_usage": True}))
    same("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), HELLO)
    assert chunks[-1].usage.completion_tokens > 0


@case("openai-python")
def chat_tools():
    client = openai_client()
    asked = {"model": MODEL, "tools": CHAT_TOOLS}
    message = client.chat.completions.create(messages=QUESTION, **asked).choices[0].message
    same(json.loads(message.tool_calls[0].function.arguments), ARGUMENTS)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT}
    same(client.chat.completions.create(messages=[*QUESTION, message, result], **asked).choices[0].message.content, ANSWER)


@case("openai-python")
def chat_tools_stream():
    with openai_client().chat.completions.stream(model=MODEL, messages=QUESTION, tools=CHAT_TOOLS) as stream:
        message = stream.get_final_completion().choices[0].message
    same(json.loads(message.tool_calls[0].function.arguments), ARGUMENTS)


@case("openai-python")
def responses():
    response = openai_client().responses.create(model=MODEL, input="Hi", instructions="Be brief.")
    same((response.output_text, response.status), (HELLO, "completed"))


@case("openai-python")
def responses_stream():
    with openai_client().responses.stream(model=MODEL, input="Hi") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        same(text, HELLO)
        same(stream.get_final_response().output_text, HELLO)


@case("openai-python")
def responses_tools():
    client = openai_client()
    first = client.responses.create(model=MODEL, input=QUESTION, tools=RESPONSES_TOOLS)
    call = next(item for item in first.output if item.type == "function_call")
    same(json.loads(call.arguments), ARGUMENTS)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    second = client.responses.create(model=MODEL, input=[*QUESTION, *first.output, result], tools=RESPONSES_TOOLS)
    same(second.output_text, ANSWER)
    kept = client.responses.create(model=MODEL, input=[result], tools=RESPONSES_TOOLS, previous_response_id=first.id)
    same(kept.output_text, ANSWER)


# Open Responses: what its compliance test sends, as plain HTTP.

def post(path, body, **headers):
    import httpx
    return httpx.post(URL + path, json=body, headers=headers, timeout=120, trust_env=False)


def respond(**body):
    response = post("/v1/responses", {"model": MODEL, **body})
    same(response.status_code, 200)
    return response.json()


def events(**body):
    """Events of a stream, each with its name, numbered without a gap."""
    response = post("/v1/responses", {"model": MODEL, "stream": True, **body})
    assert response.headers["content-type"].startswith("text/event-stream"), response.headers
    found = []
    for block in response.text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            event = json.loads(fields["data"])
            same(fields["event"], event["type"])
            found.append(event)
    same([event["sequence_number"] for event in found], list(range(len(found))))
    same((found[0]["type"], found[-1]["type"]), ("response.created", "response.completed"))
    return found


def text_of(response):
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def message(role, text):
    return {"type": "message", "role": role, "content": text}


@case("open-responses")
def basic_text_response():
    response = respond(input=[message("user", "Say hello in exactly 3 words.")])
    same((response["object"], response["status"], text_of(response)), ("response", "completed", HELLO))
    assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + response["usage"]["output_tokens"]


@case("open-responses")
def streaming_response():
    found = events(input=[message("user", "Count from 1 to 5.")])
    same("".join(event["delta"] for event in found if event["type"] == "response.output_text.delta"), HELLO)
    same(text_of(found[-1]["response"]), HELLO)


@case("open-responses")
def system_prompt():
    same(text_of(respond(input=[message("system", "You are a pirate."), message("user", "Say hello.")])), HELLO)


@case("open-responses")
def tool_calling():
    calls = [item for item in respond(input=QUESTION, tools=RESPONSES_TOOLS)["output"] if item["type"] == "function_call"]
    same([(call["name"], json.loads(call["arguments"]), call["status"]) for call in calls], [("add", ARGUMENTS, "completed")])


@case("open-responses")
def streamed_tool_calling():
    found = events(input=QUESTION, tools=RESPONSES_TOOLS)
    done = next(event for event in found if event["type"] == "response.function_call_arguments.done")
    same(json.loads(done["arguments"]), ARGUMENTS)
    deltas = "".join(e["delta"] for e in found if e["type"] == "response.function_call_arguments.delta")
    same(json.loads(deltas), ARGUMENTS)


@case("open-responses")
def multi_turn():
    turns = [message("user", "My name is Alice."), message("assistant", "Hello Alice!"), message("user", "What is my name?")]
    same(text_of(respond(input=turns)), HELLO)


@case("openai-python")
def batch_of_a_file():
    client = openai_client()
    body = {"model": MODEL, "messages": QUESTION}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = client.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    until(lambda: client.batches.retrieve(made.id).status == "completed")
    answer = json.loads(client.files.content(client.batches.retrieve(made.id).output_file_id).text)
    same(answer["response"]["body"]["choices"][0]["message"]["content"], HELLO)


# Anthropic's SDK

ANTHROPIC_TOOLS = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]


def anthropic_client():
    import anthropic
    return anthropic.Anthropic(base_url=URL, api_key="any", max_retries=0, timeout=120)


@case("anthropic-python", "anthropic")
def messages():
    answer = anthropic_client().messages.create(model=MODEL, max_tokens=100, messages=QUESTION)
    same((answer.content[0].text, answer.stop_reason), (HELLO, "end_turn"))


@case("anthropic-python")
def messages_stream():
    with anthropic_client().messages.stream(model=MODEL, max_tokens=100, messages=QUESTION) as stream:
        same("".join(stream.text_stream), HELLO)
        same(stream.get_final_message().stop_reason, "end_turn")


def anthropic_tools_by(ask):
    asked = {"model": MODEL, "max_tokens": 200, "tools": ANTHROPIC_TOOLS}
    first = ask(messages=QUESTION, **asked)
    call = next(block for block in first.content if block.type == "tool_use")
    same((call.input, first.stop_reason), (ARGUMENTS, "tool_use"))
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT}]}
    second = ask(messages=[*QUESTION, {"role": "assistant", "content": first.content}, result], **asked)
    same(second.content[0].text, ANSWER)


@case("anthropic-python")
def tools():
    anthropic_tools_by(anthropic_client().messages.create)


@case("anthropic-python")
def tools_stream():
    def ask(**request):
        with anthropic_client().messages.stream(**request) as stream:
            return stream.get_final_message()
    anthropic_tools_by(ask)


@case("anthropic-python")
def count_tokens():
    counted = anthropic_client().messages.count_tokens(model=MODEL, messages=QUESTION, tools=ANTHROPIC_TOOLS).input_tokens
    usage = anthropic_client().messages.create(
        model=MODEL, max_tokens=100, messages=QUESTION, tools=ANTHROPIC_TOOLS).usage
    same(counted, usage.input_tokens + (usage.cache_read_input_tokens or 0))


@case("anthropic-python")
def batches():
    client = anthropic_client().messages.batches
    asked = {"model": MODEL, "max_tokens": 100, "messages": QUESTION}
    made = client.create(requests=[{"custom_id": name, "params": asked} for name in ("a", "b")])
    until(lambda: client.retrieve(made.id).processing_status == "ended")
    results = {one.custom_id: one.result.message.content[0].text for one in client.results(made.id)}
    same(results, {"a": HELLO, "b": HELLO})
    same(client.delete(made.id).type, "message_batch_deleted")


# Ollama's client

def ollama_client():
    import ollama
    return ollama.Client(host=URL, timeout=120)


@case("ollama-python", "ollama")
def lists():
    client = ollama_client()
    for models in (client.list().models, client.ps().models):
        assert MODEL in [model.model.removesuffix(":latest") for model in models], models
    assert "tools" in client.show(MODEL).capabilities


@case("ollama-python")
def ollama_chat():
    same(ollama_client().chat(MODEL, QUESTION).message.content, HELLO)
    parts = list(ollama_client().chat(MODEL, QUESTION, stream=True))
    same(("".join(part.message.content for part in parts), parts[-1].done_reason), (HELLO, "stop"))


@case("ollama-python")
def ollama_tools():
    client = ollama_client()
    message = client.chat(MODEL, QUESTION, tools=CHAT_TOOLS).message
    same(dict(message.tool_calls[0].function.arguments), ARGUMENTS)
    result = {"role": "tool", "tool_name": "add", "content": RESULT}
    same(client.chat(MODEL, [*QUESTION, message, result], tools=CHAT_TOOLS).message.content, ANSWER)


@case("ollama-python")
def generate():
    same(ollama_client().generate(MODEL, "Hi").response, HELLO)


# Cases of Ollama's own integration tests, as plain HTTP.

def ollama_chat_lines(**body):
    response = post("/api/chat", {"model": MODEL, "messages": QUESTION, **body})
    same(response.status_code, 200)
    return [json.loads(line) for line in response.text.splitlines()]


@case("ollama-integration")
def blue_sky():
    lines = ollama_chat_lines(options={"temperature": 0, "seed": 123})
    same("".join(line["message"]["content"] for line in lines), HELLO)
    last = lines[-1]
    assert last["done"] and last["eval_count"] > 0 and last["prompt_eval_count"] > 0 and last["total_duration"] > 0, last


@case("ollama-integration")
def unicode_output():
    lines = ollama_chat_lines(stream=True)
    assert len(lines) > 3 and not any("\ufffd" in line["message"]["content"] for line in lines), lines


@case("ollama-integration")
def concurrent_chat():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for lines in pool.map(lambda _: ollama_chat_lines(), range(8)):
            same("".join(line["message"]["content"] for line in lines), HELLO)


@case("ollama-integration")
def num_predict_and_stop():
    same(ollama_chat_lines(options={"num_predict": 2})[-1]["done_reason"], "length")
    lines = ollama_chat_lines(options={"stop": ["client"]})
    same("".join(line["message"]["content"] for line in lines), "Hello, ")


@case("ollama-integration")
def missing_model():
    response = post("/api/chat", {"model": "no-such-model", "messages": QUESTION})
    assert response.status_code == 404 and response.json()["error"], response.text


@case("ollama-integration")
def empty_messages_load_the_model():
    response = post("/api/chat", {"model": MODEL, "messages": [], "stream": False})
    same((response.status_code, response.json()["done_reason"]), (200, "load"))


# LangChain

def langchain_by(model):
    same(model.invoke("Hi").text, HELLO)
    same("".join(chunk.text for chunk in model.stream("Hi")), HELLO)
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    bound = model.bind_tools([add])
    question = HumanMessage("What is 17 + 25?")
    first = bound.invoke([question])
    same(first.tool_calls[0]["args"], ARGUMENTS)
    result = ToolMessage(str(add.invoke(first.tool_calls[0]["args"])), tool_call_id=first.tool_calls[0]["id"], name="add")
    same(bound.invoke([question, first, result]).text, ANSWER)
    chunks = list(bound.stream([question]))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    same(whole.tool_calls[0]["args"], ARGUMENTS)


@case("langchain-openai", "langchain-openai")
def chat_openai():
    from langchain_openai import ChatOpenAI
    langchain_by(ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="any", max_retries=0))


@case("langchain-openai")
def chat_openai_by_responses():
    from langchain_openai import ChatOpenAI
    langchain_by(ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="any", max_retries=0, use_responses_api=True))


@case("langchain-anthropic", "langchain-anthropic")
def chat_anthropic():
    from langchain_anthropic import ChatAnthropic
    langchain_by(ChatAnthropic(model=MODEL, base_url=URL, api_key="any", max_retries=0, max_tokens=200))


@case("langchain-ollama", "langchain-ollama")
def chat_ollama():
    from langchain_ollama import ChatOllama
    langchain_by(ChatOllama(model=MODEL, base_url=URL))


# LiteLLM

def litellm_by(provider, base):
    import litellm
    asked = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "any", "num_retries": 0, "max_tokens": 200}
    same(litellm.completion(messages=QUESTION, **asked).choices[0].message.content, HELLO)
    chunks = litellm.completion(messages=QUESTION, stream=True, **asked)
    same("".join(chunk.choices[0].delta.content or "" for chunk in chunks), HELLO)
    message = litellm.completion(messages=QUESTION, tools=CHAT_TOOLS, **asked).choices[0].message
    same(json.loads(message.tool_calls[0].function.arguments), ARGUMENTS)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "name": "add", "content": RESULT}
    answered = litellm.completion(messages=[*QUESTION, message.model_dump(), result], tools=CHAT_TOOLS, **asked)
    same(answered.choices[0].message.content, ANSWER)


@case("litellm", "litellm")
def as_openai():
    litellm_by("openai", f"{URL}/v1")


@case("litellm")
def as_anthropic():
    litellm_by("anthropic", URL)


@case("litellm")
def as_ollama():
    litellm_by("ollama_chat", URL)


# Requests of programs that have no command line, as they were recorded or are in their sources.

@case("open-webui")
def open_webui():
    import httpx
    for path in ("/v1/models", "/api/version", "/api/tags", "/api/ps"):
        same(httpx.get(URL + path, timeout=60, trust_env=False).status_code, 200)
    body = {"stream": True, "model": MODEL, "messages": QUESTION, "stream_options": {"include_usage": True}}
    response = post("/v1/chat/completions", body, **{"X-OpenWebUI-User-Name": "A", "X-OpenWebUI-Chat-Id": "1"})
    assert response.text.rstrip().endswith("data: [DONE]"), response.text
    title = post("/v1/chat/completions", {"model": MODEL, "messages": QUESTION, "stream": False, "max_completion_tokens": 1000})
    same(title.json()["choices"][0]["message"]["content"], HELLO)
    lines = ollama_chat_lines(options={"num_ctx": 4096}, keep_alive="5m")
    assert lines[-1]["done"], lines


@case("home-assistant")
def home_assistant():
    import httpx
    assert MODEL in httpx.get(URL + "/api/tags", timeout=60, trust_env=False).text
    asked = {"tools": CHAT_TOOLS, "stream": True, "options": {"num_ctx": 8192}, "keep_alive": "-1s", "think": False}
    turns = [{"role": "system", "content": "You are a voice assistant for Home Assistant."}, *QUESTION]
    lines = ollama_chat_lines(**{**asked, "messages": turns})
    calls = [call for line in lines for call in line["message"].get("tool_calls") or []]
    same(calls[0]["function"]["arguments"], ARGUMENTS)
    spoken = {"role": "assistant", "content": "", "tool_calls": calls}
    lines = ollama_chat_lines(**{**asked, "messages": [*turns, spoken, {"role": "tool", "content": json.dumps({"sum": 42})}]})
    same("".join(line["message"]["content"] for line in lines), ANSWER)


def main(client):
    package, cases = CASES[client]
    report = {"version": importlib.metadata.version(package) if package else "replayed", "passed": [], "failed": []}
    for function in cases:
        try:
            function()
            report["passed"].append(function.__name__)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)
            line = next((frame.lineno for frame in reversed(where) if frame.filename == __file__), 0)
            report["failed"].append(f"{function.__name__}: line {line}: {type(error).__name__}: {str(error)[:1500]}")
    print(json.dumps(report))


if __name__ == "__main__":
    URL, MODEL = sys.argv[2:4]
    main(sys.argv[1])
