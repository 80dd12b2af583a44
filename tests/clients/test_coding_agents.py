"""Coding agents as their users start them, with nothing changed but the address: each answers, and edits a file."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import HERE

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

MODEL = "scripted"
WORDS = "Written by the agent."
DONE = "The file is there."
HELLO = "Hello from the script."

CONFIG = """
workers:
  scripted:
    model: {name: scripted, tool_call_parser: hermes}
    engine:
      use: mocker
      output: script
      speedup_ratio: 0
      # A token of its tokenizer is a byte, and agents begin with many thousands of words.
      context_length: 1000000
      num_gpu_blocks: 100000
      script: %s
    grace_period: 0
"""


@dataclass(frozen=True)
class Agent:
    """How an agent is started, which tool edits a file, and how."""

    name: str
    words: Callable[[str, str, Path], list[str]]
    environment: Callable[[str], dict[str, str]]
    tool: str
    arguments: Callable[[Path], dict[str, Any]]
    #: Files below its home and its folder that it is configured with.
    files: Callable[[str], dict[str, str]] = lambda url: {}


def codex_files(url: str) -> dict[str, str]:
    return {
        "home/.codex/config.toml": f"""
model = "{MODEL}"
model_provider = "dynamo"
[model_providers.dynamo]
name = "dynamo"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "DYNAMO_KEY"
[analytics]
enabled = false
"""
    }


def opencode_files(url: str) -> dict[str, str]:
    models = {MODEL: {"name": MODEL, "limit": {"context": 200_000, "output": 8000}}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "dynamo",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": models,
    }
    config = {
        "provider": {"dynamo": provider},
        "model": f"dynamo/{MODEL}",
        "small_model": f"dynamo/{MODEL}",
        "autoupdate": False,
        "share": "disabled",
    }
    return {"work/opencode.json": json.dumps(config)}


AGENTS = [
    Agent(
        "codex",
        lambda program, prompt, folder: [
            program,
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            prompt,
        ],
        lambda url: {"DYNAMO_KEY": "none"},
        "exec_command",
        lambda path: {"cmd": f"printf '%s' '{WORDS}' > '{path}'"},
        codex_files,
    ),
    Agent(
        "claude",
        lambda program, prompt, folder: [program, "-p", prompt, "--model", MODEL, "--allowedTools", "Write"],
        lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        "Write",
        lambda path: {"file_path": str(path), "content": WORDS},
    ),
    Agent(
        "opencode",
        lambda program, prompt, folder: [program, "run", prompt],
        lambda url: {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        "write",
        lambda path: {"filePath": str(path), "content": WORDS},
        opencode_files,
    ),
    Agent(
        "qwen",
        lambda program, prompt, folder: [
            program,
            "-p",
            prompt,
            "--auth-type",
            "openai",
            "--telemetry=false",
            "--approval-mode",
            "yolo",
        ],
        lambda url: {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL},
        "write_file",
        lambda path: {"file_path": str(path), "content": WORDS},
    ),
]


def asked(agent: Agent, url: str, folder: Path, prompt: str) -> str:
    """What an agent prints when it is asked something in a folder of its own."""
    for name, text in agent.files(url).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "home").mkdir(exist_ok=True)
    (folder / "work").mkdir(exist_ok=True)
    ended = subprocess.run(
        agent.words(str(HERE / "node_modules" / ".bin" / agent.name), prompt, folder),
        env={"HOME": str(folder / "home"), "PATH": os.environ["PATH"], "TERM": "dumb", **agent.environment(url)},
        cwd=folder / "work",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_an_agent_gets_its_answer_streamed(agent: Agent, serve: Any, tmp_path: Path, recorded: Any) -> None:
    recorder = recorded(f"{agent.name}-chat", serve(CONFIG % json.dumps([{"text": HELLO}])))

    assert HELLO in asked(agent, recorder.url, tmp_path, "Say hello.")

    assert recorder.statuses == {200}
    assert all(request["body"]["stream"] for request in recorder.asked)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_an_agent_edits_a_file_through_a_call(agent: Agent, serve: Any, tmp_path: Path, recorded: Any) -> None:
    path = tmp_path / "work" / "written.txt"
    call = json.dumps({"name": agent.tool, "arguments": agent.arguments(path)})
    script = [
        # Only after the call there is something that a tool said.
        {"match": "\ntool: ", "text": DONE},
        {"text": f"<tool_call>{call}</tool_call>"},
    ]
    recorder = recorded(f"{agent.name}-edit", serve(CONFIG % json.dumps(script)))

    printed = asked(agent, recorder.url, tmp_path, "Write the file.")

    assert DONE in printed
    assert path.read_text() == WORDS
    assert recorder.statuses == {200}
