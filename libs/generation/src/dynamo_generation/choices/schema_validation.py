"""What an answer that no grammar guides has to be checked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dynamo_core import ContentDelta, ParserDelta, ToolCallArguments, ToolCallStart

from dynamo_generation.choices.schema_check import Claim

Schema: TypeAlias = dict[str, Any] | bool


@dataclass(slots=True)
class Answered:
    """One answer, gathered for a check. `value` is the schema of an answer without calls, None if that is text.

    `strict` are the schemas of the arguments of functions, by name.
    """

    value: Schema | None
    strict: Mapping[str, Schema]
    _content: list[str] = field(default_factory=list)
    _calls: list[tuple[str, list[str]]] = field(default_factory=list)

    def add(self, deltas: Iterable[ParserDelta]) -> None:
        """Adds what came."""
        for delta in deltas:
            match delta:
                case ContentDelta(text):
                    self._content.append(text)
                case ToolCallStart(_, _, name):
                    self._calls.append((name, []))
                case ToolCallArguments(index, text):
                    self._calls[index][1].append(text)

    def claims(self) -> Iterator[Claim]:
        """What is to be true of it: of its value, or of its calls."""
        if self.value is not None and not self._calls:
            yield Claim("the answer", "".join(self._content), self.value)
        for name, pieces in self._calls:
            if name in self.strict:
                yield Claim(f"the arguments of {name}", "".join(pieces) or "{}", self.strict[name])
