"""Rounds of tools through Anthropic's SDK and Ollama's client: declare, call, result, answer; whole and streamed."""


def messages(root, family, tools, calls, reasoning, result, answer):
    """Through Anthropic's SDK. `result` is sent back for each call, or nothing where it is None."""
    import anthropic

    client = anthropic.Anthropic(base_url=root, api_key="none", max_retries=0, timeout=300)
    declared = [{"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
                for function in (tool["function"] for tool in tools)]
    # The SDK has no name for the temperature any more.
    request = {"model": family, "max_tokens": 24000, "tools": declared, "extra_body": {"temperature": 0}}

    def whole(messages):
        return client.messages.create(messages=messages, **request)

    def streamed(messages):
        with client.messages.stream(messages=messages, **request) as stream:
            return stream.get_final_message()

    for ask in (whole, streamed):
        history = [{"role": "user", "content": "17 + 25? Note it."}]
        message = ask(history)
        blocks = {kind: [block for block in message.content if block.type == kind] for kind in ("thinking", "text", "tool_use")}
        found = [(block.name, block.input) for block in blocks["tool_use"]]
        assert found == calls, f"{family} {ask.__name__}: calls are {found}, not {calls}; the message is {message}"
        thought = "".join(block.thinking for block in blocks["thinking"])
        assert (thought, message.stop_reason) == (reasoning, "tool_use"), f"{family} {ask.__name__}: {message}"
        assert not blocks["text"], f"{family} {ask.__name__}: text beside the calls: {message}"
        usage = message.usage
        tokens = client.messages.count_tokens(model=family, messages=history, tools=declared).input_tokens
        read = usage.input_tokens + usage.cache_read_input_tokens
        assert tokens == read > 0, f"{family}: {tokens} tokens are counted, {read} were read"
        if result is None:
            continue
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": result} for block in blocks["tool_use"]]
        history += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        message = ask(history)
        text = "".join(block.text for block in message.content if block.type == "text")
        assert (text, message.stop_reason) == (answer, "end_turn"), f"{family} {ask.__name__}: {message}"


def chats(root, family, tools, calls, reasoning, result, answer):
    """Through Ollama's client."""
    import ollama

    client = ollama.Client(host=root, timeout=300)
    request = {"model": family, "tools": tools, "options": {"temperature": 0}}

    def whole(messages):
        return client.chat(messages=messages, **request)

    def streamed(messages):
        parts = list(client.chat(messages=messages, stream=True, **request))
        last = parts[-1]
        assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True], parts
        last.message.content = "".join(part.message.content or "" for part in parts)
        last.message.thinking = "".join(part.message.thinking or "" for part in parts)
        last.message.tool_calls = [call for part in parts for call in part.message.tool_calls or []]
        return last

    for ask in (whole, streamed):
        history = [{"role": "user", "content": "17 + 25? Note it."}]
        reply = ask(history)
        found = [(call.function.name, dict(call.function.arguments)) for call in reply.message.tool_calls or []]
        assert found == calls, f"{family} {ask.__name__}: calls are {found}, not {calls}; the reply is {reply}"
        assert (reply.message.thinking or "", reply.message.content or "") == (reasoning, ""), f"{family}: {reply}"
        assert reply.done_reason == "stop" and reply.prompt_eval_count > 0 and reply.eval_count > 0, f"{family}: {reply}"
        if result is None:
            continue
        results = [{"role": "tool", "tool_name": name, "content": result} for name, _ in found]
        reply = ask([*history, reply.message, *results])
        assert (reply.message.content, reply.done_reason) == (answer, "stop"), f"{family} {ask.__name__}: {reply}"
