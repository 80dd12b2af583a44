"""What a client lived through with one request, and the rules that hold of every such history.

An honest client sends, reads as fast as it can, and writes down what comes and when. The checker knows nothing of what
was done to the servers: only what each request may have become.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

#: Seconds in which a request must have ended, if nothing else is said.
DEADLINE = 20.0

#: Seconds by which a client may notice its own deadline late.
SLACK = 1.0

#: What a request that failed before its first token may be told.
STATUSES = frozenset({500, 503, 504})

#: Words of the inside that no client should see.
INTERNALS = ("Traceback", ".py", "dynamo_", "127.0.0.1", "Disconnected", "StreamIncomplete", "EngineShutdown")


class End(Enum):
    """How the connection ended, for a client that counts bytes only."""

    CLEAN = "the answer was announced, and came whole"
    ABORTED = "the connection broke before the end that was announced"
    HUNG = "the deadline passed"
    LEFT = "the client went away"


class Outcome(Enum):
    """What became of a request."""

    WHOLE = "answered as an unbroken run would"
    BROKEN = "begun, then broken off with an error"
    FAILED = "answered with an error status"
    LEFT = "left by its client"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. No two of a test have the same seed."""

    seed: int
    prompt: str = "hi"
    max_tokens: int = 20
    stream: bool = True
    #: Seconds in which it must have ended.
    deadline: float = DEADLINE
    model: str = "mock-model"

    def body(self) -> dict[str, Any]:
        """Return the request as JSON."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "stream": self.stream,
        }
        return body | ({"stream_options": {"include_usage": True}} if self.stream else {})


@dataclass(frozen=True, slots=True)
class Answer:
    """What an unbroken run of a request says."""

    text: str
    finish_reason: str
    usage: Mapping[str, int]


@dataclass(slots=True)
class History:
    """One request. Times are those of the event loop, in seconds."""

    asked: Asked
    sent: float = 0.0
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    first_byte: float | None = None
    #: The items of a stream, in order; comments are none.
    events: list[tuple[float, str]] = field(default_factory=list)
    #: The whole body of an answer that is no stream, and what a stream left unfinished.
    body: bytes = b""
    #: Each time that the request ended; of a sound history there is one.
    ends: list[tuple[float, End]] = field(default_factory=list)
    #: Set with the first text, and when the request has ended.
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def answered(self, status: int, headers: Mapping[str, str]) -> None:
        """Record that the head of the answer is in."""
        self.status = status
        self.headers = {name.lower(): value for name, value in headers.items()}

    @property
    def streams(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def came(self, now: float, data: bytes) -> None:
        """Record that a piece of the body is in."""
        if self.first_byte is None:
            self.first_byte = now
        self.body += data
        if not self.streams:
            return
        *events, self.body = self.body.split(b"\n\n")
        for event in events:
            if event.startswith(b":"):
                continue
            self.events.append((now, event.decode()))
            if b'"content"' in event:
                self.begun.set()

    def over(self, now: float, end: End) -> None:
        """Record that the request has ended."""
        self.ends.append((now, end))
        self.begun.set()


def check(
    histories: Iterable[History], expected: Mapping[int, Answer], allowed: Mapping[int, Collection[Outcome]]
) -> list[str]:
    """Return what is wrong with the histories of a run: nothing, if the list is empty.

    `expected` has the unbroken answer by seed; `allowed` what a request may have become, by seed: those it does not
    name must be whole.
    """
    problems: list[str] = []
    seen: set[int] = set()
    for history in histories:
        seed = history.asked.seed
        if seed in seen:
            problems.append(f"request {seed}: there are two histories of it")
        seen.add(seed)
        outcome, wrong = judge(history, expected[seed])
        may = allowed.get(seed, {Outcome.WHOLE})
        if not wrong and outcome not in may:
            wrong = [f"it was {outcome.value}, and may only be " + " or ".join(sorted(kind.value for kind in may))]
        problems += [f"request {seed}: {what}" for what in wrong]
    return problems


def judge(history: History, expected: Answer) -> tuple[Outcome, list[str]]:
    """Return what became of one request, and what is wrong with that whatever was done to it."""
    problems = _once_and_in_time(history)
    if problems:
        return Outcome.FAILED, problems
    end = history.ends[0][1]
    if end is End.LEFT:
        return Outcome.LEFT, _begins(history, expected)
    if history.status == 200:
        return _stream(history, expected, end) if history.asked.stream else _unary(history, expected, end)
    return Outcome.FAILED, _refusal(history, end)


def _once_and_in_time(history: History) -> list[str]:
    if len(history.ends) != 1:
        return [f"it ended {len(history.ends)} times"]
    at, end = history.ends[0]
    if end is End.HUNG:
        return [f"it had not ended after {at - history.sent:.1f} s"]
    problems = []
    if at - history.sent > history.asked.deadline + SLACK:
        problems.append(f"it ended after {at - history.sent:.1f} s, and had {history.asked.deadline} s")
    times = [history.sent, *([] if history.first_byte is None else [history.first_byte])]
    times += [*(when for when, _ in history.events), at]
    if times != sorted(times):
        problems.append("something came before it was sent, or after the end")
    return problems


def _stream(history: History, expected: Answer, end: End) -> tuple[Outcome, list[str]]:
    try:
        said = _said(history)
    except ValueError as error:
        return Outcome.FAILED, [str(error)]
    problems = _begins(history, expected)
    if said.error is not None:
        problems += _error_form(said.error, None)
        if said.done:
            problems.append("[DONE] and an error in one stream")
        if said.reasons:
            problems.append("a finish_reason and an error in one stream")
        if end is not End.ABORTED:
            problems.append("after the error the connection ended as if all were well")
        if said.trailing:
            problems.append("something came after the error")
        return Outcome.BROKEN, problems
    if not said.done:
        return Outcome.FAILED, [*problems, f"the stream ended without [DONE] and without an error: {end.value}"]
    if end is not End.CLEAN:
        problems.append(f"[DONE], but {end.value}")
    if said.trailing:
        problems.append("something came after [DONE]")
    if history.body:
        problems.append(f"half an item at the end: {history.body!r}")
    if said.reasons != [expected.finish_reason]:
        problems.append(f"finish_reason was {said.reasons}, not {expected.finish_reason!r} once")
    if said.text != expected.text:
        problems.append(f"{len(said.text)} of {len(expected.text)} tokens came, and then [DONE]")
    if len(said.ids) != 1:
        problems.append(f"the chunks had {len(said.ids)} ids")
    if said.usages != [expected.usage]:
        problems.append(f"usage was {said.usages}, not {expected.usage} once")
    return Outcome.WHOLE, problems


def _unary(history: History, expected: Answer, end: End) -> tuple[Outcome, list[str]]:
    if end is not End.CLEAN:
        return Outcome.FAILED, [f"status 200, but {end.value}"]
    try:
        got = answer_in(json.loads(history.body))
    except (ValueError, LookupError, TypeError) as error:
        return Outcome.FAILED, [f"the body is no answer: {error!r}: {history.body[:200]!r}"]
    return Outcome.WHOLE, [] if got == expected else [f"the answer is {got}, not {expected}"]


def _refusal(history: History, end: End) -> list[str]:
    if history.status is None:
        return [f"no answer at all: {end.value}"]
    problems = [] if history.status in STATUSES else [f"status {history.status}"]
    if end is not End.CLEAN:
        problems.append(f"status {history.status}, but {end.value}")
    try:
        problems += _error_form(json.loads(history.body), history.status)
    except ValueError:
        problems.append(f"an error that is no JSON: {history.body[:200]!r}")
    retry = history.headers.get("retry-after")
    if retry is not None and not (retry.isdigit() and 1 <= int(retry) <= 60):
        problems.append(f"Retry-After was {retry!r}")
    return problems


def _error_form(body: Any, status: int | None) -> list[str]:
    """Return whether this is the documented body of an error.

    `status` None: of a stream's last item, any of `STATUSES`.
    """
    match body:
        case {
            "error": {"message": str(message), "type": str(kind), "param": _, "code": _, **within},
            "message": str(flat),
            "type": str(flat_kind),
            "code": int(code),
            **more,
        } if not within and not more and (flat, flat_kind) == (message, kind):
            pass
        case _:
            return [f"not the documented form of an error: {body}"]
    problems = []
    if code != status and (status is not None or code not in STATUSES):
        problems.append(f"an error with code {code}" + ("" if status is None else f" under status {status}"))
    leaked = [word for word in INTERNALS if word in message]
    if leaked:
        problems.append(f"an error that tells internals: {message!r}")
    return problems


@dataclass(slots=True)
class _Said:
    """What a stream said."""

    text: str = ""
    reasons: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    usages: list[dict[str, int]] = field(default_factory=list)
    error: Any = None
    done: bool = False
    #: Whether anything came after `[DONE]` or the error.
    trailing: bool = False


def _said(history: History) -> _Said:
    said = _Said()
    for _, event in history.events:
        said.trailing = said.trailing or said.done or said.error is not None
        if not event.startswith("data: ") or "\n" in event:
            raise ValueError(f"an item that is none: {event!r}")
        if event == "data: [DONE]":
            said.done = True
            continue
        try:
            _read_chunk(said, json.loads(event.removeprefix("data: ")))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ValueError(f"an item that is no chunk: {event!r}") from None
    return said


def _read_chunk(said: _Said, chunk: Any) -> None:
    if "error" in chunk:
        said.error = chunk
        return
    said.ids.add(chunk["id"])
    if chunk.get("usage"):
        said.usages.append(_totals(chunk["usage"]))
    for choice in chunk["choices"]:
        said.text += choice["delta"].get("content") or ""
        if choice["finish_reason"] is not None:
            said.reasons.append(choice["finish_reason"])


def _begins(history: History, expected: Answer) -> list[str]:
    """Check that the items are the beginning of the unbroken answer: nothing lost, doubled or changed."""
    if not history.streams:
        return []
    try:
        text = _said(history).text
    except ValueError as error:
        return [str(error)]
    if expected.text.startswith(text):
        return []
    same = next(at for at, (one, other) in enumerate(zip(text, expected.text + "\0", strict=False)) if one != other)
    return [f"the text is another one from token {same} on: {text[same : same + 20]!r}"]


def answer_in(body: Mapping[str, Any]) -> Answer:
    """Return the answer in the body of a unary one."""
    choice = body["choices"][0]
    return Answer(choice["message"]["content"], choice["finish_reason"], _totals(body["usage"]))


def _totals(usage: Mapping[str, Any]) -> dict[str, int]:
    # How much was in a cache is no promise.
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
