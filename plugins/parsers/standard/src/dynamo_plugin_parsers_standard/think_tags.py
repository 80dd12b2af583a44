"""A parser of reasoning between tags, for all formats that are data."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dynamo_core import ContentDelta, DeltaWriter, ModelText, ParserDelta, ReasoningParser

from dynamo_plugin_parsers_standard.format_markers import REASONING_SIGNS, recognize
from dynamo_plugin_parsers_standard.grammar import reasoning_tag
from dynamo_plugin_parsers_standard.scanner import Scanner, State, Tags, skip_white

_NEWLINES = re.compile(r"\n*")
#: Characters at the end of a prompt in which a tag may stand, white space included.
_TAIL = 256
_THINK = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """The reasoning markup of a family of models."""

    #: Opening tags, each with the one that closes it.
    pairs: tuple[tuple[str, str], ...] = (_THINK,)
    #: Markup of calls that ends reasoning which is not closed. It is content itself.
    ends: tuple[str, ...] = ()
    #: Whether an answer is reasoning although nothing has opened it, unless the prompt closes it.
    unopened: bool = False
    #: Tags that may stand around the content after reasoning.
    around: tuple[str, str] | None = None
    #: The special tokens of the markup, if they are not the tags themselves.
    tokens: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """All special tokens that the markup may be made of."""
        return (self.tokens or tuple(tag for pair in self.pairs for tag in pair)) + self.ends


class ThinkParser(ReasoningParser):
    """Reasoning is opened by the end of the prompt, at the beginning of the answer, or both; and closed once.

    A tag further on is content. Newlines beside the tags belong to them. Reasoning that is not closed stays reasoning,
    up to markup of calls where the format has some: where that is a token of the model, its spelling ends nothing.
    """

    NAME = "think"
    FORMAT: ClassVar[ThoughtFormat] = ThoughtFormat()
    MARKERS = FORMAT.markers

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.MARKERS = cls.FORMAT.markers

    @classmethod
    def recognizes(cls, model: ModelText) -> str | None:
        """See `ReasoningParser.recognizes`."""
        return recognize(REASONING_SIGNS, cls.NAME, model)

    def __init__(self, prompt: str) -> None:
        super().__init__(prompt)
        form, tail = self.FORMAT, prompt[-_TAIL:].rstrip()
        opened = next((close for tag, close in form.pairs if tail.endswith(tag)), None)
        closed = any(tail.endswith(close) for _, close in form.pairs)
        #: Whether an answer that does not begin with an opening tag is reasoning.
        self._inside = form.unopened or opened is not None
        self._close = opened or form.pairs[0][1]
        #: What ends the reasoning.
        self._closing = Tags(())
        #: Whether all that is left is content as it is.
        self._done = False
        state: State = self._begin
        if closed:
            state, self._done = self._content, True
        self._scanner = Scanner(state)
        self._out = DeltaWriter()
        self._ends = form.ends
        #: Ends of reasoning that count only as tokens.
        self._token_ends: frozenset[str] = frozenset()
        #: White space before the opening tag.
        self._space: list[str] = []
        #: Newlines at the end of the reasoning so far.
        self._newlines = 0

    def has_marker_tokens(self, markers: frozenset[str]) -> None:
        """Let markup of calls that is a token of the model end reasoning only as a token."""
        self._token_ends = markers.intersection(self._ends)
        self._ends = tuple(end for end in self._ends if end not in markers)

    def structural_tag(self) -> Mapping[str, Any] | None:
        """Return thoughts up to the closing tag, where they have begun; where they may, with both tags."""
        if self._done:
            return {"type": "const_string", "value": ""}
        if self.FORMAT.around is not None:
            return None
        return reasoning_tag("" if self._inside else self.FORMAT.pairs[0][0], self._close)

    def feed(self, text: str) -> list[ParserDelta]:
        """Return what some more text makes certain."""
        if self._done:
            return [ContentDelta(text)] if text else []
        self._scanner.feed(text)
        return self._out.take()

    def feed_marker(self, marker: str) -> list[ParserDelta]:
        """Return what a special token makes certain."""
        if marker not in self._token_ends or self._done:
            return self.feed(marker)
        self._flush()
        if self._scanner.state in (self._inner_newlines, self._reasoning):
            self._newlines = 0
        self._pass_through()
        self._out.content(marker)
        return self._out.take()

    def finish(self) -> list[ParserDelta]:
        """Return what is left at the end."""
        self._flush()
        if self._scanner.state == self._reasoning:
            self._out.reasoning("\n" * self._newlines)
        return self._out.take()

    def _flush(self) -> None:
        """Flush text that was held back and begins no tag."""
        self._scanner.finish()
        if self._scanner.state == self._begin:
            self._begin_without_tag()

    def _begin(self, text: str, at: int, last: bool) -> int:
        start, at = at, skip_white(text, at)
        self._space.append(text[start:at])
        if at == len(text):
            return at
        openings = _tags(*(tag for tag, _ in self.FORMAT.pairs))
        tag = openings.at(text, at)
        if tag:
            self._close = dict(self.FORMAT.pairs)[tag]
            self._scanner.state = self._inner_newlines
        elif last or not openings.may_begin(text, at):
            self._begin_without_tag()
        return at + len(tag)

    def _begin_without_tag(self) -> None:
        space = "".join(self._space)
        if self._inside:
            self._out.reasoning(space.lstrip("\n"))
            self._enter_reasoning()
        else:
            self._out.content(space)
            self._pass_through()

    def _inner_newlines(self, text: str, at: int, last: bool) -> int:
        at = _skip_newlines(text, at)
        if at < len(text):
            self._enter_reasoning()
        return at

    def _enter_reasoning(self) -> None:
        self._closing = _tags(self._close, *self._ends)
        self._scanner.state = self._reasoning

    def _reasoning(self, text: str, at: int, last: bool) -> int:
        found = self._closing.find(text, at, last=last)
        tag = self._closing.at(text, found)
        body = text[at:found]
        bare = body.rstrip("\n")
        if bare:
            self._out.reasoning("\n" * self._newlines + bare)
            self._newlines = 0
        self._newlines += len(body) - len(bare)
        if tag == self._close:
            self._scanner.state = self._outer_newlines
            return found + len(tag)
        if tag:
            self._pass_through()
        return found

    def _outer_newlines(self, text: str, at: int, last: bool) -> int:
        at = _skip_newlines(text, at)
        if at == len(text):
            return at
        around = self.FORMAT.around
        if around is None:
            self._pass_through()
            return at
        opening = _tags(around[0])
        if opening.at(text, at):
            self._scanner.state = self._wrapped
            return at + len(around[0])
        if last or not opening.may_begin(text, at):
            self._pass_through()
        return at

    def _wrapped(self, text: str, at: int, last: bool) -> int:
        """Return content up to the tag that ends it."""
        around = self.FORMAT.around
        assert around is not None  # noqa: S101 - its opening tag was found
        closing = _tags(around[1])
        found = closing.find(text, at, last=last)
        tag = closing.at(text, found)
        self._out.content(text[at:found])
        if tag:
            self._pass_through()
        return found + len(tag)

    def _pass_through(self) -> None:
        self._scanner.state = self._content

    def _content(self, text: str, at: int, last: bool) -> int:
        self._out.content(text[at:])
        self._done = True
        return len(text)


class Qwen3Parser(ThinkParser):
    """Qwen3, whose template opens the reasoning or closes it, or leaves that to the model."""

    NAME = "qwen3"
    FORMAT = ThoughtFormat(ends=("<tool_call>",))


class DeepSeekR1Parser(ThinkParser):
    """DeepSeek-R1, which thinks first even where neither the template nor the model writes the opening tag."""

    NAME = "deepseek_r1"
    FORMAT = ThoughtFormat(ends=("<｜tool▁calls▁begin｜>",), unopened=True)


class DeepSeekV31Parser(ThinkParser):
    """DeepSeek-V3.1 and V3.2, whose template opens the reasoning or closes it, as the request asks."""

    NAME = "deepseek_v31"
    FORMAT = ThoughtFormat(ends=("<｜tool▁calls▁begin｜>", "<｜DSML｜function_calls>"))


class Glm45Parser(ThinkParser):
    """GLM-4.5 to 4.7."""

    NAME = "glm45"
    FORMAT = ThoughtFormat(ends=("<tool_call>",))


class GraniteParser(ThinkParser):
    """Granite 3.2, which announces its thoughts and its response in words, and 3.3, which has tags for both."""

    NAME = "granite"
    FORMAT = ThoughtFormat(
        (
            ("Here is my thought process:", "Here is my response:"),
            ("Here's my thought process:", "Here's my response:"),
            _THINK,
        ),
        around=("<response>", "</response>"),
        tokens=_THINK,
    )


class MistralThinkParser(ThinkParser):
    """Magistral and later models of Mistral."""

    NAME = "mistral"
    FORMAT = ThoughtFormat((("[THINK]", "[/THINK]"),), ends=("[TOOL_CALLS]",))


class MiniMaxM2ThinkParser(ThinkParser):
    """MiniMax-M2, which always thinks, and leaves the opening tag to the template."""

    NAME = "minimax_m2"
    FORMAT = ThoughtFormat(ends=("<minimax:tool_call>",), unopened=True)


class KimiK2ThinkParser(ThinkParser):
    """Kimi-K2-Thinking, and Kimi-VL with tags of its own."""

    NAME = "kimi_k2"
    FORMAT = ThoughtFormat((_THINK, ("◁think▷", "◁/think▷")), ends=("<|tool_calls_section_begin|>",))


class Olmo3ThinkParser(ThinkParser):
    """OLMo 3."""

    NAME = "olmo3"
    FORMAT = ThoughtFormat(ends=("<function_calls>",))


class NemotronThinkParser(ThinkParser):
    """Nemotron."""

    NAME = "nemotron"
    FORMAT = ThoughtFormat(ends=("<TOOLCALL>", "<tool_call>"))


class SeedOssParser(ThinkParser):
    """Seed-OSS."""

    NAME = "seed_oss"
    FORMAT = ThoughtFormat((("<seed:think>", "</seed:think>"),), ends=("<seed:tool_call>",))


class Gemma4ThinkParser(ThinkParser):
    """Gemma 4, whose thoughts are a channel."""

    NAME = "gemma4"
    FORMAT = ThoughtFormat(
        (("<|channel>thought", "<channel|>"),), ends=("<|tool_call>",), tokens=("<|channel>", "<channel|>")
    )


@functools.cache
def _tags(*texts: str) -> Tags:
    return Tags(texts)


def _skip_newlines(text: str, at: int) -> int:
    match = _NEWLINES.match(text, at)
    return at if match is None else match.end()
