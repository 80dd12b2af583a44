"""Config files for the tests of the settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a file into the working directory of the test, so that origins read ``config.yaml:3``."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "config.yaml") -> Path:
        path = Path(name)
        path.write_text(dedent(text).lstrip("\n"), encoding="utf-8")
        return path

    return write
