"""Bodies made to hurt: each is told what is wrong with it, nothing of it reaches a worker, and none holds the loop."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import time
from asyncio import events
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from dynamo_core import EMBED, RERANK, SCORE

CHAT, COMPLETE, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
SCORES, RANKS = "/v1/score", "/v1/rerank"
MB = 1024 * 1024
LIMIT = 45 * MB
#: Seconds of the loop's own time that one callback may take.
LONGEST = 0.050
HUGE = "9" * 4000


@dataclass(frozen=True)
class Hostile:
    """A body and what its refusal must say. With `field` None no field can be blamed, so the text must say it."""

    name: str
    make: Callable[[], bytes]
    field: str | None
    says: str = ""
    status: int = 400
    path: str = CHAT


def chat(field: str, value: str, blamed: str | None = None, **options: Any) -> Hostile:
    """Return a sound chat request in which one field has this JSON text."""
    base = {"model": '"m"', "messages": '[{"role": "user", "content": "Hi"}]', field: value}
    return _of(CHAT, base, field, value, blamed, **options)


def complete(field: str, value: str, blamed: str | None = None, **options: Any) -> Hostile:
    return _of(COMPLETE, {"model": '"m"', "prompt": '"Hi"', field: value}, field, value, blamed, **options)


def embed(field: str, value: str, blamed: str | None = None, **options: Any) -> Hostile:
    return _of(VECTORS, {"model": '"m"', "input": '"Hi"', field: value}, field, value, blamed, **options)


def score(field: str, value: str, blamed: str | None = None, **options: Any) -> Hostile:
    base = {"model": '"m"', "text_1": '"Hi"', "text_2": '"Ho"', field: value}
    return _of(SCORES, base, field, value, blamed, **options)


def rerank(field: str, value: str, blamed: str | None = None, **options: Any) -> Hostile:
    base = {"model": '"m"', "query": '"Hi"', "documents": '["Ho"]', field: value}
    return _of(RANKS, base, field, value, blamed, **options)


def _of(path: str, base: dict[str, str], field: str, value: str, blamed: str | None, **options: Any) -> Hostile:
    text = "{" + ", ".join(f"{json.dumps(name)}: {part}" for name, part in base.items()) + "}"
    shown = value if len(value) < 60 else f"{value[:50]}… ({len(value)})"
    return Hostile(f"{path}:{field}={shown}", text.encode, field if blamed is None else blamed, path=path, **options)


def message(content: str, blamed: str = "messages[0].content", role: str = '"user"') -> Hostile:
    return chat("messages", f'[{{"role": {role}, "content": {content}}}]', blamed)


def whole(name: str, body: bytes | Callable[[], bytes], says: str, **options: Any) -> Hostile:
    options.setdefault("field", None)
    return Hostile(name, (lambda: body) if isinstance(body, bytes) else body, says=says, **options)


def around(head: bytes, filling: bytes, tail: bytes, size: int = LIMIT) -> Callable[[], bytes]:
    """Return a body of just this size, filled up in its middle; made when it is needed."""

    def make() -> bytes:
        room = size - len(head) - len(tail)
        return head + (filling * (room // len(filling) + 1))[: room - room % len(filling)] + tail

    return make


def deep(opening: str, closing: str, depth: int) -> str:
    return opening * depth + "1" + closing * depth


NOT_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"1"', "true", "[]", "{}")
FRACTIONS = {
    "temperature": ("-0.1", "2.1", HUGE),
    "top_p": ("-0.1", "1.1", HUGE),
    "min_p": ("-0.1", "1.1"),
    "frequency_penalty": ("-2.1", "2.1"),
    "presence_penalty": ("-2.1", "2.1"),
    "repetition_penalty": ("0", "-1", "2.1", "1e300"),
}
NO_INTEGERS = ("1.5", '"3"', "true", "[1]", "{}", "NaN", HUGE)
INTEGERS = {
    "n": ("0", "-1", "129", "1000000000", "99999999999999999999"),
    "max_tokens": ("0", "-1", "4294967296"),
    "max_completion_tokens": ("0", "-1", "4294967296"),
    "top_k": ("-2", "2147483648"),
    "seed": ("9223372036854775808",),
    "min_tokens": ("-1", "4294967296"),
    "top_logprobs": ("-1", "21"),
}


def table() -> Iterator[Hostile]:
    for field, own in FRACTIONS.items():
        yield from (chat(field, value) for value in (*NOT_NUMBERS, *own))
    for field, own in INTEGERS.items():
        yield from (chat(field, value) for value in (*NO_INTEGERS, *own))
    yield from _fields()
    yield from _conversations()
    yield from _prompts()
    yield from _scored_texts()
    yield from _whole_bodies()
    yield from _large_bodies()


def _fields() -> Iterator[Hostile]:
    for field in ("stream", "ignore_eos", "logprobs", "skip_special_tokens", "include_stop_str_in_output"):
        yield from (chat(field, value) for value in ('"true"', "1", "[]"))
    yield from (chat("model", value) for value in ("null", "1", "[]", "{}", '""', '" "', r'"\ud800"'))
    yield chat("model", '"nope"', status=404)
    yield chat("model", json.dumps("m" * 100_000), status=404)
    yield from (chat("user", value) for value in ('""', '"  "', "1", r'"\udfff"'))
    yield from (chat("stop", value) for value in ('""', "[]", '[""]', "1", "[1]", "{}", "[[]]", r'["\ud83d"]'))
    yield chat("stop", json.dumps(["x"] * 33))
    yield chat("stop", json.dumps(["x"] * 100_000))
    yield chat("stop", json.dumps("x" * 1025), says="1024 characters")
    yield chat("stop", json.dumps(["x" * 300_000] * 32), says="1024 characters")
    yield chat("stop", json.dumps(["x" * 1024] * 9), says="8192 characters together")
    yield from (
        chat("logit_bias", value) for value in ("[]", '"x"', '{"a": 1}', '{"-1": 1}', '{"1": 101}', '{"1": NaN}')
    )
    yield chat("logit_bias", '{"١": 1}')
    yield chat("logit_bias", json.dumps({str(number): 1 for number in range(5000)}))
    for field in ("stop_token_ids", "allowed_token_ids"):
        yield from (chat(field, value) for value in ("1", '["a"]', "[-1]", "[4294967296]", "[1.5]", "[true]"))
    yield chat("stop_token_ids", json.dumps([1] * 5000))
    yield chat("bad_words_token_ids", json.dumps([[1]] * 5000))
    yield chat("bad_words_token_ids", "[1]")
    yield from (chat("stream_options", value) for value in ("1", "[]", "{}", '{"include_usage": 1}'))
    yield from (chat("nvext", value) for value in ("1", "[]", '{"x": 1}', '{"top_k": 0}', '{"annotations": [1]}'))
    yield from (chat("tools", value) for value in ("1", "{}", "[1]", "[{}]", '[{"type": "function"}]'))
    yield chat("tools", '[{"type": "function", "function": {"name": "a b"}}]')
    yield chat("tools", json.dumps([{"type": "function", "function": {"name": "f"}}] * 1537))
    yield from (chat("tool_choice", value) for value in ("1", "[]", '"must"', '"required"', "{}"))
    yield from (
        chat("chat_template_kwargs", value) for value in ("1", "[]", '{"messages": []}', '{"chat_template": "x"}')
    )
    yield from _notes()
    yield from (chat(field, json.dumps("x" * 65)) for field in ("safety_identifier", "prompt_cache_key"))
    yield from (chat(field, json.dumps("x" * 513)) for field in ("user", "cache_salt"))
    yield chat("stop", json.dumps("x" * 4097))
    yield chat("stop", json.dumps(["x", "x" * 4097]))
    yield chat("guided_choice", json.dumps(["x"] * 4097))
    yield chat("guided_regex", json.dumps("x" * 70_000))
    yield chat("structured_outputs", json.dumps({"regex": "x" * 70_000}), "structured_outputs.regex")
    yield chat("structured_outputs", json.dumps({"choice": ["x"] * 4097}), "structured_outputs.choice")
    yield chat("chat_template_kwargs", json.dumps({f"k{number}": 1 for number in range(300)}))
    yield chat("chat_template", '"{{ 1 }}"')
    yield chat("__class__", "1")
    yield chat("no_such_field", deep("[", "]", 50))


def _notes() -> Iterator[Hostile]:
    bounds = "at most 16 pairs are allowed, with keys of at most 64 characters and texts of at most 512 characters"
    refused: tuple[Any, ...] = (
        {str(number): "x" for number in range(17)},
        {str(number): "x" for number in range(9_000)},
        {"k" * 65: "x"},
        {"k": "x" * 513},
        {"k": 1},
        {"k": {}},
        ["k"],
        "k",
        1,
    )
    for notes in refused:
        yield chat("metadata", json.dumps(notes), says=bounds)
        yield complete("metadata", json.dumps(notes), says=bounds)


def _conversations() -> Iterator[Hostile]:
    yield from (chat("messages", value) for value in ("null", "1", '"hi"', "{}", "[]", "[1]", "[[]]", "[null]", "[{}]"))
    yield from (message('"x"', "messages[0].role", role) for role in ('"root"', '""', "1", "null", r'"\ud800"'))
    yield from (message(content) for content in ("1", "true", "{}", "[1]", "[{}]", "null", '[{"type": "text"}]', "NaN"))
    yield from (message(rf'"{text}"') for text in (r"\ud800", r"\udc00", r"\ud800x", r"\udc00\ud800", r"a\ud83d"))
    yield message('[{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]', "messages[0].content[0]")
    yield chat("messages", json.dumps([{"role": "user", "content": "x"}] * 4097), says="4096")
    yield chat("messages", json.dumps([{}] * 60_000))
    yield chat("messages", json.dumps([[]] * 60_000))
    yield chat("messages", '[{"role": "user", "content": "Hi", "extra": ' + deep("[", "]", 200) + "}]", says="nested")
    for depth in (101, 500, 950, 1100, 5000):
        yield chat("messages", deep("[", "]", depth), says="nested")
        yield chat("tools", deep('{"a":', "}", depth), says="nested")
    yield chat("messages", deep("[", "]", 100_000), says="too many")
    yield chat("tools", deep('{"a":', "}", 100_000), says="too many")
    yield chat("metadata", deep('[{"a":', "}]", 80), says="nested")
    yield chat("metadata", "[" * 30_000, says="nested")


def _prompts() -> Iterator[Hostile]:
    yield from (
        complete("prompt", value) for value in ("null", "1", "{}", '""', "[]", '[""]', "[[]]", '["a", 1]', "[-1]")
    )
    yield from (
        complete("prompt", value) for value in ("[1.5]", "[true]", "[300000]", "[4294967296]", "[[[1]]]", "NaN")
    )
    yield complete("prompt", r'"\ud800"')
    yield complete("prompt", json.dumps(["x"] * 129), "n")
    yield complete("prompt", json.dumps([[1]] * 60_000), says="too many")
    yield from (complete("logprobs", value) for value in ("-1", "6", "true", '"1"', HUGE))
    yield from (complete("best_of", value) for value in ("-1", "21", "0", "1.5"))
    yield complete("suffix", json.dumps("x" * 10_001))
    yield complete("echo", '"yes"')
    yield from (
        embed("input", value) for value in ("null", "1", "{}", '""', "[]", '[""]', "[[]]", "[null]", r'"\udc00"')
    )
    yield embed("input", json.dumps(["x"] * 2049))
    yield from (embed("dimensions", value) for value in ("0", "-1", "1.5", '"8"', HUGE))
    yield from (embed("encoding_format", value) for value in ('"hex"', "1", "[]"))


def _scored_texts() -> Iterator[Hostile]:
    no_texts = ("1", "{}", '""', "[]", '[""]', "[null]", "[[]]", '[{"text": 1}]', '{"text": ""}', r'"\udc00"')
    yield from (score(field, value) for field in ("text_1", "text_2") for value in no_texts)
    yield from (rerank("documents", value) for value in ("null", *no_texts))
    yield from (rerank("query", value) for value in ("null", "1", "{}", '""', "[]", '["Hi"]', '{"text": null}'))
    yield rerank("documents", '[{"text": "a", "image": "b"}]')
    yield rerank("documents", json.dumps(["x"] * 2049))
    yield rerank("documents", json.dumps([{"text": "x"}] * 60_000), says="too many")
    yield score("text_2", json.dumps(["x"] * 2049))
    yield score("text_1", '["a", "b"]')
    yield score("queries", '"a"')
    yield score("data_1", '"a"')
    yield score("text_2", "null", "text_1")
    for limit in ("max_tokens_per_query", "max_tokens_per_doc", "truncate_prompt_tokens"):
        yield from (make(limit, value) for make in (score, rerank) for value in ("-2", "1.5", '"8"', HUGE))
    yield rerank("truncate_prompt_tokens", "0")
    yield from (rerank("top_n", value) for value in ("-1", "1.5", '"2"', HUGE))
    yield from (rerank("rank_fields", value) for value in ('["title"]', "1"))
    yield rerank("instruction", '"be strict"')
    yield rerank("return_documents", '"yes"')


def _whole_bodies() -> Iterator[Hostile]:
    yield whole("nothing", b"", "truncated")
    yield whole("spaces", b" " * 1000, "truncated")
    yield whole("half an object", b'{"model": "m"', "truncated")
    yield whole("two objects", b'{"model": "m"} {}', "malformed")
    yield whole("a comma too many", b'{"model": "m",}', "malformed")
    yield whole("no JSON", b"model=m&messages=hi", "malformed")
    yield whole("single quotes", b"{'model': 'm'}", "malformed")
    yield whole("a comment", b'/* */ {"model": "m"}', "malformed")
    yield whole("XML", b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "c">]>', "malformed")
    yield whole("NUL bytes", b"\x00" * 100, "malformed")
    yield whole("a byte order mark", b'\xef\xbb\xbf{"model": "m"}', "malformed")
    yield whole("UTF-16", '{"model": "m"}'.encode("utf-16"), "malformed")
    yield whole("not UTF-8", b'{"model": "\xff"}', "UTF-8")
    yield whole("an overlong slash", b'{"model": "\xc0\xaf"}', "UTF-8")
    yield whole("a surrogate as UTF-8", b'{"model": "\xed\xa0\x80"}', "half a character", field="model")
    yield whole("half a name", rb'{"\ud800": 1}', "half a character")
    yield whole("a raw line feed in a text", b'{"model": "m\n"}', "malformed")
    yield whole("an escape that is none", rb'{"model": "\x41"}', "malformed")
    for text in (b"null", b"1", b'"m"', b"[]", b"true", b'[{"model": "m"}]'):
        yield whole(f"only {text.decode()}", text, "expected an object")
    yield whole("not a number alone", b"NaN", "NaN is not a number")
    talk = b'"messages": [{"role": "user", "content": "Hi", "name": "model"}]'
    twice = "duplicate field"
    yield whole("two models", b'{"model": "m", ' + talk + b', "model": "n"}', twice, field="model")
    yield whole("two equal models", b'{"model":"m",' + talk + b',"model":"m"}', twice, field="model")
    yield whole(
        "two models, one in escapes", rb'{"mod\u0065l": "m", ' + talk + b', "model": "m"}', twice, field="model"
    )
    yield whole("two empty names", b'{"model": "m", ' + talk + b', "": 1, "" : 2}', twice, field="")
    yield whole(
        "two models around much",
        around(b'{"model": "m", "user": "', b"x", b'", "model": "m"}', MB),
        twice,
        field="model",
    )
    yield whole("brackets without end", b"[" * 60_000, "too many")
    yield whole("objects without end", b'{"a":' * 10_000, "nested", field="a")


#: The beginning of a chat request, up to the content of its message.
_USER = b'{"model": "m", "messages": [{"role": "user", "content": '
#: The beginning of a chat request, up to its messages, and a message and a part of one that are sound.
_START = b'{"model": "m", "messages": ['
_SOUND = b'{"role":"user","content":"x"},'
_PART = b'{"type":"text","text":"x"},'


def _large_bodies() -> Iterator[Hostile]:
    yield from _too_many()
    yield from _too_long()
    yield from _large_arguments()


def _too_many() -> Iterator[Hostile]:
    yield whole("over the limit", around(b'{"model": "', b"x", b'"}', LIMIT + 1), "45 MB", status=413)
    yield whole("45 MB of spaces", around(b"", b" ", b""), "truncated")
    yield whole("45 MB of brackets", around(b'{"messages": ', b"[", b""), "too many", field="messages")
    yield whole("45 MB of lists", around(b'{"messages": [', b"[],", b"[]]}"), "too many", field="messages")
    yield whole("45 MB of objects", around(b'{"metadata": [', b"{},", b"{}]}"), "too many", field="metadata")
    yield whole("45 MB of numbers", around(b'{"prompt": [', b"1,", b"1]}"), "too many", field="prompt")
    yield whole("45 MB of texts", around(b'{"stop": [', b'"",', b'""]}'), "too many", field="stop")
    yield whole("45 MB of names", around(b'{"logit_bias": {', b'"1":1,', b'"1":1}}'), "too many", field="logit_bias")
    yield whole(
        "999,000 notes",
        lambda: b'{"model": "m", "metadata": {' + b",".join(b'"%d":1' % number for number in range(999_000)) + b"}}",
        "too many texts",
        field="metadata",
    )
    yield whole(
        "999,000 names in as many variables",
        lambda: b'{"chat_template_kwargs": {' + b",".join(b'"%d":1' % number for number in range(999_000)) + b"}}",
        "too many texts",
        field="chat_template_kwargs",
    )
    yield whole("45 MB of quotes", around(b"", b'"', b""), "too many")
    yield whole("45 MB of backslashes", around(b'{"model": "', b"\\\\", b'"}'), "messages", field="messages")
    yield whole(
        "45 MB in a text of the wrong type",
        around(b'{"model": "m", "messages": "', b"x", b'"}'),
        "messages",
        field="messages",
    )
    yield whole("45 MB of brackets in a text", around(_USER + b'"', b"[{", b'"}], "n": 0}'), "n must", field="n")
    yield whole("a text of 45 MB, cut off", around(_USER + b'"', b"x", b""), "truncated")
    yield whole(
        "a million token ids and a wrong n",
        around(b'{"model": "m", "n": 0, "prompt": [', b"1,", b"1]}", 1_950_000),
        "n must",
        field="n",
        path=COMPLETE,
    )
    yield whole(
        "many messages",
        around(
            b'{"model": "m", "n": 0, "messages": [',
            b'{"role":"user","content":"x"},',
            b'{"role":"user","content":"x"}]}',
            1 * MB,
        ),
        "4096",
        field="messages",
    )


def _too_long() -> Iterator[Hostile]:
    yield whole("short parts", around(_USER + b"[", _PART, _PART[:-1] + b"]}]}", MB), "tokens", field="messages")
    yield whole(
        "as many messages as there may be",
        lambda: _START + _SOUND * 4095 + _SOUND[:-1] + b"]}",
        "tokens",
        field="messages",
    )
    yield whole("a prompt of 45 MB", around(_USER + b'"', b"x", b'"}]}'), "tokens", field="messages")
    yield whole("a prompt of 45 MB of emoji", around(_USER + b'"', "😀".encode(), b'"}]}'), "tokens", field="messages")
    yield whole("a prompt of 45 MB of escapes", around(_USER + b'"', rb"\u0001", b'"}]}'), "tokens", field="messages")
    yield whole(
        "a completion of 45 MB",
        around(b'{"model": "m", "prompt": "', b"x", b'"}'),
        "tokens",
        field="prompt",
        path=COMPLETE,
    )
    yield whole(
        "a million token ids",
        around(b'{"model": "m", "prompt": [', b"1,", b"1]}", 1_950_000),
        "tokens",
        field="prompt",
        path=COMPLETE,
    )


def _large_arguments() -> Iterator[Hostile]:
    nested = rb'{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"%s"}}]}]}'
    yield whole(
        "arguments that are nested", lambda: _START + nested % (b"[" * 500), "nested", field="messages[0].tool_calls[0]"
    )
    open_call = rb'{"role":"assistant","content":"%s","tool_calls":[{"function":{"name":"f","arguments":"{\"a\":\"'
    escapes = around(_START + open_call % (b"x" * 5000), rb"\\n", rb'\"}"}}]}]}')
    yield whole("arguments of 45 MB of escapes", escapes, "tokens", field="messages")
    head = rb'{"role":"assistant","tool_calls":[{"type":"function","function":{"name":"f","arguments":"{\"a\":['
    call = head + b"[]," * 40_000 + rb'[]]}"}}]},'
    yield whole(
        "arguments that together hold many lists",
        lambda: _START + call * 5 + _SOUND[:-1] + b"]}",
        "too many",
        field="messages[1].tool_calls[0].function.arguments",
    )


BODIES = list(table())
#: Without most of the largest, which take a second each where the machine is busy.
QUICK = [body for body in BODIES if "45 MB" not in body.name or body.name == "45 MB of lists"]


class Client:
    """A client in a thread of its own, so that the loop does the server's work only."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def post(self, hostile: Hostile) -> tuple[int, Any]:
        body = hostile.make()
        try:
            self._http.request("POST", hostile.path, body, {"content-type": "application/json"})
        except (BrokenPipeError, ConnectionResetError):
            # The server has answered and closed before it had read all.
            assert hostile.status == 413
        reply = self._http.getresponse()
        data = json.loads(reply.read())
        if reply.will_close:
            self._http.close()
        return reply.status, data

    def close(self) -> None:
        self._http.close()


