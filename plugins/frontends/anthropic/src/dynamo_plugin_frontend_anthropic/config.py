"""The settings of the Anthropic API."""

from __future__ import annotations

from dynamo_generation.config import GenerationConfig, Path
from pydantic import Field


class AnthropicConfig(GenerationConfig):
    """The address of the routes."""

    messages_path: Path = Field(
        default="/v1/messages", description="Path of the Anthropic API; `/count_tokens` below it counts tokens."
    )
    models_path: Path = Field(
        default="/v1/models",
        description="Path of the model list; `/{id}` below it shows one model.",
    )
