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
        """Count up."""


class GaugeLike(Protocol):
    """A gauge or one child of it."""

    def inc(self, amount: float = 1) -> None:
        """Add."""

    def dec(self, amount: float = 1) -> None:
        """Subtract."""

    def set(self, value: float) -> None:
        """Set."""


class HistogramLike(Protocol):
    """A histogram or one child of it."""

    def observe(self, amount: float) -> None:
        """Count one observation, in the unit of the metric's name."""


class MetricFamily(Protocol[ChildT]):
    """A metric with labels; `labels` gives the child for one set of values."""

    def labels(self, *values: str) -> ChildT:
        """Return the child for these label values, in the order of the label names.

        Keep it: the look-up is not free.
        """

    def remove(self, *values: str) -> None:
        """Remove the child for these label values, if it exists."""


@runtime_checkable
class MetricsScope(Protocol):
    """A factory of metrics whose common labels are already filled in.

    Names are used exactly as given, without an added ``_total``. Asking for the same name again gives the same metric.
    `help` is for operators: begin it with what is counted, in the unit of the name ("Requests that", "Seconds from").
    `values` are the values of `labels`, in order; look children up once, not per event.
    """

    @property
    def registry(self) -> CollectorRegistry:
        """The registry of this process, for collectors of the plugin's own."""

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> MetricFamily[CounterLike]:
        """Return a counter."""

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> MetricFamily[GaugeLike]:
        """Return a gauge."""

    def histogram(
        self, name: str, help: str, labels: Sequence[str] = (), buckets: Sequence[float] = ()
    ) -> MetricFamily[HistogramLike]:
        """Return a histogram with the given upper bounds."""

    def changed(self) -> None:
        """Invalidate the cached rendering: the next scrape must show an event such as the end of a request.

        Without it a rendering serves further scrapes for a moment.
        """

    def bridge(self, source: CollectorRegistry, *, prefixes: Sequence[str]) -> None:
        """Show the metrics of another registry whose names begin with one of `prefixes`, with the common labels added.

        For libraries that register metrics of their own, such as an engine with its ``vllm:…``. They are collected at
        each scrape. A name that is in use here is left out; a label that is common here gets ``exported_`` in
        front. A registry that several workers of one process bridge is shown once. Ends after the engine's `cleanup`.

        Raises:
            ValueError: no prefix is given, or the registry is this one.
        """

    def unbridge(self) -> None:
        """End the bridges of this scope. Safe twice; the framework calls it."""
