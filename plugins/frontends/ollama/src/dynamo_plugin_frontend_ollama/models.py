"""The model routes of Ollama's API, and refusals of the routes that would change models."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from aiohttp import web
from dynamo_core import EMBED
from dynamo_core.errors import ModelNotFound, NotSupported
from dynamo_core.protocol import CHAT, COMPLETIONS, Unreadable, truncated
from dynamo_generation.answers.render import encode
from dynamo_generation.bodies.decode import object_of
from dynamo_generation.requests.generation_request import invalid
from dynamo_http import principal_of

from dynamo_plugin_frontend_ollama.conventions import body_of, missing, other_name
from dynamo_plugin_frontend_ollama.render import moment
from dynamo_plugin_frontend_ollama.requests import EMBED_PASSIVE, OllamaShowRequest, parse

if TYPE_CHECKING:
    from dynamo_core import ModelDirectory, ServedModel

#: The version of Ollama that has this API. Clients compare it with the first that has what they need.
VERSION = "0.13.0"
#: What the keys of facts begin with where a model does not say what it is.
_UNKNOWN = "dynamo"
#: Models stay until their workers go.
_FOREVER = "2318-01-01T00:00:00Z"


class Models:
    """The routes that list and show models."""

    def __init__(self, models: ModelDirectory) -> None:
        self._models = models
        self._since = moment(time.time())

    def _list(self, http: web.Request) -> list[ServedModel]:
        """Return the models that the caller may know of."""
        principal = principal_of(http)
        return [model for model in self._models.list() if principal.allows(model.name)]

    async def tags(self, http: web.Request) -> web.Response:
        """Return all models."""
        return _json({"models": [{**_entry(model), "modified_at": self._since} for model in self._list(http)]})

    async def running(self, http: web.Request) -> web.Response:
        """Return the models that can be asked now."""
        ready = [model for model in self._list(http) if not model.missing_roles]
        more = {"expires_at": _FOREVER, "size_vram": 0}
        return _json(
            {"models": [{**_entry(each), **more, "context_length": each.card.context_length or 0} for each in ready]}
        )

    async def show(self, http: web.Request) -> web.Response:
        """Return what is known of one model."""
        request, _ = parse((await body_of(http)).raw, OllamaShowRequest, EMBED_PASSIVE, ignore=True)
        name = request.model or request.name
        if not name:
            raise invalid("model is required", "model")
        known = {model.name: model for model in self._list(http)}
        model = known.get(name) or known.get(other_name(name))
        if model is None:
            raise ModelNotFound(missing(truncated(name)))
        template = model.file("chat_template.jinja") or b""
        return _json(
            {
                "modified_at": self._since,
                "modelfile": "",
                "parameters": "",
                "template": template.decode(errors="replace"),
                "details": _details(model),
                "model_info": _facts(model),
                "capabilities": _capabilities(model),
            }
        )

    async def version(self, http: web.Request) -> web.Response:
        """Return the version of Ollama that this is like."""
        return _json({"version": VERSION})

    async def alive(self, http: web.Request) -> web.Response:
        """Return what clients look for, to see that a server is there."""
        return web.Response(text="Ollama is running")

    async def refuse(self, http: web.Request) -> web.Response:
        """Refuse what would change models."""
        raise NotSupported(
            "Models are served by the workers of the config: they are not pulled, pushed, made, copied or deleted here"
        )


def _entry(model: ServedModel) -> dict[str, Any]:
    details = _details(model)
    return {"name": model.name, "model": model.name, "size": 0, "digest": model.card.checksum, "details": details}


def _details(model: ServedModel) -> dict[str, Any]:
    family = _family(model)
    return {
        "parent_model": "",
        "format": "",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _family(model: ServedModel) -> str:
    """Return what its folder says it is; empty if it says nothing."""
    try:
        family = object_of(model.file("config.json") or b"{}").get("model_type")
    except Unreadable:
        return ""
    return family if isinstance(family, str) else ""


def _facts(model: ServedModel) -> dict[str, Any]:
    kind = _family(model) or _UNKNOWN
    facts: dict[str, Any] = {"general.architecture": kind, "general.basename": model.name}
    if model.card.context_length is not None:
        facts[f"{kind}.context_length"] = model.card.context_length
    return facts


def _capabilities(model: ServedModel) -> list[str]:
    card = model.card
    runtime, parsers = card.runtime_config, model.parsers
    found = {
        "completion": CHAT in card.model_types or COMPLETIONS in card.model_types,
        "tools": parsers.tools is not None or runtime.tool_call_parser is not None,
        "thinking": parsers.reasoning is not None or runtime.reasoning_parser is not None,
        "embedding": EMBED in card.capabilities,
    }
    return [name for name, has in found.items() if has]


def _json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=encode(value), content_type="application/json")
