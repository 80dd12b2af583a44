"""Any OpenAI-compatible server as an engine: vLLM, SGLang, llama.cpp, Ollama, or another frontend of this framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core import hookimpl

if TYPE_CHECKING:
    from dynamo_core import LLMEngine

DYNAMO_API = 1


@hookimpl
def dynamo_register_engines() -> list[type[LLMEngine]]:
    """Offer `UpstreamEngine` under the name ``upstream``."""
    from dynamo_plugin_engine_upstream.engine import UpstreamEngine

    return [UpstreamEngine]
