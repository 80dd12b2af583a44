"""Reasoning between ``<think>`` and ``</think>``."""

from __future__ import annotations

import re

from dynamo_core import DeltaWriter, ParserDelta, ReasoningParser

from dynamo_plugin_parsers_standard.scan import Scanner, State, find_tag, may_begin, skip_white

_OPEN = "<think>"
_CLOSE = "</think>"
_NEWLINES = re.compile(r"\n*")


class ThinkParser(ReasoningParser):
    """Reasoning is opened by the end of the prompt, at the beginning of the answer, or both; and closed once.

    A tag further on is content. Newlines beside the tags belong to them. Reasoning that is not closed stays reasoning.
    """

    NAME = "think"
    #: Whether an answer is reasoning although nothing has opened it, unless the prompt closes it.
    UNOPENED = False

    def __init__(self, prompt: str) -> None:
        super().__init__(prompt)
        tail = prompt.rstrip()
        #: Whether an answer that does not begin with the opening tag is reasoning.
        self._inside = self.UNOPENED or tail.endswith(_OPEN)
        state: State = self._content if tail.endswith(_CLOSE) else self._begin
        self._scanner = Scanner(state)
        self._out = DeltaWriter()
        #: White space before the opening tag.
        self._space: list[str] = []
        #: Newlines at the end of the reasoning so far.
        self._newlines = 0

    def feed(self, text: str) -> list[ParserDelta]:
        """What some more text makes certain."""
        self._scanner.feed(text)
        return self._out.take()

    def finish(self) -> list[ParserDelta]:
        """What is left at the end."""
        self._scanner.finish()
        if self._scanner.state == self._begin:
            self._begin_without_tag()
        elif self._scanner.state == self._reasoning:
            self._out.reasoning("\n" * self._newlines)
        return self._out.take()

    def _begin(self, text: str, at: int, last: bool) -> int:
        start, at = at, skip_white(text, at)
        self._space.append(text[start:at])
        if at == len(text):
            return at
        if text.startswith(_OPEN, at):
            self._scanner.state = self._inner_newlines
            return at + len(_OPEN)
        if last or not may_begin(text, at, _OPEN):
            self._begin_without_tag()
        return at

    def _begin_without_tag(self) -> None:
        space = "".join(self._space)
        if self._inside:
            self._out.reasoning(space.lstrip("\n"))
            self._scanner.state = self._reasoning
        else:
            self._out.content(space)
            self._scanner.state = self._content

    def _inner_newlines(self, text: str, at: int, last: bool) -> int:
        at = _skip_newlines(text, at)
        if at < len(text):
            self._scanner.state = self._reasoning
        return at

    def _reasoning(self, text: str, at: int, last: bool) -> int:
        found = find_tag(text, at, _CLOSE, last=last)
        body = text[at:found]
        bare = body.rstrip("\n")
        if bare:
            self._out.reasoning("\n" * self._newlines + bare)
            self._newlines = 0
        self._newlines += len(body) - len(bare)
        if not text.startswith(_CLOSE, found):
            return found
        self._scanner.state = self._outer_newlines
        return found + len(_CLOSE)

    def _outer_newlines(self, text: str, at: int, last: bool) -> int:
        at = _skip_newlines(text, at)
        if at < len(text):
            self._scanner.state = self._content
        return at

    def _content(self, text: str, at: int, last: bool) -> int:
        self._out.content(text[at:])
        return len(text)


class Qwen3Parser(ThinkParser):
    """Qwen3, whose template opens the reasoning or closes it, or leaves that to the model."""

    NAME = "qwen3"


class DeepSeekR1Parser(ThinkParser):
    """DeepSeek-R1, which thinks first even where neither the template nor the model writes the opening tag."""

    NAME = "deepseek_r1"
    UNOPENED = True


def _skip_newlines(text: str, at: int) -> int:
    match = _NEWLINES.match(text, at)
    return at if match is None else match.end()
