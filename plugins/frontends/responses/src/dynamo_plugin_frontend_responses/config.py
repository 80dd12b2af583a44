"""The settings of the Responses API."""

from __future__ import annotations

from typing import Literal

from dynamo_generation.config import GenerationConfig, Path
from pydantic import Field

#: Turns of a stored conversation, at most.
MOST_TURNS = 100_000


class ResponsesConfig(GenerationConfig):
    """The address of the routes, and the memory between requests."""

    responses_path: Path = Field(default="/v1/responses", description="Path of the Responses API.")
    conversations_path: Path = Field(
        default="/v1/conversations", description="Path of conversations; served where `response_store` names a store."
    )
    response_store_policy: Literal["fail", "pass"] = Field(
        default="fail",
        description="What becomes of an answer that cannot be stored: its request fails, or it goes out with "
        "`store: false`.",
    )
    response_store_life: float = Field(
        default=30 * 86400.0,
        gt=0,
        le=10 * 366 * 86400.0,
        description="Seconds that responses and conversations are kept after they were last used.",
    )
    response_store_timeout: float = Field(
        default=5.0, gt=0, le=60, description="Seconds that a call of the response store may take."
    )
    response_store_turns: int = Field(
        default=1000, ge=1, le=MOST_TURNS, description="Turns of a stored conversation that one request may go on from."
    )
    response_store_context_mb: int = Field(
        default=16, ge=1, le=1024, description="MB of stored responses that one request may go on from."
    )
