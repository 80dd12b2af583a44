"""Contexts for tests of an engine that are written by hand."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping

from dynamo_core.contracts.requests.context import EngineContext, GenerateContext


class _TimedContext(EngineContext):
    """A context that a timer can know without keeping it."""

    __slots__ = ("__weakref__",)


def mock_context(request_id: str = "test-request", *, metadata: Mapping[str, str] | None = None) -> GenerateContext:
    """Return a fresh context, as `generate` is given one; nothing stops it but the test."""
    return GenerateContext(EngineContext(request_id, metadata=metadata))


def cancelling_context(after: float, request_id: str = "test-request") -> GenerateContext:
    """Return a context that stops itself `after` seconds from now.

    The timer ends with the context, or when it is stopped.

    Raises:
        RuntimeError: no event loop runs.
    """
    inner = _TimedContext(request_id)

    def stop() -> None:
        context = known()
        if context is not None:
            context.stop_generating()

    timer = asyncio.get_running_loop().call_later(after, stop)
    known = weakref.ref(inner, lambda _: timer.cancel())
    inner.on_stop(timer.cancel)
    return GenerateContext(inner)
