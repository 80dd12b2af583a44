"""The lists of models."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web
from dynamo_core import EMBED, RERANK, SCORE
from dynamo_core.errors import ModelNotFound, Unavailable
from dynamo_core.protocol import CHAT, COMPLETIONS, truncated
from dynamo_generation.answers.render import encode
from dynamo_http import principal_of

if TYPE_CHECKING:
    from dynamo_core import ModelDirectory, ServedModel


class ModelLists:
    """The routes that list the served models."""

    def __init__(self, models: ModelDirectory, owner: str | None = None) -> None:
        """`owner` is whose all models are; without it each belongs to the namespace of its workers."""
        self._models = models
        self._owner = owner

    def _list(self, http: web.Request) -> list[ServedModel]:
        """Return the models that the caller may know of."""
        principal = principal_of(http)
        return [model for model in self._models.list() if principal.allows(model.name)]

    def _entry(self, model: ServedModel, created: int) -> dict[str, Any]:
        owner = self._owner or model.card.namespace
        return {"id": model.name, "object": "model", "created": created, "owned_by": owner}

    async def openai(self, http: web.Request) -> web.Response:
        """Return all models in the form of the OpenAI API."""
        created = int(time.time())
        return _json({"object": "list", "data": [self._entry(model, created) for model in self._list(http)]})

    async def one(self, http: web.Request) -> web.Response:
        """Return one model in the form of the OpenAI API. Its name may hold slashes."""
        name = http.match_info["id"]
        for model in self._list(http):
            if model.name == name:
                return _json(self._entry(model, int(time.time())))
        raise ModelNotFound(f"Model not found: '{truncated(name)}'")

    async def ready(self, http: web.Request) -> web.Response:
        """Return whether a model can be asked now: 200 or 503, and if not, what is missing."""
        name = http.match_info["id"]
        try:
            # What a key is not for is as good as not there.
            model = self._models.get(name if principal_of(http).allows(name) else "")
        except ModelNotFound as error:
            raise ModelNotFound(f"Model not found: '{truncated(name)}'") from error
        except Unavailable as error:
            return _json(_readiness(name, error.message, self._models.missing_roles(name)), ready=False)
        missing = model.missing_roles
        reason = f"model {name!r} has no {' and no '.join(missing)} worker now" if missing else None
        return _json(_readiness(name, reason, missing), ready=not missing)

    async def extended(self, http: web.Request) -> web.Response:
        """Return all models by what they can be asked for, and what is public about each."""
        models = self._list(http)
        return _json(
            {
                "chat_completion_models": [model.name for model in models if CHAT in model.card.model_types],
                "completion_models": [model.name for model in models if COMPLETIONS in model.card.model_types],
                # The rest is a matter of what the engine can do, whatever its card says of request types.
                "embedding_models": [model.name for model in models if EMBED in model.card.capabilities],
                "score_models": [model.name for model in models if SCORE in model.card.capabilities],
                "rerank_models": [model.name for model in models if RERANK in model.card.capabilities],
                "models": [_facts(model) for model in models],
            }
        )


def _facts(model: ServedModel) -> dict[str, Any]:
    card = model.card
    return {
        "name": model.name,
        "ready": not model.missing_roles,
        "missing_worker_types": list(model.missing_roles),
        "instances": model.instance_count,
        "model_types": card.model_types,
        "model_input": card.model_input,
        "context_length": card.context_length,
        "kv_cache_block_size": card.kv_cache_block_size,
        "migration_limit": card.migration_limit,
        "capabilities": card.capabilities,
        "tokenizer": card.tokenizer,
        "tool_call_parser": card.runtime_config.tool_call_parser,
        "tool_call_parser_reason": card.runtime_config.tool_call_parser_reason,
        "reasoning_parser": card.runtime_config.reasoning_parser,
        "reasoning_parser_reason": card.runtime_config.reasoning_parser_reason,
    }


def _readiness(name: str, reason: str | None, missing: Sequence[str]) -> dict[str, Any]:
    return {"model": name, "ready": reason is None, "reason": reason, "missing_worker_types": list(missing)}


def _json(value: dict[str, Any], *, ready: bool = True) -> web.Response:
    return web.Response(status=200 if ready else 503, body=encode(value), content_type="application/json")
