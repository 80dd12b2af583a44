"""The settings of the frontend beside the listener's own."""

from __future__ import annotations

from typing import Annotated

from dynamo_core import PluginConfig
from pydantic import Field

Path = Annotated[str, Field(pattern=r"^/[^{}\s?#]*[^/{}\s?#]$")]


class OpenAIConfig(PluginConfig):
    """Where the routes are, and how far a slow reader may lag behind."""

    chat_path: Path = Field(default="/v1/chat/completions", description="Path of chat completions.")
    completions_path: Path = Field(default="/v1/completions", description="Path of text completions.")
    embeddings_path: Path = Field(default="/v1/embeddings", description="Path of embeddings.")
    models_path: Path = Field(
        default="/v1/models", description="Path of the model list; `/{id}` below it shows one model."
    )
    list_models_path: Path = Field(default="/dynamo/alpha/list-models", description="Path of the extended model list.")
    write_buffer: int = Field(
        default=256 * 1024, ge=0, description="Bytes that may wait for a slow reader before its request is paused."
    )
