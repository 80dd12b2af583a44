"""The check that an engine does not hold the event loop while it answers."""

from __future__ import annotations

import sys
import time
from types import CodeType, FrameType, TracebackType
from typing import Any, Self

from dynamo_core.contracts.engine import LLMEngine
from dynamo_core.contracts.engine_boundary import EngineFiles, location

from dynamo_testing.engine.bench import Bench, Skipped
from dynamo_testing.engine.failures import EventLoopBlocked
from dynamo_testing.engine.streams import Reading

#: Seconds from which on a call has held the loop too long: longer than a busy machine keeps a process waiting.
LONG = 0.5


async def event_loop(bench: Bench) -> str:
    """Check that nothing that answers a request waits in the event loop, or computes in it for long."""
    engine, _ = await bench.running()
    request = await bench.request()
    if sys.getprofile() is not None:
        raise Skipped("a profiler is at work, and there can be only one")
    reading = Reading()
    with Calls(engine) as calls:
        await reading.read(engine, request, bench.context(), bench.plan.request_timeout)
    if calls.fault:
        raise EventLoopBlocked(calls.fault)
    bench.check(reading)
    return f"the longest step took {calls.longest * 1000:.1f} ms"


class Calls:
    """Sees every call that the engine's own code makes in this thread while it is entered, and how long it took.

    What an engine does in other threads does not hold the loop and is not seen.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._files = EngineFiles(engine)
        self._mine: dict[CodeType, bool] = {}
        #: Calls that have not returned: who is called and from where, and when that was.
        self._open: list[tuple[FrameType, str, float]] = []
        #: The first thing that held the loop, in words.
        self.fault = ""
        #: The longest call, in seconds.
        self.longest = 0.0

    def __enter__(self) -> Self:
        sys.setprofile(self._see)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setprofile(None)
        self._open.clear()

    def _see(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            caller = frame.f_back
            if caller is not None and self._is_mine(caller):
                self._open.append((frame, self._at(caller), time.perf_counter()))
            elif self._is_mine(frame):
                # The loop, or the framework, lets the engine go on.
                self._open.append((frame, "", time.perf_counter()))
        elif event == "c_call":
            # However short: it is one for every token of every request.
            if arg is time.sleep and (mine := self._files.innermost(frame)) is not None:
                self._found(f"time.sleep is called in the event loop{self._at(mine)}")
            if self._is_mine(frame):
                self._open.append((frame, self._at(frame), time.perf_counter()))
        elif self._open and self._open[-1][0] is frame and (event == "return" or self._is_mine(frame)):
            _, where, begun = self._open.pop()
            seconds = time.perf_counter() - begun
            self.longest = max(self.longest, seconds)
            if seconds > LONG:
                self._found(f"the event loop was held for {seconds:.1f} s{where or self._at(frame)}")

    def _found(self, fault: str) -> None:
        self.fault = self.fault or fault

    def _is_mine(self, frame: FrameType) -> bool:
        code = frame.f_code
        mine = self._mine.get(code)
        if mine is None:
            mine = self._mine[code] = code.co_filename in self._files
        return mine

    @staticmethod
    def _at(frame: FrameType) -> str:
        return location(frame.f_code.co_filename, frame.f_lineno)
