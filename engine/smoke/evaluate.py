"""Measures the smoke model with mlx-lm, greedily and by exact match of the whole answer.

    evaluate.py lists                    write heldout, prompts and conversations.jsonl (from the seed; needs no model)
    evaluate.py table MODEL[:f32] ...    print one column a model, as the table in README.md
    evaluate.py prompts MODEL[:f32] ...  check every prompt and conversation; fails when any model misses one

`:f32` computes in f32 whatever the file holds: the only quick way on a CPU. No question here was trained on, save where its row says so.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from random import Random

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import lessons
from facts import FACTS, REFUSAL

SEED = 7
LONGEST_ANSWER = 420


def ask(question: str) -> list[dict]:
    return [dict(role="user", content=question)]


def case(turns) -> dict:
    """A conversation whose last answer is the expected one."""
    messages = [m for question, answer in turns for m in (dict(role="user", content=question), dict(role="assistant", content=answer))]
    return dict(messages=messages[:-1], expect=messages[-1]["content"])


def held_out_sums(n: int) -> list[dict]:
    """Canonical phrasing; half drawn evenly from 0–999, half of mixed lengths as in training. No question twice."""
    rng, seen = Random(SEED), {}
    while len(seen) < n:
        a, b = (rng.randrange(1000), rng.randrange(1000)) if len(seen) % 2 else (lessons.number(rng), lessons.number(rng))
        if lessons.held_out_sum(a, b):
            seen[a, b] = case([lessons.sum_turn(a, b)])
    return list(seen.values())


def sets() -> dict[str, list[dict]]:
    rng = Random(SEED + 1)
    mixed = lambda: lessons.pair(rng, held_out=True)
    before = lambda: [lessons.turn(rng, dict(sum=0.5, day=0.2, fact=0.3), 10) for _ in range(rng.randint(1, 3))]
    days = lambda which: [case([lessons.day_turn(*q, s)]) for q in which for s in (0, 1)]
    return {
        "“What is A + B?”, held-out sums": held_out_sums(500),
        "any phrasing, held-out sums": [case([lessons.sum_turn(*mixed(), rng.choice(lessons.SUM_SHAPES))]) for _ in range(500)],
        "step by step, held-out sums": [case([lessons.steps_turn(*mixed(), rng.choice(lessons.STEPS_SHAPES))]) for _ in range(200)],
        "held-out sum as the 2nd to 4th turn": [case([*before(), lessons.sum_turn(*mixed())]) for _ in range(200)],
        "weekdays, combinations trained on": days(lessons.TRAINED_DAYS),
        "weekdays, held-out combinations": days(lessons.HELD_OUT_DAYS),
        "facts, a question trained on": [case([(questions[0], answer)]) for answer, questions in FACTS],
        "facts, held-out paraphrase": [case([(questions[-1], answer)]) for answer, questions in FACTS],
        "unknown questions (shapes trained on)": [case([lessons.unknown_turn(rng)]) for _ in range(100)],
        "counting from 1 to 5 … 60": [case([lessons.count_turn(1, last)]) for last in range(5, 61, 5)],
    }


def prompts() -> list[dict]:
    """What the smoke tests and the demo ask. Kept only while every shipped model answers all of it right."""
    sums = [(17, 25), (4, 9), (99, 1), (123, 456), (305, 67), (48, 52), (260, 417), (731, 164), (86, 913), (640, 205)]
    fact = {questions[0]: answer for answer, questions in FACTS}
    known = ["What is Russet?", "How do I start Russet?", "How do I add a machine?", "How do I get a token?", "How do I run the demo?",
             "What is a ModelDeployment?", "What is a ShardGroup?", "What is a Shard?", "What is a tier?", "What is a rank?",
             "What does kubectl apply do?", "Which port does the API server use?", "Which port does the gateway use?",
             "Which API does the gateway speak?", "Who grants memory?", "Who are you?", "Hello"]
    turns = [(f"sum-{a}-{b}", [lessons.sum_turn(a, b)]) for a, b in sums]
    turns += [(f"steps-{a}-{b}", [lessons.steps_turn(a, b)]) for a, b in [(17, 25), (386, 247)]]
    turns += [("day-after", [lessons.day_turn(0, 3, True)]), ("day-before", [lessons.day_turn(4, 2, False)])]
    turns += [("fact-" + "-".join(q.lower().strip("?").split()), [(q, fact[q])]) for q in known]
    turns += [("unknown", [("What is the capital of France?", REFUSAL)])]
    turns += [("long-story", [("How does Russet serve a model?", fact["Tell me the whole story."])])]
    return [dict(name=name, **case(asked)) for name, asked in turns]


def conversations() -> list[dict]:
    """Like `prompts`, but with turns before the question."""
    fact = {questions[0]: answer for answer, questions in FACTS}
    known = lambda question: (question, fact[question])
    turns = [("second-turn", [lessons.sum_turn(17, 25), lessons.sum_turn(123, 456)]),
             ("third-turn", [known("Hello"), known("What is Russet?"), lessons.sum_turn(48, 52)]),
             ("fact-after-sums", [lessons.sum_turn(4, 9), lessons.sum_turn(305, 67), known("What is a Shard?")])]
    return [dict(name=name, **case(asked)) for name, asked in turns]


def load(name: str):
    import mlx.core as mx
    from mlx_lm import load

    mx.set_default_device(mx.cpu)
    path, _, kind = name.partition(":")
    model, tokenizer = load(path)
    if kind == "f32":
        from mlx_lm.utils import dequantize_model

        model = dequantize_model(model)
        model.set_dtype(mx.float32)
    return model, tokenizer


def answers(model, tokenizer, cases: list[dict]) -> list[str]:
    """Greedy answers; prompts of one length run as one batch, so nothing is padded."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    by_length = defaultdict(list)
    for index, one in enumerate(cases):
        ids = tokenizer.apply_chat_template(one["messages"], add_generation_prompt=True)
        by_length[len(ids)].append((index, ids))
    out = [""] * len(cases)
    for group in by_length.values():
        for start in range(0, len(group), 64):
            part = group[start:start + 64]
            cache = make_prompt_cache(model)
            tokens, rows, open_rows = mx.array([ids for _, ids in part]), [[] for _ in part], set(range(len(part)))
            for _ in range(LONGEST_ANSWER):
                tokens = mx.argmax(model(tokens, cache=cache)[:, -1], axis=-1)
                for row, token in enumerate(tokens.tolist()):
                    if row in open_rows:
                        rows[row].append(token)
                        if token == tokenizer.eos_token_id:
                            open_rows.discard(row)
                if not open_rows:
                    break
                tokens = tokens[:, None]
            for (index, _), row in zip(part, rows):
                out[index] = tokenizer.decode([t for t in row if t != tokenizer.eos_token_id])
    return out


