"""Holds the hand-written parts of `docs/reference/engine-contract.md` to the contract."""

from __future__ import annotations

import re
from pathlib import Path

import dynamo_core
import pytest
from dynamo_core import BackendError
from dynamo_core.protocol import request

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "engine-contract.md").read_text()


def first_cells(heading: str) -> list[str]:
    """Return the first cells of the first table below a heading, without its head."""
    section = re.split(rf"^#+ {re.escape(heading)}$", PAGE, flags=re.MULTILINE)[1]
    lines = re.split(r"^#+ ", section, flags=re.MULTILINE)[0].split("| --- |", 1)[1].split("\n\n")[0].splitlines()[1:]
    return [line.strip("| ").split(" | ")[0] for line in lines]


def test_every_engine_error_has_a_row() -> None:
    kinds = [name for name, value in vars(BackendError).items() if isinstance(value, type)]

    assert [cell.strip("`") for cell in first_cells("Errors")] == kinds


def test_every_stop_condition_has_a_row() -> None:
    listed = {name for cell in first_cells("Stopping") for name in re.findall(r"`(\w+)`", cell)}

    # The budget of thoughts is for engines that have one; nothing checks it.
    assert listed == set(request.StopConditions.__struct_fields__) - {"max_thinking_tokens"}


@pytest.mark.parametrize("name", sorted(set(re.findall(r"^\| `([A-Z]\w+)` \| `", PAGE, re.MULTILINE))))
def test_every_group_of_the_request_is_public(name: str) -> None:
    assert hasattr(dynamo_core, name)


def test_the_page_describes_the_stream_validator_switch() -> None:
    for word in ("serve --dev", "DYN_STREAM_VALIDATOR=1", "DYN_STREAM_VALIDATOR=0", "after the terminal"):
        assert word in PAGE
