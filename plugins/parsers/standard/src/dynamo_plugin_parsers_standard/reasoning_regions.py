"""Reasoning by the model's `response_template`: an answer is regions, each for one field of the message."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dynamo_core import DeltaWriter, ModelText, ParserDelta, ReasoningParser

from dynamo_plugin_parsers_standard.grammar import reasoning_tag
from dynamo_plugin_parsers_standard.literal_patterns import Named, Sequence
from dynamo_plugin_parsers_standard.response_template import (
    CALLS,
    CONTENT,
    REASONING,
    DescribedParser,
    Field,
    Template,
    distinct,
    markers,
)
from dynamo_plugin_parsers_standard.scanner import Scanner, Tags


@dataclass(frozen=True, slots=True)
class _Region:
    """A part of an answer. `join` stands between two regions of the field."""

    field: str
    closes: Tags
    join: str = ""


@dataclass(frozen=True, slots=True)
class _Regions:
    """The regions of a template by their openings, and the one that needs none; None: text outside is lost."""

    opens: Mapping[str, _Region]
    begins: Tags
    implicit: _Region | None
    #: What begins the message of the assistant in a prompt.
    anchor: re.Pattern[str]
    #: The tags around reasoning, if there is only one way to write them.
    around: tuple[str, str] | None

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags."""
        return (*self.begins.tags, *(tag for region in self.opens.values() for tag in region.closes.tags))


_NO_TAGS = Tags(())
_NOTHING = _Regions({}, _NO_TAGS, _Region(CONTENT, _NO_TAGS), re.compile(r"(?!)"), None)


class TemplateReasoningParser(DescribedParser, ReasoningParser):
    """Reasoning between the tags of the template, wherever it stands. Calls are content, as they were written.

    White space beside the tags of reasoning belongs to them. The prompt is read from the last beginning of a message of
    the assistant on: a region that it opens goes on in the answer. What the prompt says is no part of the answer.
    """

    SAYS = "how it thinks"
    REGIONS: ClassVar[_Regions] = _NOTHING

    @classmethod
    def facts(cls, template: Template, model: ModelText) -> dict[str, Any] | None:
        """Return the regions of answers."""
        regions = _regions(template)
        return None if regions is None else {"REGIONS": regions, "MARKERS": markers(regions.tags, model)}

    def __init__(self, prompt: str) -> None:
        super().__init__(prompt)
        self._out = DeltaWriter()
        #: The region that the text belongs to; None: it is lost. An answer without tags is content.
        self._region: _Region | None = self.REGIONS.implicit or _NOTHING.implicit
        #: Whether the region was opened by a tag.
        self._opened = False
        self._scanner = Scanner(self._read)
        #: Whether white space belongs to the tag before it.
        self._trims = False
        #: White space that is shown unless it belongs to the tag after it.
        self._space: list[str] = []
        #: Whether there was a region of reasoning, and whether one had text.
        self._thought = self._reasoned = False
        message = 0
        for anchor in self.REGIONS.anchor.finditer(prompt):
            message = anchor.end()
        if message:
            self._scanner.feed(prompt[message:])
            self._scanner.finish()
            self._out.take()
            self._space.clear()
            self._reasoned = False

    def structural_tag(self) -> Mapping[str, Any] | None:
        """Return thoughts up to the closing tag, where the prompt opens them; where it does not, with both tags."""
        around = self.REGIONS.around
        if around is None:
            return None
        if self._thought and not self._reasons():
            return {"type": "const_string", "value": ""}
        return reasoning_tag("" if self._reasons() else around[0], around[1])

    def feed(self, text: str) -> list[ParserDelta]:
        """Return what some more text makes certain."""
        self._scanner.feed(text)
        return self._out.take()

    def finish(self) -> list[ParserDelta]:
        """Return what is left at the end."""
        self._scanner.finish()
        if not self._reasons():
            self._show_space()
        return self._out.take()

    def _read(self, text: str, at: int, last: bool) -> int:
        tags = self._region.closes if self._opened and self._region is not None else self.REGIONS.begins
        found = tags.find(text, at, last=last)
        self._add(text[at:found])
        tag = tags.at(text, found)
        if tag:
            self._switch(tag)
        return found + len(tag)

    def _add(self, text: str) -> None:
        region = self._region
        if region is None or not text:
            return
        if region.field == CALLS:
            self._out.content(text)
            return
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        bare = text.rstrip()
        if bare:
            self._show_space()
            self._show(bare)
            self._reasoned = self._reasoned or self._reasons()
        self._space.append(text[len(bare) :])

    def _switch(self, tag: str) -> None:
        """Go on after a tag in the region that it opens, or behind the one that it closes."""
        region = None if self._opened else self.REGIONS.opens.get(tag)
        reasoned = self._reasons()
        if reasoned or (region is not None and region.field in REASONING):
            self._space.clear()
            self._trims = True
        else:
            self._show_space()
        if self._region is not None and self._region.field == CALLS:
            self._out.content(tag)
        self._opened = region is not None
        self._region = region or self.REGIONS.implicit
        if region is None:
            return
        if region.field == CALLS:
            self._trims = False
            self._out.content(tag)
        elif region.field in REASONING:
            self._thought = True
            self._out.reasoning(region.join if self._reasoned else "")

    def _reasons(self) -> bool:
        return self._region is not None and self._region.field in REASONING

    def _show(self, text: str) -> None:
        if self._reasons():
            self._out.reasoning(text)
        else:
            self._out.content(text)

    def _show_space(self) -> None:
        self._show("".join(self._space))
        self._space.clear()


