"""From a request to the arguments of vLLM's `SamplingParams`. Nothing here needs vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_core import (
    DisaggregationMode,
    GuidedDecodingOptions,
    PreprocessedRequest,
    SamplingOptions,
    invalid_argument,
)

#: Options that have the same name and meaning in vLLM.
_SAME_NAMES = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "allowed_token_ids",
)

#: Keys of `extra_args` that carry prompts of other kinds.
_OTHER_MEDIA = ("multi_modal_data", "mm_processor_kwargs", "prompt_embeds")


@dataclass(frozen=True, slots=True)
class SamplingArgs:
    """The arguments of `SamplingParams`, and two that are not plain values there."""

    params: dict[str, Any]
    #: Arguments of `StructuredOutputsParams`, or None.
    guided: dict[str, Any] | None = None
    bad_words_token_ids: list[list[int]] | None = None


def sampling_args(
    request: PreprocessedRequest,
    *,
    defaults: Mapping[str, Any],
    context_length: int,
    role: DisaggregationMode,
    guided_backend: str = "auto",
) -> SamplingArgs:
    """Return the sampling arguments of a request; `defaults` come from the model's generation config.

    Stop strings are the frontend's work: the engine makes no text. Values out of range are left to vLLM to refuse.

    Raises:
        BackendError.InvalidArgument: an option that this engine does not have.
    """
    room = context_length - len(request.token_ids)
    _check(request, room, context_length, role)
    if role is DisaggregationMode.PREFILL:
        # One token that is never sent. It must not end the answer: then no cache would be handed over.
        return SamplingArgs({"temperature": 0.0, "max_tokens": 1, "min_tokens": 1})
    options, stop = request.sampling_options, request.stop_conditions
    params = dict(defaults)
    for name in _SAME_NAMES:
        value = getattr(options, name)
        if value is not None:
            params[name] = value
    params["max_tokens"] = stop.max_tokens or params.get("max_tokens") or room
    params["min_tokens"] = stop.min_tokens or 0
    params["ignore_eos"] = stop.ignore_eos
    if not stop.ignore_eos:
        ends = [*(stop.stop_token_ids or ()), *(stop.stop_token_ids_hidden or ()), *request.eos_token_ids]
        if ends:
            params["stop_token_ids"] = list(dict.fromkeys(ends))
    if stop.max_thinking_tokens is not None:
        params["thinking_token_budget"] = stop.max_thinking_tokens
    if options.n is not None and options.n > 1:
        params["n"] = options.n
    if options.logit_bias:
        params["logit_bias"] = _bias(options)
    if request.output_options.logprobs is not None:
        params["logprobs"] = request.output_options.logprobs
    guided = _guided(options.guided_decoding, guided_backend)
    return SamplingArgs(params, guided, options.bad_words_token_ids)


def takes_structural_tags(settings: Any) -> bool:
    """Return whether whole answers can be guided by structural tags, given vLLM's settings of structured outputs.

    With a reasoning parser of its own, vLLM guides only what comes after the reasoning.
    """
    backend, reasoning = getattr(settings, "backend", "auto"), getattr(settings, "reasoning_parser", "")
    return backend in ("auto", "xgrammar") and not reasoning


def _check(request: PreprocessedRequest, room: int, context_length: int, role: DisaggregationMode) -> None:
    options = request.sampling_options
    if not request.token_ids:
        raise invalid_argument("token_ids must not be empty")
    if room < 1:
        raise invalid_argument(
            f"token_ids has {len(request.token_ids)} tokens, which leave no room for an answer in the model's context "
            f"length of {context_length}"
        )
    if options.use_beam_search:
        raise invalid_argument("sampling_options.use_beam_search is not supported by this engine")
    if options.length_penalty not in (None, 1.0):
        raise invalid_argument("sampling_options.length_penalty belongs to beam search, which is not supported")
    choices = options.n or 1
    if (options.best_of or choices) != choices:
        raise invalid_argument("sampling_options.best_of other than n is not supported by this engine")
    if choices > 1 and role is not DisaggregationMode.AGGREGATED:
        raise invalid_argument("sampling_options.n is 1 for prefill and decode workers")
    if request.output_options.prompt_logprobs is not None:
        raise invalid_argument("output_options.prompt_logprobs is not supported: answers have no place for them")
    if request.routing is not None and request.routing.lora_name:
        raise invalid_argument("routing.lora_name: LoRA adapters are not supported by this engine")
    for name in _OTHER_MEDIA:
        if request.extra_args and request.extra_args.get(name):
            raise invalid_argument(f"extra_args.{name}: this engine takes prompts of text only")


def _bias(options: SamplingOptions) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in (options.logit_bias or {}).items()}
    except ValueError:
        raise invalid_argument("sampling_options.logit_bias has a key that is no token id") from None


def _guided(options: GuidedDecodingOptions | None, engine_backend: str) -> dict[str, Any] | None:
    if options is None:
        return None
    if options.backend not in (None, "auto", engine_backend) and engine_backend != "auto":
        raise invalid_argument(
            f"sampling_options.guided_decoding.backend: this worker was started with {engine_backend!r}"
        )
    guided: dict[str, Any] = {}
    if options.json is not None:
        # vLLM takes text or a mapping; `true` is a schema too.
        guided["json"] = options.json if isinstance(options.json, str | dict) else json.dumps(options.json)
    for name in ("regex", "choice", "grammar"):
        value = getattr(options, name)
        if value is not None:
            guided[name] = value
    if options.structural_tag is not None:
        tag = options.structural_tag
        guided["structural_tag"] = tag if isinstance(tag, str) else json.dumps(tag)
    if len(guided) > 1:
        raise invalid_argument(f"sampling_options.guided_decoding has {' and '.join(guided)}: only one can hold")
    if not guided:
        return None
    if options.whitespace_pattern is not None:
        guided["whitespace_pattern"] = options.whitespace_pattern
    return guided
