"""Programs of other people that speak to `dynamo serve`. The lane `make test-clients` sets them up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.clients.recorder import Recorder, by_shape, keep, kept, recording
from tests.e2e.conftest import serve, serve_for_module

__all__ = ["serve", "serve_for_module"]

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def only_where_set_up(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("full") and not os.environ.get("DYNAMO_CLIENTS"):
        pytest.skip("clients of other people are set up and run by `make test-clients`")


@pytest.fixture
def recorded() -> Iterator[Callable[[str, Any], Recorder]]:
    """Put a recorder before a server. What the client of that name sent is its fixture if DYNAMO_CLIENTS=record."""
    with ExitStack() as stack:

        def start(name: str, server: Any) -> Recorder:
            recorder = stack.enter_context(recording(server.url))
            stack.callback(_compare, name, recorder)
            return recorder

        yield start


def _compare(name: str, recorder: Recorder) -> None:
    if os.environ.get("DYNAMO_CLIENTS") == "record":
        keep(name, recorder)
    assert by_shape(recorder.asked).keys() == kept(name).keys(), "it sends something else: DYNAMO_CLIENTS=record"
