"""Coding agents as their users start them, with nothing changed but the address."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.conftest import HERE

WORDS = "Written by the agent."


@dataclass(frozen=True)
class Agent:
    """How an agent is started, which tool edits a file, and how."""

    name: str
    #: The command of it that answers one prompt.
    command: tuple[str, ...]
    #: What follows its name for a prompt and a model.
    words: Callable[[str, str], list[str]]
    #: What stands before that where it goes on with the last session of the folder.
    resume: tuple[str, ...]
    environment: Callable[[str, str], dict[str, str]]
    tool: str
    arguments: Callable[[Path], dict[str, Any]]
    #: Files below its home and its folder that it is configured with.
    files: Callable[[str, str], dict[str, str]] = lambda url, model: {}

    def __str__(self) -> str:
        return self.name


def codex_files(url: str, model: str) -> dict[str, str]:
    return {
        "home/.codex/config.toml": f"""
model = "{model}"
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


def opencode_files(url: str, model: str) -> dict[str, str]:
    models = {model: {"name": model, "limit": {"context": 200_000, "output": 8000}}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "dynamo",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": models,
    }
    config = {
        "provider": {"dynamo": provider},
        "model": f"dynamo/{model}",
        "small_model": f"dynamo/{model}",
        "autoupdate": False,
        "share": "disabled",
    }
    return {"work/opencode.json": json.dumps(config)}


AGENTS = [
    Agent(
        "codex",
        ("exec",),
        lambda prompt, model: [
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            prompt,
        ],
        ("resume", "--last"),
        lambda url, model: {"DYNAMO_KEY": "none"},
        "exec_command",
        lambda path: {"cmd": f"printf '%s' '{WORDS}' > '{path}'"},
        codex_files,
    ),
    Agent(
        "claude",
        (),
        lambda prompt, model: ["-p", prompt, "--model", model, "--allowedTools", "Write", "Read", "Edit", "Bash"],
        ("--continue",),
        lambda url, model: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_SMALL_FAST_MODEL": model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        "Write",
        lambda path: {"file_path": str(path), "content": WORDS},
    ),
    Agent(
        "opencode",
        ("run",),
        lambda prompt, model: [prompt],
        ("-c",),
        lambda url, model: {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        "write",
        lambda path: {"filePath": str(path), "content": WORDS},
        opencode_files,
    ),
    Agent(
        "qwen",
        (),
        lambda prompt, model: [
            "-p",
            prompt,
            "--auth-type",
            "openai",
            "--telemetry=false",
            "--approval-mode",
            "yolo",
        ],
        ("--continue",),
        lambda url, model: {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": model},
        "write_file",
        lambda path: {"file_path": str(path), "content": WORDS},
    ),
]


def asked(agent: Agent, url: str, model: str, folder: Path, prompt: str, *, resume: bool = False) -> str:
    """Return what an agent prints when it is asked something in a folder of its own."""
    for name, text in agent.files(url, model).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "home").mkdir(exist_ok=True)
    (folder / "work").mkdir(exist_ok=True)
    program = str(HERE / "node_modules" / ".bin" / agent.name)
    words = [program, *agent.command, *(agent.resume if resume else ()), *agent.words(prompt, model)]
    environment = {"HOME": str(folder / "home"), "PATH": os.environ["PATH"], **agent.environment(url, model)}
    return printed(words, environment, folder / "work")


def printed(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> str:
    """Return what a program prints that runs in a folder without a terminal, and ends well."""
    ended = subprocess.run(
        words,
        env={"TERM": "dumb", **environment},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout
