"""Holds docs/how-to/clients.md to what the clients are: versions, settings, and snippets that run as they stand."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.clients.coding_agents import AGENTS, Agent
from tests.clients.conftest import HERE
from tests.clients.programs_of import NODE, OWN, command, printed

REPOSITORY = HERE.parents[1]
PAGE = (REPOSITORY / "docs" / "how-to" / "clients.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
HELLO = "Hello from the script."
EXAMPLE = "examples/agents.yaml"

#: Headings of snippets, and the environment of each.
HERE_ALREADY = {"openai": OWN, "anthropic": OWN}
OTHERS = {
    "litellm": "sdks-openai-2",
    "langchain": "sdks",
    "instructor": "sdks-openai-2",
    "pydantic-ai": "sdks",
    "openai-agents": "sdks",
    "llama-index": "sdks-openai-2",
    "openai (npm)": NODE,
    "@anthropic-ai/sdk": NODE,
    "ai": NODE,
}
TITLES = {"codex": "Codex CLI", "claude": "Claude Code", "opencode": "OpenCode", "qwen": "Qwen Code"}


@pytest.fixture(scope="module")
def server(serve_for_module: Any) -> Any:
    assert EXAMPLE in PAGE
    return serve_for_module((REPOSITORY / EXAMPLE).read_text())


def section(heading: str) -> str:
    [found] = re.findall(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##+ |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def snippet(heading: str, language: str) -> str:
    [found] = re.findall(rf"```{language}\n(.*?)```", section(heading), re.DOTALL)
    return str(found)


def says_hello(heading: str, environment: str, server: Any, folder: Path) -> None:
    language, ending = ("js", "mjs") if environment == NODE else ("python", "py")
    file = folder / f"snippet.{ending}"
    file.write_text(snippet(heading, language).replace(ADDRESS, server.url))
    # Node looks for packages beside the file.
    (folder / "node_modules").symlink_to(HERE / "node_modules")

    assert printed(command(environment), str(file), home=folder).strip() == HELLO


def test_the_versions_of_the_page_are_those_that_are_set_up() -> None:
    wanted = json.loads((HERE / "package.json").read_text())["dependencies"]
    # It is there for the forms of structured answers.
    del wanted["zod"]
    names = {"langchain-openai", "pydantic-ai-slim", "openai-agents", "llm", "litellm", "instructor"}
    names |= {"llama-index-llms-openai-like", "langgraph", "guidellm", "aiperf"}
    for path in (HERE / "requirements").glob("*.txt"):
        # Some of the packages that aider asks for are clients too, at other versions.
        shown = {"aider-chat"} if path.stem == "aider" else names
        wanted |= {name: version for name, version in _pins(path).items() if name in shown}
    own = _pins(REPOSITORY / "requirements-dev.txt")
    rows = re.findall(r"^\| .*?`([^`]+)`(?: \((\w+)\)|\))? \| ([\d.]+) \|", PAGE, re.MULTILINE)

    listed = {(name, where): version for name, where, version in rows}

    for name in ("openai", "anthropic", "ollama"):
        assert listed.pop((name, "Python")) == own[name]
    assert {name: version for (name, _), version in listed.items()} == wanted


def _pins(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("agent", AGENTS, ids=str)
def test_an_agent_is_set_up_on_the_page_as_in_its_test(agent: Agent) -> None:
    text = section(TITLES[agent.name])

    for name, value in agent.environment(ADDRESS, "mock-model").items():
        assert f"{name}={value}" in text
    for config in agent.files(ADDRESS, "mock-model").values():
        if config.startswith("{"):
            assert json.loads(snippet(TITLES[agent.name], "json")) == json.loads(config)
        else:
            assert tomllib.loads(snippet(TITLES[agent.name], "toml")) == tomllib.loads(config)


def test_every_snippet_is_run() -> None:
    assert len(re.findall(r"```(?:python|js)\n", PAGE)) == len(HERE_ALREADY | OTHERS)


@pytest.mark.parametrize(("heading", "environment"), HERE_ALREADY.items())
def test_a_snippet_for_an_official_sdk_says_hello(heading: str, environment: str, server: Any, tmp_path: Path) -> None:
    says_hello(heading, environment, server, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("heading", "environment"), OTHERS.items())
def test_a_snippet_for_another_client_says_hello(heading: str, environment: str, server: Any, tmp_path: Path) -> None:
    says_hello(heading, environment, server, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_llm_knows_the_model_from_its_file(server: Any, tmp_path: Path) -> None:
    llm = command("sdks", "llm")
    folder = Path(printed(llm, "logs", "path", home=tmp_path).strip()).parent
    (folder / "extra-openai-models.yaml").write_text(snippet("llm", "yaml").replace(ADDRESS, server.url))
    [asked] = re.findall(r'\$ llm (.*) "(.*)"\n', snippet("llm", "console"))

    assert printed(llm, *asked[0].split(), asked[1], home=tmp_path).strip() == HELLO
