"""The settings of the mocker."""

from __future__ import annotations

from typing import Literal, Self

from dynamo_core import PluginConfig
from pydantic import BaseModel, ConfigDict, Field, model_validator


class ScriptEntry(BaseModel):
    """One scripted answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    match: str | None = Field(default=None, description="A part of the prompt's text; null matches every prompt.")
    times: int = Field(default=1, ge=1, description="How often `match` is part of the prompt's text, at least.")
    text: str = Field(description="The answer, without an end-of-sequence token.")

    def fits(self, prompt: str) -> bool:
        """Return whether this is an answer to a prompt."""
        return self.match is None or prompt.count(self.match) >= self.times


class ChunkSizes(BaseModel):
    """The numbers of tokens that come at once."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    most: int = Field(ge=1, le=1024, description="The most tokens of one item.")
    seed: int = Field(default=0, ge=0, lt=2**64, description="The sizes depend on it, and on the position only.")


class MockerConfig(PluginConfig):
    """The answers of the mocker, and their speed."""

    output: Literal["random", "echo", "script"] = Field(
        default="random",
        description="random: tokens drawn by seed and position; echo: the prompt again; script: the text of `script`.",
    )
    script: tuple[ScriptEntry, ...] = Field(
        default=(),
        description="Answers for output `script`; the first entry that matches counts, and without one the answer "
        "is random.",
    )
    chunks: ChunkSizes | None = Field(
        default=None,
        description="Items of 1 to `most` tokens, whose sizes look random; null: an item holds everything produced "
        "since the one before.",
    )
    printable: bool = Field(
        default=True, description="Draw random tokens only from those whose text is printable by itself."
    )
    default_max_tokens: int = Field(
        default=16,
        ge=1,
        description="Length of a random answer when the request names none, in tokens; echoes and scripts are then "
        "given whole.",
    )
    fixed_itl_ms: float | None = Field(
        default=None,
        gt=0,
        le=3_600_000,
        description="One step every so many milliseconds, whatever the load; `speedup_ratio` does not apply. "
        "null: the timing formulas.",
    )
    speedup_ratio: float = Field(
        default=1.0, ge=0, description="Divides the time of the timing formulas; 0 means no delay at all."
    )
    decode_speedup_ratio: float = Field(
        default=1.0, gt=0, description="Divides the time of decoding once more; prefill is as fast as before."
    )
    startup_time: float = Field(default=0.0, ge=0, le=86_400, description="How long `start` takes, in seconds.")
    data_parallel_size: int = Field(
        default=1, ge=1, le=256, description="Ranks, each with a scheduler and a KV cache of its own."
    )
    max_num_seqs: int = Field(
        default=256, ge=1, description="Requests that run at once on one rank; others wait in order."
    )
    max_num_batched_tokens: int = Field(
        default=8192,
        ge=1,
        description="Tokens computed in one step of one rank: one per decoding request, the rest for prompts.",
    )
    enable_chunked_prefill: bool = Field(
        default=True, description="Compute a prompt in parts when the step has no room for the whole."
    )
    block_size: int = Field(default=64, ge=1, description="Tokens per KV block.")
    num_gpu_blocks: int = Field(default=16384, ge=1, description="KV blocks of one rank.")
    enable_prefix_caching: bool = Field(
        default=True, description="Share full blocks between requests, and keep them until their place is needed."
    )
    preemption_mode: Literal["lifo", "fifo"] = Field(
        default="lifo",
        description="Who gives way when KV blocks run out: the request admitted last (lifo) or first (fifo).",
    )
    kv_transfer_bandwidth: float = Field(
        default=64.0,
        ge=0,
        description="For the decode role: GB per second at which the KV cache of a prompt comes from its prefill "
        "worker, divided by `speedup_ratio` as times are; 0 means no delay.",
    )
    kv_bytes_per_token: int = Field(
        default=131_072,
        ge=0,
        description="Size of the KV cache of one token: layers times 2 times KV heads times head size times bytes "
        "per number.",
    )
    bootstrap_host: str | None = Field(
        default=None,
        min_length=1,
        description="For the prefill role: the host at which decode workers meet it; null means that they wait for "
        "its answer instead.",
    )
    bootstrap_port: int | None = Field(
        default=None, ge=1, le=65535, description="Its port, plus the replica's number; goes with `bootstrap_host`."
    )
    context_length: int = Field(default=8192, ge=2, description="Prompt and answer together, in tokens.")
    embedding_dimensions: int = Field(default=64, ge=1, le=65_536, description="Length of an embedding.")

    @model_validator(mode="after")
    def _script_goes_with_its_output(self) -> Self:
        if (self.output == "script") != bool(self.script):
            raise ValueError("output 'script' and a list of answers in `script` must be set together")
        return self

    @model_validator(mode="after")
    def _host_and_port_go_together(self) -> Self:
        if (self.bootstrap_host is None) != (self.bootstrap_port is None):
            raise ValueError("bootstrap_host and bootstrap_port must be set together")
        return self
