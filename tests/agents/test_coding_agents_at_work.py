"""Coding agents do a task of several calls, with models that write the raw formats of their families."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.agents import task
from tests.agents.formats import FORMATS, Format
from tests.agents.models import config, model_name
from tests.clients.coding_agents import AGENTS, Agent, asked

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

_EDIT = {"old_string": "red", "new_string": task.COLOUR}
MOVES = {
    "codex": task.Moves(
        lambda path: ("exec_command", {"cmd": f"cat {path}"}),
        lambda path: ("exec_command", {"cmd": f"printf '%s' {shlex.quote(task.COLOUR)} > {path}"}),
        lambda command: ("exec_command", {"cmd": command, "yield_time_ms": 5000}),
    ),
    "claude": task.Moves(
        lambda path: ("Read", {"file_path": str(path)}),
        lambda path: ("Edit", {"file_path": str(path), **_EDIT}),
        lambda command: ("Bash", {"command": command, "timeout": 60_000}),
    ),
    "opencode": task.Moves(
        lambda path: ("read", {"filePath": str(path), "limit": 10}),
        lambda path: ("edit", {"filePath": str(path), "oldString": "red", "newString": task.COLOUR}),
        lambda command: ("bash", {"command": command}),
    ),
    "qwen": task.Moves(
        lambda path: ("read_file", {"file_path": str(path)}),
        lambda path: ("edit", {"file_path": str(path), **_EDIT}),
        lambda command: ("run_shell_command", {"command": command, "is_background": False}),
    ),
}
#: Five formats each, so that each of the formats has two agents at least.
SPOKEN = {
    "codex": ("gpt_oss", "hermes", "qwen3_coder", "deepseek_v31", "kimi_k2"),
    "claude": ("hermes", "glm45", "minimax_m2", "kimi_k2", "qwen3_coder", "mistral"),
    "opencode": ("hermes", "llama3_json", "deepseek_v31", "glm45", "gpt_oss"),
    "qwen": ("hermes", "qwen3_coder", "minimax_m2", "mistral", "llama3_json", "kimi_k2"),
}
#: Formats whose templates are in the construction of the published ones, and that are streamed by the character.
PUBLISHED = {
    "codex": ("deepseek_v31", "mistral"),
    "claude": ("mistral", "deepseek_v31"),
    "opencode": ("deepseek_v31", "mistral"),
}
CASES = [(agent, FORMATS[name]) for agent in AGENTS for name in SPOKEN[agent.name]]
BY_CHARACTERS = [(agent, FORMATS[name]) for agent in AGENTS for name in PUBLISHED.get(agent.name, ())]
BY_NAME = {agent.name: agent for agent in AGENTS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agents")


@pytest.fixture(scope="module")
def servers(serve_for_module: Any, folders: Path) -> dict[str, Any]:
    """Return the servers that have been started: one for each agent, with a model for each format."""
    return {}


@pytest.fixture
def server(serve_for_module: Any, servers: dict[str, Any], folders: Path, agent: Agent) -> Any:
    if agent.name not in servers:
        forms = [FORMATS[name] for name in SPOKEN[agent.name]]
        moves = MOVES[agent.name]
        models = [
            (model_name(form), form, task.one_by_one(form, moves, folders / agent.name / form.name / "work"))
            for form in forms
        ]
        models += [(f"{model_name(form)}-both", form, task.at_once(form, moves)) for form in forms if form.parallel]
        servers[agent.name] = serve_for_module(config(models, folders / "models" / agent.name))
    return servers[agent.name]


def turns(recorder: Any) -> list[dict[str, Any]]:
    """Return the requests of the agent itself, which offers tools; titles and summaries go without."""
    return [request["body"] for request in recorder.asked if request["body"].get("tools")]


@pytest.mark.parametrize(("agent", "form"), CASES, ids=str)
def test_an_agent_reads_edits_runs_and_is_resumed(
    agent: Agent, form: Format, server: Any, folders: Path, recorded: Any
) -> None:
    folder = folders / agent.name / form.name
    work = folder / "work"
    task.prepare(work)
    recorder = recorded(f"{agent.name}-task", server)

    printed = asked(agent, recorder.url, model_name(form), folder, task.ASKED)

    assert task.DONE in printed
    assert (work / "colour.txt").read_text() == task.COLOUR
    assert task.said(work) == task.COLOUR
    assert recorder.statuses == {200}
    assert len(turns(recorder)) == 4
    assert all(body["stream"] for body in turns(recorder))

    recorder = recorded(f"{agent.name}-resumed", server)

    printed = asked(agent, recorder.url, model_name(form), folder, task.GO_ON, resume=True)

    assert task.GONE_ON in printed
    assert task.said(work) == "blue"
    assert recorder.statuses == {200}
    # With the history there are three results before: else it would begin the task again.
    assert len(turns(recorder)) == 2


@pytest.mark.parametrize(("agent", "form"), BY_CHARACTERS, ids=str)
def test_an_agent_does_the_task_while_answers_come_by_the_character(
    agent: Agent, form: Format, serve_for_module: Any, folders: Path, recorded: Any
) -> None:
    folder = folders / f"{agent.name}-characters" / form.name
    work = folder / "work"
    task.prepare(work)
    script = task.one_by_one(form, MOVES[agent.name], work)
    name = model_name(form)
    server = serve_for_module(config([(name, form, script)], folder / "models", by_characters=True))
    recorder = recorded(f"{agent.name}-task", server)

    printed = asked(agent, recorder.url, name, folder, task.ASKED)

    assert task.DONE in printed
    assert (work / "colour.txt").read_text() == task.COLOUR
    assert task.said(work) == task.COLOUR
    assert recorder.statuses == {200}


@pytest.mark.parametrize(("agent", "form"), [case for case in CASES if case[1].parallel], ids=str)
def test_an_agent_does_two_things_at_once(
    agent: Agent, form: Format, server: Any, folders: Path, recorded: Any
) -> None:
    folder = folders / f"{agent.name}-both" / form.name
    task.prepare(folder / "work")
    recorder = recorded(f"{agent.name}-parallel", server)

    printed = asked(agent, recorder.url, f"{model_name(form)}-both", folder, task.BOTH)

    assert task.BOTH_DONE in printed
    assert [(folder / "work" / f"{name}.txt").read_text() for name in ("one", "two")] == ["one", "two"]
    assert recorder.statuses == {200}
    assert len(turns(recorder)) == 2
