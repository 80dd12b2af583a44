"""The settings shared by all APIs: how requests are read, and how far answers may lag behind."""

from __future__ import annotations

from typing import Annotated, Literal

from dynamo_core import PluginConfig
from pydantic import Field

Path = Annotated[str, Field(pattern=r"^/[^{}\s?#]*[^/{}\s?#]$")]


class GenerationConfig(PluginConfig):
    """Settings of reading requests and writing answers."""

    unknown_fields: Literal["refuse", "ignore"] = Field(
        default="refuse",
        description="What becomes of a request with fields that no API documents: refuse it, or leave them out and "
        "name them in the answer's header x-dynamo-ignored-fields.",
    )
    exclude_tools_when_tool_choice_none: bool = Field(
        default=True, description="Whether the template is not shown the tools of a request that must not call any."
    )
    template_timeout: float = Field(
        default=5.0, gt=0, description="Seconds that the chat template of a model may take for a conversation."
    )
    unary_answer_limit_mb: int = Field(
        default=256, ge=1, description="MB that an answer which is not streamed may take while it is collected."
    )
    unary_answers_limit_mb: int = Field(
        default=256,
        ge=1,
        description="MB that all such answers of a process may take together; small ones are always collected.",
    )
    write_buffer: int = Field(
        default=256 * 1024, ge=0, description="Bytes that may wait for a slow reader before its request is paused."
    )