def _regions(template: Template) -> _Regions | None:
    """Return the regions of a template; None if none of them is reasoning."""
    if not any(name in REASONING for name in template.fields):
        return None
    opens: dict[str, _Region] = {}
    implicit: list[_Region] = []
    for name, field in template.fields.items():
        try:
            _check(name, field)
            begins, ends = _tags(name, field.opens(), 0), _tags(name, field.closes(), -1)
        except ValueError as error:
            raise ValueError(f"fields.{name}: {error}") from None
        region = _Region(name, Tags(distinct(ends)), field.join or "")
        opens |= dict.fromkeys(begins, region)
        if not begins:
            implicit.append(region)
    if len(implicit) > 1:
        raise ValueError(f"fields.{implicit[1].field}.open is missing, and that of {implicit[0].field} too")
    if not implicit and CONTENT not in template.fields:
        # The template does not say where content is: it is what no field has.
        implicit.append(_Region(CONTENT, _NO_TAGS))
    calls = template.fields.get(CALLS, Field())
    if not implicit and any(len(each) > 1 for each in calls.closes()):
        raise ValueError(f"fields.{CALLS}.close: more than one tag, where text between fields is lost")
    without = implicit[0] if implicit else None
    begins = distinct((*opens, *(() if without is None else without.closes.tags)))
    return _Regions(opens, Tags(begins), without, _anchor(template), _around_reasoning(opens))


def _check(name: str, field: Field) -> None:
    plain = field.content == "text" and field.content_args in ({}, {"strip": True}) and field.transform is None
    if name != CALLS and not plain:
        raise ValueError("content: not text without the white space around it")


def _tags(name: str, sequences: list[Sequence], at: int) -> tuple[str, ...]:
    """Return the tags of a field. Of those around calls one is enough: the parser of calls reads the rest."""
    found: list[str] = []
    for sequence in sequences:
        texts = [piece for piece in sequence if isinstance(piece, str)]
        if name != CALLS and len(sequence) > 1:
            raise ValueError("open, close: white space or a name inside of a tag")
        found.append(texts[at].strip() if name == CALLS else texts[at])
    # White space after a tag of reasoning belongs to it.
    return tuple(tag for tag in dict.fromkeys(found) if not any(tag.rstrip() == each != tag for each in found))


def _anchor(template: Template) -> re.Pattern[str]:
    """Return what begins the message of the assistant. White space is possessive: the time is linear."""
    ways = [
        "".join(re.escape(piece) if isinstance(piece, str) else r"\s*+" for piece in sequence)
        for sequence in template.anchors()
        if not any(isinstance(piece, Named) for piece in sequence)
    ]
    if not ways:
        raise ValueError("start_anchor is missing, or has a name inside")
    return re.compile("|".join(ways))


def _around_reasoning(opens: Mapping[str, _Region]) -> tuple[str, str] | None:
    found = [(tag, close) for tag, region in opens.items() if region.field in REASONING for close in region.closes.tags]
    return found[0] if len(found) == 1 else None
