"""One running answer: its tokens, its end, and the tokens that its reader has not taken yet."""

from __future__ import annotations

import asyncio
from typing import Any

from dynamo_core import CompletionUsage, FinishReason, LLMEngineOutput, usage

from dynamo_plugin_engine_mocker.config import ChunkSizes
from dynamo_plugin_engine_mocker.tokens.logprobs import logprobs
from dynamo_plugin_engine_mocker.tokens.noise import BLOCK, noise
from dynamo_plugin_engine_mocker.tokens.token_sources import TokenSource
from dynamo_plugin_engine_mocker.tokens.vocabulary import Vocabulary

#: No more tokens are produced for a reader that has left this many waiting.
MAX_BACKLOG = 1024

_CHUNKS = b"chunks"
#: More tokens than any answer has.
_NEVER = 2**63


class StopTokens:
    """The ids that end an answer. `ends` and `hidden` are left out of it, `visible` ones are its last token."""

    __slots__ = ("all", "ends", "from_count", "visible")

    def __init__(
        self, *, ends: frozenset[int], hidden: frozenset[int], visible: frozenset[int], from_count: int
    ) -> None:
        self.ends = ends
        self.visible = visible - ends - hidden
        self.all = ends | hidden | visible
        #: So many tokens come before the first that may end the answer.
        self.from_count = from_count


