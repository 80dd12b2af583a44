"""The ways of the last requests: what happened to each, as events tell it, for a bounded number of requests."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from dynamo_core import (
    RequestAdmitted,
    RequestEvent,
    RequestFinished,
    RequestFirstToken,
    RequestReceived,
)
from dynamo_core.protocol import format_instance_id

#: How many requests that have not ended are kept. More are there only if their ends were lost.
OPEN: Final = 20_000
#: Events kept of one request; one that moves for ever would hold ever more.
EVENTS: Final = 64

#: Where a request stands, in this order.
WAITING, PREFILLING, ANSWERING = "waiting", "prefilling", "answering"


class Ways:
    """The requests of one frontend: those that run, and the last that ended. Folding is left to the reader."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._open: OrderedDict[str, list[RequestEvent]] = OrderedDict()
        self._ended: OrderedDict[str, list[RequestEvent]] = OrderedDict()

    def add(self, event: RequestEvent) -> list[RequestEvent] | None:
        """Takes the next event. Returns all events of the request if it has ended with this one.

        Events of a request whose beginning was not seen are left out.
        """
        way = self._open.get(event.request_id)
        if way is None:
            if isinstance(event, RequestReceived):
                self._open[event.request_id] = [event]
                if len(self._open) > OPEN:
                    self._open.popitem(last=False)
            return None
        ended = isinstance(event, RequestFinished)
        if ended or len(way) < EVENTS:
            way.append(event)
        if not ended:
            return None
        del self._open[event.request_id]
        self._ended[event.request_id] = way
        if len(self._ended) > self._kept:
            self._ended.popitem(last=False)
        return way

    def find(self, request_id: str) -> list[RequestEvent] | None:
        """The events of a request, by its id or by the id that its client gave it; the latest of several."""
        way = self._open.get(request_id) or self._ended.get(request_id)
        if way is not None:
            return way
        return next((way for way in self._latest() if received(way).x_request_id == request_id), None)

    def last(self, count: int) -> list[dict[str, Any]]:
        """A line for each of the last requests that have ended, the latest first."""
        return [line for _, line in zip(range(count), map(_line, reversed(self._ended.values())), strict=False)]

    def standing(self) -> dict[str, dict[str, int]]:
        """How many requests of each model wait for admission, for their first token, and for the rest."""
        counts: Counter[tuple[str, str]] = Counter()
        for way in self._open.values():
            counts[received(way).model, _stands(way)] += 1
        models: dict[str, dict[str, int]] = {}
        for (model, stands), number in counts.items():
            models.setdefault(model, {})[stands] = number
        return models

    def _latest(self) -> Iterator[list[RequestEvent]]:
        yield from reversed(self._open.values())
        yield from reversed(self._ended.values())


def received(way: list[RequestEvent]) -> RequestReceived:
    """How the request began."""
    first = way[0]
    assert isinstance(first, RequestReceived)  # noqa: S101 - `Ways.add` begins no other way
    return first


def timeline(way: list[RequestEvent]) -> dict[str, Any]:
    """All that is known of a request, as plain values: who asked, for what, and each event, `at` seconds from then.

    The end user and the session are left out, since they may identify a person.
    """
    first = received(way)
    return {
        "id": first.request_id,
        "x_request_id": first.x_request_id,
        "trace_id": first.trace_id,
        "model": first.model,
        "endpoint": first.endpoint,
        "request_type": first.request_type,
        "tenant": first.principal.tenant,
        "key_id": first.principal.key_id,
        "received": _wall(first.time),
        "ended": isinstance(way[-1], RequestFinished),
        "events": [_plain(event, first.time) for event in way],
    }


def _plain(event: RequestEvent, start: float) -> dict[str, Any]:
    at = {"at": round(event.time - start, 6)}
    if isinstance(event, RequestReceived):
        return {**at, "event": "received"}
    if isinstance(event, RequestFinished):
        record = event.record
        return {
            **at,
            "event": "finished",
            "status": record.status,
            "error_type": record.error_type,
            "http_status": record.http_status,
            "finish_reason": record.finish_reason,
            "worker": _worker(record.instance_id),
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "cached_tokens": record.cached_tokens,
            "duration": record.duration,
            "time_to_first_token": record.time_to_first_token,
        }
    fields: dict[str, Any] = msgspec.to_builtins(event)
    del fields["request_id"], fields["time"]
    if "instance_id" in fields:
        fields["worker"] = _worker(fields.pop("instance_id"))
    for rank in fields.get("candidates") or ():
        rank["worker"] = _worker(rank.pop("instance_id"))
    return at | fields


def _line(way: list[RequestEvent]) -> dict[str, Any]:
    first, last = received(way), way[-1]
    assert isinstance(last, RequestFinished)  # noqa: S101 - only such are kept among those that have ended
    record = last.record
    return {
        "id": first.request_id,
        "model": first.model,
        "endpoint": first.endpoint,
        "tenant": first.principal.tenant,
        "received": _wall(first.time),
        "status": record.status,
        "error_type": record.error_type,
        "finish_reason": record.finish_reason,
        "worker": _worker(record.instance_id),
        "waited": next((event.waited for event in way if isinstance(event, RequestAdmitted)), None),
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "cached_tokens": record.cached_tokens,
        "duration": record.duration,
        "time_to_first_token": record.time_to_first_token,
    }


def _stands(way: list[RequestEvent]) -> str:
    if any(isinstance(event, RequestFirstToken) for event in way):
        return ANSWERING
    return PREFILLING if any(isinstance(event, RequestAdmitted) for event in way) else WAITING


def _worker(instance_id: int | None) -> str | None:
    return None if instance_id is None else format_instance_id(instance_id)


def _wall(moment: float) -> float:
    """A time of `time.monotonic` as Unix time."""
    return time.time() - (time.monotonic() - moment)
