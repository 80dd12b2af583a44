"""The task of all agents: what it is, how a model does it, and what must have come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tests.agents.formats import Call, Format
from tests.agents.models import text_of

ASKED = "Change the colour, and say it."
GO_ON = "Now make it blue."
BOTH = "Do two things at once."
DONE = "The colour is changed."
GONE_ON = "Now it is blue."
BOTH_DONE = "Both are done."
REASONING = "I think <hard> about {it}."

#: Nothing of it may be lost or changed on its way through markup, JSON and escapes.
COLOUR = 'grün "&" <b>\\n\\\\</b> {1: [2]} 你好'
SCRIPT = "printf 'the colour is %s' \"$(cat colour.txt)\" > said.txt\n"


@dataclass(frozen=True)
class Moves:
    """How an agent is told to act in a folder: calls of its tools."""

    read: Callable[[Path], Call]
    edit: Callable[[Path], Call]
    run: Callable[[str], Call]


def prepare(folder: Path) -> None:
    """Put the files of the task into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "colour.txt").write_text("red")
    (folder / "run.sh").write_text(SCRIPT)


def said(folder: Path) -> str:
    """Return what the last run of the task's program wrote."""
    return (folder / "said.txt").read_text().removeprefix("the colour is ")


Final: TypeAlias = Callable[[str], str]


def plain(text: str) -> str:
    return text


def one_by_one(form: Format, moves: Moves, folder: Path, *, final: Final = plain) -> list[dict[str, Any]]:
    """Return the script of a model that does the task, a call each turn.

    `final` makes the last answer of what it says.
    """
    return [
        _says(form, final(GONE_ON), results=4),
        _says(form, "Once more.", moves.run("printf blue > colour.txt && sh run.sh")) | {"match": GO_ON},
        _says(form, final(DONE), results=3),
        _says(form, "Let it speak.", moves.run("sh run.sh"), results=2),
        _says(form, "Now I change it.", moves.edit(folder / "colour.txt"), results=1),
        _says(form, "I look first.", moves.read(folder / "colour.txt")),
    ]


def at_once(form: Format, moves: Moves, *, final: Final = plain) -> list[dict[str, Any]]:
    """Return the script of a model that makes two calls in one answer, or in two if its format needs it."""
    one, two = (moves.run(f"printf {name} > {name}.txt") for name in ("one", "two"))
    calls = [_says(form, "Both of them.", one, two)]
    if not form.parallel:
        calls = [_says(form, "And the other.", two, results=1), _says(form, "One of them.", one)]
    return [_says(form, final(BOTH_DONE), results=2), *calls]


def _says(form: Format, text: str, *calls: Call, results: int = 0) -> dict[str, Any]:
    """Return an answer to a prompt with so many results of tools, at least."""
    beside = text if form.content_beside_calls or not calls else ""
    when = {"match": form.result, "times": results} if results else {}
    return {**when, "text": text_of(form.write(REASONING, beside, calls))}
