"""Hostile request bodies: the CPU that each costs a frontend, how long it holds the loop, and the memory it takes."""

import argparse
import contextlib
import gzip
import http.client
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from benchmarks.meters import children_of, cpu_seconds

ROOT: Final = Path(__file__).resolve().parents[1]
MODEL: Final = "m"
MB: Final = 1_000_000
#: What may be seen: seconds of the longest hold, and MiB above the idle frontend.
MOST_HOLD, MOST_MEMORY = 0.1, 400
#: Seconds between two probes, for which the memory after a body is waited for, and for an answer.
PACE, REST, PATIENCE = 0.005, 4.0, 120.0


@dataclass(frozen=True, slots=True)
class Body:
    """One request body: its route, its bytes when asked for, and whether it travels packed."""

    name: str
    path: str
    make: Callable[[], bytes]
    packed: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """What a body did: statuses, the field that the error names, and the costs in seconds and MiB."""

    statuses: list[int]
    field: str
    cpu: float
    hold: float
    peak: float
    lasting: float

    @property
    def good(self) -> bool:
        """Whether the bounds were kept and every answer is a client's error."""
        return set(self.statuses) <= {400, 404, 413, 422} and self.hold <= MOST_HOLD and self.peak <= MOST_MEMORY


CONFIG: Final = """
workers: {{w: {{model: {{name: m, path: {folder}}}, engine: {{use: mocker, speedup_ratio: 0}}}}}}
transport: {{use: tcp}}
discovery: {{use: file, path: {discovery}}}
"""

