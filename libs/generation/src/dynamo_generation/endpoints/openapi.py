"""``GET /openapi.json`` and ``GET /docs``: the description of the API, made from the types that check requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import msgspec
from aiohttp import web
from dynamo_core import HttpRoute, ListenerName

from dynamo_generation.answers.framing import EVENTS
from dynamo_generation.endpoints.error_schema import ErrorBody
from dynamo_generation.requests.fields import Accepts, has_no_effect, schema_of

_DISTRIBUTION = "dynamo-generation"
_REFERENCE = "#/components/schemas/{name}"
_VARIABLE = re.compile(r"\{(\w+)\}")
_JSON = "application/json"
_HTML = "text/html"

_ABOUT = (
    "What the routes accept. Schemas are those that requests are read with; ranges and what belongs together is "
    "checked beyond them. A field that is not listed is refused."
)
_NO_EFFECT = "Accepted without effect."
_NO_WISH = "Accepted only with values that ask for nothing, unless the engine takes text and gets the field as it is."


@dataclass(frozen=True, slots=True)
class Operation:
    """A route and the type of its body: its fields, and those that are accepted only with neutral values."""

    route: HttpRoute
    body: type[msgspec.Struct] | None = None
    passive: Mapping[str, Accepts] = field(default_factory=dict)
    #: A whole answer; None if it is told by `content_type` only.
    answer: type[msgspec.Struct] | None = None
    content_type: str = _JSON
    #: Whether there can be a stream instead, and of which content type.
    streams: bool = False
    stream_type: str = EVENTS.content_type
    error: type[msgspec.Struct] = ErrorBody
    #: The same answer may come with this status too.
    also: int | None = None
    #: Whether more is known of it than method, path and summary.
    told: bool = True


class Description:
    """Serves the description of every route of a listener, itself and those of core among them."""

    def __init__(
        self,
        openapi_path: str,
        docs_path: str,
        operations: Sequence[Operation],
        routes: Callable[[ListenerName], Sequence[HttpRoute]],
    ) -> None:
        """`operations` grows until the listeners open; of other `routes` only method, path and summary are told."""
        self._operations = operations
        self._openapi_path = openapi_path
        self._docs_path = docs_path
        self._routes = routes
        self._made: dict[ListenerName, bytes] = {}

    def own(self) -> Sequence[Operation]:
        """Return the operations of the description itself."""
        public, admin = (
            HttpRoute("GET", self._openapi_path, partial(self._openapi, name), "This API, as OpenAPI 3.1", name)
            for name in ListenerName
        )
        return (
            Operation(public),
            Operation(HttpRoute("GET", self._docs_path, self.docs, "This API, as a page"), content_type=_HTML),
            Operation(admin),
        )

    async def _openapi(self, name: ListenerName, http: web.Request) -> web.Response:
        """Return the description as JSON."""
        if name not in self._made:
            self._made[name] = msgspec.json.encode(openapi_of(self._described(name)))
        return web.Response(body=self._made[name], content_type=_JSON)

    def _described(self, name: ListenerName) -> list[Operation]:
        # Of several forms of a route the first is described.
        known = {(one.route.method, one.route.path): one for one in reversed(self._operations)}
        routes = self._routes(name) or [one.route for one in self._operations if one.route.listener is name]
        return [known.get((route.method, route.path)) or Operation(route, told=False) for route in routes]

    async def docs(self, http: web.Request) -> web.Response:
        """Return a page that shows the description. Everything it needs is in it, or comes from this server."""
        page = files(__package__).joinpath("docs.html").read_text("utf-8")
        return web.Response(text=page.replace("{{openapi}}", self._openapi_path), content_type=_HTML)


def openapi_of(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the description of these operations, OpenAPI 3.1."""
    types = dict.fromkeys(
        type_
        for operation in operations
        for type_ in (operation.body, operation.answer, operation.error)
        if type_ is not None
    )
    references, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    schemas = dict(zip(types, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        route = operation.route
        if operation.body is not None:
            _close(components[schemas[operation.body]["$ref"].rpartition("/")[2]], operation.passive)
        paths.setdefault(route.display_path, {})[route.method.lower()] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "dynamo-core", "version": version(_DISTRIBUTION), "description": _ABOUT},
        "paths": paths,
        "components": {"schemas": components},
    }


def _close(schema: dict[str, Any], passive: Mapping[str, Accepts]) -> None:
    """Add the fields that may only ask for nothing; there are no others."""
    properties = schema["properties"]
    for name, accepts in passive.items():
        note = {"description": _NO_EFFECT if has_no_effect(accepts) else _NO_WISH}
        # A field may be read, and have no effect but for engines that take text.
        properties[name] = {**properties.get(name, {}), **schema_of(accepts), **note}
    schema["additionalProperties"] = False


def _operation(operation: Operation, schemas: Mapping[type[msgspec.Struct], dict[str, Any]]) -> dict[str, Any]:
    route = operation.route
    whole = {} if operation.answer is None else {"schema": schemas[operation.answer]}
    content: dict[str, dict[str, Any]] = {operation.content_type: whole}
    if operation.streams:
        content[operation.stream_type] = {}
    answer = {"description": "The answer.", "content": content}
    error = {
        "description": "An error; the message says what is wrong.",
        "content": {_JSON: {"schema": schemas[operation.error]}},
    }
    responses: dict[str, dict[str, Any]] = {"200": answer, "default": error}
    if not operation.told:
        responses = {"default": {"description": "The answer."}}
    if operation.also is not None:
        responses[str(operation.also)] = answer
    told: dict[str, Any] = {"summary": route.summary, "responses": responses}
    names = [match[1] for match in _VARIABLE.finditer(route.display_path)]
    if names:
        told["parameters"] = [
            {
                "name": name,
                "in": "path",
                "required": True,
                "schema": {"type": "string"},
                "description": "May contain slashes.",
            }
            for name in names
        ]
    if operation.body is not None:
        told["requestBody"] = {"required": True, "content": {_JSON: {"schema": schemas[operation.body]}}}
    elif route.method == "POST":
        told["requestBody"] = {"required": True, "content": {_JSON: {"schema": {"type": "object"}}}}
    return told
