"""Harmony, in which gpt-oss answers: messages on channels, between special tokens.

``<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>`` is a message. The
prompt ends with ``<|start|>assistant``. The recipient may stand before the channel or after it.
"""

from __future__ import annotations

import enum
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dynamo_core import DeltaWriter, ModelText, ParserDelta, ReasoningParser, ToolCallParser, new_call_id
from dynamo_text import CallArguments, Progress, surplus_kind

from dynamo_plugin_parsers_standard.format_markers import REASONING_SIGNS, TOOL_SIGNS, recognize
from dynamo_plugin_parsers_standard.scanner import Tags
from dynamo_plugin_parsers_standard.tool_names import known_names

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARKERS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
_ALL = Tags(_MARKERS)

#: The longest header.
_LONGEST = 512
#: How an answer begins that goes on with the header of the prompt, before the first special token.
_CONTINUED = re.compile(r"\s*(?:t|to|to=[^\s<]*\s*)?")
# Possessive: a header of any text is matched in one pass.
_HEADER = re.compile(
    r"\s*+(?:<\|start\|>\s*+)?(?:assistant\b\s*+)?(?:to=(?P<before>[^\s<]++)\s*+)?"
    r"(?:<\|channel\|>\s*+(?P<channel>analysis|commentary|final)\b\s*+(?:to=(?P<after>[^\s<]++)\s*+)?[\w-]*+\s*+)?"
    r"(?:<\|constrain\|>\s*+[\w-]*+\s*+)?"
)
_WORDS = ("assistant", "analysis", "commentary", "final")


class _Address(NamedTuple):
    """The recipient of a message, by its header."""

    channel: str
    recipient: str


class _State(enum.Enum):
    """The part that is being read."""

    #: The text between messages.
    OUTSIDE = enum.auto()
    HEADER = enum.auto()
    REASONING = enum.auto()
    CONTENT = enum.auto()
    #: What is shown as it was written, with the tag that ends it.
    UNSOUND = enum.auto()
    CALL = enum.auto()


def _is_cut_off(header: str) -> bool:
    """Return whether a header, which breaks off, is the beginning of a sound one."""
    before = header.rstrip(string.ascii_lowercase)
    begun = header[len(before) :]
    whole = (before + each for each in _WORDS if each.startswith(begun))
    return _address(header) is not None or any(_address(each) is not None for each in whole)


def _address(header: str) -> _Address | None:
    """Return what a header says; None if it is no header of the assistant."""
    match = _HEADER.fullmatch(header)
    if match is None:
        return None
    return _Address(match["channel"] or "final", match["after"] or match["before"] or "")


