"""The schemas that an unguided answer must be validated against, and the collected answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
from dynamo_core import ContentDelta, ParserDelta, ToolCallArguments, ToolCallStart

Schema: TypeAlias = dict[str, Any] | bool


@dataclass(frozen=True, slots=True)
class SchemaConstraint:
    """A text that is to obey a schema; `what` is how messages call it."""

    what: str
    text: str
    schema: Schema


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why an answer is not what was asked for. `valid` is None where that could not be found out."""

    valid: bool | None
    error: str


@dataclass(slots=True)
class CollectedAnswer:
    """One answer, gathered for a check. `value` is the schema of an answer without calls, None if that is text.

    `strict` are the schemas of the arguments of functions, by name.
    """

    value: Schema | None
    strict: Mapping[str, Schema]
    _content: list[str] = field(default_factory=list)
    _calls: list[tuple[str, list[str]]] = field(default_factory=list)

    def add(self, deltas: Iterable[ParserDelta]) -> None:
        """Add what came."""
        for delta in deltas:
            match delta:
                case ContentDelta(text):
                    self._content.append(text)
                case ToolCallStart(_, _, name):
                    self._calls.append((name, []))
                case ToolCallArguments(index, text):
                    self._calls[index][1].append(text)

    def constraints(self) -> Iterator[SchemaConstraint]:
        """Yield what is to be true of it: of its value, or of its calls."""
        if self.value is not None and not self._calls:
            yield SchemaConstraint("the answer", "".join(self._content), self.value)
        for name, pieces in self._calls:
            if name in self.strict:
                yield SchemaConstraint(f"the arguments of {name}", "".join(pieces) or "{}", self.strict[name])
