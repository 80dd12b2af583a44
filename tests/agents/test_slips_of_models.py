"""Coding agents finish their task although the model makes slips in the JSON of its calls, in pieces of a byte each."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agents import task
from tests.agents.formats import FORMATS, Call, Format, Marker
from tests.agents.models import config, text_of
from tests.agents.test_coding_agents_at_work import BY_NAME, MOVES, turns
from tests.clients.coding_agents import Agent, asked
from tests.clients.recorder import Recorder, recording

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

#: A text whose letters models forget to escape, or escape where they should not.
WRITTEN = "It's\n\tgreen: \\d+\n"
CASES = [
    (BY_NAME[agent], FORMATS[name])
    for agent, names in (
        ("codex", ("deepseek_v31", "gpt_oss")),
        ("claude", ("mistral", "hermes")),
        ("opencode", ("deepseek_v31", "mistral")),
    )
    for name in names
]
KINDS = ("backslash", "control_character", "missing_bracket", "surplus_bracket", "trailing_comma")
Spoil = Callable[[str], str]


def without_escapes(text: str) -> str:
    """Return JSON with raw line breaks and tabs, a bare backslash, and an apostrophe with one."""
    return text.replace("\\n", "\n").replace("\\t", "\t").replace("\\\\d", "\\d").replace("'", "\\'")


def with_a_comma_and_a_brace_too_many(text: str) -> str:
    return re.sub(r"\}(\s*)\Z", r",}}\1", text)


def without_the_last_brace(text: str) -> str:
    return re.sub(r"\}(\s*)\Z", r"\1", text)


def without_sense(text: str) -> str:
    """Return calls whose last argument is neither text nor any other value."""
    return re.sub(r': "[^"]*"(?=[^"]*\Z)', ": red", text)


def says(form: Format, spoil: Spoil, *calls: Call, results: int) -> dict[str, Any]:
    """Return an answer to a prompt with so many results of tools at least, with slips in its JSON."""
    pieces = form.write(task.REASONING, task.DONE if not calls else "So.", calls)
    spoiled = [spoil(piece) if '{"' in piece and not isinstance(piece, Marker) else piece for piece in pieces]
    when = {"match": form.result, "times": results} if results else {}
    return {**when, "text": text_of(spoiled)}


def moves_of(agent: Agent) -> task.Moves:
    """Return how the agent is told to act; what it writes is a text with many letters that JSON escapes."""
    moves = MOVES[agent.name]
    if agent.name == "codex":
        command = f"printf '%s' {shlex.quote(WRITTEN)}"
        return dataclasses.replace(moves, edit=lambda path: ("exec_command", {"cmd": f"{command} > {path}"}))
    return dataclasses.replace(moves, edit=lambda path: edited(moves.edit(path)))


def edited(call: Call) -> Call:
    name, arguments = call
    return name, {key: WRITTEN if value == task.COLOUR else value for key, value in arguments.items()}


def slips(form: Format, agent: Agent, folder: Path) -> list[dict[str, Any]]:
    moves = moves_of(agent)
    return [
        says(form, str, results=3),
        says(form, without_the_last_brace, moves.run("sh run.sh"), results=2),
        says(form, without_escapes, moves.edit(folder / "colour.txt"), results=1),
        says(form, with_a_comma_and_a_brace_too_many, moves.read(folder / "colour.txt"), results=0),
    ]


def breaks(form: Format, agent: Agent, folder: Path) -> list[dict[str, Any]]:
    read = MOVES[agent.name].read(folder / "colour.txt")
    return [
        says(form, str, results=2),
        says(form, str, read, results=1),
        says(form, without_sense, read, results=0),
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slips")


@pytest.fixture(scope="module")
def server(serve_for_module: Any, folders: Path) -> Any:
    models = [
        (f"{agent}-{form}-{script.__name__}", form, script(form, agent, folders / f"{agent}-{form}" / "work"))
        for agent, form in CASES
        for script in (slips, breaks)
    ]
    return serve_for_module(config(models, folders / "models", by_characters=True))


def ask(agent: Agent, form: Format, script: Callable[..., Any], folders: Path, server: Any) -> tuple[str, Recorder]:
    folder = folders / f"{agent}-{form}"
    task.prepare(folder / "work")
    with recording(server.url) as recorder:
        return asked(agent, recorder.url, f"{agent}-{form}-{script.__name__}", folder, task.ASKED), recorder


@pytest.mark.parametrize(("agent", "form"), CASES, ids=str)
def test_an_agent_finishes_its_task_with_a_model_that_makes_every_slip(
    agent: Agent, form: Format, server: Any, folders: Path
) -> None:
    printed, recorder = ask(agent, form, slips, folders, server)

    work = folders / f"{agent}-{form}" / "work"
    assert task.DONE in printed
    assert (work / "colour.txt").read_text() == WRITTEN
    assert task.said(work) == WRITTEN.rstrip("\n")
    assert recorder.statuses == {200}
    assert len(turns(recorder)) == 4
    _, _, metrics = server.request("GET", "/metrics")
    kinds = re.findall(rf'repaired_tool_calls_total{{kind="(\w+)",model="{agent}-{form}-slips"}} 1.0', metrics.decode())
    assert sorted(kinds) == sorted(KINDS)


@pytest.mark.parametrize(("agent", "form"), CASES, ids=str)
def test_an_agent_goes_on_after_a_call_that_broke_in_its_stream(
    agent: Agent, form: Format, server: Any, folders: Path
) -> None:
    printed, recorder = ask(agent, form, breaks, folders, server)

    assert task.DONE in printed
    assert recorder.statuses == {200}
    assert len(turns(recorder)) == 3
