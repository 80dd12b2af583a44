"""Histories of recent requests: the events of each, for a bounded number."""

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
    RequestMoved,
    RequestReceived,
    RequestRefused,
)
from dynamo_core.protocol import format_instance_id

from dynamo_plugin_extension_feed.worker_names import WorkerNames

#: How many requests that have not ended are kept. More are there only if their ends were lost.
OPEN: Final = 20_000
#: Events kept of one request; one that moves for ever would hold ever more.
EVENTS: Final = 64

#: Where a request stands, in this order.
WAITING, PREFILLING, ANSWERING = "waiting", "prefilling", "answering"


class RequestHistory:
    """The events of one request, where it stands, whether admission has refused it, and how often it has moved."""

    __slots__ = ("events", "moved", "received", "refused", "stands")

    def __init__(self, received: RequestReceived) -> None:
        self.received = received
        self.events: list[RequestEvent] = [received]
        self.stands = WAITING
        self.refused = False
        self.moved = 0


class RequestHistories:
    """Histories of one frontend's requests: the running ones, and the last that ended.

    Folding is left to the reader.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._open: OrderedDict[str, RequestHistory] = OrderedDict()
        self._ended: OrderedDict[str, RequestHistory] = OrderedDict()
        #: Open requests by model and where they stand.
        self._standing: Counter[tuple[str, str]] = Counter()

    def add(self, event: RequestEvent) -> RequestHistory | None:
        """Take the next event. Return the way of the request if it has ended with this one.

        Events of a request whose beginning was not seen are left out.
        """
        way = self._open.get(event.request_id)
        if way is None:
            if isinstance(event, RequestReceived):
                self._begin(event)
            return None
        kind = type(event)
        if kind is RequestFinished:
            way.events.append(event)
            return self._end(way)
        if len(way.events) < EVENTS:
            way.events.append(event)
        if kind is RequestFirstToken:
            self._stand(way, ANSWERING)
        elif kind is RequestAdmitted and way.stands == WAITING:
            self._stand(way, PREFILLING)
        elif kind is RequestRefused:
            way.refused = True
        elif kind is RequestMoved:
            way.moved += 1
        return None

    def find(self, request_id: str) -> RequestHistory | None:
        """Return the way of a request, by its id or by the id that its client gave it; the latest of several."""
        way = self._open.get(request_id) or self._ended.get(request_id)
        if way is not None:
            return way
        return next((way for way in self._latest() if way.received.x_request_id == request_id), None)

    def ended(self) -> Iterator[RequestHistory]:
        """Return those of requests that have ended, the latest first."""
        return reversed(self._ended.values())

    def standing(self) -> dict[str, dict[str, int]]:
        """Return how many requests of each model wait for admission, for their first token, and for the rest."""
        models: dict[str, dict[str, int]] = {}
        for (model, stands), number in self._standing.items():
            models.setdefault(model, {})[stands] = number
        return models

    def _begin(self, event: RequestReceived) -> None:
        self._open[event.request_id] = way = RequestHistory(event)
        self._standing[event.model, way.stands] += 1
        if len(self._open) > OPEN:
            self._leave(self._open.popitem(last=False)[1])

    def _end(self, way: RequestHistory) -> RequestHistory:
        request_id = way.received.request_id
        del self._open[request_id]
        self._leave(way)
        self._ended[request_id] = way
        if len(self._ended) > self._kept:
            self._ended.popitem(last=False)
        return way

    def _stand(self, way: RequestHistory, stands: str) -> None:
        self._leave(way)
        way.stands = stands
        self._standing[way.received.model, stands] += 1

    def _leave(self, way: RequestHistory) -> None:
        place = way.received.model, way.stands
        self._standing[place] -= 1
        if not self._standing[place]:
            del self._standing[place]

    def _latest(self) -> Iterator[RequestHistory]:
        yield from reversed(self._open.values())
        yield from reversed(self._ended.values())


def timeline(way: RequestHistory, names: WorkerNames) -> dict[str, Any]:
    """Return all that is known of a request as plain values: its caller, its aim, and each event, `at` seconds later.

    The end user and the session are left out, since they may identify a person.
    """
    first = way.received
    return {
        "id": first.request_id,
        "x_request_id": first.x_request_id,
        "trace_id": first.trace_id,
        "model": first.model,
        "endpoint": first.endpoint,
        "request_type": first.request_type,
        "tenant": first.principal.tenant,
        "key_id": first.principal.key_id,
        "received": wall_time(first.time),
        "ended": isinstance(way.events[-1], RequestFinished),
        "events": [_plain(event, first.time, names) for event in way.events],
    }


def worker_id(instance_id: int | None) -> str | None:
    """Return a worker's id as it is shown."""
    return None if instance_id is None else format_instance_id(instance_id)


def wall_time(moment: float) -> float:
    """Return a time of `time.monotonic` as Unix time."""
    return time.time() - (time.monotonic() - moment)


def _plain(event: RequestEvent, start: float, names: WorkerNames) -> dict[str, Any]:
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
            "reason": event.reason,
            "streamed": record.request_type == "stream" and record.time_to_first_token is not None,
            "finish_reason": record.finish_reason,
            **_worker(record.instance_id, names),
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "cached_tokens": record.cached_tokens,
            "duration": record.duration,
            "time_to_first_token": record.time_to_first_token,
        }
    fields: dict[str, Any] = msgspec.to_builtins(event)
    del fields["request_id"], fields["time"]
    if "instance_id" in fields:
        fields |= _worker(fields.pop("instance_id"), names)
    for rank in fields.get("candidates") or ():
        names.note(rank["instance_id"])
        rank |= _worker(rank.pop("instance_id"), names)
    return at | fields


def _worker(instance_id: int | None, names: WorkerNames) -> dict[str, str | None]:
    return {"worker": worker_id(instance_id), "worker_name": names.get(instance_id)}
