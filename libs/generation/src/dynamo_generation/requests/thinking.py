"""The thinking switch of a request as variables of the chat template."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import meta, nodes


class Kind(enum.Enum):
    """The meaning of a template variable."""

    SWITCH = "true or false"
    EFFORT = "a word"
    BUDGET = "tokens; 0 for no thinking"


#: The variables of the templates that are known: `enable_thinking` of Qwen3, GLM and most others, `thinking` of
#: DeepSeek V3.1, Granite and Kimi, `reasoning` of Command A, `reasoning_effort` of gpt-oss and Mistral,
#: `thinking_budget` of Seed-OSS.
VARIABLES: Mapping[str, Kind] = {
    "enable_thinking": Kind.SWITCH,
    "thinking": Kind.SWITCH,
    "reasoning": Kind.SWITCH,
    "reasoning_effort": Kind.EFFORT,
    "thinking_budget": Kind.BUDGET,
}
SWITCHES = tuple(name for name, kind in VARIABLES.items() if kind is Kind.SWITCH)

#: Efforts that turn thinking off where a template has a switch.
_OFF = frozenset({"none", "minimal"})
_NONE, _LEAST, _MUCH = "none", "low", "high"


@dataclass(frozen=True, slots=True)
class ThinkingRequest:
    """A client's wish for thinking. `on` is None if it leaves the choice to the template."""

    on: bool | None = None
    effort: str | None = None
    budget: int | None = None

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to think, as far as the client says: an effort says it, too."""
        if self.on is None and self.effort is not None:
            return self.effort not in _OFF
        return self.on


@dataclass(frozen=True, slots=True)
class ThinkingVariables:
    """The thinking variables that a template reads. `knows_none` is whether it accepts the effort ``none``."""

    names: tuple[str, ...] = ()
    knows_none: bool = False

    @staticmethod
    def of(source: str, parsed: nodes.Template) -> ThinkingVariables:
        """Return the variables of a template, of which there is both the source and the tree."""
        if not any(name in source for name in VARIABLES):
            return ThinkingVariables()
        read = meta.find_undeclared_variables(parsed)
        knows_none = any(const.value == _NONE for const in parsed.find_all(nodes.Const))
        return ThinkingVariables(tuple(name for name in VARIABLES if name in read), knows_none)

    def values(self, wish: ThinkingRequest) -> dict[str, Any]:
        """Return what the variables are for a wish; without those that are left to the template."""
        thinks = wish.thinks
        found: dict[str, Any] = {}
        for name in self.names:
            match VARIABLES[name]:
                case Kind.SWITCH:
                    found[name] = thinks
                case Kind.EFFORT:
                    found[name] = self._effort(wish)
                case Kind.BUDGET:
                    found[name] = 0 if thinks is False else wish.budget
        return {name: value for name, value in found.items() if value is not None}

    def _effort(self, wish: ThinkingRequest) -> str | None:
        if wish.on is None or any(name in SWITCHES for name in self.names):
            return wish.effort
        if not wish.on:
            return _NONE if self.knows_none else _LEAST
        return wish.effort or (_MUCH if self.knows_none else None)
