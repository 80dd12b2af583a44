"""The floor: the least that an HTTP front and a token worker can cost in Python, with none of the product's duties.

`python -m benchmarks.probe worker --port P [--step-ms X]`                gives every running stream a token each step
`python -m benchmarks.probe front --port P --model-dir D --worker-port W` HTTP in front of such a worker: two processes
`python -m benchmarks.probe front --port P --model-dir D --inproc [--step-ms X]`  the same in one process

The front parses HTTP and JSON, writes the conversation with a fixed template, encodes it with the tokenizer of the
model folder, and looks the text of each token up in a table. Each token is written on its own, as it comes. There is
no template engine, validation, routing, admission, cancellation, metrics or limit: every request is trusted. The
answers have the shape of the product's, so the same load generator reads them.

Between the processes travels `u32 length` and a payload, little-endian. A request is `u32 id, u32 tokens to make`
and the prompt's token ids; an answer is u32 pairs `id, token`, one pair for each running stream, where the top bit of
a token marks the last of its stream.
"""

from __future__ import annotations  # array takes no type argument at run time before Python 3.12

import argparse
import asyncio
import itertools
import re
import struct
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol, cast

import msgspec

from benchmarks.loops import run

LAST: Final = 0x8000_0000
CONNECT_TRIES: Final = 100

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_REQUEST = struct.Struct("<II")
_U32 = struct.Struct("<I")
_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
#: A worker makes tokens from `FIRST_TOKEN` on, `TOKENS` different ones: behind the special tokens and the bytes.
FIRST_TOKEN: Final = 260
TOKENS: Final = 500


class _Message(msgspec.Struct):
    role: str
    content: str


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Body(msgspec.Struct):
    messages: list[_Message]
    model: str = ""
    max_tokens: int = 16
    stream: bool = False
    stream_options: _StreamOptions | None = None


_body = msgspec.json.Decoder(_Body)


class Text(Protocol):
    """What a front needs of a model. `pieces` holds the text of each token as it stands within JSON quotes."""

    @property
    def pieces(self) -> Sequence[bytes]: ...

    def encode(self, text: str) -> list[int]: ...


class ModelText:
    """The text side of a model folder, by the library `tokenizers`."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._library = Tokenizer.from_file(str(folder / "tokenizer.json"))
        decode, size = self._library.decode, self._library.get_vocab_size()
        self.pieces = [msgspec.json.encode(decode([token], skip_special_tokens=False))[1:-1] for token in range(size)]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text that writes its special tokens itself."""
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids


class Framed(asyncio.Protocol):
    """Length-prefixed frames; `on_read` gets all whole frames of one read together."""

    def __init__(self, on_read: Callable[[Framed, list[bytes]], None]) -> None:
        self._on_read = on_read
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but ancestry

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        frames: list[bytes] = []
        at, end = 0, len(data)
        while end - at >= 4:
            stop = at + 4 + int.from_bytes(data[at : at + 4], "little")
            if stop > end:
                break
            frames.append(data[at + 4 : stop])
            at = stop
        self._rest = data[at:]
        if frames:
            self._on_read(self, frames)

    def send(self, payload: bytes) -> None:
        """Write one frame; nothing happens when the connection is gone."""
        if self._transport is not None:
            self._transport.write(_U32.pack(len(payload)) + payload)

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()


