"""The sampling options of one request, checked, and the sampler's state for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo_core import BackendError, PreprocessedRequest, TopLogprob
from dynamo_core.protocol import read_json

#: Alternatives per token that can be asked for.
MOST_LOGPROBS = 20
#: Options that a model's own file may have an opinion on.
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GENERATION_CONFIG = "generation_config.json"


@dataclass(slots=True)
class RequestSampling:
    """The sampling of one request. Written by the request's task, then read by the generating thread.

    `produced`, `log_probs` and `top_logprobs` are the thread's: one entry per token, added before its delivery. So is
    `cached_tokens`, set before the first of them.
    """

    prompt: Sequence[int]
    #: 0 takes the most likely token.
    temperature: float = 1.0
    top_p: float = 1.0
    #: 0 is no limit.
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    #: Tokens that end the answer, and how many others come before one may.
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    #: The number of alternatives reported per token; None reports no log-probabilities.
    logprobs: int | None = None
    #: How many tokens of the prompt were in the KV cache; None where the cache shares nothing.
    cached_tokens: int | None = None
    produced: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_logprobs: list[list[TopLogprob]] = field(default_factory=list)

    @property
    def penalized(self) -> bool:
        """Whether tokens that were there before count for less."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def banned(self) -> set[int]:
        """Return tokens that may not be next."""
        banned: set[int] = set()
        if len(self.produced) < self.min_tokens:
            banned |= self.stop_ids
        for word in self.bad_words:
            head = list(word[:-1])
            if not head or self.produced[-len(head) :] == head:
                banned.add(word[-1])
        return banned


def model_defaults(folder: str) -> dict[str, float]:
    """Return the sampling defaults in the model's own file."""
    try:
        said = read_json((Path(folder) / _GENERATION_CONFIG).read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(said, dict):
        return {}
    return {name: said[name] for name in _DEFAULTED if isinstance(said.get(name), int | float)}


def request_sampling(
    request: PreprocessedRequest, *, vocabulary: int, defaults: Mapping[str, float], caching: bool = True
) -> RequestSampling:
    """Read the sampling options of a request.

    Raises:
        BackendError.InvalidArgument: an option that this engine does not have, or a token id beyond the vocabulary.
    """
    _reject_unsupported(request, caching)
    options, stop = request.sampling_options, request.stop_conditions
    _check_tokens(request.token_ids, vocabulary, "prompt")

    def value(name: str, otherwise: float) -> float:
        given = getattr(options, name)
        return defaults.get(name, otherwise) if given is None else given

    stops: set[int] = set()
    if not stop.ignore_eos:
        stops.update(stop.stop_token_ids or (), stop.stop_token_ids_hidden or (), request.eos_token_ids)
    logprobs = request.output_options.logprobs
    if logprobs is not None and not 0 <= logprobs <= MOST_LOGPROBS:
        raise unsupported(f"at most {MOST_LOGPROBS} alternatives per token can be told, not {logprobs}", "top_logprobs")
    bias = {_token(key, vocabulary): amount for key, amount in (options.logit_bias or {}).items()}
    if options.allowed_token_ids is not None:
        _check_tokens(options.allowed_token_ids, vocabulary, "allowed_token_ids")
        if not options.allowed_token_ids:
            raise unsupported("no token is allowed", "allowed_token_ids")
    words = [word for word in options.bad_words_token_ids or () if word]
    for word in words:
        _check_tokens(word, vocabulary, "bad_words")
    return RequestSampling(
        prompt=request.token_ids,
        temperature=value("temperature", 1.0),
        top_p=value("top_p", 1.0),
        top_k=max(0, int(value("top_k", 0))),
        min_p=value("min_p", 0.0),
        repetition_penalty=value("repetition_penalty", 1.0),
        presence_penalty=options.presence_penalty or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        seed=options.seed,
        bias=bias,
        allowed=options.allowed_token_ids,
        bad_words=words,
        stop_ids=frozenset(stops),
        min_tokens=stop.min_tokens or 0,
        logprobs=logprobs,
    )


def unsupported(why: str, name: str) -> BackendError:
    """Return the error for a field that cannot be honoured."""
    return BackendError.InvalidArgument(f"`{name}` cannot be honoured by this model's engine: {why}", field=name)


def _reject_unsupported(request: PreprocessedRequest, caching: bool) -> None:
    options, routing = request.sampling_options, request.routing
    absent: list[tuple[Any, str, str]] = [
        (options.guided_decoding, "response_format", "it cannot constrain its output"),
        (options.use_beam_search, "use_beam_search", "it has no beam search"),
        (options.n is not None and options.n > 1, "n", "it gives one answer at a time"),
        (options.best_of is not None and options.best_of > 1, "best_of", "it gives one answer at a time"),
        (options.length_penalty not in (None, 1.0), "length_penalty", "it has no beam search"),
        (request.output_options.prompt_logprobs is not None, "prompt_logprobs", "it tells only what it says itself"),
        (request.stop_conditions.max_thinking_tokens, "max_thinking_tokens", "it does not know what is thinking"),
        (routing is not None and routing.lora_name, "lora_name", "it serves no adapters"),
        (
            caching and routing is not None and routing.cache_salt,
            "cache_salt",
            "its prompts share one cache; see enable_prefix_caching",
        ),
    ]
    for asked, name, why in absent:
        if asked:
            raise unsupported(why, name)


def _check_tokens(tokens: Sequence[int], vocabulary: int, name: str) -> None:
    if tokens and (min(tokens) < 0 or max(tokens) >= vocabulary):
        raise unsupported(f"a token id is not among the model's {vocabulary}", name)


def _token(text: str, vocabulary: int) -> int:
    if not text.isdecimal() or int(text) >= vocabulary:
        raise unsupported(f"a token id is not among the model's {vocabulary}", "logit_bias")
    return int(text)
