"""The scope in which a plugin registers metrics: common labels, made by the framework and served on /metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    # A plugin that only counts needs no registry.
    from prometheus_client import CollectorRegistry

ChildT = TypeVar("ChildT", covariant=True)


class CounterLike(Protocol):
    """A counter or one child of it."""

    def inc(self, amount: float = 1) -> None:
        """Counts up."""


class GaugeLike(Protocol):
    """A gauge or one child of it."""

    def inc(self, amount: float = 1) -> None:
        """Adds."""

    def dec(self, amount: float = 1) -> None:
        """Subtracts."""

    def set(self, value: float) -> None:
        """Sets."""


class HistogramLike(Protocol):
    """A histogram or one child of it."""

    def observe(self, amount: float) -> None:
        """Counts one observation, in the unit of the metric's name."""


class MetricFamily(Protocol[ChildT]):
    """A metric with labels; `labels` gives the child for one set of values."""

    def labels(self, *values: str) -> ChildT:
        """The child for these label values, in the order of the label names. Keep it: the look-up is not free."""

    def remove(self, *values: str) -> None:
        """Removes the child for these label values, if it exists."""


@runtime_checkable
class MetricsScope(Protocol):
    """Makes metrics whose common labels are already filled in.

    Names are used exactly as given, without an added ``_total``. Asking for the same name again gives the same metric.
    `help` is for operators: begin it with what is counted, in the unit of the name ("Requests that", "Seconds from").
    `values` are the values of `labels`, in order; look children up once, not per event.
    """

    @property
    def registry(self) -> CollectorRegistry:
        """The registry of this process, for collectors of the plugin's own."""

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> MetricFamily[CounterLike]:
        """A counter."""

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> MetricFamily[GaugeLike]:
        """A gauge."""

    def histogram(
        self, name: str, help: str, labels: Sequence[str] = (), buckets: Sequence[float] = ()
    ) -> MetricFamily[HistogramLike]:
        """A histogram with the given upper bounds."""

    def changed(self) -> None:
        """Invalidates the cached rendering: the next scrape must show an event such as the end of a request.

        Without it a rendering serves further scrapes for a moment.
        """

    def bridge(self, source: CollectorRegistry, *, prefixes: Sequence[str]) -> None:
        """Shows the metrics of another registry whose names begin with one of `prefixes`, with the common labels added.

        For libraries that register metrics of their own, such as an engine with its ``vllm:…``. They are collected at
        each scrape. A name that is in use here is left out; a label that is common here gets ``exported_`` in
        front. A registry that several workers of one process bridge is shown once. Ends after the engine's `cleanup`.

        Raises:
            ValueError: no prefix is given, or the registry is this one.
        """

    def unbridge(self) -> None:
        """Ends the bridges of this scope. Safe twice; the framework calls it."""
