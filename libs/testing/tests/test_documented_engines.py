"""The complete engines that the pages show keep the contract that the pages teach."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from dynamo_core import LLMEngine, WorkerConfig
from dynamo_testing import run_conformance

DOCS = Path(__file__).parents[3] / "docs"


def engine_of(page: str, file: str, folder: Path) -> Any:
    """Return the class of the engine in a file that a page shows."""
    shown = re.search(rf"```python\n# file: {re.escape(file)}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert shown is not None
    path = folder / "shown_engine.py"
    path.write_text(shown[1])
    module = runpy.run_path(str(path), run_name=path.stem)
    [found] = [
        cls
        for cls in module.values()
        if isinstance(cls, type) and cls.__module__ == path.stem and issubclass(cls, LLMEngine)
    ]
    return found


@pytest.mark.parametrize(
    ("page", "file"),
    [
        ("how-to/package-a-plugin.md", "hello/src/dynamo_plugin_engine_hello/engine.py"),
        ("reference/engine-contract.md", "my_engine.py"),
        ("tutorials/write-an-engine.md", "dynamo-plugin-engine-shout/words.py"),
    ],
)
async def test_an_engine_that_a_page_shows_passes_the_kit(page: str, file: str, tmp_path: Path) -> None:
    cls = engine_of(page, file, tmp_path)

    assert (await run_conformance(lambda: cls(cls.Config(), WorkerConfig(model_name="a-model")))).passed
