"""Tables in Markdown, and the comments beside the fields of a class."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def code(text: object) -> str:
    """Return a text in code style."""
    return f"`{text}`"


def comments(cls: type) -> Iterator[tuple[list[str], str]]:
    """Yield the fields of a class with the comment above them, ``#: …``, which holds for all up to the next one."""
    names: list[str] = []
    comment = ""
    for line in inspect.getsource(cls).splitlines():
        if line.startswith("    #: "):
            if names:
                yield names, comment.strip()
                names, comment = [], ""
            comment += line.removeprefix("    #:").replace("``", "`")
        elif comment and (field := re.match(r"    (\w+)(?:: | = )", line)):
            names.append(field[1])
        elif comment and names and (not line or line.startswith(("    def ", "    async ", "    @"))):
            yield names, comment.strip()
            names, comment = [], ""
    if names:
        yield names, comment.strip()


def field_rows(cls: type) -> Iterator[tuple[str, str]]:
    """Yield a row with the names and the meaning of the fields of a class that share a comment."""
    for names, comment in comments(cls):
        yield ", ".join(map(code, names)), comment.strip()


def described(documented: object) -> str:
    """Return a docstring as one line."""
    return " ".join((inspect.getdoc(documented) or "").replace("``", "`").split())
