"""The fast path for nearly every stream item: new tokens, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dynamo_generation.answers.render import encode
from dynamo_generation.choices.choice import TokenChoice

if TYPE_CHECKING:
    from dynamo_core import InflightRequest, LLMEngineOutput

    from dynamo_generation.answers.render import ChunkRenderer
    from dynamo_generation.choices.choice import Choice


class PlainPath:
    """Makes the chunk of an item that only brings tokens of the one choice of an answer that has begun.

    Does for such an item what `Answer.read`, `TokenChoice.feed` and the renderer's `piece` do together, and gives the
    same bytes; for any other it does nothing.
    """

    __slots__ = ("_after", "_before", "_choice", "_inflight", "_step", "_stop_ids")

    def __init__(self, choice: TokenChoice, around: tuple[bytes, bytes], inflight: InflightRequest) -> None:
        self._choice = choice
        self._before, self._after = around
        self._step = choice.step
        self._stop_ids = choice.stop_ids
        self._inflight = inflight

    @staticmethod
    def of(choices: Sequence[Choice], renderer: ChunkRenderer, inflight: InflightRequest) -> PlainPath | None:
        """Return the way for an answer of these choices; None if it needs more than this."""
        choice = choices[0]
        if len(choices) == 1 and isinstance(choice, TokenChoice) and choice.plain:
            around = renderer.around(choice)
            return None if around is None else PlainPath(choice, around, inflight)
        return None

    def chunk(self, outputs: Sequence[LLMEngineOutput]) -> bytes | None:
        """Return the chunk, empty if no text is certain yet; None if this is not its case and nothing was done."""
        if len(outputs) != 1:
            return None
        output = outputs[0]
        token_ids = output.token_ids
        if (
            output.finish_reason is not None
            or output.completion_usage is not None
            or output.delta is not None
            or output.index
            or not self._stop_ids.isdisjoint(token_ids)
        ):
            return None
        text = self._step(token_ids)
        count = len(token_ids)
        self._choice.completion_tokens += count
        self._inflight.output(count)
        return self._before + encode(text)[1:-1] + self._after if text else b""
