"""Rounds of tools through the real clients of three dialects, with models that write what each family writes.

    tools.py make TEMPLATES FOLDER    makes a model of every family, in folders of these names
    tools.py talk BASE_URL FAMILY     declares tools, is called, answers, and reads the answer; whole and streamed

A made model is a llama of one layer whose next token depends on the last one alone: what it has to write is a chain of
tokens of its own. A prompt begins the chain of the call, or, where a result of a tool is in it, that of the answer.
"""
import json
import os
import struct
import sys

import dialects

RESULT = "§42"  # No other text has the last byte of §.
ANSWER = "Die Summe ist 42.\n\"Über\" 日本 🙂"
LONG = " ".join(f"{number * number:x}" for number in range(1, 4200))  # 20 kB
NOTE = {"text": "line 1\n\"q\" é 日本 🙂 \\ </x>", "deep": {"b": [1, {"a": None}], "a": "x"}}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
        "type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}, "required": ["a", "b"]}}},
    {"type": "function", "function": {"name": "note", "description": "Notes.", "parameters": {
        "type": "object", "properties": {"text": {"type": "string"}, "deep": {"type": "object"}}}}},
]
ADD, TEXT, DEEP = '{"a": 17, "b": 25}', NOTE["text"], json.dumps(NOTE["deep"])
BOTH = [("add", {"a": 17, "b": 25}), ("note", NOTE)]


def dumped(value):
    return json.dumps(value, ensure_ascii=False)


def hermes(note=NOTE):
    return (f'<tool_call>\n{{"name": "add", "arguments": {ADD}}}\n</tool_call>\n'
            f'<tool_call>\n{{"name": "note", "arguments": {dumped(note)}}}\n</tool_call>')


def function_xml(begin="<tool_call>\n", end="\n</tool_call>", line="\n"):
    def call(name, *parameters):
        inner = "".join(f"<parameter={key}>{line}{value}{line}</parameter>\n" for key, value in parameters)
        return f"{begin}<function={name}>\n{inner}</function>{end}"
    return call("add", ("a", 17), ("b", 25)) + "\n" + call("note", ("text", TEXT), ("deep", DEEP))


def glm(line="\n"):
    def call(name, *arguments):
        inner = line.join(f"<arg_key>{k}</arg_key>{line}<arg_value>{v}</arg_value>" for k, v in arguments)
        return f"<tool_call>{name}{line}{inner}{line}</tool_call>"
    return call("add", ("a", 17), ("b", 25)) + line + call("note", ("text", TEXT), ("deep", DEEP))


DSML = "｜DSML｜"
# What an answer begins with, where the template opens a block of thinking, or the format has channels.
OPENINGS = {**dict.fromkeys(["qwen3-5", "glm4-lite", "minimax", "nemotron"], "Hm.</think>"),
            "gpt-oss": "<|channel|>final<|message|>"}
