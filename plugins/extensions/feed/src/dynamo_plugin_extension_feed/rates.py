"""Rates and latencies of the last 15 minutes in fixed memory, which can be summed over frontends."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Generic, TypeVar

import msgspec
from dynamo_core.protocol import RequestRecord, format_instance_id

#: Seconds over which the rates that stand for now are taken, and all that is kept.
NOW: Final = 60
ALL: Final = 900
#: Seconds of a slot, and how many there are. Slots begin at multiples of their length, so that those of all
#: frontends are the same.
SLOT: Final = 10
SLOTS: Final = ALL // SLOT
#: The same for workers, of which there are more.
WORKER_SLOT: Final = 60
WORKER_SLOTS: Final = ALL // WORKER_SLOT

#: Names that have counts of their own in one slot; what is above counts as `OTHER`.
MODELS: Final = 64
TENANTS: Final = 64
WORKERS: Final = 2000
OTHER: Final = "other"
#: The only name where all requests count together.
_EVERY: Final = "every"

#: Upper bounds in seconds, a quarter more each: from 0.5 ms to some minutes. A last bucket holds what is above.
BOUNDS: Final = tuple(0.0005 * 1.25**step for step in range(60))


class Counts(msgspec.Struct):
    """The totals of requests."""

    requests: int = 0


class TenantCounts(Counts):
    """The totals of a tenant's requests."""

    failed: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class ModelCounts(TenantCounts):
    """The totals of a model's requests. `ttft` and `itl` have observations by the index of their bucket."""

    cached_tokens: int = 0
    moved: int = 0
    ttft: dict[int, int] = {}
    itl: dict[int, int] = {}


class WorkerCounts(Counts):
    """The totals of the requests that a worker answered last."""

    prompt_tokens: int = 0
    cached_tokens: int = 0


CountsT = TypeVar("CountsT", bound=Counts)
KeyT = TypeVar("KeyT", bound=Hashable)


class Totals(msgspec.Struct, Generic[CountsT]):
    """Counts by name: of the last `NOW` seconds, and of all `ALL`."""

    minute: dict[str, CountsT]
    whole: dict[str, CountsT]


class FrontendCounts(msgspec.Struct):
    """The totals of one frontend's requests; `history` is by the Unix time at which a slot began."""

    models: Totals[ModelCounts]
    tenants: Totals[TenantCounts]
    workers: dict[str, WorkerCounts]
    history: dict[int, ModelCounts]


