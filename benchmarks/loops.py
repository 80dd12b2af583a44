"""The event loop of every process here: uvloop when it is installed, plain asyncio otherwise."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")

try:
    import uvloop
except ImportError:
    LOOP_NAME = "asyncio"
    _factory = None
else:
    LOOP_NAME = "uvloop"
    _factory = uvloop.new_event_loop


def run(main: Coroutine[object, object, T]) -> T:
    """Run `main` to its end; Ctrl-C cancels it first, so its `finally` blocks run."""
    with asyncio.Runner(loop_factory=_factory) as runner:
        return runner.run(main)
