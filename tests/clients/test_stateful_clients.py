"""SDKs that leave it to the server to remember: by the last response, by a conversation, and by names of items."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import HERE
from tests.clients.programs_of import NODE, OWN, command, printed
from tests.clients.test_sdks import CONFIG, EXPECTED, HELLO, Program

#: What is asked after a call and its result, of which the client does not send a word again.
WANTED = {**EXPECTED, "resumed": HELLO}


def that_remembers(section: str) -> str:
    return CONFIG % f"{{use: openai, response_store: {section}}}"


def is_answered(program: Program, url: str, home: Path) -> None:
    file = str(HERE / "programs" / program.file)
    (line,) = printed(command(program.environment), file, url, home=home).splitlines()

    found = json.loads(line)
    assert "".join(found.pop("stream", [HELLO])) == HELLO
    assert found == {name: WANTED[name] for name in found}
    assert found.keys() >= {"tools", "streamed_tools"}


@pytest.mark.parametrize("store", [pytest.param("memory", marks=pytest.mark.full), "sqlite"])
def test_the_official_sdk_sends_only_new_items(store: str, serve: Any, tmp_path: Path) -> None:
    section = "{use: memory}" if store == "memory" else f"{{use: sqlite, path: {tmp_path / 'responses.db'}}}"
    server = serve(that_remembers(section))

    is_answered(Program("openai_remembered.py", OWN), server.url, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "program", [Program("ai_openai.js", NODE), Program("openai_agents_remembered.py", "sdks")], ids=str
)
def test_an_sdk_that_remembers_gets_its_answers(program: Program, serve: Any, tmp_path: Path) -> None:
    is_answered(program, serve(that_remembers("{use: memory}")).url, tmp_path)
