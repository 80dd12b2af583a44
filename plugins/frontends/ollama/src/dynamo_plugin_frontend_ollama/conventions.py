"""The shared conventions of Ollama's routes: body parsing, model names, and error bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from dynamo_core import DynamoError, Principal, Problem
from dynamo_generation.answers.render import encode
from dynamo_generation.bodies.reading import Body, read_body
from dynamo_generation.endpoints.endpoint import Exchange, ModelEndpoint, ParsedT
from dynamo_http import error_response

from dynamo_plugin_frontend_ollama.schemas import OllamaError

if TYPE_CHECKING:
    from dynamo_core import ServedModel

_LATEST = ":latest"


class Wording(ModelEndpoint[ParsedT]):
    """A route of Ollama's API."""

    ERROR = OllamaError

    async def read(self, http: web.Request) -> Body:
        """Return the body, of whatever content type."""
        return await body_of(http)

    def find(self, name: object, principal: Principal) -> ServedModel | DynamoError:
        """Return the model that a body names, with the tag that every model has or without it."""
        found = super().find(name, principal)
        if isinstance(found, DynamoError) and isinstance(name, str):
            other = super().find(other_name(name), principal)
            return found if isinstance(other, DynamoError) else other
        return found

    def not_found(self, name: str, served: str) -> str:
        """Return what is said of a model that is not there."""
        return missing(name)

    def respond_error(self, problem: Problem) -> web.Response:
        """Return an error as an answer of its own."""
        return respond_error(problem)

    def last_event(self, exchange: Exchange, problem: Problem, error: Exception) -> bytes:
        """Return the line that ends a stream which broke."""
        return error_body(problem) + b"\n"


async def body_of(http: web.Request) -> Body:
    """Return the body of a request.

    Programs, `curl` among them, send any content type; pages of other sites must not.
    """
    return await read_body(http, typed="Origin" in http.headers)


def other_name(name: str) -> str:
    """Return the same name with the tag ``latest``, or without it."""
    return name.removesuffix(_LATEST) if name.endswith(_LATEST) else name + _LATEST


def missing(name: str) -> str:
    """Return what is said of a model that is not there."""
    return f"model '{name}' not found"


class _Body(msgspec.Struct):
    error: str


def error_body(problem: Problem) -> bytes:
    """Return ``{"error": message}``. The message names the field: there is no key."""
    message = problem.message
    if problem.param is not None and problem.param not in message:
        message = f"{problem.param}: {message}"
    try:
        return encode(_Body(message))
    except UnicodeEncodeError:
        # Half a surrogate pair, quoted from a client's body.
        return encode(_Body(message.encode("utf-8", "replace").decode()))


def respond_error(problem: Problem) -> web.Response:
    """Return an error as an answer of its own."""
    return error_response(problem, error_body(problem))
