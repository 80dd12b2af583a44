"""docs/reference/engine-contract.md names every check, every failure, and everything that can be set."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dynamo_testing import ConformanceFailure, EngineConformance
from dynamo_testing.command import engine
from dynamo_testing.engine.checks import CHECKS, Check

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "engine-contract.md").read_text()

FAILURES = list(dict.fromkeys(failure for check in CHECKS for failure in check.failures))


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    section = re.split(r"^##+ ", PAGE.split(f"\n### {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_the_checks_are_listed_in_their_order() -> None:
    assert rows("The checks") == [[f"`{check.name}`", check.promise] for check in CHECKS]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.__name__)
def test_a_failure_is_listed_with_its_checks_its_meaning_and_the_remedy(failure: type[ConformanceFailure]) -> None:
    def finds(check: Check) -> bool:
        return failure in check.failures

    found_by = ", ".join(f"`{check.name}`" for check in filter(finds, CHECKS))
    remedy = failure.REMEDY[0].upper() + failure.REMEDY[1:]
    row = [found_by, f"`{failure.__name__}`", (failure.__doc__ or "").partition("\n")[0], remedy]

    assert row in rows("The failures")


def test_no_failure_is_listed_that_is_not_there() -> None:
    assert len(rows("The failures")) == len(FAILURES)


def test_every_attribute_of_the_class_is_listed_with_its_default() -> None:
    listed = {row[0].strip("`"): row[1].strip("`") for row in rows("In tests")}

    known = {name: getattr(EngineConformance, name) for name in dir(EngineConformance) if name.isupper()}
    assert listed == {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in known.items()}


def test_every_option_of_the_command_is_listed() -> None:
    listed = {row[0].strip("`").split()[0] for row in rows("The command")}

    assert listed == {option for parameter in engine.params for option in parameter.opts if option.startswith("--")}
