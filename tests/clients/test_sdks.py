"""SDKs and frameworks as programs of their users: chats, streams, tools and structured answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import HERE
from tests.clients.programs_of import NODE, OWN, command, printed

CONFIG = """
frontend: %s
workers:
  mock:
    model: {name: mock-model, tool_call_parser: hermes}
    engine:
      use: mocker
      output: script
      speedup_ratio: 0
      script:
        # What is asked last of a conversation is the first to look for.
        - {match: "Say hello", text: "Hello from the script."}
        # The result of the call: the client has called the function and told what it returned.
        - {match: "7 degrees in Oslo", text: "It is 7 degrees in Oslo."}
        - {match: "weather in Oslo", text: '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'}
        # A call before a value.
        - {match: "9 degrees in Bergen", text: '{"name": "Bergen", "degrees": 9}'}
        - {match: "Measure Bergen", text: '<tool_call>{"name": "weather", "arguments": {"city": "Bergen"}}</tool_call>'}
        # Frameworks that have a call hold the answer name its function; the template of the mocker does not show it.
        - {match: "Call final_result", text: '<tool_call>{"name": "final_result", "arguments": {"name": "Oslo", "degrees": 7}}</tool_call>'}
        - {match: "Call Place", text: '<tool_call>{"name": "Place", "arguments": {"name": "Oslo", "degrees": 7}}</tool_call>'}
        - {match: "Describe Oslo", text: '{"name": "Oslo", "degrees": 7}'}
    grace_period: 0
"""  # noqa: E501

#: That of Ollama is served only where it is named.
APIS = "[{use: openai}, {use: responses}, {use: anthropic}, {use: ollama}]"
HELLO = "Hello from the script."
PLACE = {"name": "Oslo", "degrees": 7}
EXPECTED = {
    "chat": HELLO,
    "tools": "It is 7 degrees in Oslo.",
    "streamed_tools": "It is 7 degrees in Oslo.",
    "structured": PLACE,
    "structured_by_call": PLACE,
    "structured_after_call": {"name": "Bergen", "degrees": 9},
    "structured_as_json": PLACE,
    "structured_stream": PLACE,
    "structured_object": PLACE,
    # Of three documents the first two with a word of the question, equally good; in the forms of vLLM, Jina and Cohere.
    "reranked": [[1, 2]] * 3,
    # The bytes of what the template makes of it: `user: Say hello.` and `assistant: `.
    "counted": 28,
}


@dataclass(frozen=True)
class Program:
    """A program and the environment that its packages are in."""

    file: str
    environment: str
    tools: bool = True

    def __str__(self) -> str:
        return self.file.replace(".", "_")


#: Their packages are in the environment of all tests: they run in `make test` too.
HERE_ALREADY = [
    Program(f"{name}.py", OWN) for name in ("openai_chat", "openai_responses", "anthropic_messages", "ollama_chat")
]
OTHERS = [
    *(Program(f"{name}.py", "sdks") for name in ("langchain_chat", "pydantic_ai_agents", "openai_agents", "llm_chat")),
    Program("litellm_chat.py", "sdks-openai-2"),
    Program("instructor_chat.py", "sdks-openai-2", tools=False),
    Program("llama_index_chat.py", "sdks-openai-2"),
    *(
        Program(f"{name}.js", NODE)
        for name in ("openai_chat", "openai_responses", "anthropic_messages", "ollama_chat", "ai")
    ),
]


@pytest.fixture(scope="module")
def server(serve_for_module: Any) -> Any:
    return serve_for_module(CONFIG % APIS)


def is_answered(program: Program, recorder: Any, home: Path) -> None:
    file = str(HERE / "programs" / program.file)
    lines = printed(command(program.environment), file, recorder.url, home=home).splitlines()

    shown = set()
    for line in lines:
        found = json.loads(line)
        shown |= found.keys()
        stream = found.pop("stream", None)
        if stream is not None:
            assert "".join(stream) == HELLO
            assert len(stream) > 5
        assert found == {name: EXPECTED[name] for name in found}
    assert {"chat", "stream", "structured", *(["tools"] if program.tools else [])} <= shown
    for asked in recorder.asked:
        # The tool runners of Anthropic ask for a thread, and go on without one when it is refused.
        assert asked["status"] == (400 if "thread" in asked["body"] else 200)


@pytest.mark.parametrize("program", HERE_ALREADY, ids=str)
def test_an_official_sdk_gets_its_answers(program: Program, server: Any, tmp_path: Path, recorded: Any) -> None:
    is_answered(program, recorded(str(program), server), tmp_path)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", OTHERS, ids=str)
def test_an_sdk_or_framework_gets_its_answers(program: Program, server: Any, tmp_path: Path, recorded: Any) -> None:
    is_answered(program, recorded(str(program), server), tmp_path)
