"""From the bytes of a request to a checked object."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from dynamo_core.errors import InvalidArgument

from dynamo_plugin_frontend_openai.errors import HttpFault

T = TypeVar("T", bound=msgspec.Struct)

_PREFIX = "Failed to deserialize the JSON body into the target type: "
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")


async def read_object(http: web.Request) -> dict[str, Any]:
    """The body of a request as a JSON object.

    Raises:
        HttpFault: another content type.
        aiohttp.web.HTTPRequestEntityTooLarge: larger than the listener allows, which words the answer.
        InvalidArgument: not a JSON object.
    """
    kind = http.content_type
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HttpFault(415, "Expected request with Content-Type application/json")
    body = await http.read()
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{_PREFIX}{error}") from error
    except RecursionError as error:
        raise InvalidArgument(f"{_PREFIX}it is nested too deeply") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{_PREFIX}Expected `object`")
    return value


def to_struct(raw: dict[str, Any], cls: type[T]) -> T:
    """The known fields of an object, with their types checked.

    Raises:
        InvalidArgument: a field is missing or of another type; `field` is its path.
    """
    try:
        return msgspec.convert(raw, cls)
    except msgspec.ValidationError as error:
        raise schema_error(str(error)) from error


def schema_error(text: str) -> InvalidArgument:
    """The error for a body of the wrong shape. A path at the end of `text` becomes the error's field."""
    match = _PATH.search(text)
    return InvalidArgument(f"{_PREFIX}{text}", field=match.group(1) or None if match else None)
