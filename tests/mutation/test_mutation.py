from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.mutation.__main__ import MODULES, RENAMES, ROOT, SIZE, read_rows, read_sample
from tests.mutation.mutants import Key, draw, find_mutants, follow, names_of
from tests.mutation.trials import Baseline, Copy, attempt, measure

MODULE = "core/src/scale.py"
SOURCE = """
class Scale:
    def clamp(self, number: int) -> int:
        return number if number > 0 else 0
"""
TEST = """
from scale import Scale

def test_number_above_zero_stays() -> None:
    assert Scale().clamp(3) == 3
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, text in ((MODULE, SOURCE), ("tests/test_scale.py", TEST), ("pytest.ini", "[pytest]\nmarkers = full\n")):
        (tmp_path / "checkout" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "checkout" / path).write_text(text)
    return tmp_path / "checkout"


def test_sample_has_mutants_of_modules_that_are_here() -> None:
    keys, renames = read_sample(), read_rows(RENAMES)
    assert len(set(keys)) == SIZE
    for module in {key.module for key in keys} | set(MODULES):
        assert any((ROOT / path).is_file() for path, _ in names_of(module, "", renames)), (
            f"{module} needs a row in {RENAMES}"
        )


def test_drawing_again_gives_the_same_mutants() -> None:
    keys = draw(MODULE, SOURCE, 3, seed=1)
    assert keys == draw(MODULE, SOURCE, 3, seed=1) != draw(MODULE, SOURCE, 3, seed=2)
    assert {key.operator for key in keys} == {"if_exp", "number", "swap_op"}


def test_mutant_is_followed_over_renames_and_edits(root: Path) -> None:
    key = Key("old.py", "Range.clip", "swap_op", 1, "> 0 -> >= 0")
    renames = [["old.py", "lib.py"], ["lib.py::Range.clip", f"{MODULE}::Scale.clamp"]]
    found = [follow(key, root, renames), follow(key._replace(occurrence=0, change="0"), root, renames)]
    assert [mutant.key for mutant in found if mutant] == [Key(MODULE, "Scale.clamp", "swap_op", 0, "> 0 -> >= 0")] * 2
    assert follow(key, root, renames[:1]) is None
    assert follow(key._replace(change="< 0 -> <= 0"), root, renames) is None


def test_trial_tells_a_killed_mutant_from_a_survivor(root: Path, tmp_path: Path) -> None:
    copy = Copy(root, Path(sys.executable), tmp_path / "copy")
    measure(copy, tmp_path / "baseline", [MODULE], ["tests"])
    baseline = Baseline(tmp_path / "baseline", [MODULE])
    mutants = {mutant.key[2:4]: mutant for mutant in find_mutants(MODULE, SOURCE)}
    chosen = baseline.chosen(mutants["if_exp", 0], ["tests"], most=1)
    assert chosen == ["tests/test_scale.py::test_number_above_zero_stays"]
    assert attempt(copy, mutants["if_exp", 0], baseline, chosen) == (True, *chosen)
    assert attempt(copy, mutants["swap_op", 0], baseline, chosen) == (False, "1 tests pass")
    assert (copy.tree / MODULE).read_text() == SOURCE
