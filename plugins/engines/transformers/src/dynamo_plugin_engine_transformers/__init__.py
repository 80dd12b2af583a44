"""The transformers library as an engine: the cheapest way to a real model, on a CPU or a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core import hookimpl

if TYPE_CHECKING:
    from dynamo_core import LLMEngine

DYNAMO_API = 1


@hookimpl
def dynamo_register_engines() -> list[type[LLMEngine]]:
    """Offer `TransformersEngine` under the name ``transformers``."""
    from dynamo_plugin_engine_transformers.engine import TransformersEngine

    return [TransformersEngine]
