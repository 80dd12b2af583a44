"""The stream validator: fails loudly when an engine breaks its contract. Off in service."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Mapping

from dynamo_core.errors import BackendUnknown
from dynamo_core.protocol.output import LLMEngineOutput

#: 1 switches it on, 0 off. Unset, it is on under pytest.
VARIABLE = "DYN_STREAM_VALIDATOR"


def validator_enabled(env: Mapping[str, str] | None = None) -> bool:
    """Whether streams are to be validated in this process."""
    value = (os.environ if env is None else env).get(VARIABLE, "").strip().lower()
    if value:
        return value not in {"0", "false", "no", "off"}
    return "pytest" in sys.modules


class ContractViolation(BackendUnknown):
    """An engine broke the contract of its stream: a bug of the engine, told in development."""


async def validated(items: AsyncIterator[LLMEngineOutput], terminals: int = 1) -> AsyncIterator[LLMEngineOutput]:
    """The same items, of which `terminals` end the stream.

    Raises:
        ContractViolation: an item came after the terminal item, or is no `LLMEngineOutput`; or `generate` is no
            generator.
    """
    if not hasattr(items, "__aiter__"):
        raise ContractViolation("generate must be an async generator (async def with yield)")
    left = terminals
    try:
        async for item in items:
            if not isinstance(item, LLMEngineOutput):
                raise ContractViolation(f"generate yielded {type(item).__name__}, not LLMEngineOutput")
            if not left:
                raise ContractViolation("item yielded after terminal item")
            if item.finish_reason is not None:
                left -= 1
            yield item
    finally:
        close = getattr(items, "aclose", None)
        if close is not None:
            await close()
