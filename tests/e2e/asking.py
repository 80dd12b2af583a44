"""How tests ask a server: whole answers, streams that are read as they come, and the commands that ask it."""

from __future__ import annotations

import json
import os
import re
import socket
from typing import Any

from click.testing import CliRunner, Result
from dynamo_runtime.cli.main import cli

PATH = "/v1/chat/completions"


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "mock-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "seed": 3, **more}


def answer(server: Any, **more: Any) -> dict[str, Any]:
    """Return the whole answer to a request that succeeds."""
    status, _, body = server.request("POST", PATH, chat(**more))
    assert status == 200, body
    parsed: dict[str, Any] = json.loads(body)
    return parsed


def ask(server: Any, **more: Any) -> str:
    """Return the text of a whole answer."""
    text: str = answer(server, **more)["choices"][0]["message"]["content"]
    return text


def dynamo(*words: str, **env: str) -> Result:
    """Run a command that only asks, in this process, whose own settings it does not see."""
    others: dict[str, str | None] = {name: None for name in os.environ if name.startswith("DYN_")}
    return CliRunner().invoke(cli, words, prog_name="dynamo", env=others | env, catch_exceptions=False)


def read_to_end(connection: socket.socket) -> bytes:
    """Return all that comes until the other side has closed the connection, however it does."""
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionError:
        pass
    finally:
        connection.close()
    return received


def text_of(received: bytes) -> str:
    """Return the text of a whole stream of one choice: a character for each token of a mocker without a tokenizer.

    How many events bring it depends on how busy the machine is.
    """
    return "".join(delta.get("content") or "" for delta in _deltas(received))


def _deltas(received: bytes) -> list[dict[str, Any]]:
    lines = [line[6:] for line in received.decode().split("\n") if line.startswith("data: {")]
    return [choice["delta"] for line in lines for choice in json.loads(line).get("choices", [])]


class Stream:
    """One answer in events."""

    def __init__(self, server: Any, **more: Any) -> None:
        self.connection = server.raw("POST", PATH, chat(stream=True, **more))
        self.received = b""

    def begun(self) -> None:
        """Return when there is some text: of a busy frontend one event may hold much of it."""
        while b'"content"' not in self.received:
            assert self._more(), self.received

    @property
    def request_id(self) -> str:
        """The server's id of the request, once the stream has begun."""
        found = re.search(rb"x-request-id: (\S+)", self.received, re.IGNORECASE)
        assert found, self.received
        return found[1].decode()

    def close(self) -> None:
        """Close the client."""
        self.connection.close()

    def rest(self) -> bytes:
        """Return all that came, when nothing more does."""
        while self._more():
            pass
        self.connection.close()
        return self.received

    def deltas(self) -> list[dict[str, Any]]:
        """Return what the choices of a stream say, once it has ended well."""
        received = self.rest()
        assert b"data: [DONE]" in received, received[-500:]
        return _deltas(received)

    def text(self) -> str:
        """Return the text of a stream, once it has ended well."""
        return "".join(delta.get("content") or "" for delta in self.deltas())

    def _more(self) -> bool:
        data = self.connection.recv(65536)
        self.received += data
        return bool(data)