def main() -> None:
    verb, *names = sys.argv[1:] or [""]
    if verb == "lists":
        for file, cases in (("heldout.jsonl", held_out_sums(500)), ("prompts.jsonl", prompts()),
                            ("conversations.jsonl", conversations())):
            (HERE / file).write_text("".join(json.dumps(one) + "\n" for one in cases))
    elif verb == "table":
        loaded = [load(name) for name in names]
        print(f"| questions (number) | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
        for title, cases in sets().items():
            cells = []
            for model, tokenizer in loaded:
                got = answers(model, tokenizer, cases)
                wrong = [(c["messages"][-1]["content"], c["expect"], g) for c, g in zip(cases, got) if c["expect"] != g]
                cells.append(f"{100 * (1 - len(wrong) / len(cases)):.1f}")
                for question, expect, g in wrong[:6]:
                    print(f"  {title}: {question!r}: {g!r}, not {expect!r}", file=sys.stderr)
            print(f"| {title} ({len(cases)}) | {' | '.join(cells)} |", flush=True)
    elif verb == "prompts":
        lines = [line for file in ("prompts.jsonl", "conversations.jsonl") for line in (HERE / file).read_text().splitlines()]
        cases, missed = [json.loads(line) for line in lines], 0
        for name in names:
            got = answers(*load(name), cases)
            wrong = [(c["name"], c["expect"], g) for c, g in zip(cases, got) if c["expect"] != g]
            print(f"{name}: {len(cases) - len(wrong)} of {len(cases)} right")
            for prompt, expect, g in wrong:
                print(f"  {prompt}: {g!r}, not {expect!r}")
            missed += len(wrong)
        sys.exit(1 if missed else 0)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
