"""The request to the server: the client's body, with the fields that this engine needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_core import BackendError, PreprocessedRequest, invalid_argument

CHAT = "chat/completions"
COMPLETIONS = "completions"

#: Fields of `nvext` that have the same name and meaning beside it.
_SAME = ("ignore_eos", "top_k", "repetition_penalty")
#: Options without a meaning once the most likely token is asked for.
_SAMPLING = ("top_p", "top_k", "min_p")


def build_request(request: PreprocessedRequest, model: str) -> tuple[str, dict[str, Any]]:
    """Return the path below the base address, and the body.

    The answer is always asked for as a stream with usage, whatever the client wants: frontends put it together.

    Raises:
        BackendError.InvalidArgument: the request has no body, or asks for what only an engine for tokens can do.
    """
    raw = request.body
    if not isinstance(raw, dict):
        raise invalid_argument("the request has no body, which this engine needs")
    body = {name: value for name, value in raw.items() if name != "nvext"}
    extension = raw.get("nvext")
    if isinstance(extension, Mapping):
        _merge(body, extension)
    options: dict[str, Any] = {"include_usage": True}
    asked = raw.get("stream_options")
    if isinstance(asked, Mapping) and asked.get("continuous_usage_stats"):
        options["continuous_usage_stats"] = True
    body |= {"model": model, "stream": True, "stream_options": options}
    return CHAT if "messages" in raw else COMPLETIONS, body


def _merge(body: dict[str, Any], extension: Mapping[str, Any]) -> None:
    if extension.get("use_raw_prompt"):
        raise BackendError.InvalidArgument(
            "nvext.use_raw_prompt cannot be honoured: the model's own server makes the prompt",
            field="nvext.use_raw_prompt",
        )
    for name in _SAME:
        if extension.get(name) is not None:
            body[name] = extension[name]
    if extension.get("greedy_sampling") or extension.get("greed_sampling"):
        for name in _SAMPLING:
            body.pop(name, None)
        body["temperature"] = 0
