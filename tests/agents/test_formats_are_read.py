"""What a model writes, in the words of each format and in items of any size, is what a client gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.agents.formats import FORMATS, Call, Format
from tests.agents.models import config, model_name, text_of

REASONING = 'First "read", then <edit> …'
CONTENT = "I call both: {a} & [b]."
CALLS: list[Call] = [
    ("edit_file", {"path": "grün.txt", "new": 'a "b" \\n <c>\n  {d}: \t[e] &amp; ü\n', "count": 2, "all": True}),
    ("run_command", {"command": "sh run.sh && echo '</tool>'", "env": {"A": ["1", None]}}),
]
DONE = "Done, in the end."
TOOLS = [
    {"name": "edit_file", "types": {"path": "string", "new": "string", "count": "integer", "all": "boolean"}},
    {"name": "run_command", "types": {"command": "string", "env": "object"}},
]


def calls_of(form: Format) -> list[Call]:
    return CALLS if form.parallel else CALLS[:1]


def script(form: Format) -> list[dict[str, Any]]:
    beside = CONTENT if form.content_beside_calls else ""
    return [
        {"match": form.result, "times": len(calls_of(form)), "text": text_of(form.write(REASONING, DONE, []))},
        {"text": text_of(form.write(REASONING, beside, calls_of(form)))},
    ]


@pytest.fixture(scope="module")
def server(serve_for_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("formats")
    return serve_for_module(config([(model_name(form), form, script(form)) for form in FORMATS.values()], folder))


def asked(server: Any, form: Format, messages: list[dict[str, Any]], *, stream: bool) -> dict[str, Any]:
    """Return the message of the answer; of a stream, its parts put together."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "parameters": {
                    "type": "object",
                    "properties": {name: {"type": kind} for name, kind in tool["types"].items()},  # type: ignore[attr-defined]
                },
            },
        }
        for tool in TOOLS
    ]
    body = {"model": model_name(form), "messages": messages, "tools": tools, "stream": stream}
    status, _, answer = server.request("POST", "/v1/chat/completions", body)
    assert status == 200, answer
    if not stream:
        message: dict[str, Any] = json.loads(answer)["choices"][0]["message"]
        return message
    whole: dict[str, Any] = {"content": None, "reasoning_content": None, "tool_calls": []}
    for line in answer.decode().splitlines():
        if line.startswith("data: {"):
            delta = json.loads(line[6:])["choices"][0]["delta"]
            for field in ("content", "reasoning_content"):
                if delta.get(field):
                    whole[field] = (whole[field] or "") + delta[field]
            for call in delta.get("tool_calls") or []:
                if "id" in call:
                    whole["tool_calls"].append({"id": call["id"], "function": dict(call["function"])})
                else:
                    whole["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return whole


@pytest.mark.parametrize("stream", [False, True], ids=["body", "stream"])
@pytest.mark.parametrize("form", FORMATS.values(), ids=str)
def test_calls_and_the_answer_after_them_come_out(server: Any, form: Format, stream: bool) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Do it."}]

    first = asked(server, form, messages, stream=stream)
    made = first["tool_calls"] or []
    found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in made]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "It is done."} for call in made]
    again = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", **call} for call in made]}
    last = asked(server, form, [*messages, again, *results], stream=stream)

    assert found == calls_of(form)
    assert (first["content"] or "").strip() == (CONTENT if form.content_beside_calls else "")
    assert last["content"].strip() == DONE
    assert not last.get("tool_calls")
    if form.reasoning_parser and form.thinks:
        assert first["reasoning_content"].strip() == last["reasoning_content"].strip() == REASONING
