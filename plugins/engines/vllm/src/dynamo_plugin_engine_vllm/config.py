"""The settings of the engine: what is set often has a name here, everything else of vLLM goes into `args`."""

from __future__ import annotations

from typing import Any, Literal

from dynamo_core import PluginConfig
from pydantic import Field, field_validator

#: Keys of `args` that are refused, and why.
REFUSED = {
    "model": "the model's folder is workers.NAME.model.path",
    "tokenizer": "the tokenizer is that of workers.NAME.model.path",
    "served_model_name": "the public name is workers.NAME.model.name",
    "skip_tokenizer_init": "guided decoding needs vLLM's tokenizer",
    "kv_events_config": "the engine sets up its events itself, see workers.NAME.enable_kv_routing",
    "kv_transfer_config": "use kv_connector, kv_buffer_device and kv_load_failure",
    "enable_lora": "LoRA adapters are not supported",
    "lora_modules": "LoRA adapters are not supported",
    "enable_sleep_mode": "sleeping and waking up are not supported",
    "limit_mm_per_prompt": "images, sound and video are not supported",
    "enable_mm_embeds": "images, sound and video are not supported",
    "enable_prompt_embeds": "prompts are token ids",
    "stream_interval": "tokens are merged where a reader is slow, not before",
    "data_parallel_backend": "the ranks of a worker are processes of this host",
}


class VllmConfig(PluginConfig):
    """The settings handed to vLLM. A key that is null is left to vLLM."""

    max_model_len: int | None = Field(
        default=None, ge=1, description="Prompt and answer together, in tokens; null: what the model's config says."
    )
    dtype: str = Field(default="auto", description="Number format of weights and activations.")
    quantization: str | None = Field(default=None, description="How the weights are quantized.")
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs that share each layer.")
    pipeline_parallel_size: int = Field(default=1, ge=1, description="Groups of GPUs that share the layers out.")
    data_parallel_size: int = Field(
        default=1, ge=1, description="Copies of the model in this worker, each with a KV cache of its own."
    )
    gpu_memory_utilization: float | None = Field(
        default=None, gt=0, le=1, description="Share of the memory of a GPU that vLLM may take."
    )
    kv_cache_memory_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Memory for the KV cache of one rank; wins over gpu_memory_utilization. On a CPU null means 1 GiB.",
    )
    block_size: int | None = Field(
        default=None, ge=1, description="Tokens per KV block; on a CPU a multiple of 32. null: what suits the device."
    )
    max_num_seqs: int | None = Field(default=None, ge=1, description="Requests of a rank that run at once.")
    max_num_batched_tokens: int | None = Field(default=None, ge=1, description="Tokens computed in one step.")
    enable_prefix_caching: bool = Field(
        default=True, description="Keep full KV blocks for later requests that begin alike."
    )
    enforce_eager: bool = Field(
        default=False, description="No CUDA graphs, no compiling: it starts sooner and runs slower."
    )
    trust_remote_code: bool = Field(default=False, description="Run Python code that the model's folder holds.")
    seed: int = Field(default=0, description="Seed of requests that name none.")
    runner: Literal["auto", "generate", "pooling"] = Field(
        default="auto",
        description="pooling: the model makes embeddings or scores, not answers. auto: what its config says.",
    )
    scheduling_policy: Literal["priority", "fcfs"] = Field(
        default="priority",
        description="Who waits for a place: priority heeds the priority of requests, and their arrival where it is "
        "equal; fcfs the arrival only.",
    )
    kv_connector: str = Field(
        default="NixlConnector", description="What moves KV caches from prefill to decode workers; they must agree."
    )
    kv_buffer_device: str | None = Field(
        default=None, description="Where the connector's buffers are: cuda or cpu. null: with the KV cache."
    )
    kv_load_failure: Literal["fail", "recompute"] = Field(
        default="fail", description="For decode workers: what to do with a prompt whose KV cache does not come."
    )
    nixl_host: str = Field(
        default="127.0.0.1",
        description="Address at which decode workers reach this prefill worker's NIXL.",
    )
    nixl_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Its port; with more replicas or ranks the following ones too. 0: any free one.",
    )
    shutdown_timeout: float = Field(
        default=10.0, ge=0, description="Seconds that vLLM's processes have to end before they are killed."
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Anything else that vLLM's AsyncEngineArgs take, by their own names."
    )

    @field_validator("args")
    @classmethod
    def _known(cls, args: dict[str, Any]) -> dict[str, Any]:
        for name in args:
            if name in REFUSED:
                raise ValueError(f"{name} cannot be set: {REFUSED[name]}")
            if name in cls.model_fields:
                raise ValueError(f"{name} is a setting of its own: put it beside args")
        return args
