"""Trace identity after W3C Trace Context: read from headers, carried in a context variable, sent on.

Ids only: whether spans are recorded is the affair of `dynamo_core.spans`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar

import msgspec

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]([0-9a-f])(-[\x21-\x7e]*)?"
)
#: The last digit of the flags, where the lowest bit says that the trace is sampled.
_ODD = frozenset("13579bdf")
_STATE_KEY = re.compile(r"[a-z0-9][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13}")
_STATE_VALUE = re.compile(r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")
_MAX_MEMBERS = 32
_MAX_STATE = 512  # the length that the specification asks all parties to carry

# Ids must differ, not be secret. A generator of their own: engines seed the shared one, and workers
# with the same seed would then give the same ids.
_bits = random.Random().getrandbits  # noqa: S311


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """A position in a trace: 32 and 16 hex digits, the sampling decision, and vendors' state as it came."""

    trace_id: str
    span_id: str
    sampled: bool = True
    tracestate: str = ""

    @classmethod
    def new(cls, *, sampled: bool = True) -> TraceContext:
        """Return the root of a new trace."""
        return cls(f"{_bits(128) or 1:032x}", f"{_bits(64) or 1:016x}", sampled)

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> TraceContext | None:
        """Return the caller's context from headers with lower-case names; None if there is none or it is invalid.

        An invalid `tracestate` is left out and does not harm the rest.
        """
        context = parse_traceparent(headers.get(TRACEPARENT, ""))
        if context is None:
            return None
        state = parse_tracestate(headers.get(TRACESTATE, ""))
        return msgspec.structs.replace(context, tracestate=state) if state else context

    @property
    def traceparent(self) -> str:
        """The value of the header."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    def child(self) -> TraceContext:
        """Return a new span in the same trace."""
        return TraceContext(self.trace_id, f"{_bits(64) or 1:016x}", self.sampled, self.tracestate)

    def to_headers(self) -> dict[str, str]:
        """Return the headers that make the receiver a child of this span."""
        headers = {TRACEPARENT: self.traceparent}
        if self.tracestate:
            headers[TRACESTATE] = self.tracestate
        return headers


#: The context of the request that is being worked on.
current: ContextVar[TraceContext | None] = ContextVar("dynamo_trace", default=None)


def parse_traceparent(value: str) -> TraceContext | None:
    """Return the context in a `traceparent` header, or None if it is not one.

    Later versions are read as far as they agree.
    """
    match = _TRACEPARENT.fullmatch(value.strip(" \t"))
    if match is None:
        return None
    version, trace_id, span_id, flag, rest = match.groups()
    if rest is not None and version == "00":
        return None
    return TraceContext(trace_id, span_id, flag in _ODD)


def parse_tracestate(value: str) -> str:
    """Return the `tracestate` header without blanks and empty members; empty if any part of it is invalid."""
    if not value or len(value) > _MAX_STATE:
        return ""
    members: dict[str, str] = {}
    for part in value.split(","):
        member = part.strip(" \t")
        if not member:
            continue
        key, equals, content = member.partition("=")
        valid = equals and _STATE_KEY.fullmatch(key) and _STATE_VALUE.fullmatch(content)
        if not valid or key in members:
            return ""
        members[key] = content
    if len(members) > _MAX_MEMBERS:
        return ""
    return ",".join(f"{key}={content}" for key, content in members.items())


def get_distributed_tracing_context() -> dict[str, str]:
    """Return the current span: `trace_id`, `span_id`, `trace_flags` and, if any, `tracestate`.

    Empty outside a request.
    """
    context = current.get()
    if context is None:
        return {}
    fields = {
        "trace_id": context.trace_id,
        "span_id": context.span_id,
        "trace_flags": "01" if context.sampled else "00",
    }
    if context.tracestate:
        fields["tracestate"] = context.tracestate
    return fields


def inject_trace_headers_into_map(headers: MutableMapping[str, str]) -> None:
    """Add the headers of the current context, if there is one, to `headers`."""
    context = current.get()
    if context is not None:
        headers.update(context.to_headers())
