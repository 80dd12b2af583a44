"""vLLM as an engine: real models, on GPUs or on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core import hookimpl

if TYPE_CHECKING:
    from dynamo_core import LLMEngine

DYNAMO_API = 1


@hookimpl
def dynamo_register_engines() -> list[type[LLMEngine]]:
    """Offer `VllmEngine` under the name ``vllm``; vLLM itself is imported when the engine starts."""
    from dynamo_plugin_engine_vllm.engine import VllmEngine

    return [VllmEngine]
