"""The request to a worker: `PreprocessedRequest` and its groups of options."""

from __future__ import annotations

from typing import Any

import msgspec


class TraceLink(msgspec.Struct, frozen=True):
    """A link to a predecessor's span: 32 and 16 hex digits."""

    trace_id: str
    span_id: str


class GuidedDecodingOptions(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Constraints on the output; at most one of the first four is set."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    backend: str | None = None
    whitespace_pattern: str | None = None
    structural_tag: Any = None


class StopConditions(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Conditions that end the generation. `max_tokens` and `min_tokens` count output tokens."""

    max_tokens: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    #: Stop on these too, but leave the token itself out of the text (end-of-sequence ids, usually).
    stop_token_ids_hidden: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    max_thinking_tokens: int | None = None

    def apply_ignore_eos(self) -> None:
        """Clear every stop string and stop id if `ignore_eos` is set: only the token limit ends the output."""
        if self.ignore_eos:
            self.stop = None
            self.stop_token_ids = None
            self.stop_token_ids_hidden = None


class SamplingOptions(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Options for choosing the next token. None means the engine's own default."""

    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    seed: int | None = None
    include_stop_str_in_output: bool | None = None
    guided_decoding: GuidedDecodingOptions | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words_token_ids: list[list[int]] | None = None


class OutputOptions(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Outputs beside the tokens. `logprobs` is the number of alternatives per position."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    formatted_prompt: bool | None = None


class RoutingHints(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The caller's hints for routing.

    `tenant`, `user` and `headers` are those of the principal. They travel only where `http.forward_identity` says so.
    """

    backend_instance_id: int | None = None
    prefill_worker_id: int | None = None
    decode_worker_id: int | None = None
    dp_rank: int | None = None
    prefill_dp_rank: int | None = None
    expected_output_tokens: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    #: For engines with a priority queue: the highest goes first.
    priority: int | None = None
    allowed_worker_ids: list[int] | None = None
    #: Requests of a higher one go first in a router's queue, regardless of their arrival.
    strict_priority: int | None = None
    #: Seconds by which a router backdates the arrival of the request.
    priority_jump: float | None = None
    tenant: str | None = None
    user: str | None = None
    session_id: str | None = None
    headers: dict[str, str] | None = None


class RouterConfigOverride(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Settings of a router that hold for one request only. None means the router's own."""

    overlap_score_credit: float | None = None
    prefill_load_scale: float | None = None
    router_temperature: float | None = None
    assume_kv_reuse: bool | None = None
    track_prefill_tokens: bool | None = None
    shared_cache_multiplier: float | None = None


class PrefillResult(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The handoff of a prefill to a decode worker; the content of `disaggregated_params` is the engine's own."""

    disaggregated_params: Any
    prompt_tokens_details: dict[str, Any] | None = None


class BootstrapInfo(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The meeting point of prefill and decode engines that move the KV cache themselves."""

    bootstrap_host: str
    bootstrap_port: int
    bootstrap_room: int
    handoff_id: str | None = None


class PreprocessedRequest(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A request as an engine sees it: token ids and options, no text.

    Travels as a msgpack map; fields are only ever added, each with a default.
    """

    #: The model's public name; empty in probes.
    model: str = ""
    #: The prompt.
    token_ids: list[int]
    #: Options, as `StopConditions`, `SamplingOptions` and `OutputOptions`.
    stop_conditions: StopConditions = msgspec.field(default_factory=StopConditions)
    sampling_options: SamplingOptions = msgspec.field(default_factory=SamplingOptions)
    output_options: OutputOptions = msgspec.field(default_factory=OutputOptions)
    #: Ids that end a sequence.
    eos_token_ids: list[int] = []
    #: Checksum of the model card the tokens were made with.
    mdc_sum: str | None = None
    #: The extra information that the client asks for.
    annotations: list[str] = []
    #: The `RoutingHints` of the client and the router.
    routing: RoutingHints | None = None
    #: In the decode role: the handoff of the prefill engine, as `PrefillResult`.
    prefill_result: PrefillResult | None = None
    #: Where prefill and decode engines meet, as `BootstrapInfo`.
    bootstrap_info: BootstrapInfo | None = None
    #: The span of the predecessor after a hop, as `TraceLink`.
    migration_link: TraceLink | None = None
    #: The validated client body, for engines whose `model_input` is "text".
    body: Any = None
    #: Options outside the standard.
    extra_args: dict[str, Any] | None = None
    #: Marks a health probe; named `_HEALTH_CHECK` on the wire.
    is_probe: bool = msgspec.field(default=False, name="_HEALTH_CHECK")
    #: The caller's `RouterConfigOverride`, for the router that gets the request.
    router_config_override: RouterConfigOverride | None = None


class EmbedRequest(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Inputs to embed: one list of token ids per input."""

    model: str = ""
    token_ids: list[list[int]]
    dimensions: int | None = None
    #: The validated client body, for engines whose `model_input` is "text".
    body: Any = None


class EmbedOutput(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One vector per input, in the order of the inputs; `prompt_tokens` is the sum over all inputs."""

    embeddings: list[list[float]]
    prompt_tokens: int = 0


class ScoreRequest(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Texts to compare: one query with each document, or each query with the document of the same index.

    They are texts for every engine: only the engine knows how its model takes a pair, with a separator, in a template,
    or as two inputs.
    """

    model: str = ""
    queries: list[str]
    documents: list[str]
    #: Longer texts are cut to so many tokens.
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    #: A longer input of the model is cut to so many tokens; -1: to its context.
    truncate_prompt_tokens: int | None = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each query with its document."""
        queries = self.queries * len(self.documents) if len(self.queries) == 1 else self.queries
        return list(zip(queries, self.documents, strict=True))


class ScoreOutput(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One score per document, in the order of the documents: the higher, the more relevant.

    `prompt_tokens` is the sum over all inputs of the model.
    """

    scores: list[float]
    prompt_tokens: int = 0
