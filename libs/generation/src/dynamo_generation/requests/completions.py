"""Text completion requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

from dynamo_core.errors import InvalidArgument

from dynamo_generation.bodies.decode import NOT_EMPTY, schema_error, to_struct
from dynamo_generation.requests import fields
from dynamo_generation.requests.generation_request import (
    MAX_CHOICES,
    GenerationRequest,
    check_common,
    check_range,
    invalid,
)

#: A prompt: text, or token ids.
PromptInput: TypeAlias = str | list[int]

_MAX_SUFFIX = 10_000
_MAX_TOKEN = 2**32 - 1
#: Values that are looked at in a millisecond, and the seconds of the pause between so many. A thread checks them.
_STEP = 32 * 1024
_PAUSE = 0.0005


class CompletionRequest(GenerationRequest, kw_only=True):
    """A text completion request."""

    #: Lists whose items `split_inputs` checks.
    ANY_LISTS: ClassVar = ("prompt",)

    prompt: Annotated[str | list[Any], NOT_EMPTY]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    @property
    def token_limit(self) -> int | None:
        """The wished number of output tokens at most."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """The number of alternatives per token to ask for; None for no log-probabilities at all."""
        return 0 if self.logprobs is None and self.selects else self.logprobs

    @property
    def candidates(self) -> int:
        """The number of answers per prompt engines make, of which the client gets the best."""
        return self.choices if self.best_of is None else self.best_of

    @property
    def selects(self) -> bool:
        """Whether more answers are made than the client gets."""
        return self.candidates > self.choices


@dataclass(frozen=True, slots=True)
class CheckedCompletion:
    """A checked request and its prompts."""

    request: CompletionRequest
    prompts: list[PromptInput]
    #: Why it cannot be asked of an engine that takes tokens; None if it can.
    refusal: InvalidArgument | None


def parse_completion(raw: dict[str, Any]) -> CheckedCompletion:
    """Check a completion request as far as no model is needed for it.

    Raises:
        InvalidArgument: naming the field.
    """
    request = to_struct(raw, CompletionRequest)
    prompts = split_inputs(request.prompt, "prompt", "Prompt")
    refusal = fields.check_fields(raw, CompletionRequest.__struct_fields__, fields.COMPLETIONS)
    check_common(request, len(prompts))
    check_range(request.logprobs, 0, 5, "Logprobs", "logprobs")
    check_range(request.best_of, 0, 20, "Best_of", "best_of")
    if request.best_of is not None and request.best_of < request.choices:
        raise invalid(f"Best_of must be at least n, got best_of={request.best_of}, n={request.choices}", "best_of")
    if request.candidates * len(prompts) > MAX_CHOICES:
        raise invalid(
            f"The number of prompts times best_of must be at most {MAX_CHOICES}, "
            f"got {len(prompts)} prompts and best_of={request.best_of}",
            "best_of",
        )
    if request.selects and request.streaming:
        raise invalid("A best_of greater than n cannot be streamed: the best is known at the end", "best_of")
    if request.suffix is not None and len(request.suffix) > _MAX_SUFFIX:
        raise invalid(f"Suffix must have at most {_MAX_SUFFIX} characters", "suffix")
    if request.echo and request.logprobs is not None:
        raise invalid("echo together with logprobs is not supported", "echo")
    return CheckedCompletion(request, prompts, refusal)


def split_inputs(value: str | Sequence[Any], field: str, name: str) -> list[PromptInput]:
    """Return the single inputs of a text, a list of texts, a list of token ids, or a list of lists of token ids.

    Raises:
        InvalidArgument: an input is empty, or the list is mixed or of something else.
    """
    if isinstance(value, str):
        if not value:
            raise invalid(f"{name} string cannot be empty", field)
        return [value]
    items = value if isinstance(value, list) else list(value)
    if not items:
        raise invalid(f"{name} string array cannot be empty", field)
    if all(isinstance(item, str) for item in items):
        for index, item in enumerate(items):
            if not item:
                raise invalid(f"{name} string at index {index} cannot be empty", f"{field}[{index}]")
        return items
    if _are_tokens(items):
        return [items]
    if all(isinstance(item, list) and _are_tokens(item) for item in items):
        for index, item in enumerate(items):
            if not item:
                raise invalid(f"{name} token array at index {index} cannot be empty", f"{field}[{index}]")
        return items
    raise schema_error(
        f"expected a string, a list of strings, a list of token ids or a list of lists of token ids - at `$.{field}`"
    )


def _are_tokens(values: list[Any]) -> bool:
    """Return whether all values are token ids. After each step of very many another thread can run."""
    for start in range(0, len(values), _STEP):
        if start:
            time.sleep(_PAUSE)
        some = values[start : start + _STEP]
        if set(map(type, some)) != {int} or min(some) < 0 or max(some) > _MAX_TOKEN:
            return False
    return True
