"""Coding agents as their users start them, with nothing changed but the address: each answers, and edits a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.coding_agents import AGENTS, WORDS, Agent, asked

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

MODEL = "scripted"
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


@pytest.mark.parametrize("agent", AGENTS, ids=str)
def test_an_agent_gets_its_answer_streamed(agent: Agent, serve: Any, tmp_path: Path, recorded: Any) -> None:
    recorder = recorded(f"{agent.name}-chat", serve(CONFIG % json.dumps([{"text": HELLO}])))

    assert HELLO in asked(agent, recorder.url, MODEL, tmp_path, "Say hello.")

    assert recorder.statuses == {200}
    assert all(request["body"]["stream"] for request in recorder.asked)


@pytest.mark.parametrize("agent", AGENTS, ids=str)
def test_an_agent_edits_a_file_through_a_call(agent: Agent, serve: Any, tmp_path: Path, recorded: Any) -> None:
    path = tmp_path / "work" / "written.txt"
    call = json.dumps({"name": agent.tool, "arguments": agent.arguments(path)})
    script = [
        # Only after the call there is something that a tool said.
        {"match": "\ntool: ", "text": DONE},
        {"text": f"<tool_call>{call}</tool_call>"},
    ]
    recorder = recorded(f"{agent.name}-edit", serve(CONFIG % json.dumps(script)))

    printed = asked(agent, recorder.url, MODEL, tmp_path, "Write the file.")

    assert DONE in printed
    assert path.read_text() == WORDS
    assert recorder.statuses == {200}
