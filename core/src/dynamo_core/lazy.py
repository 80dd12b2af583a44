"""Lazy imports: a package shows the names of its modules and imports each module on the first use of a name.

The names stand once, in the package's stub ``__init__.pyi``: type checkers read it, and so does `exports`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

_IMPORT = re.compile(r"^from (\S+) import (\([^)]*\)|[^(\n]+)", re.MULTILINE)
_NAME = re.compile(r"(\w+) as \1\b")


def exports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of the package whose ``__init__.py`` is `file`."""
    stub = Path(file).with_suffix(".pyi").read_text(encoding="utf-8")
    homes = {name: module for module, names in _IMPORT.findall(stub) for name in _NAME.findall(names)}

    def load(name: str) -> Any:
        module = homes.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return load, names, sorted(homes)
