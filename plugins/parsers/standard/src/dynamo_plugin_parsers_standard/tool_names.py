"""The names of the tools of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def known_names(tools: Sequence[Mapping[str, Any]]) -> Callable[[str], bool]:
    """Return whether a name is that of one of these tools, given in the form of the OpenAI API."""
    return {tool["function"]["name"] for tool in tools if "function" in tool}.__contains__
