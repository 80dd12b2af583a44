"""The stream validator: fails loudly when an engine breaks its contract. Off in service."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

from dynamo_core.contracts.engine import LLMEngine
from dynamo_core.contracts.engine_boundary import (
    ContractViolation,
    check_stream,
    content_fault,
    item_fault,
    qualname,
    suspended_at,
    usage_fault,
)
from dynamo_core.contracts.model_folder import MODEL_CONFIG, TOKENIZER
from dynamo_core.contracts.tokenizer import BYTES_VOCAB_SIZE
from dynamo_core.protocol.decoding import read_json
from dynamo_core.protocol.output import FinishReason, LLMEngineOutput
from dynamo_core.protocol.request import PreprocessedRequest

#: 1 switches it on, 0 off. Unset, it is on under pytest.
VARIABLE = "DYN_STREAM_VALIDATOR"

#: Seconds that a stream may take to end after its terminal.
ENDING = 5.0


def validator_enabled(env: Mapping[str, str] | None = None) -> bool:
    """Return whether streams are to be validated in this process."""
    value = (os.environ if env is None else env).get(VARIABLE, "").strip().lower()
    if value:
        return value not in {"0", "false", "no", "off"}
    return "pytest" in sys.modules


def vocabulary_of(files: Mapping[str, bytes]) -> int | None:
    """Return how many token ids a model has, by the files of its folder; None if they do not say. No files: bytes."""
    if TOKENIZER not in files:
        return BYTES_VOCAB_SIZE
    try:
        config = read_json(files[MODEL_CONFIG])
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return size if type(size) is int and size > 0 else None


def sent_twice(tokens: Sequence[int], item: Sequence[int]) -> bool:
    """Return whether an item begins with all the tokens that came before it."""
    return bool(tokens) and list(item[: len(tokens)]) == list(tokens)


class StreamRules:
    """Judges the items of one stream, in order. `terminals` of them end it, one per choice.

    `vocabulary` is the number of token ids, None if it is not known. `text` is true of an engine that answers with
    texts: its tokens are its own.
    """

    def __init__(
        self, request: PreprocessedRequest, terminals: int = 1, *, vocabulary: int | None = None, text: bool = False
    ) -> None:
        self._request = request
        self._choices = terminals
        self._vocabulary = vocabulary
        self._text = text
        self._tokens: list[int] = []
        #: Terminals that are still to come.
        self.left = terminals

    def fault_of(self, item: LLMEngineOutput) -> str:
        """Return what is wrong with the next item; empty if nothing is."""
        if not self.left:
            return "item yielded after terminal item: `return` right after the terminal"
        fault = content_fault(item, self._vocabulary)
        if fault:
            return fault
        fault = self._fault_of_number(item)
        self._tokens += item.token_ids
        if item.finish_reason is not None:
            self.left -= 1
            if not fault and not self.left:
                fault = self._fault_of_usage(item)
        return fault

    def _fault_of_number(self, item: LLMEngineOutput) -> str:
        limit, had = self._request.stop_conditions.max_tokens, len(self._tokens)
        if limit is None or self._choices > 1 or had + len(item.token_ids) <= limit:
            return ""
        if sent_twice(self._tokens, item.token_ids):
            return "the tokens that had come were sent again: token_ids holds the new tokens only, also on the terminal"
        return f"{had + len(item.token_ids)} tokens came, max_tokens was {limit}"

    def _fault_of_usage(self, item: LLMEngineOutput) -> str:
        usage = item.completion_usage
        # How an engine counts what was broken off is its own affair.
        if usage is None or item.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR):
            return ""
        counts = not self._text
        return usage_fault(
            usage,
            prompt=len(self._request.token_ids) if counts else None,
            tokens=len(self._tokens) if counts and self._choices == 1 else None,
            stopped=item.finish_reason in (FinishReason.STOP, FinishReason.EOS),
        )


async def validated(
    engine: LLMEngine, items: AsyncIterator[LLMEngineOutput], rules: StreamRules
) -> AsyncGenerator[LLMEngineOutput, None]:
    """Yield the same items.

    The terminal is held back until the stream has ended, so that what follows it fails the request.

    Raises:
        ContractViolation: an item breaks a rule, or is no `LLMEngineOutput`; or `generate` is no generator.
    """
    check_stream(engine, items)
    stream = aiter(items)
    terminal: LLMEngineOutput | None = None
    try:
        while True:
            try:
                async with asyncio.timeout(None if rules.left else ENDING) as limit:
                    item = await anext(stream)
            except StopAsyncIteration:
                break
            except TimeoutError:
                if not limit.expired():
                    raise
                raise ContractViolation(
                    f"{qualname(engine, 'generate')}: the stream did not end within {ENDING:g} s after its terminal: "
                    f"`return` right after the terminal{suspended_at(items)}"
                ) from None
            except Exception as error:
                if rules.left:
                    raise
                raise ContractViolation(
                    f"{qualname(engine, 'generate')} raised {type(error).__name__} after its terminal item: {error}"
                ) from error
            if not isinstance(item, LLMEngineOutput):
                raise ContractViolation(item_fault(engine, items, item))
            fault = rules.fault_of(item)
            if fault:
                raise ContractViolation(f"{qualname(engine, 'generate')}: {fault}{suspended_at(items)}")
            if rules.left:
                yield item
            else:
                terminal = item
        if terminal is not None:
            yield terminal
    finally:
        close = getattr(items, "aclose", None)
        if close is not None:
            await close()