TEXTS: Final[dict[str, Callable[[int], str]]] = {
    "letters": lambda size: "a" * size,
    "spaces": lambda size: " " * size,
    "newlines": lambda size: "\n" * (size // 2),
    "digits": lambda size: "7" * size,
    "emoji": lambda size: "\U0001f600" * (size // 4),
    "one word": lambda size: "".join(chr(97 + (at * at + at // 7) % 26) for at in range(100_000)) * (size // 100_000),
    "words": lambda size: "the quick brown fox " * (size // 20),
    "quotes": lambda size: '"' * (size // 2),
}


def _json(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, **fields}, ensure_ascii=False, separators=(",", ":")).encode()


def _user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


#: The fields of every API that hold text.
FIELDS: Final[dict[str, tuple[str, Callable[[str], dict[str, Any]]]]] = {
    "chat": ("/v1/chat/completions", lambda text: {"messages": _user(text)}),
    "chat part": ("/v1/chat/completions", lambda text: {"messages": _user([{"type": "text", "text": text}])}),
    "prompt": ("/v1/completions", lambda text: {"prompt": text}),
    "prompts": ("/v1/completions", lambda text: {"prompt": [text[: len(text) // 8]] * 8}),
    "responses": ("/v1/responses", lambda text: {"input": text}),
    "input_tokens": ("/v1/responses/input_tokens", lambda text: {"input": text}),
    "messages": ("/v1/messages", lambda text: {"messages": _user(text), "max_tokens": 8}),
    "system": ("/v1/messages", lambda text: {"system": text, "messages": _user("Hi"), "max_tokens": 8}),
    "count_tokens": ("/v1/messages/count_tokens", lambda text: {"messages": _user(text)}),
    "tokenize": ("/tokenize", lambda text: {"prompt": text}),
    "explain": ("/route/explain", lambda text: {"messages": _user(text)}),
}

_CALL: Final = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}


def _tools(count: int, schema: Any) -> bytes:
    function = {"name": "f", "parameters": schema}
    tools = [{"type": "function", "function": {**function, "name": f"f{at}"}} for at in range(count)]
    return _json(messages=_user("Hi"), tools=tools)


def _arguments(text: str) -> bytes:
    call = {**_CALL, "function": {"name": "f", "arguments": text}}
    return _json(messages=[*_user("Hi"), {"role": "assistant", "tool_calls": [call]}])


#: Bodies that are hostile by their shape.
SHAPES: Final[dict[str, tuple[str, Callable[[], bytes]]]] = {
    "escapes, then brackets": ("/v1/chat/completions", lambda: b'\\"' * MB + b"[" * 101),
    "an escape that ends nowhere": ("/v1/chat/completions", lambda: b'{"a":"' + b'\\"' * (20 * MB)),
    "lists in lists": ("/v1/chat/completions", lambda: b'{"model":"m","messages":' + b"[" * (20 * MB)),
    "objects in objects": ("/v1/chat/completions", lambda: b'{"model":"m","metadata":' + b'{"a":' * (4 * MB)),
    "messages": ("/v1/chat/completions", lambda: _json(messages=_user("Hi") * 49_000)),
    "more messages": ("/v1/chat/completions", lambda: _json(messages=_user("Hi") * MB)),
    "parts": ("/v1/chat/completions", lambda: _json(messages=_user([{"type": "text", "text": "x"}] * 49_000))),
    "tools": ("/v1/chat/completions", lambda: _tools(12_000, {})),
    "more tools": ("/v1/chat/completions", lambda: _tools(300_000, {})),
    "a large schema": (
        "/v1/chat/completions",
        lambda: _tools(1, {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(45_000)}}),
    ),
    "a large response format": (
        "/v1/chat/completions",
        lambda: _json(
            messages=_user("Hi"),
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": ["x"] * 2 * MB}}},
        ),
    ),
    "arguments": ("/v1/chat/completions", lambda: _arguments(json.dumps({"a": "x" * (40 * MB)}))),
    "deep arguments": ("/v1/chat/completions", lambda: _arguments("[" * (20 * MB))),
    "quotes in arguments": ("/v1/chat/completions", lambda: _arguments('\\"' * (9 * MB) + "[" * 101)),
    "token ids": ("/v1/completions", lambda: _json(prompt=[1] * 999_000)),
    "more token ids": ("/v1/completions", lambda: _json(prompt=[1] * (20 * MB))),
    "ids to decode": ("/detokenize", lambda: _json(tokens=[10**9] * 999_000)),
    "stop strings": ("/v1/completions", lambda: _json(prompt="x", stop=["a" * MB] * 40)),
    "fields": ("/v1/chat/completions", lambda: _json(messages=_user("Hi"), **{f"f{at}": 1 for at in range(900_000)})),
    "the same field": ("/v1/chat/completions", lambda: b'{"model":"m",' + b'"a":1,' * (6 * MB) + b'"a":1}'),
    "a long number": ("/v1/completions", lambda: b'{"model":"m","prompt":"x","seed":' + b"9" * (40 * MB) + b"}"),
    "a long model": ("/v1/completions", lambda: b'{"model":"' + b"m" * (40 * MB) + b'","prompt":"x"}'),
    "white space": ("/v1/completions", lambda: b" " * (40 * MB) + b"{}"),
    "documents": ("/v1/rerank", lambda: _json(query="x", documents=["y" * 40_000] * 1000)),
    "items": ("/v1/responses", lambda: _json(input=[{"type": "message", "role": "user", "content": "Hi"}] * 49_000)),
    "blocks": ("/v1/messages", lambda: _json(messages=_user([{"type": "text", "text": "x"}] * 49_000), max_tokens=8)),
}


def bodies(size: int = 40 * MB) -> Iterator[Body]:
    """Return all bodies: every kind of text in a chat, two kinds in other fields, plain and packed, then the shapes."""

    def text(kind: str, field: str) -> bytes:
        return _json(**FIELDS[field][1](TEXTS[kind](size)))

    for number, kind in enumerate(TEXTS):
        yield Body(f"chat: {kind}", FIELDS["chat"][0], partial(text, kind, "chat"), packed=number % 2 == 0)
        yield Body(f"prompt: {kind}", FIELDS["prompt"][0], partial(text, kind, "prompt"), packed=number % 2 == 1)
    for number, (field, (path, _)) in enumerate(FIELDS.items()):
        if field not in ("chat", "prompt"):
            for kind in ("letters", "words"):
                packed = (kind == "letters") == (number % 2 == 0)
                yield Body(f"{field}: {kind}", path, partial(text, kind, field), packed=packed)
    for name, (path, make) in SHAPES.items():
        yield Body(name, path, make, packed=name.startswith(("more", "lists", "white", "an escape")))


def _status(pid: int, key: str) -> float:
    """Return a line of /proc/PID/status, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise LookupError(key)


def probe(port: int, pipe: Connection) -> None:
    """Ask for /live over and over; answer each word with the longest time since the last, less the own stall."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    longest = 0.0
    while True:
        begun = time.monotonic()
        connection.request("GET", "/live")
        connection.getresponse().read()
        took = time.monotonic() - begun
        begun = time.monotonic()
        time.sleep(PACE)
        # A process that only sleeps stalls as long when the machine is busy.
        longest = max(longest, took - max(0.0, time.monotonic() - begun - PACE))
        if pipe.poll():
            if pipe.recv() == "end":
                return
            pipe.send(longest)
            longest = 0.0


def _send(port: int, body: Body, data: bytes, out: list[tuple[int, str]]) -> None:
    headers = {"content-type": "application/json"} | ({"content-encoding": "gzip"} if body.packed else {})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    with contextlib.closing(connection):
        # A body that is too large is answered before all of it was sent.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request("POST", body.path, data, headers)
        try:
            response = connection.getresponse()
            text = response.read()
        except OSError as error:
            out.append((0, type(error).__name__))
            return
    try:
        told = json.loads(text)["error"]
        out.append((response.status, str(told.get("param") or told.get("message", ""))[:40]))
    except (KeyError, TypeError, ValueError, AttributeError):
        out.append((response.status, text[:40].decode(errors="replace")))


def _cpu(pid: int) -> float:
    return sum(cpu_seconds(one) for one in (pid, *children_of(pid)))


def measure(body: Body, port: int, pid: int, probe: Connection, at_once: int, idle: float) -> Seen:
    """Send a body so many times at once, and see what that does to the frontend `pid`."""
    data = body.make()
    if body.packed:
        data = gzip.compress(data, 5)
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    probe.send("begin")
    probe.recv()
    before = _cpu(pid)
    answers: list[tuple[int, str]] = []
    threads = [threading.Thread(target=_send, args=(port, body, data, answers)) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cpu = _cpu(pid) - before
    probe.send("end of body")
    hold = probe.recv()
    peak = _status(pid, "VmHWM") - idle
    until = time.monotonic() + REST
    while (lasting := _status(pid, "VmRSS") - idle) > MOST_MEMORY / 8 and time.monotonic() < until:
        time.sleep(0.1)
    return Seen(sorted(status for status, _ in answers), answers[0][1], cpu, hold, peak, lasting)


@contextlib.contextmanager
def served(python: str, folder: Path) -> Iterator[tuple[int, int]]:
    """Serve a model with a small context over processes; gives the port and the frontend's pid."""
    from dynamo_testing.servers.ports import free_port
    from dynamo_testing.tiny_model import make_tokenizer_folder

    model = make_tokenizer_folder(folder / "model")
    config = folder / "dynamo.yaml"
    config.write_text(CONFIG.format(folder=model, discovery=folder / "discovery"))
    port = free_port()
    with (folder / "log").open("wb") as log:
        command = [str(Path(python).with_name("dynamo")), "serve", str(config), "--http-port", str(port)]
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        _until_ready(port, server, folder / "log")
        yield port, next(pid for pid in children_of(server.pid) if _is_frontend(pid))
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(5)


def _is_frontend(pid: int) -> bool:
    return b"--only\0frontend" in Path(f"/proc/{pid}/cmdline").read_bytes()


def _until_ready(port: int, server: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and server.poll() is None:
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(log.read_text())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this measurement."""
    parser.add_argument("--python", default=sys.executable, help="the interpreter whose `dynamo` is measured")
    parser.add_argument("--at-once", type=int, default=4, help="how often each body is sent at once (default 4)")
    parser.add_argument("--size", type=int, default=40 * MB, help="bytes of a text (default 40 MB)")
    parser.add_argument("--only", default="", help="bodies whose name holds this")


def run_bodies(options: argparse.Namespace) -> int:
    """Measure every body; exit code 1 if one breaks a bound or gets no error of a client."""
    with tempfile.TemporaryDirectory() as folder, served(options.python, Path(folder)) as (port, pid):
        time.sleep(1)
        idle = _status(pid, "VmRSS")
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        beside = multiprocessing.get_context("spawn").Process(target=probe, args=(port, theirs), daemon=True)
        beside.start()
        print(f"{options.at_once} at once; idle {idle:.0f} MiB; CPU in s, holds in ms, memory in MiB above idle")
        print(f"{'body':<32}{'status':>12}{'cpu':>8}{'hold':>7}{'peak':>7}{'left':>7}  field")
        bad = count = 0
        for body in bodies(options.size):
            if options.only not in body.name:
                continue
            count += 1
            seen = measure(body, port, pid, ours, options.at_once, idle)
            bad += not seen.good
            name, statuses = body.name + " (gzip)" * body.packed, "/".join(map(str, sorted(set(seen.statuses))))
            print(
                f"{name:<32}{statuses:>12}"
                f"{seen.cpu:>8.2f}{seen.hold * 1000:>7.0f}{seen.peak:>7.0f}{seen.lasting:>7.0f}"
                f"  {seen.field}{'' if seen.good else '  <--'}",
                flush=True,
            )
        ours.send("end")
        beside.join(5)
        print(f"{count} bodies, {bad} beyond the bounds of {MOST_HOLD * 1000:g} ms and {MOST_MEMORY} MiB")
    return bool(bad)
