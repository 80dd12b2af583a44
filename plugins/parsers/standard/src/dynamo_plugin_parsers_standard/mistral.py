"""Calls as Mistral writes them: ``[TOOL_CALLS] [{…}, …]``, or in newer models ``[TOOL_CALLS]name[ARGS]{…}``."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynamo_text import CallArguments, CallArray, CallObject

from dynamo_plugin_parsers_standard.markup import MarkupParser
from dynamo_plugin_parsers_standard.scan import may_begin, skip_white

_ID_TAG = "[CALL_ID]"
_ARGUMENTS_TAG = "[ARGS]"
_WORD = re.compile(r"[A-Za-z0-9_.-]*")
#: The longest name or id.
_LONGEST = 256
_ALPHABET = string.ascii_letters + string.digits


def new_mistral_id() -> str:
    """An id as the templates of Mistral demand it: nine letters and digits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


class MistralParser(MarkupParser):
    """Both forms. In the newer one an id may stand between name and arguments: ``name[CALL_ID]abc[ARGS]{…}``."""

    NAME = "mistral"
    NEEDS_SPECIAL_TOKENS = True
    OPEN = "[TOOL_CALLS]"

    def __init__(self, tools: Sequence[Mapping[str, Any]], new_id: Callable[[], str] = new_mistral_id) -> None:
        super().__init__(tools, new_id)
        self._name: list[str] = []
        self._id: list[str] = []

    def _begin(self) -> None:
        self._name.clear()
        self._id.clear()
        self._enter(self._form)

    def _form(self, text: str, at: int, last: bool) -> int:
        at = self._header_space(text, at)
        if at == len(text):
            return at
        if text[at] == "[":
            self._read(CallArray(self._out, self._take_header()))
        elif text[at] == "{":
            self._read(CallObject(self._out, self._take_header()))
        else:
            self._enter(self._in_name)
        return at

    def _in_name(self, text: str, at: int, last: bool) -> int:
        return self._word(text, at, self._name)

    def _in_id(self, text: str, at: int, last: bool) -> int:
        return self._word(text, at, self._id)

    def _word(self, text: str, at: int, into: list[str]) -> int:
        match = _WORD.match(text, at)
        start, at = at, at if match is None else match.end()
        into.append(text[start:at])
        self._header.append(text[start:at])
        if sum(map(len, into)) > _LONGEST:
            self._give_up(self._take_header())
        elif at < len(text):
            self._enter(self._after_word)
        return at

    def _after_word(self, text: str, at: int, last: bool) -> int:
        at = self._header_space(text, at)
        if at == len(text):
            return at
        name, known = "".join(self._name), "".join(self._id)
        if name and text.startswith(_ID_TAG, at) and not self._id:
            self._header.append(_ID_TAG)
            self._enter(self._in_id)
            return at + len(_ID_TAG)
        if name and text.startswith(_ARGUMENTS_TAG, at):
            self._header.append(_ARGUMENTS_TAG)
            self._read(CallArguments(self._out, name, known or None, self._take_header()))
            return at + len(_ARGUMENTS_TAG)
        if name and text[at] == "{":
            self._read(CallArguments(self._out, name, known or None, self._take_header()))
        elif last or not name or not (may_begin(text, at, _ID_TAG) or may_begin(text, at, _ARGUMENTS_TAG)):
            self._give_up(self._take_header())
        return at

    def _header_space(self, text: str, at: int) -> int:
        start, at = at, skip_white(text, at)
        self._header.append(text[start:at])
        return at
