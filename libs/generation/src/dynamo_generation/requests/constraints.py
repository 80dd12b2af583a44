"""Constraints on the text of an answer, sent to engines as guided decoding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import msgspec
from dynamo_core import GuidedDecodingOptions
from dynamo_core.errors import InvalidArgument
from dynamo_core.protocol import Unreadable

from dynamo_generation.bodies.decode import object_of, schema_error
from dynamo_generation.bodies.limits import MAX_CHARACTERS, MAX_ENTRIES

TEXT, JSON_OBJECT, JSON_SCHEMA = "text", "json_object", "json_schema"

#: The fields that say how engines are to do it, and mean nothing without one that says what.
MANNERS = ("guided_decoding_backend", "guided_whitespace_pattern")

_ANY_OBJECT = {"type": "object"}


class NamedSchema(msgspec.Struct, kw_only=True):
    """A JSON Schema with a name; `strict` is accepted, and engines are always strict."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The way of the OpenAI API to say it."""

    type: str
    json_schema: NamedSchema | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Guided decoding in vLLM's form. Exactly one of the first six is given."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None


class ConstraintFields(msgspec.Struct, kw_only=True, dict=True):
    """The fields of a request that say what the answer must look like. At most one may, beside the two of `MANNERS`."""

    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    structured_outputs: StructuredOutputs | None = None

    @cached_property
    def constraint(self) -> tuple[str, GuidedDecodingOptions] | None:
        """The field that says what the answer must look like, and what it says; None if the answer is free.

        Raises:
            InvalidArgument: naming the field.
        """
        found = list(_found(self))
        if len(found) > 1:
            one, other = found[0][0], found[1][0]
            raise _invalid(f"`{one}` and `{other}` both say what the answer must look like; give one of them", other)
        if not found:
            for name in MANNERS:
                if getattr(self, name) is not None:
                    raise _invalid(f"{name} needs a field that says what the answer must look like", name)
            return None
        name, options = found[0]
        if self.guided_decoding_backend is not None:
            options.backend = self.guided_decoding_backend
        if self.guided_whitespace_pattern is not None:
            options.whitespace_pattern = self.guided_whitespace_pattern
        return name, options


def _found(request: ConstraintFields) -> Iterator[tuple[str, GuidedDecodingOptions]]:
    """Yield every field that says something."""
    if request.response_format is not None:
        options = _of_format(request.response_format)
        if options is not None:
            yield "response_format", options
    if request.guided_json is not None:
        yield "guided_json", GuidedDecodingOptions(json=_schema(request.guided_json, "guided_json"))
    if request.guided_regex is not None:
        yield "guided_regex", GuidedDecodingOptions(regex=_filled(request.guided_regex, "guided_regex"))
    if request.guided_choice is not None:
        yield "guided_choice", GuidedDecodingOptions(choice=_choice(request.guided_choice, "guided_choice"))
    if request.guided_grammar is not None:
        yield "guided_grammar", GuidedDecodingOptions(grammar=_filled(request.guided_grammar, "guided_grammar"))
    if request.structured_outputs is not None:
        yield "structured_outputs", _of_structured(request.structured_outputs)


def _of_format(wanted: ResponseFormat) -> GuidedDecodingOptions | None:
    match wanted.type:
        case "text":
            return None
        case "json_object":
            return GuidedDecodingOptions(json=_ANY_OBJECT)
        case "json_schema":
            return GuidedDecodingOptions(json=_of_schema(wanted.json_schema))
        case kind:
            raise schema_error(
                f"unknown type {kind!r}, expected `{TEXT}`, `{JSON_OBJECT}` or `{JSON_SCHEMA}`"
                " - at `$.response_format.type`"
            )


def _of_schema(named: NamedSchema | None) -> dict[str, Any] | bool:
    field = "response_format.json_schema"
    if named is None:
        raise _invalid("A response_format of type 'json_schema' has no json_schema", field)
    if not named.name:
        raise _invalid("The name of response_format.json_schema cannot be empty", f"{field}.name")
    if named.schema is None:
        raise _invalid("response_format.json_schema has no schema", f"{field}.schema")
    if named.schema is False:
        raise _invalid("The schema of response_format.json_schema allows nothing", f"{field}.schema")
    return named.schema


def _of_structured(wanted: StructuredOutputs) -> GuidedDecodingOptions:
    field = "structured_outputs"
    given = [
        name for name in ("json", "regex", "choice", "grammar", "structural_tag") if getattr(wanted, name) is not None
    ]
    if wanted.json_object:
        given.append("json_object")
    if len(given) != 1:
        known = "json, regex, choice, grammar, json_object and structural_tag"
        raise _invalid(f"Exactly one of {known} must be given in structured_outputs, not {len(given)}", field)
    options = GuidedDecodingOptions(whitespace_pattern=wanted.whitespace_pattern)
    match given[0]:
        case "json":
            options.json = _schema(wanted.json, f"{field}.json")
        case "json_object":
            options.json = _ANY_OBJECT
        case "regex":
            options.regex = _filled(wanted.regex, f"{field}.regex")
        case "choice":
            options.choice = _choice(wanted.choice, f"{field}.choice")
        case "grammar":
            options.grammar = _filled(wanted.grammar, f"{field}.grammar")
        case _:
            options.structural_tag = wanted.structural_tag
    return options


def _schema(value: str | dict[str, Any] | None, field: str) -> dict[str, Any]:
    """Return a JSON Schema, which may be given as text."""
    if isinstance(value, dict):
        return value
    try:
        return object_of(value or "")
    except Unreadable as error:
        raise _invalid(f"{field} is not a JSON Schema: {error}", field) from error


def _filled(value: str | None, field: str) -> str:
    if not value:
        raise _invalid(f"{field} cannot be empty", field)
    most = MAX_CHARACTERS["guided_" + field.rpartition(".")[2].removeprefix("guided_")]
    if len(value) > most:
        raise _invalid(f"{field} must have at most {most} characters, got {len(value)}", field)
    return value


def _choice(value: list[str] | None, field: str) -> list[str]:
    if not value or not all(value):
        raise _invalid(f"{field} needs at least one answer, and none may be empty", field)
    if len(value) > MAX_ENTRIES["guided_choice"]:
        raise _invalid(f"{field} must have at most {MAX_ENTRIES['guided_choice']} entries, got {len(value)}", field)
    return value


def _invalid(message: str, field: str) -> InvalidArgument:
    return InvalidArgument(f"Validation: {message}", field=field)