class Harmony:
    """Reads the messages of an answer. Text that is in no message is content, and so are unsound headers and calls.

    A header that breaks off is dropped if it is sound so far, and so is white space between messages. With `calls`
    messages to functions are calls; without, they are content as they were written.
    """

    def __init__(self, out: DeltaWriter, tools: Sequence[Mapping[str, Any]], *, calls: bool) -> None:
        self.malformed = 0
        self._out = out
        self._is_tool = known_names(tools)
        self._calls = calls
        #: Set where a limit ended the answer.
        self.cut_off = False
        self._spelled = _ALL
        #: The beginning of a tag at the end of the text so far.
        self._held = ""
        self._state = _State.HEADER
        #: Whether the header began in the prompt, and no tag of it has come yet.
        self._continued = True
        self._header: list[str] = []
        self._header_length = 0
        #: White space between messages: shown if other text is beside it.
        self._space: list[str] = []
        #: After a call: the kind of repair that drops what else stands there, "" if that is only white space.
        self._surplus: str | None = None
        self._reader: CallArguments | None = None
        self._name = ""
        #: Whether nothing but white space has come of the arguments of a call.
        self._empty = True

    def expect_tokens(self, markers: frozenset[str]) -> None:
        """Treat these tags as content where they come as text from now on."""
        self._spelled = Tags(tag for tag in _MARKERS if tag not in markers)

    def continue_prompt(self, prompt: str) -> None:
        """Begin in the message that the end of the prompt has opened, if it has."""
        header, opened, body = prompt[prompt.rfind(_START) :].rpartition(_MESSAGE)
        address = _address(header)
        if opened and address is not None and not any(tag in body for tag in _ENDS):
            self._begin_text(address)

    def feed(self, text: str) -> None:
        """Feed more text, maybe with tags in it."""
        self._split(self._held + text, last=False)

    def feed_marker(self, marker: str) -> None:
        """Feed a tag that came as a token."""
        self._split(self._held, last=True)
        self._tag(marker)

    def finish(self) -> None:
        """Finish at the end of the text."""
        self._split(self._held, last=True)
        if self._state is _State.HEADER:
            self._drop_header("")
        elif self._state is _State.CALL and not self._empty:
            self._finish_call()
        self._drop_space()

    def _finish_call(self) -> None:
        if self._reader is not None and (self.cut_off or not self._reader.complete()):
            shown = self._reader.leftover()
            self.malformed += bool(shown)
            self._out.content(shown)

    def _split(self, text: str, *, last: bool) -> None:
        at, end = 0, len(text)
        while at < end:
            found = self._spelled.find(text, at, last=last)
            self._text(text[at:found])
            at = found
            tag = self._spelled.at(text, at)
            if not tag:
                break
            self._tag(tag)
            at += len(tag)
        self._held = text[at:]

    def _tag(self, tag: str) -> None:
        in_header = self._state is _State.HEADER
        if in_header and tag in (_CHANNEL, _CONSTRAIN):
            self._continued = False
            self._extend_header(tag)
        elif in_header and tag == _MESSAGE:
            self._begin_message()
        elif tag in (_START, _CHANNEL):
            self._end_message("")
            self._state, self._continued = _State.HEADER, False
            self._extend_header(tag)
        elif tag in _ENDS:
            self._end_message(tag)
            self._state = _State.OUTSIDE
        else:
            self._text(tag)

    def _text(self, text: str) -> None:
        if not text:
            return
        match self._state:
            case _State.HEADER:
                self._extend_header(text)
            case _State.REASONING:
                self._out.reasoning(text)
            case _State.CONTENT | _State.UNSOUND:
                self._out.content(text)
            case _State.CALL:
                self._in_call(text)
            case _State.OUTSIDE:
                self._between(text)

    def _between(self, text: str) -> None:
        """Skip white space between messages; after a call one bracket too many may be beside it."""
        self._space.append(text)
        if text.isspace():
            return
        if self._surplus == "" and (kind := surplus_kind(text.strip())):
            self._surplus = kind
            return
        self._out.content("".join(self._space))
        self._space.clear()
        self._surplus = None
        self._state = _State.CONTENT

    def _drop_space(self) -> None:
        if self._surplus:
            self._out.repaired(self._surplus)
        self._surplus = None
        self._space.clear()

    def _extend_header(self, text: str) -> None:
        self._header.append(text)
        self._header_length += len(text)
        if self._header_length > _LONGEST or (self._continued and not _CONTINUED.fullmatch("".join(self._header))):
            self._show_header("")

    def _take_header(self) -> str:
        header = "".join(self._header)
        self._header.clear()
        self._header_length = 0
        return header

    def _show_header(self, tag: str) -> None:
        """Show text that is no header as content, with all that follows."""
        self._state = _State.CONTENT if self._continued else _State.UNSOUND
        header = self._take_header()
        self.malformed += self._calls and not self._continued and "to=functions." in header
        self._out.content(header + tag)

    def _drop_header(self, tag: str) -> None:
        """Drop a header that breaks off, at a tag or with the text."""
        if self._continued or not _is_cut_off("".join(self._header)):
            self._show_header(tag)
        self._take_header()

    def _begin_message(self) -> None:
        address = _address("".join(self._header))
        function = "" if address is None else self._function(address.recipient)
        if address is None or (function and not self._calls):
            self._continued = False
            self._show_header(_MESSAGE)
        elif function:
            self._reader = CallArguments(self._out, function, before=self._take_header() + _MESSAGE)
            self._name, self._empty = function, True
            self._state = _State.CALL
        else:
            self._take_header()
            self._begin_text(address)

    def _begin_text(self, address: _Address) -> None:
        self._state = _State.REASONING if address.channel == "analysis" else _State.CONTENT

    def _function(self, recipient: str) -> str:
        """Return the name of the tool that a recipient stands for; empty if it is none."""
        name = recipient.removeprefix("functions.")
        return name if name != recipient or self._is_tool(recipient) else ""

    def _in_call(self, text: str) -> None:
        reader = self._reader
        assert reader is not None  # noqa: S101 - `_begin_message` has set it
        self._empty = self._empty and text.isspace()
        at = reader.feed(text)
        if reader.progress is Progress.DONE:
            self._state, self._surplus = _State.OUTSIDE, ""
            self._text(text[at:])
        elif reader.progress is Progress.BROKEN:
            self._state = _State.UNSOUND
            self.malformed += 1
            self._out.content(reader.unreported() + text[at:])

    def _end_message(self, tag: str) -> None:
        """End a message, with a tag or because another one begins."""
        self._drop_space()
        if self._state is _State.HEADER:
            self._drop_header(tag)
        elif self._state is _State.UNSOUND:
            self._out.content(tag)
        elif self._state is _State.CALL and self._empty:
            self._out.begin_call(self._name)
            self._out.arguments("{}")
        elif self._state is _State.CALL and self._reader is not None and not self._reader.complete():
            shown = self._reader.leftover()
            self.malformed += 1
            self._out.content(shown + tag if shown else "")


