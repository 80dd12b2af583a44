"""Engines and admissions that tests of several files put in the house."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from dynamo_core import (
    Admission,
    AdmissionServices,
    EngineConfig,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    Permit,
    PluginConfig,
    PreprocessedRequest,
    Principal,
)
from dynamo_core.errors import ServiceOverloaded
from dynamo_telemetry import Metrics


async def turns(count: int = 20) -> None:
    """Let the event loop go round, so that what follows from the last step happens."""
    for _ in range(count):
        await asyncio.sleep(0)


async def reasons_of(stream: Any) -> list[Any]:
    """Return the finish reasons of all items that are still to come."""
    try:
        return [item.finish_reason async for item in stream]
    finally:
        await stream.aclose()


class Plain(LLMEngine):
    """Answers every request with one token."""

    NAME = "plain"
    #: What the engine says of itself beside the name of its model.
    facts: ClassVar[dict[str, Any]] = {}

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model=self.worker.model_name, **self.facts)

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        yield LLMEngineOutput(token_ids=[7])
        yield LLMEngineOutput.stop()

    async def cleanup(self) -> None:
        pass


class Longer(Plain):
    """The same model with another card."""

    facts: ClassVar[dict[str, Any]] = {"context_length": 4096}


class Counting(Admission):
    """Counts permits, remembers which pools were asked for, and lets so many requests in at a time."""

    NAME = "counting"

    def __init__(self, limit: int = 1000) -> None:
        super().__init__(PluginConfig(), AdmissionServices(Metrics()))
        self.limit = limit
        self.given = 0
        #: The tokens that came out, for each permit that was given back.
        self.back: list[int] = []
        self.roles: list[list[str]] = []

    async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Any) -> Permit:
        if self.given - len(self.back) == self.limit:
            raise ServiceOverloaded(retry_after=7)
        self.given += 1
        self.roles.append([pool.role for pool in pools])
        return Counted(self)


class Counted(Permit):
    __slots__ = ("admission",)

    def __init__(self, admission: Counting) -> None:
        self.admission = admission

    def release(self, output_tokens: int) -> None:
        self.admission.back.append(output_tokens)
