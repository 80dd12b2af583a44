"""The step loop: running and waiting requests, prefill, and one token per step for each decoding request."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType

from dynamo_core import BackendError, GenerateContext, TaskSet

from dynamo_plugin_engine_mocker.block_table import BlockTable, PrefixHashes
from dynamo_plugin_engine_mocker.blocks import BlockPool
from dynamo_plugin_engine_mocker.clock import Clock
from dynamo_plugin_engine_mocker.rank_limits import Limits
from dynamo_plugin_engine_mocker.sequence import Sequence
from dynamo_plugin_engine_mocker.timing import Pacer, StepTime, TransferTime


class Scheduler:
    """Admits sequences first come, first served, and steps them all together.

    A sequence holds a slot and its KV blocks from admission until its last token is produced or its reader is gone. It
    gets the blocks of its whole prompt when it is admitted, and one more whenever its answer fills the last. If there
    is none, another sequence is preempted: it loses slot and blocks, goes to the head of the queue, and is recomputed
    when it is admitted again. Its tokens are not produced again. One that is paused for a slow reader keeps its slot.

    The prompt of one that is `prefilled` is brought instead of computed: that takes no part of a step, but time.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        step_time: StepTime,
        transfer_time: TransferTime,
        tasks: TaskSet,
        pool: BlockPool,
        limits: Limits,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """`on_change` is called whenever something a figure below tells may have changed; `tasks` owns transfers."""
        self._clock = clock
        self._step_time = step_time
        self._transfer_time = transfer_time
        self._tasks = tasks
        self._pacer = Pacer(clock)
        self._pool = pool
        self._limits = limits
        self._on_change = on_change
        # All with removal from anywhere at a constant price: in the order of the queue, of admission, and the four
        # states of the sequences that hold a slot. The number is of tokens to compute before the next one can be
        # produced; it is 0 where the prompt has been transferred.
        self._waiting: OrderedDict[Sequence, BlockTable] = OrderedDict()
        self._running: dict[Sequence, BlockTable] = {}
        self._receiving: dict[Sequence, asyncio.Task[None]] = {}
        self._prefilling: dict[Sequence, int] = {}
        self._decoding: dict[Sequence, None] = {}
        self._paused: dict[Sequence, None] = {}
        #: Tokens in blocks that are not full yet, or not shared.
        self._private_tokens = 0
        self._work = asyncio.Event()
        self._closed: str | None = None
        #: Steps made since the start.
        self.steps = 0
        #: Tokens to compute before all sequences decode.
        self.prefill_tokens = 0
        #: Times a sequence gave way; tokens computed, found in the cache and brought for prompts, since the start.
        self.preemptions = 0
        self.computed_tokens = 0
        self.cached_tokens = 0
        self.received_tokens = 0

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that have no slot: not yet, or not any more."""
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that holds tokens of running sequences, from 0 to 1."""
        size = self._limits.block_size
        return (self._pool.active * size + self._private_tokens) / (self._pool.total * size)

    async def run(self) -> None:
        """Step as long as there is work, and wait for more; end when cancelled. The sequences that are left fail."""
        reason = "mocker backend failed"
        self._pacer.restart()
        try:
            while True:
                chunks = self._plan()
                # Whose prompt has been brought decodes at once.
                decoding = len(self._decoding) + sum(not tokens for _, tokens in chunks)
                if not chunks and not decoding:
                    self._work.clear()
                    await self._work.wait()
                    self._pacer.restart()
                    continue
                prefill_tokens = sum(tokens for _, tokens in chunks)
                await self._pacer.wait(self._step_time(prefill_tokens, decoding, self.kv_usage))
                self._step(chunks)
        except asyncio.CancelledError:
            reason = "mocker backend was stopped"
            raise
        finally:
            self.close(reason)

    def submit(self, sequence: Sequence, hashes: PrefixHashes | None = None) -> None:
        """Queue a sequence; without hashes it neither finds cached blocks nor leaves any.

        Raises:
            BackendError.EngineShutdown: the loop has ended.
        """
        if self._closed is not None:
            raise BackendError.EngineShutdown(self._closed)
        self._waiting[sequence] = BlockTable(self._pool, self._limits.block_size, hashes)
        self.prefill_tokens += _uncomputed_tokens(sequence)
        self._work.set()
        self._changed()

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; repeating it does nothing."""
        if sequence in self._waiting:
            del self._waiting[sequence]
            self.prefill_tokens -= _uncomputed_tokens(sequence)
        elif sequence in self._running:
            self._vacate(sequence)
            if self._waiting:
                self._work.set()
        else:
            return
        self._changed()

    def resume(self, sequence: Sequence) -> None:
        """Let a paused sequence go on after its reader has taken something."""
        if sequence in self._paused:
            del self._paused[sequence]
            sequence.paused = False
            self._decoding[sequence] = None
            self._work.set()

    def close(self, reason: str) -> None:
        """Fail all sequences and refuse new ones; only the first reason counts."""
        if self._closed is not None:
            return
        self._closed = reason
        left = [*self._waiting, *self._running]
        for sequence in left:
            self.release(sequence)
            sequence.end_early(reason)
        self._pool.clear()
        self._changed()

    def _plan(self) -> list[tuple[Sequence, int]]:
        """Admit sequences as far as there is room. Return the prompts of the next step, with the tokens of each."""
        chunks: list[tuple[Sequence, int]] = []
        if not self._prefilling and not self._waiting:
            return chunks
        limits = self._limits
        budget = limits.max_num_batched_tokens - len(self._decoding)
        for sequence, left in self._prefilling.items():
            if budget <= 0:
                return chunks
            chunks.append((sequence, min(left, budget)))
            budget -= left or 1
        admitted = False
        while self._waiting and budget > 0 and len(self._running) < limits.max_num_seqs:
            sequence, table = next(iter(self._waiting.items()))
            length = sequence.length
            matched = table.match(length)
            new = length - matched * limits.block_size
            cost = 0 if sequence.prefilled else new
            # In one piece it must fit; one that never would is computed without others beside it.
            too_long = not limits.chunked_prefill and cost > budget
            if too_long and (chunks or cost <= limits.max_num_batched_tokens):
                break
            if not table.reserve(length, matched):
                break
            del self._waiting[sequence]
            self._running[sequence] = table
            self._private_tokens += new
            self.prefill_tokens -= _uncomputed_tokens(sequence) - cost
            self.cached_tokens += length - new
            if sequence.cached_tokens is None:
                sequence.cached_tokens = length - new
            admitted = True
            if sequence.prefilled and self._start_transfer(sequence, new):
                continue
            self._prefilling[sequence] = cost
            chunks.append((sequence, min(cost, budget) if limits.chunked_prefill else cost))
            budget -= cost or 1
        if admitted:
            self._changed()
        return chunks

    def _start_transfer(self, sequence: Sequence, tokens: int) -> bool:
        """Have the KV cache of a prompt brought; whether that takes time, after which the sequence decodes."""
        self.received_tokens += tokens
        seconds = self._transfer_time(tokens)
        if not seconds:
            return False
        self._receiving[sequence] = self._tasks.spawn(self._receive(sequence, seconds), name="mocker KV transfer")
        return True

    async def _receive(self, sequence: Sequence, seconds: float) -> None:
        """Receive until done; cancelled early when the sequence loses its slot."""
        await self._clock.sleep_until(self._clock.time() + seconds)
        del self._receiving[sequence]
        self._prefilling[sequence] = 0
        self._work.set()

    def _step(self, chunks: list[tuple[Sequence, int]]) -> None:
        """Produce one token for each sequence. Runs once per token of every request: keep it short."""
        self.steps += 1
        for sequence, tokens in chunks:
            self._prefill(sequence, tokens)
        due: list[Sequence] = []
        self._private_tokens += len(self._decoding)
        for sequence in self._decoding:
            sequence.produced = produced = sequence.produced + 1
            if produced == sequence.checkpoint:
                due.append(sequence)
            waiter = sequence.waiter
            if waiter is not None:
                sequence.waiter = None
                if not waiter.done():
                    waiter.set_result(None)
        if due:
            self._handle_checkpoints(due)
        if due or chunks:
            self._changed()

    def _prefill(self, sequence: Sequence, tokens: int) -> None:
        """Count tokens as computed; after the last of them the sequence decodes, in this very step."""
        left = self._prefilling.get(sequence)
        if left is None:
            # It was released during the step.
            return
        left -= tokens
        self.prefill_tokens -= tokens
        self.computed_tokens += tokens
        self._complete(sequence, sequence.length - left)
        if left:
            self._prefilling[sequence] = left
            return
        del self._prefilling[sequence]
        self._decoding[sequence] = None
        size = self._limits.block_size
        # The token after the one that begins a block is computed in that block: the count at which it is needed.
        sequence.set_boundary(-(-sequence.length // size) * size - sequence.prompt_tokens + 1)

    def _handle_checkpoints(self, due: list[Sequence]) -> None:
        """Do what is due at a checkpoint: end, pause, close blocks and open new ones."""
        growing: list[Sequence] = []
        for sequence in due:
            filled = sequence.produced == sequence.boundary
            if filled:
                sequence.boundary += self._limits.block_size
                # The newest token has not been computed.
                self._complete(sequence, sequence.length - 1)
            sequence.on_checkpoint()
            if sequence.finished:
                self._vacate(sequence)
                continue
            if filled:
                growing.append(sequence)
            if sequence.paused:
                del self._decoding[sequence]
                self._paused[sequence] = None
        for sequence in growing:
            # Unless it gave way to one before it.
            if sequence in self._running:
                self._grow(sequence)

    def _complete(self, sequence: Sequence, computed: int) -> None:
        self._private_tokens -= self._running[sequence].complete(computed) * self._limits.block_size

    def _grow(self, sequence: Sequence) -> None:
        """Get a block for the next tokens; others give way until there is one, or the sequence itself does."""
        table = self._running[sequence]
        while not table.grow():
            running = self._running
            victim = next(iter(running)) if self._limits.preempt_oldest else next(reversed(running))
            self._preempt(victim)
            if victim is sequence:
                return

    def _preempt(self, sequence: Sequence) -> None:
        table = self._running[sequence]
        self._vacate(sequence)
        sequence.paused = False
        sequence.prefilled = False
        self._waiting[sequence] = table
        self._waiting.move_to_end(sequence, last=False)
        self.prefill_tokens += sequence.length
        self.preemptions += 1

    def _vacate(self, sequence: Sequence) -> None:
        """Take slot and blocks from a sequence that has them."""
        table = self._running.pop(sequence)
        self._private_tokens -= sequence.length - table.shared * self._limits.block_size
        table.release()
        self.prefill_tokens -= self._prefilling.pop(sequence, 0)
        self._decoding.pop(sequence, None)
        self._paused.pop(sequence, None)
        transfer = self._receiving.pop(sequence, None)
        if transfer is not None:
            transfer.cancel()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()


def _uncomputed_tokens(sequence: Sequence) -> int:
    """Return tokens of a waiting sequence that may have to be computed."""
    return 0 if sequence.prefilled else sequence.length


class ActiveRequestGuard:
    """A request's place in the scheduler, held for the life of its stream, and released on every way out.

    A stop of the request gives the place back at once, before the reader comes back to hear of it.
    """

    __slots__ = ("_context", "_forget", "_hashes", "_scheduler", "_sequence")

    def __init__(
        self, scheduler: Scheduler, sequence: Sequence, hashes: PrefixHashes | None, context: GenerateContext
    ) -> None:
        self._scheduler = scheduler
        self._sequence = sequence
        self._hashes = hashes
        self._context = context
        self._forget: Callable[[], None] | None = None

    def __enter__(self) -> None:
        self._scheduler.submit(self._sequence, self._hashes)
        self._forget = self._context.on_stop(self._stop)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._forget is not None:
            self._forget()
        self._scheduler.release(self._sequence)

    def _stop(self) -> None:
        self._scheduler.release(self._sequence)
        self._sequence.end_early()
