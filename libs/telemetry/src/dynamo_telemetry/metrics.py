"""Metrics with exact names and cheap children, over a Prometheus registry.

The stock client appends ``_total`` to every counter and pays a lock per event. Here a family keeps plain numbers and
writes its own text, so that a name is what the caller said, an event costs a tenth of a microsecond, and a scrape of
many histograms does not hold the interpreter for long. Families are collectors of the registry as well, so anything
that reads the registry sees them.
"""

from __future__ import annotations

import asyncio
import math
import re
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Generic, TypeVar, cast

from prometheus_client import CollectorRegistry, Metric, generate_latest

from dynamo_telemetry.foreign_registry_bridge import BridgeCollector, RegistryBridge

#: The content type of `Metrics.render`.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Upper bounds of a histogram that names none, in seconds.
DEFAULT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Count up.

        Raises:
            ValueError: `amount` is negative.
        """
        if amount < 0:
            raise ValueError("a counter cannot be counted down")
        self.value += amount


class Gauge:
    """A number that goes up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add."""
        self.value += amount

    def dec(self, amount: float = 1) -> None:
        """Subtract."""
        self.value -= amount

    def set(self, value: float) -> None:
        """Set."""
        self.value = value


class Histogram:
    """Observations counted in buckets. `counts` has one entry per bound and one more above the last."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, amount: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, amount)] += 1
        self.sum += amount

    def observe_many(self, counts: Sequence[int], total: float) -> None:
        """Add observations that were counted elsewhere: how many per bucket (not cumulative), and their sum.

        Raises:
            ValueError: `counts` does not have ``len(bounds) + 1`` entries.
        """
        own = self.counts
        if len(counts) != len(own):
            raise ValueError(f"{len(own)} counts are needed, one per bucket and one above the last, not {len(counts)}")
        for index, count in enumerate(counts):
            if count:
                own[index] += count
        self.sum += total


ChildT = TypeVar("ChildT", bound=Counter | Gauge | Histogram)

# While this process writes its own text, families give nothing to the registry: it is asked for foreign metrics only.
_writing = threading.local()


class _Family(Generic[ChildT]):
    """All children of one name, over all scopes with the same label names."""

    kind: ClassVar[str] = ""

    def __init__(self, name: str, help: str, labels: tuple[str, ...], make: Callable[[], ChildT]) -> None:
        self.name = name
        self.help = help
        self.label_names = labels
        self._make = make
        self._lock = threading.Lock()
        #: Each child, and the part of each of its lines before the value: made once, as label values never change.
        self._children: dict[tuple[str, ...], tuple[ChildT, list[str]]] = {}

    def child(self, values: tuple[str, ...]) -> ChildT:
        entry = self._children.get(values)
        if entry is None:
            with self._lock:
                entry = self._children.get(values)
                if entry is None:
                    entry = self._children[values] = (self._make(), self._lines(values))
        return entry[0]

    def forget(self, values: tuple[str, ...]) -> None:
        with self._lock:
            self._children.pop(values, None)

    def describe(self) -> Iterable[Metric]:
        """Return the names that are reserved in the registry."""
        return [Metric(self.name, self.help, "unknown")]

    def collect(self) -> Iterable[Metric]:
        """Return the metric as the stock client would hold it, with the exact name on every sample."""
        if getattr(_writing, "active", False):
            return []
        name = self.name.removesuffix("_total") if self.kind == "counter" else self.name
        metric = Metric(name, self.help, self.kind)
        for values, child, _ in self._snapshot():
            labels = dict(zip(self.label_names, values, strict=True))
            for suffix, extra, value in self._samples(child):
                metric.add_sample(self.name + suffix, labels | extra, value)
        return [metric]

    def write(self, out: list[str]) -> None:
        """Append this family in the Prometheus text format."""
        text = self.help.replace("\\", r"\\").replace("\n", r"\n")
        out.append(f"# HELP {self.name} {text}\n# TYPE {self.name} {self.kind}\n")
        for _, child, heads in self._snapshot():
            for head, value in zip(heads, self._numbers(child), strict=True):
                out.append(f"{head} {_number(value)}\n")

    def _snapshot(self) -> list[tuple[tuple[str, ...], ChildT, list[str]]]:
        with self._lock:
            return [(values, child, heads) for values, (child, heads) in self._children.items()]

    def _labels(self, values: tuple[str, ...]) -> list[str]:
        pairs = sorted(zip(self.label_names, values, strict=True))
        return [f'{name}="{_escape(value)}"' for name, value in pairs]

    def _lines(self, values: tuple[str, ...]) -> list[str]:
        labels = self._labels(values)
        return [f"{self.name}{{{','.join(labels)}}}" if labels else self.name]

    def _numbers(self, child: ChildT) -> Iterable[float]:
        return (cast(Counter | Gauge, child).value,)

    def _samples(self, child: ChildT) -> Iterable[tuple[str, dict[str, str], float]]:
        return [("", {}, value) for value in self._numbers(child)]


