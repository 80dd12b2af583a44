"""One choice of an answer: engine items to text, and the end of the choice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from dynamo_core import (
    BackendError,
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
    ParserDelta,
    PreprocessedRequest,
    Tokenizer,
)
from dynamo_text import Detokenizer, StopStrings

from dynamo_generation.choices.logprob_buffer import LogprobBuffer, Scored
from dynamo_generation.choices.schema_validation import CollectedAnswer, Verdict


class Piece(NamedTuple):
    """The result of one item: text, perhaps with scores, or a delta of the engine, or parsed parts of the text.

    It may be the last of its choice. `logprobs` are scores that an engine that takes text has put into the API's form.
    """

    choice: Choice
    text: str
    scored: Scored | None
    delta: dict[str, Any] | None
    last: bool
    parsed: Sequence[ParserDelta] | None = None
    logprobs: dict[str, Any] | None = None
    #: The tokens of the item that count as part of the answer, also those that show no text.
    tokens: Sequence[int] = ()


class Choice:
    """A choice whose engine produces text. Also the base of the other kinds."""

    __slots__ = (
        "answered",
        "called",
        "completion_tokens",
        "cut",
        "finish_reason",
        "index",
        "limit",
        "parsed",
        "patient",
        "prompt",
        "prompt_tokens",
        "reasoning_tokens",
        "reported",
        "scored",
        "tokens",
        "usage",
        "verdict",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        #: The reason in the words of the OpenAI API, once the choice has ended.
        self.finish_reason: str | None = None
        self.completion_tokens = 0
        #: Whether a delta that the engine made calls a tool.
        self.called = False
        #: Whether it ended here, at a stop string or token, and the engine knows nothing of it.
        self.cut = False
        #: What gathers it for a check at its end, if there is one.
        self.answered: CollectedAnswer | None = None
        #: Why it is not what was asked for, if it was checked and is not.
        self.verdict: Verdict | None = None
        #: Whether nothing is lost if items are read late: there is no stop string to end the choice early.
        self.patient = True
        #: Which of the prompts of the request it answers, from 0, and how long that is by the frontend's own count.
        self.prompt = 0
        self.prompt_tokens = 0
        #: The most tokens that it may have, if there is a most.
        self.limit: int | None = None
        #: What the engine counted last, if it did.
        self.usage: CompletionUsage | None = None
        #: How many tokens were reasoning; None if neither a parser nor the engine tells reasoning apart.
        self.reasoning_tokens: int | None = None
        #: How many tokens the engine says it made; None if it does not say, or does not know where the answer ended.
        self.reported: int | None = None
        #: The tokens that the text of the last `feed` or `end` shows, if log-probabilities were asked for and the
        #: engine gave them.
        self.scored: Scored | None = None
        #: The tokens of the last `feed` that count as part of the answer.
        self.tokens: Sequence[int] = ()
        #: What parsers made of the last `feed` or `end`, if the choice has any; the text is then in here only.
        self.parsed: Sequence[ParserDelta] | None = None

    def feed(self, output: LLMEngineOutput) -> str:
        """Return the text that this item makes certain; may end the choice.

        Raises:
            BackendError: the engine ended with an error.
        """
        if output.completion_usage is not None:
            self.usage = output.completion_usage
        if output.delta is not None and output.delta.get("tool_calls"):
            self.called = True
        reason = output.finish_reason
        if reason is not None:
            if reason is FinishReason.ERROR:
                raise BackendError.Unknown(output.error_message or "the engine gave no reason")
            called = self.called and reason is FinishReason.STOP
            self.finish_reason = "tool_calls" if called else reason.to_openai()
        self.completion_tokens += len(output.token_ids)
        if self.usage is not None:
            # Text has no tokens to count; the engine has, and says it at the end.
            self.reported = self.usage.completion_tokens
            self.completion_tokens = max(self.completion_tokens, self.usage.completion_tokens)
            self.reasoning_tokens = self.usage.reasoning_tokens
        return output.text or ""

    def end(self) -> str:
        """End a stream that is complete without a reason, and return the text that was held back."""
        self.finish_reason = "stop"
        return ""


class TokenChoice(Choice):
    """A choice whose engine produces token ids: it decodes them, and finds stop strings and stop tokens.

    `stops` are the stop strings of the request, where they have been compiled for all of its choices. Special tokens in
    `keep` are part of the text whatever the request says.
    """

    __slots__ = ("_decoder", "_detokenizer", "_hidden", "_min_tokens", "_scores", "plain", "step", "stop_ids")

    def __init__(
        self,
        index: int,
        request: PreprocessedRequest,
        tokenizer: Tokenizer,
        stops: StopStrings | None = None,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(index)
        stop = request.stop_conditions
        self.limit = stop.max_tokens
        self.patient = not stop.stop
        skip = request.output_options.skip_special_tokens
        skip = True if skip is None else skip
        # Tokenizers of third parties may know nothing of `keep`.
        new_decoder = partial(tokenizer.stream, skip_special_tokens=skip, **({"keep": keep} if keep else {}))
        self._decoder = new_decoder()
        self._detokenizer = Detokenizer(
            self._decoder, stops or stop.stop or (), bool(request.sampling_options.include_stop_str_in_output)
        )
        self._hidden = frozenset(stop.stop_token_ids_hidden or ())
        #: Tokens that end the choice.
        self.stop_ids = self._hidden.union(stop.stop_token_ids or ())
        self._min_tokens = stop.min_tokens or 0
        scores = request.output_options.logprobs is not None
        self._scores = LogprobBuffer(tokenizer, new_decoder()) if scores else None
        #: Decodes tokens that end nothing.
        self.step = self._decoder.step
        #: Whether `step` is all there is to such tokens: no stop strings, no least number of tokens, no scores.
        self.plain = not (stop.stop or self._min_tokens or scores)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it, if one did."""
        return self._detokenizer.stopped

    def feed(self, output: LLMEngineOutput) -> str:
        """Return the text that these tokens make certain; may end the choice, also within the item.

        Raises:
            BackendError: the engine ended with an error.
        """
        if self.finish_reason is not None:
            return ""
        if output.completion_usage is not None:
            self.usage = output.completion_usage
        reason = output.finish_reason
        if reason is FinishReason.ERROR:
            raise BackendError.Unknown(output.error_message or "the engine gave no reason")
        ended = None if reason is None else reason.to_openai()
        shown = token_ids = output.token_ids
        used = len(token_ids)
        if token_ids and not self.stop_ids.isdisjoint(token_ids):
            at = self._stop_at(token_ids)
            if at is not None:
                ended, used = "stop", at + 1
                shown = token_ids[: at if token_ids[at] in self._hidden else used]
        text, stopped_after = self._decode(shown)
        if stopped_after is not None:
            ended, used = "stop", stopped_after
        elif ended is not None:
            text += self._detokenizer.finish()
            if self._detokenizer.stopped is not None:
                ended = "stop"
        if self._scores is not None:
            self._scores.add(shown[:used], output.log_probs, output.top_logprobs)
            cut = self._detokenizer.stopped is not None
            self.scored = self._scores.give(text, ended=ended is not None, cut=cut)
        self.completion_tokens += used
        self.tokens = token_ids if used == len(token_ids) else token_ids[:used]
        self.finish_reason = ended
        self.cut = ended is not None and reason is None
        if reason is not None and self.usage is not None and used == len(token_ids):
            # An engine that counts nothing but what was cached says 0.
            self.reported = self.usage.completion_tokens or None
        return text

    def end(self) -> str:
        """End a stream that is complete without a reason, and return the text that was held back."""
        self.finish_reason = "stop"
        self.tokens = ()
        text = self._detokenizer.finish()
        if self._scores is not None:
            self.scored = self._scores.give(text, ended=True, cut=self._detokenizer.stopped is not None)
        return text

    def _decode(self, token_ids: Sequence[int], before: int = 0) -> tuple[str, int | None]:
        """Return the text of tokens, and how many were used if a stop string was found.

        `before` is how many tokens of the same item have been decoded already.
        """
        detokenizer = self._detokenizer
        early = self._min_tokens - self.completion_tokens - before
        head = ""
        if early > 0:
            # Stop strings count only after the least number of tokens.
            head = self._decoder.step(token_ids[:early])
            token_ids = token_ids[early:]
        else:
            early = 0
        text = detokenizer.feed(token_ids)
        stopped = early + detokenizer.stop_token_index if detokenizer.stopped is not None else None
        return head + text, stopped

    def _stop_at(self, token_ids: Sequence[int]) -> int | None:
        first = max(self._min_tokens - self.completion_tokens - 1, 0)
        for at in range(first, len(token_ids)):
            if token_ids[at] in self.stop_ids:
                return at
        return None
