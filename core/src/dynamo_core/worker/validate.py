"""The stream validator: fails loudly when an engine goes on after its terminal item. Off in service."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing

from dynamo_core.errors import BackendError
from dynamo_core.protocol.output import LLMEngineOutput

#: 1 switches it on, 0 off. Unset, it is on under pytest.
VARIABLE = "DYN_STREAM_VALIDATOR"


def validator_enabled(env: Mapping[str, str] | None = None) -> bool:
    """Whether streams are to be validated in this process."""
    value = (os.environ if env is None else env).get(VARIABLE, "").strip().lower()
    if value:
        return value not in {"0", "false", "no", "off"}
    return "pytest" in sys.modules


async def validated(items: AsyncGenerator[LLMEngineOutput, None]) -> AsyncIterator[LLMEngineOutput]:
    """The same items.

    Raises:
        BackendError.Unknown: an item came after the terminal item.
    """
    ended = False
    async with aclosing(items):
        async for item in items:
            if ended:
                raise BackendError.Unknown("stream contract violated: item yielded after terminal item")
            ended = item.finish_reason is not None
            yield item
