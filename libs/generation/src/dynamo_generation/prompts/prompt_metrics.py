"""Metrics of prompt preparation, and of malformed model output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dynamo_core import FrontendServices, ServedModel

    from dynamo_generation.prompts.preprocess import Prompt

_SECONDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_MILLISECONDS = tuple(1000 * bound for bound in _SECONDS)


class PromptMeters:
    """The metrics of templates and tokenizers."""

    def __init__(self, services: FrontendServices) -> None:
        metrics, prefix = services.metrics, services.metrics_prefix
        self._template = metrics.histogram(
            f"{prefix}_template_seconds", "Seconds to render the chat template of a request.", buckets=_SECONDS
        ).labels()
        self._tokenize = metrics.histogram(
            f"{prefix}_tokenize_seconds",
            "Seconds to tokenize a prompt, waiting for a thread included.",
            buckets=_SECONDS,
        ).labels()
        self._latency = metrics.histogram(
            f"{prefix}_tokenizer_latency_ms",
            "Milliseconds to tokenize a prompt (operation encode), as tokenize_seconds.",
            ("operation",),
            _MILLISECONDS,
        ).labels("encode")

    def observe(self, prompts: Iterable[Prompt]) -> None:
        """Count some prompts; what was not done for one is not counted."""
        for prompt in prompts:
            if prompt.templating is not None:
                self._template.observe(prompt.templating)
            if prompt.tokenizing is not None:
                self._tokenize.observe(prompt.tokenizing)
                self._latency.observe(1000 * prompt.tokenizing)


class ParserCounts(Protocol):
    """Calls of tools that have been read."""

    @property
    def malformed(self) -> int:
        """The number of unsound calls, which became text."""

    @property
    def repairs(self) -> Mapping[str, int]:
        """The number of repaired calls, by kinds of repairs."""


#: Kinds of repairs that have a label of their own; a parser of a third party may have others.
_REPAIRS = frozenset(
    ("control_character", "backslash", "trailing_comma", "missing_bracket", "surplus_bracket", "surplus_tag")
)


def call_counter(services: FrontendServices) -> Callable[[ServedModel, ParserCounts], None]:
    """Return a counter of calls of tools that a model has written and that were not sound, or had to be repaired."""
    repaired = services.metrics.counter(
        f"{services.metrics_prefix}_repaired_tool_calls_total",
        "Tool calls whose form was repaired, by the kind of repair; a call counts once for each kind.",
        ("model", "kind"),
    )
    malformed = services.metrics.counter(
        f"{services.metrics_prefix}_malformed_tool_calls_total",
        "Tool calls that a model wrote in a form that cannot be read; clients got them as text.",
        ("model",),
    )

    def count(model: ServedModel, calls: ParserCounts) -> None:
        if calls.malformed:
            malformed.labels(model.name).inc(calls.malformed)
        for kind, number in calls.repairs.items():
            repaired.labels(model.name, kind if kind in _REPAIRS else "other").inc(number)

    return count