class GptOssParser(ToolCallParser):
    """Calls, reasoning and content of gpt-oss."""

    NAME = "gpt_oss"
    MARKERS = _MARKERS
    TELLS_REASONING = True

    def __init__(self, tools: Sequence[Mapping[str, Any]], new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(tools)
        self._out = DeltaWriter(new_id)
        self.repairs = self._out.repairs
        self._harmony = Harmony(self._out, tools, calls=True)

    @classmethod
    def recognizes(cls, model: ModelText) -> str | None:
        """Return why a model writes in the format of Harmony; None if it does not."""
        return recognize(TOOL_SIGNS, cls.NAME, model)

    def buffer_calls(self) -> None:
        """Hold a call until its arguments are complete."""
        self._out.buffered = True

    def has_marker_tokens(self, markers: frozenset[str]) -> None:
        """Treat these tags as markup only where they come as tokens."""
        self._harmony.expect_tokens(markers)

    def feed(self, text: str) -> list[ParserDelta]:
        """Return what some more text makes certain."""
        self._harmony.feed(text)
        return self._take()

    def feed_marker(self, marker: str) -> list[ParserDelta]:
        """Return what a tag makes certain."""
        self._harmony.feed_marker(marker)
        return self._take()

    def finish(self) -> list[ParserDelta]:
        """Return what is left at the end."""
        self._harmony.cut_off = self.cut_off
        self._harmony.finish()
        self.malformed = self._harmony.malformed
        return self._out.take()

    def _take(self) -> list[ParserDelta]:
        self.malformed = self._harmony.malformed
        return self._out.take()


class GptOssReasoningParser(ReasoningParser):
    """Reasoning and content of gpt-oss. Messages to functions are content, as they were written."""

    NAME = "gpt_oss"
    MARKERS = _MARKERS

    def __init__(self, prompt: str) -> None:
        super().__init__(prompt)
        self._out = DeltaWriter()
        self._harmony = Harmony(self._out, (), calls=False)
        self._harmony.continue_prompt(prompt)

    @classmethod
    def recognizes(cls, model: ModelText) -> str | None:
        """Return why a model writes in the format of Harmony; None if it does not."""
        return recognize(REASONING_SIGNS, cls.NAME, model)

    def has_marker_tokens(self, markers: frozenset[str]) -> None:
        """Treat these tags as markup only where they come as tokens."""
        self._harmony.expect_tokens(markers)

    def feed(self, text: str) -> list[ParserDelta]:
        """Return what some more text makes certain."""
        self._harmony.feed(text)
        return self._out.take()

    def feed_marker(self, marker: str) -> list[ParserDelta]:
        """Return what a tag makes certain."""
        self._harmony.feed_marker(marker)
        return self._out.take()

    def finish(self) -> list[ParserDelta]:
        """Return what is left at the end."""
        self._harmony.finish()
        return self._out.take()
