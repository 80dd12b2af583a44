"""An engine that holds the event loop is warned of with its file and line, while the worker serves."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvloop
from dynamo_core import (
    EngineContext,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    PluginConfig,
    PreprocessedRequest,
    WorkerConfig,
    chunk,
)
from dynamo_core.contracts.engine_boundary import EngineFiles
from dynamo_core.contracts.transports.call import GENERATE
from dynamo_runtime.dispatch.execution.response_stream import FlushQueue, ResponseStream

from runtime.tests.worker.engines import Plain

#: Seconds after which a test gives up on the warning.
PATIENCE = 20.0


class Heard(logging.Handler):
    """Says when a warning has come, in any thread."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warned = threading.Event()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.warned.set()


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler = Heard()
    log = logging.getLogger("dynamo_runtime.worker.blocked_loop_watch")
    log.addHandler(handler)
    Blocking.warned = handler.warned
    yield handler
    log.removeHandler(handler)


class Blocking(Plain):
    """Holds the loop until it has been warned of."""

    NAME = "blocking"
    warned: threading.Event


class WaitsOnce(Blocking):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        self.warned.wait(PATIENCE)
        yield LLMEngineOutput.stop()


class SleepsForEveryToken(Blocking):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        until = time.monotonic() + PATIENCE
        while not self.warned.is_set() and time.monotonic() < until:
            time.sleep(0.02)  # noqa: ASYNC251 - the fault
            yield chunk.token(1)
        yield LLMEngineOutput.stop()


class Computes(Blocking):
    """Goes through many lines, and gives way between two tokens."""

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        for _ in range(40):
            yield chunk.token(1)
            await asyncio.sleep(0.01)
        yield LLMEngineOutput.stop()


async def served(ground: Any, engine: type[LLMEngine]) -> None:
    """Serve one request, from its client to the engine and back."""
    worker = ground.worker(engine)
    await worker.start()
    stream = ResponseStream(None, FlushQueue())
    request = PreprocessedRequest(model="m", token_ids=[1])
    ctx = EngineContext("r1")
    source = await ground.transport.call(worker.instance, GENERATE, request, ctx, stream.begin())
    stream.attach(source, worker.instance.instance_id)
    _ = [item async for item in stream]
    await stream.aclose()
    await worker.stop()


@pytest.mark.parametrize(("engine", "line"), [(WaitsOnce, 1), (SleepsForEveryToken, 3)])
async def test_a_line_that_holds_the_event_loop_is_warned_of_once(
    ground: Any, heard: Heard, engine: type[Blocking], line: int
) -> None:
    await served(ground, engine)

    [message] = heard.messages
    place = inspect.getsourcelines(engine.generate)[1] + line
    assert message.startswith(
        "engine blocking of worker w blocks the event loop in generate "
        f"(test_blocking_engines.py, line {place}): all requests of the process wait meanwhile; use"
    )
    assert "await asyncio.to_thread(...)" in message


async def test_an_engine_that_yields_is_not_warned_about(ground: Any, heard: Heard) -> None:
    await served(ground, Computes)

    assert heard.messages == []


async def test_no_watch_thread_is_left_after_the_worker(ground: Any) -> None:
    before = set(threading.enumerate())
    worker = ground.worker(Computes)
    await worker.start()
    [watch] = [thread for thread in set(threading.enumerate()) - before if thread.name == "blocking watch"]

    await worker.stop()
    await asyncio.to_thread(watch.join, PATIENCE)

    assert not watch.is_alive()


async def test_workers_of_one_process_share_the_watch_thread(ground: Any, heard: Heard) -> None:
    before = set(threading.enumerate())
    others = [ground.worker(engine) for engine in (WaitsOnce, Computes)]
    for worker in others:
        await worker.start()

    await served(ground, WaitsOnce)

    [watch] = [thread for thread in set(threading.enumerate()) - before if thread.name == "blocking watch"]
    assert len(heard.messages) == 1
    for worker in others:
        await worker.stop()
    await asyncio.to_thread(watch.join, PATIENCE)
    assert not watch.is_alive()


def test_the_files_of_an_engine_are_those_of_its_package_and_of_the_engines_it_is_made_from() -> None:
    from dynamo_plugin_engine_mocker import sequence_factory
    from dynamo_plugin_engine_mocker.engine import MockerEngine

    class Mine(MockerEngine):
        pass

    files = EngineFiles(Mine(MockerEngine.Config(), WorkerConfig(model_name="m")))

    assert __file__ in files
    assert sequence_factory.__file__ in files
    assert asyncio.__file__ not in files
    assert inspect.getfile(LLMEngine) not in files
    assert inspect.getfile(PluginConfig) not in files


def test_script_that_runs_an_engine_is_not_its_innermost_frame() -> None:
    files = EngineFiles(WaitsOnce(PluginConfig(), WorkerConfig(model_name="m")))
    found: list[Any] = []

    def wait() -> None:
        found.append(files.innermost(sys._getframe()))

    # As the selector of an idle loop: a file of no engine.
    wait.__code__ = wait.__code__.replace(co_filename="selectors.py")

    async def main() -> None:
        asyncio.get_running_loop().call_soon(wait)
        await asyncio.sleep(0)

    wait()
    for factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())

    # Outside of a loop it is this test.
    assert [frame and frame.f_code.co_name for frame in found] == [
        "test_script_that_runs_an_engine_is_not_its_innermost_frame",
        None,
        None,
    ]
