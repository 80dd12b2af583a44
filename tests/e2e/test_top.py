"""`dynamo top` in a real terminal: what one sees, at the sizes that people have."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

CONFIG = """
extensions: [{use: feed}]
workers:
  mock: {model: {name: mock-model}, engine: {use: mocker}, replicas: 2}
"""

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux; on Debian: apt-get install tmux"),
]


class Terminal:
    """A terminal of a size, which runs `dynamo top`."""

    def __init__(self, name: str, width: int, height: int, *options: str) -> None:
        self._name = name
        command = [sys.executable, "-m", "dynamo_runtime.cli.main", "top", *options]
        self._tmux("new-session", "-d", "-s", name, "-x", str(width), "-y", str(height), *command)

    def _tmux(self, *words: str) -> str:
        found = subprocess.run(["tmux", "-L", self._name, *words], capture_output=True, text=True, timeout=10)
        return found.stdout

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", "-t", self._name, *keys)

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p", "-t", self._name)

    def until(self, *texts: str) -> str:
        """What is on the screen, once it has all texts."""
        deadline = time.monotonic() + 30
        while not all(text in (shown := self.screen()) for text in texts):
            assert time.monotonic() < deadline, shown
            time.sleep(0.1)
        return shown

    def close(self) -> None:
        self._tmux("kill-server")


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def make(*args: Any) -> Terminal:
        opened.append(Terminal(f"dynamo-top-{time.monotonic_ns()}", *args))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_workers_and_requests_are_on_the_screen(
    serve: Any, terminal: Callable[..., Terminal], width: int, height: int
) -> None:
    server = serve(CONFIG)
    body = {"model": "mock-model", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 3}
    request_id = server.request("POST", "/v1/chat/completions", body)[1]["x-request-id"]

    shown = terminal(width, height, "--url", server.url)

    told = shown.until("2/2 workers", "mock-0", "mock-1", "q Quit")
    assert max(map(len, told.splitlines())) <= width
    assert len(told.splitlines()) <= height
    shown.press("3")
    shown.until("recent: 1 of 1")
    shown.press("Enter")
    shown.until(request_id, "admitted after", "first token")
    shown.press("q")
    shown.until("recent: 1 of 1")