# Family: chat template, end token, special tokens, what it writes, its reasoning, its calls.
FAMILIES = {
    "qwen2": ("Qwen-Qwen2.5-7B-Instruct", "<|im_end|>", [], hermes(), "", BOTH),
    "qwen3": ("Qwen-Qwen3-0.6B", "<|im_end|>", [], "<think>\nI add.\n</think>\n\n" + hermes(), "I add.", BOTH),
    "qwen3-long": ("Qwen-Qwen3-0.6B", "<|im_end|>", [], hermes({"text": LONG}), "",
                   [BOTH[0], ("note", {"text": LONG})]),
    "qwen3-coder": ("Qwen3-Coder", "<|im_end|>", [], function_xml(), "", BOTH),
    "qwen3-5": ("Qwen3.5-4B", "<|im_end|>", [], "I add.\n</think>\n\n" + function_xml(), "I add.", BOTH),
    "llama": ("meta-llama-Llama-3.1-8B-Instruct", "<|eot_id|>", ["<|python_tag|>"],
              f'{{"name": "note", "parameters": {dumped(NOTE)}}}', "", BOTH[1:]),
    "mistral": ("mistralai-Mistral-Nemo-Instruct-2407", "</s>", ["[TOOL_CALLS]"],
                f'[TOOL_CALLS][{{"name": "add", "arguments": {ADD}}}, {{"name": "note", "arguments": {dumped(NOTE)}}}]',
                "", BOTH),
    "ministral3": ("mistralai-Ministral-3-14B-Reasoning-2512", "</s>", ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
                   f"[THINK]I add.[/THINK][TOOL_CALLS]add[ARGS]{ADD}[TOOL_CALLS]note[ARGS]{dumped(NOTE)}", "I add.", BOTH),
    "glm4": ("GLM-4.6", "<|user|>", [], "\n<think>I add.</think>\n" + glm(), "I add.", BOTH),
    "glm4-lite": ("GLM-4.7-Flash", "<|user|>", [], "I add.</think>" + glm(""), "I add.", BOTH),
    "deepseek": ("deepseek-ai-DeepSeek-V3.1", "<｜end▁of▁sentence｜>", [],
                 f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{ADD}<｜tool▁call▁end｜><｜tool▁call▁begin｜>note"
                 f"<｜tool▁sep｜>{dumped(NOTE)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", BOTH),
    "deepseek-dsml": ("deepseek-ai-DeepSeek-V3.2", "<｜end▁of▁sentence｜>", [],
                      f'<{DSML}function_calls>\n<{DSML}invoke name="add">\n<{DSML}parameter name="a" string="false">17</{DSML}parameter>\n'
                      f'<{DSML}parameter name="b" string="false">25</{DSML}parameter>\n</{DSML}invoke>\n<{DSML}invoke name="note">\n'
                      f'<{DSML}parameter name="text" string="true">{TEXT}</{DSML}parameter>\n'
                      f'<{DSML}parameter name="deep" string="false">{DEEP}</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}function_calls>',
                      "", BOTH),
    "kimi": ("moonshotai-Kimi-K2", "<|im_end|>",
             ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
              "<|tool_call_argument_begin|>"],
             f"<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{ADD}<|tool_call_end|>"
             f"<|tool_call_begin|>functions.note:1<|tool_call_argument_begin|>{dumped(NOTE)}<|tool_call_end|><|tool_calls_section_end|>",
             "", BOTH),
    "minimax": ("MiniMax-M2", "[e~[", [],
                'I add.\n</think>\n\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">17</parameter>\n'
                '<parameter name="b">25</parameter>\n</invoke>\n<invoke name="note">\n'
                f'<parameter name="text">{TEXT}</parameter>\n<parameter name="deep">{DEEP}</parameter>\n</invoke>\n'
                "</minimax:tool_call>", "I add.", BOTH),
    "gpt-oss": ("openai-gpt-oss-120b", "<|call|>", ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"],
                "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.note "
                f"<|constrain|>json<|message|>{dumped(NOTE)}", "I add.", BOTH[1:]),
    "gemma4": ("google-gemma-4-31B-it", "<turn|>", ["<|tool_call>", "<tool_call|>"],
               "<|tool_call>call:add{a:17,b:25}<tool_call|><|tool_call>call:note"
               f'{{text:<|"|>{TEXT}<|"|>,deep:{{b:[1,{{a:null}}],a:<|"|>x<|"|>}}}}<tool_call|>', "", BOTH),
    "granite": ("ibm-granite-granite-3.3-2B-Instruct", "<|end_of_text|>", ["<|tool_call|>"],
                f'<|tool_call|>[{{"name": "add", "arguments": {ADD}}}, {{"name": "note", "arguments": {dumped(NOTE)}}}]', "", BOTH),
    "seed-oss": ("ByteDance-Seed-OSS", "<seed:eos>", [],
                 "<seed:think>I add.</seed:think>" + function_xml("<seed:tool_call>\n", "\n</seed:tool_call>", ""), "I add.", BOTH),
    "lfm2": ("LFM2-8B-A1B", "<|im_end|>", ["<|tool_call_start|>", "<|tool_call_end|>"],
             f"<|tool_call_start|>[add(a=17, b=25), note(text={TEXT!r}, deep={NOTE['deep']!r})]<|tool_call_end|>", "", BOTH),
    "nemotron": ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "<|im_end|>", [], "I add.\n</think>\n" + function_xml(), "I add.", BOTH),
}

WIDTH = 256
CODES = WIDTH - 3  # The dimensions in which tokens of chains differ.
PROMPT, SEEN, FOUND = WIDTH - 3, WIDTH - 2, WIDTH - 1  # Any other token; a result; a result somewhere before.


