"""Rates and latencies of the last 15 minutes in fixed memory, which can be summed over frontends."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from dynamo_core import RequestEvent, RequestMoved, RequestRefused
from dynamo_core.protocol import RequestRecord, format_instance_id

#: Seconds of a slot, and how many there are. Slots begin at multiples of their length, so that those of all
#: frontends are the same.
SLOT: Final = 10
SLOTS: Final = 90
#: The same for workers, of which there are more.
WORKER_SLOT: Final = 60
WORKER_SLOTS: Final = 15

#: Names that have counts of their own in one slot; what is above counts as `OTHER`.
MODELS: Final = 64
TENANTS: Final = 64
WORKERS: Final = 2000
OTHER: Final = "other"

#: Upper bounds in seconds, a quarter more each: from 0.5 ms to some minutes. A last bucket holds what is above.
BOUNDS: Final = tuple(0.0005 * 1.25**step for step in range(60))

Counts = dict[str, Any]


class Rates:
    """What the requests of one frontend came to. `clock` gives Unix time in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._models = _Slots(clock, SLOT, SLOTS, MODELS, _model_counts)
        self._tenants = _Slots(clock, SLOT, SLOTS, TENANTS, _tenant_counts)
        self._workers = _Slots(clock, WORKER_SLOT, WORKER_SLOTS, WORKERS, _worker_counts)

    def add(self, record: RequestRecord, way: Sequence[RequestEvent]) -> None:
        """Counts a request that has ended, with all its events."""
        failed = record.status != "success"
        refused = any(isinstance(event, RequestRefused) for event in way)
        model = self._models.at(record.model)
        for counts in (model, self._tenants.at(record.tenant)):
            counts["requests"] += 1
            counts["failed"] += failed
            counts["refused"] += refused
            counts["prompt_tokens"] += record.prompt_tokens
            counts["output_tokens"] += record.output_tokens
        model["cached_tokens"] += record.cached_tokens or 0
        model["moved"] += sum(isinstance(event, RequestMoved) for event in way)
        first = record.time_to_first_token
        if first is not None:
            _observe(model["ttft"], first)
            if record.output_tokens > 1:
                _observe(model["itl"], (record.duration - first) / (record.output_tokens - 1))
        if record.instance_id is not None:
            worker = self._workers.at(format_instance_id(record.instance_id))
            worker["requests"] += 1
            worker["prompt_tokens"] += record.prompt_tokens
            worker["cached_tokens"] += record.cached_tokens or 0

    def slots(self) -> dict[str, dict[int, dict[str, Counts]]]:
        """The counts by kind, by the Unix time at which their slot began, and by name. The arguments of `summed`."""
        return {"models": self._models.live(), "tenants": self._tenants.live(), "workers": self._workers.live()}


class _Slots:
    """Counts by name in slots of equal length, of which the latest are kept."""

    def __init__(
        self, clock: Callable[[], float], length: int, kept: int, names: int, make: Callable[[], Counts]
    ) -> None:
        self._clock = clock
        self._length = length
        self._kept = kept
        self._names = names
        self._make = make
        self._slots: dict[int, dict[str, Counts]] = {}

    def at(self, name: str) -> Counts:
        """The counts of a name, now."""
        slot = self._slots.get(start := self._start())
        if slot is None:
            self._forget(start)
            slot = self._slots[start] = {}
        counts = slot.get(name)
        if counts is None:
            name = name if len(slot) < self._names else OTHER
            counts = slot.setdefault(name, self._make())
        return counts

    def live(self) -> dict[int, dict[str, Counts]]:
        """Those that are not too old."""
        self._forget(self._start())
        return self._slots

    def _start(self) -> int:
        return int(self._clock()) // self._length * self._length

    def _forget(self, now: int) -> None:
        oldest = now - (self._kept - 1) * self._length
        # Later ones are there if the clock was set back.
        for start in [start for start in self._slots if not oldest <= start <= now]:
            del self._slots[start]


def summed(parts: Iterable[Mapping[int, Mapping[str, Counts]]]) -> dict[int, dict[str, Counts]]:
    """One kind of counts of several frontends, by slot and name."""
    total: dict[int, dict[str, Counts]] = {}
    for part in parts:
        for start, names in part.items():
            slot = total.setdefault(start, {})
            for name, counts in names.items():
                slot[name] = _plus(slot.get(name), counts)
    return total


def over(slots: Mapping[int, Mapping[str, Counts]], since: float) -> dict[str, Counts]:
    """The counts by name over all slots that began at `since` or later."""
    total: dict[str, Counts] = {}
    for start, names in slots.items():
        if start >= since:
            for name, counts in names.items():
                total[name] = _plus(total.get(name), counts)
    return total


def percentile(buckets: Mapping[int, int], share: float) -> float | None:
    """The upper bound of the bucket that holds this share of what was observed, in seconds; None if nothing was."""
    left = share * sum(buckets.values())
    for bucket in sorted(buckets):
        left -= buckets[bucket]
        if left <= 0:
            return BOUNDS[min(bucket, len(BOUNDS) - 1)]
    return None


def _observe(buckets: dict[int, int], seconds: float) -> None:
    bucket = bisect_left(BOUNDS, seconds)
    buckets[bucket] = buckets.get(bucket, 0) + 1


def _plus(total: Counts | None, counts: Counts) -> Counts:
    """A new object: those of a frontend go on counting."""
    if total is None:
        return {name: dict(value) if isinstance(value, dict) else value for name, value in counts.items()}
    for name, value in counts.items():
        if isinstance(value, dict):
            known = total[name]
            for bucket, number in value.items():
                known[bucket] = known.get(bucket, 0) + number
        else:
            total[name] = total.get(name, 0) + value
    return total


def _tenant_counts() -> Counts:
    return {"requests": 0, "failed": 0, "refused": 0, "prompt_tokens": 0, "output_tokens": 0}


def _model_counts() -> Counts:
    return {**_tenant_counts(), "cached_tokens": 0, "moved": 0, "ttft": {}, "itl": {}}


def _worker_counts() -> Counts:
    return {"requests": 0, "prompt_tokens": 0, "cached_tokens": 0}
