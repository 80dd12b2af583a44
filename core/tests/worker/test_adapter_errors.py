"""Both forms of a failure in mid-stream, from the engine through a transport to the client's side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from dynamo_core import (
    BackendError,
    DynamoError,
    EngineConfig,
    EngineContext,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    PluginConfig,
    PreprocessedRequest,
    Transport,
    WorkerConfig,
    chunk,
)
from dynamo_core.contracts.call import GENERATE
from dynamo_core.dispatch.execution.response_stream import FlushQueue, ResponseStream
from dynamo_core.errors import BackendUnknown
from dynamo_core.protocol.output import FinishReason
from dynamo_core.protocol.records import Instance
from dynamo_core.telemetry.metrics import Metrics
from dynamo_core.worker.adapter import EngineAdapter
from dynamo_core.worker.card import make_instance
from dynamo_core.worker.gate import CapacityGate
from dynamo_core.worker.metrics import WorkerMetrics
from dynamo_plugin_transport_inproc.transport import InprocTransport
from dynamo_plugin_transport_tcp.config import TcpConfig
from dynamo_plugin_transport_tcp.transport import TcpTransport

ERRORS: list[type[DynamoError]] = [
    BackendError.InvalidArgument,
    BackendError.CannotConnect,
    BackendError.Disconnected,
    BackendError.ConnectionTimeout,
    BackendError.ResponseTimeout,
    BackendError.Cancelled,
    BackendError.EngineShutdown,
    BackendError.StreamIncomplete,
    BackendError.Unknown,
]


class Failing(LLMEngine):
    """Yields a token and fails as the test says: by raising an error, or with an item."""

    def __init__(self, end: Exception | LLMEngineOutput) -> None:
        super().__init__(PluginConfig(), WorkerConfig(model_name="m", worker="w"))
        self._end = end

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="m")

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        yield chunk.token(1)
        if isinstance(self._end, Exception):
            raise self._end
        yield self._end

    async def cleanup(self) -> None:
        return None


@pytest.fixture(params=["inproc", "tcp"])
async def planes(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Transport, Transport]]:
    """A transport that serves and one that calls."""
    if request.param == "inproc":
        inproc = InprocTransport(PluginConfig(), Metrics())
        yield inproc, inproc
        await inproc.aclose()
        return
    server, client = (TcpTransport(TcpConfig(), Metrics()) for _ in range(2))
    await server.start()
    await client.start()
    yield server, client
    await client.aclose()
    await server.aclose()


async def answer(
    planes: tuple[Transport, Transport], end: Exception | LLMEngineOutput
) -> tuple[list[LLMEngineOutput], DynamoError | None]:
    """What the client's side reads of the stream of a failing engine."""
    server, client = planes
    engine, metrics = Failing(end), Metrics()
    adapter = EngineAdapter(
        engine,
        EngineConfig(model="m"),
        CapacityGate(metrics, limit=None, queue=16),
        WorkerMetrics(metrics),
        config=engine.worker,
        worker_id=7,
    )
    served = await server.serve(7, GENERATE, adapter.generate)
    instance: Instance = make_instance(7, engine.worker, served.address, None)
    stream = ResponseStream(None, FlushQueue())
    ctx = EngineContext("r1")
    items: list[Any] = []
    async with asyncio.timeout(10):
        source = await client.call(
            instance, GENERATE, PreprocessedRequest(model="m", token_ids=[1]), ctx, stream.begin()
        )
        stream.attach(source, 7)
        try:
            items.extend([item async for item in stream])
        except DynamoError as error:
            return items, error
        finally:
            await stream.aclose()
            await served.aclose()
    return items, None


@pytest.mark.parametrize("kind", [*ERRORS, ValueError])
async def test_a_typed_error_arrives_with_its_type_and_a_foreign_one_as_unknown(
    planes: tuple[Transport, Transport], kind: type[Exception]
) -> None:
    _, error = await answer(planes, kind("the GPU is gone"))

    known = issubclass(kind, DynamoError)
    assert type(error) is (kind if known else BackendUnknown)
    assert str(error) == ("the GPU is gone" if known else "ValueError: the GPU is gone")


async def test_an_error_told_as_text_arrives_as_the_terminal_with_its_message_and_no_type(
    planes: tuple[Transport, Transport],
) -> None:
    items, error = await answer(planes, LLMEngineOutput.error("the GPU is gone"))

    assert error is None
    assert (items[-1].finish_reason, items[-1].error_message) == (FinishReason.ERROR, "the GPU is gone")


async def test_the_tokens_before_arrive_and_the_first_says_which_span_made_it(
    planes: tuple[Transport, Transport],
) -> None:
    items, _ = await answer(planes, LLMEngineOutput.error("the GPU is gone"))

    # A transport may have merged what waited.
    assert [token for item in items for token in item.token_ids] == [1]
    assert [item.worker_trace_link is not None for item in items] == [True] + [False] * (len(items) - 1)
