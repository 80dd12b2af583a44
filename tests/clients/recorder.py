"""A proxy that keeps what clients send, and the form in which that is kept as a fixture."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, web

SENT = Path(__file__).parent / "sent"

#: Headers whose values say what kind of client asks; others are its secrets, its ids, or the connection's.
_HEADERS = ("accept", "anthropic-beta", "anthropic-version", "content-type", "originator")
_HOP = frozenset({"host", "content-length", "transfer-encoding", "connection", "keep-alive"})
#: Texts that are longer are other people's prose, or ids that differ from run to run: only their length is kept.
_LONGEST = 32
_WAIT = 10.0


@dataclass
class Recorder:
    """Passes everything on to `upstream`, and keeps what was asked and how it was answered."""

    upstream: str
    port: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def statuses(self) -> set[int]:
        return {asked["status"] for asked in self.asked}

    async def handle(self, http: web.Request) -> web.StreamResponse:
        body = await http.read()
        headers = {name: value for name, value in http.headers.items() if name.lower() not in _HOP}
        async with (
            ClientSession(auto_decompress=False) as session,
            session.request(http.method, self.upstream + http.path_qs, data=body, headers=headers) as answer,
        ):
            response = web.StreamResponse(status=answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in _HOP:
                    response.headers[name] = value
            await response.prepare(http)
            parts = []
            async for part in answer.content.iter_any():
                parts.append(part)
                await response.write(part)
            await response.write_eof()
        if body:
            self.asked.append(_asked(http, body) | {"status": answer.status})
            self.answers.append(b"".join(parts))
        return response


@contextmanager
def recording(upstream: str) -> Iterator[Recorder]:
    """Yield a recorder before a server, in a thread of its own."""
    recorder, ready, over = Recorder(upstream), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", recorder.handle)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        recorder.port = runner.addresses[0][1]
        ready.set()
        await over.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    try:
        assert ready.wait(_WAIT)
        yield recorder
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(_WAIT)
        loop.close()


def _asked(http: web.Request, body: bytes) -> dict[str, Any]:
    headers = {name: http.headers[name] for name in _HEADERS if name in http.headers}
    return {"path": http.path_qs, "headers": headers, "body": reduced(json.loads(body))}


def reduced(value: Any) -> Any:
    """Return a body with its shape and its short texts, which say what it is.

    Of longer texts only the length is kept.
    """
    match value:
        case dict():
            return {name: reduced(item) for name, item in value.items() if name not in ("description", "$schema")}
        case list():
            return [reduced(item) for item in value]
        case str() if len(value) > _LONGEST:
            return "x" * min(len(value), 1000)
        case _:
            return value


def by_shape(asked: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return one request of each shape: the path and the fields."""
    return {f"{each['path']} {' '.join(sorted(each['body']))}": each for each in asked}


def keep(name: str, recorder: Recorder) -> None:
    """Write what a client sent as its fixture."""
    text = json.dumps(by_shape(recorder.asked), indent=1, sort_keys=True)
    (SENT / f"{name}.json").write_text(text + "\n")


def kept(name: str) -> dict[str, dict[str, Any]]:
    """Return what a client sent when its fixture was made."""
    path = SENT / f"{name}.json"
    assert path.exists(), f"there is no fixture of {name}: DYNAMO_CLIENTS=record makes one"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return found
