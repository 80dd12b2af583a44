"""Both forms of a failure in mid-stream, from the engine through a transport to the client's side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from dynamo_core import (
    BackendError,
    DynamoError,
    EngineContext,
    GenerateContext,
    LLMEngineOutput,
    PluginConfig,
    PreprocessedRequest,
    ServedContext,
    Transport,
    WorkerConfig,
    chunk,
    tracing,
)
from dynamo_core.contracts.transports.call import GENERATE
from dynamo_core.errors import BackendUnknown, WorkerOverloaded
from dynamo_core.protocol.output import FinishReason
from dynamo_core.protocol.records import Instance
from dynamo_plugin_transport_inproc.transport import InprocTransport
from dynamo_plugin_transport_tcp.config import TcpConfig
from dynamo_plugin_transport_tcp.transport import TcpTransport
from dynamo_runtime.dispatch.execution.response_stream import FlushQueue, ResponseStream
from dynamo_runtime.worker.card import make_instance
from dynamo_telemetry import logs
from dynamo_telemetry.metrics import Metrics

from runtime.tests.worker.engines import Plain, adapter_over

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


class Failing(Plain):
    """Yields a token and fails as the test says: by raising an error, or with an item."""

    def __init__(self, end: Exception | LLMEngineOutput) -> None:
        super().__init__(PluginConfig(), WorkerConfig(model_name="m", worker="w"))
        self._end = end

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        yield chunk.token(1)
        if isinstance(self._end, Exception):
            raise self._end
        yield self._end


@pytest.fixture(params=["inproc", "tcp"])
async def planes(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Transport, Transport]]:
    """Yield a transport that serves and one that calls."""
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
    """Return what the client's side reads of the stream of a failing engine."""
    server, client = planes
    engine = Failing(end)
    served = await server.serve(7, GENERATE, adapter_over(engine).generate)
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


async def test_a_text_error_arrives_as_a_terminal_with_its_message(
    planes: tuple[Transport, Transport],
) -> None:
    items, error = await answer(planes, LLMEngineOutput.error("the GPU is gone"))

    assert error is None
    assert (items[-1].finish_reason, items[-1].error_message) == (FinishReason.ERROR, "the GPU is gone")


async def test_tokens_before_an_error_arrive_with_a_span_link(
    planes: tuple[Transport, Transport],
) -> None:
    items, _ = await answer(planes, LLMEngineOutput.error("the GPU is gone"))

    # A transport may have merged what waited.
    assert [token for item in items for token in item.token_ids] == [1]
    assert [item.worker_trace_link is not None for item in items] == [True] + [False] * (len(items) - 1)


async def test_a_finish_reason_of_a_wrong_type_names_engine_and_line(
    planes: tuple[Transport, Transport], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DYN_STREAM_VALIDATOR", "0")
    reason: Any = "stop"

    _, error = await answer(planes, LLMEngineOutput(finish_reason=reason))

    assert isinstance(error, BackendUnknown)
    assert str(error).startswith("Failing.generate: finish_reason is a str, not a FinishReason: end with")
    assert f"engine Failing of worker w: {error}" in caplog.text


class Aborted(Failing):
    """Waits to be stopped, and notes which request its `abort` and its stop callback ran for."""

    def __init__(self) -> None:
        super().__init__(LLMEngineOutput.cancelled())
        self.seen: list[tuple[str, str]] = []
        self.begun, self.told = asyncio.Event(), asyncio.Event()

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        ctx.on_stop(self.note)
        self.begun.set()
        await ctx.stopped()
        yield LLMEngineOutput.cancelled()

    async def abort(self, ctx: EngineContext) -> None:
        self.note()
        self.told.set()
        raise RuntimeError("the engine does not know it")

    def note(self) -> None:
        scope, trace = logs.context.get(), tracing.current.get()
        assert scope is not None
        assert trace is not None
        self.seen.append((scope.request_id, trace.trace_id))


async def test_abort_and_stop_callback_run_with_the_ids_of_their_request(
    planes: tuple[Transport, Transport], caplog: pytest.LogCaptureFixture
) -> None:
    server, client = planes
    engine = Aborted()
    adapter = adapter_over(engine)
    served = await server.serve(7, GENERATE, adapter.generate)
    instance = make_instance(7, engine.worker, served.address, None)
    stream = ResponseStream(None, FlushQueue())
    ctx = EngineContext("r1", metadata={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
    async with asyncio.timeout(10):
        request = PreprocessedRequest(model="m", token_ids=[1])
        stream.attach(await client.call(instance, GENERATE, request, ctx, stream.begin()), 7)
        await engine.begun.wait()
        ctx.stop_generating()
        await engine.told.wait()
        await stream.aclose()
        await served.aclose()
        await adapter.aclose()

    assert engine.seen == [("r1", "a" * 32)] * 2
    assert "engine Aborted of worker w failed to abort request r1" in caplog.text


async def test_worker_at_capacity_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    adapter = adapter_over(Failing(LLMEngineOutput.stop()), limit=0, queue=0)
    for _ in range(2):
        with pytest.raises(WorkerOverloaded):
            await adapter.generate(PreprocessedRequest(model="m", token_ids=[1]), ServedContext("r1"))

    assert [record.getMessage() for record in caplog.records] == [
        "worker w is at capacity and refuses requests: its engine has 0, and 0 wait "
        "(engine_request_limit and request_queue_limit are the bounds)"
    ]