class Rates:
    """A counter of one frontend's requests. `clock` gives Unix time in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        #: When counting began.
        self.since = clock()
        self._models = _Slots(clock, SLOT, SLOTS, MODELS, ModelCounts)
        self._every = _Slots(clock, SLOT, SLOTS, 1, ModelCounts)
        self._tenants = _Slots(clock, SLOT, SLOTS, TENANTS, TenantCounts)
        self._workers = _Slots(clock, WORKER_SLOT, WORKER_SLOTS, WORKERS, WorkerCounts)

    def add(self, record: RequestRecord, *, refused: bool = False, moved: int = 0) -> None:
        """Count a request that has ended: whether admission refused it, and how often it moved to another worker."""
        failed = record.status != "success"
        cached = record.cached_tokens or 0
        model, every = self._models.at(record.model), self._every.at(_EVERY)
        for counts in (model, every, self._tenants.at(record.tenant)):
            counts.requests += 1
            counts.failed += failed
            counts.refused += refused
            counts.prompt_tokens += record.prompt_tokens
            counts.output_tokens += record.output_tokens
        first = record.time_to_first_token
        ttft = itl = None
        if first is not None:
            ttft = bisect_left(BOUNDS, first)
            if record.output_tokens > 1:
                itl = bisect_left(BOUNDS, (record.duration - first) / (record.output_tokens - 1))
        for both in (model, every):
            both.cached_tokens += cached
            both.moved += moved
            if ttft is not None:
                both.ttft[ttft] = both.ttft.get(ttft, 0) + 1
            if itl is not None:
                both.itl[itl] = both.itl.get(itl, 0) + 1
        if record.instance_id is not None:
            worker = self._workers.at(format_instance_id(record.instance_id))
            worker.requests += 1
            worker.prompt_tokens += record.prompt_tokens
            worker.cached_tokens += cached

    def counted(self) -> FrontendCounts:
        """Return the counts as they are now. They go on counting: encode or sum them before others have their turn."""
        return FrontendCounts(
            Totals(self._models.since(NOW), self._models.whole()),
            Totals(self._tenants.since(NOW), self._tenants.whole()),
            self._workers.whole(),
            {start: names[_EVERY] for start, names in self._every.live()},
        )


class _Slots(Generic[CountsT]):
    """Counts by name in slots of equal length, of which the latest are kept.

    The sum over the slots before the current one is kept too, so that reading them all costs little however many
    names there are.
    """

    def __init__(
        self, clock: Callable[[], float], length: int, kept: int, names: int, make: Callable[[], CountsT]
    ) -> None:
        self._clock = clock
        self._length = length
        self._kept = kept
        self._names = names
        self._make = make
        self._slots: dict[int, dict[str, CountsT]] = {}
        self._current = -1
        self._past: dict[str, CountsT] = {}
        #: The slots that are in that sum.
        self._summed: set[int] = set()

    def at(self, name: str) -> CountsT:
        """Return the counts of a name, now."""
        slot = self._now()
        counts = slot.get(name)
        if counts is None:
            name = name if len(slot) < self._names else OTHER
            counts = slot.setdefault(name, self._make())
        return counts

    def since(self, seconds: int) -> dict[str, CountsT]:
        """Return the sums over the slots that began no longer ago."""
        oldest = self._clock() - seconds
        return summed(names for start, names in self.live() if start >= oldest)

    def whole(self) -> dict[str, CountsT]:
        """Return the sums over all slots."""
        now = self._now()
        return summed((self._past, now))

    def live(self) -> Iterator[tuple[int, dict[str, CountsT]]]:
        """Return the slots that have counts, by the Unix time at which they began."""
        self._now()
        return ((start, names) for start, names in self._slots.items() if names)

    def _now(self) -> dict[str, CountsT]:
        """Return the current slot."""
        start = int(self._clock()) // self._length * self._length
        if start != self._current:
            self._turn(start)
        return self._slots[start]

    def _turn(self, current: int) -> None:
        """Begin another slot. It is an earlier one if the clock was set back, and then later ones are dropped."""
        oldest = current - (self._kept - 1) * self._length
        past = {start for start in self._slots if oldest <= start < current}
        for start in self._summed - past:
            for name, counts in self._slots[start].items():
                total = self._past[name]
                _add(total, counts, -1)
                if not total.requests:
                    del self._past[name]
        for start in past - self._summed:
            for name, counts in self._slots[start].items():
                _add(self._past.setdefault(name, self._make()), counts)
        self._summed = past
        for start in self._slots.keys() - past - {current}:
            del self._slots[start]
        self._slots.setdefault(current, {})
        self._current = current


def summed(parts: Iterable[Mapping[KeyT, CountsT]]) -> dict[KeyT, CountsT]:
    """Return the sum of several counts by key, as new objects."""
    total: dict[KeyT, CountsT] = {}
    for part in parts:
        for key, counts in part.items():
            known = total.get(key)
            if known is None:
                known = total[key] = type(counts)()
            _add(known, counts)
    return total


def percentiles(buckets: Mapping[int, int], shares: Sequence[float]) -> list[float | None]:
    """Return for each share the upper bound in seconds of its bucket; None if nothing was observed.

    The shares grow.
    """
    total, passed = sum(buckets.values()), 0
    found: list[float | None] = []
    for bucket in sorted(buckets):
        passed += buckets[bucket]
        while len(found) < len(shares) and passed >= shares[len(found)] * total:
            found.append(BOUNDS[max(0, min(bucket, len(BOUNDS) - 1))])
    return [*found, *[None] * (len(shares) - len(found))]


def _add(total: CountsT, counts: CountsT, sign: int = 1) -> None:
    for name in counts.__struct_fields__:
        value = getattr(counts, name)
        if not isinstance(value, dict):
            setattr(total, name, getattr(total, name) + sign * value)
            continue
        known = getattr(total, name)
        for bucket, number in value.items():
            left = known.get(bucket, 0) + sign * number
            if left:
                known[bucket] = left
            else:
                known.pop(bucket, None)