def byte_alphabet():
    """Bytes as byte-level tokenizers write them."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printed]
    return {**{byte: chr(byte) for byte in printed}, **{byte: chr(256 + at) for at, byte in enumerate(rest)}}


def pieces(text, special, used):
    """The text in tokens, each of which stands once: special tokens where they are new, else two or more bytes."""
    least = 2 if len(text) < 4000 else 32
    made, rest = [], text
    while rest:
        token = next((token for token in special if rest.startswith(token) and token not in used), None)
        if token:
            used.add(token)
            made.append(token)
            rest = rest[len(token):]
            continue
        until = min([at for token in special if token not in used and (at := rest.find(token)) > 0] or [len(rest)])
        plain, rest = rest[:until].encode(), rest[until:]
        while plain:
            length = next((n for n in range(least, len(plain) + 1) if plain[:n] not in used), len(plain))
            if plain[:length] in used or length < 2:
                # The last bytes are no token of their own: they go to the one before.
                used.discard(made[-1])
                length, plain = len(made[-1]) + len(plain), made.pop() + plain
                assert plain not in used
            used.add(plain[:length])
            made.append(plain[:length])
            plain = plain[length:]
    return made


def make(templates, folder):
    import numpy

    random = numpy.random.default_rng(7)
    alphabet = byte_alphabet()
    for family, (template, end, special, written, _, _) in FAMILIES.items():
        used = set()
        chains = [pieces(written, special, used), pieces(OPENINGS.get(family, "") + ANSWER, special, used)]
        vocabulary = {alphabet[byte]: byte for byte in range(256)}
        ids = {}
        for piece in [piece for chain in chains for piece in chain if isinstance(piece, bytes)]:
            ids[piece] = 256 + len(ids)
            vocabulary["".join(alphabet[byte] for byte in piece)] = ids[piece]
        # Added tokens follow the vocabulary, whatever ids they claim.
        added = {token: 256 + len(ids) + at for at, token in enumerate([end, *special])}
        ids.update(added)
        count = 256 + len(ids)
        embedding = numpy.zeros((count, WIDTH), dtype=numpy.float32)
        head = numpy.zeros((count, WIDTH), dtype=numpy.float32)
        embedding[:, PROMPT] = 16
        embedding["§".encode()[-1], SEEN] = 16
        for chain in chains:
            for piece in chain:
                embedding[ids[piece]] = 0
                embedding[ids[piece], :CODES] = random.choice([-1, 1], CODES)
            for piece, following in zip(chain, [*chain[1:], end]):
                head[ids[following]] += 1e5 * embedding[ids[piece]]
        head[ids[chains[0][0]], PROMPT] += 1
        head[ids[chains[1][0]], PROMPT] += 0.5
        head[ids[chains[1][0]], FOUND] += 1e5
        zeros = numpy.zeros((WIDTH, WIDTH), dtype=numpy.float32)
        value, output, ones = zeros.copy(), zeros.copy(), numpy.ones(WIDTH, dtype=numpy.float32)
        # Queries and keys of zero look at every token alike: what arrives is the mean.
        value[0, SEEN] = 1
        output[FOUND, 0] = 1
        tensors = {
            "model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": ones,
            "model.layers.0.input_layernorm.weight": ones, "model.layers.0.post_attention_layernorm.weight": ones,
            "model.layers.0.self_attn.q_proj.weight": zeros, "model.layers.0.self_attn.k_proj.weight": zeros,
            "model.layers.0.self_attn.v_proj.weight": value, "model.layers.0.self_attn.o_proj.weight": output,
            "model.layers.0.mlp.gate_proj.weight": zeros, "model.layers.0.mlp.up_proj.weight": zeros,
            "model.layers.0.mlp.down_proj.weight": zeros,
        }
        path = os.path.join(folder, family)
        os.makedirs(path, exist_ok=True)
        write_safetensors(os.path.join(path, "model.safetensors"), tensors)
        files = {
            "config.json": {
                "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "num_hidden_layers": 1,
                "intermediate_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
                "rms_norm_eps": 1e-6, "vocab_size": count, "max_position_embeddings": 65536, "rope_theta": 1e6,
                "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "float32", "eos_token_id": added[end],
            },
            "tokenizer.json": {
                "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
                "added_tokens": [{"id": id, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                                  "normalized": False, "special": True} for token, id in added.items()],
                "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
                "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
                "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                          "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                          "vocab": vocabulary, "merges": []},
            },
            "tokenizer_config.json": {"eos_token": end, "bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"},
        }
        for name, fields in files.items():
            with open(os.path.join(path, name), "w", encoding="utf-8") as file:
                json.dump(fields, file, ensure_ascii=False)
        with open(os.path.join(templates, f"{template}.jinja"), encoding="utf-8") as file:
            source = file.read()
        with open(os.path.join(path, "chat_template.jinja"), "w", encoding="utf-8") as file:
            file.write(source)
        print(family)


def write_safetensors(path, tensors):
    header, at = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def streamed(client, **request):
    """The message of a streamed answer, put together as clients do."""
    message, calls, reason, text, reasoning = {"role": "assistant"}, {}, None, "", ""
    for chunk in client.chat.completions.create(stream=True, **request):
        for choice in chunk.choices:
            delta = choice.delta
            text += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", None) or ""
            for part in delta.tool_calls or []:
                call = calls.setdefault(part.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
                call["id"] += part.id or ""
                call["function"]["name"] += part.function.name or ""
                call["function"]["arguments"] += part.function.arguments or ""
            reason = choice.finish_reason or reason
    message["content"] = text or None
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message, reason


def whole(client, **request):
    choice = client.chat.completions.create(**request).choices[0]
    return choice.message.model_dump(exclude_none=True), choice.finish_reason


def strict(request):
    """The same, with schemas that have to be met, in the order of keys in which the models write."""
    def strict_tool(function):
        parameters = function["parameters"]
        properties = dict(sorted(parameters["properties"].items(), key=lambda item: "a b text deep".split().index(item[0])))
        return {"type": "function", "function": {**function, "strict": True, "parameters": {**parameters, "properties": properties}}}
    return {**request, "max_tokens": 2000, "tools": [strict_tool(tool["function"]) for tool in request["tools"]]}


def talk(base_url, family):
    import time

    import openai

    began = time.monotonic()
    _, _, _, _, reasoning, calls = FAMILIES[family]
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=300)
    for ask in (whole, streamed):
        request = {"model": family, "tools": TOOLS, "temperature": 0}
        messages = [{"role": "user", "content": "17 + 25? Note it."}]
        message, reason = ask(client, messages=messages, **request)
        found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", [])]
        assert found == calls, f"{family} {ask.__name__}: calls are {found}, not {calls}; the message is {message}"
        assert reason == "tool_calls", f"{family} {ask.__name__}: finish_reason is {reason}"
        assert not message.get("content"), f"{family} {ask.__name__}: text beside the calls: {message['content']!r}"
        thought = message.get("reasoning_content", "")
        assert thought == reasoning, f"{family} {ask.__name__}: reasoning is {thought!r}, not {reasoning!r}"
        ids = [call["id"] for call in message["tool_calls"]]
        assert all(ids) and len(set(ids)) == len(ids), f"{family}: ids are {ids}"
        if LONG in str(found):
            continue  # As a prompt it would be 20,000 tokens of a byte each.
        # The message goes back as it came.
        messages += [message, *({"role": "tool", "tool_call_id": id, "content": RESULT} for id in ids)]
        message, reason = ask(client, messages=messages, **request)
        assert (message.get("content"), reason) == (ANSWER, "stop"), f"{family} {ask.__name__}: {message} {reason}"
        assert not message.get("tool_calls"), f"{family} {ask.__name__}: {message}"
    root, result = base_url.removesuffix("/v1"), None if family == "qwen3-long" else RESULT
    for round in (dialects.messages, dialects.chats):
        round(root, family, TOOLS, calls, reasoning, result, ANSWER)
    if family == "qwen3-long":
        return print(f"{family}: arguments of {len(LONG)} bytes, whole and streamed")
    one, reason = whole(client, messages=messages[:1], parallel_tool_calls=False, **request)
    assert len(one["tool_calls"]) == 1 and reason == "tool_calls", f"{family}: {one} {reason}"
    if family != "gpt-oss":  # Each of its messages has the same special tokens, which it spells after the first.
        # A grammar lets the model write what it writes by itself, and nothing else. A made model has a special token once,
        # and spells it the second time, which a grammar does not allow: there it makes one call.
        once = bool(FAMILIES[family][2])
        for choice in ("auto", "required", {"type": "function", "function": {"name": calls[-1][0]}}):
            named = [call for call in calls if choice in ("auto", "required") or call[0] == calls[-1][0]]
            named = named[:1] if once else named
            if calls[0] not in named:
                continue  # What it has to write begins with the other call.
            asked = {**strict(request), "parallel_tool_calls": not once}
            message, reason = whole(client, messages=messages[:1], tool_choice=choice, **asked)
            found = [(call["function"]["name"], json.loads(call["function"]["arguments"]))
                     for call in message.get("tool_calls", [])]
            assert (found, reason) == (named, "tool_calls"), f"{family} {choice}: {found}, {reason}, {message}"
    # Without tools nothing is a call.
    plain, reason = whole(client, messages=messages[:1], model=family, temperature=0)
    assert "tool_calls" not in plain and plain.get("content") and reason == "stop", f"{family}: {plain} {reason}"
    print(f"{family}: {len(calls)} calls, whole and streamed, {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    {"make": make, "talk": talk}[sys.argv[1]](*sys.argv[2:])