class Worker:
    """Steps while streams run: each step hands `emit` the pairs of all of them. `step_s` 0 = a step each loop turn."""

    def __init__(self, emit: Callable[[array[int]], None], step_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._emit = emit
        self._step_s = step_s
        self._running: dict[int, int] = {}
        self._made = 0
        self._next_at = 0.0

    def add(self, request_id: int, tokens: int) -> None:
        """Start a stream of `tokens` tokens."""
        idle = not self._running
        self._running[request_id] = max(tokens, 1)
        if idle:
            self._next_at = self._loop.time()
            self._schedule()

    def _schedule(self) -> None:
        if self._step_s:
            # Against the clock, not after the last step: the loop's timers are coarse and errors must not add up.
            self._next_at = max(self._next_at + self._step_s, self._loop.time())
            self._loop.call_at(self._next_at, self._step)
        else:
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        running = self._running
        self._made += 1
        token = FIRST_TOKEN + self._made % TOKENS
        pairs = array("I")
        ended: list[int] = []
        for request_id, left in running.items():
            pairs.append(request_id)
            if left > 1:
                pairs.append(token)
                running[request_id] = left - 1
            else:
                pairs.append(token | LAST)
                ended.append(request_id)
        for request_id in ended:
            del running[request_id]
        self._emit(pairs)
        if running:
            self._schedule()


class Front:
    """Sends requests to a worker and pushes its tokens into the streams that wait for them."""

    def __init__(self, text: Text, submit: Callable[[int, int, Sequence[int]], None]) -> None:
        self.text = text
        self._pieces = text.pieces
        self._submit = submit
        self._live: dict[int, Http] = {}
        self._ids = itertools.count(1)

    def start(self, stream: Http, tokens: int, prompt: Sequence[int]) -> int:
        """Submit a request whose tokens go to `stream`; returns its id."""
        request_id = next(self._ids)
        self._live[request_id] = stream
        self._submit(request_id, tokens, prompt)
        return request_id

    def forget(self, request_id: int) -> None:
        """Drop the tokens of a request whose client has gone."""
        self._live.pop(request_id, None)

    def take(self, pairs: array[int]) -> None:
        """Hand out everything that has come, token by token."""
        live, pieces = self._live, self._pieces
        for at in range(0, len(pairs), 2):
            token = pairs[at + 1]
            stream = live.get(pairs[at])
            if stream is None:
                continue
            if token & LAST:
                del live[pairs[at]]
                stream.last(pieces[token ^ LAST])
            else:
                stream.token(pieces[token])


class Http(asyncio.Protocol):
    """One client connection; one request at a time."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._transport: asyncio.Transport | None = None
        self._held = b""
        self._request_id = 0
        self._busy = False
        self._body = _Body([])
        self._prompt_tokens = 0
        self._tokens = 0
        self._head = b""
        self._prefix = b""
        self._text: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but ancestry

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._busy:
            self._front.forget(self._request_id)

    def data_received(self, data: bytes) -> None:
        self._held = self._held + data if self._held else data
        if not self._busy:
            self._next_request()

    def _next_request(self) -> None:
        head_end = self._held.find(b"\r\n\r\n")
        if head_end < 0:
            return
        length = _LENGTH.search(self._held, 0, head_end)
        end = head_end + 4 + (int(length[1]) if length else 0)
        if len(self._held) < end:
            return
        line = self._held[: self._held.find(b"\r\n")]
        raw, self._held = self._held[head_end + 4 : end], self._held[end:]
        if line.startswith(b"GET /ready "):
            self._answer(b"200 OK", b'{"status":"ready"}')
        elif line.startswith(b"POST /v1/chat/completions "):
            self._start(raw)
        else:
            self._answer(b"404 Not Found", b'{"message":"the probe has only /v1/chat/completions and /ready"}')

    def _start(self, raw: bytes) -> None:
        try:
            body = self._body = _body.decode(raw)
        except msgspec.DecodeError as error:
            self._answer(b"400 Bad Request", msgspec.json.encode({"message": str(error)}))
            return
        turns = "".join(f"<|im_start|>{turn.role}\n{turn.content}<|im_end|>\n" for turn in body.messages)
        prompt = self._front.text.encode(turns + "<|im_start|>assistant\n")
        self._busy = True
        self._prompt_tokens = len(prompt)
        self._tokens = 0
        self._request_id = self._front.start(self, body.max_tokens, prompt)
        if body.stream:
            self._head = _HEAD
            self._prefix = (
                b'data: {"id":"chatcmpl-%d","object":"chat.completion.chunk","created":1700000000,"model":%b,"choices":'
                % (self._request_id, msgspec.json.encode(body.model))
            )
        else:
            self._text = []

    def token(self, text: bytes) -> None:
        """Record that a token has come: an event of a stream, a part of a unary answer."""
        self._tokens += 1
        if self._body.stream:
            self._write(self._event(text), b"")
        else:
            self._text.append(text)

    def last(self, text: bytes) -> None:
        """Record that the last token has come."""
        self._tokens += 1
        if self._body.stream:
            self._write(self._event(text) + self._closing_events(), b"0\r\n\r\n")
        else:
            self._text.append(text)
            self._finish_unary()
        self._busy = False
        if self._held:
            self._next_request()

    def _event(self, text: bytes) -> bytes:
        event = b'%b[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}\n\n' % (self._prefix, text)
        if self._head:
            return b'%b[{"index":0,"delta":{"role":"assistant"},"finish_reason":null}]}\n\n%b' % (self._prefix, event)
        return event

    def _write(self, event: bytes, close: bytes) -> None:
        if self._transport is not None:
            self._transport.write(b"%b%x\r\n%b\r\n%b" % (self._head, len(event), event, close))
        self._head = b""

    def _closing_events(self) -> bytes:
        usage = b""
        options = self._body.stream_options
        if options is not None and options.include_usage:
            usage = b'%b[],"usage":%b}\n\n' % (self._prefix, self._usage())
        finish = b'%b[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n' % self._prefix
        return b"%b%bdata: [DONE]\n\n" % (finish, usage)

    def _finish_unary(self) -> None:
        body = (
            b'{"id":"chatcmpl-%d","object":"chat.completion","created":1700000000,"model":%b,"choices":[{"index":0,'
            b'"message":{"role":"assistant","content":"%b"},"finish_reason":"length"}],"usage":%b}'
        ) % (self._request_id, msgspec.json.encode(self._body.model), b"".join(self._text), self._usage())
        self._answer(b"200 OK", body)

    def _usage(self) -> bytes:
        given, made = self._prompt_tokens, self._tokens
        return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (given, made, given + made)

    def _answer(self, status: bytes, body: bytes) -> None:
        if self._transport is not None:
            head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
            self._transport.write(head + body)


class Remote:
    """The front's side of a worker in another process."""

    def __init__(self, text: Text) -> None:
        self.front = Front(text, self._submit)
        self._link: Framed | None = None

    async def connect(self, port: int) -> Framed:
        """Connect to the worker, which may still be starting (10 s). Raise OSError."""
        loop = asyncio.get_running_loop()
        for tries_left in reversed(range(CONNECT_TRIES)):
            try:
                _, self._link = await loop.create_connection(lambda: Framed(self._read), "127.0.0.1", port)
            except OSError:
                if not tries_left:
                    raise
                await asyncio.sleep(0.1)
            else:
                return self._link
        raise AssertionError("unreachable")

    def _submit(self, request_id: int, tokens: int, prompt: Sequence[int]) -> None:
        if self._link is not None:
            self._link.send(_REQUEST.pack(request_id, tokens) + array("I", prompt).tobytes())

    def _read(self, link: Framed, frames: list[bytes]) -> None:
        for frame in frames:
            self.front.take(array("I", frame))


def worker_protocol(step_s: float) -> Framed:
    """Return the worker's side of one front: each connection has a worker of its own."""
    worker: Worker

    def read(link: Framed, frames: list[bytes]) -> None:
        for frame in frames:
            request_id, tokens = _REQUEST.unpack_from(frame)
            worker.add(request_id, tokens)

    link = Framed(read)
    worker = Worker(lambda pairs: link.send(pairs.tobytes()), step_s)
    return link


def inproc_front(text: Text, step_s: float) -> Front:
    """Return a front with its worker in the same process."""

    def submit(request_id: int, tokens: int, prompt: Sequence[int]) -> None:
        worker.add(request_id, tokens)

    front = Front(text, submit)
    worker = Worker(front.take, step_s)
    return front


async def serve_worker(port: int, step_s: float) -> asyncio.Server:
    """Listen for fronts on loopback; port 0 = any free one."""
    return await asyncio.get_running_loop().create_server(lambda: worker_protocol(step_s), "127.0.0.1", port)


async def serve_front(port: int, front: Front) -> asyncio.Server:
    """Listen for clients on loopback; port 0 = any free one."""
    return await asyncio.get_running_loop().create_server(lambda: Http(front), "127.0.0.1", port, backlog=1024)


async def _main(options: argparse.Namespace) -> None:
    step_s = options.step_ms / 1000
    if options.role == "worker":
        server = await serve_worker(options.port, step_s)
    elif options.inproc:
        server = await serve_front(options.port, inproc_front(ModelText(options.model_dir), step_s))
    else:
        remote = Remote(ModelText(options.model_dir))
        await remote.connect(options.worker_port)
        server = await serve_front(options.port, remote.front)
    await server.serve_forever()


def main() -> None:
    """Run the command described at the top of this file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.probe", description="A bare server to measure against.")
    parser.add_argument("role", choices=("worker", "front"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model-dir", type=Path, help="the folder with the front's tokenizer.json")
    parser.add_argument("--worker-port", type=int, help="where the front's worker listens")
    parser.add_argument("--inproc", action="store_true", help="the front runs its worker itself")
    parser.add_argument("--step-ms", type=float, default=0.0, help="time between tokens (default 0: no waiting)")
    options = parser.parse_args()
    if options.role == "front" and options.inproc == (options.worker_port is not None):
        parser.error("a front needs either --worker-port or --inproc")
    if options.role == "front" and options.model_dir is None:
        parser.error("a front needs --model-dir")
    try:
        run(_main(options))
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
