"""Conversion of vLLM outputs to our stream items."""

from __future__ import annotations

from typing import Any

from dynamo_core import BackendError, FinishReason, LLMEngineOutput, PreprocessedRequest, TopLogprob, usage

#: The log-probability of an impossible token: JSON has no infinity.
MIN_LOGPROB = -9999.0

_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.CANCELLED,
    "repetition": FinishReason.STOP,
}


class OutputConverter:
    """A converter of one request's outputs into items, with counts of what has come."""

    __slots__ = ("_ends", "_prompt_tokens", "_tops", "cached_tokens", "produced")

    def __init__(self, request: PreprocessedRequest, cached_tokens: int | None = None) -> None:
        """`cached_tokens` replaces the engine's own count where another worker knows it better."""
        self._prompt_tokens = len(request.token_ids)
        self._ends = frozenset(request.eos_token_ids)
        self._tops = request.output_options.logprobs
        self.cached_tokens = cached_tokens
        #: Tokens so far, by choice.
        self.produced: dict[int, int] = {}

    def items(self, output: Any) -> list[LLMEngineOutput]:
        """Return the items for one `RequestOutput`; none if it says nothing new.

        Raises:
            BackendError.Disconnected: vLLM gave the request up, such as when its KV cache did not come.
        """
        items = []
        for completion in output.outputs:
            tokens = list(completion.token_ids)
            reason = completion.finish_reason
            if not tokens and reason is None:
                continue
            item = LLMEngineOutput(tokens, index=completion.index)
            produced = self.produced[completion.index] = self.produced.get(completion.index, 0) + len(tokens)
            if self._tops is not None and completion.logprobs is not None:
                self._add_logprobs(item, completion, self._tops)
            if reason is not None:
                self._add_finish(item, completion)
            if reason is not None or produced == len(tokens):
                # Also with the first: the reader may end the answer before the last, at a stop string.
                item.completion_usage = counts = usage(self._prompt_tokens, produced)
                cached = output.num_cached_tokens
                counts.cached_tokens = cached if self.cached_tokens is None else self.cached_tokens
            items.append(item)
        return items

    def cancelled(self) -> LLMEngineOutput:
        """Return the terminal of a stopped request."""
        made = sum(self.produced.values())
        return LLMEngineOutput.cancelled().with_usage(usage(self._prompt_tokens, made))

    def _add_logprobs(self, item: LLMEngineOutput, completion: Any, tops: int) -> None:
        item.log_probs = []
        item.top_logprobs = []
        for token, position in zip(item.token_ids, completion.logprobs, strict=True):
            item.log_probs.append(max(position[token].logprob, MIN_LOGPROB))
            # The chosen token is among them even if it is not one of the likeliest.
            likeliest = sorted(
                (entry.rank, other, entry.logprob) for other, entry in position.items() if entry.rank <= tops
            )
            item.top_logprobs.append(
                [TopLogprob(other, max(logprob, MIN_LOGPROB), rank) for rank, other, logprob in likeliest[:tops]]
            )
        if completion.cumulative_logprob is not None:
            item.cum_log_probs = max(completion.cumulative_logprob, MIN_LOGPROB)

    def _add_finish(self, item: LLMEngineOutput, completion: Any) -> None:
        reason = _REASONS.get(completion.finish_reason)
        if reason is None:
            raise BackendError.Disconnected(f"vLLM gave the request up: {completion.finish_reason}")
        if reason is FinishReason.STOP and completion.finish_reason == "stop":
            if completion.stop_reason is None or completion.stop_reason in self._ends:
                # It names only ids that are not the model's own end.
                reason = FinishReason.EOS
            else:
                item.stop_reason = completion.stop_reason
        item.finish_reason = reason