@contextmanager
def longest_callback(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[float, str]]]:
    """Watch the callbacks of the loop: the seconds of processor time of this thread that each took."""
    original = events.Handle._run
    taken: list[tuple[float, str]] = []

    def timed(self: events.Handle) -> None:
        begun = time.thread_time()
        original(self)
        taken.append((time.thread_time() - begun, repr(self)))

    with monkeypatch.context() as patch:
        patch.setattr(events.Handle, "_run", timed)
        yield taken


@pytest.fixture
async def hostile_server(cold_server: Any) -> Any:
    """Return a server with the limit of a real one, and a model that takes little.

    Rendering has all the time it needs: on a busy machine 45 MB take seconds, and these tests are not about that limit.
    """
    cold_server.body_limit = LIMIT
    cold_server.configure(template_timeout=60.0)
    cold_server.add_model(context_length=4096, capabilities=[EMBED, RERANK, SCORE])
    await cold_server.start()
    return cold_server


def check(hostile: Hostile, status: int, answer: Any) -> None:
    error = answer["error"]
    assert status == hostile.status, (hostile.name, answer)
    assert answer["code"] == status
    assert error["message"]
    assert len(error["message"]) < 110_000, hostile.name
    if hostile.field is None:
        assert error["param"] is None, (hostile.name, error)
        assert hostile.says
    else:
        assert (error["param"] or "").startswith(hostile.field), (hostile.name, error)
    assert hostile.says in error["message"], (hostile.name, error)


