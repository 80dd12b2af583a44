"""What every test of the tree needs."""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest
from hypothesis import settings

# How much of what can be generated is tried: a little in every run, more in the long lanes, which choose it by option.
settings.register_profile("brief", max_examples=25, deadline=None)
settings.register_profile("thorough", max_examples=150, deadline=None)
settings.load_profile("brief")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collecting leaves stays: ten thousand tests, and all that they import.

    To look through it again and again while it grows takes a quarter of the collecting, and later some of each test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tests log whatever a hostile client may send; reports travel between processes and must be text that can."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report
