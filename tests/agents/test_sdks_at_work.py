"""Agents made with SDKs do a task of several calls, with models that write the raw formats of their families."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.agents import task
from tests.agents.formats import FORMATS, Format
from tests.agents.models import config, model_name
from tests.clients.conftest import HERE
from tests.clients.programs_of import NODE, command, printed

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

MOVES = task.Moves(
    lambda path: ("read_file", {"path": path.name}),
    lambda path: ("edit_file", {"path": path.name, "old": "red", "new": task.COLOUR}),
    lambda command: ("run_command", {"command": command}),
)


@dataclass(frozen=True)
class Program:
    """An agent made with an SDK."""

    name: str
    file: str
    environment: str
    #: Whether its last answer has the form that it asks for beside its tools.
    structured: bool = False

    def __str__(self) -> str:
        return self.name


PROGRAMS = [
    Program("openai-agents", "openai_agents.py", "sdks", structured=True),
    Program("pydantic-ai", "pydantic_ai_native.py", "sdks", structured=True),
    Program("langgraph", "langgraph_agent.py", "sdks"),
    Program("ai", "ai_agent.js", NODE),
]
SPOKEN = {
    "openai-agents": ("hermes", "gpt_oss", "qwen3_coder", "kimi_k2", "llama3_json"),
    "pydantic-ai": ("glm45", "deepseek_v31", "mistral", "minimax_m2", "gpt_oss"),
    "langgraph": ("hermes", "deepseek_v31", "glm45", "minimax_m2", "llama3_json"),
    "ai": ("qwen3_coder", "kimi_k2", "mistral", "gpt_oss", "hermes"),
}
CASES = [(program, FORMATS[name]) for program in PROGRAMS for name in SPOKEN[program.name]]


def form_of(text: str) -> str:
    """Return the last answer of an agent that asks for a form."""
    return json.dumps({"said": text})


def name_of(form: Format, *, structured: bool) -> str:
    return model_name(form) + ("-json" if structured else "")


@pytest.fixture(scope="module")
def server(serve_for_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    models = []
    for form in FORMATS.values():
        for structured in (False, True):
            name, final = name_of(form, structured=structured), form_of if structured else task.plain
            models.append((name, form, task.one_by_one(form, MOVES, Path(), final=final)))
            models.append((f"{name}-both", form, task.at_once(form, MOVES, final=final)))
    # `ai` refers to what was answered before instead of sending it again.
    return serve_for_module(config(models, tmp_path_factory.mktemp("models"), response_store={"use": "memory"}))


@pytest.mark.parametrize(("program", "form"), CASES, ids=str)
def test_an_agent_of_an_sdk_does_its_task(
    program: Program, form: Format, server: Any, tmp_path: Path, recorded: Any
) -> None:
    task.prepare(tmp_path)
    recorder = recorded(f"{program.name}-tasks", server)
    file = str(HERE / "programs_at_work" / program.file)
    name = name_of(form, structured=program.structured)

    lines = printed(
        command(program.environment), file, recorder.url, name, task.ASKED, task.GO_ON, task.BOTH, home=tmp_path
    )

    found: dict[str, Any] = {}
    for line in lines.splitlines():
        found |= json.loads(line)
    assert found == {"task": task.DONE, "resumed": task.GONE_ON, "both": task.BOTH_DONE}
    assert task.said(tmp_path) == "blue"
    assert [(tmp_path / f"{which}.txt").read_text() for which in ("one", "two")] == ["one", "two"]
    assert recorder.statuses == {200}
    assert [request["body"]["stream"] for request in recorder.asked] == [True] * (8 if form.parallel else 9)
