"""What hostile clients do to a frontend, over and over. Run as a program, it is one such client: a process of its own.

A new attack is one more entry of `ATTACKS`: the test takes it up by its name. `strike` need not speak HTTP; the target
has the folder in which discovery keeps its records too.
"""

from __future__ import annotations

import gzip
import json
import socket
import string
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from dynamo_http.auth import hash_of

KEY = "the key of a tenant without trust"
CHAT = "/v1/chat/completions"
GIGABYTE = 1 << 30
#: Keys are in use: without one a client may ask for health only.
GUARDED = f"""
auth: {{keys: [{{id: tenant, hash: "{hash_of(KEY)}"}}]}}
admin: {{port: 0}}
"""
#: Seconds that a strike waits for an answer.
PATIENCE = 30.0


@dataclass(frozen=True)
class Target:
    """A system under attack: the frontend's port, and the folder of its discovery."""

    port: int
    discovery: Path


@dataclass(frozen=True)
class Attack:
    """What is done again and again on each connection, and what the config of the target says in addition."""

    strike: Callable[[Target], None]
    config: str = GUARDED
    connections: int = 2
    #: How many times as long as without it 99 of 100 probes may take; None where only the seconds are bounded.
    slowdown: float | None = None


def bomb(encoding: str) -> bytes:
    """Return a gigabyte of zeros, packed a thousandfold."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31 if encoding == "gzip" else 15)
    piece = bytes(1 << 24)
    parts = [packer.compress(piece) for _ in range(GIGABYTE // len(piece))]
    return b"".join([*parts, packer.flush()])


@cache
def _bomb(encoding: str) -> bytes:
    return bomb(encoding)


def _head(method: str, path: str, *lines: str) -> bytes:
    fields = (f"{method} {path} HTTP/1.1", "host: x", "content-type: application/json", *lines, "", "")
    return "\r\n".join(fields).encode()


def _exchange(target: Target, request: bytes) -> None:
    """Send a request on a connection of its own and read until the server closes it."""
    with socket.create_connection(("127.0.0.1", target.port), PATIENCE) as connection, suppress(OSError):
        connection.sendall(request)
        while connection.recv(1 << 20):
            pass


def _unpacks(
    target: Target, method: str, path: str, encoding: str, *, key: bool = False, chunked: bool = False
) -> None:
    body = _bomb(encoding)
    lines = [f"content-encoding: {encoding}", "connection: close"]
    if key:
        lines.append(f"authorization: Bearer {KEY}")
    if chunked:
        pieces = [body[at : at + 65536] for at in range(0, len(body), 65536)]
        body = b"".join([*(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces), b"0\r\n\r\n"])
        lines.append("transfer-encoding: chunked")
    else:
        lines.append(f"content-length: {len(body)}")
    _exchange(target, _head(method, path, *lines) + body)


def _asks(target: Target, **fields: object) -> None:
    """Send a request of a tenant, and throw its answer away."""
    body = json.dumps(
        {"model": "mock-model", "messages": [{"role": "user", "content": "Hi"}], **fields}, separators=(",", ":")
    ).encode()
    lines = (f"content-length: {len(body)}", f"authorization: Bearer {KEY}", "connection: close")
    _exchange(target, _head("POST", CHAT, *lines) + body)


@cache
def _large(kind: str) -> bytes:
    """Return a body with much of one thing, which is refused once it is read, unpacked, parsed and checked."""
    if kind == "ids":
        return json.dumps({"model": "mock-model", "prompt": list(range(100, 1099)) * 1000}).encode()
    text = "a" * (44_000_000 if kind == "gzip" else 40_000_000)
    body = json.dumps({"model": "mock-model", "prompt": "Hi", "user": text}).encode()
    return gzip.compress(body, 1) if kind == "gzip" else body


def _sends_much(target: Target, kind: str) -> None:
    body = _large(kind)
    lines = [f"content-length: {len(body)}", f"authorization: Bearer {KEY}", "connection: close"]
    if kind == "gzip":
        lines.append("content-encoding: gzip")
    _exchange(target, _head("POST", "/v1/completions", *lines) + body)


def _stops(length: int) -> list[str]:
    """Return thirty-two stop strings that begin with all that an answer may hold, and never come."""
    letters = string.printable[:32]
    return [letter + "~" * (length - 1) for letter in letters]


#: Of attacks on HTTP those that need a key come last.
ATTACKS: dict[str, Attack] = {
    "a bomb without a key": Attack(partial(_unpacks, method="POST", path=CHAT, encoding="gzip")),
    "a bomb to no route": Attack(partial(_unpacks, method="POST", path="/no/such/route", encoding="deflate")),
    "a bomb in chunks with a liveness probe": Attack(
        partial(_unpacks, method="GET", path="/live", encoding="gzip", chunked=True)
    ),
    "a bomb with a key": Attack(partial(_unpacks, method="POST", path=CHAT, encoding="gzip", key=True)),
    "stop strings of 300 KB": Attack(partial(_asks, stop=_stops(300_000), n=8, max_tokens=2000)),
    "the longest stop strings": Attack(partial(_asks, stop=_stops(256), n=8, max_tokens=2000)),
    "scores of long answers": Attack(partial(_asks, max_tokens=8000, n=8, logprobs=True, top_logprobs=20)),
    "scores of many answers": Attack(partial(_asks, max_tokens=500, n=128, logprobs=True, top_logprobs=20)),
    "ten bodies of 999,000 token ids": Attack(partial(_sends_much, kind="ids"), connections=10, slowdown=3),
    "thirty packed bodies of 44 MB": Attack(partial(_sends_much, kind="gzip"), connections=30, slowdown=3),
    "four bodies of 40 MB": Attack(partial(_sends_much, kind="plain"), connections=4, slowdown=3),
    "scores in a stream of many answers": Attack(
        partial(_asks, max_tokens=500, n=128, logprobs=True, top_logprobs=20, stream=True)
    ),
}


def _say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    """Strike on several connections at once; write how often when the time is over."""
    name, port, discovery, connections, seconds = sys.argv[1:]
    attack, target = ATTACKS[name], Target(int(port), Path(discovery))
    attack.strike(target)
    _say("begun")
    end = time.monotonic() + float(seconds)
    strikes: list[None] = []

    def keep_striking() -> None:
        while time.monotonic() < end:
            attack.strike(target)
            strikes.append(None)

    threads = [threading.Thread(target=keep_striking) for _ in range(int(connections))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _say(str(len(strikes)))


if __name__ == "__main__":
    main()
