"""Spans: one call to open them, whether they are exported or not.

Without export a span is its ids only: log lines carry them and headers pass them on, and nothing is recorded. With it,
`dynamo_runtime.telemetry.export` has put a recorder here, which records spans with OpenTelemetry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from types import TracebackType
from typing import Literal, TypeAlias

from dynamo_core import tracing
from dynamo_core.errors import DynamoError
from dynamo_core.protocol.request import TraceLink
from dynamo_core.tracing import TraceContext

Kind: TypeAlias = Literal["internal", "server", "client", "producer", "consumer"]
Value: TypeAlias = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
Attributes: TypeAlias = Mapping[str, Value]

#: Characters of an error's text that a span keeps.
MAX_ERROR = 1024


class Span:
    """A part of a trace. This one is not recorded: it has ids, and drops everything else.

    Entered, it is the current span: spans opened inside become its children, and log lines carry its ids. Leaving ends
    it; an exception that passes through sets the error status. It may be entered once, and held across awaits and
    yields.
    """

    __slots__ = ("_token", "context")

    def __init__(self, context: TraceContext) -> None:
        #: The ids of this span: ``context.to_headers()`` makes a receiver its child.
        self.context = context
        self._token: Token[TraceContext | None] | None = None

    @property
    def recording(self) -> bool:
        """Whether attributes are kept. If not, the caller can skip those that are costly to compute."""
        return False

    @property
    def link(self) -> TraceLink:
        """The link by which a later span of another request or worker refers to this one."""
        return TraceLink(self.context.trace_id, self.context.span_id)

    def set_attribute(self, key: str, value: Value) -> None:
        """Set one attribute; the last value stands."""

    def set_attributes(self, attributes: Attributes) -> None:
        """Set several attributes."""

    def set_error(self, text: str) -> None:
        """Set the status to error; `text` says why."""

    def add_link(self, link: TraceLink) -> None:
        """Refer to a span that came before; a link that names none is left out."""

    def end(self) -> None:
        """End the span. Later changes are lost. Safe twice; leaving the span does it."""

    def __enter__(self) -> Span:
        self._token = tracing.current.set(self.context)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leave()
        # Cancelling and closing are no errors.
        if error is not None and isinstance(error, Exception):
            self.set_error(describe(error))
        self.end()

    def _leave(self) -> bool:
        """Make the span before current again; False if this is another context than the one that entered."""
        token, self._token = self._token, None
        try:
            if token is not None:
                tracing.current.reset(token)
        except ValueError:
            # A generator may be closed by another task; its context has nothing to restore.
            return False
        return True


#: What records spans: `start_span`, with every argument given by its place.
Recorder: TypeAlias = Callable[[str, Kind, Attributes | None, Sequence[TraceLink], TraceContext | None], Span]

_recorder: Recorder | None = None


def set_recorder(recorder: Recorder | None) -> None:
    """Record spans opened from now on, or no longer. For `dynamo_runtime.telemetry.export`, and tests."""
    global _recorder
    _recorder = recorder


def recorded() -> bool:
    """Return whether spans opened now may be recorded.

    Without it, spans that serve no other purpose need not be opened.
    """
    return _recorder is not None


def start_span(
    name: str,
    *,
    kind: Kind = "internal",
    attributes: Attributes | None = None,
    links: Sequence[TraceLink] = (),
    parent: TraceContext | None = None,
) -> Span:
    """Open a span, to be used in a ``with`` statement or ended by `Span.end`.

    It is a child of `parent`, the context of a span elsewhere; without one, of the current span; without that, the root
    of a new trace. A span below one that is not sampled is not recorded.
    """
    if _recorder is not None:
        return _recorder(name, kind, attributes, links, parent)
    if parent is None:
        parent = tracing.current.get()
    return Span(TraceContext.new() if parent is None else parent.child())


def describe(error: BaseException) -> str:
    """Return an error as the text of a status."""
    name = error.kind if isinstance(error, DynamoError) else type(error).__name__
    text = str(error)
    return (f"{name}: {text}" if text else name)[:MAX_ERROR]
