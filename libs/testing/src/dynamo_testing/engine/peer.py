"""A prefill engine beside the engine under test, for engines that decode only what was really prefilled."""

from __future__ import annotations

import inspect
from types import TracebackType
from typing import Self

import msgspec
from dynamo_core.contracts.engine import DisaggregationMode, LLMEngine
from dynamo_core.contracts.engine_boundary import call_async
from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.protocol.request import PrefillResult, PreprocessedRequest

from dynamo_testing.engine.bench import EngineFactory, adopted
from dynamo_testing.engine.bounded_calls import within
from dynamo_testing.engine.streams import Reading, check_answer


class PrefillPeer:
    """Starts the prefill engine that a factory makes, asks it for every request, and cleans it up.

    Use it with ``async with``, and give it to `run_conformance` as `prefill_result`.
    """

    def __init__(
        self,
        factory: EngineFactory,
        *,
        start_timeout: float = 120.0,
        request_timeout: float = 60.0,
        cleanup_timeout: float = 30.0,
    ) -> None:
        """Take times in seconds."""
        self._factory = factory
        self._start_timeout = start_timeout
        self._request_timeout = request_timeout
        self._cleanup_timeout = cleanup_timeout
        self._engine: LLMEngine | None = None
        self._asked = 0

    async def __aenter__(self) -> Self:
        made = self._factory()
        self._engine = engine = adopted(await made if inspect.isawaitable(made) else made)
        try:
            await within(call_async(engine, "start", 1), self._start_timeout)
        except BaseException:
            await self._cleanup(engine)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._engine is not None:
            await self._cleanup(self._engine)

    async def __call__(self, request: PreprocessedRequest) -> PrefillResult:
        """Return what the decode engine is given for this request.

        Raises:
            ConformanceFailure: the prefill engine itself does not keep its contract.
        """
        assert self._engine is not None, "use it with `async with`"
        self._asked += 1
        asked = msgspec.structs.replace(
            request, stop_conditions=msgspec.structs.replace(request.stop_conditions, max_tokens=1)
        )
        reading = Reading()
        await reading.read(self._engine, asked, EngineContext(f"prefill-{self._asked}"), self._request_timeout)
        check_answer(reading, DisaggregationMode.PREFILL)
        return PrefillResult(disaggregated_params=reading.items[-1].disaggregated_params)

    async def _cleanup(self, engine: LLMEngine) -> None:
        await within(call_async(engine, "cleanup"), self._cleanup_timeout)
