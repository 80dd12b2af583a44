"""The step loop: who runs, who waits, and one token for each running request per step."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType

from dynamo_core import BackendError, GenerateContext

from dynamo_plugin_engine_mocker.clock import Clock
from dynamo_plugin_engine_mocker.sequence import Sequence
from dynamo_plugin_engine_mocker.timing import Pacer, StepTime

#: Told (running, waiting) whenever either may have changed.
LoadListener = Callable[[int, int], None]


class Scheduler:
    """Admits sequences first come, first served, and steps them all together.

    A sequence holds its slot from admission until its last token is produced or its reader is gone. One that is paused
    for a slow reader keeps the slot, as it would keep its KV cache in a real engine.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        step_time: StepTime,
        max_num_seqs: int,
        kv_tokens: int,
        on_load: LoadListener | None = None,
    ) -> None:
        self._step_time = step_time
        self._pacer = Pacer(clock)
        self._max_num_seqs = max_num_seqs
        self._kv_tokens = kv_tokens
        self._on_load = on_load
        # All in order of arrival, with removal from anywhere at a constant price.
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()
        self._running: dict[Sequence, None] = {}
        self._paused: dict[Sequence, None] = {}
        #: Tokens in the KV cache: prompts and what was produced, of all that hold a slot.
        self._kv_used = 0
        self._work = asyncio.Event()
        self._closed: str | None = None

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running) + len(self._paused)

    @property
    def waiting(self) -> int:
        """Sequences that have not got a slot yet."""
        return len(self._waiting)

    async def run(self) -> None:
        """Steps as long as there is work, and waits for more; ends when cancelled. Whoever is left then fails."""
        reason = "mocker backend failed"
        self._pacer.restart()
        try:
            while True:
                prefill_tokens, admitted = self._admit()
                if not self._running:
                    self._work.clear()
                    await self._work.wait()
                    self._pacer.restart()
                    continue
                decoding = len(self._running) - admitted
                await self._pacer.wait(self._step_time(prefill_tokens, decoding, self._kv_used / self._kv_tokens))
                self._step()
        except asyncio.CancelledError:
            reason = "mocker backend was stopped"
            raise
        finally:
            self.close(reason)

    def submit(self, sequence: Sequence) -> None:
        """Puts a sequence at the end of the line.

        Raises:
            BackendError.EngineShutdown: the loop has ended.
        """
        if self._closed is not None:
            raise BackendError.EngineShutdown(self._closed)
        self._waiting[sequence] = None
        self._work.set()
        self._tell()

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence, wherever it is; repeating it does nothing."""
        if sequence in self._waiting:
            del self._waiting[sequence]
        elif sequence in self._running or sequence in self._paused:
            self._running.pop(sequence, None)
            self._paused.pop(sequence, None)
            self._kv_used -= sequence.prompt_tokens + sequence.produced
            if self._waiting:
                self._work.set()
        else:
            return
        self._tell()

    def resume(self, sequence: Sequence) -> None:
        """Lets a paused sequence go on after its reader has taken something."""
        if sequence in self._paused:
            del self._paused[sequence]
            sequence.paused = False
            self._running[sequence] = None
            self._work.set()

    def close(self, reason: str) -> None:
        """Fails whoever is left and refuses whoever comes; only the first reason counts."""
        if self._closed is not None:
            return
        self._closed = reason
        left = [*self._waiting, *self._running, *self._paused]
        self._waiting.clear()
        self._running.clear()
        self._paused.clear()
        self._kv_used = 0
        for sequence in left:
            sequence.halt(reason)
        self._tell()

    def _admit(self) -> tuple[int, int]:
        """Gives free slots to those who wait; returns the tokens to prefill and the number admitted."""
        tokens = admitted = 0
        while self._waiting and self.running < self._max_num_seqs:
            sequence, _ = self._waiting.popitem(last=False)
            self._running[sequence] = None
            tokens += sequence.prompt_tokens
            admitted += 1
        if admitted:
            self._kv_used += tokens
            self._tell()
        return tokens, admitted

    def _step(self) -> None:
        """One token for everybody. Runs once per token of every request: keep it short."""
        due: list[Sequence] = []
        self._kv_used += len(self._running)
        for sequence in self._running:
            sequence.produced = produced = sequence.produced + 1
            if produced == sequence.checkpoint:
                due.append(sequence)
            waiter = sequence.waiter
            if waiter is not None:
                sequence.waiter = None
                if not waiter.done():
                    waiter.set_result(None)
        for sequence in due:
            sequence.turn()
            if sequence.finished:
                self.release(sequence)
            elif sequence.paused:
                del self._running[sequence]
                self._paused[sequence] = None

    def _tell(self) -> None:
        if self._on_load is not None:
            self._on_load(self.running, self.waiting)


class ActiveRequestGuard:
    """Holds a request's place in the scheduler for as long as its stream lives, and gives it back on every way out.

    A stop of the request gives the place back at once, before the reader comes back to hear of it.
    """

    __slots__ = ("_context", "_forget", "_scheduler", "_sequence")

    def __init__(self, scheduler: Scheduler, sequence: Sequence, context: GenerateContext) -> None:
        self._scheduler = scheduler
        self._sequence = sequence
        self._context = context
        self._forget: Callable[[], None] | None = None

    def __enter__(self) -> None:
        self._scheduler.submit(self._sequence)
        self._forget = self._context.on_stop(self._stop)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._forget is not None:
            self._forget()
        self._scheduler.release(self._sequence)

    def _stop(self) -> None:
        self._scheduler.release(self._sequence)
        self._sequence.halt()
