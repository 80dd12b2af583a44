"""Fields and ranges shared by chat and text completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from dynamo_core import GuidedDecodingOptions
from dynamo_core.errors import InvalidArgument
from dynamo_core.protocol import truncated
from msgspec import Meta

from dynamo_generation.requests.constraints import ConstraintFields
from dynamo_generation.requests.nvext import NvExt, check_nvext

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
I64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

#: The most choices one request may ask for, over all its prompts.
MAX_CHOICES = 128
MAX_STOPS = 32
#: The most characters of a stop string, and of all stop strings of a request.
MAX_STOP = 1024
MAX_STOP_TOTAL = 8192
_MAX_TOKEN_ID = 2**32 - 1


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of streams. `include_obfuscation` asks for padding, which is not made.

    `continuous_usage_stats` puts the usage so far into every chunk.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(ConstraintFields, kw_only=True):
    """The fields of every request that generates. None means not given."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: U32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    n: int | None = None
    seed: I64 | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    # Beyond the OpenAI API.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: U32 | None = None
    stop_token_ids: list[U32] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[U32] | None = None
    bad_words_token_ids: list[list[U32]] | None = None
    priority: I32 | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    nvext: NvExt | None = None

    @property
    def streaming(self) -> bool:
        """Whether the client wants events."""
        return bool(self.stream)

    @property
    def choices(self) -> int:
        """The number of answers per prompt."""
        return 1 if self.n is None else self.n

    @property
    def candidates(self) -> int:
        """The number of answers per prompt engines make, of which the client gets the best."""
        return self.choices

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk tells the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def stops(self) -> list[str]:
        """The stop strings, as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def annotations(self) -> list[str]:
        """The annotations asked for."""
        return [] if self.nvext is None or self.nvext.annotations is None else self.nvext.annotations

    @property
    def annotated_chunks(self) -> bool:
        """Whether a stream tells annotations in chunks, and not in events of their own."""
        return self.nvext is not None and self.nvext.annotations_in == "chunks"

    @property
    def guided(self) -> GuidedDecodingOptions | None:
        """The constraint of the answer; None if it is left to the model."""
        return None if self.constraint is None else self.constraint[1]

    @property
    def use_raw_prompt(self) -> bool:
        """Whether the chat template is to be left out."""
        return self.nvext is not None and bool(self.nvext.use_raw_prompt)


def invalid(message: str, field: str) -> InvalidArgument:
    """Return the error for a value out of range."""
    return InvalidArgument(f"Validation: {truncated(message, 1000)}", field=field)


def number(value: float) -> str:
    """Return a number as a client would write it."""
    return str(int(value)) if abs(value) < 1e15 and value == int(value) else repr(value)


def check_range(value: float | None, low: float, high: float, name: str, field: str) -> None:
    """Check a number that may be absent.

    Raises:
        InvalidArgument: it is outside of `low` to `high`, both allowed.
    """
    if value is not None and not low <= value <= high:
        raise invalid(f"{name} must be between {number(low)} and {number(high)}, got {number(value)}", field)


def check_common(request: GenerationRequest, prompts: int = 1) -> None:
    """Check the ranges that all requests share, and settle fields that can be given in two places.

    Raises:
        InvalidArgument: naming the field.
    """
    if not request.model.strip():
        raise invalid("Model cannot be empty", "model")
    check_range(request.temperature, 0, 2, "Temperature", "temperature")
    check_range(request.top_p, 0, 1, "Top_p", "top_p")
    check_range(request.min_p, 0, 1, "Min_p", "min_p")
    check_range(request.frequency_penalty, -2, 2, "Frequency penalty", "frequency_penalty")
    check_range(request.presence_penalty, -2, 2, "Presence penalty", "presence_penalty")
    if request.top_k is not None and not -1 <= request.top_k < 2**31:
        raise invalid("Top_k must be null or greater than or equal to -1", "top_k")
    penalty = request.repetition_penalty
    if penalty is not None and not 0 < penalty <= 2:
        raise invalid(f"Repetition penalty must be between 0 and 2, got {number(penalty)}", "repetition_penalty")
    check_token_limit(request.max_tokens, "Max tokens", "max_tokens")
    _check_stop(request.stop)
    _check_logit_bias(request.logit_bias)
    if request.user is not None and not request.user.strip():
        raise invalid("User ID cannot be empty", "user")
    if request.stream_options is not None:
        if not request.streaming:
            raise invalid("The 'stream_options' field is only allowed when 'stream' is set to true.", "stream_options")
        if request.stream_options.continuous_usage_stats and not request.stream_options.include_usage:
            raise invalid(
                "continuous_usage_stats needs include_usage to be true", "stream_options.continuous_usage_stats"
            )
    # Raises what is wrong with it, and is kept.
    _ = request.constraint
    if request.cache_salt == "":
        raise invalid("Cache salt cannot be empty", "cache_salt")
    if request.nvext is not None:
        check_nvext(request.nvext)
        _settle(request)
    _check_choices(request, prompts)


def _settle(request: GenerationRequest) -> None:
    """Make one value of a field that can be given in `nvext` and beside it, and keep it in the request itself.

    Raises:
        InvalidArgument: both places were used, with different values.
    """
    nvext = request.nvext
    if nvext is None:
        return
    for name in ("ignore_eos", "top_k", "repetition_penalty"):
        inner, outer = getattr(nvext, name), getattr(request, name)
        if inner is None:
            continue
        if outer is not None and outer != inner:
            raise invalid(f"`{name}` and `nvext.{name}` were given different values; give one of them", name)
        setattr(request, name, inner)


def check_token_limit(value: int | None, name: str, field: str) -> None:
    """Check a limit of output tokens that may be absent.

    Raises:
        InvalidArgument: it is 0.
    """
    if value == 0:
        raise invalid(f"{name} must be greater than 0, got 0", field)


def _check_choices(request: GenerationRequest, prompts: int) -> None:
    n = request.choices
    if not 1 <= n <= MAX_CHOICES:
        raise invalid(f"n must be between 1 and {MAX_CHOICES}, got {n}", "n")
    if n * prompts > MAX_CHOICES:
        raise invalid(
            f"The number of prompts times n must be at most {MAX_CHOICES}, got {prompts} prompts and n={n}", "n"
        )
    greedy = request.nvext is not None and request.nvext.greedy
    if n > 1 and (request.temperature == 0 or greedy):
        raise invalid(
            "When n > 1, temperature must be greater than 0 to ensure diverse outputs. "
            f"Got n={n}, {'greedy sampling' if greedy else 'temperature=0'}",
            "n",
        )


def _check_stop(stop: str | Sequence[str] | None) -> None:
    if stop is None:
        return
    if isinstance(stop, str):
        if not stop:
            raise invalid("Stop sequence cannot be empty", "stop")
        if len(stop) > MAX_STOP:
            raise invalid(f"Stop sequence must have at most {MAX_STOP} characters, got {len(stop)}", "stop")
        return
    if not stop:
        raise invalid("Stop sequences array cannot be empty", "stop")
    if len(stop) > MAX_STOPS:
        raise invalid(f"Stop sequences array must have at most {MAX_STOPS} items, got {len(stop)}", "stop")
    for index, text in enumerate(stop):
        if not text:
            raise invalid(f"Stop sequence at index {index} cannot be empty", "stop")
        if len(text) > MAX_STOP:
            raise invalid(
                f"Stop sequence at index {index} must have at most {MAX_STOP} characters, got {len(text)}", "stop"
            )
    total = sum(map(len, stop))
    if total > MAX_STOP_TOTAL:
        raise invalid(f"Stop sequences must have at most {MAX_STOP_TOTAL} characters together, got {total}", "stop")


def _check_logit_bias(biases: dict[str, float] | None) -> None:
    for token, bias in (biases or {}).items():
        if not token.isascii() or not token.isdigit() or len(token) > 10 or int(token) > _MAX_TOKEN_ID:
            raise invalid(f"Logit bias key '{token}' is not a token id", "logit_bias")
        if not -100 <= bias <= 100:
            raise invalid(
                f"Logit bias for token '{token}' must be between -100 and 100, got {number(bias)}", "logit_bias"
            )
