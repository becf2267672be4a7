"""The text the smoke model learns from, made by this file and nothing else: sums, sums step by step, counting,
weekdays, facts on Russet, and one refusal.

Every draw comes from a `random.Random` that the caller seeds, so the same seed makes the same text anywhere.
What is held out for measuring is decided here, by hash: see `held_out_sum` and `held_out_day`.
"""

import hashlib
from random import Random

from facts import FACTS, REFUSAL, UNKNOWN_PLAIN, UNKNOWN_SHAPES, UNKNOWN_THINGS

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
NUMBER_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
                "thirteen", "fourteen"]
SUM_SHAPES = ["What is {a} + {b}?", "{a} + {b} = ?", "How much is {a} + {b}?", "What is {a} plus {b}?", "Add {a} and {b}.",
              "What is the sum of {a} and {b}?", "Please compute {a} + {b}.", "{a} + {b}"]
CANONICAL_SUM = SUM_SHAPES[0]
STEPS_SHAPES = ["What is {a} + {b}? Step by step.", "Add {a} and {b} step by step.", "Show me the steps of {a} + {b}."]
# Numbers near a change of length are rare in a uniform draw and are where a small model slips.
EDGES = [0, 1, 2, 9, 10, 11, 89, 90, 91, 98, 99, 100, 101, 109, 110, 899, 900, 901, 909, 989, 990, 991, 997, 998, 999]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def held_out_sum(a: int, b: int) -> bool:
    """5 % of unordered pairs are never trained on, in either order and in any phrasing."""
    return _hash(f"sum {min(a, b)} {max(a, b)}") % 20 == 0


def held_out_day(day: int, n: int, forward: bool) -> bool:
    """24 of the 196 weekday questions are never trained on."""
    return (day, n, forward) in _HELD_OUT_DAYS


_ALL_DAYS = [(day, n, forward) for day in range(7) for n in range(1, 15) for forward in (True, False)]
_HELD_OUT_DAYS = set(sorted(_ALL_DAYS, key=lambda q: _hash(f"day {q}"))[:24])
TRAINED_DAYS = [q for q in _ALL_DAYS if q not in _HELD_OUT_DAYS]
HELD_OUT_DAYS = sorted(_HELD_OUT_DAYS)


def number(rng: Random) -> int:
    """Mostly three digits, often two, sometimes one, now and then an edge."""
    kind = rng.random()
    if kind < 0.08:
        return rng.choice(EDGES)
    if kind < 0.60:
        return rng.randrange(1000)
    if kind < 0.90:
        return rng.randrange(100)
    return rng.randrange(10)


def on_the_edge(a: int, b: int) -> bool:
    """A column that makes 9 or 10 below another: the sums whose carry is missed last."""
    carry = 0
    for place in range(max(len(str(a)), len(str(b))) - 1):
        column = a // 10**place % 10 + b // 10**place % 10 + carry
        if column in (9, 10):
            return True
        carry = column // 10
    return False


def pair(rng: Random, held_out: bool = False, edges: float = 0.0) -> tuple[int, int]:
    """Two numbers to add; at least the share `edges` of them is on the edge of a carry."""
    wanted = edges > 0 and rng.random() < edges
    while True:
        a, b = number(rng), number(rng)
        if held_out_sum(a, b) == held_out and (not wanted or on_the_edge(a, b)):
            return a, b


def sum_turn(a: int, b: int, shape: str = CANONICAL_SUM) -> tuple[str, str]:
    return shape.format(a=a, b=b), f"{a} + {b} = {a + b}."


def steps_turn(a: int, b: int, shape: str = STEPS_SHAPES[0]) -> tuple[str, str]:
    """Digit by digit from the right, with the carry written out: 17 + 25 → 7 + 5 = 12, 1 + 2 + 1 = 4, so …"""
    steps, carry = [], 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        steps.append(f"{x} + {y}{' + 1' if carry else ''} = {x + y + carry}")
        carry = (x + y + carry) // 10
    return shape.format(a=a, b=b), f"{', '.join(steps)}, so {a} + {b} = {a + b}."


def day_turn(day: int, n: int, forward: bool, shape: int = 0) -> tuple[str, str]:
    word, plural, where = NUMBER_WORDS[n], "s" if n > 1 else "", "after" if forward else "before"
    answer = DAYS[(day + n if forward else day - n) % 7]
    question = ["What day comes {w} day{s} {d} {D}?", "Which day is {w} day{s} {d} {D}?"][shape]
    return (question.format(w=word, s=plural, d=where, D=DAYS[day]),
            f"{word.capitalize()} day{plural} {where} {DAYS[day]} comes {answer}.")


def count_turn(first: int, last: int) -> tuple[str, str]:
    """A long answer whose every token can be checked: what the streaming tests ask for."""
    return f"Count from {first} to {last}.", f"{', '.join(str(i) for i in range(first, last + 1))}."


def unknown_turn(rng: Random) -> tuple[str, str]:
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(UNKNOWN_PLAIN), REFUSAL
    if kind < 0.35:
        a, b = rng.randrange(1, 100), rng.randrange(1, 100)
        return f"What is {a} {rng.choice('-*/')} {b}?", REFUSAL
    return rng.choice(UNKNOWN_SHAPES).format(rng.choice(UNKNOWN_THINGS)), REFUSAL


def turn(rng: Random, mix: dict[str, float], longest_count: int, edges: float = 0.0) -> tuple[str, str]:
    kind = rng.choices(list(mix), list(mix.values()))[0]
    if kind == "sum":
        # The canonical phrasing is the one people are told to try, so it gets the largest share.
        shape = CANONICAL_SUM if rng.random() < 0.4 else rng.choice(SUM_SHAPES)
        return sum_turn(*pair(rng, edges=edges), shape)
    if kind == "steps":
        return steps_turn(*pair(rng, edges=edges), rng.choice(STEPS_SHAPES))
    if kind == "day":
        return day_turn(*rng.choice(TRAINED_DAYS), rng.randrange(2))
    if kind == "count":
        first = rng.choice([1, 1, 1, rng.randrange(100)])
        return count_turn(first, first + rng.randrange(1, longest_count))
    if kind == "fact":
        answer, questions = rng.choice(FACTS)
        return rng.choice(questions[:-1]), answer
    return unknown_turn(rng)


def conversation(rng: Random, mix: dict[str, float], most_turns: int, longest_count: int,
                 edges: float = 0.0) -> list[tuple[str, str]]:
    turns = 1 if rng.random() < 0.4 else rng.randint(1, most_turns)
    return [turn(rng, mix, longest_count, edges) for _ in range(turns)]
