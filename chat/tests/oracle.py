"""Renders conversations by Python's Transformers: the oracle of `transformers.rs`.

Reads a list of cases from standard input, {"template": path, "messages": […], "as_object": bool, "tools": […] or null,
"arguments": {…}, "continue": bool}, and writes a list of {"text": …} or {"refused": …} (the template's own words) or {"failed": …}.
"""
import json
import sys
from datetime import datetime

import jinja2
import transformers.utils.chat_template_utils as utils

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


class Frozen(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2026, 11, 21, 8, 0, 0)


utils.datetime = Frozen


def call(id, name, arguments, as_object):
    arguments = json.loads(arguments) if as_object else arguments
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def render(case):
    # Calls arrive as [id, name, arguments], the arguments as JSON text, so that the order of keys is kept on the way.
    for message in case["messages"]:
        if "tool_calls" in message:
            message["tool_calls"] = [call(*parts, case["as_object"]) for parts in message["tool_calls"]]
    with open(case["template"], encoding="utf-8") as file:
        template = file.read()
    arguments = dict(SPECIAL)
    arguments.update({"add_generation_prompt": not case["continue"]})
    arguments.update(case["arguments"])
    try:
        rendered, _ = utils.render_jinja_template(
            conversations=[case["messages"]],
            tools=case["tools"],
            chat_template=template,
            continue_final_message=case["continue"],
            **arguments,
        )
        return {"text": rendered[0]}
    except jinja2.exceptions.TemplateError as error:
        # What `raise_exception` raises; the sandbox and undefined values raise classes of their own.
        own = type(error) is jinja2.exceptions.TemplateError
        return {"refused" if own else "failed": str(error)}
    except Exception as error:  # noqa: BLE001 what a template may raise has no common base
        return {"failed": f"{type(error).__name__}: {error}"}


json.dump([render(case) for case in json.load(sys.stdin)], sys.stdout)
