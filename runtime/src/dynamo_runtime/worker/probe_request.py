"""The request of the canary, and its origin."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from dynamo_core.contracts.model_folder import GENERATION_CONFIG, MODEL_CONFIG
from dynamo_core.protocol.decoding import UNREADABLE, read_json, truncated
from dynamo_core.protocol.records import CHAT, ModelCard
from dynamo_core.protocol.request import PreprocessedRequest

log = logging.getLogger(__name__)

#: Marks a request as a probe, on the wire and in payloads.
MARKER = "_HEALTH_CHECK"

#: The token of a probe for a model whose files do not say with which one a text begins.
_ANY_TOKEN = 1
_PROMPT = "ping"


async def probe_request(
    configured: Mapping[str, Any] | str | None,
    offered: object,
    *,
    card: ModelCard,
    files: Mapping[str, bytes],
) -> PreprocessedRequest | None:
    """Return the request to probe with: `configured`, else the one `offered`, else one token after one token.

    A text is JSON, or ``@`` and the name of a file with JSON in it. None if it cannot be used, which the log tells.
    """
    payload: object = configured
    source = "health_check.payload"
    if payload is None:
        source, payload = "the engine's health_check_payload", offered
    if payload is None:
        source, payload = "the default payload", _default(card, files)
    try:
        if isinstance(payload, str):
            payload = read_json(await _text(payload))
        if not isinstance(payload, Mapping):
            raise ValueError("it is not an object")
        request = msgspec.convert({"model": card.name, "token_ids": [], **payload, MARKER: True}, PreprocessedRequest)
    except (OSError, *UNREADABLE) as error:
        log.warning("no health checks of %s: %s cannot be used: %s", card.name, source, truncated(str(error)))
        return None
    return request


async def _text(payload: str) -> str:
    if not payload.startswith("@"):
        return payload
    return await asyncio.to_thread(Path(payload[1:]).read_text, encoding="utf-8")


def _default(card: ModelCard, files: Mapping[str, bytes]) -> dict[str, Any]:
    payload: dict[str, Any] = {
        "token_ids": [_first_token(files)],
        "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
    }
    if card.model_input == "text":
        ask: dict[str, Any] = {"messages": [{"role": "user", "content": _PROMPT}]}
        if CHAT not in card.model_types:
            ask = {"prompt": _PROMPT}
        payload["body"] = {"model": card.name, "max_tokens": 1, "temperature": 0, **ask}
    return payload


def _first_token(files: Mapping[str, bytes]) -> int:
    """Return the id of the token with which a text begins, as the model's files have it."""
    for name in (MODEL_CONFIG, GENERATION_CONFIG):
        try:
            found = read_json(files[name])["bos_token_id"]
        except (KeyError, TypeError, ValueError):
            continue
        if type(found) is int:
            return found
    return _ANY_TOKEN
