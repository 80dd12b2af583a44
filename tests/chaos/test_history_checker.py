"""The checker finds what is wrong with made-up histories, and nothing in sound ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.history import Answer, Asked, End, History, Outcome, check, judge
from tests.chaos.processes import read_metrics

TEXT = "tokens"
USAGE = {"prompt_tokens": 3, "completion_tokens": len(TEXT), "total_tokens": 3 + len(TEXT)}
ANSWER = Answer(TEXT, "length", USAGE)
ERROR = {
    "error": {"message": "Internal server error", "type": "server_error", "param": None, "code": None},
    "message": "Internal server error",
    "type": "server_error",
    "code": 500,
}
DONE = "data: [DONE]"


def chunk(*, content: str | None = None, reason: str | None = None, id: str = "one", **more: Any) -> str:
    delta = {} if content is None else {"content": content}
    choices = [{"index": 0, "delta": delta, "finish_reason": reason}]
    return "data: " + json.dumps({"id": id, "choices": choices} | more)


def error(**changes: Any) -> str:
    return "data: " + json.dumps(ERROR | changes)


USED = "data: " + json.dumps({"id": "one", "choices": [], "usage": USAGE | {"prompt_tokens_details": {}}})
TOKENS = [chunk(content=token) for token in TEXT]
WHOLE = [*TOKENS, chunk(reason="length"), USED, DONE]
BROKEN = [*TOKENS[:3], error()]


def stream(*events: str, end: End = End.CLEAN, rest: bytes = b"") -> History:
    """Return a history of a stream that was sent at second 10 and had an event each second."""
    history = History(Asked(1), sent=10.0)
    history.answered(200, {"Content-Type": "text/event-stream"})
    for at, event in enumerate(events):
        history.came(11.0 + at, event.encode() + b"\n\n")
    history.body += rest
    history.over(11.0 + len(events), end)
    return history


def unary(body: Any, status: int = 200, *, end: End = End.CLEAN, headers: dict[str, str] | None = None) -> History:
    history = History(Asked(1, stream=False), sent=10.0)
    history.answered(status, {"Content-Type": "application/json"} | (headers or {}))
    history.came(11.0, body if isinstance(body, bytes) else json.dumps(body).encode())
    history.over(12.0, end)
    return history


def said(text: str = TEXT, reason: str = "length", **usage: int) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}, "finish_reason": reason}], "usage": USAGE | usage}


def ended(*ends: tuple[float, End]) -> History:
    history = stream(*WHOLE)
    history.ends = list(ends)
    return history


@pytest.mark.parametrize(
    ("history", "outcome"),
    [
        (stream(*WHOLE), Outcome.WHOLE),
        (stream(": keep-alive", *WHOLE), Outcome.WHOLE),
        (stream(*BROKEN, end=End.ABORTED), Outcome.BROKEN),
        (stream(error(code=504), end=End.ABORTED), Outcome.BROKEN),
        (unary(said()), Outcome.WHOLE),
        (unary(ERROR, 500), Outcome.FAILED),
        (unary(ERROR | {"code": 503}, 503, headers={"Retry-After": "1"}), Outcome.FAILED),
        (stream(*TOKENS[:2], end=End.LEFT), Outcome.LEFT),
        (History(Asked(1), sent=1.0, ends=[(2.0, End.LEFT)]), Outcome.LEFT),
    ],
)
def test_sound_histories_are_found_sound(history: History, outcome: Outcome) -> None:
    assert judge(history, ANSWER) == (outcome, [])


BAD = {
    "never ended": (ended(), "it ended 0 times"),
    "ended twice": (ended((30.0, End.CLEAN), (31.0, End.ABORTED)), "it ended 2 times"),
    "hung": (ended((41.0, End.HUNG)), "had not ended after 31.0 s"),
    "too late": (ended((90.0, End.CLEAN)), "ended after 80.0 s"),
    "an event after the end": (ended((12.0, End.CLEAN)), "after the end"),
    "truncated as if whole": (stream(*TOKENS[:3]), "without [DONE] and without an error"),
    "cut without a word": (stream(*TOKENS[:3], end=End.ABORTED), "without [DONE] and without an error"),
    "no event at all": (stream(), "without [DONE] and without an error"),
    "a token lost": (stream(*TOKENS[:3], *TOKENS[4:], *WHOLE[-3:]), "another one from token 3"),
    "a token doubled": (stream(*TOKENS[:3], TOKENS[2], *WHOLE[3:]), "another one from token 3"),
    "tokens changed places": (stream(TOKENS[1], TOKENS[0], *WHOLE[2:]), "another one from token 0"),
    "another token": (stream(*TOKENS[:5], chunk(content="X"), *WHOLE[-3:]), "another one from token 5"),
    "a token too many": (stream(*TOKENS, chunk(content="X"), *WHOLE[-3:]), "another one from token 6"),
    "the last tokens lost": (stream(*TOKENS[:4], *WHOLE[-3:]), "4 of 6 tokens came"),
    "wrong tokens before an error": (stream(TOKENS[1], error(), end=End.ABORTED), "another one from token 0"),
    "wrong tokens before the client left": (stream(TOKENS[1], end=End.LEFT), "another one from token 0"),
    "no finish_reason": (stream(*TOKENS, USED, DONE), "finish_reason was []"),
    "finish_reason twice": (stream(*TOKENS, WHOLE[-3], *WHOLE[-3:]), "finish_reason was ['length', 'length']"),
    "another finish_reason": (stream(*TOKENS, chunk(reason="stop"), USED, DONE), "finish_reason was ['stop']"),
    "[DONE] twice": (stream(*WHOLE, DONE), "after [DONE]"),
    "text after [DONE]": (stream(*WHOLE, chunk(content="")), "after [DONE]"),
    "[DONE] on a broken connection": (stream(*WHOLE, end=End.ABORTED), "[DONE], but the connection broke"),
    "half an item after [DONE]": (stream(*WHOLE, rest=b"data: {"), "half an item"),
    "no usage": (stream(*TOKENS, WHOLE[-3], DONE), "usage was []"),
    "usage of a part": (stream(*WHOLE[:-2], USED.replace("6", "5"), DONE), "usage was"),
    "two streams under one request": (stream(chunk(content="t", id="two"), *WHOLE[1:]), "2 ids"),
    "an error, then [DONE]": (stream(*BROKEN, DONE, end=End.ABORTED), "[DONE] and an error"),
    "an error after [DONE]": (stream(*WHOLE, error(), end=End.ABORTED), "[DONE] and an error"),
    "an error after the end": (stream(*WHOLE[:-2], error(), end=End.ABORTED), "a finish_reason and an error"),
    "two errors": (stream(*BROKEN, error(), end=End.ABORTED), "after the error"),
    "an error and a clean end": (stream(*BROKEN), "as if all were well"),
    "an error of another form": (
        stream('data: {"error": {"message": "x"}}', end=End.ABORTED),
        "not the documented form",
    ),
    "an error whose parts differ": (stream(error(message="y"), end=End.ABORTED), "not the documented form"),
    "an error with more in it": (stream(error(trace="…"), end=End.ABORTED), "not the documented form"),
    "an error that is no status": (stream(error(code=200), end=End.ABORTED), "an error with code 200"),
    "an error that tells internals": (
        stream(
            error(message="Disconnected: 1.2.3.4", error=ERROR["error"] | {"message": "Disconnected: 1.2.3.4"}),  # type: ignore[operator]
            end=End.ABORTED,
        ),
        "tells internals",
    ),
    "half a chunk": (stream("data: {"), "no chunk"),
    "another object": (stream('data: {"id": "one"}'), "no chunk"),
    "no object": (stream("data: 5"), "no chunk"),
    "an unknown item": (stream("event: what"), "an item that is none"),
    "a unary answer cut off": (unary(said(), end=End.ABORTED), "status 200, but the connection broke"),
    "a unary answer that is none": (unary({"choices": []}), "no answer"),
    "a unary error under 200": (unary(ERROR), "no answer"),
    "a unary answer too short": (unary(said(TEXT[:3])), "the answer is"),
    "unary usage of a part": (unary(said(completion_tokens=5)), "the answer is"),
    "no answer": (History(Asked(1), sent=1.0, ends=[(2.0, End.ABORTED)]), "no answer at all"),
    "a client's fault that was none": (unary(ERROR | {"code": 400}, 400), "status 400"),
    "a code that is not the status": (unary(ERROR, 503), "code 500 under status 503"),
    "an error that is no JSON": (unary(b"<html>", 500), "no JSON"),
    "an error cut off": (unary(ERROR, 500, end=End.ABORTED), "status 500, but the connection broke"),
    "come back never": (unary(ERROR | {"code": 503}, 503, headers={"Retry-After": "0"}), "Retry-After was '0'"),
}


@pytest.mark.parametrize(("history", "problem"), BAD.values(), ids=list(BAD))
def test_faults_of_a_history_are_found(history: History, problem: str) -> None:
    _, problems = judge(history, ANSWER)

    assert any(problem in found for found in problems), problems


def test_a_request_that_may_not_break_must_be_whole() -> None:
    broken = stream(*BROKEN, end=End.ABORTED)

    assert check([broken], {1: ANSWER}, {1: {Outcome.BROKEN, Outcome.WHOLE}}) == []
    assert check([broken], {1: ANSWER}, {}) == [
        "request 1: it was begun, then broken off with an error, and may only be answered as an unbroken run would"
    ]


def test_a_request_that_must_break_may_not_be_whole() -> None:
    assert "may only be begun" in check([stream(*WHOLE)], {1: ANSWER}, {1: {Outcome.BROKEN}})[0]


def test_two_histories_of_one_request_are_one_too_many() -> None:
    assert check([stream(*WHOLE), stream(*WHOLE)], {1: ANSWER}, {}) == ["request 1: there are two histories of it"]


@given(st.data())
def test_a_stream_is_read_the_same_however_cut(data: st.DataObject) -> None:
    whole = "".join(f"{event}\n\n" for event in [": hello", *WHOLE]).encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)))))
    history = History(Asked(1))
    history.answered(200, {"content-type": "text/event-stream; charset=utf-8"})

    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        history.came(1.0, whole[start:end])
    history.over(2.0, End.CLEAN)

    assert [event for _, event in history.events] == WHOLE
    assert judge(history, ANSWER) == (Outcome.WHOLE, [])


def test_gauges_are_summed_and_one_that_is_missing_is_an_error() -> None:
    text = '# TYPE a gauge\na{x="1"} 2.0\na{x="2"} 3.0\nb 0.0\nab 7.0\n'

    assert read_metrics(text, ["a", "b"]) == {"a": 5.0, "b": 0.0}
    with pytest.raises(KeyError):
        read_metrics(text, ["a", "c"])
