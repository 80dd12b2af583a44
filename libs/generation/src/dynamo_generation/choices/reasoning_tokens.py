"""The count of reasoning tokens in an answer, from the parser's view of each item."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_core import ParserDelta, ReasoningDelta, Tokenizer, ToolCallStart


class ReasoningCount:
    """Counts the tokens of one choice that are reasoning.

    Markup beside reasoning is part of it: the tags, and the white space that the parser takes for a part of them. A
    token is reasoning if some of its text is, so the token that completes the end marker is, whatever else it brings.

    An item on one side costs hardly anything. Only where an item is on both sides its tokens are decoded one by one.
    """

    __slots__ = ("_inside", "_tokenizer", "_undecided", "total")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._inside = False
        #: Tokens outside of reasoning of which the parser has made nothing yet: they may open reasoning.
        self._undecided = 0
        self.total = 0

    def add(self, tokens: Sequence[int], fed: int, deltas: Sequence[ParserDelta]) -> None:
        """Count the tokens of an item whose `fed` characters the parser has made `deltas` of."""
        if not deltas:
            if self._inside:
                self.total += len(tokens)
            else:
                self._undecided += len(tokens)
            return
        undecided, self._undecided = self._undecided, 0
        reasons = [isinstance(delta, ReasoningDelta) for delta in deltas]
        if reasons[0]:
            self.total += undecided
        if all(reasons):
            self.total += len(tokens)
        elif self._inside or any(reasons):
            self.total += self._on_both_sides(tokens, fed, deltas)
        self._inside = reasons[-1]

    def _on_both_sides(self, tokens: Sequence[int], fed: int, deltas: Sequence[ParserDelta]) -> int:
        if len(tokens) > 1:
            step = self._tokenizer.stream(skip_special_tokens=False).step
            texts = [step([token]) for token in tokens]
            return _not_within(texts, self._outside("".join(texts), deltas))
        told = sum(len(_text(delta)) for delta in deltas if not isinstance(delta, ReasoningDelta))
        return len(tokens) if told < fed else 0

    def _outside(self, whole: str, deltas: Sequence[ParserDelta]) -> list[tuple[int, int]]:
        """Return the spans of the text that are no reasoning, and no markup beside it."""
        spans: list[tuple[int, int]] = []
        start, end = len(whole), -1
        # From the end: what is no reasoning stands there as the model wrote it, and what is before it may repeat it.
        at = len(whole)
        for delta in reversed(deltas):
            text = _text(delta)
            found = whole.rfind(text, 0, at)
            if found < 0:
                found = max(at - len(text), 0)
            if not isinstance(delta, ReasoningDelta):
                if end < 0:
                    end = found + len(text) if at < len(whole) else at
                start = found
            elif end >= 0:
                spans.append((start, end))
                end = -1
            at = found
        return spans if end < 0 else [*spans, (start if self._inside else 0, end)]


def _text(delta: ParserDelta) -> str:
    return delta.name if isinstance(delta, ToolCallStart) else delta.text


def _not_within(texts: Sequence[str], spans: Sequence[tuple[int, int]]) -> int:
    """Return how many of the texts, one after the other, do not lie in one of the spans."""
    count = end = 0
    for text in texts:
        start, end = end, end + len(text)
        count += not any(first <= start and end <= last for first, last in spans)
    return count
