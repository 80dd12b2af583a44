"""Conversion of plain-text values to JSON by a tool's schema."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

#: The JSON types of a value. None: the schema does not say.
Types = frozenset[str]

STRING: Types = frozenset({"string"})
#: The pseudo type of a value that is JSON of any type where it can be, and else a string.
ANY_JSON: Types = frozenset({"json"})

_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
#: A string, or the rest of the text where it has no end: it always matches, so that nothing is gone through twice.
_PYTHON_STRING = re.compile(r"'(?:[^'\\]+|\\.?)*'?|\"(?:[^\"\\]+|\\.?)*\"?", re.DOTALL)
_BOOLEANS = {"true": "true", "1": "true", "false": "false", "0": "false"}
_NULLS = frozenset({"null", "none"})
#: The longest text that can be a null, with white space around it.
LONGEST_NULL = 8
#: How many references and alternatives a schema may be nested in.
_DEPTH = 16
#: The longest integer and number that is converted.
_DIGITS = 400
_LITERALS = {"true": True, "false": False, "null": None}
_TYPES_OF = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


class ParameterTypes:
    """The types of the parameters of tools, which are given in the form of the OpenAI API."""

    def __init__(self, tools: Sequence[Mapping[str, Any]], name: str) -> None:
        self._root: Mapping[str, Any] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and function.get("name") == name:
                parameters = function.get("parameters")
                self._root = parameters if isinstance(parameters, Mapping) else {}
                break

    def declares(self, parameter: str) -> bool:
        """Return whether the schema names a parameter."""
        return parameter in self._properties()

    def of(self, parameter: str) -> Types | None:
        """Return the types of a parameter; None if the schema does not say."""
        schema = self._properties().get(parameter, self._root.get("additionalProperties"))
        return self._types(schema, _DEPTH) or None

    def _properties(self) -> Mapping[str, Any]:
        properties = self._root.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def _types(self, schema: Any, depth: int) -> Types:
        if not isinstance(schema, Mapping) or not depth:
            return frozenset()
        found = set(_named(schema.get("type")))
        if not found and isinstance(schema.get("$ref"), str):
            found |= self._types(self._target(schema["$ref"]), depth - 1)
        for key in () if found else ("anyOf", "oneOf", "allOf"):
            choices = schema.get(key)
            for choice in choices if isinstance(choices, list) else ():
                found |= self._types(choice, depth - 1)
        if not found:
            allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
            found = {_TYPES_OF.get(type(value), "null") for value in allowed} if isinstance(allowed, list) else set()
        if not found and ("properties" in schema or "items" in schema):
            found = {"object" if "properties" in schema else "array"}
        if found and schema.get("nullable") is True:
            found.add("null")
        return frozenset(found)

    def _target(self, reference: str) -> Any:
        """Return what a reference inside the schema of the tool stands for."""
        found: Any = self._root if reference.startswith("#") else None
        for part in reference.removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, Mapping) else None
        return found


def json_of(text: str, types: Types) -> str:
    """Return the JSON of a value that was written as plain text. A text that fits none of the types is a string.

    A text that fits several types is the first of null, integer, number, boolean, object and array.
    """
    bare = text.strip()
    if "null" in types and len(text) <= LONGEST_NULL and bare.lower() in _NULLS:
        return "null"
    for kind, number in (("integer", _integer), ("number", _number)):
        if kind in types and len(bare) <= _DIGITS and (found := number(bare)) is not None:
            return found
    if "boolean" in types and bare.lower() in _BOOLEANS:
        return _BOOLEANS[bare.lower()]
    if types & {"object", "array", "json"}:
        begins = {"object": "{", "array": "["}
        allowed = tuple(begins[kind] for kind in types & begins.keys())
        if "json" in types or bare.startswith(allowed or ("{", "[")):
            found = bare if _is_json(bare) else None
            if found is None and bare.startswith(("{", "[")):
                found = json_of_literal(python_expression(bare))
            if found is not None:
                return found
    return string(text)


def string(text: str) -> str:
    """Return a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def python_expression(text: str) -> ast.expr | None:
    """Return the expression in Python that a text is; None if it is none, or has a comment, which would be lost."""
    if "#" in text and "#" in _PYTHON_STRING.sub("", text):
        return None
    try:
        with warnings.catch_warnings():
            # Strings of models have escapes that Python does not know, and warns of.
            warnings.simplefilter("ignore")
            return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def json_of_literal(node: ast.expr | None) -> str | None:
    """Return the JSON of a literal in Python; None if it is none, or one that JSON cannot say."""
    try:
        found = json.dumps(_literal(node), ensure_ascii=False, allow_nan=False)
        found.encode()
    except (ValueError, RecursionError):
        return None
    return found


def _literal(node: ast.expr | None) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str()):
            return node.value
        case ast.Name(id=name) if name in _LITERALS:
            # Models mix the languages up.
            return _LITERALS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys):
                raise ValueError("the key of a JSON object is a text")
            found = {_literal(key): _literal(value) for key, value in zip(keys, values, strict=True)}
            if len(found) == len(keys):
                return found
            raise ValueError("an object has each key once")
    raise ValueError("not a literal")


def _named(kinds: Any) -> Sequence[str]:
    if isinstance(kinds, str):
        return [kinds]
    return [kind for kind in kinds if isinstance(kind, str)] if isinstance(kinds, list) else []


def _integer(text: str) -> str | None:
    if _INTEGER.fullmatch(text):
        return str(int(text))
    number = _number(text)
    # A whole number is an integer, however it is written.
    return str(int(float(number))) if number is not None and float(number).is_integer() else None


def _number(text: str) -> str | None:
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    return text if _NUMBER.fullmatch(text) else json.dumps(value)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
