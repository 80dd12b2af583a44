"""A bridge that exports the metrics of another library's registry, with the labels of its scope."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.samples import Sample

log = logging.getLogger(__name__)

#: Samples with the creation time of a series; our metrics have none.
_CREATED_SUFFIX = "_created"
#: Put before a foreign label that has the name of one of ours, as Prometheus does when it scrapes.
_EXPORTED = "exported_"


class RegistryBridge:
    """The chosen metrics of one foreign registry, for one scope."""

    def __init__(self, source: CollectorRegistry, prefixes: Sequence[str], labels: Mapping[str, str]) -> None:
        self.source = source
        self._prefixes = tuple(prefixes)
        self._labels = dict(labels)
        self._failed = False

    def collect(self) -> list[Metric]:
        """Return the registry's metrics now; nothing if it fails, which is logged once."""
        try:
            found = [
                self._labelled(metric) for metric in self.source.collect() if metric.name.startswith(self._prefixes)
            ]
        except Exception:
            if not self._failed:
                self._failed = True
                log.exception("the metrics of a bridged registry cannot be collected; they are left out")
            return []
        self._failed = False
        return found

    def _labelled(self, metric: Metric) -> Metric:
        own = self._labels
        made = Metric(metric.name, metric.documentation, metric.type, metric.unit)
        for sample in metric.samples:
            if sample.name.endswith(_CREATED_SUFFIX) and not metric.name.endswith(_CREATED_SUFFIX):
                continue
            labels = {_EXPORTED + name if name in own else name: value for name, value in sample.labels.items()}
            made.samples.append(Sample(sample.name, labels | own, sample.value, sample.timestamp, sample.exemplar))
        return made


class BridgeCollector:
    """All bridges of one registry, as one collector: a name is written once, however many engines have it."""

    def __init__(self, taken: Callable[[str], bool]) -> None:
        """`taken` tells whether a name is one of ours; such a metric is left out."""
        self._taken = taken
        self._lock = threading.Lock()
        self._bridges: list[RegistryBridge] = []
        self._told: set[str] = set()

    def add(self, bridge: RegistryBridge) -> None:
        """Show a registry from now on; one that is shown already stays as it is, so that its values count once."""
        with self._lock:
            if any(other.source is bridge.source for other in self._bridges):
                log.warning("a registry is bridged more than once; its metrics have the labels of the first to do so")
            self._bridges.append(bridge)

    def remove(self, bridge: RegistryBridge) -> None:
        """Stop showing it. Safe twice."""
        with self._lock:
            if bridge in self._bridges:
                self._bridges.remove(bridge)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: what foreign registries hold is not known beforehand."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of all bridges, those of one name together."""
        with self._lock:
            # The first bridge of each registry, in order.
            bridges = {id(bridge.source): bridge for bridge in reversed(self._bridges)}
        merged: dict[str, Metric] = {}
        for bridge in reversed(bridges.values()):
            for metric in bridge.collect():
                self._merge(merged, metric)
        return merged.values()

    def _merge(self, merged: dict[str, Metric], metric: Metric) -> None:
        names = {metric.name, *(sample.name for sample in metric.samples)}
        if any(map(self._taken, names)):
            self._warn_once(metric.name, "the name is in use here")
            return
        first = merged.setdefault(metric.name, metric)
        if first is metric:
            return
        if first.type != metric.type:
            self._warn_once(metric.name, f"it is a {metric.type} in one registry and a {first.type} in another")
            return
        first.samples.extend(metric.samples)

    def _warn_once(self, name: str, why: str) -> None:
        if name not in self._told:
            self._told.add(name)
            log.warning("bridged metric %s is left out: %s", name, why)
