"""The names of `dynamo_testing`, where that distribution is installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    # A dunder is asked by the import system itself, which takes only AttributeError for an answer.
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        kits = import_module("dynamo_testing")
    except ModuleNotFoundError as error:
        raise ImportError(
            "dynamo_core.testing needs the distribution dynamo-testing: pip install dynamo-testing"
        ) from error
    return getattr(kits, name)
