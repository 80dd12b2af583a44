"""The handoff from a prefill to a decode worker: `kv_transfer_params` of vLLM's connector, unchanged."""

from __future__ import annotations

from typing import Any

import msgspec
from dynamo_core import PreprocessedRequest, invalid_argument

#: The key under which they are, in `disaggregated_params` and in the `extra_args` of vLLM's sampling parameters.
KEY = "kv_transfer_params"

#: What a prefill worker asks its connector for: hold the blocks until a decode worker fetches them.
PREFILL_PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def outgoing(params: Any) -> dict[str, Any]:
    """Return the handoff for `disaggregated_params`.

    None in it says that the decode worker computes the prompt itself.
    """
    plain = msgspec.to_builtins(params, enc_hook=str) if params is not None else None
    return {KEY: plain}


def incoming(request: PreprocessedRequest) -> Any:
    """Return the connector's parameters of the prefill worker; None if it had nothing to hand over.

    Raises:
        BackendError.InvalidArgument: there is no prefill result, or it is not that of such a worker.
    """
    if request.prefill_result is None:
        raise invalid_argument("prefill_result is missing: a decode worker needs that of a prefill worker")
    params = request.prefill_result.disaggregated_params
    if not isinstance(params, dict) or KEY not in params:
        raise invalid_argument(f"prefill_result.disaggregated_params has no {KEY}: it is not that of a vLLM worker")
    return params[KEY]


def cached_tokens(request: PreprocessedRequest) -> int:
    """Return what the prefill worker found in its cache; the decode worker's own count means something else."""
    details = request.prefill_result.prompt_tokens_details if request.prefill_result is not None else None
    cached = (details or {}).get("cached_tokens")
    return cached if isinstance(cached, int) else 0
