"""The settings of Ollama's API."""

from __future__ import annotations

from dynamo_generation.config import GenerationConfig, Path
from pydantic import Field


class OllamaConfig(GenerationConfig):
    """The address of the routes."""

    ollama_prefix: Path = Field(
        default="/api",
        description="What the paths of Ollama's API begin with. What stands before the last part of it is the address "
        "that clients are told.",
    )