class _Counters(_Family[Counter]):
    kind = "counter"


class _Gauges(_Family[Gauge]):
    kind = "gauge"


class _Histograms(_Family[Histogram]):
    kind = "histogram"

    def __init__(self, name: str, help: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> None:
        super().__init__(name, help, labels, lambda: Histogram(bounds))
        self.bounds = bounds
        self._les = [_number(bound) for bound in (*bounds, math.inf)]

    def describe(self) -> Iterable[Metric]:
        return [Metric(self.name, self.help, "histogram")]

    def _lines(self, values: tuple[str, ...]) -> list[str]:
        labels = self._labels(values)
        plain = f"{{{','.join(labels)}}}" if labels else ""
        before = ",".join([*labels, 'le="'])
        lines = [f'{self.name}_bucket{{{before}{le}"}}' for le in self._les]
        return [*lines, f"{self.name}_sum{plain}", f"{self.name}_count{plain}"]

    def _numbers(self, child: Histogram) -> Iterable[float]:
        total = 0
        numbers: list[float] = []
        # A copy, so that the count equals the last bucket even if an observation arrives in between.
        for count in tuple(child.counts):
            total += count
            numbers.append(total)
        return [*numbers, child.sum, total]

    def _samples(self, child: Histogram) -> Iterable[tuple[str, dict[str, str], float]]:
        *buckets, total, count = self._numbers(child)
        rows = [("_bucket", {"le": le}, value) for le, value in zip(self._les, buckets, strict=True)]
        return [*rows, ("_sum", {}, total), ("_count", {}, count)]


class Family(Generic[ChildT]):
    """One metric as one scope sees it: its common label values are filled in."""

    __slots__ = ("_common", "_family", "_names")

    def __init__(self, family: _Family[ChildT], common: tuple[str, ...], names: tuple[str, ...]) -> None:
        self._family = family
        self._common = common
        self._names = names

    def labels(self, *values: str) -> ChildT:
        """Return the child for these label values, in the order of the label names. Keep it: the look-up is not free.

        Raises:
            ValueError: not one value per label name.
        """
        return self._family.child(self._key(values))

    def remove(self, *values: str) -> None:
        """Remove the child for these label values, if it exists."""
        self._family.forget(self._key(values))

    def _key(self, values: tuple[str, ...]) -> tuple[str, ...]:
        if len(values) != len(self._names):
            raise ValueError(f"metric {self._family.name}: {len(self._names)} label values are needed: {self._names}")
        return self._common + tuple(str(value) for value in values)


class _Shared:
    """The state shared by all scopes of one registry."""

    def __init__(self, registry: CollectorRegistry, cache_seconds: float) -> None:
        self.registry = registry
        self.cache_seconds = cache_seconds
        self.lock = threading.Lock()
        self.families: dict[str, _Family[Any]] = {}
        self.bridges: BridgeCollector | None = None
        self.rendering = asyncio.Lock()
        self.rendered: bytes = b""
        #: When the last rendering began, and how many changes there had been.
        self.rendered_at = -math.inf
        self.shown = 0
        #: Changes that a scrape must show.
        self.changes = 0

    def write(self) -> bytes:
        with self.lock:
            families = sorted(self.families.items())
        out: list[str] = []
        for _, family in families:
            family.write(out)
        _writing.active = True
        try:
            foreign = generate_latest(self.registry)
        finally:
            _writing.active = False
        # A label value may hold half of a surrogate pair; it must not cost the whole page.
        return "".join(out).encode("utf-8", "replace") + foreign


class Metrics:
    """A scope of metrics with common labels; implements `dynamo_core.contracts.metrics.MetricsScope`.

    Events are meant for one thread, usually that of the event loop; making children, removing them and rendering are
    safe from any. `cache_seconds` is how long a rendering is reused if nothing `changed`.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        labels: Mapping[str, str] | None = None,
        *,
        cache_seconds: float = 1.0,
    ) -> None:
        self._labels = dict(labels or {})
        self._bridged: list[RegistryBridge] = []
        self._shared = _Shared(registry if registry is not None else CollectorRegistry(), cache_seconds)

    @property
    def registry(self) -> CollectorRegistry:
        """The registry, for collectors of a plugin's own."""
        return self._shared.registry

    def scope(self, **labels: str) -> Metrics:
        """Return a scope with more common labels over the same registry.

        Raises:
            ValueError: a label is already common here.
        """
        if doubled := self._labels.keys() & labels.keys():
            raise ValueError(f"common labels are already set: {', '.join(sorted(doubled))}")
        child = Metrics.__new__(Metrics)
        child._labels = {**self._labels, **labels}
        child._shared = self._shared
        child._bridged = []
        return child

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Family[Counter]:
        """Return a counter.

        Raises:
            ValueError: a bad name, or the name is in use with another type or other labels.
        """
        return self._family(name, labels, _Counters, lambda names: _Counters(name, help, names, Counter))

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Family[Gauge]:
        """Return a gauge. Raise as `counter` does."""
        return self._family(name, labels, _Gauges, lambda names: _Gauges(name, help, names, Gauge))

    def histogram(
        self, name: str, help: str, labels: Sequence[str] = (), buckets: Sequence[float] = ()
    ) -> Family[Histogram]:
        """Return a histogram with the given upper bounds, `DEFAULT_BUCKETS` if there are none; ``+Inf`` is added.

        Raises:
            ValueError: as `counter` does; also bounds that do not grow or differ from those in use.
        """
        bounds = tuple(float(bound) for bound in buckets if bound != math.inf) or DEFAULT_BUCKETS
        if any(not low < high for low, high in pairwise(bounds)):
            raise ValueError(f"metric {name}: the bounds of buckets must grow: {bounds}")
        if "le" in labels or "le" in self._labels:
            raise ValueError(f"metric {name}: the label le belongs to the buckets")
        family = self._family(name, labels, _Histograms, lambda names: _Histograms(name, help, names, bounds))
        in_use = cast(_Histograms, self._shared.families[name]).bounds
        if in_use != bounds:
            raise ValueError(f"metric {name} is in use with other buckets: {in_use}")
        return family

    def bridge(self, source: CollectorRegistry, *, prefixes: Sequence[str]) -> None:
        """Show metrics of another registry too; see `MetricsScope.bridge`.

        Raises:
            ValueError: no prefix is given, or the registry is this one.
        """
        shared = self._shared
        if not prefixes or not all(prefixes):
            raise ValueError("name the prefixes of the metrics to bridge")
        if source is shared.registry:
            raise ValueError("a registry cannot be bridged into itself")
        bridge = RegistryBridge(source, prefixes, self._labels)
        with shared.lock:
            if shared.bridges is None:
                shared.bridges = BridgeCollector(shared.families.__contains__)
                shared.registry.register(shared.bridges)
        shared.bridges.add(bridge)
        self._bridged.append(bridge)

    def unbridge(self) -> None:
        """End the bridges of this scope. Safe twice."""
        bridged, self._bridged = self._bridged, []
        for bridge in bridged:
            if self._shared.bridges is not None:
                self._shared.bridges.remove(bridge)

    def changed(self) -> None:
        """Invalidate the cached rendering; see `MetricsScope.changed`."""
        self._shared.changes += 1

    async def render(self) -> bytes:
        """Return all metrics of the registry as text, written in a thread.

        A rendering is reused for `cache_seconds`, unless `changed` was called since it began. Concurrent callers share
        one: the rendering under way, or after a change the next.
        """
        shared = self._shared
        asked, changes = time.monotonic(), shared.changes
        async with shared.rendering:
            if shared.shown < changes or asked - shared.rendered_at >= shared.cache_seconds:
                begun, shown = time.monotonic(), shared.changes
                shared.rendered = await asyncio.to_thread(shared.write)
                shared.rendered_at, shared.shown = begun, shown
            return shared.rendered

    def render_now(self) -> bytes:
        """Return all metrics of the registry as text, as they are now."""
        return self._shared.write()

    def _family(
        self,
        name: str,
        labels: Sequence[str],
        cls: type[_Family[ChildT]],
        make: Callable[[tuple[str, ...]], _Family[ChildT]],
    ) -> Family[ChildT]:
        own = tuple(labels)
        names = (*self._labels, *own)
        if len(set(names)) != len(names):
            raise ValueError(f"metric {name}: a label is given twice: {', '.join(names)}")
        shared = self._shared
        with shared.lock:
            family = shared.families.get(name)
            if family is None:
                _check_names(name, names)
                family = make(names)
                shared.registry.register(family)
                shared.families[name] = family
        if not isinstance(family, cls) or family.label_names != names:
            raise ValueError(
                f"metric {name} is in use as a {family.kind} with labels {list(family.label_names)}; "
                f"asked for a {cls.kind} with labels {list(names)}"
            )
        made: Family[ChildT] = Family(family, tuple(self._labels.values()), own)
        if not own:
            made.labels()  # a metric without labels of its own shows from the start, as 0
        return made


def _check_names(name: str, labels: Sequence[str]) -> None:
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"not a name of a metric: {name!r}")
    for label in labels:
        if _LABEL.fullmatch(label) is None:
            raise ValueError(f"metric {name}: not a name of a label: {label!r}")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
