"""``POST /route/explain``: explain where a prompt would go. For operators; nothing is reserved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from dynamo_core import HttpRoute, ListenerName
from dynamo_core.errors import ModelNotFound
from dynamo_core.protocol import format_instance_id, truncated
from dynamo_generation.bodies.reading import read_body
from dynamo_generation.endpoints.conversation import ChatDependencies
from dynamo_generation.prompts.preprocess import to_engine
from dynamo_generation.requests.end_user import SESSION, USER, with_end_user
from dynamo_generation.requests.generation_request import invalid
from dynamo_http import principal_of

from dynamo_plugin_frontend_openai.chat import ParsedChatCompletion
from dynamo_plugin_frontend_openai.completions import ParsedCompletion

if TYPE_CHECKING:
    from dynamo_core import FrontendServices, PreprocessedRequest, ServedModel
    from dynamo_generation.endpoints.parsed_request import ParsedRequest

PATH = "/route/explain"

#: What a body may give as the prompt.
_PROMPTS = ("prompt", "messages", "token_ids")


class RouteExplanations:
    """The route. A body is that of a chat or a completion; `token_ids` may stand for a prompt of tokens."""

    def __init__(self, services: FrontendServices, chats: ChatDependencies) -> None:
        self._models = services.models
        self._chats = chats

    def routes(self) -> Iterable[HttpRoute]:
        """Return the route, which is on the operators' listener."""
        return [HttpRoute("POST", PATH, self.post, "Where a prompt would go, and why", ListenerName.ADMIN)]

    async def post(self, http: web.Request) -> web.Response:
        """Return overlap, load and cost of every rank, by the role of its worker."""
        body = await read_body(http)
        model = self._find(body.raw.get("model"))
        # A large body may have as many parts as would hold the event loop.
        parsed = await body.run(self._parse, body.raw, model)
        request = await _request(parsed, model)
        views = model.explain(request, with_end_user(principal_of(http), body.raw, USER, SESSION))
        routes = msgspec.to_builtins(views)
        for rank in (rank for route in routes for rank in route["ranks"]):
            rank["instance_id"] = format_instance_id(rank["instance_id"])
        told = {"model": model.name, "routes": routes}
        return web.Response(body=msgspec.json.encode(told), content_type="application/json")

    def _find(self, name: object) -> ServedModel:
        """Return the model that is named; without a name the only one."""
        if name is None:
            served = self._models.list()
            if len(served) == 1:
                return served[0]
            if served:
                raise invalid("Several models are served: name one", "model")
        try:
            return self._models.get(name if isinstance(name, str) else "")
        except ModelNotFound as error:
            raise ModelNotFound(f"Model not found: '{truncated(str(name))}'", cause=error) from error

    def _parse(self, raw: dict[str, Any], model: ServedModel) -> ParsedRequest:
        """Return the checked body.

        Raises:
            InvalidArgument: naming the field.
        """
        if sum(raw.get(name) is not None for name in _PROMPTS) != 1:
            raise invalid("Exactly one of prompt, messages and token_ids must be given", "prompt")
        body = {"model": model.name, **{name: value for name, value in raw.items() if name != "token_ids"}}
        parsed: ParsedRequest
        if raw.get("messages") is not None:
            parsed = ParsedChatCompletion(body, self._chats)
        else:
            if raw.get("token_ids") is not None:
                body["prompt"] = _token_ids(raw["token_ids"])
            parsed = ParsedCompletion(body)
        parsed.check_for_tokens()
        return parsed


async def _request(parsed: ParsedRequest, model: ServedModel) -> PreprocessedRequest:
    """Return what an engine would be asked.

    Raises:
        InvalidArgument: naming the field.
    """
    prompts = await parsed.prompts(model)
    if len(prompts) != 1:
        raise invalid("Only one prompt can be explained at a time", "prompt")
    return to_engine(parsed.request, prompts[0], model)


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise invalid("token_ids must be a list of integers", "token_ids")
    return value