def nothing_is_held(server: Any) -> None:
    for gauge in ("active_requests", "inflight_requests", "queued_requests"):
        assert not server.gauge(gauge), gauge
    assert server.directory.models["m"].count == 0
    assert server.listener.running == 0


def test_there_are_at_least_200_hostile_bodies() -> None:
    assert len(QUICK) >= 200
    assert len({body.name for body in BODIES}) == len(BODIES)


async def test_every_one_is_refused_with_its_field_and_nothing_is_held(hostile_server: Any) -> None:
    client = Client(hostile_server.listener.port)

    for hostile in QUICK:
        check(hostile, *await asyncio.to_thread(client.post, hostile))

    nothing_is_held(hostile_server)
    await asyncio.to_thread(client.close)


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_none_of_them_holds_the_loop(hostile_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Best of three, as other work on the machine may slow down any one."""
    client = Client(hostile_server.listener.port)

    slow = []
    for hostile in BODIES:
        best = (1e9, "")
        for _ in range(3):
            with longest_callback(monkeypatch) as taken:
                check(hostile, *await asyncio.to_thread(client.post, hostile))
            best = min(best, max(taken))
            if best[0] <= LONGEST:
                break
        if best[0] > LONGEST:
            slow.append((hostile.name, *best))

    await asyncio.to_thread(client.close)
    assert not slow
    nothing_is_held(hostile_server)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/route/explain", {"prompt": "Hi"}),
    ],
)
async def test_a_name_of_a_large_body_is_not_repeated_in_full(server: Any, path: str, body: dict[str, Any]) -> None:
    reply = await server.post(path, {"model": "Z" * 500_000, **body})

    assert reply.status == 404
    assert b"ZZZ" in reply.body
    assert len(reply.body) < 1000


async def test_a_body_that_ends_before_it_is_whole_counts_as_a_failure(server: Any) -> None:
    connection = await server.connect()
    connection.writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
        b"content-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc"
    )

    reply = await connection.reply()

    assert reply.status == 400
    assert 'reason="validation"' in (await server.metrics.render()).decode()


@pytest.mark.parametrize("body", [{"model": "Z" * 500_000, "prompt": "Hi"}, {"prompt": "Z" * 500_000}])
async def test_refused_body_leaves_nothing_to_the_collector(server: Any, body: dict[str, Any]) -> None:
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        assert (await server.post("/v1/completions", body)).status in (400, 404)
        await asyncio.sleep(0)
        gc.collect()
        kept = [text for part in gc.garbage for text in gc.get_referents(part) if isinstance(text, str | bytes)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()

    assert max(map(len, kept), default=0) < 100_000