class Sequence:
    """One answer, shared by the scheduler, which counts `produced` up, and its reader, which takes.

    The tokens are a function of the request, so producing one is adding 1 to a counter: what waits for the reader is
    ``tokens[taken:produced]``. The scheduler calls `on_checkpoint` whenever `produced` reaches `checkpoint`: only there
    is more to do than to count. `boundary` is a checkpoint that the scheduler sets for itself.
    """

    __slots__ = (
        "_alternatives",
        "_chunks",
        "_end",
        "_limit",
        "_reason",
        "_seed",
        "_source",
        "_stop_reason",
        "_stops",
        "_vocabulary",
        "boundary",
        "cached_tokens",
        "checkpoint",
        "failure",
        "finished",
        "halted",
        "handoff",
        "paused",
        "prefilled",
        "produced",
        "prompt_tokens",
        "taken",
        "tokens",
        "waiter",
        "wanted",
    )

    def __init__(
        self,
        source: TokenSource,
        *,
        prompt_tokens: int,
        limit: int,
        stops: StopTokens,
        vocabulary: Vocabulary,
        seed: int = 0,
        alternatives: int | None = None,
        chunks: ChunkSizes | None = None,
    ) -> None:
        """Begin an answer of at most `limit` tokens; `alternatives` is None where no log-probabilities are wanted."""
        self._source = source
        self._limit = limit
        self._stops = stops
        self._vocabulary = vocabulary
        self._seed = seed
        self._alternatives = alternatives
        self._chunks = chunks
        self._end: int | None = None
        self._reason: FinishReason | None = None
        self._stop_reason: int | None = None
        self.prompt_tokens = prompt_tokens
        #: Tokens of the answer, as far as they have been asked for.
        self.tokens: list[int] = []
        self.produced = 0
        self.taken = 0
        #: So many tokens must wait before the reader takes them, unless they are the last.
        self.wanted = 1 if chunks is None else self._chunk_size(chunks)
        #: The last token is produced; its slot is free.
        self.finished = False
        #: Waits for its reader.
        self.paused = False
        #: Ended from outside: stopped by the client, or with an error.
        self.halted = False
        #: Why it ended, if not because it was stopped.
        self.failure: str | None = None
        #: What the reader waits on.
        self.waiter: asyncio.Future[None] | None = None
        #: Tokens of the prompt found in the KV cache when it was first admitted; None before.
        self.cached_tokens: int | None = None
        #: Its prompt was computed by another worker and is brought here. No more once it gave way: then it is computed.
        self.prefilled = False
        #: What the terminal tells the worker that goes on from here.
        self.handoff: Any = None
        #: A count at which the scheduler wants to look at its blocks.
        self.boundary = _NEVER
        self._extend()
        self.checkpoint = self._next_checkpoint()

    @property
    def incomplete(self) -> bool:
        """Whether the reader waits for more tokens."""
        return self.produced - self.taken < self.wanted and not self.finished and not self.halted

    @property
    def length(self) -> int:
        """Tokens of the prompt and of what was produced."""
        return self.prompt_tokens + self.produced

    def set_boundary(self, boundary: int) -> None:
        """Set the boundary to a count that has not been reached."""
        self.boundary = boundary
        self.checkpoint = self._next_checkpoint()

    def on_checkpoint(self) -> None:
        """Do what is due at the checkpoint: finish, pause, or find out what comes next."""
        if self.produced == self._end:
            self.finished = True
            return
        if self._end is None and self.produced == len(self.tokens):
            self._extend()
        self.paused = self.produced - self.taken >= MAX_BACKLOG
        self.checkpoint = self._next_checkpoint()

    def take(self) -> LLMEngineOutput:
        """Return what waits, as one item; the first has the usage, the last that and the finish reason.

        It is everything that waits, or with chunk sizes so many tokens.
        """
        taken, produced = self.taken, self.produced
        last = self.finished
        if self._chunks is not None and produced - taken > self.wanted:
            produced, last = taken + self.wanted, False
        self.taken = produced
        if self._chunks is not None:
            self.wanted = self._chunk_size(self._chunks)
        output = LLMEngineOutput(self.tokens[taken:produced])
        if self._alternatives is not None:
            output.log_probs, output.top_logprobs = logprobs(
                self._vocabulary, self._seed, self.prompt_tokens + taken, output.token_ids, self._alternatives
            )
        if last:
            output.finish_reason = self._reason
            output.stop_reason = self._stop_reason
            output.completion_usage = self.usage()
            output.disaggregated_params = self.handoff
        elif not taken and self.cached_tokens is not None:
            # The reader may end the answer before the last item, at a stop string that only it knows.
            output.completion_usage = self.usage()
        return output

    def cancelled(self) -> LLMEngineOutput:
        """Return the terminal of an answer that was stopped; what waits is dropped."""
        return LLMEngineOutput.cancelled().with_usage(self.usage())

    def usage(self) -> CompletionUsage:
        """Count what the reader has taken. A stop token that is left out of the answer is not counted."""
        counts = usage(self.prompt_tokens, min(self.taken, len(self.tokens)))
        counts.cached_tokens = self.cached_tokens
        return counts

    def wake(self) -> None:
        """Let the reader go on."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def end_early(self, failure: str | None = None) -> None:
        """End the answer early: because the engine fails, or else as cancelled."""
        if not self.halted:
            self.halted = True
            self.failure = failure
            self.wake()

    def _chunk_size(self, chunks: ChunkSizes) -> int:
        block, offset = divmod(self.prompt_tokens + self.taken, BLOCK)
        return 1 + noise(_CHUNKS, chunks.seed, block)[offset] % chunks.most

    def _next_checkpoint(self) -> int:
        known = len(self.tokens) if self._end is None else self._end
        # A paused sequence has reached its backlog; after it the next token is as good a place as any to look again.
        return min(known, max(self.taken + MAX_BACKLOG, self.produced + 1), self.boundary)

    def _extend(self) -> None:
        """Ask the source for more and look for the end in it."""
        block, last = self._source.next_tokens()
        count = len(self.tokens)
        room = max(self._limit - count, 0)
        if self._stops.all:
            for offset in range(max(self._stops.from_count - count, 0), min(len(block), room)):
                token = block[offset]
                if token in self._stops.all:
                    shown = offset + (token in self._stops.visible)
                    self.tokens.extend(block[:shown])
                    self._finish_at(count + offset + 1, self._reason_for(token))
                    return
        self.tokens.extend(block[:room])
        if last and len(block) <= room:
            # Nothing at all is what a model says whose first token is the end-of-sequence token.
            self._finish_at(count + len(block), FinishReason.STOP if self.tokens else FinishReason.EOS)
        elif len(block) >= room:
            self._finish_at(count + room, FinishReason.LENGTH)

    def _reason_for(self, token: int) -> FinishReason:
        if token in self._stops.ends:
            return FinishReason.EOS
        self._stop_reason = token
        return FinishReason.STOP

    def _finish_at(self, count: int, reason: FinishReason) -> None:
        # An empty answer takes a step too: the one that would have made its first token.
        self._end = max(count, 1)
        self._reason = reason
