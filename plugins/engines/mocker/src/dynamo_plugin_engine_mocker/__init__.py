"""The mocker: an engine without a model, for tests, load runs and first steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core import hookimpl

if TYPE_CHECKING:
    from dynamo_core import LLMEngine

DYNAMO_API = 1


@hookimpl
def dynamo_register_engines() -> list[type[LLMEngine]]:
    """Offer `MockerEngine` under the name ``mocker``."""
    from dynamo_plugin_engine_mocker.engine import MockerEngine

    return [MockerEngine]
