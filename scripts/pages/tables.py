"""Tables in Markdown, and the comments beside the fields of a class."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence

#: A field or a constant with the comment above it.
_COMMENTED = re.compile(r"((?:^ *#: .*\n)*)^ *(\w+)(?::| =)", re.MULTILINE)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def code(text: object) -> str:
    """Return a text in code style."""
    return f"`{text}`"


def comments(cls: type) -> dict[str, str]:
    """Return the comment that begins with ``#:`` above each field of a class, in the order of the fields."""
    return {
        name: " ".join(comment.replace("#:", "").split())
        for comment, name in _COMMENTED.findall(inspect.getsource(cls))
    }
