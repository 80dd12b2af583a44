"""Files come from a worker over a real transport; a worker that lies is cut off before it costs anything."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path

import pytest
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.transports.call import MODEL_FILE, ServedContext
from dynamo_core.errors import DynamoError, StreamIncomplete
from dynamo_core.protocol.records import Instance, ModelCard, ModelFile, ModelFileChunk, ModelFileRequest
from dynamo_plugin_transport_inproc.transport import InprocTransport
from dynamo_runtime.dispatch.execution.endpoint_caller import Caller
from dynamo_runtime.dispatch.models.cache import ModelCache
from dynamo_runtime.dispatch.models.files import fetch_files
from dynamo_runtime.worker.model_files import ModelFiles
from dynamo_telemetry.metrics import Metrics

WORKER = Instance(instance_id=1)
TEXT = b"0123456789" * 100_000
Pieces = Callable[[], AsyncGenerator[ModelFileChunk, None]]


@pytest.fixture
async def transport() -> AsyncIterator[InprocTransport]:
    transport = InprocTransport(PluginConfig(), Metrics())
    yield transport
    await transport.aclose()


def card(data: bytes = TEXT) -> ModelCard:
    return ModelCard(
        name="m", instance_id=1, files=[ModelFile("tokenizer.json", len(data), hashlib.sha256(data).hexdigest())]
    )


class Worker:
    """A worker that answers with given pieces until the call is stopped, and counts them."""

    def __init__(self, transport: InprocTransport, pieces: Pieces) -> None:
        self._transport = transport
        self._pieces = pieces
        self.asked = 0
        self.given = 0
        self.ended = asyncio.Event()

    async def serve(self) -> None:
        await self._transport.serve(1, MODEL_FILE, self._answer)

    async def _answer(self, request: ModelFileRequest, ctx: ServedContext) -> AsyncGenerator[ModelFileChunk, None]:
        self.asked += 1

        async def pieces() -> AsyncGenerator[ModelFileChunk, None]:
            try:
                async for piece in self._pieces():
                    if ctx.is_stopped():
                        return
                    self.given += 1
                    yield piece
                    await asyncio.sleep(0)
            finally:
                self.ended.set()

        return pieces()


async def test_a_file_in_many_pieces_arrives_whole(transport: InprocTransport) -> None:
    files = ModelFiles({"tokenizer.json": TEXT, "empty.json": b""})
    await transport.serve(1, MODEL_FILE, files.serve)

    fetched = await fetch_files(ModelCard(name="m", instance_id=1, files=files.listing()), WORKER, Caller(transport))

    assert fetched == {"tokenizer.json": TEXT, "empty.json": b""}


async def endless() -> AsyncGenerator[ModelFileChunk, None]:
    while True:
        yield ModelFileChunk(b"x" * 1000)


async def empty_for_ever() -> AsyncGenerator[ModelFileChunk, None]:
    while True:
        yield ModelFileChunk(b"")


async def too_short() -> AsyncGenerator[ModelFileChunk, None]:
    yield ModelFileChunk(TEXT[:-1])


async def another() -> AsyncGenerator[ModelFileChunk, None]:
    yield ModelFileChunk(b"y" * len(TEXT))


@pytest.mark.parametrize("pieces", [endless, empty_for_ever, too_short, another])
async def test_a_file_that_differs_from_the_card_is_refused(
    transport: InprocTransport, pieces: Pieces, tmp_path: Path
) -> None:
    worker = Worker(transport, pieces)
    await worker.serve()

    with pytest.raises(StreamIncomplete, match=r"'tokenizer\.json' from worker 0{15}1 is not what its card says"):
        async with asyncio.timeout(10):
            await fetch_files(card(), WORKER, Caller(transport), ModelCache(tmp_path / "cache"))

    async with asyncio.timeout(5):
        await worker.ended.wait()
    assert worker.given < 1020
    assert not (tmp_path / "cache").exists()


async def test_a_file_that_is_kept_is_not_asked_for_again(transport: InprocTransport, tmp_path: Path) -> None:
    async def whole() -> AsyncGenerator[ModelFileChunk, None]:
        yield ModelFileChunk(TEXT)

    worker = Worker(transport, whole)
    await worker.serve()

    for _ in range(3):
        # A cache object of its own, as in a frontend that starts again.
        fetched = await fetch_files(card(), WORKER, Caller(transport), ModelCache(tmp_path / "cache"))
        assert fetched == {"tokenizer.json": TEXT}
    assert worker.asked == 1

    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(b"damaged")
    fetched = await fetch_files(card(), WORKER, Caller(transport), ModelCache(tmp_path / "cache"))

    assert fetched == {"tokenizer.json": TEXT}
    assert worker.asked == 2
    assert kept.read_bytes() == TEXT


async def test_a_bad_listing_is_refused_without_asking(transport: InprocTransport) -> None:
    worker = Worker(transport, endless)
    await worker.serve()
    bad = ModelCard(name="m", instance_id=1, files=[ModelFile("../x", 1, "ab" * 32)])

    with pytest.raises(DynamoError, match="bad name"):
        await fetch_files(bad, WORKER, Caller(transport))

    assert worker.asked == 0
