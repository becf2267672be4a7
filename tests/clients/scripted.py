"""Makes a model that plays the part of an agent's model: it answers what a script says, by where the conversation stands.

    scripted.py VOCABULARY SCRIPT FOLDER

SCRIPT is JSON: `steps`, each an `answer` and a text that the last result of a tool has to have (`seen`); and `aside`, the
answer to requests without tools (titles and summaries). Of a client `without_tools` the messages have the text. With a
`question` the steps are for conversations whose user says `question.unless`, and all others get `question.answer`. The model
is a llama of one layer whose next token depends on the last one alone. The chat template counts the results of tools and
ends the prompt with the mark of a step, with which a chain of tokens begins: its answer. The tokens of prompts are GPT-2's,
from VOCABULARY (GGUF).
"""
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "e2e"))
import tools  # noqa: E402

WIDTH = 128
HEAD = 64
# The agent forecasts how long a batch takes, and expects a token to cost more in the weights than in attention.
INTERMEDIATE = 2048
CONTEXT = 131072
END, START = "<|im_end|>", "<|im_start|>"

# It shows all of the conversation, and the format of calls, by which the engine finds their parser.
TEMPLATE = """
{%- set at = namespace(step=0, result='', has_task=not UNLESS) -%}
{%- if tools -%}
{{- '<|im_start|>system\\nCall one of these: ' + (tools | tojson) + '\\nas <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- if message.role == 'tool' -%}
{%- set at.step = at.step + 1 -%}
{%- set at.result = message.content or '' -%}
{%- elif message.role == 'user' and UNLESS in (message.content or '') -%}
{%- set at.has_task = true -%}
{%- endif -%}
{%- if message.role != 'tool' and ALONE -%}
{%- set at.result = at.result + (message.content or '') -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- set step = [at.step, LAST] | min -%}
{%- if not tools and not ALONE -%}
{{- '<|aside|>' -}}
{%- elif not at.has_task -%}
{{- '<|question|>' -}}
{%- elif SEEN[step] in at.result -%}
{{- '<|step-' + (step | string) + '|>' -}}
{%- else -%}
{{- '<|lost-' + (step | string) + '|>' -}}
{%- endif -%}
{%- endif -%}
"""


def gpt2(path):
    """Tokens by their ids, and merges."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = reader.fields["tokenizer.ggml.merges"].contents()
    # The last is `<|endoftext|>`.
    return {token: at for at, token in enumerate(tokens[:-1])}, merges


def pieces(text, used):
    """The text in tokens of three bytes or more, each of which no other text has."""
    made, rest = [], text.encode()
    while rest:
        length = next((n for n in range(3, len(rest) + 1) if rest[:n] not in used), None)
        while length is None:
            # The last bytes are no token of their own: they go to the one before.
            assert made, f"two answers are {text!r}"
            rest = made.pop() + rest
            length = None if rest in used else len(rest)
        used.add(rest[:length])
        made.append(rest[:length])
        rest = rest[length:]
    return made


def chains(script):
    """What begins with which mark."""
    made = {"<|aside|>": script["aside"]}
    if "question" in script:
        made["<|question|>"] = script["question"]["answer"]
    for at, step in enumerate(script["steps"]):
        made[f"<|step-{at}|>"] = step["answer"]
        made[f"<|lost-{at}|>"] = f"Step {at}: the last result has no {step.get('seen', '')!r}."
    return made


def main(vocabulary_path, script_path, folder):
    import numpy

    with open(script_path, encoding="utf-8") as file:
        script = json.load(file)
    random = numpy.random.default_rng(7)
    alphabet = tools.byte_alphabet()
    vocabulary, merges = gpt2(vocabulary_path)
    used, following = set(), []
    for mark, text in chains(script).items():
        chain = [mark, *pieces(text, used)]
        following += zip(chain, [*chain[1:], END])
    ids = {}
    for piece, _ in following:
        if isinstance(piece, bytes):
            spelt = "".join(alphabet[byte] for byte in piece)
            ids[piece] = vocabulary.setdefault(spelt, len(vocabulary))
    added = {token: len(vocabulary) + at for at, token in enumerate([END, START, *chains(script)])}
    ids.update(added)
    count = len(vocabulary) + len(added)
    embedding = numpy.zeros((count, WIDTH), dtype=numpy.float32)
    head = numpy.zeros((count, WIDTH), dtype=numpy.float32)
    # One code for all that end an answer: of many codes in the end's row each would be lost in the others.
    ending = random.choice([-1, 1], WIDTH)
    for piece, after in following:
        embedding[ids[piece]] = ending if after == END else random.choice([-1, 1], WIDTH)
        head[ids[after]] = 1e3 * embedding[ids[piece]]
    ones = numpy.ones(WIDTH, dtype=numpy.float32)
    zeros = {rows: numpy.zeros((rows, WIDTH), dtype=numpy.float32) for rows in (HEAD, INTERMEDIATE)}
    layer = {
        "input_layernorm": ones, "post_attention_layernorm": ones,
        **{f"self_attn.{name}_proj": zeros[HEAD] for name in "qkv"}, "self_attn.o_proj": zeros[HEAD].T,
        "mlp.gate_proj": zeros[INTERMEDIATE], "mlp.up_proj": zeros[INTERMEDIATE], "mlp.down_proj": zeros[INTERMEDIATE].T,
    }
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": ones,
               **{f"model.layers.0.{name}.weight": tensor for name, tensor in layer.items()}}
    os.makedirs(folder, exist_ok=True)
    tools.write_safetensors(os.path.join(folder, "model.safetensors"), tensors)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    files = {
        "config.json": {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "num_hidden_layers": 1,
            "intermediate_size": INTERMEDIATE, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": HEAD,
            "rms_norm_eps": 1e-6, "vocab_size": count, "max_position_embeddings": CONTEXT, "rope_theta": 1e6,
            "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "float32", "eos_token_id": added[END],
        },
        "tokenizer.json": {
            "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
            "added_tokens": [{"id": id, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                              "normalized": False, "special": True} for token, id in added.items()],
            "pre_tokenizer": byte_level, "decoder": byte_level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": vocabulary, "merges": merges},
        },
        "tokenizer_config.json": {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, fields in files.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            json.dump(fields, file, ensure_ascii=False)
    seen = [step.get("seen", "") for step in script["steps"]]
    template = TEMPLATE.strip().replace("LAST", str(len(seen) - 1)).replace("SEEN", json.dumps(seen))
    template = template.replace("UNLESS", json.dumps(script.get("question", {}).get("unless", "")))
    with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as file:
        file.write(template.replace("ALONE", "true" if script.get("without_tools") else "false"))


if __name__ == "__main__":
    main(*sys.argv[1:])
