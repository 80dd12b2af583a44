"""The settings of the engine."""

from __future__ import annotations

from typing import Literal

from dynamo_core import PluginConfig
from pydantic import Field


class TransformersConfig(PluginConfig):
    """The model's device and limits."""

    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?|mps|xpu(:\d+)?)$",
        description="auto: a GPU if there is one; else cpu, cuda, cuda:1, mps or xpu.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="What the weights are computed in; auto: as they were saved."
    )
    attention: str = Field(
        default="sdpa",
        min_length=1,
        description="The library's implementation: sdpa, eager, or flash_attention_2 where its package is installed.",
    )
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="CPU threads of one step; null leaves it to the library."
    )
    context_length: int | None = Field(
        default=None, ge=2, description="Prompt and answer together, in tokens; null: as long as model and cache allow."
    )
    kv_cache_tokens: int | None = Field(
        default=None, ge=64, description="Tokens that the KV cache holds; null: 32768 on a CPU, what fits on a GPU."
    )
    block_size: int = Field(default=32, ge=4, le=4096, description="Tokens per KV block.")
    max_num_seqs: int = Field(default=64, ge=1, le=4096, description="Requests that run at once; others wait in order.")
    max_num_batched_tokens: int | None = Field(
        default=None, ge=16, description="Tokens computed in one step; null: 512 on a CPU, what fits on a GPU."
    )
    enable_prefix_caching: bool = Field(default=True, description="Share full blocks of prompts between requests.")
    start_timeout: float = Field(
        default=600.0, gt=0, le=86_400, description="Seconds for the KV cache to be there once the model is loaded."
    )
