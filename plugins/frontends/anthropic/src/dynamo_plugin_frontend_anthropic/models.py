"""``GET /v1/models``: the lists of models, for clients of the Anthropic API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from dynamo_core import DynamoError, HttpRoute
from dynamo_core.errors import ModelNotFound
from dynamo_core.protocol import truncated
from dynamo_generation.answers.render import encode
from dynamo_generation.endpoints.openapi import Operation
from dynamo_generation.requests.generation_request import invalid
from dynamo_http import principal_of

from dynamo_plugin_frontend_anthropic.endpoint import respond_error
from dynamo_plugin_frontend_anthropic.schemas import MessagesError, ServedModelInfo, ServedModels

if TYPE_CHECKING:
    from dynamo_core import FrontendServices, ServedModel

#: The header that every client of the API sends.
VERSION = "anthropic-version"
#: Models of a page, if nothing is said and at most.
_USUAL, _MOST = 20, 1000
#: The release time of a model where none is known.
_UNKNOWN = "1970-01-01T00:00:00Z"


class ModelLists:
    """The routes that list the served models."""

    def __init__(self, services: FrontendServices) -> None:
        self._services = services

    def operations(self, path: str) -> Iterable[Operation]:
        """Return the routes."""
        yield _operation(path, partial(self._answer, self._page), "All models", ServedModels)
        yield _operation(f"{path}/{{id:.+}}", partial(self._answer, self._one), "One model", ServedModelInfo)

    async def _answer(
        self, make: Callable[[web.Request, Sequence[ServedModelInfo]], msgspec.Struct], http: web.Request
    ) -> web.Response:
        """Answer, and word errors: the listener would word those of a shared path as the other API does."""
        principal = principal_of(http)
        models = [_info(model) for model in self._services.models.list() if principal.allows(model.name)]
        try:
            return web.Response(body=encode(make(http, models)), content_type="application/json")
        except DynamoError as error:
            return respond_error(self._services.problem_of(error))

    def _page(self, http: web.Request, models: Sequence[ServedModelInfo]) -> ServedModels:
        query = http.query
        text = query.get("limit", str(_USUAL))
        if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= _MOST):
            raise invalid(f"limit is not a number from 1 to {_MOST}", "limit")
        limit = int(text)
        names = [model.id for model in models]
        first, last = 0, len(models)
        if "after_id" in query:
            first = _place(names, query["after_id"], "after_id") + 1
        if "before_id" in query:
            last = _place(names, query["before_id"], "before_id")
            first = max(first, last - limit)
        page = list(models[first:last][:limit])
        more = first > 0 if "before_id" in query else first + len(page) < last
        return ServedModels(page, more, page[0].id if page else None, page[-1].id if page else None)

    def _one(self, http: web.Request, models: Sequence[ServedModelInfo]) -> ServedModelInfo:
        name = http.match_info["id"]
        for model in models:
            if model.id == name:
                return model
        raise ModelNotFound(f"Model not found: '{truncated(name)}'")


def _operation(
    path: str, handler: Callable[[web.Request], Awaitable[web.Response]], summary: str, answer: type[msgspec.Struct]
) -> Operation:
    route = HttpRoute("GET", path, handler, summary, respond_error=respond_error, header=VERSION)
    return Operation(route, answer=answer, error=MessagesError)


def _info(model: ServedModel) -> ServedModelInfo:
    return ServedModelInfo(model.name, model.name, _UNKNOWN, model.card.context_length)


def _place(names: Sequence[str], name: str, field: str) -> int:
    if name not in names:
        raise invalid(f"There is no model '{truncated(name)}'", field)
    return names.index(name)
