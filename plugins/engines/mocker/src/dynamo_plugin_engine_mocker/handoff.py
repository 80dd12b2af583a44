"""The handoff from a prefill worker to the decode worker that goes on from its KV cache."""

from __future__ import annotations

from typing import Any

import msgspec
from dynamo_core import BackendError, PreprocessedRequest
from dynamo_core.kv import block_hashes
from dynamo_core.protocol import UNREADABLE, truncated

#: The part of a request in which it arrives, for messages.
_FIELD = "prefill_result.disaggregated_params"


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `disaggregated_params`. There is no KV cache behind it: it proves whose it would be."""

    #: The attempt that computed the prompt.
    kv_transfer_id: str
    prompt_tokens: int
    #: The hash of all tokens of the prompt, under its adapter, as 16 hex digits.
    prompt_hash: str
    #: The rank of the prefill worker that holds the cache.
    dp_rank: int

    @classmethod
    def of(cls, request: PreprocessedRequest, kv_transfer_id: str, dp_rank: int) -> Handoff:
        """Return the handoff of a request whose prompt is not empty.

        Raises:
            BackendError.InvalidArgument: a token id does not fit 32 bits.
        """
        return cls(
            kv_transfer_id=kv_transfer_id,
            prompt_tokens=len(request.token_ids),
            prompt_hash=_prompt_hash(request),
            dp_rank=dp_rank,
        )

    def params(self) -> dict[str, Any]:
        """Return what goes into `disaggregated_params`."""
        params: dict[str, Any] = msgspec.to_builtins(self)
        return params


def check_handoff(request: PreprocessedRequest) -> None:
    """Make sure that the prefill result of a request belongs to its prompt.

    Raises:
        BackendError.InvalidArgument: it does not, or was not made by a mocker.
    """
    params = request.prefill_result.disaggregated_params if request.prefill_result is not None else None
    try:
        handoff = msgspec.convert(params, Handoff)
    except UNREADABLE as error:
        raise BackendError.InvalidArgument(f"{_FIELD} is none that a mocker makes: {truncated(str(error))}") from None
    tokens = len(request.token_ids)
    if handoff.prompt_tokens != tokens:
        raise BackendError.InvalidArgument(
            f"{_FIELD}.prompt_tokens is {handoff.prompt_tokens}, but token_ids has {tokens} tokens"
        )
    if handoff.prompt_hash != _prompt_hash(request):
        raise BackendError.InvalidArgument(f"{_FIELD}.prompt_hash is that of another prompt")


def cached_tokens(request: PreprocessedRequest) -> int:
    """Return tokens of the prompt that the prefill worker found in its cache, as far as the request tells."""
    details = request.prefill_result.prompt_tokens_details if request.prefill_result is not None else None
    cached = (details or {}).get("cached_tokens")
    return cached if isinstance(cached, int) else 0


def _prompt_hash(request: PreprocessedRequest) -> str:
    lora_name = request.routing.lora_name if request.routing is not None else None
    try:
        (whole,) = block_hashes(request.token_ids, len(request.token_ids), lora_name=lora_name)
    except OverflowError:
        raise BackendError.InvalidArgument("token_ids holds a number that is no token id of 32 bits") from None
    return f"{whole:016x}"
