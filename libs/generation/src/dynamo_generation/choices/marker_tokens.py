"""Parser markers that are single tokens of the model, looked up once per model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from dynamo_core import ReasoningParser, ServedModel, Tokenizer, ToolCallParser

    ParserType: TypeAlias = type[ToolCallParser] | type[ReasoningParser]


class MarkerTokens(NamedTuple):
    """The markers of some parsers that are single tokens of a model."""

    texts: Mapping[int, str]
    #: Their ids, which no stream of text may skip.
    ids: frozenset[int]
    #: Whether the tokenizer shows all special tokens or none.
    all_or_none: bool

    def of(self, parser: ParserType) -> frozenset[str]:
        """Return those that one of the parsers asks for."""
        return frozenset(parser.MARKERS).intersection(self.texts.values())


NO_MARKERS = MarkerTokens({}, frozenset(), all_or_none=False)


class MarkerStore:
    """A cache of the marker tokens of each served model."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[ServedModel, dict[tuple[ParserType | None, ...], MarkerTokens]] = (
            WeakKeyDictionary()
        )

    def find(self, model: ServedModel, *parsers: ParserType | None) -> MarkerTokens:
        """Return the tokens among the markers of these parsers."""
        known = self._known.get(model)
        if known is None:
            known = self._known[model] = {}
        tokens = known.get(parsers)
        if tokens is None:
            tokens = known[parsers] = _tokens_of(model.tokenizer, parsers)
        return tokens


def _tokens_of(tokenizer: Tokenizer, parsers: tuple[ParserType | None, ...]) -> MarkerTokens:
    texts: dict[int, str] = {}
    for marker in dict.fromkeys(marker for parser in parsers if parser is not None for marker in parser.MARKERS):
        ids = tokenizer.encode(marker, add_special_tokens=False)
        if len(ids) == 1 and tokenizer.token_bytes(ids[0]) == marker.encode():
            texts[ids[0]] = marker
    if not texts:
        return NO_MARKERS
    all_or_none = "keep" not in inspect.signature(tokenizer.stream).parameters
    return MarkerTokens(texts, frozenset(texts), all_or_none)
