"""The task of all agents: what it is, how a model does it, and what must have come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
#: What both of two commands print; it is in neither of them.
SUM = "42222"


@dataclass(frozen=True)
class Moves:
    """How an agent is told to act in a folder: calls of its tools."""

    read: Callable[[Path], Call]
    edit: Callable[[Path], Call]
    run: Callable[[str], Call]


def prepare(folder: Path) -> None:
    """Puts the files of the task into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "colour.txt").write_text("red")
    (folder / "run.sh").write_text(SCRIPT)


def said(folder: Path) -> str:
    """What the last run of the task's program wrote."""
    return (folder / "said.txt").read_text().removeprefix("the colour is ")


def script(
    form: Format, moves: Moves, folder: Path, *, final: Callable[[str], str] = lambda text: text
) -> list[dict[str, Any]]:
    """What a model of that format answers to each turn of the task. `final` makes the last answer of what it says."""

    def says(text: str, *calls: Call, **when: Any) -> dict[str, Any]:
        beside = text if form.content_beside_calls or not calls else ""
        return {**when, "text": text_of(form.write(REASONING, beside, calls))}

    def results(count: int) -> dict[str, Any]:
        return {"match": form.result, "times": count}

    commands = [f"printf {name} > {name}.txt; expr 42000 + 222" for name in ("one", "two")]
    both = [moves.run(command) for command in commands]
    return [
        says(final(BOTH_DONE), match=SUM, times=2),
        *([says("Both of them.", *both, match=BOTH)] if form.parallel else []),
        says(final(GONE_ON), **results(4)),
        says("Once more.", moves.run("printf blue > colour.txt && sh run.sh"), match=GO_ON),
        says(final(DONE), **results(3)),
        says("Let it speak.", moves.run("sh run.sh"), **results(2)),
        says("Now I change it.", moves.edit(folder / "colour.txt"), **results(1)),
        says("I look first.", moves.read(folder / "colour.txt")),
    ]
