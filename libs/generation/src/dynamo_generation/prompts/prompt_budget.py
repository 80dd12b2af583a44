"""The room for prompt tokens in the context, and the early refusal of longer prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynamo_core.errors import InvalidArgument
from dynamo_text import TextEncoder

if TYPE_CHECKING:
    from dynamo_core import ServedModel

#: Tokens of all prompts of a request together, of a prompt for a model that tells no context, and of a text whose
#: tokens are only told; more for a model whose context is larger.
MAX_TOKENS = 1_000_000
#: Bytes that a prompt may have without a place to cut, for each token of the context, and at least. A tokenizer takes
#: some 150 times that in memory, for one prompt at a time.
_STRETCH, _LEAST_STRETCH = 4, 1 << 20
#: How many times as much text as fits into the context a conversation may hold: its template may leave some out.
_LEFT_OUT = 4
#: Characters that are enough to estimate the load of a prompt that is too long to be encoded whole.
_ESTIMATED = 64 * 1024
#: And of one that comes after prompts with `MAX_TOKENS`.
_ESTIMATED_AFTER = 1024


class PromptBudget:
    """The room for the prompts of one request. `field` is named in errors.

    `counted` is for a request that only asks for tokens: the prompt may be longer than the context. An engine that
    takes text counts its own tokens, so that those of its prompts are an estimate, and nothing is too long. `answer` is
    the tokens of the context that must be left for an answer.
    """

    def __init__(self, model: ServedModel, field: str, *, counted: bool = False, answer: int = 1) -> None:
        context = model.card.context_length
        self._tokenizer = model.tokenizer
        self._field = field
        self._stretch = max(_LEAST_STRETCH, _STRETCH * (context or 0))
        self._context = context
        self._left = self._total = max(context or 0, MAX_TOKENS)
        self._most = self._total if counted or context is None else context - answer
        self._estimates = model.card.model_input == "text" and not counted

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of one more prompt. A short one may have more than there is room for.

        Raises:
            InvalidArgument: it has too many, or cannot be cut into parts; or all prompts together have too many.
        """
        if self._estimates:
            return await self._estimate(text, add_special_tokens=add_special_tokens)
        most, refuse = self._most, self._refusal
        if self._left < most:
            most, refuse = self._left, self._refusal_of_all
        encoder = TextEncoder(self._tokenizer, most, refuse, self._stretch)
        ids = await encoder.encode(text, add_special_tokens=add_special_tokens)
        self.take(len(ids))
        return ids

    def take(self, tokens: int) -> None:
        """Take room for the tokens of one more prompt.

        Raises:
            InvalidArgument: all prompts together have too many.
        """
        self._left -= tokens
        if self._left < 0 and not self._estimates:
            raise self._refusal_of_all(0)

    async def check(self, texts: Sequence[str]) -> None:
        """Check by their lengths alone that prompts may fit, each and all together.

        Raises:
            InvalidArgument: they do not.
        """
        if self._estimates or not texts:
            return
        await TextEncoder(self._tokenizer, self._most, self._refusal).check([max(texts, key=len)])
        await TextEncoder(self._tokenizer, self._total, self._refusal_of_all).check(texts)

    async def check_conversation(self, messages: Sequence[Mapping[str, Any]], *others: Any) -> None:
        """Check by its lengths alone that a long conversation may fit, before its template is rendered.

        A template shows the last message of the user. It may leave out other texts, such as earlier thoughts: all of
        them together may have several times the tokens of the context. `others` are tools and the like.

        Raises:
            InvalidArgument: it does not fit.
        """
        if self._estimates:
            return
        last, texts = await asyncio.to_thread(lambda: (_last_of_user(messages), _texts([messages, *others])))
        await TextEncoder(self._tokenizer, self._most, self._refusal).check(last)
        most = _LEFT_OUT * self._most
        await TextEncoder(self._tokenizer, most, self._refusal_of_texts).check(texts)

    async def shorten(self, texts: Sequence[str], wishes: Sequence[int | None]) -> list[str]:
        """Return texts whose first tokens are all that is wanted, cut where the fewest of the wished numbers allow it.

        Without a wish of no more than the context they are only checked.

        Raises:
            InvalidArgument: one is too long, or cannot be cut.
        """
        if self._estimates:
            return list(texts)
        wished = [self._most if wish < 0 else wish for wish in wishes if wish]
        most = min(wished, default=None)
        if most is None or most > self._most:
            await self.check(texts)
            return list(texts)
        encoder = TextEncoder(self._tokenizer, most, self._refusal, self._stretch)
        return [await encoder.beginning(text) for text in texts]

    async def _estimate(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            encoder = TextEncoder(self._tokenizer, self._left, lambda _: _NoEstimate())
            ids = await encoder.encode(text, add_special_tokens=add_special_tokens)
        except _NoEstimate:
            encoder = TextEncoder(self._tokenizer, MAX_TOKENS, lambda _: _NoEstimate())
            ids = await encoder.encode(text[: _ESTIMATED if self._left else _ESTIMATED_AFTER])
        self._left = max(0, self._left - len(ids))
        return ids

    def _refusal(self, tokens: int | None) -> InvalidArgument:
        return self._indivisible() if tokens is None else self._invalid(f"The prompt has at least {tokens} {self._why}")

    def _refusal_of_texts(self, tokens: int | None) -> InvalidArgument:
        return self._invalid(f"The conversation has at least {tokens} {self._why}")

    @property
    def _why(self) -> str:
        if self._context is None or self._most > self._context:
            return f"tokens: at most {self._total} are allowed"
        why = " and leaves no room for an answer" if self._most < self._context else ""
        return f"tokens{why}: the context of the model is {self._context} tokens"

    def _refusal_of_all(self, tokens: int | None) -> InvalidArgument:
        if tokens is None:
            return self._indivisible()
        return self._invalid(
            f"The prompts have at least {tokens + self._total - self._left} tokens together: "
            f"at most {self._total} are allowed"
        )

    def _indivisible(self) -> InvalidArgument:
        return self._invalid(
            "The prompt has too much text in one piece: the tokenizer of the model finds no place to cut it into parts"
        )

    def _invalid(self, message: str) -> InvalidArgument:
        return InvalidArgument(f"Validation: {message}", field=self._field)


class _NoEstimate(Exception):
    """The text is too long to be encoded whole."""


def _last_of_user(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the texts of the last message of the user."""
    for message in reversed(messages):
        if message.get("role") == "user":
            return _texts(message.get("content"))
    return []


def _texts(value: Any) -> list[str]:
    """Return all texts of a value, all the way down, without the names of fields."""
    found: list[str] = []
    stack = [value]
    while stack:
        top = stack.pop()
        if isinstance(top, str):
            found.append(top)
        elif isinstance(top, dict):
            stack += top.values()
        elif isinstance(top, list | tuple):
            stack += top
    return found
