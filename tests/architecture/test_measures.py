"""What the tree is made of gets no worse: a figure of `tests.architecture.measures` has a bound that only falls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.measures import ROOT, Checkout, measures, read
from tests.architecture.repeats import pairs

# Every line of the tree is read once, which takes a while on a machine that does other things too.
pytestmark = pytest.mark.timeout(300)

#: What no figure may exceed. A figure that falls takes its bound with it. One that has to rise does so here, and the
#: commit says why. Statements of plugins and tests have no bound: they grow with what the product can do.
BOUNDS = {
    "statements of core": 3_600,
    "statements of the largest plugin": 3_500,
    "modules of the largest folder": 20,
    "words of docs": 60_000,
    "words of the longest page": 3_500,
    "lines of the longest function": 59,
    "long functions": 0,
    # Three of them are tables of cases, and loops that mutate answers, in the tests of two families of parsers.
    "pairs of files that repeat": 56,
    "pairs among tests": 22,
    # An extension that shows everything imports each kind of event.
    "names that plugins import from core": 181,
    "names that plugins import from libs": 93,
}

#: Seven lines that count, and what stands around them.
CODE = """
def total({one}, {two}):
    {one} = list({one})
    for item in {two}:
        {one}.append(item + {number})
    if not {one}:
        raise ValueError({text})
    return sum({one})
"""


@pytest.fixture(scope="module")
def figures() -> dict[str, int]:
    return measures(Checkout(ROOT))


@pytest.mark.parametrize("name", BOUNDS)
def test_no_figure_exceeds_its_bound(name: str, figures: dict[str, int]) -> None:
    assert figures[name] <= BOUNDS[name], f"{name} rose: `python -m tests.architecture.measures --pairs` lists them"


def test_statements_are_counted_without_docstrings_comments_and_blank_lines() -> None:
    source = '"""Says what it is."""\n\n# A remark.\nclass A:\n    """A class."""\n    one = 1\n    two: int = 2\n'

    assert read(Path("a.py"), source).statements == 3
    assert read(Path("a.py"), source).lines == 7


@pytest.mark.parametrize(
    ("other", "exact"),
    [
        ({"one": "first", "two": "second", "number": "1", "text": "'none'"}, True),
        ({"one": "rows", "two": "more", "number": "2.5", "text": "f'no'"}, False),
    ],
)
def test_a_repeat_is_found_under_other_names(other: dict[str, str], exact: bool) -> None:
    ours = CODE.format(one="first", two="second", number="1", text="'none'")
    theirs = "import asyncio\n" + CODE.format_map(other).replace("    if", "\n    # As it should be.\n    if")

    (pair,) = pairs([("a.py", read(Path("a.py"), ours).code), ("b.py", read(Path("b.py"), theirs).code)])

    assert (pair.first, pair.start, pair.end) == ("a.py", 2, 8)
    assert (pair.second, pair.other_start, pair.other_end) == ("b.py", 3, 11)
    assert pair.exact is exact


@pytest.mark.parametrize(
    "source",
    [
        "from a import (\n    b,\n    c,\n    d,\n    e,\n    f,\n    g,\n)\n",
        "if TYPE_CHECKING:\n    B = a.b\n    C = a.c\n    D = b.D\n    E = b.E\n    F = c.F\n    G: Kind = c.G\n",
        "__all__ = [\n    b,\n    c(),\n    d.e,\n    e.f(),\n    f,\n    g,\n]\n",
        "NAMES = {\n    'b': 1,\n    'c': -1,\n    'd': [2],\n    'e': {},\n    'f': 'b',\n    'g': None,\n}\n",
        "@overload\ndef f(\n    b: int,\n    c: str = '',\n    d: bool = True,\n    e: int = 1,\n) -> str: ...\n",
    ],
)
def test_boilerplate_of_the_language_is_no_repeat(source: str) -> None:
    code = read(Path("a.py"), source).code

    assert pairs([("a.py", code), ("b.py", code)]) == []


def test_a_checkout_is_measured(tmp_path: Path) -> None:
    files = {
        "conftest.py": "def f(): ...\n",
        "core/src/dynamo_core/errors.py": "a = 1\n",
        "core/src/dynamo_core/tasks.py": "a = 1\nb = 2\n",
        "runtime/src/dynamo_runtime/app.py": "a = 1\n",
        "runtime/tests/test_app.py": "a = 1\n",
        "libs/wire/src/dynamo_wire/__init__.py": "a = 1\n",
        "libs/wire/tests/test_wire.py": "a = 1\n",
        "plugins/routers/kv/src/kv/__init__.py": "from dynamo_core.errors import A, B\nimport dynamo_wire\n",
        "plugins/routers/kv/tests/test_kv.py": "b = 1\n",
        "docs/README.md": "Three words here.\n<!-- made: it -->\nNot these.\n<!-- end: it -->\n",
        ".venv/lib/x.py": "broken(\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    seen = measures(Checkout(tmp_path))

    assert [seen[f"statements of {name}"] for name in ("core", "runtime", "the product", "tests")] == [3, 1, 7, 5]
    assert (seen["statements of the largest plugin"], seen["modules of the largest folder"]) == (2, 2)
    assert (seen["names that plugins import from core"], seen["names that plugins import from libs"]) == (2, 1)
    assert (seen["words of docs"], seen["words of the longest page"]) == (3, 3)
