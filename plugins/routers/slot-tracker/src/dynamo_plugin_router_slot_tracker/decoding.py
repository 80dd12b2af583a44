"""Decoding of the body of a call into a value or an error."""

from __future__ import annotations

import re
from typing import Generic, TypeVar

import msgspec
from aiohttp import web
from dynamo_core.protocol import UNREADABLE

from dynamo_plugin_router_slot_tracker.errors import Malformed, Refusal, WrongContentType, WrongSchema
from dynamo_plugin_router_slot_tracker.json_positions import end_of, position
from dynamo_plugin_router_slot_tracker.strict_json import StrictFields

BodyT = TypeVar("BodyT", bound=msgspec.Struct)

_SYNTAX = "Failed to parse the request body as JSON: "
_SCHEMA = "Failed to deserialize the JSON body into the target type: "

_at_byte = re.compile(r"^JSON is malformed: (.*) \(byte (\d+)\)$")
_AT_PATH = " - at `$"
_steps = re.compile(r"\.([A-Za-z_]+)|\[(\d+)\]")


class BodyOf(Generic[BodyT]):
    """Reads bodies of one type."""

    def __init__(self, type: type[BodyT]) -> None:
        self._decoder = msgspec.json.Decoder(type)
        self._strict = StrictFields(type.__struct_encode_fields__)

    async def read(self, http: web.Request) -> BodyT:
        """Return the body of a call.

        Raises:
            Refusal: it is no JSON, says that it is something else, or is not what is expected.
        """
        content_type = http.headers.get("Content-Type", "")
        if content_type != "application/json" and not _is_json(content_type):
            raise WrongContentType("Expected request with `Content-Type: application/json`")
        body = await http.read()
        try:
            value = self._decoder.decode(body)
            fault = self._strict.fault(body)
        except UNREADABLE as error:
            raise _refusal(body, error) from error
        if fault is not None:
            raise _wrong(body, *fault)
        return value


def _is_json(content_type: str) -> bool:
    name = content_type.partition(";")[0].strip().lower()
    return name == "application/json" or (name.startswith("application/") and name.endswith("+json"))


def _refusal(body: bytes, error: Exception) -> Refusal:
    if not isinstance(error, msgspec.ValidationError):
        return _syntax(body, error)
    text = str(error)
    path: list[str | int] = []
    what, at, steps = text.rpartition(_AT_PATH)
    if at and steps.endswith("`"):
        text = what
        path = [name or int(index) for name, index in _steps.findall(steps)]
    elif own := re.match(r"([a-z_]+): ", text):
        # A check of ours names the field itself.
        text = text[own.end() :]
        path = [own[1]]
    text = text.replace("Object missing required field", "missing field").replace("Expected", "expected")
    where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
    return _wrong(body, f"{where}: {text}" if where else text, path)


def _wrong(body: bytes, text: str, path: list[str | int]) -> WrongSchema:
    return WrongSchema(f"{_SCHEMA}{text} at {position(body, end_of(body, path))}")


def _syntax(body: bytes, error: Exception) -> Refusal:
    if isinstance(error, RecursionError):
        return Malformed(f"{_SYNTAX}recursion limit exceeded")
    if isinstance(error, UnicodeDecodeError):
        return Malformed(f"{_SYNTAX}the text is not UTF-8")
    if found := _at_byte.match(str(error)):
        return Malformed(f"{_SYNTAX}{found[1]} at {position(body, int(found[2]) + 1)}")
    return Malformed(f"{_SYNTAX}unexpected end of the text at {position(body, len(body))}")
