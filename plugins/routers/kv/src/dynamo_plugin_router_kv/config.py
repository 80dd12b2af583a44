"""The settings of the router."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from dynamo_core import PluginConfig
from pydantic import Field

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class KvConfig(PluginConfig):
    """The weights of overlap and load, and the router's source of cache contents."""

    LIVE: ClassVar[frozenset[str]] = frozenset(
        {
            "overlap_score_credit",
            "overlap_score_credit_decay",
            "prefill_load_scale",
            "decode_active_request_weight",
            "temperature",
            "track_active_blocks",
            "track_prefill_tokens",
            "assume_kv_reuse",
            "alarm_secs",
        }
    )

    overlap_score_credit: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0, description="What a block of the prompt that a worker holds is worth; 0 goes by load alone."
    )
    overlap_score_credit_decay: Weight = Field(
        default=0.0, description="How quickly that falls on workers with more to prefill than the others."
    )
    prefill_load_scale: Weight = Field(default=1.0, description="The weight of blocks that are to be prefilled.")
    decode_active_request_weight: Weight = Field(default=0.0, description="The cost of a request that runs already.")
    temperature: Weight = Field(
        default=0.0, description="0 takes the cheapest; more draws at random, the cheaper the likelier."
    )
    kv_events: bool = Field(
        default=True,
        description="Whether workers publish cache events; without them caches are predicted from routed requests.",
    )
    ttl_secs: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=120.0, description="Seconds that a predicted block counts as held after its last use."
    )
    max_blocks: Annotated[int, Field(ge=1)] = Field(
        default=2**20, description="Predicted blocks per rank; never more than the rank has."
    )
    track_active_blocks: bool = Field(
        default=True, description="Whether blocks of running requests count as load of their worker."
    )
    track_prefill_tokens: bool = Field(
        default=True, description="Whether tokens that are to be prefilled count as load of their worker."
    )
    assume_kv_reuse: bool = Field(
        default=True, description="Whether running requests share the blocks that their prompts have in common."
    )
    queue_threshold: Weight | None = Field(
        default=None,
        description="Requests wait while every worker has more to prefill than so many of its largest batches; null "
        "never waits.",
    )
    queue_policy: Literal["fcfs", "wspt"] = Field(
        default="fcfs", description="Order of waiting requests: by arrival, or by the least to be computed."
    )
    queue_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=30.0, description="Seconds that a request waits at most; then it is refused."
    )
    queue_limit: Annotated[int, Field(ge=1)] = Field(
        default=10_000, description="Requests that wait at most; more are refused."
    )
    alarm_secs: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=10.0,
        description="Seconds without a word about caches, though requests should have changed them, until it is told.",
    )
    seed: int | None = Field(default=None, description="Makes the choices repeatable, for tests.")
